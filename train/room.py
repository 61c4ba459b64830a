"""When the state at the end of training does not fit on the disk: when to try again, and when to say that it is waited for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from memtop.train.checkpoint import NoSpaceError

ROUND_SECONDS = 1.0
"""How often all ranks ask each other what to do: far less than the time after which a process group gives up."""
_AGAIN_SECONDS = 3.0
# The disk said that there was room, and yet it could not be written: a quota, or no file can be made. Only trying tells.
_HIDDEN_SECONDS = 30.0
_SAY_SECONDS = 60.0


class Room:
    """What the first rank knows of the room for a state; on the others nothing is ever due. `monotonic` gives seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._error: NoSpaceError | None = None
        self._tried = self._said_at = 0.0
        self._said: str | None = None

    def failed(self, error: NoSpaceError) -> None:
        """A save has just failed."""
        self._error, self._tried = error, self._monotonic()

    def due(self, *, at_once: bool = False) -> bool:
        """Whether another try may help now. `at_once`: it is the last one, so that it need not wait its turn."""
        error = self._error
        if error is None or shutil.disk_usage(error.folder).free < error.needed_bytes:
            return False
        since = self._monotonic() - self._tried
        return at_once or since >= (_HIDDEN_SECONDS if error.hidden else _AGAIN_SECONDS)

    def is_news(self, text: str) -> bool:
        """Whether this is to be said: something else than before, and not more often than once a minute."""
        now = self._monotonic()
        if text == self._said or (self._said is not None and now - self._said_at < _SAY_SECONDS):
            return False
        self._said, self._said_at = text, now
        return True
