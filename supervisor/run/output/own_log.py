"""The log file that a program writes by itself, as its profile names it: read where the program
prints nothing about its training."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import msgspec

from memtop.supervisor.run.output.tail import Tail

_LOOK_SECONDS = 2.0
"""How often to look for a newer file."""


class OwnLogPosition(msgspec.Struct, kw_only=True):
    """What `output.json` keeps of it."""

    before: dict[str, int] = {}
    """By path: how long the files were that existed when the attempt began. Their lines are of
    earlier ones."""
    path: str | None = None
    offset: int = 0


class OwnLog:
    """The log of one attempt. `known`: what an earlier supervisor has read; None for a new
    attempt."""

    def __init__(self, pattern: str, known: OwnLogPosition | None) -> None:
        self.position = known or OwnLogPosition(before={path: _size(path) for path in _files(pattern)})
        self._pattern = pattern
        self._tail: Tail | None = None
        self._due = 0.0

    @property
    def path(self) -> str | None:
        return self.position.path

    def read(self, now: float, *, all_lines: bool, to_the_end: bool) -> list[str]:
        """The next lines; see `Tail.read`. Raises OSError."""
        if to_the_end or now >= self._due:
            self._due = now + _LOOK_SECONDS
            self._find()
        if self._tail is None:
            return []
        lines = self._tail.read(all_lines=all_lines, to_the_end=to_the_end)
        self.position.offset = self._tail.offset
        return lines

    def _find(self) -> None:
        """Follow the newest file that this attempt has written."""
        position = self.position
        written = [path for path in _files(self._pattern) if _size(path) > position.before.get(path, 0)]
        newest = max(written, key=_time, default=None)
        if newest is None or (newest == position.path and self._tail is not None):
            return
        if newest != position.path:
            position.path, position.offset = newest, position.before.get(newest, 0)
        self._tail = Tail(Path(newest), position.offset)


def _files(pattern: str) -> list[str]:
    return glob.glob(pattern)  # noqa: PTH207 - it is absolute


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - of a text
    except OSError:
        return 0


def _time(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - of a text
    except OSError:
        return 0
