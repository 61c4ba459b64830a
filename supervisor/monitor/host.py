"""Reads host memory: RAM, swap and its traffic, memory pressure, CPU, and the cgroup's limits."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memtop.supervisor.monitor.cgroup import CgroupLimits, CgroupMemory, CgroupReader, CgroupSwap
from memtop.supervisor.monitor.values import HostSample

SLOW_SECONDS = 5.0
"""How often limits, load, uptime, cores and OOM kills are read."""

_FIRST_READ = "a rate needs two samples"
_NO_SWAP = "the machine has no swap"
# The lines of /proc/meminfo that are used.
_ROWS = re.compile(
    rb"^(MemTotal|MemAvailable|Buffers|Cached|Mlocked|SwapTotal|SwapFree|Dirty|Writeback|Shmem|HugePages_Total"
    rb"|HugePages_Free|Hugepagesize|Hugetlb):\s+(\d+)",
    re.MULTILINE,
)
_SWAPPED = re.compile(rb"^pswp(?:in|out) (\d+)$", re.MULTILINE)
_MEMINFO_FIELDS = (
    *("total_bytes", "available_bytes", "used_bytes", "used_fraction", "swap_total_bytes", "swap_used_bytes"),
    *("swap_fraction", "cached_bytes", "dirty_bytes", "shared_bytes", "locked_bytes", "huge_pages_total_bytes"),
    "huge_pages_free_bytes",
)


def _affinity() -> int:
    """Number of cores on which this process may run."""
    return len(os.sched_getaffinity(0))


class HostReader:
    """Reads host memory.

    Keeps the last counters to compute rates. The roots can be replaced in tests.
    """

    def __init__(
        self,
        *,
        proc_root: Path | str = "/proc",
        cgroup_root: Path | str = "/sys/fs/cgroup",
        shm_root: Path | str = "/dev/shm",
        affinity: Callable[[], int] = _affinity,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = Path(proc_root)
        self._shm = str(shm_root)
        self._affinity = affinity
        self._monotonic = monotonic
        self._cgroup = CgroupReader(self._proc, Path(cgroup_root))
        self._limits = CgroupLimits()
        self._swap_traffic = _Counter()
        self._cpu = _Counter()
        self._slow: dict[str, Any] = {}
        self._slow_unknown: dict[str, str] = {}
        self._slow_at: float | None = None

    def read(self) -> HostSample:
        """One sample without bands. What cannot be read is None, with the reason in `unknown`."""
        now = self._monotonic()
        unknown: dict[str, str] = {}
        fields: dict[str, Any] = {}
        memory = self._meminfo(unknown)
        fields |= _ram(memory, unknown)
        fields |= _kinds(memory, unknown)
        fields |= _swap(memory, unknown)
        if self._slow_at is None or now - self._slow_at >= SLOW_SECONDS:
            self._read_slow(fields.get("total_bytes"), fields.get("swap_total_bytes"))
            self._slow_at = now
        unknown |= self._slow_unknown
        fields |= self._slow
        if "uptime_seconds" in fields:
            fields["uptime_seconds"] += now - self._slow_at
        fields |= self._swap_rates(now, unknown)
        fields |= self._shared_memory(unknown)
        fields["cpu_fraction"] = self._cpu_fraction(now, unknown)
        fields |= self._limited(fields, unknown)
        fields |= self._pressure(fields.get("limit_path"), unknown)
        return HostSample(unknown=unknown, **fields)

    # --- read at every sample ---

    def _meminfo(self, unknown: dict[str, str]) -> dict[str, int]:
        """The numbers in /proc/meminfo that are used: KiB, and counts of huge pages."""
        try:
            text = _read(self._proc / "meminfo")
        except OSError as error:
            unknown.update(dict.fromkeys(_MEMINFO_FIELDS, f"cannot read {self._proc}/meminfo: {error.strerror}"))
            return {}
        return {name.decode(): int(value) for name, value in _ROWS.findall(text)}

    def _swap_rates(self, now: float, unknown: dict[str, str]) -> dict[str, float | None]:
        """Bytes per second swapped in and out since the last read, from the kernel's page
        counters."""
        names = ("swap_in_bytes_per_second", "swap_out_bytes_per_second")
        try:
            pages = tuple(map(int, _SWAPPED.findall(_read(self._proc / "vmstat"))))
        except OSError as error:
            unknown.update(dict.fromkeys(names, f"cannot read {self._proc}/vmstat: {error.strerror}"))
            return dict.fromkeys(names)
        if len(pages) != 2:
            unknown.update(dict.fromkeys(names, "this kernel does not count swapped pages"))
            return dict.fromkeys(names)
        passed, deltas, reason = self._swap_traffic.update(now, pages)
        if reason is not None:
            unknown.update(dict.fromkeys(names, reason))
            return dict.fromkeys(names)
        page = os.sysconf("SC_PAGE_SIZE")
        return {name: delta * page / passed for name, delta in zip(names, deltas, strict=True)}

    def _pressure(self, group: str | None, unknown: dict[str, str]) -> dict[str, float]:
        """PSI `some avg10` and `full avg10` of memory as fractions, of the cgroup that limits us,
        else of the machine.

        A full cgroup waits although the machine has free memory, and other processes may wait while
        the cgroup does not.
        """
        names = {"some": "pressure_fraction", "full": "pressure_full_fraction"}
        path, text = self._proc / "pressure/memory", None
        if group is not None:
            # version 1 and older kernels measure the machine only
            with contextlib.suppress(OSError):
                text = _read(Path(group) / "memory.pressure")
                path = Path(group) / "memory.pressure"
        try:
            text = _read(path) if text is None else text
            rows = {words[0]: words[1] for line in text.splitlines() if (words := line.split())}
        except OSError:
            reason = "this kernel does not measure memory pressure (PSI is off or not built in)"
            unknown.update(dict.fromkeys(names.values(), reason))
            return {}
        except IndexError:
            rows = {}
        found = {}
        for kind, field in names.items():
            try:
                key, _, value = rows[kind.encode()].partition(b"=")
                if key != b"avg10":
                    raise KeyError(key)
                found[field] = float(value) / 100
            except (KeyError, ValueError):
                unknown[field] = f"{path} has an unknown format"
        return found

    def _shared_memory(self, unknown: dict[str, str]) -> dict[str, Any]:
        """Size limit and usage of the shared-memory file system."""
        try:
            found = os.statvfs(self._shm)
        except OSError as error:
            reason = f"cannot read {self._shm}: {error.strerror}"
            unknown.update(dict.fromkeys(("shm_total_bytes", "shm_used_bytes", "shm_fraction"), reason))
            return {}
        if found.f_blocks == 0:
            reason = f"{self._shm} has no size limit"
            unknown.update(dict.fromkeys(("shm_total_bytes", "shm_used_bytes", "shm_fraction"), reason))
            return {}
        total, used = found.f_blocks * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize
        return {"shm_total_bytes": total, "shm_used_bytes": used, "shm_fraction": used / total}

    def _cpu_fraction(self, now: float, unknown: dict[str, str]) -> float | None:
        """Share of all cores' time since the last read that was neither idle nor waiting for
        I/O."""
        try:
            line = _read(self._proc / "stat").split(b"\n", 1)[0].split()
            ticks = [int(number) for number in line[1:9]]
            idle = ticks[3] + ticks[4]
        except (OSError, ValueError, IndexError) as error:
            unknown["cpu_fraction"] = f"cannot read {self._proc}/stat: {error}"
            return None
        _, (total, resting), reason = self._cpu.update(now, (sum(ticks), idle))
        if reason is None and total <= 0:
            reason = "no CPU time was counted since the last sample"
        if reason is not None:
            unknown["cpu_fraction"] = reason
            return None
        return min(1.0, max(0.0, 1 - resting / total))

    def _limited(self, fields: dict[str, Any], unknown: dict[str, str]) -> dict[str, Any]:
        """The fields that differ if a cgroup allows less memory than the machine has."""
        cgroup = self._cgroup.memory()
        if isinstance(cgroup, CgroupMemory):
            return _within_limit(cgroup, fields.get("available_bytes"), unknown) | self._limited_swap(unknown)
        reason = "no cgroup limit below the machine's memory" if cgroup is None else cgroup
        unknown.update(dict.fromkeys(("limit_bytes", "limit_path"), reason))
        return self._limited_swap(unknown)

    def _limited_swap(self, unknown: dict[str, str]) -> dict[str, Any]:
        swap = self._limits.swap
        return {} if swap is None else _within_swap_limit(swap, unknown)

    # --- read every 5 s ---

    def _read_slow(self, total: int | None, swap_total: int | None) -> None:
        self._slow, self._slow_unknown = {}, {}
        self._cgroup.refresh(total)
        self._limits = limits = self._cgroup.limits(swap_total)
        self._note("limit_throttle_bytes", limits.throttle_bytes, limits, "throttle_bytes", "no cgroup sets memory.high")
        swap = None if limits.swap is None else limits.swap.limit_bytes
        self._note("limit_swap_bytes", swap, limits, "swap", "the cgroup does not limit swap")
        self._note("oom_kills", limits.oom_kills, limits, "oom_kills", "not counted")
        self._load()
        self._cores(limits.cpus)

    def _note(self, field: str, value: Any, limits: CgroupLimits, name: str, otherwise: str) -> None:
        if value is None:
            self._slow_unknown[field] = limits.unknown.get(name, otherwise)
        else:
            self._slow[field] = value

    def _load(self) -> None:
        try:
            one, five, fifteen = (float(word) for word in _read(self._proc / "loadavg").split()[:3])
            self._slow["load_average"] = (one, five, fifteen)
        except (OSError, ValueError) as error:
            self._slow_unknown["load_average"] = f"cannot read {self._proc}/loadavg: {error}"
        try:
            self._slow["uptime_seconds"] = float(_read(self._proc / "uptime").split()[0])
        except (OSError, ValueError, IndexError) as error:
            self._slow_unknown["uptime_seconds"] = f"cannot read {self._proc}/uptime: {error}"

    def _cores(self, allowed: float | None) -> None:
        """Number of cores in the affinity mask, or fewer if the cgroup allows less CPU time.

        A part of a core counts as one.
        """
        try:
            cores = self._affinity()
        except OSError as error:
            self._slow_unknown["cpu_count"] = f"the kernel does not report the cores of this process: {error}"
            return
        self._slow["cpu_count"] = cores if allowed is None else max(1, min(cores, math.ceil(allowed)))


def _read(path: Path) -> bytes:
    # The kernel generates these files when they are read, so use no buffer, and decode only what is
    # used.
    with path.open("rb", buffering=0) as file:
        return file.read()


class _Counter:
    """Differences of increasing kernel counters between two reads."""

    def __init__(self) -> None:
        self._last: tuple[float, tuple[int, ...]] | None = None

    def update(self, now: float, counts: tuple[int, ...]) -> tuple[float, tuple[int, ...], str | None]:
        """Seconds passed, differences, and the reason if they are not valid."""
        nothing = tuple(0 for _ in counts)
        if self._last is None:
            self._last = (now, counts)
            return 0.0, nothing, _FIRST_READ
        before, old = self._last
        self._last = (now, counts)
        deltas = tuple(new - was for new, was in zip(counts, old, strict=True))
        if now <= before:
            return 0.0, nothing, "no time passed since the last sample"
        if any(delta < 0 for delta in deltas):
            return 0.0, nothing, "the kernel's counter went backwards"
        return now - before, deltas, None


def _ram(memory: dict[str, int], unknown: dict[str, str]) -> dict[str, Any]:
    if "total_bytes" in unknown:
        return {}
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    if not total:
        reason = "the kernel does not report the machine's memory"
        unknown.update(dict.fromkeys(("total_bytes", "used_bytes", "available_bytes", "used_fraction"), reason))
        return {}
    total *= 1024
    if available is None:
        reason = "this kernel does not report the available memory (older than Linux 3.14)"
        unknown.update(dict.fromkeys(("used_bytes", "available_bytes", "used_fraction"), reason))
        return {"total_bytes": total}
    used = total - available * 1024
    return {"total_bytes": total, "available_bytes": total - used, "used_bytes": used, "used_fraction": used / total}


def _kinds(memory: dict[str, int], unknown: dict[str, str]) -> dict[str, Any]:
    """What the memory is used for, apart from private memory of processes."""
    if "cached_bytes" in unknown:
        return {}
    found: dict[str, int | None] = {}
    cached, buffers, shared = (memory.get(name) for name in ("Cached", "Buffers", "Shmem"))
    # The kernel counts shared memory as cached, but cannot free it.
    if cached is not None and buffers is not None and shared is not None:
        found["cached_bytes"] = max(0, cached + buffers - shared) * 1024
    dirty, writeback = memory.get("Dirty"), memory.get("Writeback")
    if dirty is not None and writeback is not None:
        found["dirty_bytes"] = (dirty + writeback) * 1024
    for field, name in (("shared_bytes", "Shmem"), ("locked_bytes", "Mlocked")):
        if name in memory:
            found[field] = memory[name] * 1024
    found |= _huge_pages(memory, unknown)
    for field in ("cached_bytes", "dirty_bytes", "shared_bytes", "locked_bytes", "huge_pages_total_bytes"):
        if found.get(field) is None:
            unknown[field] = "the kernel does not report it in /proc/meminfo"
    return found


def _huge_pages(memory: dict[str, int], unknown: dict[str, str]) -> dict[str, int | None]:
    count, free, size = (memory.get(name) for name in ("HugePages_Total", "HugePages_Free", "Hugepagesize"))
    if count is None or free is None or size is None:
        unknown["huge_pages_free_bytes"] = "the kernel does not report it in /proc/meminfo"
        return {"huge_pages_total_bytes": 0} if size is None and "Hugetlb" in memory else {}
    total = memory.get("Hugetlb", count * size)
    if total > count * size:
        unknown["huge_pages_free_bytes"] = "huge pages of several sizes: the kernel reports the free ones of one size only"
        return {"huge_pages_total_bytes": total * 1024}
    return {"huge_pages_total_bytes": total * 1024, "huge_pages_free_bytes": free * size * 1024}


def _swap(memory: dict[str, int], unknown: dict[str, str]) -> dict[str, Any]:
    if "swap_total_bytes" in unknown:
        return {}
    total, free = memory.get("SwapTotal"), memory.get("SwapFree")
    if total is None or free is None:
        reason = "the kernel does not report the swap"
        unknown.update(dict.fromkeys(("swap_total_bytes", "swap_used_bytes", "swap_fraction"), reason))
        return {}
    if total == 0:
        unknown["swap_fraction"] = _NO_SWAP
        return {"swap_total_bytes": 0, "swap_used_bytes": 0}
    used = (total - free) * 1024
    return {"swap_total_bytes": total * 1024, "swap_used_bytes": used, "swap_fraction": (total - free) / total}


def _within_limit(cgroup: CgroupMemory, available: int | None, unknown: dict[str, str]) -> dict[str, Any]:
    """Used and available memory and its kinds, of the cgroup instead of the machine."""
    left = max(0, cgroup.limit_bytes - cgroup.used_bytes)
    for field in ("used_bytes", "used_fraction", "available_bytes"):
        unknown.pop(field, None)
    found: dict[str, Any] = {
        "limit_bytes": cgroup.limit_bytes,
        "limit_path": cgroup.path,
        "used_bytes": cgroup.used_bytes,
        "used_fraction": cgroup.used_bytes / cgroup.limit_bytes if cgroup.limit_bytes else 1.0,
        # The machine may have less free memory than the cgroup allows.
        "available_bytes": left if available is None else min(left, available),
    }
    for field in ("cached_bytes", "dirty_bytes", "shared_bytes"):
        found[field] = getattr(cgroup, field)
        unknown.pop(field, None)
        if found[field] is None:
            unknown[field] = "the cgroup's statistics do not contain it"
    return found


def _within_swap_limit(swap: CgroupSwap, unknown: dict[str, str]) -> dict[str, Any]:
    """Swap of the cgroup instead of the machine.

    It may be full while the machine's swap is empty.
    """
    for field in ("swap_total_bytes", "swap_used_bytes", "swap_fraction"):
        unknown.pop(field, None)
    if swap.used_bytes is None:
        unknown.update(dict.fromkeys(("swap_used_bytes", "swap_fraction"), "the cgroup does not count its swap"))
        return {"swap_total_bytes": swap.limit_bytes, "swap_used_bytes": None, "swap_fraction": None}
    if swap.limit_bytes == 0:
        unknown["swap_fraction"] = "the cgroup allows no swap"
        return {"swap_total_bytes": 0, "swap_used_bytes": swap.used_bytes, "swap_fraction": None}
    used = min(swap.used_bytes, swap.limit_bytes)
    return {"swap_total_bytes": swap.limit_bytes, "swap_used_bytes": used, "swap_fraction": used / swap.limit_bytes}
