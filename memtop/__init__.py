"""memtop: a terminal dashboard and training supervisor for language models on too small
machines.
"""

__version__ = "0.1.0"
