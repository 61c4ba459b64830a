"""The dashboard's tests: drawing as text, the form's judgement, and every key against a feed that records requests."""
