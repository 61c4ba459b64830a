"""The device of a training: with an index everywhere, and refused in one line if torch cannot use
it. Single processes have it as a real Accelerator gives it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pynvml
import pytest
import torch

from memtop.presets.gpu_support import Gpu, TorchBuild, has_kernels, why_unusable
from memtop.presets.schema import Zero
from memtop.train import BadInputError
from memtop.train.devices import allocate_first, choose_device
from memtop.train.run import train
from tests.train.launching import LAUNCHED, printed_by
from tests.train.support import TINY, edited

CUDA_13 = TorchBuild(version="2.13.0+cu130", cuda="13.0", kernels=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
CPU_ONLY = TorchBuild(version="2.13.0+cpu", cuda=None)
V100, H100 = Gpu(name="Tesla V100", capability=(7, 0)), Gpu(name="NVIDIA H100", capability=(9, 0))

# torch.cuda of a machine with two GPUs, as far as opening an Accelerator uses it. Process 2 of 2
# would be on GPU 1; a single process that has chosen GPU 1 trains there.
OPENS = """
import json, sys
import msgspec, torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.current_device = lambda: 1
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"
torch.cuda.is_bf16_supported = lambda including_emulation=True: True
from accelerate.state import PartialState
from memtop.presets.schema import Zero
from memtop.train.data.tokens import ByteTokens
from memtop.train.model import model_config
from memtop.train.run import open_accelerator, read_settings
from pathlib import Path
settings = read_settings(Path(sys.argv[1]))
accelerator = open_accelerator(settings, model_config(settings, ByteTokens()))
print(json.dumps([str(device) for device in (accelerator.device, accelerator.state.device, PartialState().device)]))
"""


def opened(folder: Path, **changes: Any) -> Any:
    """The devices of an Accelerator that was opened on this machine with two GPUs."""
    path = folder / "settings.json"
    path.write_bytes(msgspec.json.encode(edited(**changes)))
    engine: dict[str, Any] = {"imported": ("deepspeed",), **LAUNCHED} if "zero" in changes else {}
    return printed_by("-c", OPENS, str(path), **engine)


def test_the_gpu_of_a_single_process_has_an_index(tmp_path: Path) -> None:
    assert opened(tmp_path, device="auto") == ["cuda:1"] * 3


@pytest.mark.parametrize("zero", [{}, {"zero": Zero(stage=2)}])
def test_the_settings_can_ask_for_the_cpu_on_a_machine_with_gpus(tmp_path: Path, zero: dict[str, Any]) -> None:
    assert opened(tmp_path, device="cpu", **zero) == ["cpu"] * 3


@pytest.mark.parametrize(
    ("kernels", "capability", "runs"),
    [
        (("sm_80", "sm_86"), (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80", "sm_90"), (7, 5), False),
        (("sm_90", "sm_120"), (10, 0), False),
        (("sm_80", "compute_80"), (9, 0), True),
        (("sm_90", "compute_90"), (8, 9), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a", "compute_100a"), (10, 3), False),
        (("sm_100f",), (10, 3), True),
        (("gfx90a",), (9, 0), False),
    ],
)
def test_machine_code_runs_within_a_major_version_and_ptx_on_later_gpus(
    kernels: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert has_kernels(kernels, capability) is runs


@pytest.mark.parametrize(
    ("build", "gpu", "driver", "words"),
    [
        (CPU_ONLY, H100, (13, 0), ("torch 2.13.0+cpu is built for CPUs only", "NVIDIA H100", "install a build for CUDA")),
        (TorchBuild(version="2.13.0+rocm7", cuda=None, rocm=True), H100, (13, 0), ("is built for AMD GPUs",)),
        (CUDA_13, H100, (12, 4), ("driver 570.1 supports CUDA up to 12.4", "needs CUDA 13", "a torch build for CUDA 12")),
        (CUDA_13, V100, (13, 0), ("no kernels for the Tesla V100 (compute capability 7.0", "7.5, 8.0, 8.6, 9.0, 10.0, 12.0")),
    ],
)
def test_each_reason_is_one_line_with_what_to_do(build: TorchBuild, gpu: Gpu, driver: tuple[int, int], words: Any) -> None:
    problem = why_unusable(build, gpu, driver_version="570.1", driver_cuda=driver)
    assert problem is not None
    text = str(problem)
    assert all(part in text for part in (*words, "install"))
    assert "\n" not in text


@pytest.mark.parametrize(
    ("build", "gpu"),
    [
        (CUDA_13, H100),
        (msgspec.structs.replace(CUDA_13, kernels=None), V100),
        (CUDA_13, Gpu(name="unknown")),
        # Every driver for CUDA 12 runs programs of every CUDA 12.
        (TorchBuild(version="2.7.0+cu128", cuda="12.8", kernels=("sm_90",)), H100),
    ],
)
def test_nothing_is_said_where_nothing_is_known_against_it(build: TorchBuild, gpu: Gpu) -> None:
    driver = (12, 2) if build.cuda == "12.8" else (13, 0)
    assert why_unusable(build, gpu, driver_cuda=driver) is None


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver with one H100; the torch is that of this machine."""
    found = SimpleNamespace(cuda=13000, closed=0)

    def closed() -> None:
        found.closed += 1

    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": closed,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlSystemGetCudaDriverVersion_v2": lambda: found.cuda,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H100",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
    }.items():
        monkeypatch.setattr(f"pynvml.{name}", answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return found


def test_a_cpu_torch_where_a_gpu_is_present_is_refused(driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    reason = "torch 2.13.0+cpu is built for CPUs only and cannot use the GPU here (NVIDIA H100); install"
    with pytest.raises(BadInputError, match="^device cuda: " + re.escape(reason)):
        choose_device(replaced("cuda"))
    chosen = choose_device(replaced("auto"))
    assert not chosen.on_gpu
    assert chosen.problem is not None
    assert chosen.problem.startswith(reason)
    assert chosen.warning == f"device auto: trains on the CPU: {chosen.problem}"
    assert choose_device(replaced("cpu")).problem is None
    assert driver.closed == 2
    # The user does not want it to be seen.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(replaced("auto")).problem is None


def test_a_driver_that_is_too_old_for_torch_is_named(driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.cuda = 12040
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(BadInputError, match=r"^device cuda: the NVIDIA driver 580\.65\.06 supports CUDA up to 12\.4, "):
        choose_device(replaced("cuda"))


def test_a_gpu_without_kernels_is_named_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (7, 0)][index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ["NVIDIA H100", "Tesla V100"][index])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert choose_device(replaced("cuda")).on_gpu
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(BadInputError, match=r"^device cuda: torch .* has no kernels for the Tesla V100"):
        choose_device(replaced("cuda"))
    assert not choose_device(replaced("auto")).on_gpu


CUDA_ERROR = "CUDA driver error: operation not supported"


def refuses(*args: Any) -> None:
    raise RuntimeError("No CUDA GPUs are available.\nMore words.")


@pytest.fixture
def fitting(driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch that fits the driver, and CUDA that cannot start."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuses)
    return driver


def test_cuda_that_cannot_start_on_a_gpu_is_named(fitting: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the driver has a GPU (NVIDIA H100), but CUDA cannot start: No CUDA GPUs are available; run memtop doctor"
    assert choose_device(replaced("auto")).warning == f"device auto: trains on the CPU: {reason}"
    with pytest.raises(BadInputError, match=f"^device cuda: {re.escape(reason)}$"):
        choose_device(replaced("cuda"))
    # The driver was updated, and the machine has not been started again.
    monkeypatch.setattr("pynvml.nvmlInit", raises(pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)))
    problem = choose_device(replaced("auto")).problem
    assert problem is not None
    assert "the NVIDIA driver does not answer (RM has detected an NVML/RM version mismatch" in problem


def test_a_chosen_gpu_on_which_cuda_cannot_start_is_an_error(fitting: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8c1e")
    failed = (
        r"^device auto: .* CUDA cannot start with CUDA_VISIBLE_DEVICES=GPU-8c1e: No CUDA GPUs are available; "
        r"run memtop doctor, or give --set device=cpu to train on the CPU$"
    )
    with pytest.raises(BadInputError, match=failed):
        choose_device(replaced("auto"))
    assert not choose_device(replaced("cpu")).on_gpu
    # Its driver is gone.
    monkeypatch.setattr("pynvml.nvmlInit", raises(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    with pytest.raises(BadInputError, match=failed):
        choose_device(replaced("auto"))
    # A number is also set where there is no GPU at all.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert choose_device(replaced("auto")).problem is None


def raises(error: Exception) -> Any:
    def failing(*args: Any) -> None:
        raise error

    return failing


def test_a_training_on_a_gpu_continues_on_the_cpu_only_if_asked(tmp_path: Path) -> None:
    state = tmp_path / "train_latest_state"
    settings = tmp_path / "settings.json"
    settings.write_bytes(msgspec.json.encode(edited(device="auto", target_samples=8)))
    train(settings, state, resume=True)
    manifest = json.loads((state / "manifest.json").read_text())
    assert manifest["on_gpu"] is False
    (state / "manifest.json").write_text(json.dumps(manifest | {"on_gpu": True}))
    with pytest.raises(BadInputError, match=r"^device auto: the saved state was trained on a GPU: .* --set device=cpu"):
        train(settings, state, resume=True)
    settings.write_bytes(msgspec.json.encode(edited(device="cpu", target_samples=16)))
    assert train(settings, state, resume=True) == "finished"


SMI = """#!/bin/sh
case "$*" in
*driver_version*) echo 535.183.01; echo 535.183.01 ;;
*) echo "2, NVIDIA GeForce RTX 4090"; echo "2, NVIDIA GeForce RTX 4090" ;;
esac
"""


def test_two_rtx_40_cards_with_an_older_driver_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    assert opened(tmp_path, device="auto") == ["cuda:1"] * 3


def test_expandable_segments_are_switched_off_where_the_gpu_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = "max_split_size_mb:64,expandable_segments:True"
    device, core = torch.device("cuda", 0), cast(Any, torch._C)
    empty, before = torch.empty, core._accelerator_getAllocatorSettings()
    failure: Exception = RuntimeError(CUDA_ERROR + "\nMore words.")

    def allocated(*sizes: int, device: torch.device) -> torch.Tensor:
        if "expandable_segments:True" in core._accelerator_getAllocatorSettings():
            raise failure
        return empty(*sizes)

    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", options)
    try:
        core._accelerator_setAllocatorSettings(options)
        warning = allocate_first(device)
        assert warning == f"allocator: this GPU has no expandable segments ({CUDA_ERROR}); the training goes on without them"
        # torch keeps only the options that it is told.
        assert core._accelerator_getAllocatorSettings() == options.replace("True", "False")
        assert allocate_first(device) is None
        # A full GPU says nothing about the option.
        core._accelerator_setAllocatorSettings(options)
        failure = torch.OutOfMemoryError("CUDA out of memory.")
        with pytest.raises(torch.OutOfMemoryError):
            allocate_first(device)
        # Without the option, something else is wrong.
        failure = RuntimeError(CUDA_ERROR)
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
        with pytest.raises(RuntimeError, match=CUDA_ERROR):
            allocate_first(device)
    finally:
        core._accelerator_setAllocatorSettings(before)


def replaced(device: str) -> Any:
    return msgspec.structs.replace(TINY, device=device)
