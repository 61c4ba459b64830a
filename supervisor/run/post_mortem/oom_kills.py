"""The kernel's OOM kills: how many in some cgroups and when, and what the kernel's log says."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from memtop.supervisor.monitor.cgroup import KillCount, kills_in

RELATED_SECONDS = 60.0
"""A kill this many seconds before the end of a program may have caused it: torchrun gives the other
ranks 30 s, and a large process needs some time to end."""
_MOST_RISES = 64


class KillWatch:
    """Reads the counters repeatedly. Times are in seconds since the epoch."""

    def __init__(self) -> None:
        self._chains: dict[str, tuple[KillCount, ...]] = {}
        """By path, each group and those above it, as they were last read."""
        self._grown: dict[str, int] = {}
        self._read: dict[str, float | None] = {}
        self._rises: dict[str, deque[tuple[float | None, float]]] = {}
        """When its counter increased: between the first moment (None: not read before) and the
        second."""
        self._silent: set[str] = set()
        """Groups that could not be read last time."""
        # The sampling and the post-mortem may read at the same time, in different threads.
        self._lock = threading.Lock()

    def follow(self, path: str, counts: tuple[KillCount, ...], since: float | None) -> None:
        """Count in this group, starting from these counters.

        `since`: when they were read, None if unknown.
        """
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
        """The most kills in one of these groups so far.

        None if there was none and no group can be read any more.
        """
        with self._lock:
            known = [path for path in paths if self._grown.get(path) or (path in self._chains and path not in self._silent)]
            return max((self._grown[path] for path in known), default=None)

    def near(self, paths: Collection[str], end: float) -> bool | None:
        """Whether a kill happened in one of these groups shortly before `end`.

        None if the time is unknown.
        """
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
    """By how much the counter of a group has increased.

    If the group does not exist any more (a scope ends with its program), the group above it is
    used, if it includes its kills.
    """
    for before in chain:
        now = _kills(before)
        if now is not None:
            return max(0, now - before.kills)
        if before.version == 1:
            return None
    return None


def _renewed(chain: tuple[KillCount, ...]) -> tuple[KillCount, ...]:
    """The present counters. Groups that do not exist any more are left out."""
    now = ((before, _kills(before)) for before in chain)
    return tuple(KillCount(path=before.path, version=before.version, kills=kills) for before, kills in now if kills is not None)


def _kills(count: KillCount) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return kills_in(Path(count.path), count.version)
    return None


_WANTED = re.compile(r"oom-kill|oom_kill|out of memory|killed process|memory cgroup", re.IGNORECASE)
_MOST_LINES = 64
# A margin, because two clocks are compared.
_MARGIN_SECONDS = 1.0


def kernel_lines(since: float, until: float, now: float, path: str = "/dev/kmsg") -> tuple[str, ...]:
    """The lines about OOM kills between two moments (seconds since the epoch).

    Empty if this user may not read the log.

    `now` is the present time of the same clock.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    found: deque[str] = deque(maxlen=_MOST_LINES)
    booted = now - time.monotonic()
    try:
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue  # overwritten before it was read
            except OSError:
                break  # no more lines: the next read would block
            if not record:
                break
            head, _, text = record.decode(errors="replace").partition(";")
            stamp = head.split(",")[2:3]
            if not stamp or not stamp[0].isdigit() or not _WANTED.search(text):
                continue
            if since - _MARGIN_SECONDS <= booted + int(stamp[0]) / 1e6 <= until + _MARGIN_SECONDS:
                found.append(text.splitlines()[0])
    finally:
        os.close(descriptor)
    return tuple(found)
