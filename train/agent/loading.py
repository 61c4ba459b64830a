"""How long a program that knows nothing of memtop waits for its data: the time inside torch's data loaders."""

from __future__ import annotations

import functools
import threading
import time
from types import ModuleType
from typing import Any, Callable

TARGET = "torch.utils.data.dataloader"
# What all of torch's loader iterators have in common; private, so it may be gone one day: then nothing is told.
_ITERATOR = "_BaseDataLoaderIter"


class LoaderWatch:
    """Adds up the seconds that the program's main thread spends in `next(...)` of a data loader."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._inside = False

    def taken(self) -> float | None:
        """Seconds since the last call; None for a program that has asked no loader of torch's for a batch yet."""
        seconds = self._seconds
        if seconds is not None:
            self._seconds = 0.0
        return seconds

    def hook(self, module: ModuleType) -> None:
        """Follow the loaders of that module."""
        iterator = getattr(module, _ITERATOR, None)
        following = getattr(iterator, "__next__", None)
        if iterator is not None and following is not None:
            iterator.__next__ = self._timed(following)

    def _timed(self, following: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(following)
        def timed(iterator: Any) -> Any:
            # A thread that fetches ahead makes nobody wait; a loader inside a loader's own work is counted once.
            if self._inside or threading.current_thread() is not threading.main_thread():
                return following(iterator)
            self._inside, started = True, time.monotonic()
            try:
                return following(iterator)
            finally:
                self._inside = False
                self._seconds = (self._seconds or 0.0) + time.monotonic() - started

        return timed
