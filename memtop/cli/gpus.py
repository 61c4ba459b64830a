"""The GPUs that `--gpus` selects (by index, the free ones, or those that CUDA may use), and where a
run trains."""

from __future__ import annotations

import os

import msgspec

from memtop.cli.output import print_message
from memtop.presets import gpu_support
from memtop.presets.gpu_support import Gpu, TorchBuild, Unusable, why_no_kernels
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


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run trains, and how much memory is free there."""

    free_bytes: int | None = None
    """On each of its GPUs. None: no GPU, or not known."""
    note: str = ""
    """Which of several GPUs that is, for people."""
    pinned: str | None = None
    """What the program gets as CUDA_VISIBLE_DEVICES, if memtop chose: a UUID, or the
    GPU's index if the driver gives none."""
    problem: Unusable | None = None
    """Why the installed torch cannot compute there."""


class _Device(msgspec.Struct, frozen=True):
    """A GPU, or an instance of one with MIG."""

    gpu: GpuSample
    name: str
    uuid: str | None
    free_bytes: int | None


def place(machine: MachineSnapshot, gpus: list[str] | None, build: TorchBuild | None = None) -> Place:
    """Where a run with these GPUs (None: the person chose none) trains.

    One process trains on the emptiest of the GPUs and MIG instances among which memtop may choose.
    With CUDA_VISIBLE_DEVICES it trains on the first one there. Several processes are measured by
    the fullest GPU.
    """
    devices = _devices(machine, gpus)
    if gpus is not None and len(gpus) > 1:
        least = min(devices, key=_room, default=None)
        note = f"on {least.name}, the fullest of {len(devices)}" if least and len(devices) > 1 else ""
        problem = next(filter(None, (why_unusable(machine, device.gpu, build) for device in devices)), None)
        return Place(free_bytes=least.free_bytes if least else None, note=note, problem=problem)
    if gpus is None and VARIABLE in os.environ:
        first = _first_visible(machine, devices)
        problem = why_unusable(machine, first.gpu, build) if first else None
        return Place(free_bytes=first.free_bytes if first else None, problem=problem)
    return _emptiest(machine, devices, build)


def _emptiest(machine: MachineSnapshot, devices: list[_Device], build: TorchBuild | None) -> Place:
    problems = {device.gpu.index: why_unusable(machine, device.gpu, build) for device in devices}
    usable = [device for device in devices if problems[device.gpu.index] is None]
    if not usable:
        return Place(problem=next(iter(problems.values()), None))
    best = max(usable, key=_room)
    if len(devices) == 1:
        return Place(free_bytes=best.free_bytes)
    others = f", the emptiest of {len(usable)}" if len(usable) > 1 else ""
    pinned = best.uuid or str(best.gpu.index)
    return Place(free_bytes=best.free_bytes, note=f"on {best.name}{others}", pinned=pinned)


def _devices(machine: MachineSnapshot, gpus: list[str] | None) -> list[_Device]:
    """Those that CUDA can use: of a GPU in MIG mode only its instances."""
    found = []
    for gpu in machine.gpus:
        if gpu.error or (gpus is not None and str(gpu.index) not in gpus):
            continue
        name = f"GPU {gpu.index}"
        parts = [_Device(gpu, f"{name}, MIG {one.position}", one.uuid, one.free_bytes) for one in gpu.mig if not one.error]
        found += parts or ([] if gpu.details.mig_mode else [_Device(gpu, name, gpu.uuid, gpu.free_bytes)])
    return found


def _room(device: _Device) -> int:
    return -1 if device.free_bytes is None else device.free_bytes


def _first_visible(machine: MachineSnapshot, devices: list[_Device]) -> _Device | None:
    """What CUDA calls `cuda:0`. If CUDA's order is not known, the fullest that it may be."""
    allowed = visible(None, machine)
    seen = [device for device in devices if allowed is None or str(device.gpu.index) in allowed]
    word = os.environ[VARIABLE].split(",")[0].strip()
    named = [device for device in seen if word and (device.uuid or "").startswith(word)]
    first = named or [device for device in seen if device.gpu.visible_index == 0]
    return min(first or seen, key=_room, default=None)


def why_unusable(machine: MachineSnapshot, gpu: GpuSample, build: TorchBuild | None) -> Unusable | None:
    """Why the installed torch cannot compute on this GPU, and what to do; None if nothing is known
    against it."""
    if build is None:
        return None
    capability, driver = gpu.details.compute_capability, machine.cuda_version
    card = Gpu(name=gpu.name or "NVIDIA GPU", capability=_pair(capability))
    found = gpu_support.why_unusable(build, card, driver_version=machine.driver_version, driver_cuda=_pair(driver))
    return found or why_no_kernels(build, card)


def _pair(version: str | None) -> tuple[int, int] | None:
    major, _, minor = (version or "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


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
