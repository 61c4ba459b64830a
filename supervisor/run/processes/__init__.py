"""The processes of a run: starts, signals and measures them."""
