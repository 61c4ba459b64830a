"""The limits that the kernel will enforce on this process: cgroup versions 1 and 2, own group and those above.

The trainer uses this file as well: it imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

T = TypeVar("T")

# Version 1 writes "no limit" as the greatest number of pages, in bytes: close to 2^63.
_UNLIMITED_V1 = 2**62


class CgroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The group that leaves the least room. Bytes; the inactive file cache, which the kernel gives back, does not
    count as used. The last three are None where the group's statistics do not tell them."""

    limit_bytes: int
    used_bytes: int
    path: str
    cached_bytes: int | None = None
    """File cache without shared memory."""
    dirty_bytes: int | None = None
    shared_bytes: int | None = None


class CgroupSwap(msgspec.Struct, frozen=True, kw_only=True):
    """The group that leaves the least swap. Bytes; `used_bytes` is None where the kernel does not count it."""

    limit_bytes: int
    used_bytes: int | None


class CgroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What changes rarely. None: there is no such limit, or (with the field's name in `unknown`) it cannot be told."""

    throttle_bytes: int | None = None
    """The lowest memory.high."""
    swap: CgroupSwap | None = None
    oom_kills: int | None = None
    cpus: float | None = None
    """CPU time that the tightest group allows, in cores."""
    unknown: dict[str, str] = {}


class _Files(msgspec.Struct, frozen=True):
    limit: str
    usage: str
    cache: str
    """Key of memory.stat: what the kernel takes back first, this group and those below it."""
    file: str
    shared: str
    dirty: tuple[str, str]


_FILES = {
    1: _Files(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_cache",
        "total_shmem",
        ("total_dirty", "total_writeback"),
    ),
    2: _Files("memory.max", "memory.current", "inactive_file", "file", "shmem", ("file_dirty", "file_writeback")),
}

_Group = tuple[Path, int]
"""A directory and the version of its hierarchy."""


class CgroupReader:
    """The groups of this process. Where they lie and what they allow is looked up by `refresh`; `memory` reads only the
    usage of those that have a limit."""

    def __init__(self, proc_root: Path, cgroup_root: Path, pid: int | None = None) -> None:
        """Of another process where `pid` is given."""
        self._proc = proc_root
        self._whose = "self" if pid is None else str(pid)
        self._root = cgroup_root
        self._lines: str | None = None
        self._memory_groups: list[_Group] = []
        self._cpu_groups: list[_Group] = []
        self._limited: list[tuple[_Group, int]] = []
        self._problem: str | None = "the cgroup has not been read yet"

    def refresh(self, machine_bytes: int | None) -> None:
        """Find our groups and their memory limits anew. A limit at or above the machine's memory is none."""
        self._limited, self._problem = [], None
        try:
            self._find_groups()
        except OSError as error:
            self._problem = f"cannot read {self._proc}/{self._whose}/cgroup: {error.strerror}"
            self._lines, self._memory_groups, self._cpu_groups = None, [], []
            return
        for group in self._memory_groups:
            directory, version = group
            try:
                limit = _number(directory / _FILES[version].limit)
            except (OSError, ValueError) as error:
                self._problem = f"cannot read the memory limit in {directory}: {error}"
                return
            if limit is not None and limit < (_UNLIMITED_V1 if machine_bytes is None else machine_bytes):
                self._limited.append((group, limit))

    def memory(self) -> CgroupMemory | str | None:
        """The group with the least room left, None where no limit is below the machine's memory, or the reason why it
        is not known."""
        if self._problem is not None:
            return self._problem
        tightest: CgroupMemory | None = None
        for (directory, version), limit in self._limited:
            try:
                found = _usage(directory, version, limit)
            except (OSError, ValueError) as error:
                return f"cannot read the memory limit in {directory}: {error}"
            if tightest is None or found.limit_bytes - found.used_bytes < tightest.limit_bytes - tightest.used_bytes:
                tightest = found
        return tightest

    def limits(self, swap_total_bytes: int | None) -> CgroupLimits:
        """The other limits, and how often the kernel has killed. A swap limit at or above the machine's swap is none."""
        unknown: dict[str, str] = {}

        def told(field: str, ask: Callable[[], T | None]) -> T | None:
            if self._lines is None:
                unknown[field] = self._problem or "the cgroup cannot be read"
                return None
            try:
                return ask()
            except (OSError, ValueError) as error:
                unknown[field] = f"cannot read what the cgroup allows: {error}"
                return None

        throttle = told("throttle_bytes", self._throttle)
        swap = told("swap", lambda: self._swap(swap_total_bytes))
        kills = told("oom_kills", self._oom_kills)
        cpus = told("cpus", self._cpus)
        if kills is None:
            unknown.setdefault("oom_kills", "the kernel does not count kills here: no memory cgroup below the topmost one")
        return CgroupLimits(throttle_bytes=throttle, swap=swap, oom_kills=kills, cpus=cpus, unknown=unknown)

    def _find_groups(self) -> None:
        lines = (self._proc / self._whose / "cgroup").read_text()
        if lines == self._lines:
            return
        mounts = _mounts(self._proc)
        self._memory_groups = list(dict.fromkeys(_groups(lines, self._root, mounts, "memory")))
        self._cpu_groups = list(dict.fromkeys(_groups(lines, self._root, mounts, "cpu")))
        self._lines = lines

    def _throttle(self) -> int | None:
        found = (_number(directory / "memory.high") for directory, version in self._memory_groups if version == 2)
        return min((limit for limit in found if limit is not None), default=None)

    def _swap(self, swap_total: int | None) -> CgroupSwap | None:
        tightest = None
        for directory, version in self._memory_groups:
            found = _swap_limit(directory, version)
            if found is None or (swap_total is not None and found.limit_bytes >= swap_total):
                continue
            if tightest is None or _room(found) < _room(tightest):
                tightest = found
        return tightest

    def _oom_kills(self) -> int | None:
        """Version 2 counts a kill in all groups above as well: the topmost one with a limit knows most. Version 1 counts it
        only in the group that lost the process."""
        limited = [group for group, _ in self._limited if group[1] == 2]
        for directory, version in [*limited[-1:], *self._memory_groups]:
            count = kills_in(directory, version)
            if count is not None:
                return count
        return None

    def _cpus(self) -> float | None:
        """Cores' worth of time in the tightest of our groups."""
        found = (_cpu_quota(directory, version) for directory, version in self._cpu_groups)
        return min((cpus for cpus in found if cpus is not None), default=None)


def read_cgroup_memory(proc_root: Path, cgroup_root: Path, machine_bytes: int | None) -> CgroupMemory | str | None:
    """The group with the least room left, None where no limit is below the machine's memory, or the reason why it is
    not known."""
    reader = CgroupReader(proc_root, cgroup_root)
    reader.refresh(machine_bytes)
    return reader.memory()


class KillCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many processes the kernel has ever killed for memory in one group; version 2 counts those of the groups below too."""

    path: str
    version: int
    kills: int


def kill_counts(proc_root: Path, cgroup_root: Path, lines: str) -> list[KillCount]:
    """The counters of a group and of those above it, its own first. `lines`: what /proc/PID/cgroup says of the process.

    Groups without a counter (the topmost one, kernels before 4.13) are left out.
    """
    found = []
    for directory, version in dict.fromkeys(_groups(lines, cgroup_root, _mounts(proc_root), "memory")):
        kills = kills_in(directory, version)
        if kills is not None:
            found.append(KillCount(path=str(directory), version=version, kills=kills))
    return found


def kills_in(directory: Path, version: int) -> int | None:
    """The counter of one group now; None where there is none, or no such group any more."""
    return _keyed(directory / ("memory.events" if version == 2 else "memory.oom_control")).get("oom_kill")


class _Mount(msgspec.Struct, frozen=True):
    """A mounted hierarchy. `root` is the group that its mount point shows: in a container not the topmost one."""

    point: Path
    root: str
    version: int
    controllers: frozenset[str]


def _mounts(proc_root: Path) -> list[_Mount]:
    """The mounted hierarchies, or none where the kernel does not say what is mounted."""
    try:
        lines = (proc_root / "self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []  # then they are looked for where they commonly are
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            version = 2 if kind[0] == "cgroup2" else 1
            found.append(_Mount(Path(fields[4]), fields[3], version, frozenset(kind[2].split(","))))
    return found


def _groups(lines: str, root: Path, mounts: list[_Mount], controller: str) -> Iterator[_Group]:
    """Directories from our own group upwards, with the version of the hierarchy they belong to."""
    for line in lines.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and controllers == "":
            version, guess = 2, root / "unified" if (root / "unified").is_dir() else root
        elif controller in controllers.split(","):
            version, guess = 1, root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        mount = next((m for m in mounts if _is_of(m, root, version, controller)), None)
        for directory in _below_mount(mount, path) if mount is not None else _upwards(guess, path):
            yield directory, version


def _is_of(mount: _Mount, root: Path, version: int, controller: str) -> bool:
    return mount.version == version and mount.point.is_relative_to(root) and (version == 2 or controller in mount.controllers)


def _below_mount(mount: _Mount, path: str) -> list[Path]:
    """Own group first, the mount point last. A path that lies above what is mounted (or beside it) leaves the mount point,
    which is the container's own group."""
    own = PurePosixPath(path)
    if ".." in own.parts or ".." in mount.root or not own.is_relative_to(mount.root):
        return [mount.point] if mount.point.is_dir() else []
    parts = own.relative_to(mount.root).parts
    levels = [mount.point.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [level for level in levels if level.is_dir()]


def _upwards(mount: Path, path: str) -> list[Path]:
    """The same where it is not known what is mounted: a path that is not there must be the machine's, seen from a
    container."""
    parts = [part for part in PurePosixPath(path).parts if part != "/"]
    if ".." in parts or not mount.joinpath(*parts).is_dir():
        parts = []
    levels = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [level for level in levels if level.is_dir()]


def _number(path: Path) -> int | None:
    """The number in a file; None where it says "max" or there is no such file: the root group and groups without the
    controller have none."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return None if text == "max" else int(text)


def _keyed(path: Path) -> dict[str, int]:
    """The rows `name number` of a file; empty where there is no such file."""
    try:
        rows = (line.split() for line in path.read_text().splitlines())
    except FileNotFoundError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


def _usage(directory: Path, version: int, limit: int) -> CgroupMemory:
    names = _FILES[version]
    usage = int((directory / names.usage).read_text())
    rows = _keyed_required(directory / "memory.stat")
    file, shared = rows.get(names.file), rows.get(names.shared)
    dirty = [rows.get(key) for key in names.dirty]
    return CgroupMemory(
        limit_bytes=limit,
        used_bytes=max(0, usage - rows.get(names.cache, 0)),
        path=str(directory),
        cached_bytes=None if file is None or shared is None else max(0, file - shared),
        dirty_bytes=None if None in dirty else sum(count for count in dirty if count is not None),
        shared_bytes=shared,
    )


def _keyed_required(path: Path) -> dict[str, int]:
    """As `_keyed`, but a file that is missing is an error. Read each second: only whole numbers are looked at."""
    with path.open("rb", buffering=0) as file:
        words = file.read().decode().split()
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False)}


def _swap_limit(directory: Path, version: int) -> CgroupSwap | None:
    if version == 2:
        limit = _number(directory / "memory.swap.max")
        return None if limit is None else CgroupSwap(limit_bytes=limit, used_bytes=_number(directory / "memory.swap.current"))
    both, memory = _number(directory / "memory.memsw.limit_in_bytes"), _number(directory / "memory.limit_in_bytes")
    # Version 1 limits memory and swap together: what is left for swap when the memory is full.
    if both is None or memory is None or both >= _UNLIMITED_V1:
        return None
    return CgroupSwap(limit_bytes=max(0, both - memory), used_bytes=_keyed(directory / "memory.stat").get("total_swap"))


def _room(swap: CgroupSwap) -> int:
    return swap.limit_bytes - (swap.used_bytes or 0)


def _cpu_quota(directory: Path, version: int) -> float | None:
    if version == 2:
        try:
            quota, period = (directory / "cpu.max").read_text().split()
        except FileNotFoundError:
            return None
        return None if quota == "max" else int(quota) / int(period)
    microseconds, period_v1 = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
    # -1 is no limit.
    return None if microseconds is None or not period_v1 or microseconds < 0 else microseconds / period_v1
