"""All processes of the machine: the process table, the processes of a run, a process tree, CPU
shares, resident bytes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from memtop.supervisor.monitor.processes.proc import (
    ATTEMPT_VARIABLE,
    PAGE_BYTES,
    PROC,
    RUN_ID_VARIABLE,
    RUN_VARIABLE,
    TICKS_PER_SECOND,
    ProcessId,
    ProcessStat,
    command_words,
    environment,
    full_name,
    read_stat,
    whole_number,
)

_TURNS = 5
"""A process that is not wanted is read at every fifth look, because reading all processes is
expensive."""


def all_pids(proc_root: Path | str = PROC) -> Iterator[int]:
    """The pids of all processes that this user can see."""
    return (int(name) for name in os.listdir(proc_root) if name.isdecimal())  # noqa: PTH208 - names alone, a hot path


class ProcessTable:
    """All processes that this user can see, by pid.

    New and wanted processes are read at every look.
    """

    def __init__(self, proc_root: Path = PROC) -> None:
        self._root = str(proc_root)
        self._rows: dict[int, ProcessStat] = {}
        self._turn = 0

    def look(self, wanted: Collection[int]) -> Mapping[int, ProcessStat]:
        """The present table. The rows of `wanted` are fresh; others may be a few looks old."""
        self._turn = (self._turn + 1) % _TURNS
        rows: dict[int, ProcessStat] = {}
        for pid in all_pids(self._root):
            row = self._rows.get(pid)
            if row is None or pid in wanted or pid % _TURNS == self._turn:
                row = read_stat(pid, self._root)
            if row is not None:
                rows[pid] = row
        self._rows = rows
        return rows

    def again(self, wanted: Collection[int]) -> Mapping[int, ProcessStat]:
        """The table of the last look with only the rows of `wanted` read again."""
        rows = dict(self._rows)
        for pid in wanted:
            row = read_stat(pid, self._root)
            if row is not None:
                rows[pid] = row
            else:
                rows.pop(pid, None)
        self._rows = rows
        return rows


def children_of(rows: Mapping[int, ProcessStat]) -> dict[int, list[int]]:
    """The children of each process that has some, in order of their start."""
    found: dict[int, list[int]] = {}
    for pid, row in rows.items():
        found.setdefault(row.parent_pid, []).append(pid)
    for children in found.values():
        children.sort(key=lambda pid: (rows[pid].identity.started_ticks, pid))
    return found


def descendants(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    """All processes below this one, parents before their children."""
    found = list(children.get(pid, ()))
    seen = {pid, *found}
    for child in found:
        # The table is not read in one instant, so it may contain a circle: follow no process twice.
        more = [one for one in children.get(child, ()) if one not in seen]
        seen.update(more)
        found += more
    return found


class TreeProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the tree that `memtop watch --pid` follows."""

    pid: int
    parent_pid: int
    name: str
    command: str
    rss_bytes: int


def process_tree(pid: int) -> list[TreeProcess] | None:
    """The process and all its living descendants, itself first.

    None if there is no such process.
    """
    rows = {one: row for one in all_pids() if (row := read_stat(one)) is not None}
    if pid not in rows:
        return None
    return [_tree_process(rows[one]) for one in (pid, *descendants(pid, children_of(rows)))]


def _tree_process(row: ProcessStat) -> TreeProcess:
    pid, words = row.identity.pid, command_words(row.identity.pid) or ()
    name = full_name(row.comm, words)
    return TreeProcess(pid=pid, parent_pid=row.parent_pid, name=name, command=" ".join(words) or name, rss_bytes=row.rss_bytes)


def run_processes(run_folder: str, attempt: int | None = None, *, run_id: str | None = None) -> list[ProcessId]:
    """All living processes that were started for this run (or for one attempt of it), in order of
    pid. Without `run_id`, those of every run that has had this folder's path.

    The environment of a process proves it. Processes whose environment this user may not read are
    not found.
    """
    found = []
    for pid in all_pids():
        variables = environment(pid)
        if variables is None or variables.get(RUN_VARIABLE) != run_folder:
            continue
        if run_id is not None and variables.get(RUN_ID_VARIABLE, "") != run_id:
            continue
        if attempt is not None and whole_number(variables.get(ATTEMPT_VARIABLE)) != attempt:
            continue
        row = read_stat(pid)
        if row is not None and not row.is_dead:
            found.append(row.identity)
    return sorted(found)


class CpuMeter:
    """Measures how much CPU time processes used between two looks."""

    FIRST_LOOK = "the CPU share needs two samples"

    def __init__(self) -> None:
        self._last: dict[ProcessId, tuple[float, int]] = {}

    def update(self, rows: Iterable[ProcessStat], now: float) -> Mapping[ProcessId, float]:
        """CPU time as a fraction of one core, by process.

        Processes seen for the first time are left out.

        `now` is monotonic seconds.
        """
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
    """Resident bytes of these processes together. None if none can be read.

    This is the sum of their private pages plus the largest shared part, so that libraries and
    data-loader batches in shared memory are counted only once.
    """
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
