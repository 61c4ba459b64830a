"""DeepSpeed's configuration as the engine really has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from memtop.presets.schema import Zero
from memtop.supervisor.run.processes.attempt import launcher
from memtop.train.zero import width_of, zero_config
from tests.train.launching import LAUNCHED, printed_by
from tests.train.support import TINY, edited

OFFLOAD_2 = Zero(stage=2, offload_optimizer=True)
OFFLOAD_3 = Zero(stage=3, offload_optimizer=True, offload_parameters=True)


def engine_of(folder: Path, zero: Zero, precision: str, available: float, **changes: Any) -> dict[str, Any]:
    """What the engine answers after two updates of four micro-batches."""
    path = folder / "settings.json"
    path.write_bytes(msgspec.json.encode(edited(zero=zero, batch=2, accumulation=4, **changes)))
    words = ("-m", "tests.train.zero_worker", str(path), precision, str(available))
    found: dict[str, Any] = printed_by(*words, imported=("deepspeed",), **LAUNCHED)
    return found


@pytest.mark.parametrize(
    ("zero", "precision", "available", "summed", "pinned"),
    [
        (Zero(stage=1), "bf16", 64.0, "torch.float32", None),
        (Zero(stage=2), "fp16", 64.0, "torch.float32", None),
        (OFFLOAD_3, "bf16", 64.0, "torch.float32", True),
        # 12 GiB and 10 KiB are free, but the parameters will take 60 KiB of them.
        (OFFLOAD_3, "bf16", 12.00001, "torch.float32", False),
        # In fp32 the sum would take twice the memory of the weights on the GPU.
        (OFFLOAD_2, "bf16", 6.0, "torch.bfloat16", False),
    ],
    ids=str,
)
def test_micro_batches_are_summed_in_fp32_and_buffers_pinned_where_memory_allows_it(
    zero: Zero, precision: str, available: float, summed: str, pinned: bool | None, tmp_path: Path
) -> None:
    found = engine_of(tmp_path, zero, precision, available)
    assert found["summed"] == summed
    assert found["types"][1] == summed
    assert found["losses"][0] == pytest.approx(5.57, abs=0.02)
    # One kernel for all tensors, and the step count where the tensors are.
    assert set(found["fused"]) == {True}
    assert found["steps"] == ["cpu"]
    assert found["overlap"] is (zero.stage == 3)
    assert found["pinned"] is pinned
    assert found["pinned_parameters"] is (pinned if zero.offload_parameters else None)
    assert (found["skipped"], found["changed"]) == ([False, True], []), "the gradient of the second update is infinite"
    assert found["compiled"] == [], "torch's compiler would be loaded"


@pytest.mark.parametrize(("available", "pinned"), [(64.0, True), (12.00001, False)])
def test_a_model_from_files_is_read_to_the_buffers_of_the_configuration(available: float, pinned: bool, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**TINY.model["config"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    found = engine_of(tmp_path, OFFLOAD_3, "bf16", available, model={"path": str(tmp_path / "base")})
    assert found["pinned_while_read"] is found["pinned_parameters"] is found["pinned"] is pinned


@pytest.mark.long  # torch takes 12 s to trace the hooks of DeepSpeed
def test_compiled_layers_learn_the_same_under_zero_3(tmp_path: Path) -> None:
    one_layer = {"config": {**TINY.model["config"], "num_hidden_layers": 1}}
    plain, compiled = (engine_of(tmp_path, Zero(stage=3), "fp32", 64.0, model=one_layer, compile=on) for on in (False, True))
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert len(plain["losses"]) == 2
    assert compiled["graphs"] > plain["graphs"] == 0


@pytest.mark.parametrize(
    ("hidden", "elements"), [(256, 12_500_000), (896, 12_500_000), (4096, 4096**2), (8192, 50_000_000), (16384, 50_000_000)]
)
def test_buckets_hold_several_layers_and_stay_bounded(hidden: int, elements: int) -> None:
    settings = msgspec.structs.replace(TINY, zero=Zero(stage=3))
    zero = zero_config(settings, hidden_size=hidden, precision="bf16")["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == elements
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * elements)


ASKS = """
import os
from types import SimpleNamespace
import torch
from deepspeed.accelerator import cuda_accelerator, get_accelerator, set_accelerator
from memtop.train.zero import ask_cuda_for_free_memory
cuda_accelerator.pynvml = SimpleNamespace(nvmlDeviceGetHandleByIndex=lambda index: index)
torch.cuda.current_device = lambda: 0
torch.cuda.mem_get_info = lambda index=None: (3 << 30, 8 << 30)
set_accelerator(cuda_accelerator.CUDA_Accelerator())
os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-8c1e"
try:
    get_accelerator().available_memory()
except ValueError:
    ask_cuda_for_free_memory()
    print(get_accelerator().available_memory())
"""


def test_deepspeed_finds_the_free_memory_of_a_gpu_that_is_chosen_by_uuid() -> None:
    assert printed_by("-c", ASKS, imported=("deepspeed",)) == 3 << 30


OTHER_DEFAULTS = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
gpu_ids: '5'
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}
num_machines: 1
num_processes: 3
use_cpu: false
"""
SHOWS = """
import json, os
print(json.dumps({name: value for name, value in os.environ.items() if name in NAMES or name.startswith("ACCELERATE_")}))
"""


def test_the_users_defaults_for_accelerate_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").write_text(OTHER_DEFAULTS)
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE")
    (tmp_path / "rank.py").write_text(SHOWS.replace("NAMES", repr(names)))
    words = (*launcher(edited(zero=Zero(stage=2))), str(tmp_path / "rank.py"))
    found = printed_by(*words, HF_HOME=str(tmp_path), CUDA_VISIBLE_DEVICES="GPU-8c1e")
    assert found == dict(zip(names, ("GPU-8c1e", "0", "1"), strict=True))


def test_the_width_is_that_of_the_language_model() -> None:
    assert width_of(AutoConfig.for_model("llama", hidden_size=96)) == 96
    assert width_of(AutoConfig.for_model("t5", d_model=48)) == 48
    assert width_of(AutoConfig.for_model("gemma3", text_config={"model_type": "gemma3_text", "hidden_size": 80})) == 80
