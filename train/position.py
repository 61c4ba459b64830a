"""Writes another whole number into a file of torch.save.

    python position.py FILE KEY NUMBER      # KEY: `step`, or `trainer.step`

Started by the supervisor with the Python of the user's program, which has torch: so it uses torch
and the standard library only, and works with Python 3.8. The file is memtop's own copy.
"""

import os
import sys
from pathlib import Path


def main(path: str, key: str, number: str) -> None:
    """Raises what is wrong; the supervisor shows the last line."""
    import torch

    try:
        # Mapped into memory: a checkpoint may be larger than what is free.
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (TypeError, RuntimeError):  # torch before 2.1, or a file of an older format
        values = torch.load(path, map_location="cpu", weights_only=True)
    inside = values
    *levels, last = key.split(".")
    for level in levels:
        inside = inside[level]
    if not isinstance(inside[last], int):
        raise SystemExit(f"{key} is {type(inside[last])!r}, not a whole number")
    inside[last] = int(number)
    new = path + ".new"
    torch.save(values, new)
    with Path(new).open("rb") as file:
        os.fsync(file.fileno())
    Path(new).replace(path)


if __name__ == "__main__":
    # The folder of this file has modules whose names torch's dependencies could take for others.
    del sys.path[0]
    main(*sys.argv[1:])
