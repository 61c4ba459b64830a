"""The metrics screen: curves of one run, or of several laid over each other."""
