"""Programs that a profile describes: which profile fits, what their settings are, and how a restart
changes them. Nothing here acts on a run."""
