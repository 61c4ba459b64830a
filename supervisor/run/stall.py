"""Notices a program that ran out of memory and neither goes on nor ends: a rank that died leaves the others waiting for it, and
a loader worker whose batch did not fit into /dev/shm lives on while its trainer waits for the batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from memtop.supervisor.diagnosis.engine import diagnose
from memtop.supervisor.recovery.policy import SURE

_WORDS = re.compile(
    rb"out of memory|OutOfMemoryError|MemoryError|allocate memory|allocate shared memory|insufficient shared memory"
    rb"|No space left on device|Bus error",
    re.IGNORECASE,
)
_BLOCK_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
SECONDS, FIRST_SECONDS = 30.0, 60.0
"""How long nothing may be heard after such words, and before the first update, which takes longer than the others."""
_UPDATES = 5.0
"""Programs with long updates are given the time of so many."""


class StallWatch:
    """Reads the new output of one attempt. Not to be called for a program that is being stopped."""

    def __init__(self, log: Path, monotonic: Callable[[], float]) -> None:
        self._log = log
        self._monotonic = monotonic
        self._offset = _size(log)
        self._heard = -1
        self._since: float | None = None
        self._words = ""

    def look(self, heard: int, update_seconds: float | None) -> str | None:
        """The words after which nothing more came for too long, else None. `heard`: how many reports the program has made;
        `update_seconds`: of its newest update, None before the first."""
        before, words = self._offset, self._new_words()
        if words is not None:
            self._since, self._words, self._heard = self._monotonic(), words, heard
        elif self._since is not None and self._offset != before:
            self._since = self._monotonic()  # it still says something
        if words is None and heard != self._heard:
            # It goes on: whatever it was, it got over it.
            self._since, self._heard = None, heard
        # Of a program that never reports anything its silence says nothing.
        if self._since is None or not heard:
            return None
        patience = FIRST_SECONDS if update_seconds is None else max(SECONDS, _UPDATES * update_seconds)
        return self._words if self._monotonic() - self._since > patience else None

    def is_of_memory(self) -> bool:
        """Whether the end of the output, read as a whole, tells of a lack of memory, and not only mentions it.

        Where it does not, the words are forgotten.
        """
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            found = diagnose([file.read()])
        if found.of_memory and found.confidence >= SURE:
            return True
        self._since = None
        return False

    def _new_words(self) -> str | None:
        """The newest line with such words in what was written since the last look (of very much only the end)."""
        try:
            with self._log.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self._offset, end - _BLOCK_BYTES))
                block = file.read(_BLOCK_BYTES)
        except OSError:
            return None  # no output yet
        self._offset = end
        lines = [line for line in block.splitlines() if _WORDS.search(line)]
        return lines[-1].decode(errors="replace").strip()[:300] if lines else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
