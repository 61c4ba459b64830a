"""Host memory: RAM, swap and its traffic, memory pressure, CPU, and the cgroup's limit where there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memtop.supervisor.monitor.bands import band_of
from memtop.supervisor.monitor.cgroup import CgroupMemory, read_cgroup_memory
from memtop.supervisor.monitor.values import HostSample

_FIRST_READ = "a rate needs two samples"
_NO_SWAP = "no swap is set up"


class HostReader:
    """Reads host memory; keeps the last counters so that rates can be told. Roots are given for tests."""

    def __init__(
        self,
        *,
        proc_root: Path | str = "/proc",
        cgroup_root: Path | str = "/sys/fs/cgroup",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = Path(proc_root)
        self._cgroup_root = Path(cgroup_root)
        self._monotonic = monotonic
        self._swap_traffic = _Counter()
        self._cpu = _Counter()

    def read(self) -> HostSample:
        """One sample. What cannot be read is None, with the reason under `unknown`."""
        unknown: dict[str, str] = {}
        fields: dict[str, Any] = {}
        memory = self._meminfo(unknown)
        fields |= _ram(memory, unknown)
        fields |= _swap(memory, unknown)
        fields |= self._swap_rates(unknown)
        fields["pressure_fraction"] = self._pressure(unknown)
        fields["cpu_fraction"] = self._cpu_fraction(unknown)
        fields |= self._limited(fields, unknown)
        fields["band"] = band_of(fields.get("used_fraction"))
        fields["swap_band"] = band_of(fields.get("swap_fraction"))
        return HostSample(unknown=unknown, **fields)

    def _meminfo(self, unknown: dict[str, str]) -> dict[str, int]:
        """/proc/meminfo in bytes."""
        try:
            text = (self._proc / "meminfo").read_text()
        except OSError as error:
            reason = f"cannot read {self._proc}/meminfo: {error.strerror}"
            fields = ("total_bytes", "available_bytes", "used_bytes", "used_fraction", "swap_total_bytes")
            unknown.update(dict.fromkeys((*fields, "swap_used_bytes", "swap_fraction"), reason))
            return {}
        rows = (line.split() for line in text.splitlines())
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2 and row[1].isdigit()}

    def _swap_rates(self, unknown: dict[str, str]) -> dict[str, float | None]:
        """Bytes per second swapped in and out since the last read, from the kernel's page counters."""
        names = ("swap_in_bytes_per_second", "swap_out_bytes_per_second")
        try:
            rows = dict(line.split(maxsplit=1) for line in (self._proc / "vmstat").read_text().splitlines())
            pages = (int(rows["pswpin"]), int(rows["pswpout"]))
        except OSError as error:
            unknown.update(dict.fromkeys(names, f"cannot read {self._proc}/vmstat: {error.strerror}"))
            return dict.fromkeys(names)
        except (KeyError, ValueError):
            unknown.update(dict.fromkeys(names, "this kernel does not count swapped pages"))
            return dict.fromkeys(names)
        passed, deltas, reason = self._swap_traffic.update(self._monotonic(), pages)
        if reason is not None:
            unknown.update(dict.fromkeys(names, reason))
            return dict.fromkeys(names)
        page = os.sysconf("SC_PAGE_SIZE")
        return {name: delta * page / passed for name, delta in zip(names, deltas, strict=True)}

    def _pressure(self, unknown: dict[str, str]) -> float | None:
        """PSI `some avg10` of memory as a fraction."""
        try:
            text = (self._proc / "pressure/memory").read_text()
            some = next(line for line in text.splitlines() if line.startswith("some"))
            fields = dict(part.split("=") for part in some.split()[1:])
            return float(fields["avg10"]) / 100
        except OSError:
            unknown["pressure_fraction"] = "this kernel does not measure memory pressure (PSI is off or not built in)"
        except (StopIteration, KeyError, ValueError):
            unknown["pressure_fraction"] = f"{self._proc}/pressure/memory is not in a known form"
        return None

    def _cpu_fraction(self, unknown: dict[str, str]) -> float | None:
        """Share of all cores' time since the last read that was neither idle nor waiting for a disk."""
        try:
            line = (self._proc / "stat").read_text().split("\n", 1)[0].split()
            ticks = [int(number) for number in line[1:9]]
            idle = ticks[3] + ticks[4]
        except (OSError, ValueError, IndexError) as error:
            unknown["cpu_fraction"] = f"cannot read {self._proc}/stat: {error}"
            return None
        _, (total, resting), reason = self._cpu.update(self._monotonic(), (sum(ticks), idle))
        if reason is None and total <= 0:
            reason = "no CPU time was counted since the last sample"
        if reason is not None:
            unknown["cpu_fraction"] = reason
            return None
        return min(1.0, max(0.0, 1 - resting / total))

    def _limited(self, fields: dict[str, Any], unknown: dict[str, str]) -> dict[str, Any]:
        """What changes where a cgroup allows less than the machine has."""
        cgroup = read_cgroup_memory(self._proc, self._cgroup_root, fields.get("total_bytes"))
        if isinstance(cgroup, str):
            unknown["limit_bytes"] = cgroup
            return {}
        if cgroup is None:
            unknown["limit_bytes"] = "no cgroup limit below the machine's memory"
            return {}
        return _within_limit(cgroup, fields.get("available_bytes"), unknown)


def read_host(*, proc_root: Path | str = "/proc", cgroup_root: Path | str = "/sys/fs/cgroup") -> HostSample:
    """A single sample without rates; use a HostReader to get those."""
    return HostReader(proc_root=proc_root, cgroup_root=cgroup_root).read()


class _Counter:
    """Differences of ever-growing kernel counters between two reads."""

    def __init__(self) -> None:
        self._last: tuple[float, tuple[int, ...]] | None = None

    def update(self, now: float, counts: tuple[int, ...]) -> tuple[float, tuple[int, ...], str | None]:
        """Seconds passed, differences, and the reason where they mean nothing."""
        nothing = tuple(0 for _ in counts)
        if self._last is None:
            self._last = (now, counts)
            return 0.0, nothing, _FIRST_READ
        before, old = self._last
        self._last = (now, counts)
        deltas = tuple(new - was for new, was in zip(counts, old, strict=True))
        if now <= before:
            return 0.0, nothing, "no time passed since the last sample"
        if deltas[0] < 0 or deltas[-1] < 0:
            return 0.0, nothing, "the kernel's counter went backwards"
        return now - before, deltas, None


def _ram(memory: dict[str, int], unknown: dict[str, str]) -> dict[str, Any]:
    if not memory:
        return {}
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    if not total:
        reason = "the kernel does not tell the machine's memory"
        unknown.update(dict.fromkeys(("total_bytes", "used_bytes", "available_bytes", "used_fraction"), reason))
        return {}
    if available is None:
        reason = "this kernel does not tell the available memory (older than Linux 3.14)"
        unknown.update(dict.fromkeys(("used_bytes", "available_bytes", "used_fraction"), reason))
        return {"total_bytes": total}
    used = total - available
    return {"total_bytes": total, "available_bytes": available, "used_bytes": used, "used_fraction": used / total}


def _swap(memory: dict[str, int], unknown: dict[str, str]) -> dict[str, Any]:
    if not memory:
        return {}
    total, free = memory.get("SwapTotal"), memory.get("SwapFree")
    if total is None or free is None:
        reason = "the kernel does not tell the swap"
        unknown.update(dict.fromkeys(("swap_total_bytes", "swap_used_bytes", "swap_fraction"), reason))
        return {}
    if total == 0:
        unknown["swap_fraction"] = _NO_SWAP
        return {"swap_total_bytes": 0, "swap_used_bytes": 0}
    return {"swap_total_bytes": total, "swap_used_bytes": total - free, "swap_fraction": (total - free) / total}


def _within_limit(cgroup: CgroupMemory, available: int | None, unknown: dict[str, str]) -> dict[str, Any]:
    left = max(0, cgroup.limit_bytes - cgroup.used_bytes)
    for field in ("used_bytes", "used_fraction", "available_bytes"):
        unknown.pop(field, None)
    return {
        "limit_bytes": cgroup.limit_bytes,
        "used_bytes": cgroup.used_bytes,
        "used_fraction": cgroup.used_bytes / cgroup.limit_bytes,
        # The machine may have less to give than the cgroup would allow.
        "available_bytes": left if available is None else min(left, available),
    }
