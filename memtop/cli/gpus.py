"""The GPUs that `--gpus` selects: by index, the free ones, or those that CUDA may use."""

from __future__ import annotations

import os

from memtop.cli.output import print_message
from memtop.supervisor import units
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot

VARIABLE = "CUDA_VISIBLE_DEVICES"
FREE_FRACTION = 0.9
"""A GPU is free if this share of its memory is free and the driver lists no compute process on
it."""


def sample() -> MachineSnapshot:
    """The machine now."""
    # Wake sleeping GPUs: a run is about to use them.
    sampler = Sampler(patience=ONCE_SECONDS, wake=True)
    try:
        return sampler.sample()
    finally:
        sampler.close()


def wanted(text: str | None) -> list[str] | None:
    """The device indices that `train --gpus` selects: `0,1`, `free` (one) or `free:2`; None if it
    was not given.

    UsageError for text that is no index, for GPUs that this machine does not have (training would
    silently run on the CPU), and if fewer GPUs are certainly free.
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
    indices = _parsed(text, "free:2 for two free ones")
    machine, given = sample(), f"--gpus {','.join(indices)}"
    _need_some(machine, given, "to train on the CPU")
    _check(indices, machine, given)
    return indices


def watched(text: str | None, machine: MachineSnapshot | None = None) -> frozenset[int] | None:
    """The indices that `watch --gpus` selects: `0,2`, or `visible` (those of CUDA_VISIBLE_DEVICES);
    None if it was not given.

    UsageError for text that is no index, and for GPUs that this machine does not have.
    """
    if text is None:
        return None
    indices = None if text.strip() == "visible" else _parsed(text, "visible for those of CUDA_VISIBLE_DEVICES")
    machine = machine or sample()
    _need_some(machine, f"--gpus {text}", "to watch the machine without one")
    if indices is None:
        return _visible(machine)
    _check(indices, machine, f"--gpus {text}")
    return frozenset(map(int, indices))


def _visible(machine: MachineSnapshot) -> frozenset[int]:
    variable = os.environ.get(VARIABLE)
    known = frozenset(gpu.index for gpu in machine.gpus)
    if variable is None:
        return known
    reason = next((gpu.unknown["visible_index"] for gpu in machine.gpus if "visible_index" in gpu.unknown), None)
    if reason is None:
        found = frozenset(gpu.index for gpu in machine.gpus if gpu.visible_index is not None)
    else:
        found = known & _numbers(variable, reason)
        print_message(f"memtop: --gpus visible: taken as the driver's numbers: {reason}")
    if not found:
        raise UsageError(_none_visible("--gpus visible", machine))
    return found


def _numbers(variable: str, reason: str) -> frozenset[int]:
    """The numbers in CUDA_VISIBLE_DEVICES, although CUDA may number the GPUs differently."""
    words = [word.strip() for word in variable.split(",")]
    if not all(map(_is_index, words)) or len(set(words)) < len(words):
        raise UsageError(f"--gpus visible: {reason}; or give indices like --gpus 0,1")
    return frozenset(map(int, words))


def _none_visible(given: str, machine: MachineSnapshot) -> str:
    return (
        f"{given}: {VARIABLE}={os.environ.get(VARIABLE, '')!r} shows none of the GPUs {_indices(machine)}; change or unset it"
    )


def visible(gpus: list[str] | None, machine: MachineSnapshot) -> list[str] | None:
    """The indices of the GPUs that a run may use: `gpus` if given, otherwise those of
    CUDA_VISIBLE_DEVICES; None: all."""
    variable = os.environ.get(VARIABLE)
    if gpus is not None or variable is None:
        return gpus
    if any("visible_index" in gpu.unknown for gpu in machine.gpus):
        # CUDA may number the GPUs differently from the driver: use its numbers, there is nothing
        # better.
        words = variable.replace(" ", "").split(",")
        return words if all(word.isdigit() for word in words) else None
    return [str(gpu.index) for gpu in machine.gpus if gpu.visible_index is not None]


def least_free(machine: MachineSnapshot, gpus: list[str] | None) -> tuple[int | None, str]:
    """The free bytes of the fullest GPU, and, if there are several, a text that names it."""
    known = [
        (gpu.free_bytes, gpu.index)
        for gpu in machine.gpus
        if gpu.free_bytes is not None and (gpus is None or str(gpu.index) in gpus)
    ]
    if not known:
        return None, ""
    free, index = min(known)
    return free, f" on GPU {index}, the fullest of {len(known)}" if len(known) > 1 else ""


def _parsed(text: str, other: str) -> list[str]:
    # "00" is GPU 0 too: "0,00" names it twice.
    words = [str(int(word)) if _is_index(word.strip()) else "" for word in text.split(",")]
    if not all(words) or len(set(words)) != len(words):
        raise UsageError(f"--gpus {text!r}: give different device indices like 0 or 0,1, or {other}")
    return words


def _is_index(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 5


def _check(gpus: list[str], machine: MachineSnapshot, given: str) -> None:
    known = [str(gpu.index) for gpu in machine.gpus]
    missing = [index for index in gpus if index not in known]
    if missing:
        raise UsageError(f"{given}: this machine has no GPU {', '.join(missing)}; there are {_indices(machine)}")


def _indices(machine: MachineSnapshot) -> str:
    return ", ".join(str(gpu.index) for gpu in machine.gpus)


def _need_some(machine: MachineSnapshot, given: str, without: str) -> None:
    if not machine.gpus:
        raise UsageError(f"{given}: {machine.gpu_note or 'no NVIDIA GPU'}; leave --gpus out {without}")


def _free(count: int, given: str) -> list[str]:
    """The free GPUs with the most free memory, in the order of their indices."""
    machine = sample()
    _need_some(machine, f"--gpus {given}", "to train on the CPU")
    allowed = visible(None, machine)
    candidates = [gpu for gpu in machine.gpus if allowed is None or str(gpu.index) in allowed]
    if not candidates:
        raise UsageError(_none_visible(f"--gpus {given}", machine))
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
        # Compute, with graphics or without, and the clients of an MPS server.
        if process.kind != "graphics":
            who = ", ".join(word for word in (process.user, process.name) if word)
            return f"process {process.pid} computes on it" + (f" ({who})" if who else "")
    if "processes" in gpu.unknown:
        return f"who computes on it is not known: {gpu.unknown['processes']}"
    if gpu.free_bytes < FREE_FRACTION * gpu.total_bytes:
        return f"only {units.size(gpu.free_bytes)} of {units.size(gpu.total_bytes)} free"
    return None
