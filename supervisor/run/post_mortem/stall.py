"""Detects a program that ran out of memory and hangs.

For example, other ranks wait for a rank that has died, or a trainer waits for a loader worker whose
batch did not fit into /dev/shm.
"""

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
"""How many seconds without reports count as hanging after such a message, and before the first
update, which takes longer."""
_UPDATES, _PAUSES = 5.0, 3.0
"""Programs with long updates get the time of this many updates, or this many times their longest
pause so far."""
ASIDE_SECONDS = 600.0
"""An evaluation or a save may take this long without a report. For external commands it is unknown
when they do this."""
MOST_SECONDS = 3600.0


class StallWatch:
    """Reads the new output of one attempt, and the end of what an earlier supervisor has read.

    Do not use it for a program that is being stopped."""

    def __init__(self, log: Path, monotonic: Callable[[], float]) -> None:
        self._log = log
        self._monotonic = monotonic
        self._offset = max(0, _size(log) - _TAIL_BYTES)
        self._heard = -1
        self._since: float | None = None
        self._words = ""

    def look(self, heard: int, update_seconds: float | None, *, longest_pause: float = 0.0, aside: bool = False) -> str | None:
        """The message after which nothing more was reported for too long, else None.

        `heard`: number of reports so far. `update_seconds`: duration of the newest update, None
        before the first. `longest_pause`: the longest time between two reports so far. `aside`: the
        program may be evaluating or saving.
        """
        before, words = self._offset, self._new_words()
        if words is not None:
            self._since, self._words, self._heard = self._monotonic(), words, heard
        elif self._since is not None and self._offset != before:
            self._since = self._monotonic()  # the program still writes output
        if words is None and heard != self._heard:
            # The program continues, so it has handled the error.
            self._since, self._heard = None, heard
        # Silence of a program that never reports anything means nothing.
        if self._since is None or not heard:
            return None
        patience = _patience(update_seconds, longest_pause, aside=aside)
        return self._words if self._monotonic() - self._since > patience else None

    def is_of_memory(self) -> bool:
        """Whether the end of the output really is about a lack of memory.

        If not, the message is ignored.
        """
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            found = diagnose([file.read()])
        if found.of_memory and found.confidence >= SURE:
            return True
        self._since = None
        return False

    def _new_words(self) -> str | None:
        """The newest line with such a message in the new output (only in the end of it, if there is
        very much)."""
        try:
            with self._log.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self._offset, end - _BLOCK_BYTES))
                block = file.read(_BLOCK_BYTES)
        except OSError:
            return None  # there is there is no output yet
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
