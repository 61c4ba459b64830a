"""The programs of a run: launching, signalling and measuring them."""
