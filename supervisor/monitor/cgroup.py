"""Reads the limits that the kernel enforces on this process: cgroup versions 1 and 2, the own group
and those above it.

The trainer also uses this module, so it imports no other module of memtop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

T = TypeVar("T")

# Version 1 reports "no limit" as the largest number of pages, in bytes, which is close to 2^63.
_UNLIMITED_V1 = 2**62


class CgroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The group with the least memory left. Bytes.

    The inactive file cache does not count as used, because the kernel frees it. The last three
    fields are None if the group's statistics do not contain them.
    """

    limit_bytes: int
    used_bytes: int
    path: str
    cached_bytes: int | None = None
    """File cache without shared memory."""
    dirty_bytes: int | None = None
    shared_bytes: int | None = None


class CgroupSwap(msgspec.Struct, frozen=True, kw_only=True):
    """The group with the least swap left.

    Bytes. `used_bytes` is None if the kernel does not count it.
    """

    limit_bytes: int
    used_bytes: int | None


class CgroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that change rarely.

    None if there is no such limit, or if it is unknown (then `unknown` has the reason).
    """

    throttle_bytes: int | None = None
    """The lowest memory.high."""
    swap: CgroupSwap | None = None
    oom_kills: int | None = None
    cpus: float | None = None
    """CPU time that the most limited group allows, in cores."""
    unknown: dict[str, str] = {}


class _Files(msgspec.Struct, frozen=True):
    limit: str
    usage: str
    cache: str
    """Key of memory.stat: the cache that the kernel frees first, in this group and those below
    it."""
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
    """The groups of this process.

    `refresh` finds the groups and their limits, `memory` only reads the usage of limited groups.
    """

    def __init__(self, proc_root: Path, cgroup_root: Path, pid: int | None = None) -> None:
        """`pid`: read the groups of this process instead of our own."""
        self._proc = proc_root
        self._whose = "self" if pid is None else str(pid)
        self._root = cgroup_root
        self._lines: str | None = None
        self._memory_groups: list[_Group] = []
        self._cpu_groups: list[_Group] = []
        self._limited: list[tuple[_Group, int]] = []
        self._problem: str | None = "the cgroup has not been read yet"

    def refresh(self, machine_bytes: int | None) -> None:
        """Find the groups and their memory limits.

        A limit at or above the machine's memory counts as none.
        """
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
        """The group with the least memory left, None if there is no limit below the machine's
        memory, or the reason why it is unknown."""
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
        """The other limits, and the number of OOM kills.

        A swap limit at or above the machine's swap counts as none.
        """
        unknown: dict[str, str] = {}

        def ask(field: str, read: Callable[[], T | None]) -> T | None:
            if self._lines is None:
                unknown[field] = self._problem or "the cgroup cannot be read"
                return None
            try:
                return read()
            except (OSError, ValueError) as error:
                unknown[field] = f"cannot read the cgroup's limits: {error}"
                return None

        throttle = ask("throttle_bytes", self._throttle)
        swap = ask("swap", lambda: self._swap(swap_total_bytes))
        kills = ask("oom_kills", self._oom_kills)
        cpus = ask("cpus", self._cpus)
        if kills is None:
            unknown.setdefault("oom_kills", "the kernel does not count OOM kills here: no memory cgroup below the root")
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
            if tightest is None or _left(found) < _left(tightest):
                tightest = found
        return tightest

    def _oom_kills(self) -> int | None:
        """Version 2 also counts a kill in all groups above, so the topmost limited group has the
        most complete count.

        Version 1 counts it only in the group of the process.
        """
        limited = [group for group, _ in self._limited if group[1] == 2]
        for directory, version in [*limited[-1:], *self._memory_groups]:
            count = kills_in(directory, version)
            if count is not None:
                return count
        return None

    def _cpus(self) -> float | None:
        """CPU time that the most limited group allows, in cores."""
        found = (_cpu_quota(directory, version) for directory, version in self._cpu_groups)
        return min((cpus for cpus in found if cpus is not None), default=None)


def read_cgroup_memory(proc_root: Path, cgroup_root: Path, machine_bytes: int | None) -> CgroupMemory | str | None:
    """The group with the least memory left, None if there is no limit below the machine's memory,
    or the reason why it is unknown."""
    reader = CgroupReader(proc_root, cgroup_root)
    reader.refresh(machine_bytes)
    return reader.memory()


class KillCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many processes the kernel has ever OOM-killed in one group.

    Version 2 includes the groups below it.
    """

    path: str
    version: int
    kills: int


def memory_groups(proc_root: Path, cgroup_root: Path, lines: str) -> list[tuple[Path, int]]:
    """A process's memory group and those above it, its own first, each with its version.

    `lines`: the text of /proc/PID/cgroup.
    """
    return list(dict.fromkeys(_groups(lines, cgroup_root, _mounts(proc_root), "memory")))


def kill_counts(proc_root: Path, cgroup_root: Path, lines: str) -> list[KillCount]:
    """The counters of these groups. Groups without a counter (the root group, kernels before 4.13)
    are left out."""
    found = []
    for directory, version in memory_groups(proc_root, cgroup_root, lines):
        kills = kills_in(directory, version)
        if kills is not None:
            found.append(KillCount(path=str(directory), version=version, kills=kills))
    return found


def kills_in(directory: Path, version: int) -> int | None:
    """The present counter of one group.

    None if it has none or the group does not exist any more.
    """
    return _keyed(directory / ("memory.events" if version == 2 else "memory.oom_control")).get("oom_kill")


class _Mount(msgspec.Struct, frozen=True):
    """A mounted hierarchy.

    `root` is the group at its mount point; in a container it is not the root group.
    """

    point: Path
    root: str
    version: int
    controllers: frozenset[str]


def _mounts(proc_root: Path) -> list[_Mount]:
    """The mounted hierarchies. Empty if the list of mounts cannot be read."""
    try:
        lines = (proc_root / "self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []  # then the usual places are tried
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            version = 2 if kind[0] == "cgroup2" else 1
            found.append(_Mount(Path(fields[4]), fields[3], version, frozenset(kind[2].split(","))))
    return found


def _groups(lines: str, root: Path, mounts: list[_Mount], controller: str) -> Iterator[_Group]:
    """The directories from our own group upwards, with the versions of their hierarchies."""
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
    """Own group first, the mount point last.

    A path outside of what is mounted leaves only the mount point, which is the container's own
    group.
    """
    own = PurePosixPath(path)
    if ".." in own.parts or ".." in mount.root or not own.is_relative_to(mount.root):
        return [mount.point] if mount.point.is_dir() else []
    parts = own.relative_to(mount.root).parts
    levels = [mount.point.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [level for level in levels if level.is_dir()]


def _upwards(mount: Path, path: str) -> list[Path]:
    """The same without knowing the mounts.

    A path that does not exist must be the machine's path, seen from a container.
    """
    parts = [part for part in PurePosixPath(path).parts if part != "/"]
    if ".." in parts or not mount.joinpath(*parts).is_dir():
        parts = []
    levels = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [level for level in levels if level.is_dir()]


def _number(path: Path) -> int | None:
    """The number in a file.

    None if it contains "max" or does not exist (root group, group without this controller).
    """
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return None if text == "max" else int(text)


def _keyed(path: Path) -> dict[str, int]:
    """The rows `name number` of a file. Empty if there is no such file."""
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
    """As `_keyed`, but raises OSError if the file is missing, and is faster because it is used for
    every sample."""
    with path.open("rb", buffering=0) as file:
        words = file.read().decode().split()
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False)}


def _swap_limit(directory: Path, version: int) -> CgroupSwap | None:
    if version == 2:
        limit = _number(directory / "memory.swap.max")
        return None if limit is None else CgroupSwap(limit_bytes=limit, used_bytes=_number(directory / "memory.swap.current"))
    both, memory = _number(directory / "memory.memsw.limit_in_bytes"), _number(directory / "memory.limit_in_bytes")
    # Version 1 limits memory and swap together. The difference is left for swap when the memory is
    # full.
    if both is None or memory is None or both >= _UNLIMITED_V1:
        return None
    return CgroupSwap(limit_bytes=max(0, both - memory), used_bytes=_keyed(directory / "memory.stat").get("total_swap"))


def _left(swap: CgroupSwap) -> int:
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
