"""Where the driver does not tell who uses a GPU. No row is then no proof that nobody does, and has to be said."""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot


def untold(machine: MachineSnapshot) -> list[str]:
    """Why GPU processes may be missing from the snapshot, a sentence for each reason; empty where all are listed."""
    if not machine.gpus:
        return [machine.gpu_note or "no GPU"]
    found = [f"GPU {gpu.index}: {why}" for gpu in machine.gpus if (why := untold_of(gpu))]
    if machine.gpu_age_seconds is not None:
        found.append(f"the driver has not answered for {units.duration(machine.gpu_age_seconds)}: the list is as old")
    return found


def untold_of(gpu: GpuSample) -> str:
    """Why the list of one GPU's processes is not whole, or nothing."""
    if gpu.error:
        return f"its processes are not known: {gpu.error}"
    reason = gpu.unknown.get("processes")
    return f"not all of its processes are known: {reason}" if reason else ""
