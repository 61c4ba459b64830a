"""Which GPUs a run is to use: named by index, or the free ones."""

from __future__ import annotations

import os

from memtop.supervisor import units
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot

FREE_FRACTION = 0.9
"""A GPU counts as free with so much of its memory left and no program computing on it."""


def sample() -> MachineSnapshot:
    """The machine now."""
    sampler = Sampler(patience=ONCE_SECONDS, wake=True)  # a run is about to use them
    try:
        return sampler.sample()
    finally:
        sampler.close()


def wanted(text: str | None) -> list[str] | None:
    """The device indices that `--gpus` means: `0,1`, `free` (one) or `free:2`; None if it was not given.

    Refused (UsageError): what is not an index, GPUs that this machine has not (training would go on without them, on the
    CPU), and more free ones than there are.
    """
    if text is None:
        return None
    word, _, number = text.strip().partition(":")
    if word == "free":
        if not number and ":" not in text:
            number = "1"
        if not _is_index(number) or int(number) < 1:
            raise UsageError(f"--gpus {text}: give how many free GPUs, like free:2")
        return _free(int(number), text)
    indices = _parsed(text)
    _check(indices)
    return indices


def visible(gpus: list[str] | None) -> list[str] | None:
    """The indices of the GPUs that a run may use: as given, else as CUDA_VISIBLE_DEVICES says; None: all of them."""
    if gpus is not None:
        return gpus
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    return words if all(word.isdigit() for word in words) else None


def least_free(machine: MachineSnapshot, gpus: list[str] | None) -> tuple[int | None, str]:
    """Free bytes of the GPU that has the least of them, and which one that is where there are several."""
    known = [
        (gpu.free_bytes, gpu.index)
        for gpu in machine.gpus
        if gpu.free_bytes is not None and (gpus is None or str(gpu.index) in gpus)
    ]
    if not known:
        return None, ""
    free, index = min(known)
    return free, f" on GPU {index}, the fullest of {len(known)}" if len(known) > 1 else ""


def _parsed(text: str) -> list[str]:
    # "00" is GPU 0 too, and must not be a second one.
    words = [str(int(word)) if _is_index(word.strip()) else "" for word in text.split(",")]
    if not all(words) or len(set(words)) != len(words):
        raise UsageError(f"--gpus {text!r}: give different device indices like 0 or 0,1, or free:2 for two free ones")
    return words


def _is_index(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 5


def _check(gpus: list[str]) -> None:
    machine = sample()
    given = f"--gpus {','.join(gpus)}"
    _need_some(machine, given)
    known = [str(gpu.index) for gpu in machine.gpus]
    missing = [index for index in gpus if index not in known]
    if missing:
        raise UsageError(f"{given}: this machine has no GPU {', '.join(missing)}; there are {', '.join(known)}")


def _need_some(machine: MachineSnapshot, given: str) -> None:
    if not machine.gpus:
        raise UsageError(f"{given}: {machine.gpu_note or 'no NVIDIA GPU'}; leave --gpus out to train on the CPU")


def _free(count: int, given: str) -> list[str]:
    """The emptiest of the free GPUs, in order of their index."""
    machine = sample()
    _need_some(machine, f"--gpus {given}")
    allowed = visible(None)
    candidates = [gpu for gpu in machine.gpus if allowed is None or str(gpu.index) in allowed]
    taken = {gpu.index: reason for gpu in candidates if (reason := _why_not_free(gpu)) is not None}
    free = sorted((gpu for gpu in candidates if gpu.index not in taken), key=lambda gpu: -(gpu.free_bytes or 0))
    if len(free) < count:
        verb = "is" if len(free) < 2 else "are"
        why = "; ".join(f"GPU {index}: {reason}" for index, reason in taken.items())
        raise UsageError(f"--gpus {given}: {len(free) or 'none'} of {len(candidates)} GPUs {verb} free; {why}")
    return [str(index) for index in sorted(gpu.index for gpu in free[:count])]


def _why_not_free(gpu: GpuSample) -> str | None:
    if gpu.error:
        return gpu.error
    if gpu.total_bytes is None or gpu.free_bytes is None:
        return "its memory is not known"
    for process in gpu.processes:
        if "compute" in process.kind:
            who = ", ".join(word for word in (process.user, process.name) if word)
            return f"process {process.pid} computes on it" + (f" ({who})" if who else "")
    if gpu.free_bytes < FREE_FRACTION * gpu.total_bytes:
        return f"only {units.size(gpu.free_bytes)} of {units.size(gpu.total_bytes)} free"
    return None
