"""The memory limit that the kernel will enforce on this process: cgroup versions 1 and 2, own group and those above."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import msgspec


class CgroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The group that leaves the least room. Bytes; the inactive file cache, which the kernel gives back, does not
    count as used."""

    limit_bytes: int
    used_bytes: int
    path: str


def read_cgroup_memory(proc_root: Path, cgroup_root: Path, machine_bytes: int | None) -> CgroupMemory | str | None:
    """The group with the least room left, None where no limit is below the machine's memory, or the reason why it is
    not known."""
    try:
        lines = (proc_root / "self/cgroup").read_text().splitlines()
    except OSError as error:
        return f"cannot read {proc_root}/self/cgroup: {error.strerror}"
    groups = dict.fromkeys(_groups(lines, cgroup_root))
    limits = []
    for directory, version in groups:
        found = _limit(directory, version, machine_bytes)
        if isinstance(found, str):
            return found
        if found is not None:
            limits.append(found)
    return min(limits, key=lambda group: group.limit_bytes - group.used_bytes, default=None)


def _groups(lines: list[str], root: Path) -> list[tuple[Path, int]]:
    """Directories from our own group upwards, with the version of the hierarchy they belong to."""
    found: list[tuple[Path, int]] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and controllers == "":
            mount = root / "unified" if (root / "unified").is_dir() else root
            found += [(directory, 2) for directory in _upwards(mount, path)]
        elif "memory" in controllers.split(","):
            found += [(directory, 1) for directory in _upwards(root / "memory", path)]
    return found


def _upwards(mount: Path, path: str) -> list[Path]:
    """Own group first, the mount point last. In a container the path may be the host's and lie above what is mounted;
    then the mount point itself is the container's group."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    levels = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [level for level in levels if level.is_dir()]


def _limit(directory: Path, version: int, machine_bytes: int | None) -> CgroupMemory | str | None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        text = (directory / names[0]).read_text().strip()
    except FileNotFoundError:
        return None  # the root group and groups without the memory controller have no such file
    except OSError as error:
        return f"cannot read the memory limit in {directory}: {error.strerror}"
    try:
        # Version 1 writes "no limit" as a number close to 2^63; version 2 writes the word.
        if text == "max" or (machine_bytes is not None and int(text) >= machine_bytes):
            return None
        usage = int((directory / names[1]).read_text())
        cache = _inactive_file(directory, version)
        return CgroupMemory(limit_bytes=int(text), used_bytes=max(0, usage - cache), path=str(directory))
    except (OSError, ValueError) as error:
        return f"cannot read the memory limit in {directory}: {error}"


def _inactive_file(directory: Path, version: int) -> int:
    """Bytes of file cache that the kernel takes back first, this group and those below it."""
    key = "inactive_file" if version == 2 else "total_inactive_file"
    for line in (directory / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
