"""Follows the memory of one attempt: once per update for each rank and the loader workers, once a
second for each GPU.

It reports what leaks, when that memory will be full, and why a gauge stays in its danger band. It
reads no files and no clocks: the supervisor passes in every reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from memtop.supervisor.monitor.history import gpu_key
from memtop.supervisor.monitor.values import Band, HostSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory, VramParts, placed, ranks_on, vram_parts
from memtop.supervisor.recovery.leaks import DangerWatch, Leak, Pool, processes_of, swap_trend, trends
from memtop.supervisor.recovery.trend import BY_SECOND, BY_UPDATE, Growth, Sustained
from memtop.supervisor.recovery.values import Trend, TrendKind, TrendSubject
from memtop.supervisor.run.processes.host_memory import HostReading
from memtop.supervisor.run.reports import Step

_HOST = "host"


class Member(NamedTuple):
    """A process of the run."""

    pid: int
    role: str
    """One of host_memory.ROLES."""
    rank: int | None = None


class MemoryScope(IntEnum):
    """How a series counts its bytes, from the innermost view to the outermost. Growth seen in one
    view shows in all views outside it too; only the innermost is reported."""

    ALLOCATED = 0
    RESERVED = 1
    USED = 2
    ANONYMOUS = 3
    ANONYMOUS_BY_TIME = 4

    @property
    def by_update(self) -> bool:
        return self in (MemoryScope.ALLOCATED, MemoryScope.RESERVED, MemoryScope.ANONYMOUS)


_KINDS = {
    MemoryScope.ALLOCATED: TrendKind.GPU_ALLOCATED,
    MemoryScope.RESERVED: TrendKind.GPU_RESERVED,
    MemoryScope.USED: TrendKind.GPU_USED,
    MemoryScope.ANONYMOUS: TrendKind.HOST_ANONYMOUS,
    MemoryScope.ANONYMOUS_BY_TIME: TrendKind.HOST_ANONYMOUS,
}


class Key(NamedTuple):
    """Identifies a series."""

    pool: str
    """`host`, the key of a GPU, or a placeholder for the GPU of a rank that is not known yet."""
    view: MemoryScope
    rank: int | None = None
    role: str | None = None


class TrendWatch:
    """The series of one attempt. A sensor: `Sensors` owns it, and the rules receive its results in
    events."""

    def __init__(self) -> None:
        self.trends: tuple[Trend, ...] = ()
        """Everything that grows; what is full first comes first."""
        self.own: tuple[Trend, ...] = ()
        """The trends that a restart of the run would end. Growth that only the driver sees may
        belong to other programs, and the allocator gives a growing cache back before an allocation
        fails."""
        self.swap_in = Sustained()
        self._series: dict[Key, Growth] = {}
        self._pools: dict[str, Pool] = {}
        self._gpus: dict[str, int] = {}
        """The index of each GPU by its key."""
        self._gpu_of: dict[int, str] = {}
        """The key of the GPU that each rank uses."""
        self._cached: dict[int, int] = {}
        """Bytes that the allocator of each rank holds in addition to its tensors."""
        self._dangers: dict[str, DangerWatch] = {}
        self._update: int | None = None
        self._read_at: int | None = None
        self._reporting: set[int] = set()
        """The ranks that report their anonymous memory themselves."""
        self._announced: dict[TrendSubject, str] = {}
        self._withdrawn: set[TrendSubject] = set()

    # --- input ------------------------------------------------------------------------------------

    def step(self, rank: int, report: Step) -> None:
        """A rank has finished an update."""
        update, time = report.update, report.time
        if time is None:
            return
        if rank == 0:
            self._update = update
        gpu = self._gpu_of.get(rank, _gpu_of_rank(rank))
        allocated, reserved = report.allocated_bytes, report.reserved_bytes
        self._add(Key(gpu, MemoryScope.ALLOCATED, rank), update, time, allocated)
        self._add(Key(gpu, MemoryScope.RESERVED, rank), update, time, reserved)
        if report.anonymous_bytes is not None:
            self._reporting.add(rank)
            self._add(Key(_HOST, MemoryScope.ANONYMOUS, rank), update, time, report.anonymous_bytes)
        if reserved is not None and allocated is not None:
            self._cached[rank] = reserved - allocated

    @property
    def wants_reading(self) -> bool:
        """Whether updates were done since the last `read`."""
        return self._update is not None and self._update != self._read_at

    def read(self, time: float, members: Iterable[Member], anonymous: Mapping[int, int]) -> None:
        """Take the anonymous memory by pid, after new updates: of the loader workers, and of ranks
        that do not report it."""
        if self._update is None:
            return
        self._read_at = self._update
        members = list(members)
        workers = [member.pid for member in members if member.role == "loader worker"]
        if workers:
            key = Key(_HOST, MemoryScope.ANONYMOUS, role="loader worker")
            self._add(key, self._update, time, _total(anonymous, workers))
        for member in members:
            if member.rank is not None and member.rank not in self._reporting:
                self._add(Key(_HOST, MemoryScope.ANONYMOUS, member.rank), self._update, time, anonymous.get(member.pid))
        self._judge()

    def sample(
        self,
        machine: MachineSnapshot,
        members: Iterable[Member],
        ranks: Iterable[RankMemory],
        bases: Mapping[str, int],
        reading: HostReading,
        *,
        loading: bool = False,
    ) -> list[str]:
        """Take a sample of the machine. Returns one line for each gauge that has stayed in its
        danger band.

        `bases`: as `RunState.gpu_base_bytes`. `loading`: the program has not begun to train, so
        growth is what it loads.
        """
        members, ranks, time = list(members), placed(ranks, machine.gpus), machine.time
        host, held = machine.host, _by_role(members, reading.anonymous)
        self._pools = {_HOST: _host_pool(host, reading.address_space_left)}
        if host.swap_in_bytes_per_second is not None:
            self.swap_in.add(host.swap_in_bytes_per_second)
        if not loading:
            for role, size in held.items():
                self._add(Key(_HOST, MemoryScope.ANONYMOUS_BY_TIME, role=role), time, time, size)
        lines = [self._danger(_HOST, "host RAM", time, host.band, host.used_fraction, _host_parts(host, held))]
        rank_of = {member.pid: member.rank for member in members if member.rank is not None}
        pids = {member.pid for member in members}
        for gpu in machine.gpus:
            here, key = ranks_on(gpu, ranks), gpu_key(gpu)
            if not here and not any(row.pid in pids for row in gpu.processes):
                continue  # this run does not use the GPU
            self._gpus[key] = gpu.index
            self._pools[key] = Pool(name=f"GPU {gpu.index}", left_bytes=gpu.free_bytes)
            self._place(key, [rank_of[rank.pid] for rank in here if rank.pid in rank_of])
            if not loading:
                self._add(Key(key, MemoryScope.USED), time, time, gpu.used_bytes)
            parts = _gpu_parts(vram_parts(gpu, here, own_pids=pids, base_bytes=bases.get(key)))
            lines.append(self._danger(key, f"GPU {gpu.index}", time, gpu.band, gpu.used_fraction, parts))
        self._judge()
        return [line for line in lines if line is not None]

    def _place(self, gpu: str, ranks: Iterable[int]) -> None:
        """These ranks use this GPU: move their series from the placeholder to it."""
        for rank in ranks:
            before = self._gpu_of.get(rank, _gpu_of_rank(rank))
            if before != gpu:
                for key in [key for key in self._series if key.pool == before and key.rank == rank]:
                    self._series[key._replace(pool=gpu)] = self._series.pop(key)
                self._gpu_of[rank] = gpu

    def _add(self, key: Key, x: float, time: float, value: int | None) -> None:
        if value is not None:
            if key not in self._series:
                self._series[key] = Growth(BY_UPDATE if key.view.by_update else BY_SECOND)
            self._series[key].add(x, time, value)

    def _danger(self, key: str, gauge: str, time: float, band: Band, fraction: float | None, parts: _Parts) -> str | None:
        watch = self._dangers.setdefault(key, DangerWatch(gauge))
        return watch.add(time, band, fraction, *parts)

    # --- output -----------------------------------------------------------------------------------

    def _judge(self) -> None:
        leaking = {key: slope for key, growth in self._series.items() if (slope := growth.leaking) is not None}
        found: list[Leak] = []
        for key, slope in sorted(leaking.items(), key=lambda item: item[0].view):
            if any(_same_bytes(key, other) for other in leaking if other.view < key.view):
                continue
            spare = self._cached.get(key.rank or 0, 0) if key.view is MemoryScope.ALLOCATED else 0
            found.append(Leak(self._subject(key), key.pool, slope, key.view.by_update, spare))
        growing = trends(found, self._pools, self._update)
        outside = (TrendKind.GPU_USED, TrendKind.GPU_RESERVED)
        self.own = tuple(trend for trend in growing if trend.subject.kind not in outside)
        rate = self.swap_in.value
        self.trends = (*growing, swap_trend(rate, self.swap_in.share)) if rate else growing

    def _subject(self, key: Key) -> TrendSubject:
        kind, role = _KINDS[key.view], key.role
        if not kind.of_gpu:
            return TrendSubject(kind=kind, rank=key.rank, role="rank" if key.rank is not None else role)
        index = self._gpus.get(key.pool)
        return TrendSubject(kind=kind, gpu_index=index, gpu_uuid=key.pool if index is not None else None, rank=key.rank)

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """The text and data of events: what has begun to grow since the last call, and what has
        stopped. Each only once."""
        events: list[tuple[str, dict[str, Any]]] = []
        present = {trend.subject: trend for trend in self.trends}
        for subject, trend in present.items():
            if subject not in self._announced:
                self._announced[subject] = trend.what
                events.append((trend.message, {"update": self._update, **msgspec.to_builtins(trend)}))
        for subject, what in self._announced.items():
            if subject not in present and subject not in self._withdrawn:
                self._withdrawn.add(subject)
                stopped = f"{what} has stopped growing: it was not a leak, or the leak has ended"
                text = "swapping in has ended" if subject.kind is TrendKind.SWAP_IN else stopped
                events.append((text, {"subject": msgspec.to_builtins(subject), "what": what}))
        return events


def _gpu_of_rank(rank: int) -> str:
    """The pool of a rank's series while its GPU is not known."""
    return f"the GPU of rank {rank}"


def _same_bytes(key: Key, other: Key) -> bool:
    """Whether the bytes of the outer view `key` include those of the inner view `other`."""
    if key.pool != other.pool:
        return False
    if key.view is MemoryScope.ANONYMOUS_BY_TIME:
        return key.role == ("rank" if other.rank is not None else other.role)
    return key.view is MemoryScope.USED or key.rank == other.rank


def _total(sizes: Mapping[int, int], pids: Iterable[int]) -> int | None:
    """None if none of these processes could be read. Pages that processes share since a fork count
    in each of them; that is accurate enough to see growth."""
    known = [sizes[pid] for pid in pids if pid in sizes]
    return sum(known) if known else None


def _by_role(members: Iterable[Member], anonymous: Mapping[int, int]) -> dict[str, int | None]:
    """Anonymous bytes by role. Launchers and memtop's shim are left out: their memory does not
    change."""
    pids: dict[str, list[int]] = {}
    for member in members:
        if member.role not in ("launcher", "memtop"):
            pids.setdefault(member.role, []).append(member.pid)
    return {role: _total(anonymous, found) for role, found in pids.items()}


def _host_pool(host: HostSample, address_space_left: int | None) -> Pool:
    """What a growing rank fills first: the host's memory, or its own address space where that is
    limited."""
    if address_space_left is not None and (host.available_bytes is None or address_space_left < host.available_bytes):
        return Pool(name="the address space (ulimit -v)", left_bytes=address_space_left)
    return Pool(name="host RAM" if host.limit_bytes is None else "the memory group", left_bytes=host.available_bytes)


_Parts = tuple[int | None, dict[str, int | None]]
"""Total bytes, and the bytes of each part by its name; None if not known."""


def _host_parts(host: HostSample, held: Mapping[str, int | None]) -> _Parts:
    own = {processes_of(role): size for role, size in held.items()}
    others = None
    if host.used_bytes is not None:
        others = max(0, host.used_bytes - sum(size or 0 for size in own.values()) - (host.shared_bytes or 0))
    total = host.total_bytes if host.limit_bytes is None else host.limit_bytes
    return total, {**own, "shared memory": host.shared_bytes, "other programs": others}


def _gpu_parts(parts: VramParts) -> _Parts:
    jobs = [job.used_bytes for job in parts.jobs]
    return parts.total_bytes, {
        "tensors": parts.allocated_bytes,
        "cache": parts.cached_bytes,
        "memory of the run outside its allocator": parts.other_own_bytes,
        "other programs": None if None in jobs else sum(size for size in jobs if size is not None),
        "memory listed under no process": parts.unlisted_bytes,
    }
