"""Fills in who the GPU processes are, what the host says of them, and the jobs that they form."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from memtop.supervisor.monitor.choosing import agreed
from memtop.supervisor.monitor.processes.facts import JOB_VARIABLES, ProcessDescriber, ProcessFacts
from memtop.supervisor.monitor.processes.filling import Judged, gpu_process, job_names, make_job
from memtop.supervisor.monitor.processes.jobs import About, Draft, Grouping, about
from memtop.supervisor.monitor.processes.members import number
from memtop.supervisor.monitor.processes.proc import (
    ATTEMPT_VARIABLE,
    PROC,
    RUN_VARIABLE,
    ProcessId,
    Row,
    command_words,
    environment,
)
from memtop.supervisor.monitor.processes.table import CpuMeter, ProcessTable
from memtop.supervisor.monitor.strays import KnownRun, own_family
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, Job

LOOK_SECONDS = 1.5
"""The table is not walked again sooner, however often process lists change."""
_COMPUTE = frozenset({"compute", "mps", "compute+graphics"})


class ProcessWatch:
    """Everything about processes in a sample. The reader hands out the same tuples until it has read the lists again; until
    then this hands out what it made of them."""

    def __init__(
        self,
        runs: Callable[[], Sequence[KnownRun]],
        describer: ProcessDescriber,
        *,
        own_uid: int,
        monotonic: Callable[[], float] = time.monotonic,
        proc_root: Path = PROC,
    ) -> None:
        self._runs = runs
        self._describer = describer
        self._own_uid = own_uid
        self._monotonic = monotonic
        self._proc_root = proc_root
        self._table = ProcessTable(proc_root)
        self._meter = CpuMeter()
        self._cpu: Mapping[ProcessId, float] = {}
        self._abouts: dict[int, tuple[object, About]] = {}
        self._relatives: set[int] = set()
        self._walked = float("-inf")
        self._rows: Mapping[int, Row] = {}
        self._made: tuple[tuple[tuple[GpuProcess, ...], ...], tuple[tuple[GpuProcess, ...], ...]] = ((), ())
        self._jobs: tuple[Job, ...] = ()

    def fill(self, gpus: tuple[GpuSample, ...]) -> tuple[tuple[GpuSample, ...], tuple[Job, ...]]:
        """The GPUs with their processes described, and the jobs, largest GPU memory first."""
        sources = tuple(gpu.processes for gpu in gpus)
        if len(sources) != len(self._made[0]) or any(a is not b for a, b in zip(sources, self._made[0], strict=True)):
            self._made = sources, self._look(gpus)
        described = zip(gpus, self._made[1], strict=True)
        return tuple(msgspec.structs.replace(gpu, processes=rows) for gpu, rows in described), self._jobs

    # --- one look ---

    def _look(self, gpus: tuple[GpuSample, ...]) -> tuple[tuple[GpuProcess, ...], ...]:
        listed = {row.pid for gpu in gpus for row in gpu.processes}
        self._describer.keep(listed)
        if not listed:
            self._rows, self._relatives, self._jobs = {}, set(), ()
            return tuple(() for _ in gpus)
        now = self._monotonic()
        walk = now >= self._walked + LOOK_SECONDS
        if walk:
            self._walked = now
            self._rows = self._table.look(self._relatives | listed)
        else:
            self._rows = self._table.again(listed)
        minors = _minors(gpus)
        facts = {pid: self._describe(pid, minors[pid]) for pid in listed}
        drafts = self._group(gpus, facts)
        self._abouts = {pid: about for pid, about in self._abouts.items() if pid in self._relatives}
        if walk:
            self._cpu = self._meter.update((self._rows[pid] for pid in self._relatives if pid in self._rows), now)
        runs = self._runs() if self._may_be_of_a_run(facts) else ()
        judged = Judged(runs, self._own_uid, own_family())
        made = agreed(
            [
                tuple(
                    gpu_process(gpu, row, facts[row.pid], self._rows.get(row.pid), self._cpu, judged) for row in gpu.processes
                )
                for gpu in gpus
            ]
        )
        names = job_names(drafts, {row.pid: row for rows in made for row in rows}, facts)
        on_gpus: dict[int, list[tuple[int, GpuProcess]]] = {}
        for gpu in gpus:
            for row in gpu.processes:
                on_gpus.setdefault(row.pid, []).append((gpu.index, row))
        jobs = [
            make_job(draft, names[draft.leader], on_gpus, self._rows, facts, self._cpu, self._proc_root) for draft in drafts
        ]
        self._jobs = tuple(sorted(jobs, key=lambda job: (-(job.used_bytes or 0), job.key)))
        place = {pid: (names[draft.leader].key, part) for draft in drafts for pid, part in draft.parts.items()}
        return tuple(tuple(_placed(row, place.get(row.pid)) for row in rows) for rows in made)

    def _describe(self, pid: int, minors: frozenset[int]) -> ProcessFacts:
        facts = self._describer.describe(pid, self._rows.get(pid), minors)
        leader = None if facts.session is None else self._rows.get(facts.session)
        led = leader is not None and not leader.is_dead
        return facts if led == facts.session_led else msgspec.structs.replace(facts, session_led=led)

    def _may_be_of_a_run(self, facts: Mapping[int, ProcessFacts]) -> bool:
        return any(fact.uid == self._own_uid or fact.run_folder is not None for fact in facts.values())

    def _group(self, gpus: tuple[GpuSample, ...], facts: Mapping[int, ProcessFacts]) -> list[Draft]:
        seen = {pid for pid, fact in facts.items() if fact.identity is not None}
        computing = frozenset(row.pid for gpu in gpus for row in gpu.processes if row.kind in _COMPUTE and row.pid in seen)
        rows = self._rows

        asked: dict[int, About] = {}

        def ask(pid: int) -> About:
            found = asked.get(pid)
            if found is None:
                fact = facts.get(pid)
                found = asked[pid] = self._about(rows[pid], None if fact is None or fact.identity is None else fact)
            return found

        grouping = Grouping(rows, computing, ask)
        drafts = grouping.drafts()
        self._relatives = grouping.relatives
        return drafts

    def _about(self, row: Row, facts: ProcessFacts | None) -> About:
        """Command line and marks, `facts` where the process is on a GPU; read once for every program that it executes."""
        pid = row.identity.pid
        stamp = row.guise, facts is None
        known = self._abouts.get(pid)
        if known is not None and known[0] == stamp:
            return known[1]
        if facts is not None:
            run = None if facts.run_folder is None or facts.run_elsewhere else (facts.run_folder, facts.attempt)
            found = about(facts.words, row.comm, facts.marks, run)
        else:
            marks = environment(pid, self._proc_root) or {}
            folder = marks.get(RUN_VARIABLE)
            run = (folder, number(marks.get(ATTEMPT_VARIABLE))) if folder else None
            kept = {name: marks[name] for name in JOB_VARIABLES if marks.get(name)}
            found = about(command_words(pid, self._proc_root) or (), row.comm, kept, run)
        self._abouts[pid] = stamp, found
        return found


def _minors(gpus: Sequence[GpuSample]) -> dict[int, frozenset[int]]:
    """By pid the devices of the GPUs that list it, as far as the driver tells them."""
    found: dict[int, frozenset[int]] = {}
    for gpu in gpus:
        minor = gpu.details.device_minor
        here = frozenset() if minor is None else frozenset((minor,))
        for row in gpu.processes:
            found[row.pid] = found.get(row.pid, frozenset()) | here
    return found


def _placed(row: GpuProcess, place: tuple[str, str] | None) -> GpuProcess:
    return row if place is None else msgspec.structs.replace(row, job=place[0], role=place[1])
