"""Standard output on a disk that may be full: training goes on without the lines that it cannot take."""

from __future__ import annotations

import io
import sys
from typing import Any

from memtop.train.errors import NO_ROOM


class _Passing(io.FileIO):
    """What does not fit is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return len(data)


def outlive_a_full_disk() -> None:
    """From now on `print` raises nothing where the disk behind standard output has no room. Each line is written at once."""
    before = sys.stdout
    before.flush()
    # As `python -u` has it: text straight onto the file.
    raw: Any = _Passing(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors, write_through=True)
