"""A snapshot of some of the GPUs: theirs alone, with the processes on them and the jobs that these form."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from memtop.supervisor.monitor.values import GpuProcess, Job, MachineSnapshot


def only(snapshot: MachineSnapshot, indices: Collection[int]) -> MachineSnapshot:
    """The snapshot with the GPUs of these indices alone. Pure.

    A job that also computes elsewhere stays with what it holds here; its processes and its host memory are still all of
    its own, for they cannot be divided among GPUs.
    """
    gpus = tuple(gpu for gpu in snapshot.gpus if gpu.index in indices)
    if len(gpus) == len(snapshot.gpus):
        return snapshot
    held: dict[str, list[GpuProcess]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            if process.job is not None:
                held.setdefault(process.job, []).append(process)
    jobs = [_held_here(job, held[job.key], indices) for job in snapshot.jobs if job.key in held]
    jobs.sort(key=lambda job: (-(job.used_bytes or 0), job.key))
    note = snapshot.gpu_note
    if not gpus:
        note = f"GPU {', '.join(map(str, sorted(indices)))}: the driver does not list it now, only {_others(snapshot)}"
    return msgspec.structs.replace(snapshot, gpus=gpus, jobs=tuple(jobs), gpu_note=note)


def _others(snapshot: MachineSnapshot) -> str:
    return "GPU " + ", ".join(str(gpu.index) for gpu in snapshot.gpus)


def _held_here(job: Job, rows: list[GpuProcess], indices: Collection[int]) -> Job:
    here = tuple(index for index in job.gpu_indices if index in indices)
    if here == job.gpu_indices:
        return job
    sizes = [row.used_bytes for row in rows if row.used_bytes is not None]
    unknown = {name: reason for name, reason in job.unknown.items() if name != "used_bytes"}
    if len(sizes) == len(rows):
        return msgspec.structs.replace(job, gpu_indices=here, used_bytes=sum(sizes), unknown=unknown)
    reasons = (row.unknown.get("used_bytes") for row in rows)
    unknown["used_bytes"] = next(filter(None, reasons), "the driver does not tell all of it")
    return msgspec.structs.replace(job, gpu_indices=here, used_bytes=None, unknown=unknown)
