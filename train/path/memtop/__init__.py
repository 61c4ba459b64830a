"""memtop for another Python: its modules alone, without the packages that are installed beside it.

The folder `path` is on the PYTHONPATH of a Python that trains and is not memtop's own. It contains
only this package, whose modules are those of the folder `memtop` that contains `train`.
"""

from pathlib import Path

# Not resolved: in the source folder, memtop/train is a link.
__path__ = [str(Path(__file__).parents[3])]
