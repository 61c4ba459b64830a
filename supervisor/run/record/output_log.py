"""Bounds the log of a program: it keeps its beginning and its end. And notes when it grew.

The program appends to the file itself, so memtop is never between the program and its output. The
supervisor removes the middle of the file, as `holes.py` explains.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from pathlib import Path

from memtop.supervisor import holes, units

HEAD_BYTES, TAIL_BYTES = 16 << 20, 64 << 20
STEP_BYTES = 16 << 20
"""How much a log grows until it is shortened again."""
_MARKER = (
    f"\n[memtop removed the output from here on, to save disk space: a log keeps its first {HEAD_BYTES >> 20} MiB"
    f" and its last {TAIL_BYTES >> 20} MiB]\n"
).encode()
_MARK = struct.Struct("<dq")
"""A time, seconds since the epoch, and the size of the log at that time, bytes."""
_MARK_SECONDS = 5.0
"""At least between two marks, apart from those of events."""
_MARKS_KEPT = 40_000
"""With more marks, every second one is removed: 640 KiB at most."""


class OutputLog:
    """The log of one attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trimmed = 0
        self._can_trim = True
        self._marked = 0
        self._marked_at = -_MARK_SECONDS

    def mark(self, now: float, *, at_once: bool = False) -> str | None:
        """Note the size of the log at this time, if it has grown; the log itself has no times.

        `at_once`: also if it was just noted, so that an event at this time stands after the lines
        that it follows. Returns why that cannot be written, in one line.
        """
        since = now - self._marked_at
        if since < 0 if at_once else 0 <= since < _MARK_SECONDS:
            return None
        path = times_path(self._path)
        try:
            size = self._path.stat().st_size
            if size in (self._marked, 0):
                return None
            with path.open("ab") as file:
                whole = file.tell() // _MARK.size
                # A supervisor that was killed while it wrote may have left part of a mark.
                file.truncate(whole * _MARK.size)
                file.write(_MARK.pack(now, size))
            if whole >= _MARKS_KEPT:
                kept = list(_MARK.iter_unpack(path.read_bytes()))[1::2]
                path.write_bytes(b"".join(_MARK.pack(*one) for one in kept))
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{path}: the times of the log's lines cannot be written: {error.strerror}"
        self._marked, self._marked_at = size, now
        return None

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


def times_path(log: Path) -> Path:
    """The file with the times of a log."""
    return log.with_name("output-times")


class OutputTimes:
    """When the lines of a log were written, as far as the supervisor noted it."""

    def __init__(self, log: Path) -> None:
        self._times: list[float] = []
        self._sizes: list[int] = []
        try:
            data = times_path(log).read_bytes()
        except OSError:
            return  # an attempt from before there were times, or one that printed nothing
        for moment, size in _MARK.iter_unpack(data[: len(data) // _MARK.size * _MARK.size]):
            self._times.append(moment)
            self._sizes.append(size)

    def at(self, end: int) -> float | None:
        """The time by which a line that ends at this byte was written, seconds since the epoch;
        None if no later size was noted."""
        place = bisect_left(self._sizes, end)
        return self._times[place] if place < len(self._times) else None

    def size_at(self, moment: float) -> int | None:
        """How many bytes were certainly written at this time, seconds since the epoch; None if no
        time was noted."""
        if not self._times:
            return None
        place = bisect_right(self._times, moment)
        return self._sizes[place - 1] if place else 0
