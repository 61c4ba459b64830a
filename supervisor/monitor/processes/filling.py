"""Turns what was found out about processes and jobs into the values of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from memtop.supervisor import units
from memtop.supervisor.monitor.ending import UNFREED_ADVICE
from memtop.supervisor.monitor.processes import roles
from memtop.supervisor.monitor.processes.facts import ProcessFacts
from memtop.supervisor.monitor.processes.jobs import Draft
from memtop.supervisor.monitor.processes.proc import TICKS_PER_SECOND, ProcessId, Row, readable
from memtop.supervisor.monitor.processes.table import CpuMeter, resident_bytes
from memtop.supervisor.monitor.strays import KnownRun, judge
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, Job


class Judged(NamedTuple):
    """What processes are judged by."""

    runs: Sequence[KnownRun]
    own_uid: int
    protected: frozenset[int]


class JobName(NamedTuple):
    key: str
    name: str
    run: str | None


def gpu_process(
    gpu: GpuSample, row: GpuProcess, facts: ProcessFacts, seen: Row | None, cpu: Mapping[ProcessId, float], by: Judged
) -> GpuProcess:
    """The driver's row with everything that the host and the runs say of the process."""
    verdict = judge(facts, row.kind, by.runs, own_uid=by.own_uid, protected=by.protected)
    identity = facts.identity
    host = seen if identity is not None and seen is not None and seen.identity == identity else None
    fraction = None if identity is None else cpu.get(identity)
    fields = {
        "started": facts.started,
        "started_ticks": None if identity is None else identity.started_ticks,
        "parent_pid": facts.parent_pid,
        "host_rss_bytes": None if host is None else host.rss_bytes,
        "host_cpu_fraction": fraction,
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
        # Of a zombie, what is known of it says more: which parent must collect it.
        reason=_gone_reason(gpu, row) if facts.gone and not facts.zombie else readable(verdict.reason),
        choosable=verdict.choosable,
        container=facts.container,
        gone=facts.gone,
        unknown=unknown,
        **fields,
    )


def _gone_reason(gpu: GpuSample, row: GpuProcess) -> str:
    held = "memory" if row.used_bytes is None else units.size(row.used_bytes)
    return f"the driver still lists {held} under pid {row.pid}, which has ended: {UNFREED_ADVICE}"


def job_names(drafts: Sequence[Draft], made: Mapping[int, GpuProcess], facts: Mapping[int, ProcessFacts]) -> dict[int, JobName]:
    """Key, name and run of each job, by its leader. Keys are unique; a live run has the plain one."""
    names: dict[int, JobName] = {}
    taken: set[str] = set()
    for draft in sorted(drafts, key=lambda draft: any(made[pid].stray for pid in draft.pids if pid in made)):
        on_gpu = [pid for pid in draft.pids if pid in made]
        first = min(on_gpu, key=lambda pid: (draft.parts.get(pid) != "rank 0", draft.pids.index(pid)))
        fact = facts[first]
        name, key, run = roles.job_name(fact.words, fact.name or ""), draft.key, made[first].run
        if draft.run is not None and run is not None:
            folder, attempt = draft.run
            stray = any(made[pid].stray for pid in on_gpu)
            name, key = run, f"run {run} attempt {attempt}" if stray and attempt is not None else f"run {run}"
            # Two folders of one name, or two users in one.
            key = next(one for one in (key, readable(f"run {folder} attempt {attempt}"), draft.key) if one not in taken)
        elif key.startswith("slurm "):
            name = fact.marks.get("SLURM_JOB_NAME") or name
            key = key if key not in taken else f"pid {draft.leader}@{first}"
        taken.add(key)
        names[draft.leader] = JobName(key, name, run)
    return names


def make_job(
    draft: Draft,
    named: JobName,
    on_gpus: Mapping[int, Sequence[tuple[int, GpuProcess]]],
    rows: Mapping[int, Row],
    facts: Mapping[int, ProcessFacts],
    cpu: Mapping[ProcessId, float],
    proc_root: Path,
) -> Job:
    """A job with what its processes take of the machine together. `on_gpus`: each process's rows with their GPU's index."""
    mine = [pair for pid in draft.pids for pair in on_gpus.get(pid, ())]
    unknown: dict[str, str] = {}
    sizes = [row.used_bytes for _, row in mine if row.used_bytes is not None]
    if len(sizes) < len(mine):
        reasons = (row.unknown.get("used_bytes") for _, row in mine)
        unknown["used_bytes"] = next(filter(None, reasons), "the driver does not tell all of it")
    shares = [cpu[rows[pid].identity] for pid in draft.pids if rows[pid].identity in cpu]
    if not shares:
        unknown["host_cpu_fraction"] = CpuMeter.FIRST_LOOK
    # One alone shares with nobody: its row says it all.
    rss = rows[draft.leader].rss_bytes if len(draft.pids) == 1 else resident_bytes(draft.pids, proc_root)
    if rss is None:
        unknown["host_rss_bytes"] = "none of its processes lets itself be measured"
    told = next((fact for pid in draft.pids if (fact := facts.get(pid)) is not None and fact.identity is not None), None)
    started = None
    if told is not None and told.started is not None and told.identity is not None:
        # By the clock that the member's start was told with.
        later = told.identity.started_ticks - rows[draft.leader].identity.started_ticks
        started = told.started - later / TICKS_PER_SECOND
    return Job(
        key=named.key,
        name=named.name,
        run=named.run,
        user=None if told is None else told.user,
        leader_pid=draft.leader,
        pids=draft.pids,
        roles=draft.counts,
        gpu_indices=tuple(sorted({index for index, _ in mine})),
        used_bytes=None if "used_bytes" in unknown else sum(sizes),
        host_rss_bytes=rss,
        host_cpu_fraction=sum(shares) if shares else None,
        started=started,
        unknown=unknown,
    )
