"""Who holds a GPU's memory, as far as the run's ranks and the driver tell. The one place that works it out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot


class VramParts(NamedTuple):
    """A GPU's memory in parts. Bytes; None where it cannot be told."""

    allocated: int | None
    """By the allocators of this run, in live tensors."""
    cached: int | None
    """Reserved by those allocators, but free."""
    context: int | None
    """Of this run's processes outside the allocator: CUDA contexts; all of it where no base is known."""
    other_in_process: int | None
    """What they hold beyond that: NCCL, cuBLAS workspaces, other libraries."""
    jobs: tuple[tuple[str, int | None], ...]
    """Name and memory of every other job on this GPU, the largest first."""
    driver_reserved: int | None
    gone_bytes: int | None
    """Still listed under pids that no longer live."""
    unlisted_bytes: int | None
    """Used, but of no process that the driver lists."""
    free: int | None


def vram_parts(gpu: GpuSample, run: wire.RunState | None, machine: MachineSnapshot | None) -> VramParts:
    """The memory of a GPU, split by what the run's ranks report and by what the driver says of each process."""
    ranks = [r for r in run.ranks if r.device_uuid is not None and r.device_uuid == gpu.uuid] if run else []
    allocated = total_of(r.allocated_bytes for r in ranks)
    reserved = total_of(r.reserved_bytes for r in ranks)
    cached = None if allocated is None or reserved is None else max(0, reserved - allocated)
    living = [p for p in gpu.processes if not p.gone]
    own = total_of(p.used_bytes for p in living if run is not None and p.run == run.name)
    outside = None if own is None else max(0, own - (reserved or 0))
    base = run.gpu_base_bytes.get(gpu.uuid or "") if run is not None else None
    context = outside if outside is None or base is None else min(outside, base)
    beyond = None if outside is None or base is None else outside - min(outside, base)
    gone = total_of(p.used_bytes for p in gpu.processes if p.gone)
    others = [p for p in living if run is None or p.run != run.name]
    return VramParts(
        allocated=allocated,
        cached=cached,
        context=context,
        other_in_process=beyond,
        jobs=_by_job(others, machine),
        driver_reserved=gpu.reserved_bytes,
        gone_bytes=gone,
        unlisted_bytes=_unlisted(gpu, own, reserved),
        free=gpu.free_bytes,
    )


def step_peak(gpu: GpuSample, run: wire.RunState | None) -> int | None:
    """The highest allocator peak that a rank on this GPU reported for its newest update, bytes."""
    peaks = [r.peak_bytes for r in run.ranks if r.device_uuid == gpu.uuid and r.peak_bytes is not None] if run else []
    return max(peaks, default=None) if gpu.uuid else None


def _by_job(processes: Iterable[GpuProcess], machine: MachineSnapshot | None) -> tuple[tuple[str, int | None], ...]:
    names = {job.key: job.name for job in machine.jobs} if machine is not None else {}
    sums: dict[str, tuple[str, int | None]] = {}
    for process in processes:
        key = process.job or f"pid {process.pid}"
        name, so_far = sums.get(key, (names.get(key) or process.run or process.name or f"pid {process.pid}", None))
        sums[key] = (name, total_of((so_far, process.used_bytes)))
    return tuple(sorted(sums.values(), key=lambda found: -(found[1] or 0)))


def _unlisted(gpu: GpuSample, own: int | None, reserved: int | None) -> int | None:
    """Processes in other containers are not listed by the driver: the rest of the used memory is the honest figure."""
    if gpu.used_bytes is None or any(p.used_bytes is None for p in gpu.processes):
        return None
    listed = sum(p.used_bytes or 0 for p in gpu.processes)
    if own is None:
        # The run's own processes are not listed either, but its ranks have told what they hold.
        listed += reserved or 0
    return max(0, gpu.used_bytes - listed)


def total_of(values: Iterable[int | None]) -> int | None:
    """The sum of what is known; None where nothing is."""
    known = [v for v in values if v is not None]
    return sum(known) if known else None
