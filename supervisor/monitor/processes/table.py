"""The process table, read as seldom as its users allow; and how busy each process was between two looks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from memtop.supervisor.monitor.processes.proc import PAGE_BYTES, PROC, TICKS_PER_SECOND, ProcessId, Row, read_row

_TURNS = 5
"""A process that nobody asked for is read again at every fifth look: reading all of them is what would cost."""


class ProcessTable:
    """All processes that are to be seen, by pid. New ones and those that matter are read at every look."""

    def __init__(self, proc_root: Path = PROC) -> None:
        self._root = str(proc_root)
        self._rows: dict[int, Row] = {}
        self._turn = 0

    def look(self, wanted: Collection[int]) -> Mapping[int, Row]:
        """The table now. The rows of `wanted` are fresh; others may be a few looks old, but were all there a moment ago."""
        self._turn = (self._turn + 1) % _TURNS
        rows: dict[int, Row] = {}
        for name in os.listdir(self._root):  # noqa: PTH208 - names alone, a hot path
            if not name.isdecimal():
                continue
            pid = int(name)
            row = self._rows.get(pid)
            if row is None or pid in wanted or pid % _TURNS == self._turn:
                row = read_row(pid, self._root)
            if row is not None:
                rows[pid] = row
        self._rows = rows
        return rows

    def again(self, wanted: Collection[int]) -> Mapping[int, Row]:
        """The table of the last look, with the rows of `wanted` read anew: between two walks."""
        rows = dict(self._rows)
        for pid in wanted:
            row = read_row(pid, self._root)
            if row is not None:
                rows[pid] = row
            else:
                rows.pop(pid, None)
        self._rows = rows
        return rows


def children_of(rows: Mapping[int, Row]) -> dict[int, list[int]]:
    """The children of every process that has some, in order of their start."""
    found: dict[int, list[int]] = {}
    for pid, row in rows.items():
        found.setdefault(row.parent_pid, []).append(pid)
    for children in found.values():
        children.sort(key=lambda pid: (rows[pid].identity.started_ticks, pid))
    return found


def descendants(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    """All below a process, parents before their children."""
    found = list(children.get(pid, ()))
    seen = {pid, *found}
    for child in found:
        # A table that is read row by row may hold a circle: never follow it twice.
        more = [one for one in children.get(child, ()) if one not in seen]
        seen.update(more)
        found += more
    return found


class CpuMeter:
    """How many cores' worth of time processes took between two looks."""

    FIRST_LOOK = "a share of the CPU needs two looks"

    def __init__(self) -> None:
        self._last: dict[ProcessId, tuple[float, int]] = {}

    def update(self, rows: Iterable[Row], now: float) -> Mapping[ProcessId, float]:
        """Fractions of one core by process, without those that are seen for the first time. `now` in monotonic seconds."""
        last: dict[ProcessId, tuple[float, int]] = {}
        before, fractions = self._last, {}
        for row in rows:
            known = before.get(row.identity)
            if known is not None and now > known[0]:
                fractions[row.identity] = max(0, row.cpu_ticks - known[1]) / TICKS_PER_SECOND / (now - known[0])
            last[row.identity] = (now, row.cpu_ticks)
        self._last = last
        return fractions


def resident_bytes(pids: Iterable[int], proc_root: Path | str = PROC) -> int | None:
    """Resident bytes of these processes together: what is private of each, and the largest shared part once, so that
    libraries and data-loader batches in shared memory are not counted once per process. None where none can be read."""
    private = shared = 0
    found = False
    for pid in pids:
        try:
            descriptor = os.open(f"{proc_root}/{pid}/statm", os.O_RDONLY)
        except OSError:
            continue  # it has ended, or is hidden from this user
        try:
            pages = os.read(descriptor, 128).split()
        except OSError:
            continue
        finally:
            os.close(descriptor)
        found = True
        private += int(pages[1]) - int(pages[2])
        shared = max(shared, int(pages[2]))
    return (private + shared) * PAGE_BYTES if found else None
