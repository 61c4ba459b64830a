"""Host memory of a run's processes by their role, shared pages counted once."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from memtop.supervisor.monitor.processes.proc import PROC, ProcessId, identify, parent_of
from memtop.supervisor.run.post_mortem.evidence import address_room
from memtop.supervisor.run_memory import RoleMemory

ROLES = ("launcher", "rank", "loader worker", "other", "memtop")
EVERY_SECONDS = 0.9
"""With every sample, which come once a second."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The kernel walks every page of a process for this, and the process cannot map memory meanwhile.
# Readings take at most a hundredth of the time, however large the processes are.
_SHARE = 100
_FOLLOWED_FROM = 1 << 20
"""Between two readings smaller changes do not count."""
_LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate-launch"),
    *("accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
)


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The values of /proc/PID/smaps_rollup for one process, in bytes."""

    pss_bytes: int
    uss_bytes: int
    shm_bytes: int | None
    """None on kernels before 5.1, which do not report it separately."""
    swap_bytes: int | None


def process_memory(pid: int, proc_root: Path = PROC) -> ProcessMemory | None:
    """Memory of one process.

    None if this user may not read it. Raises ProcessLookupError if it has ended.
    """
    try:
        with (proc_root / str(pid) / "smaps_rollup").open("rb", buffering=0) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        if identify(pid, proc_root) is not None:
            return None  # a kernel before 4.14 has no such file
        raise ProcessLookupError(pid) from None
    except PermissionError:
        return None
    rows = {words[0]: int(words[1]) * 1024 for line in lines if len(words := line.split()) == 3 and words[1].isdigit()}
    if b"Pss:" not in rows:
        raise ProcessLookupError(pid)  # a zombie: its memory has already been freed
    return ProcessMemory(
        pss_bytes=rows[b"Pss:"],
        uss_bytes=sum(rows.get(name, 0) for name in (b"Private_Clean:", b"Private_Dirty:", b"Private_Hugetlb:")),
        shm_bytes=rows.get(b"Pss_Shmem:"),
        swap_bytes=rows.get(b"SwapPss:"),
    )


class MemoryReading(NamedTuple):
    """One reading of all processes of a run."""

    roles: tuple[RoleMemory, ...] = ()
    """In the order of ROLES; roles without a process are left out. If a value cannot be read for
    one process, it is None for its whole role."""
    pss_bytes: Mapping[int, int] = {}
    """By pid; a process that could not be read is left out."""
    role_of: Mapping[int, str] = {}
    """By pid, of the same processes."""

    def after(self, more: Mapping[int, int]) -> MemoryReading:
        """The reading after these processes have got so many more private bytes each (negative:
        fewer)."""
        known = {pid: max(-self.pss_bytes[pid], size) for pid, size in more.items() if pid in self.pss_bytes}
        by_role: Counter[str] = Counter()
        for pid, size in known.items():
            by_role[self.role_of[pid]] += size

        def moved(role: RoleMemory) -> RoleMemory:
            if role.pss_bytes is None or role.uss_bytes is None:
                return role
            size = by_role[role.role]
            return replace(role, pss_bytes=role.pss_bytes + size, uss_bytes=max(0, role.uss_bytes + size))

        pss = {pid: size + known.get(pid, 0) for pid, size in self.pss_bytes.items()}
        return MemoryReading(tuple(map(moved, self.roles)), pss, self.role_of)


def role_memory(processes: Iterable[ProcessId], rank_pids: Collection[int], proc_root: Path = PROC) -> MemoryReading:
    """The memory of these processes."""
    alive = [process.pid for process in processes if identify(process.pid, proc_root) == process]
    found: dict[str, list[ProcessMemory | None]] = {}
    pss, role_of = {}, {}
    for pid, role in roles(alive, rank_pids, proc_root).items():
        try:
            memory = process_memory(pid, proc_root)
        except ProcessLookupError:
            continue  # it has ended in the meantime
        found.setdefault(role, []).append(memory)
        if memory is not None:
            pss[pid], role_of[pid] = memory.pss_bytes, role
    return MemoryReading(tuple(_together(role, found[role]) for role in ROLES if found.get(role)), pss, role_of)


def _together(role: str, members: list[ProcessMemory | None]) -> RoleMemory:
    def total(value: Callable[[ProcessMemory], int | None]) -> int | None:
        values = [None if member is None else value(member) for member in members]
        return None if None in values else sum(number for number in values if number is not None)

    return RoleMemory(
        role=role,
        processes=len(members),
        pss_bytes=total(lambda member: member.pss_bytes),
        uss_bytes=total(lambda member: member.uss_bytes),
        shm_bytes=total(lambda member: member.shm_bytes),
        swap_bytes=total(lambda member: member.swap_bytes),
    )


def roles(pids: Collection[int], rank_pids: Collection[int], proc_root: Path = PROC) -> dict[int, str]:
    """The role of each process.

    Ranks are the processes that the agent reported, or the program itself (below its launcher). The
    ancestors of a rank are launchers, its descendants loader workers. The shim above the program,
    which is memtop's own, is added.
    """
    parents = {pid: parent_of(pid, proc_root) for pid in pids}
    for parent in {parent for parent in parents.values() if parent is not None and parent not in parents}:
        if _is_shim(parent, proc_root):
            parents[parent] = None
    ranks = {pid for pid in rank_pids if pid in parents} or _programs(parents, proc_root)
    above = {ancestor for rank in ranks for ancestor in _ancestors(rank, parents)} - ranks
    found = {}
    for pid in parents:
        if pid in ranks:
            found[pid] = "rank"
        elif pid in above:
            found[pid] = "memtop" if _is_shim(pid, proc_root) else "launcher"
        else:
            found[pid] = "loader worker" if ranks.intersection(_ancestors(pid, parents)) else "other"
    return found


def _ancestors(pid: int, parents: dict[int, int | None]) -> list[int]:
    """The ancestors within the run, the nearest first."""
    found: list[int] = []
    above = parents.get(pid)
    while above is not None and above in parents and above not in found:
        found.append(above)
        above = parents[above]
    return found


def _programs(parents: dict[int, int | None], proc_root: Path) -> set[int]:
    """The topmost processes that are not launchers."""
    launchers = {pid for pid in parents if _is_launcher(pid, proc_root)}
    return {pid for pid, parent in parents.items() if pid not in launchers and (parent not in parents or parent in launchers)}


def _is_launcher(pid: int, proc_root: Path) -> bool:
    """True for `torchrun ...`, `python -m torch.distributed.run ...`, `accelerate launch ...` and
    the run's shim. Only the program and its module count, not the arguments after them."""
    words = [word for word in _command(pid, proc_root)[:4] if not word.startswith("-")][:2]
    return _is_shim(pid, proc_root) or any(Path(word).name in _LAUNCHERS for word in words)


def _is_shim(pid: int, proc_root: Path) -> bool:
    return any(word.endswith("supervisor/run/processes/shim.py") for word in _command(pid, proc_root)[:4])


def _command(pid: int, proc_root: Path) -> list[str]:
    try:
        raw = (proc_root / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []  # it has ended in the meantime
    return os.fsdecode(raw).split("\0")


class HostReading(msgspec.Struct, frozen=True, kw_only=True):
    """What /proc shows of the run's processes at one moment."""

    anonymous: Mapping[int, int] = {}
    """By pid, private resident bytes that no file backs; a process that could not be read is left
    out."""
    address_space_left: int | None = None
    """Bytes that the rank with the least left may still map; None without a limit (ulimit -v)."""


def read_host_memory(pids: Iterable[int], rank_pids: Iterable[int]) -> HostReading:
    """Read the memory of the run's processes; `rank_pids` are the ranks among them."""
    left = [room for pid in rank_pids if (room := address_room(pid)) is not None]
    return HostReading(anonymous=anonymous_bytes(pids), address_space_left=min(left, default=None))


def anonymous_bytes(pids: Iterable[int], proc_root: Path = PROC) -> dict[int, int]:
    """By pid, resident bytes that no file backs and that are not shared memory. A process that has
    ended, or that this user may not read, is left out."""
    found = {}
    for pid in pids:
        try:
            with (proc_root / str(pid) / "statm").open("rb", buffering=0) as file:
                words = file.read(128).split()
        except OSError:
            continue
        if len(words) > 2:
            found[pid] = (int(words[1]) - int(words[2])) * _PAGE_BYTES
    return found


class RunMemory:
    """The newest reading. It is repeated every second, or less often if it takes long. Until then
    the private bytes that each process gets or gives back are followed, which is cheap."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.newest = MemoryReading()
        self._last = MemoryReading()
        """What was read last, and the private bytes of each process then."""
        self._private: Mapping[int, int] = {}
        self._followed: Mapping[int, int] = {}
        """How many more each has got since, as far as `newest` counts it."""
        self._read: frozenset[ProcessId] = frozenset()
        """The processes of the newest reading."""
        self._monotonic = monotonic
        self._due = float("-inf")

    def update(self, processes: Collection[ProcessId], rank_pids: Collection[int]) -> None:
        """Read if it is due. A reading of other processes, such as those of the attempt before, no
        longer counts."""
        if self._read.isdisjoint(processes):
            self.newest, self._due = MemoryReading(), float("-inf")
        if not processes:
            return
        started = self._monotonic()
        private = anonymous_bytes(process.pid for process in processes)
        if started < self._due:
            more = {pid: size - before for pid, before in self._private.items() if (size := private.get(pid)) is not None}
            if abs(sum(more.values()) - sum(self._followed.values())) >= _FOLLOWED_FROM:
                self._followed, self.newest = more, self._last.after(more)
            return
        self._read, self._private, self._followed = frozenset(processes), private, {}
        self.newest = self._last = role_memory(processes, rank_pids)
        ended = self._monotonic()
        self._due = started + max(EVERY_SECONDS, _SHARE * (ended - started))
