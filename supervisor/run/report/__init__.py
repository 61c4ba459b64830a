"""A run as a document to keep and to share: one HTML page that opens offline, and Markdown."""
