"""The history screen: the machine and the run over time."""
