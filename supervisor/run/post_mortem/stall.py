"""Notices a program that ran out of memory and neither goes on nor ends: a rank that died leaves the others waiting for it, and
a loader worker whose batch did not fit into /dev/shm lives on while its trainer waits for the batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from memtop.supervisor.diagnosis.diagnose import diagnose
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
_UPDATES, _PAUSES = 5.0, 3.0
"""Programs with long updates are given the time of so many, and of so many times their longest pause so far."""
ASIDE_SECONDS = 600.0
"""Beside updates: an evaluation or a save may take so long without a word. Of a program of the user's own nobody knows when it
does such things."""
MOST_SECONDS = 3600.0


class StallWatch:
    """Reads the output of one attempt: what is new, and of what an earlier supervisor has left behind the end. Not to be called
    for a program that is being stopped."""

    def __init__(self, log: Path, monotonic: Callable[[], float]) -> None:
        self._log = log
        self._monotonic = monotonic
        self._offset = max(0, _size(log) - _TAIL_BYTES)
        self._heard = -1
        self._since: float | None = None
        self._words = ""

    def look(self, heard: int, update_seconds: float | None, *, longest_pause: float = 0.0, aside: bool = False) -> str | None:
        """The words after which nothing more came for too long, else None. `heard`: how many reports the program has made;
        `update_seconds`: of its newest update, None before the first; `longest_pause`: seconds that it was silent before and
        went on; `aside`: it may be at something else than an update."""
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
        patience = _patience(update_seconds, longest_pause, aside=aside)
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


def _patience(update_seconds: float | None, longest_pause: float, *, aside: bool) -> float:
    if update_seconds is None:
        return FIRST_SECONDS
    own_pace = max(_UPDATES * update_seconds, min(_PAUSES * longest_pause, MOST_SECONDS))
    return max(ASIDE_SECONDS if aside else SECONDS, own_pace)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
