"""GPU processes: the list, one process in full, and ending them."""
