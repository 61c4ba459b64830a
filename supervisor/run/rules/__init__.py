"""The rules of a run: pure functions, one file for each subject."""
