"""Which device this process trains on, and why not on a GPU."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pynvml
import torch
from accelerate import Accelerator
from accelerate.state import PartialState

from memtop.presets import Settings
from memtop.presets.gpu_support import Gpu, TorchBuild, Unusable, why_unusable
from memtop.train import BadInputError


class Device(msgspec.Struct, frozen=True):
    """The kind of device that the settings mean on this machine."""

    on_gpu: bool
    problem: str | None = None
    """Why the GPU of this machine is not used although the settings allow it."""


def choose_device(settings: Settings) -> Device:
    """The device for these settings; BadInputError if they ask for a GPU that torch cannot use."""
    if settings.device == "cpu":
        return Device(on_gpu=False)
    available = torch.cuda.is_available()
    problem = _problem_of_the_used_gpu() if available else _problem_of_a_hidden_gpu()
    if problem is None and available:
        return Device(on_gpu=True)
    if settings.device == "cuda":
        reason = problem or "torch sees no CUDA device; give --set device=auto or cpu"
        raise BadInputError(f"device cuda: {reason}")
    return Device(False, problem and f"device auto: trains on the CPU: {problem}")


def _build() -> TorchBuild:
    version: Any = torch.version
    return TorchBuild(
        version=torch.__version__,
        cuda=version.cuda,
        rocm=version.hip is not None,
        kernels=tuple(torch.cuda.get_arch_list()),
    )


def _problem_of_the_used_gpu() -> str | None:
    build = _build()
    if build.rocm or not build.kernels:
        return None
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    major, minor = torch.cuda.get_device_capability(index)
    return _text_of(why_unusable(build, Gpu(name=torch.cuda.get_device_name(index), capability=(major, minor))))


def _problem_of_a_hidden_gpu() -> str | None:
    """Why torch sees no GPU although the NVIDIA driver has one; None if there is none to see."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None  # the user has hidden the GPUs
    try:
        pynvml.nvmlInit()
        try:
            if not pynvml.nvmlDeviceGetCount():
                return None
            first = pynvml.nvmlDeviceGetHandleByIndex(0)
            cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
            gpu = Gpu(name=_text(pynvml.nvmlDeviceGetName(first)), capability=pynvml.nvmlDeviceGetCudaComputeCapability(first))
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        # No driver, or one that does not answer: there is nothing to say about a GPU.
        return None
    return _text_of(why_unusable(_build(), gpu, driver_version=driver, driver_cuda=(cuda // 1000, cuda % 1000 // 10)))


def _text_of(problem: Unusable | None) -> str | None:
    return None if problem is None else str(problem)


def _text(found: Any) -> str:
    """Older versions of the library return bytes."""
    return found.decode() if isinstance(found, bytes) else str(found)


def give_index(accelerator: Accelerator) -> None:
    """Give the accelerator's GPU its index.

    In a single process accelerate calls it `cuda`. torch refuses that name in some places
    (`get_per_process_memory_fraction`).
    """
    if accelerator.device.type == "cuda" and accelerator.device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
        # Both have a copy.
        accelerator.state.device = PartialState().device = device


def device_uuid(device: torch.device) -> str | None:
    """The GPU's UUID in the driver's notation; None on the CPU."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
