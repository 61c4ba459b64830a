"""Training programs that memtop did not start: found in /proc, and only read."""
