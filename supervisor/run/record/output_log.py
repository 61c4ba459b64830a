"""Bounds the log of a program: it keeps its beginning and its end.

The program appends to the file itself, so memtop is never between the program and its output. The
supervisor removes the middle of the file, as `holes.py` explains.
"""

from __future__ import annotations

from pathlib import Path

from memtop.supervisor import holes, units

HEAD_BYTES, TAIL_BYTES = 16 << 20, 64 << 20
STEP_BYTES = 16 << 20
"""How much a log grows until it is shortened again."""
_MARKER = (
    f"\n[memtop removed the output from here on, to save disk space: a log keeps its first {HEAD_BYTES >> 20} MiB"
    f" and its last {TAIL_BYTES >> 20} MiB]\n"
).encode()


class OutputLog:
    """The log of one attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trimmed = 0
        self._can_trim = True

    def trim(self) -> str | None:
        """Remove the middle of a log that has become too long.

        Returns what is missing or why it cannot be removed, in one line; None if the log is whole.
        """
        try:
            size = self._path.stat().st_size
            if size > max(HEAD_BYTES + TAIL_BYTES, self._trimmed) + STEP_BYTES and self._can_trim:
                self._can_trim = holes.remove(self._path, HEAD_BYTES, size - TAIL_BYTES, _MARKER)
                self._trimmed = size
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{self._path}: it has become long and cannot be shortened: {error.strerror}"
        if not self._can_trim:
            return f"{self._path}: {units.size(size)}, and this file system cannot shorten it while the program runs"
        if not self._trimmed:
            return None
        removed = units.size(self._trimmed - HEAD_BYTES - TAIL_BYTES)
        return f"to save disk space, memtop removed {removed} from the middle of {self._path}; search it with grep -a"
