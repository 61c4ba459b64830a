"""Processes: read from /proc, described, grouped into jobs, and signalled.

`proc` reads one process, `table` reads all of them. `facts` describes a process, `jobs` groups
processes, `signals` sends signals to exactly one process.
"""
