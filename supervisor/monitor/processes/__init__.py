"""Processes: read from /proc, described, grouped into jobs, and signalled.

`proc` reads one process, `table` reads all of them. `facts` describes a process, `roles` and `jobs`
group processes, `watch` adds both to the GPU samples. `signals` sends signals to exactly one
process.
"""
