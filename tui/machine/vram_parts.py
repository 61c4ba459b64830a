"""Who holds a GPU's memory: the run's ranks and the driver's list, put together by the monitor."""

from __future__ import annotations

from collections.abc import Iterable

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankUse, VramParts, placed, ranks_on, step_peak_bytes
from memtop.supervisor.monitor.vram import vram_parts as split


def vram_parts(
    gpu: GpuSample, run: wire.RunState | None, machine: MachineSnapshot | None, *, all_pids_visible: bool = False
) -> VramParts:
    """The memory of one GPU of this snapshot in parts that add up; None with a reason where it cannot be told."""
    return split(
        gpu,
        _ranks(run, machine),
        run=run.name if run is not None else None,
        base_bytes=run.gpu_base_bytes.get(gpu.uuid or "") if run is not None else None,
        job_names={job.key: job.name for job in machine.jobs} if machine is not None else {},
        all_pids_visible=all_pids_visible,
    )


def step_peak(gpu: GpuSample, run: wire.RunState | None, machine: MachineSnapshot | None) -> int | None:
    """The most that was in use on this GPU during the newest update, the driver's reserve apart, bytes."""
    if run is None:
        return None
    ranks = ranks_on(gpu, _ranks(run, machine))
    peak = step_peak_bytes(vram_parts(gpu, run, machine), ranks) if ranks else None
    return None if peak is None else max(0, peak - (gpu.reserved_bytes or 0))


def _ranks(run: wire.RunState | None, machine: MachineSnapshot | None) -> list[RankUse]:
    if run is None:
        return []
    told = [
        RankUse(
            pid=rank.pid,
            device_uuid=rank.device_uuid,
            allocated_bytes=rank.allocated_bytes,
            reserved_bytes=rank.reserved_bytes,
            peak_reserved_bytes=rank.peak_reserved_bytes,
        )
        for rank in run.ranks
        # A rank on the CPU tells nothing of a device.
        if rank.device_uuid is not None or rank.reserved_bytes is not None
    ]
    return placed(told, machine.gpus) if machine is not None else told


def total_of(values: Iterable[int | None]) -> int | None:
    """The sum of what is known; None where nothing is."""
    known = [v for v in values if v is not None]
    return sum(known) if known else None
