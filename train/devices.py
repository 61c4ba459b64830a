"""Which device this process trains on, why not on a GPU, and what a GPU cannot do."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec
import pynvml
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import check_cuda_p2p_ib_support

from memtop.presets import Settings
from memtop.presets.gpu_support import Gpu, TorchBuild, why_unusable
from memtop.train import BadInputError, first_line
from memtop.train.agent.failures import is_allocation_failure

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPU_INSTEAD = "or give --set device=cpu to train on the CPU"


class Device(msgspec.Struct, frozen=True):
    """The kind of device that the settings mean on this machine."""

    on_gpu: bool
    wanted: bool = True
    """Whether a GPU would be used if torch could use one."""
    problem: str | None = None
    """Why the GPU of this machine is not used although the settings allow it."""

    @property
    def warning(self) -> str | None:
        """What the user must know: the training is slow."""
        return self.problem and f"device auto: trains on the CPU: {self.problem}"


def choose_device(settings: Settings) -> Device:
    """The device for these settings.

    BadInputError if they ask for a GPU that torch cannot use, or if CUDA cannot start on a GPU that
    was chosen for this process.
    """
    if settings.device == "cpu":
        return Device(on_gpu=False, wanted=False)
    available = torch.cuda.is_available()
    problem, fault = (_problem_of_the_used_gpu(), False) if available else _problem_of_a_hidden_gpu()
    if problem is None and available:
        return Device(on_gpu=True)
    if settings.device == "cuda":
        reason = problem or "torch sees no CUDA device; give --set device=auto or cpu"
        raise BadInputError(f"device cuda: {reason}")
    if fault and os.environ.get(_VISIBLE):
        raise BadInputError(f"device auto: {problem}, {_CPU_INSTEAD}")
    return Device(on_gpu=False, problem=problem)


def check_resumed(chosen: Device, *, was_on_gpu: bool) -> None:
    """BadInputError if a training that was on a GPU would continue on the CPU unasked."""
    if was_on_gpu and chosen.wanted and not chosen.on_gpu:
        reason = chosen.problem or "torch sees no GPU here; run memtop doctor"
        raise BadInputError(f"device auto: the saved state was trained on a GPU: {reason}, {_CPU_INSTEAD}")


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
    unfit = why_unusable(build, Gpu(name=torch.cuda.get_device_name(index), capability=(major, minor)))
    return None if unfit is None else str(unfit)


def _problem_of_a_hidden_gpu() -> tuple[str | None, bool]:
    """Why torch sees no GPU, and whether it should: its build fits the driver's GPU.

    None if there is no GPU to see.
    """
    visible = os.environ.get(_VISIBLE, "0").strip()
    if visible in ("", "-1"):
        return None, False  # the user has hidden the GPUs
    build = _build()
    try:
        driver = _read_driver()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        # Most such machines have no GPU. Only a chosen one is missing then.
        if build.cuda is None or not visible.startswith(("GPU-", "MIG-")):
            return None, False
        seen = f"the NVIDIA driver cannot be asked ({error})"
    except pynvml.NVMLError as error:
        if build.cuda is None:
            return None, False
        seen = f"the NVIDIA driver does not answer ({error})"
    else:
        if driver is None:
            return None, False
        unfit = why_unusable(build, driver.gpu, driver_version=driver.version, driver_cuda=driver.cuda)
        if unfit is not None:
            return str(unfit), False
        seen = f"the driver has a GPU ({driver.gpu.name})"
    named = f" with {_VISIBLE}={visible}" if _VISIBLE in os.environ else ""
    return f"{seen}, but CUDA cannot start{named}: {_why_cuda_fails()}; run memtop doctor", True


class _Driver(msgspec.Struct, frozen=True):
    gpu: Gpu
    """The first one."""
    version: str
    cuda: tuple[int, int]


def _read_driver() -> _Driver | None:
    """The NVIDIA driver and its first GPU; None if it has none. NVMLError if it does not answer."""
    pynvml.nvmlInit()
    try:
        if not pynvml.nvmlDeviceGetCount():
            return None
        first = pynvml.nvmlDeviceGetHandleByIndex(0)
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return _Driver(
            gpu=Gpu(name=_text(pynvml.nvmlDeviceGetName(first)), capability=pynvml.nvmlDeviceGetCudaComputeCapability(first)),
            version=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda=(cuda // 1000, cuda % 1000 // 10),
        )
    finally:
        pynvml.nvmlShutdown()


def _why_cuda_fails() -> str:
    """The first line of torch's own reason."""
    cuda: Any = torch.cuda
    try:
        cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error).rstrip(".")
    return "torch counts no GPU"


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


def usable_fraction(device: torch.device) -> float:
    """The share of a GPU's memory (0-1) that torch may use in this process."""
    # The oldest supported torch lacks the function.
    fraction: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if fraction is None else float(fraction(device))


def free_bytes(device: torch.device) -> int | None:
    """What torch can still allocate on the GPU; None on another device."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(usable_fraction(device) * total)
    return max(0, min(free, allowed - reserved)) + reserved - torch.cuda.memory_allocated(device)


def device_uuid(device: torch.device) -> str | None:
    """The GPU's UUID in the driver's notation; None on the CPU."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def disable_missing_transfers() -> None:
    """Tell NCCL what some GPUs cannot do, as `accelerate launch` does. The user's choice comes
    first.

    The cards of the RTX 40 series have no direct transfers with older drivers. Without these
    variables, accelerate refuses every machine with two of them, also for one process.
    """
    if not check_cuda_p2p_ib_support():
        for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
            os.environ.setdefault(name, "1")


def allocate_first(device: torch.device) -> str | None:
    """Allocate memory on the GPU for the first time. Return why an allocator option was switched
    off, or None.

    Expandable segments require the driver's virtual memory management, which some virtual GPUs and
    WSL do not have. torch then fails at the first allocation.
    """
    if device.type != "cuda":
        return None
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        options = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        without = re.sub(r"expandable_segments:\w+", "expandable_segments:False", options)
        if is_allocation_failure(error) or without == options:
            raise
        # torch resets options that are left out.
        _set_allocator(without)
        torch.empty(1, device=device)
        reason = first_line(error)
        return f"allocator: this GPU has no expandable segments ({reason}); the training goes on without them"
    return None


def _set_allocator(options: str) -> None:
    core: Any = torch._C
    if hasattr(core, "_accelerator_setAllocatorSettings"):
        core._accelerator_setAllocatorSettings(options)
    else:
        # torch up to 2.8.
        torch.cuda.memory._set_allocator_settings(options)
