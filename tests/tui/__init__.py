"""Tests of the dashboard: drawn text, the checks of forms, and every key with a feed that records
requests."""
