"""Finds programs that use torch and that memtop did not start, with the processes of each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from memtop.supervisor.monitor.processes.facts import JOB_VARIABLES
from memtop.supervisor.monitor.processes.jobs import Grouping, JobDraft, Program, read_program
from memtop.supervisor.monitor.processes.proc import (
    ATTEMPT_VARIABLE,
    PROC,
    RUN_VARIABLE,
    ProcessId,
    ProcessStat,
    command_words,
    environment,
    has_loaded_torch,
    own_family,
    read_stat,
    whole_number,
)
from memtop.supervisor.monitor.processes.table import all_pids, children_of, descendants

_LEAST_BYTES = 64 << 20
"""A process that has loaded torch holds more. Smaller ones need not be looked at."""
_LEAST_GROWTH = 16 << 20
"""By which a process grows when it loads torch."""
Guise = tuple[ProcessId, str, int, int]


class Programs:
    """One look at all processes that this user can see. `before`: the look before this one; what
    cannot have changed since is not read again."""

    def __init__(self, proc_root: Path = PROC, before: Programs | None = None) -> None:
        self._root = proc_root
        self._known = {} if before is None else before._read
        self._known_torch = {} if before is None else before._torch
        self.rows: dict[int, ProcessStat] = {
            pid: row for pid in all_pids(proc_root) if (row := read_stat(pid, proc_root)) is not None and not row.is_dead
        }
        self._read: dict[Guise, Program] = {}
        self._torch: dict[Guise, tuple[bool, int]] = {}
        """Whether a process uses torch, and how large it was when that was read."""

    @cached_property
    def of_others(self) -> list[JobDraft]:
        """The programs that use torch, outside of memtop's runs. The oldest first."""
        family = own_family(proc_root=self._root)
        large = [pid for pid, row in self.rows.items() if row.rss_bytes >= _LEAST_BYTES and pid not in family]
        found = {pid for pid in large if self._uses_torch(pid) and not self._is_memtops(pid)}
        drafts = self._drafts(frozenset(pid for pid in found if not self._is_helper(pid, found)))
        return sorted(drafts, key=lambda draft: self.rows[draft.leader].identity.started_ticks)

    def with_process(self, pid: int) -> JobDraft | None:
        """The program that this process belongs to, or that it has started, whether it uses torch
        or not. None for one of memtop's own runs, or if there is no such process.
        """
        if pid not in self.rows or self._is_memtops(pid):
            return None
        below = {pid, *descendants(pid, children_of(self.rows))}
        for draft in self.of_others:
            if pid in draft.pids or draft.leader in below:
                return draft
        return next(iter(self._drafts(frozenset((pid,)))), None)

    @property
    def tees(self) -> list[int]:
        return [pid for pid, row in self.rows.items() if row.comm == "tee"]

    def _drafts(self, pids: frozenset[int]) -> list[JobDraft]:
        return [draft for draft in Grouping(self.rows, pids, self._program).drafts() if draft.run is None]

    def _uses_torch(self, pid: int) -> bool:
        row = self.rows[pid]
        found = self._known_torch.get(row.guise)
        if found is None or (not found[0] and row.rss_bytes >= found[1] + _LEAST_GROWTH):
            found = has_loaded_torch(pid, self._root), row.rss_bytes
        self._torch[row.guise] = found
        return found[0]

    def _is_memtops(self, pid: int) -> bool:
        program = self._program(pid)
        return program.run is not None or "memtop.supervisor" in program.words

    def _is_helper(self, pid: int, found: set[int]) -> bool:
        """Whether a program that uses torch has forked it: a loader worker."""
        row = self.rows[pid]
        if row.parent_pid not in found:
            return False
        return row.comm == "pt_data_worker" or self._program(pid).words == self._program(row.parent_pid).words

    def _program(self, pid: int) -> Program:
        guise = self.rows[pid].guise
        known = self._read.get(guise) or self._known.get(guise)
        if known is None:
            variables: Mapping[str, str] = environment(pid, self._root) or {}
            folder = variables.get(RUN_VARIABLE)
            run = (folder, whole_number(variables.get(ATTEMPT_VARIABLE))) if folder else None
            kept = {name: variables[name] for name in JOB_VARIABLES if variables.get(name)}
            known = read_program(command_words(pid, self._root) or (), self.rows[pid].comm, kept, run)
        self._read[guise] = known
        return known
