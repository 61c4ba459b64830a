"""Follows a run's memory: by its updates what each rank and the loader workers hold, by the clock what the cards are taken for.

Fed by the supervisor with reports and samples; says what leaks, when that memory is full, and why a gauge is in danger.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from memtop.supervisor.monitor.history import gpu_key
from memtop.supervisor.monitor.processes.proc import PROC
from memtop.supervisor.monitor.values import Band, HostSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankUse, VramParts, placed, ranks_on, vram_parts
from memtop.supervisor.recovery.danger import DangerWatch
from memtop.supervisor.recovery.leaks import OF_HOST_MEMORY, Leak, Pool, swap_trend, trends
from memtop.supervisor.recovery.trend import BY_SECOND, BY_UPDATE, Growth, Sustained
from memtop.supervisor.run.post_mortem.evidence import address_room
from memtop.supervisor.wire import Trend

_HOST = "host"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ROLES = {"rank": "the ranks", "loader worker": "the loader workers", "other": "the run's other processes"}


class Member(NamedTuple):
    """A process of the run."""

    pid: int
    role: str
    """See run_memory.ROLES."""
    rank: int | None = None


class Key(NamedTuple):
    """A series. Of those of one family the first in `_KINDS` that leaks speaks for all: the others see the same bytes."""

    pool: str
    kind: str
    who: str
    """`rank 0`, `the loader workers`, `GPU 0`"""


# From the innermost view to the outermost.
_KINDS = ("allocated", "reserved", "used", "anonymous", "anonymous by time")
_BY_UPDATE = ("allocated", "reserved", "anonymous")


class TrendWatch:
    """The series of one attempt."""

    def __init__(self) -> None:
        self.trends: tuple[Trend, ...] = ()
        """What grows, the nearest end first."""
        self.own: tuple[Trend, ...] = ()
        """Those of them that a new start of the run's processes would end: what fills a card from outside is not theirs, and an
        allocator's growing cache is given back before anything fails."""
        self.swap_in = Sustained()
        self._series: dict[Key, Growth] = {}
        self._pools: dict[str, Pool] = {}
        self._cards: dict[int, str] = {}
        """The card that each rank is on."""
        self._cached: dict[int, int] = {}
        """What each rank's allocator keeps beside its tensors."""
        self._dangers: dict[str, DangerWatch] = {}
        self._update: int | None = None
        self._read_at: int | None = None
        self._tells: set[int] = set()
        """The ranks that report their anonymous memory themselves."""
        self._announced: set[str] = set()
        self._withdrawn: set[str] = set()

    # --- what comes in ----------------------------------------------------------------------------------------------------

    def step(self, rank: int, report: Mapping[str, Any]) -> None:
        """A rank has done an update."""
        update, time = report.get("update"), report.get("time")
        if not isinstance(update, int) or time is None:
            return
        if rank == 0:
            self._update = update
        card = self._cards.get(rank, f"the card of rank {rank}")
        for kind in ("allocated", "reserved"):
            self._add(Key(card, kind, f"rank {rank}"), update, time, report.get(f"{kind}_bytes"))
        if report.get("anonymous_bytes") is not None:
            self._tells.add(rank)
            self._add(Key(_HOST, "anonymous", f"rank {rank}"), update, time, report["anonymous_bytes"])
        reserved, allocated = report.get("reserved_bytes"), report.get("allocated_bytes")
        if reserved is not None and allocated is not None:
            self._cached[rank] = reserved - allocated

    def look(self, time: float, members: Iterable[Member]) -> None:
        """Once after new updates: what the processes hold that do not tell it themselves."""
        if self._update is None or self._update == self._read_at:
            return
        self._read_at = self._update
        members = list(members)
        workers = [member.pid for member in members if member.role == "loader worker"]
        if workers:
            self._add(Key(_HOST, "anonymous", _ROLES["loader worker"]), self._update, time, anonymous_bytes(workers))
        for member in members:
            if member.rank is not None and member.rank not in self._tells:
                self._add(Key(_HOST, "anonymous", f"rank {member.rank}"), self._update, time, anonymous_bytes([member.pid]))
        self._judge()

    def sample(
        self,
        machine: MachineSnapshot,
        members: Iterable[Member],
        ranks: Iterable[RankUse],
        bases: Mapping[str, int],
        *,
        loading: bool = False,
    ) -> list[str]:
        """The machine a second later; what is to be told of gauges that stay in danger. `bases`: RunState.gpu_base_bytes;
        `loading`: the program is not at work yet, and what grows meanwhile is what it loads."""
        members, ranks = list(members), placed(ranks, machine.gpus)
        host, held = machine.host, _held(members)
        self._pools = {_HOST: _host_pool(host, members)}
        if host.swap_in_bytes_per_second is not None:
            self.swap_in.add(host.swap_in_bytes_per_second)
        for role, size in held.items():
            if not loading:
                self._add(Key(_HOST, "anonymous by time", _ROLES.get(role, role)), machine.time, machine.time, size)
        told = [self._danger(_HOST, "host RAM", machine.time, host.band, host.used_fraction, _host_parts(host, held))]
        by_pid = {member.pid: member.rank for member in members if member.rank is not None}
        for gpu in machine.gpus:
            here, key = ranks_on(gpu, ranks), gpu_key(gpu)
            pids = {member.pid for member in members}
            if not here and not any(row.pid in pids for row in gpu.processes):
                continue  # somebody else's card is not this run's to watch
            self._pools[key] = Pool(name=f"GPU {gpu.index}", left_bytes=gpu.free_bytes)
            self._place(key, [by_pid[rank.pid] for rank in here if rank.pid in by_pid])
            if not loading:
                self._add(Key(key, "used", f"GPU {gpu.index}"), machine.time, machine.time, gpu.used_bytes)
            parts = _gpu_parts(vram_parts(gpu, here, own_pids=pids, base_bytes=bases.get(key)))
            told.append(self._danger(key, f"GPU {gpu.index}", machine.time, gpu.band, gpu.used_fraction, parts))
        self._judge()
        return [line for line in told if line is not None]

    def _place(self, card: str, ranks: Iterable[int]) -> None:
        """These ranks are on this card: what was followed of them before that was known is followed as the card's."""
        for rank in ranks:
            before = self._cards.get(rank, f"the card of rank {rank}")
            if before != card:
                moved = {
                    key: key._replace(pool=card) for key in self._series if key.pool == before and key.who == f"rank {rank}"
                }
                for old, new in moved.items():
                    self._series[new] = self._series.pop(old)
                self._cards[rank] = card

    def _add(self, key: Key, x: float, time: float, value: int | None) -> None:
        if value is not None:
            if key not in self._series:
                self._series[key] = Growth(BY_UPDATE if key.kind in _BY_UPDATE else BY_SECOND)
            self._series[key].add(x, time, value)

    def _danger(self, key: str, gauge: str, time: float, band: Band, fraction: float | None, parts: _Parts) -> str | None:
        watch = self._dangers.setdefault(key, DangerWatch(gauge))
        return watch.add(time, band, fraction, *parts)

    # --- what is said ------------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        leaking = {key: slope for key, growth in self._series.items() if (slope := growth.leaking) is not None}
        found: list[Leak] = []
        outside = set()
        for key, slope in sorted(leaking.items(), key=lambda item: _KINDS.index(item[0].kind)):
            if any(_same(key, other) for other in leaking if _KINDS.index(other.kind) < _KINDS.index(key.kind)):
                continue
            spare = self._cached.get(int(key.who.removeprefix("rank ")), 0) if key.kind == "allocated" else 0
            found.append(Leak(_words(key, self._pools), key.pool, slope, key.kind in _BY_UPDATE, spare))
            if key.kind in ("used", "reserved"):
                outside.add(found[-1].what)
        said = list(trends(found, self._pools, self._update))
        self.own = tuple(trend for trend in said if trend.what not in outside)
        rate = self.swap_in.value
        if rate:
            said.append(swap_trend(rate, self.swap_in.share))
        self.trends = tuple(said)

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """What has begun to grow since the last call, and what has been taken back: each once in an attempt."""
        told: list[tuple[str, dict[str, Any]]] = []
        present = {trend.what: trend for trend in self.trends}
        for what, trend in present.items():
            if what not in self._announced:
                self._announced.add(what)
                told.append((trend.message, {"update": self._update, **msgspec.to_builtins(trend)}))
        for what in self._announced - present.keys() - self._withdrawn:
            self._withdrawn.add(what)
            ended = "swapping in has ended" if what == "swap-in" else f"{what} no longer grows: it was no leak, or it has ended"
            told.append((ended, {"what": what}))
        return told


def anonymous_bytes(pids: Iterable[int]) -> int | None:
    """Resident bytes of these processes that are of no file and not shared; None where none can be read. Pages that a fork
    left in common count in each: what matters here is how the sum grows."""
    total = None
    for pid in pids:
        try:
            with (PROC / str(pid) / "statm").open("rb", buffering=0) as file:
                words = file.read(128).split()
        except OSError:
            continue  # it has ended, or is hidden from this user
        if len(words) > 2:
            total = (total or 0) + (int(words[1]) - int(words[2])) * _PAGE
    return total


def _same(key: Key, other: Key) -> bool:
    """Whether the bytes of `key` are those of `other` too, seen from further outside."""
    if key.pool != other.pool:
        return False
    if key.kind == "anonymous by time":
        return (other.who == key.who) or (key.who == _ROLES["rank"] and other.who.startswith("rank "))
    return key.kind == "used" or key.who == other.who


def _words(key: Key, pools: Mapping[str, Pool]) -> str:
    if key.pool == _HOST:
        return f"{OF_HOST_MEMORY} of {key.who}"
    pool = pools.get(key.pool)
    card = pool.name if pool is not None else "the card"
    if key.kind == "used":
        return card
    return f"{card} {key.kind} by {key.who}"


def _host_pool(host: HostSample, members: Iterable[Member]) -> Pool:
    """What a rank that grows fills first: the host's memory, or its own address space where that is limited."""
    name = "host RAM" if host.limit_bytes is None else "the memory group"
    rooms = [room for member in members if member.role == "rank" and (room := address_room(member.pid)) is not None]
    room = min(rooms, default=None)
    if room is not None and (host.available_bytes is None or room < host.available_bytes):
        return Pool(name="the address space (ulimit -v)", left_bytes=room)
    return Pool(name=name, left_bytes=host.available_bytes)


def _held(members: Iterable[Member]) -> dict[str, int | None]:
    """Anonymous bytes by role, without the launchers, whose memory does not move."""
    by_role: dict[str, list[int]] = {}
    for member in members:
        if member.role != "launcher":
            by_role.setdefault(member.role, []).append(member.pid)
    return {role: anonymous_bytes(pids) for role, pids in by_role.items()}


_Parts = tuple[int | None, dict[str, int | None]]
"""The whole, and its parts by their names; None: not known."""


def _host_parts(host: HostSample, held: Mapping[str, int | None]) -> _Parts:
    own = {_ROLES.get(role, role): size for role, size in held.items()}
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
        "what the run holds beside its allocator": parts.other_own_bytes,
        "other programs": None if None in jobs else sum(size for size in jobs if size is not None),
        "memory listed under no process": parts.unlisted_bytes,
    }
