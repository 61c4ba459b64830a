"""Standard output on a disk that may be full: training goes on without the lines that it cannot take."""

from __future__ import annotations

import io
import sys
from typing import Any

from memtop.train.errors import NO_ROOM


class _Passing(io.FileIO):
    """What does not fit is lost; the line after one that was cut stands alone again."""

    _cut = False

    def write(self, data: Any) -> int:
        text = b"\n" + data if self._cut else bytes(data)
        try:
            written = super().write(text)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        else:
            self._cut = written < len(text)
        return len(data)


def outlive_a_full_disk() -> None:
    """From now on `print` raises nothing where the disk behind standard output has no room. Each line is written at once."""
    before = sys.stdout
    before.flush()
    # As `python -u` has it: text straight onto the file.
    raw: Any = _Passing(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors, write_through=True)
