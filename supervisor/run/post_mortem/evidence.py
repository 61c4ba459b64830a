"""What the supervisor sees of one attempt while it lives, so that its end can be explained.

What a later supervisor could not see any more is kept in `attempts/NNNN/baseline.json`.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections import deque
from collections.abc import Container, Iterable
from pathlib import Path

import msgspec

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.monitor.cgroup import CgroupReader, KillCount, kill_counts
from memtop.supervisor.monitor.processes.proc import PROC
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.run.post_mortem.oom_kills import KillWatch
from memtop.supervisor.run.record.folder import read_json, write_json

CGROUPS = Path("/sys/fs/cgroup")
_KEPT_SECONDS = 30.0
_MOST_PIDS = 4096
# A group's limits change rarely: they are looked up at every fifth sample.
_RARELY = 5


class Baseline(msgspec.Struct, kw_only=True):
    """How things stood before the attempt took its part."""

    started: float
    """Seconds since the epoch."""
    gpu_used_bytes: dict[str, int] = {}
    """By uuid, without what the run itself held."""
    address_space_bytes: int | None = None
    """The least limit of address space that the run's processes were last seen with; None: none."""
    groups: dict[str, tuple[KillCount, ...]] = {}
    """By its path each memory group that a process of the run was found in: it and those above it, with their counters then."""


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """One moment before the end."""

    time: float
    host_fraction: float | None
    shm_free_bytes: int | None
    gpu_free_bytes: dict[str, int]
    gpu_run_bytes: dict[str, int] = {}
    """By uuid what the run's own processes held, where the driver tells it."""


class Witness:
    """Follows one attempt. `folder` is the attempt's; one that a supervisor left behind goes on there."""

    def __init__(self, folder: Path, started: float, machine: MachineSnapshot | None = None) -> None:
        self.pids: set[int] = set()
        self.host_limit_bytes: int | None = None
        self.in_own_group = False
        """The program's memory is limited by another group than the supervisor's own."""
        self._path = folder / "baseline.json"
        self._sights: deque[Sight] = deque()
        self._address_spaces: dict[int, int | None] = {}
        """The limit that each process was last seen with."""
        self._own: dict[int, str] = {}
        """The group that each process was last seen in, as /proc words it."""
        self._groups: dict[str, str] = {}
        """The first path of each such group."""
        self._reader: CgroupReader | None = None
        self._samples = 0
        self.baseline = self._read(started)
        self._kills = KillWatch()
        for path, counts in self.baseline.groups.items():
            self._kills.follow(path, counts, None)
        if machine is not None and not self.baseline.gpu_used_bytes:
            self.baseline.gpu_used_bytes = gpus_without(machine, ())
            self._write()

    def _read(self, started: float) -> Baseline:
        if self._path.exists():
            with contextlib.suppress(RunFolderError):  # damaged: what it knew is lost, what is seen from now on is not
                return read_json(self._path, Baseline)
        return Baseline(started=started)

    def _write(self) -> None:
        with contextlib.suppress(RunFolderError):
            # A full disk costs a later supervisor what this one knows, not the run.
            write_json(self._path, self.baseline)

    def look(self, pid: int) -> None:
        """Note in which memory group a process of the run is. Called often: a group can be entered, filled and left quickly."""
        try:
            lines = (PROC / str(pid) / "cgroup").read_text()
        except OSError:
            return  # it has ended: it stays in the group where it was last seen
        if self._own.get(pid) == lines:
            return
        self._note_address_space(pid)
        self._own[pid] = lines
        self.pids.add(pid)
        if lines in self._groups:
            return
        counts = _readable(lines)
        self._groups[lines] = counts[0].path if counts else ""
        if counts and counts[0].path not in self.baseline.groups:
            self.baseline.groups[counts[0].path] = tuple(counts)
            self._kills.follow(counts[0].path, tuple(counts), time.time())
            self._write()

    @property
    def address_space_bytes(self) -> int | None:
        """The run's processes inherit this one's limit, where none of them could be looked at."""
        known = self.baseline.address_space_bytes
        return _own_address_space() if known is None and not self._address_spaces else known

    def _note_address_space(self, pid: int) -> None:
        try:
            self._address_spaces[pid] = address_space(pid)
        except OSError:
            return  # it has ended, or is another user's: what was last seen of it stays
        least = min((limit for limit in self._address_spaces.values() if limit is not None), default=None)
        if least != self.baseline.address_space_bytes:
            self.baseline.address_space_bytes = least
            self._write()

    def sample(self, machine: MachineSnapshot, members: Iterable[int], trainer: int | None) -> None:
        """Take one sample of the machine in while the program lives."""
        members = set(members)
        if len(self.pids) < _MOST_PIDS:
            self.pids |= members
        for pid in members:
            self.look(pid)
            self._note_address_space(pid)
        self._kills.read(machine.time)
        if not self.baseline.gpu_used_bytes and machine.gpus:
            self.baseline.gpu_used_bytes = gpus_without(machine, members)
            self._write()
        host = machine.host
        fractions = [
            fraction for fraction in (host.used_fraction, self._group_fraction(machine, trainer)) if fraction is not None
        ]
        free = (
            None if host.shm_total_bytes is None or host.shm_used_bytes is None else host.shm_total_bytes - host.shm_used_bytes
        )
        self._sights.append(
            Sight(
                time=machine.time,
                host_fraction=max(fractions, default=None),
                shm_free_bytes=free,
                gpu_free_bytes={gpu.uuid: gpu.free_bytes for gpu in machine.gpus if gpu.uuid and gpu.free_bytes is not None},
                gpu_run_bytes={gpu.uuid: held for gpu in machine.gpus if gpu.uuid and (held := _held(gpu, members))},
            )
        )
        while self._sights[0].time < machine.time - _KEPT_SECONDS:
            self._sights.popleft()

    def _group_fraction(self, machine: MachineSnapshot, trainer: int | None) -> float | None:
        """How full the program's own group is: it may be another than ours, which the machine's sample tells of."""
        self.host_limit_bytes = machine.host.limit_bytes or machine.host.total_bytes
        if trainer is None:
            return None
        if self._reader is None:
            self._reader = CgroupReader(PROC, CGROUPS, trainer)
        if self._samples % _RARELY == 0:
            self._reader.refresh(machine.host.total_bytes)
        self._samples += 1
        memory = self._reader.memory()
        if memory is None or isinstance(memory, str):
            return None
        self.in_own_group = memory.path != machine.host.limit_path
        self.host_limit_bytes = memory.limit_bytes
        return memory.used_bytes / memory.limit_bytes

    @property
    def sights(self) -> tuple[Sight, ...]:
        """The last half minute, oldest first."""
        return tuple(self._sights)

    def kills(self) -> int | None:
        """How many processes the kernel has killed for memory in the run's groups since it was first seen there, as it counts
        now; None if that cannot be known."""
        self._kills.read(time.time())
        return self._kills.count(self._own_groups())

    def killed_near(self, end: float) -> bool | None:
        """Whether one of those that `kills` has counted was shortly before `end` (seconds since the epoch); None if that cannot
        be known."""
        return self._kills.near(self._own_groups(), end)

    def _own_groups(self) -> set[str]:
        """Where the run's processes are, or were last seen."""
        own = {self._groups[lines] for lines in tuple(self._own.values()) if self._groups.get(lines)}
        return own or set(self.baseline.groups)


def _readable(lines: str) -> list[KillCount]:
    try:
        return kill_counts(PROC, CGROUPS, lines)
    except (OSError, ValueError):
        return []  # the hierarchy may not be read here: its counters are not known


def address_space(pid: int) -> int | None:
    """The process's limit of address space (RLIMIT_AS) in bytes; None: unlimited. OSError where it may not be read."""
    lines = (PROC / str(pid) / "limits").read_text().splitlines()
    words = next((line.split() for line in lines if line.startswith("Max address space")), [])
    return int(words[3]) if len(words) > 3 and words[3].isdecimal() else None


def address_room(pid: int) -> int | None:
    """What the process may still map, in bytes; None: as much as it likes, or it may not be read."""
    try:
        limit = address_space(pid)
        mapped = 0 if limit is None else int((PROC / str(pid) / "statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, IndexError):
        return None  # it has ended, or is another user's
    return None if limit is None else max(0, limit - mapped)


def _own_address_space() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def gpus_without(machine: MachineSnapshot, pids: Iterable[int]) -> dict[str, int]:
    """By uuid what is taken of each GPU, less what these processes hold."""
    pids = frozenset(pids)

    def used(gpu: GpuSample) -> int | None:
        if gpu.used_bytes is None:
            return None
        return max(0, gpu.used_bytes - _held(gpu, pids))

    return {gpu.uuid: taken for gpu in machine.gpus if gpu.uuid and (taken := used(gpu)) is not None}


def _held(gpu: GpuSample, pids: Container[int]) -> int:
    """What these processes hold of it, as far as the driver tells."""
    return sum(row.used_bytes or 0 for row in gpu.processes if row.pid in pids)
