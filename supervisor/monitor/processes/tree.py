"""The process tree around the GPU processes: their ancestors up to the session's leader, and everything below them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from memtop.supervisor.monitor.processes.facts import full_name
from memtop.supervisor.monitor.processes.proc import PROC, Row, command_words
from memtop.supervisor.monitor.processes.signals import user_name
from memtop.supervisor.monitor.processes.table import CpuMeter, ProcessTable, children_of, descendants
from memtop.supervisor.monitor.values import MachineSnapshot


class TreeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the tree, in the order in which it is drawn. Bytes; CPU as a fraction of one core."""

    pid: int
    parent_pid: int
    depth: int
    """0 for the topmost that is shown."""
    started_ticks: int
    name: str
    command: str | None
    user: str
    rss_bytes: int
    cpu_fraction: float | None
    """None at the first look."""
    gpu_bytes: int | None
    """On all GPUs together; None where it is on none, or where the driver does not tell it."""
    on_gpu: bool = False


class TreeReader:
    """Reads the tree; one per view, since shares of the CPU need two looks. Costs about 10 µs per process of the machine."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, proc_root: Path = PROC) -> None:
        self._monotonic = monotonic
        self._proc_root = proc_root
        self._table = ProcessTable(proc_root)
        self._meter = CpuMeter()
        self._shown: set[int] = set()
        self._words: dict[int, tuple[object, tuple[str, ...]]] = {}

    def read(self, machine: MachineSnapshot) -> tuple[TreeRow, ...]:
        """The tree around the processes of that sample which can be told apart (see GpuProcess.started_ticks)."""
        held = _held(machine)
        rows = self._table.look(self._shown | {pid for pid, _ in held})
        on_gpu = {pid: size for (pid, ticks), size in held.items() if pid in rows and rows[pid].identity.started_ticks == ticks}
        leaders = {pid: job.leader_pid for job in machine.jobs for pid in job.pids}
        ordered = tree_order(rows, frozenset(on_gpu), leaders)
        self._shown = {pid for pid, _ in ordered}
        self._words = {pid: known for pid, known in self._words.items() if pid in self._shown}
        cpu = self._meter.update((rows[pid] for pid in self._shown), self._monotonic())
        return tuple(
            TreeRow(
                pid=pid,
                parent_pid=row.parent_pid,
                depth=depth,
                started_ticks=row.identity.started_ticks,
                name=full_name(row.comm, self._command(row)),
                command=" ".join(self._command(row)) or None,
                user=user_name(row.file_uid),
                rss_bytes=row.rss_bytes,
                cpu_fraction=cpu.get(row.identity),
                gpu_bytes=on_gpu.get(pid),
                on_gpu=pid in on_gpu,
            )
            for pid, depth in ordered
            for row in (rows[pid],)
        )

    def _command(self, row: Row) -> tuple[str, ...]:
        known = self._words.get(row.identity.pid)
        if known is None or known[0] != row.guise:
            known = row.guise, command_words(row.identity.pid, self._proc_root) or ()
            self._words[row.identity.pid] = known
        return known[1]


def _held(machine: MachineSnapshot) -> dict[tuple[int, int], int | None]:
    """GPU memory by identity, over all GPUs; None where the driver does not tell all of it."""
    found: dict[tuple[int, int], int | None] = {}
    for gpu in machine.gpus:
        for row in gpu.processes:
            if row.started_ticks is not None:
                key = (row.pid, row.started_ticks)
                before = found.get(key, 0)
                found[key] = None if before is None or row.used_bytes is None else before + row.used_bytes
    return found


def tree_order(
    rows: Mapping[int, Row], on_gpu: frozenset[int], leaders: Mapping[int, int] | None = None
) -> list[tuple[int, int]]:
    """(pid, depth) of everyone to be shown, parents before their children, in order of start. `leaders` of jobs, by
    process: torchrun gives every rank a session of its own, so it is the launcher's session that is gone up to."""
    children = children_of(rows)
    shown: set[int] = set()
    for pid in on_gpu:
        shown.update((pid, *descendants(pid, children)))
        current, path = pid, {pid}
        leader = rows.get((leaders or {}).get(pid, pid)) or rows[pid]
        # The session's leader is the terminal's shell or the run's program: what is above it is the same for everyone.
        while current != leader.session and rows[current].parent_pid > 1 and rows[current].parent_pid in rows:
            current = rows[current].parent_pid
            if current in path:
                break
            path.add(current)
        shown |= path
    tops = sorted((pid for pid in shown if rows[pid].parent_pid not in shown), key=lambda pid: _start(rows, pid))
    ordered: list[tuple[int, int]] = []
    waiting = [(pid, 0) for pid in reversed(tops)]
    done: set[int] = set()
    while waiting:
        pid, depth = waiting.pop()
        if pid in done:
            continue
        done.add(pid)
        ordered.append((pid, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(pid, [])) if child in shown]
    return ordered


def _start(rows: Mapping[int, Row], pid: int) -> tuple[int, int]:
    return rows[pid].identity.started_ticks, pid
