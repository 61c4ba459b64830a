"""The rules of a run: functions from values to values, one file for each matter."""
