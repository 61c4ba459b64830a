"""What a sample of the machine looks like. Frozen; field names are the public JSON of `memtop watch --once --json`.

Units: bytes, seconds, watts, degrees Celsius, fractions 0-1. A value that is not known is None, and `unknown` maps the
field's name to the reason in words. None is never written as 0.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Band(str, Enum):
    """How safe a memory fraction is: safe below 85 %, edge 85-90 % inclusive, danger above 90 %."""

    SAFE = "safe"
    EDGE = "edge"
    DANGER = "danger"
    UNKNOWN = "unknown"


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process on one GPU. `pid` is as the driver reports it (the host's PID namespace)."""

    pid: int
    user: str | None = None
    name: str | None = None
    command: str | None = None
    used_bytes: int | None = None
    kind: str = "compute"
    """compute | graphics | compute+graphics"""
    run: str | None = None
    """Name of the memtop run that the process belongs to, or None."""
    stray: bool = False
    """True only where it is proven that the process belongs to a memtop run that is over."""
    reason: str | None = None
    """Why it is (or is not) thought stray, or why nothing can be said of it; words for a person."""
    choosable: bool = False
    """True where this user may end it from memtop: same user, not graphics, not a system process, not memtop itself."""
    started: float | None = None
    """Start time, seconds since the epoch; with `pid` the identity of the process."""
    started_ticks: int | None = None
    """The same start time in clock ticks since boot, exact: what a signal is checked against."""
    unknown: dict[str, str] = {}


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment. used_bytes excludes what the driver reserves (NVML memory info v2) where that is known."""

    index: int
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    used_fraction: float | None = None
    """(total - free) / total: what cannot be allocated any more, driver-reserved included."""
    band: Band = Band.UNKNOWN
    utilization_fraction: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    error: str | None = None
    """Why the whole GPU cannot be read (lost, reset required, ...), in words with what to do; None if it can."""
    processes: tuple[GpuProcess, ...] = ()
    unknown: dict[str, str] = {}


class HostSample(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory at one moment. Where a cgroup limit is below the machine's RAM, used_fraction and band
    refer to the limit."""

    total_bytes: int | None = None
    used_bytes: int | None = None
    """total - available on the machine; inside a limited cgroup: the cgroup's usage less its inactive file cache."""
    available_bytes: int | None = None
    used_fraction: float | None = None
    band: Band = Band.UNKNOWN
    limit_bytes: int | None = None
    """The cgroup's memory limit if there is one below the machine's total, else None."""
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    swap_fraction: float | None = None
    swap_band: Band = Band.UNKNOWN
    swap_in_bytes_per_second: float | None = None
    swap_out_bytes_per_second: float | None = None
    pressure_fraction: float | None = None
    """Share of the last 10 s in which some task waited for memory (PSI `some avg10`), 0-1."""
    cpu_fraction: float | None = None
    unknown: dict[str, str] = {}


class MachineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All sources read for one tick, under one timestamp (seconds since the epoch)."""

    time: float
    gpus: tuple[GpuSample, ...] = ()
    gpu_note: str | None = None
    """Why there are no GPUs, e.g. "no NVIDIA GPU: libnvidia-ml not found"; None where there are some."""
    driver_version: str | None = None
    host: HostSample = HostSample()
