"""Questions about a whole snapshot: the part of it that concerns some GPUs, and why GPU processes
may be missing from it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from memtop.supervisor import units
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, Job, MachineSnapshot


def only_gpus(snapshot: MachineSnapshot, indices: Collection[int]) -> MachineSnapshot:
    """The snapshot with only these GPUs, the processes on them, and the jobs of these processes.

    A job that also uses other GPUs keeps only the GPU memory that it holds on these. Its processes
    and its host memory stay complete, because they cannot be divided among GPUs.
    """
    gpus = tuple(gpu for gpu in snapshot.gpus if gpu.index in indices)
    if len(gpus) == len(snapshot.gpus):
        return snapshot
    held: dict[str, list[GpuProcess]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            if process.job is not None:
                held.setdefault(process.job, []).append(process)
    jobs = [_part_of(job, held[job.key], indices) for job in snapshot.jobs if job.key in held]
    jobs.sort(key=lambda job: (-(job.used_bytes or 0), job.key))
    note = snapshot.gpu_note
    if not gpus:
        listed = ", ".join(str(gpu.index) for gpu in snapshot.gpus)
        note = f"GPU {', '.join(map(str, sorted(indices)))}: the driver does not list it now, only GPU {listed}"
    return msgspec.structs.replace(snapshot, gpus=gpus, jobs=tuple(jobs), gpu_note=note)


def _part_of(job: Job, rows: list[GpuProcess], indices: Collection[int]) -> Job:
    here = tuple(index for index in job.gpu_indices if index in indices)
    if here == job.gpu_indices:
        return job
    sizes = [row.used_bytes for row in rows if row.used_bytes is not None]
    unknown = {name: reason for name, reason in job.unknown.items() if name != "used_bytes"}
    if len(sizes) == len(rows):
        return msgspec.structs.replace(job, gpu_indices=here, used_bytes=sum(sizes), unknown=unknown)
    reasons = (row.unknown.get("used_bytes") for row in rows)
    unknown["used_bytes"] = next(filter(None, reasons), "the driver does not report all of it")
    return msgspec.structs.replace(job, gpu_indices=here, used_bytes=None, unknown=unknown)


def why_incomplete(machine: MachineSnapshot) -> list[str]:
    """Why GPU processes may be missing from the snapshot, one sentence for each reason.

    Empty if all are listed.
    """
    if not machine.gpus:
        return [machine.gpu_note or "no GPU"]
    found = [f"GPU {gpu.index}: {why}" for gpu in machine.gpus if (why := why_incomplete_on(gpu))]
    if machine.gpu_age_seconds is not None:
        age = units.duration(machine.gpu_age_seconds)
        found.append(f"the driver has not answered for {age}: the list is that old")
    return found


def why_incomplete_on(gpu: GpuSample) -> str:
    """Why processes may be missing from one GPU's list. Empty if the list is complete."""
    if gpu.error:
        return f"its processes are not known: {gpu.error}"
    reason = gpu.unknown.get("processes")
    return f"not all of its processes are known: {reason}" if reason else ""
