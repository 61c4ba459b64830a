"""Collects evidence while an attempt runs, so that its end can be explained.

What a later supervisor could not find out is stored in `attempts/NNNN/baseline.json`.
The kernel's OOM kills are counted in the run's cgroups, and read from the kernel's log.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from collections import deque
from collections.abc import Collection, Container, Iterable
from pathlib import Path

import msgspec

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.monitor.cgroup import CgroupReader, KillCount, kill_counts, kills_in, memory_groups
from memtop.supervisor.monitor.processes.proc import PROC
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.run.record.folder import read_derived, write_json

CGROUPS = Path("/sys/fs/cgroup")
_KEPT_SECONDS = 30.0
_MOST_PIDS = 4096
# The limits of a group change rarely, so they are read at every fifth sample.
_RARELY = 5


class Baseline(msgspec.Struct, kw_only=True):
    """The state of the machine before the attempt used memory."""

    started: float
    """Seconds since the epoch."""
    gpu_used_bytes: dict[str, int] = {}
    """By uuid, without the memory of the run itself."""
    address_space_bytes: int | None = None
    """The lowest address-space limit of the run's processes. None: no limit."""
    groups: dict[str, tuple[KillCount, ...]] = {}
    """By path, each memory group of the run's processes: the group and those above it, with their
    OOM-kill counters at that time."""


class MachineMoment(msgspec.Struct, frozen=True, kw_only=True):
    """One moment before the end."""

    time: float
    host_fraction: float | None
    shm_free_bytes: int | None
    has_gpu: bool = False
    gpu_run_bytes: dict[str, int] = {}
    """By uuid, the memory of the run's processes, if the driver reports it."""


class AttemptEvidence:
    """Follows one attempt.

    `folder` is the attempt's folder, which may contain the baseline of an earlier supervisor.
    """

    def __init__(self, folder: Path, started: float, machine: MachineSnapshot | None = None) -> None:
        self.pids: set[int] = set()
        self.host_limit_bytes: int | None = None
        self._limiting_group: str | None = None
        """The path of the group that limits the program's memory."""
        self._path = folder / "baseline.json"
        self._moments: deque[MachineMoment] = deque()
        self._address_spaces: dict[int, int | None] = {}
        """The last known limit of each process."""
        self._own: dict[int, str] = {}
        """The last known group of each process, as in /proc/PID/cgroup."""
        self._groups: dict[str, str] = {}
        """The path of each such group."""
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
        with contextlib.suppress(RunFolderError):  # another user's: start with a new baseline
            return read_derived(self._path, Baseline) or Baseline(started=started)
        return Baseline(started=started)

    def _write(self) -> None:
        with contextlib.suppress(RunFolderError):
            # On a full disk a later supervisor lacks this evidence, but the run continues.
            write_json(self._path, self.baseline)

    def look(self, pid: int) -> None:
        """Note the memory group and the address-space limit of a process.

        Called often, because a process may use a group only for a short time. It may also set its
        address-space limit just before it runs the program, as a shell does (`ulimit -v`).
        """
        if self._address_spaces.get(pid) is None:
            self._note_address_space(pid)
        self._note_group(pid)

    def _note_group(self, pid: int) -> None:
        try:
            lines = (PROC / str(pid) / "cgroup").read_text()
        except OSError:
            return  # it has ended: its last known group stays
        if self._own.get(pid) == lines:
            return
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

    def others_bytes(self, gpu: GpuSample) -> int:
        """What other programs hold of a GPU: all that was in use when the attempt began. If nothing
        had been measured then, what is in use now, without the run's own."""
        known = self.baseline.gpu_used_bytes.get(gpu.uuid or "")
        return max(0, (gpu.taken_bytes or 0) - _held(gpu, self.pids)) if known is None else known

    @property
    def address_space_bytes(self) -> int | None:
        """The address-space limit of the run.

        If no process could be read, they have inherited the supervisor's limit.
        """
        known = self.baseline.address_space_bytes
        return _own_address_space() if known is None and not self._address_spaces else known

    def _note_address_space(self, pid: int) -> None:
        try:
            self._address_spaces[pid] = address_space(pid)
        except OSError:
            return  # it has ended, or belongs to another user: its last known limit stays
        least = min((limit for limit in self._address_spaces.values() if limit is not None), default=None)
        if least != self.baseline.address_space_bytes:
            self.baseline.address_space_bytes = least
            self._write()

    def sample(self, machine: MachineSnapshot, members: Iterable[int], trainer: int | None) -> None:
        """Add a sample of the machine while the program runs."""
        members = set(members)
        if len(self.pids) < _MOST_PIDS:
            self.pids |= members
        for pid in members:
            self._note_group(pid)
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
        self._moments.append(
            MachineMoment(
                time=machine.time,
                host_fraction=max(fractions, default=None),
                shm_free_bytes=free,
                has_gpu=bool(machine.gpus),
                gpu_run_bytes={gpu.uuid: held for gpu in machine.gpus if gpu.uuid and (held := _held(gpu, members))},
            )
        )
        while self._moments[0].time < machine.time - _KEPT_SECONDS:
            self._moments.popleft()

    def _group_fraction(self, machine: MachineSnapshot, trainer: int | None) -> float | None:
        """How full the program's group is.

        It may be another group than ours, which is in the machine's sample.
        """
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
        self._limiting_group = memory.path
        self.host_limit_bytes = memory.limit_bytes
        return memory.used_bytes / memory.limit_bytes

    @property
    def moments(self) -> tuple[MachineMoment, ...]:
        """The last half minute, oldest first."""
        return tuple(self._moments)

    def kills(self) -> int | None:
        """How many processes the kernel has OOM-killed in the run's groups since the run used them.

        None if unknown.
        """
        self._kills.read(time.time())
        return self._kills.count(self._own_groups())

    def killed_near(self, end: float) -> bool | None:
        """Whether one of these kills happened shortly before `end` (seconds since the epoch).

        None if unknown.
        """
        return self._kills.near(self._own_groups(), end)

    def killed_in_own_group(self, end: float) -> bool:
        """Whether such a kill was in a group that the supervisor is not in: in a shared group the
        kernel may have killed another program."""
        shared = _groups_of_supervisor()
        return shared is not None and self._kills.near(self._own_groups() - shared, end) is True

    @property
    def in_own_group(self) -> bool:
        """Whether a group that the supervisor is not in limits the program's memory."""
        shared = _groups_of_supervisor()
        return shared is not None and self._limiting_group is not None and self._limiting_group not in shared

    def _own_groups(self) -> set[str]:
        """The groups in which the run's processes are or were last."""
        own = {self._groups[lines] for lines in tuple(self._own.values()) if self._groups.get(lines)}
        return own or set(self.baseline.groups)


def _groups_of_supervisor() -> set[str] | None:
    """The paths of this process's memory group and of those above it. None if they cannot be read.

    Whether a limit is set does not matter: it may change between two readings.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text()
        return {str(path) for path, _ in memory_groups(PROC, CGROUPS, lines)}
    except (OSError, ValueError):
        return None


def _readable(lines: str) -> list[KillCount]:
    try:
        return kill_counts(PROC, CGROUPS, lines)
    except (OSError, ValueError):
        return []  # the hierarchy cannot be read here, so its counters are unknown


def address_space(pid: int) -> int | None:
    """The process's address-space limit (RLIMIT_AS) in bytes.

    None: unlimited. Raises OSError if it cannot be read.
    """
    lines = (PROC / str(pid) / "limits").read_text().splitlines()
    words = next((line.split() for line in lines if line.startswith("Max address space")), [])
    return int(words[3]) if len(words) > 3 and words[3].isdecimal() else None


def address_room(pid: int) -> int | None:
    """How many bytes the process may still map. None: unlimited or unknown."""
    try:
        limit = address_space(pid)
        mapped = 0 if limit is None else int((PROC / str(pid) / "statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, IndexError):
        return None  # it has ended, or belongs to another user
    return None if limit is None else max(0, limit - mapped)


def _own_address_space() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def gpus_without(machine: MachineSnapshot, pids: Iterable[int]) -> dict[str, int]:
    """By uuid, the used memory of each GPU without that of these processes."""
    pids = frozenset(pids)

    def used(gpu: GpuSample) -> int | None:
        if gpu.used_bytes is None:
            return None
        return max(0, gpu.used_bytes - _held(gpu, pids))

    return {gpu.uuid: taken for gpu in machine.gpus if gpu.uuid and (taken := used(gpu)) is not None}


def _held(gpu: GpuSample, pids: Container[int]) -> int:
    """The memory of these processes on the GPU, as far as the driver reports it."""
    return sum(row.used_bytes or 0 for row in gpu.processes if row.pid in pids)


RELATED_SECONDS = 60.0
"""A kill this many seconds before the end of a program may have caused it: torchrun gives the other
ranks 30 s, and a large process needs some time to end."""
_MOST_RISES = 64


class KillWatch:
    """Reads the counters repeatedly. Times are in seconds since the epoch."""

    def __init__(self) -> None:
        self._chains: dict[str, tuple[KillCount, ...]] = {}
        """By path, each group and those above it, as they were last read."""
        self._grown: dict[str, int] = {}
        self._read: dict[str, float | None] = {}
        self._rises: dict[str, deque[tuple[float | None, float]]] = {}
        """When its counter increased: between the first moment (None: not read before) and the
        second."""
        self._silent: set[str] = set()
        """Groups that could not be read last time."""
        # The sampling and the post-mortem may read at the same time, in different threads.
        self._lock = threading.Lock()

    def follow(self, path: str, counts: tuple[KillCount, ...], since: float | None) -> None:
        """Count in this group, starting from these counters.

        `since`: when they were read, None if unknown.
        """
        with self._lock:
            if path not in self._chains:
                self._chains[path], self._grown[path], self._read[path] = counts, 0, since
                self._rises[path] = deque(maxlen=_MOST_RISES)

    def read(self, now: float) -> None:
        with self._lock:
            for path, chain in self._chains.items():
                grown = _since(chain)
                if grown is None:
                    self._silent.add(path)
                    continue
                self._silent.discard(path)
                if grown:
                    self._rises[path].append((self._read[path], now))
                self._grown[path] += grown
                self._chains[path], self._read[path] = _renewed(chain), now

    def count(self, paths: Iterable[str]) -> int | None:
        """The most kills in one of these groups so far.

        None if there was none and no group can be read any more.
        """
        with self._lock:
            known = [path for path in paths if self._grown.get(path) or (path in self._chains and path not in self._silent)]
            return max((self._grown[path] for path in known), default=None)

    def near(self, paths: Collection[str], end: float) -> bool | None:
        """Whether a kill happened in one of these groups shortly before `end`.

        None if the time is unknown.
        """
        with self._lock:
            rises = [rise for path in paths for rise in self._rises.get(path, ())]
            silent = not paths or any(path in self._silent for path in paths)
        known: bool | None = None if silent else False
        for earliest, latest in rises:
            if latest < end - RELATED_SECONDS or (earliest is not None and earliest > end):
                continue
            if earliest is not None and latest - earliest <= RELATED_SECONDS:
                return True
            known = None
        return known


def _since(chain: tuple[KillCount, ...]) -> int | None:
    """By how much the counter of a group has increased.

    If the group does not exist any more (a scope ends with its program), the group above it is
    used, if it includes its kills.
    """
    for before in chain:
        now = _kills(before)
        if now is not None:
            return max(0, now - before.kills)
        if before.version == 1:
            return None
    return None


def _renewed(chain: tuple[KillCount, ...]) -> tuple[KillCount, ...]:
    """The present counters. Groups that do not exist any more are left out."""
    now = ((before, _kills(before)) for before in chain)
    return tuple(KillCount(path=before.path, version=before.version, kills=kills) for before, kills in now if kills is not None)


def _kills(count: KillCount) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return kills_in(Path(count.path), count.version)
    return None


_WANTED = re.compile(r"oom-kill|oom_kill|out of memory|killed process|memory cgroup", re.IGNORECASE)
_MOST_LINES = 64
# A margin, because two clocks are compared.
_MARGIN_SECONDS = 1.0


def kernel_lines(since: float, until: float, now: float, path: str = "/dev/kmsg") -> tuple[str, ...]:
    """The lines about OOM kills between two moments (seconds since the epoch).

    Empty if this user may not read the log.

    `now` is the present time of the same clock.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    found: deque[str] = deque(maxlen=_MOST_LINES)
    booted = now - time.monotonic()
    try:
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue  # overwritten before it was read
            except OSError:
                break  # no more lines: the next read would block
            if not record:
                break
            head, _, text = record.decode(errors="replace").partition(";")
            stamp = head.split(",")[2:3]
            if not stamp or not stamp[0].isdigit() or not _WANTED.search(text):
                continue
            if since - _MARGIN_SECONDS <= booted + int(stamp[0]) / 1e6 <= until + _MARGIN_SECONDS:
                found.append(text.splitlines()[0])
    finally:
        os.close(descriptor)
    return tuple(found)
