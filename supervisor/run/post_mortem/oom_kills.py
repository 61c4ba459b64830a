"""How often the kernel has killed for lack of memory in some groups, and when."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from memtop.supervisor.monitor.cgroup import KillCount, kills_in

RELATED_SECONDS = 60.0
"""A kill so long before the end of a program may have led to it: torchrun leaves the other ranks 30 s, and a process of many
gigabytes takes its time to go."""
_MOST_RISES = 64


class KillWatch:
    """Reads the counters again and again. Times are in seconds since the epoch."""

    def __init__(self) -> None:
        self._chains: dict[str, tuple[KillCount, ...]] = {}
        """By its path each group: it and those above it, as they were last read."""
        self._grown: dict[str, int] = {}
        self._read: dict[str, float | None] = {}
        self._rises: dict[str, deque[tuple[float | None, float]]] = {}
        """When its counter rose: between the first moment (None: nobody looked before) and the second."""
        self._silent: set[str] = set()
        """Groups that could not be read the last time."""
        # The sampling and the examination of the end may read at the same moment.
        self._lock = threading.Lock()

    def follow(self, path: str, counts: tuple[KillCount, ...], since: float | None) -> None:
        """Count in this group from these counters on; `since`: when they were read, None where that is not known."""
        with self._lock:
            if path not in self._chains:
                self._chains[path], self._grown[path], self._read[path] = counts, 0, since
                self._rises[path] = deque(maxlen=_MOST_RISES)

    def read(self, now: float) -> None:
        with self._lock:
            for path, chain in self._chains.items():
                grown = _since(chain)
                if grown is None:
                    self._silent.add(path)
                    continue
                self._silent.discard(path)
                if grown:
                    self._rises[path].append((self._read[path], now))
                self._grown[path] += grown
                self._chains[path], self._read[path] = _renewed(chain), now

    def count(self, paths: Iterable[str]) -> int | None:
        """The most kills in one of these groups so far; None where none was seen and none of them can be read any more."""
        with self._lock:
            known = [path for path in paths if self._grown.get(path) or (path in self._chains and path not in self._silent)]
            return max((self._grown[path] for path in known), default=None)

    def near(self, paths: Collection[str], end: float) -> bool | None:
        """Whether there was a kill in one of these groups shortly before `end`; None where it is not known when it was."""
        with self._lock:
            rises = [rise for path in paths for rise in self._rises.get(path, ())]
            silent = not paths or any(path in self._silent for path in paths)
        known: bool | None = None if silent else False
        for earliest, latest in rises:
            if latest < end - RELATED_SECONDS or (earliest is not None and earliest > end):
                continue
            if earliest is not None and latest - earliest <= RELATED_SECONDS:
                return True
            known = None
        return known


def _since(chain: tuple[KillCount, ...]) -> int | None:
    """By how much the counter of a group has grown. One that is gone (a scope ends with its program) is answered for by the one
    above it, where the kernel counts there as well."""
    for before in chain:
        now = _kills(before)
        if now is not None:
            return max(0, now - before.kills)
        if before.version == 1:
            return None
    return None


def _renewed(chain: tuple[KillCount, ...]) -> tuple[KillCount, ...]:
    """As the counters are now; groups that are gone are left out."""
    now = ((before, _kills(before)) for before in chain)
    return tuple(KillCount(path=before.path, version=before.version, kills=kills) for before, kills in now if kills is not None)


def _kills(count: KillCount) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return kills_in(Path(count.path), count.version)
    return None
