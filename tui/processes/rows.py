"""The rows of the process list: one per process and GPU, and one per job; by job, as a tree or
flat; sorted. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from memtop.supervisor.clean import clean
from memtop.supervisor.language import tr
from memtop.supervisor.monitor.values import GpuProcess, Job, MachineSnapshot

RowKey = tuple[str, object, object, object, object]
"""Stays the same while the process (pid and start time) uses the GPU, or while the job exists."""


class ProcessView(Enum):
    """How rows are arranged."""

    JOBS = "by job"
    TREE = "tree"
    FLAT = "flat"


MARKS = ("stray", "gone", "mine")
"""The values of the filter's `is:`."""


@dataclass(frozen=True)
class ProcessRow:
    """One line of the list: a process on a GPU, a whole job, or (in the tree) a process without GPU
    memory.
    """

    key: RowKey
    now: float
    process: GpuProcess | None = None
    job: Job | None = None
    """The job of a job's row, or the job that the process belongs to."""
    gpu_indices: tuple[int, ...] = ()
    mig_instance: int | None = None
    depth: int = 0
    folded: bool | None = None
    """None if the row cannot be folded."""
    siblings: bool = False
    """The same process has rows on other GPUs, too."""

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else self.job.leader_pid if self.job is not None else 0

    @property
    def user(self) -> str:
        return clean((self.process.user if self.process is not None else self.job.user if self.job is not None else None) or "")

    @property
    def where(self) -> str:
        """`0`, `0:1` on the second MIG instance, `0,1` of a job."""
        if self.mig_instance is not None:
            return f"{self.gpu_indices[0]}:{self.mig_instance}"
        return ",".join(str(index) for index in self.gpu_indices)

    @property
    def job_name(self) -> str:
        return clean(self.job.name) if self.job is not None else ""

    @property
    def container(self) -> str:
        return clean((self.process.container if self.process is not None else None) or "")

    @property
    def command(self) -> str:
        if self.process is None:
            return ""
        return clean(self.process.command or self.process.name or "")

    @property
    def marks(self) -> str:
        """The words that the filter's `is:` matches: stray, gone, mine."""
        if self.process is None:
            return ""
        marks = (self.process.stray, self.process.gone, self.process.choosable)
        return " ".join(word for word, holds in zip(MARKS, marks, strict=True) if holds)

    @cached_property
    def searchable(self) -> str:
        marks = (self.marks, *map(tr, self.marks.split()))
        words = (str(self.pid), self.user, self.command, self.job_name, self.container, *marks)
        return " ".join((*words, self.process.run or "" if self.process is not None else "")).casefold()

    @property
    def at_least(self) -> int | None:
        """What is known of a job's GPU memory, if that is not all of it."""
        job = self.job if self.process is None else None
        return job.used_at_least_bytes if job is not None and job.used_bytes is None else None

    def number(self, column: str) -> float | None:
        """The value by which a column is sorted and filtered: bytes, fractions or seconds; None if
        unknown.
        """
        if column == "pid":
            return self.pid
        if column == "gpu":
            return self.gpu_indices[0] if self.gpu_indices else None
        source = self.process if self.process is not None else self.job
        name = _FIELDS.get(column)
        if source is None or name is None:
            return None
        value: float | None = getattr(source, name, None)
        if value is None and column == "vram":
            value = self.at_least
        if column == "time" and value is not None:
            return max(0.0, self.now - value)
        return None if value is None else float(value)


_FIELDS: Mapping[str, str] = {
    "vram": "used_bytes",
    "sm": "sm_fraction",
    "bw": "memory_bandwidth_fraction",
    "cpu": "host_cpu_fraction",
    "rss": "host_rss_bytes",
    "time": "started",
}
_TEXTS: Mapping[str, Callable[[ProcessRow], str]] = {
    "user": lambda row: row.user,
    "container": lambda row: row.container,
    "command": lambda row: row.job_name if row.process is None else row.command,
}


@dataclass(frozen=True)
class Order:
    """The sort column and direction."""

    column: str = "vram"
    descending: bool = True


def rows_of(machine: MachineSnapshot | None) -> list[ProcessRow]:
    """One row per process and GPU, in the driver's order."""
    if machine is None:
        return []
    jobs = {job.key: job for job in machine.jobs}
    seen: dict[tuple[int, object], int] = {}
    rows = []
    for gpu in machine.gpus:
        for process in gpu.processes:
            identity = (process.pid, process.started_ticks or process.started)
            seen[identity] = seen.get(identity, 0) + 1
            rows.append(
                ProcessRow(
                    key=("process", *identity, gpu.uuid or gpu.index, process.mig_instance),
                    now=machine.time,
                    process=process,
                    job=jobs.get(process.job or ""),
                    gpu_indices=(gpu.index,),
                    mig_instance=process.mig_instance,
                )
            )
    return [replace(row, siblings=True) if seen[row.key[1], row.key[2]] > 1 else row for row in rows]  # type: ignore[index]


def arranged(
    rows: Sequence[ProcessRow],
    view: ProcessView,
    order: Order,
    *,
    folded: Set[str] = frozenset(),
    frozen: Sequence[RowKey] | None = None,
) -> list[ProcessRow]:
    """The rows from top to bottom.

    `frozen` is an order to keep: rows that are not in it come last.
    """
    if view is ProcessView.FLAT:
        arrangement = _sorted(rows, order)
    elif view is ProcessView.TREE:
        arrangement = _tree(rows, order)
    else:
        arrangement = _by_job(rows, order, folded)
    if frozen is None:
        return arrangement
    places = {key: number for number, key in enumerate(frozen)}
    return sorted(arrangement, key=lambda row: places.get(row.key, len(places)))


def _sorted(rows: Iterable[ProcessRow], order: Order) -> list[ProcessRow]:
    known: list[tuple[float | str, ProcessRow]] = []
    unknown: list[ProcessRow] = []
    text = _TEXTS.get(order.column)
    for row in rows:
        value: float | str | None = row.number(order.column) if text is None else text(row).casefold()
        if value is None or value == "":
            unknown.append(row)
        else:
            known.append((value, row))
    # Equal values are ordered by pid in both directions, so that rows do not change places without
    # a reason.
    known.sort(key=lambda pair: (pair[1].pid, pair[1].gpu_indices))
    known.sort(key=lambda pair: pair[0], reverse=order.descending)
    # Unknown values come last in both directions.
    return [row for _, row in known] + sorted(unknown, key=lambda row: (row.pid, row.gpu_indices))


def _groups(rows: Iterable[ProcessRow]) -> tuple[dict[str, list[ProcessRow]], list[ProcessRow]]:
    """Rows by the key of their job, and rows without a job."""
    groups: dict[str, list[ProcessRow]] = {}
    single = []
    for row in rows:
        if row.job is None:
            single.append(row)
        else:
            groups.setdefault(row.job.key, []).append(row)
    return groups, single


def job_row(members: Sequence[ProcessRow], folded: bool | None) -> ProcessRow:
    """The row of a whole job."""
    first = members[0]
    assert first.job is not None
    return ProcessRow(
        key=("job", first.job.key, None, None, None),
        now=first.now,
        job=first.job,
        gpu_indices=first.job.gpu_indices,
        folded=folded,
    )


def _by_job(rows: Sequence[ProcessRow], order: Order, folded: Set[str]) -> list[ProcessRow]:
    groups, top = _groups(rows)
    heads: dict[RowKey, list[ProcessRow]] = {}
    for key, members in groups.items():
        job = members[0].job
        if len(members) == 1 and job is not None and len(job.pids) <= 1:
            # A job with a single process needs no heading.
            top.append(members[0])
            continue
        head = job_row(members, key in folded)
        heads[head.key] = [] if key in folded else _sorted(members, order)
        top.append(head)
    arrangement = []
    for row in _sorted(top, order):
        arrangement.append(row)
        arrangement += [replace(member, depth=1) for member in heads.get(row.key, ())]
    return arrangement


def _tree(rows: Sequence[ProcessRow], order: Order) -> list[ProcessRow]:
    """Children below their parents; a launcher without GPU memory is shown above its job's
    processes.
    """
    pids = {row.pid for row in rows}
    groups, _ = _groups(rows)
    leaders: dict[int, ProcessRow] = {}
    for members in groups.values():
        job = members[0].job
        if job is not None and job.leader_pid not in pids and len(job.pids) > 1:
            leaders[job.leader_pid] = job_row(members, None)
    children: dict[int | None, list[ProcessRow]] = {}
    for row in rows:
        children.setdefault(_parent(row, pids, leaders), []).append(row)
    for leader in leaders.values():
        children.setdefault(None, []).append(leader)
    arrangement: list[ProcessRow] = []
    _descend(None, 0, children, order, arrangement, set())
    # A pid that was reused while the list was read can make a circle of parents: show those rows,
    # too.
    shown = {row.key for row in arrangement}
    return arrangement + _sorted((row for row in rows if row.key not in shown), order)


def _parent(row: ProcessRow, pids: Set[int], leaders: Mapping[int, ProcessRow]) -> int | None:
    parent = row.process.parent_pid if row.process is not None else None
    if parent is not None and parent != row.pid and (parent in pids or parent in leaders):
        return parent
    leader = row.job.leader_pid if row.job is not None else None
    return leader if leader is not None and leader != row.pid and (leader in pids or leader in leaders) else None


def _descend(
    parent: int | None,
    depth: int,
    children: Mapping[int | None, list[ProcessRow]],
    order: Order,
    into: list[ProcessRow],
    done: set[int],
) -> None:
    below = _sorted(children.get(parent, ()), order)
    for number, row in enumerate(below):
        into.append(replace(row, depth=depth))
        # A process on two GPUs has two rows; its children are shown once, below the last one.
        if row.pid not in done and all(later.pid != row.pid for later in below[number + 1 :]):
            done.add(row.pid)
            _descend(row.pid, depth + 1, children, order, into, done)
