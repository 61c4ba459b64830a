"""The GPUs that `--gpus` selects (by index, the free ones, or those that CUDA may use), and where a
run trains."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from memtop.cli.output import print_message
from memtop.presets import Settings, gpu_support
from memtop.presets.choosing import fits, need_to_read
from memtop.presets.gpu_support import Gpu, TorchBuild, Unusable, why_no_kernels
from memtop.supervisor import units
from memtop.supervisor.errors import UsageError
from memtop.supervisor.interpreters import build_of
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot
from memtop.supervisor.plan import Card

VARIABLE = "CUDA_VISIBLE_DEVICES"
FREE_FRACTION = 0.9
"""A GPU is free if this share of its memory is free and the driver lists no compute process on
it."""
_MPS = "nvidia-cuda-mps-server"


def sample() -> MachineSnapshot:
    """The machine now."""
    # Wake sleeping GPUs: a run is about to use them.
    from memtop.supervisor.monitor.nvml.thread import ONCE_SECONDS
    from memtop.supervisor.monitor.sampler import Sampler

    sampler = Sampler(patience=ONCE_SECONDS, wake=True)
    try:
        return sampler.sample()
    finally:
        sampler.close()


def emptiest(machine: MachineSnapshot, count: int = 1) -> GpuSample | None:
    """The GPU with the most free memory, or the fullest of so many of them; None if there is none
    that can be read."""
    known = [gpu for gpu in machine.gpus if gpu.total_bytes is not None and gpu.error is None]
    chosen = sorted(known, key=lambda one: one.free_bytes or 0, reverse=True)[:count]
    return chosen[-1] if chosen else None


def _sample_without(run: str | None) -> MachineSnapshot:
    """The machine once the processes of this run have ended: a restart ends them first."""
    machine = sample()
    return machine if run is None else replace(machine, gpus=tuple(_gpu_without(gpu, run) for gpu in machine.gpus))


def _gpu_without(gpu: GpuSample, run: str) -> GpuSample:
    def more(free: int | None, ended: list[GpuProcess]) -> int | None:
        return None if free is None else free + sum(process.used_bytes or 0 for process in ended)

    ended = [process for process in gpu.processes if process.run == run]
    parts = tuple(
        replace(one, free_bytes=more(one.free_bytes, [each for each in ended if each.mig_instance == one.position]))
        for one in gpu.mig
    )
    left = tuple(process for process in gpu.processes if process.run != run)
    return replace(gpu, processes=left, free_bytes=more(gpu.free_bytes, ended), mig=parts)


def wanted(text: str | None, run: str | None = None) -> list[str] | None:
    """The device indices that `train --gpus` selects: `0,1`, `free` (one) or `free:2`; None if it
    was not given.

    UsageError if the text is no index, if this machine does not have the GPU (training would
    silently run on the CPU), if no further program can use it, or if fewer GPUs are certainly free.
    `run` is the one that is restarted: its processes do not count.
    """
    if text is None:
        return None
    word, _, number = text.strip().partition(":")
    if word == "free":
        if not number and ":" not in text:
            number = "1"
        if not _is_index(number) or int(number) < 1:
            raise UsageError(f"--gpus {text}: give how many free GPUs, like free:2")
        return _free(int(number), text, _sample_without(run))
    indices = _parsed(text, "free:2 for two free ones")
    machine, given = _sample_without(run), f"--gpus {','.join(indices)}"
    _need_some(machine, given, "to train on the CPU")
    _check(indices, machine, given)
    for gpu in machine.gpus:
        if str(gpu.index) in indices and (closed := why_closed(gpu)) is not None:
            raise UsageError(f"{given}: GPU {gpu.index}: {closed}")
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


def _allowed(machine: MachineSnapshot) -> list[str] | None:
    """The indices of the GPUs in CUDA_VISIBLE_DEVICES; None: all."""
    variable = os.environ.get(VARIABLE)
    if variable is None:
        return None
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
    card: Card | None = None
    """The GPU with this free memory. None: no GPU, or its size is not known."""
    note: str = ""
    """Which of several GPUs that is, for people."""
    pinned: str | None = None
    """What the program gets as CUDA_VISIBLE_DEVICES, if memtop chose: a UUID, or the
    GPU's index if the driver gives none."""
    problem: Unusable | None = None
    """Why the installed torch cannot compute there."""
    closed: str | None = None
    """Why none of the GPUs accepts another program."""
    warning: str = ""
    """Says that the run trains on the CPU, and why, if the user did not choose the CPU."""


class _Device(msgspec.Struct, frozen=True):
    """A GPU, or an instance of one with MIG."""

    gpu: GpuSample
    name: str
    uuid: str | None
    free_bytes: int | None
    total_bytes: int | None
    position: int | None = None
    """Of the instance."""

    @property
    def card(self) -> Card | None:
        if self.total_bytes is None or self.free_bytes is None:
            return None
        card = Card.of(self.gpu, others_bytes=self.total_bytes - self.free_bytes)
        return replace(card, total_bytes=self.total_bytes)


def choose_place(gpus: list[str] | None, device: str | None, run: str | None = None, *, python: str = "") -> Place:
    """Where a run with these GPUs (None: the person chose none) and this setting `device` trains.

    UsageError if its GPUs accept no other program, or if the person asks for a GPU on which the
    installed torch cannot compute. If the user did not ask for a GPU, the run gets the CPU, with a
    warning. `run`: see `wanted`. `python`: the interpreter that trains; empty: memtop's own.
    """
    if device == "cpu":
        return Place()
    found = _place(_sample_without(run), gpus, build_of(python))
    chosen = f"--gpus {','.join(gpus)}" if gpus is not None else f"device {device or 'auto'}"
    if found.closed is not None:
        if gpus is None and VARIABLE in os.environ:
            chosen = f"{VARIABLE}={os.environ[VARIABLE]}"
        raise UsageError(f"{chosen}: {found.closed}")
    if found.problem is None:
        return found
    if gpus is not None or device == "cuda":
        raise UsageError(f"{chosen}: {found.problem}")
    return Place(warning=f"device auto: trains on the CPU: {found.problem}")


def _place(machine: MachineSnapshot, gpus: list[str] | None, build: TorchBuild | None) -> Place:
    """One process trains on the emptiest of the GPUs and MIG instances among which memtop may
    choose. With CUDA_VISIBLE_DEVICES it trains on the first one there. Several processes are
    measured by the fullest GPU.
    """
    devices = _devices(machine, gpus)
    if gpus is not None and len(gpus) > 1:
        least = min(devices, key=_room, default=None)
        note = f"{least.name} is the fullest of {len(devices)}" if least and len(devices) > 1 else ""
        problem = next(filter(None, (why_unusable(machine, device.gpu, build) for device in devices)), None)
        card = None if least is None else least.card
        return Place(free_bytes=least.free_bytes if least else None, card=card, note=note, problem=problem)
    if gpus is None and VARIABLE in os.environ:
        first = _first_visible(machine, devices)
        devices = [] if first is None else [first]
    return _emptiest(machine, devices, build)


def _emptiest(machine: MachineSnapshot, devices: list[_Device], build: TorchBuild | None) -> Place:
    problems = {device.gpu.index: why_unusable(machine, device.gpu, build) for device in devices}
    usable = [device for device in devices if problems[device.gpu.index] is None]
    if not usable:
        return Place(problem=next(iter(problems.values()), None))
    accepting = [device for device in usable if _why_closed(device) is None]
    if not accepting:
        return Place(closed=f"{usable[0].name}: {_why_closed(usable[0])}")
    best = max(accepting, key=_room)
    if len(devices) == 1:
        return Place(free_bytes=best.free_bytes, card=best.card)
    others = f", the emptiest of {len(accepting)}" if len(accepting) > 1 else ""
    pinned = best.uuid or str(best.gpu.index)
    return Place(free_bytes=best.free_bytes, card=best.card, note=f"on {best.name}{others}", pinned=pinned)


def _devices(machine: MachineSnapshot, gpus: list[str] | None) -> list[_Device]:
    """Those that CUDA can use."""
    chosen = [gpu for gpu in machine.gpus if not gpu.error and (gpus is None or str(gpu.index) in gpus)]
    return [device for gpu in chosen for device in _devices_of(gpu)]


def _devices_of(gpu: GpuSample) -> list[_Device]:
    """The GPU; in MIG mode only its instances."""
    name = f"GPU {gpu.index}"
    if gpu.mig or gpu.details.mig_mode:
        return [
            _Device(gpu, f"{name}, MIG {one.position}", one.uuid, one.free_bytes, one.total_bytes, one.position)
            for one in gpu.mig
            if not one.error
        ]
    return [_Device(gpu, name, gpu.uuid, gpu.free_bytes, gpu.total_bytes)]


def _room(device: _Device) -> int:
    return -1 if device.free_bytes is None else device.free_bytes


def _first_visible(machine: MachineSnapshot, devices: list[_Device]) -> _Device | None:
    """What CUDA calls `cuda:0`. If CUDA's order is not known, the fullest that it may be."""
    allowed = _allowed(machine)
    seen = [device for device in devices if allowed is None or str(device.gpu.index) in allowed]
    word = os.environ[VARIABLE].split(",")[0].strip()
    named = [device for device in seen if word and (device.uuid or "").startswith(word)]
    first = named or [device for device in seen if device.gpu.visible_index == 0]
    return min(first or seen, key=_room, default=None)


class ReadingPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model of a saved state computes, without training."""

    visible: str | None
    """What the process gets as CUDA_VISIBLE_DEVICES; None: the CPU."""
    words: str
    """Where that is, and why."""


def place_to_read(settings: Settings, given: str | None = None) -> ReadingPlace:
    """The first GPU of the run if its model fits there and no other program computes on it;
    otherwise the CPU. Next to a training the model could take the memory that the training needs.

    `given`: the index of another GPU, or `cpu`. UsageError if this machine has no such GPU, or if
    it cannot be used.
    """
    if given == "cpu":
        return ReadingPlace(visible=None, words="computes on the CPU")
    machine, build = sample(), build_of(settings.python)
    if given is not None:
        if not _is_index(given):
            raise UsageError(f"--gpu {given}: give the index of a GPU, or cpu")
        if not machine.gpus:
            raise UsageError(f"--gpu {given}: {machine.gpu_note or 'no NVIDIA GPU'}; --gpu cpu computes on the CPU")
        _check([str(int(given))], machine, f"--gpu {given}")
        device = next(iter(_devices(machine, [str(int(given))])), None)
        if device is None:
            raise UsageError(f"--gpu {given}: the driver cannot read it; --gpu cpu computes on the CPU")
        problem = _why_closed(device) or why_unusable(machine, device.gpu, build)
        if problem is not None:
            raise UsageError(f"--gpu {given}: {problem}")
        return _on(device)
    first = _first_of(settings, machine)
    if isinstance(first, str):
        return ReadingPlace(visible=None, words=f"computes on the CPU: {first}")
    why = _why_not_to_read(first, need_to_read(settings)) or why_unusable(machine, first.gpu, build)
    return _on(first) if why is None else ReadingPlace(visible=None, words=f"computes on the CPU: {first.name}: {why}")


def _on(device: _Device) -> ReadingPlace:
    return ReadingPlace(visible=device.uuid or str(device.gpu.index), words=f"computes on {device.name}")


def _first_of(settings: Settings, machine: MachineSnapshot) -> _Device | str:
    """The first GPU of a run, or why there is none."""
    if settings.device == "cpu":
        return "so does the run"
    devices, named = _devices(machine, None), settings.gpus.partition(",")[0]
    if not devices:
        return machine.gpu_note or "no NVIDIA GPU"
    if not named:
        return (_first_visible(machine, devices) if VARIABLE in os.environ else None) or devices[0]
    found = (one for one in devices if named in (one.uuid, str(one.gpu.index)))
    return next(found, f"this machine has no GPU {named}, the run's first")


def _why_not_to_read(device: _Device, needed: int | None) -> str | None:
    closed = _why_closed(device)
    if closed is not None:
        return closed.found
    if device.free_bytes is None:
        return "its free memory is not known"
    process = next((one for one in _computing(device.gpu) if device.position in (None, one.mig_instance)), None)
    if process is not None:
        return _who(process)
    if needed is None:
        return "how much memory the model needs is not known"
    if not fits(needed, device.free_bytes):
        return f"{units.size(device.free_bytes)} free, and the model needs about {units.size(needed)}"
    return None


def why_closed(gpu: GpuSample) -> Unusable | None:
    """Why this GPU, with all its MIG instances, accepts no other program. None if nothing is known
    against it."""
    reasons = [_why_closed(device) for device in _devices_of(gpu)]
    return None if None in reasons else next(iter(reasons), None)


def _why_closed(device: _Device) -> Unusable | None:
    mode, index = device.gpu.details.compute_mode or "", device.gpu.index
    if mode == "prohibited":
        advice = f"choose another GPU, or allow it as root: nvidia-smi -i {index} -c DEFAULT"
        return Unusable("its compute mode is prohibited, so no program can use it", advice)
    there = [process for process in _computing(device.gpu) if device.position in (None, process.mig_instance)]
    # An MPS server is the only process on such a GPU, and lets several programs use it.
    if not mode.startswith("exclusive") or any(process.kind == "mps" or _MPS in (process.name or "") for process in there):
        return None
    others = [process for process in there if not process.gone]
    if not others:
        return None
    advice = f"choose another GPU, or wait until process {others[0].pid} has ended"
    return Unusable(f"its compute mode is {mode}, and {_who(others[0])}", advice)


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


def _free(count: int, given: str, machine: MachineSnapshot) -> list[str]:
    """The free GPUs with the most free memory, in the order of their indices."""
    _need_some(machine, f"--gpus {given}", "to train on the CPU")
    allowed = _allowed(machine)
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
    closed = why_closed(gpu)
    if closed is not None:
        return closed.found
    if gpu.total_bytes is None or gpu.free_bytes is None:
        return "its memory is not known"
    process = next(_computing(gpu), None)
    if process is not None:
        return _who(process)
    if "processes" in gpu.unknown:
        return f"who computes on it is not known: {gpu.unknown['processes']}"
    if gpu.free_bytes < FREE_FRACTION * gpu.total_bytes:
        return f"only {units.size(gpu.free_bytes)} of {units.size(gpu.total_bytes)} free"
    return None


def _computing(gpu: GpuSample) -> Iterator[GpuProcess]:
    """Compute, with graphics or without, and the clients of an MPS server."""
    return (process for process in gpu.processes if process.kind != "graphics")


def _who(process: GpuProcess) -> str:
    who = ", ".join(word for word in (process.user, process.name) if word)
    return f"process {process.pid} computes on it" + (f" ({who})" if who else "")
