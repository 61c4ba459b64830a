"""Adds to the GPU samples who their processes are and what the host reports about them, and groups
them into jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from memtop.supervisor import units
from memtop.supervisor.monitor.processes.facts import JOB_VARIABLES, ProcessDescriber, ProcessFacts
from memtop.supervisor.monitor.processes.jobs import Grouping, JobDraft, Program, job_name, read_program
from memtop.supervisor.monitor.processes.proc import (
    ATTEMPT_VARIABLE,
    PROC,
    RUN_VARIABLE,
    TICKS_PER_SECOND,
    ProcessId,
    ProcessStat,
    command_words,
    environment,
    own_family,
    readable,
    whole_number,
)
from memtop.supervisor.monitor.processes.table import CpuMeter, ProcessTable, resident_bytes
from memtop.supervisor.monitor.strays import UNFREED_ADVICE, KnownRun, agreed, judge
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, Job, held_by

LOOK_SECONDS = 1.5
"""The process table is walked at most this often, however often the driver's process lists
change."""
_COMPUTE = frozenset({"compute", "mps", "compute+graphics"})


class ProcessWatch:
    """Describes the processes of a sample.

    The result is kept until the GPU reader has read its process lists again.
    """

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
        self._programs: dict[int, tuple[object, Program]] = {}
        self._relatives: set[int] = set()
        self._walked = float("-inf")
        self._rows: Mapping[int, ProcessStat] = {}
        self._made: tuple[tuple[tuple[GpuProcess, ...], ...], tuple[tuple[GpuProcess, ...], ...]] = ((), ())
        self._jobs: tuple[Job, ...] = ()

    def fill(self, gpus: tuple[GpuSample, ...]) -> tuple[tuple[GpuSample, ...], tuple[Job, ...]]:
        """The GPUs with their processes described, and the jobs, largest GPU memory first."""
        # The reader returns the same tuples until it has read the lists again.
        sources = tuple(gpu.processes for gpu in gpus)
        if len(sources) != len(self._made[0]) or any(a is not b for a, b in zip(sources, self._made[0], strict=True)):
            self._made = sources, self._look(gpus)
        described = zip(gpus, self._made[1], strict=True)
        return tuple(msgspec.structs.replace(gpu, processes=rows) for gpu, rows in described), self._jobs

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
        self._programs = {pid: program for pid, program in self._programs.items() if pid in self._relatives}
        if walk:
            self._cpu = self._meter.update((self._rows[pid] for pid in self._relatives if pid in self._rows), now)
        judges = _Judges(self._runs() if self._may_be_of_a_run(facts) else (), self._own_uid, own_family())

        def described(gpu: GpuSample, row: GpuProcess) -> GpuProcess:
            return _described(gpu, row, facts[row.pid], self._rows.get(row.pid), self._cpu, judges)

        made = agreed([tuple(described(gpu, row) for row in gpu.processes) for gpu in gpus])
        names = _job_names(drafts, {row.pid: row for rows in made for row in rows}, facts)
        on_gpus: dict[int, list[tuple[int, GpuProcess]]] = {}
        for gpu in gpus:
            for row in gpu.processes:
                on_gpus.setdefault(row.pid, []).append((gpu.index, row))
        jobs = [self._job(draft, names[draft.leader], on_gpus, facts) for draft in drafts]
        self._jobs = tuple(sorted(jobs, key=lambda job: (-(job.used_bytes or 0), job.key)))
        place = {pid: (names[draft.leader].key, role) for draft in drafts for pid, role in draft.roles.items()}
        return tuple(tuple(_placed(row, place.get(row.pid)) for row in rows) for rows in made)

    def _describe(self, pid: int, minors: frozenset[int]) -> ProcessFacts:
        facts = self._describer.describe(pid, self._rows.get(pid), minors)
        leader = None if facts.session is None else self._rows.get(facts.session)
        led = leader is not None and not leader.is_dead
        return facts if led == facts.session_led else msgspec.structs.replace(facts, session_led=led)

    def _may_be_of_a_run(self, facts: Mapping[int, ProcessFacts]) -> bool:
        return any(fact.uid == self._own_uid or fact.run_folder is not None for fact in facts.values())

    def _group(self, gpus: tuple[GpuSample, ...], facts: Mapping[int, ProcessFacts]) -> list[JobDraft]:
        seen = {pid for pid, fact in facts.items() if fact.identity is not None}
        computing = frozenset(row.pid for gpu in gpus for row in gpu.processes if row.kind in _COMPUTE and row.pid in seen)
        rows = self._rows
        read: dict[int, Program] = {}

        def program(pid: int) -> Program:
            found = read.get(pid)
            if found is None:
                fact = facts.get(pid)
                found = read[pid] = self._program(rows[pid], None if fact is None or fact.identity is None else fact)
            return found

        grouping = Grouping(rows, computing, program)
        drafts = grouping.drafts()
        self._relatives = grouping.relatives
        return drafts

    def _program(self, row: ProcessStat, facts: ProcessFacts | None) -> Program:
        """What the process executes; read once for each program.

        `facts` are given for processes on a GPU.
        """
        pid = row.identity.pid
        stamp = row.guise, facts is None
        known = self._programs.get(pid)
        if known is not None and known[0] == stamp:
            return known[1]
        if facts is not None:
            run = None if facts.run_folder is None or facts.run_elsewhere else (facts.run_folder, facts.attempt)
            found = read_program(facts.words, row.comm, facts.variables, run)
        else:
            variables = environment(pid, self._proc_root) or {}
            folder = variables.get(RUN_VARIABLE)
            run = (folder, whole_number(variables.get(ATTEMPT_VARIABLE))) if folder else None
            kept = {name: variables[name] for name in JOB_VARIABLES if variables.get(name)}
            found = read_program(command_words(pid, self._proc_root) or (), row.comm, kept, run)
        self._programs[pid] = stamp, found
        return found

    def _job(
        self,
        draft: JobDraft,
        named: _JobName,
        on_gpus: Mapping[int, Sequence[tuple[int, GpuProcess]]],
        facts: Mapping[int, ProcessFacts],
    ) -> Job:
        """A job with the resources that its processes use together.

        `on_gpus`: each process's rows with their GPU's index.
        """
        rows = self._rows
        mine = [pair for pid in draft.pids for pair in on_gpus.get(pid, ())]
        held = held_by([row for _, row in mine])
        unknown = dict(held.unknown)
        shares = [self._cpu[rows[pid].identity] for pid in draft.pids if rows[pid].identity in self._cpu]
        if not shares:
            unknown["host_cpu_fraction"] = CpuMeter.FIRST_LOOK
        # A single process shares no pages within the job, so its stat row is exact.
        rss = rows[draft.leader].rss_bytes if len(draft.pids) == 1 else resident_bytes(draft.pids, self._proc_root)
        if rss is None:
            unknown["host_rss_bytes"] = "the memory of its processes cannot be read"
        member = next((fact for pid in draft.pids if (fact := facts.get(pid)) is not None and fact.identity is not None), None)
        return Job(
            key=named.key,
            name=named.name,
            run=named.run,
            user=None if member is None else member.user,
            leader_pid=draft.leader,
            pids=draft.pids,
            roles=draft.counts,
            gpu_indices=tuple(sorted({index for index, _ in mine})),
            used_bytes=held.used_bytes,
            used_at_least_bytes=held.at_least_bytes,
            host_rss_bytes=rss,
            host_cpu_fraction=sum(shares) if shares else None,
            started=_started(member, rows[draft.leader]),
            unknown=unknown,
        )


class _Judges(NamedTuple):
    """What `strays.judge` needs in addition to the process."""

    runs: Sequence[KnownRun]
    own_uid: int
    protected: frozenset[int]


class _JobName(NamedTuple):
    key: str
    name: str
    run: str | None


def _started(member: ProcessFacts | None, leader: ProcessStat) -> float | None:
    """When the leader started, in seconds since the epoch, computed from the start of a member that
    was described."""
    if member is None or member.started is None or member.identity is None:
        return None
    return member.started - (member.identity.started_ticks - leader.identity.started_ticks) / TICKS_PER_SECOND


def _described(
    gpu: GpuSample,
    row: GpuProcess,
    facts: ProcessFacts,
    stat: ProcessStat | None,
    cpu: Mapping[ProcessId, float],
    judges: _Judges,
) -> GpuProcess:
    """The driver's row with what the host and the runs report about the process."""
    verdict = judge(facts, row.kind, judges.runs, own_uid=judges.own_uid, protected=judges.protected)
    identity = facts.identity
    host = stat if identity is not None and stat is not None and stat.identity == identity else None
    fields = {
        "started": facts.started,
        "started_ticks": None if identity is None else identity.started_ticks,
        "parent_pid": facts.parent_pid,
        "host_rss_bytes": None if host is None else host.rss_bytes,
        "host_cpu_fraction": None if identity is None else cpu.get(identity),
    }
    unknown = row.unknown | facts.unknown
    why = next(iter(facts.unknown.values()), "the process has just ended")
    if host is not None:
        why = CpuMeter.FIRST_LOOK
    unknown |= {name: why for name, value in fields.items() if value is None and name not in unknown}
    return msgspec.structs.replace(
        row,
        user=facts.user,
        name=facts.name,
        command=facts.command,
        run=None if verdict.run is None else readable(verdict.run),
        stray=verdict.stray,
        # For a zombie the verdict tells more: which parent must collect it.
        reason=_gone_reason(row) if facts.gone and not facts.zombie else readable(verdict.reason),
        choosable=verdict.choosable,
        container=facts.container,
        gone=facts.gone,
        unknown=unknown,
        **fields,
    )


def _gone_reason(row: GpuProcess) -> str:
    held = "memory" if row.used_bytes is None else units.size(row.used_bytes)
    return f"the driver still lists {held} under pid {row.pid}, which has ended: {UNFREED_ADVICE}"


def _job_names(
    drafts: Sequence[JobDraft], made: Mapping[int, GpuProcess], facts: Mapping[int, ProcessFacts]
) -> dict[int, _JobName]:
    """Key, name and run of each job, by its leader.

    Keys are unique; a live run has the plain one.
    """
    names: dict[int, _JobName] = {}
    taken: set[str] = set()
    for draft in sorted(drafts, key=lambda draft: any(made[pid].stray for pid in draft.pids if pid in made)):
        on_gpu = [pid for pid in draft.pids if pid in made]
        first = min(on_gpu, key=lambda pid: (draft.roles.get(pid) != "rank 0", draft.pids.index(pid)))
        fact = facts[first]
        name, key, run = job_name(fact.words, fact.name or ""), draft.key, made[first].run
        if draft.run is not None and run is not None:
            folder, attempt = draft.run
            stray = any(made[pid].stray for pid in on_gpu)
            name, key = run, f"run {run} attempt {attempt}" if stray and attempt is not None else f"run {run}"
            # Two folders may have the same name, and two users may share one folder.
            key = next(one for one in (key, readable(f"run {folder} attempt {attempt}"), draft.key) if one not in taken)
        elif key.startswith("slurm "):
            name = fact.variables.get("SLURM_JOB_NAME") or name
            key = key if key not in taken else f"pid {draft.leader}@{first}"
        taken.add(key)
        names[draft.leader] = _JobName(key, name, run)
    return names


def _minors(gpus: Sequence[GpuSample]) -> dict[int, frozenset[int]]:
    """By pid, the device numbers of the GPUs that list the process, if the driver reports them."""
    found: dict[int, frozenset[int]] = {}
    for gpu in gpus:
        minor = gpu.details.device_minor
        here = frozenset() if minor is None else frozenset((minor,))
        for row in gpu.processes:
            found[row.pid] = found.get(row.pid, frozenset()) | here
    return found


def _placed(row: GpuProcess, place: tuple[str, str] | None) -> GpuProcess:
    return row if place is None else msgspec.structs.replace(row, job=place[0], role=place[1])
