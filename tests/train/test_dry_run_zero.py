"""The dry run's ZeRO against DeepSpeed's, which runs on the CPU: to the byte, phase by phase."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from memtop.presets.schema import Lora, Zero
from memtop.train import BadInputError
from memtop.train import zero as configured
from memtop.train.dry_run import gathering, run, zero
from memtop.train.dry_run.build import Training, config_of, training_of
from memtop.train.dry_run.run import foresee, needing_most
from memtop.train.dry_run.trace import Component
from tests.train.launching import LAUNCHED, ended, environment, two_ranks
from tests.train.support import TINY, edited
from tests.train.zero_memory_worker import NOTHING_HIDDEN, series

WORKER = "tests.train.zero_memory_worker"
BUCKET, LIVE = 3000, 9000
"""Elements. Some gradients are larger than a bucket, and all need several; with offloaded
parameters, the optimizer updates them in several groups."""
SMALLEST = 64
"""Bytes of the smallest weight, a norm's in 16 bits. Not all of DeepSpeed's arithmetic with single
numbers is in the dry run, a few bytes."""


class OneMemory(zero.Memory):
    """As on the CPU, where the memory of the GPU is that of the host."""

    def page_locked(self, tensor: torch.Tensor, component: Component) -> torch.Tensor:
        return tensor

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)

    def to_gpu(self, tensor: torch.Tensor, component: Component) -> torch.Tensor:
        return tensor


def really(folder: Path, world: int, precision: str, **changes: Any) -> list[dict[str, Any]]:
    """What each process of DeepSpeed reports."""
    settings = edited(world_size=world, batch=2, loss_chunk=0, **changes)
    (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
    what = (precision, str(BUCKET), str(LIVE))
    if world == 2:
        return two_ranks(WORKER, folder, *what, imported=("deepspeed",))
    ended(["-m", WORKER, str(folder), *what], environment() | LAUNCHED, imported=("deepspeed",))
    return [json.loads((folder / "rank-0.json").read_text())]


def foreseen(
    monkeypatch: pytest.MonkeyPatch, rank: int, world: int, precision: Any, model: dict[str, Any] = TINY.model, **changes: Any
) -> dict[str, Any]:
    monkeypatch.setattr(configured, "_SMALLEST_BUCKET", BUCKET)
    monkeypatch.setattr(configured, "LIVE_PARAMETERS", LIVE)
    monkeypatch.setattr(run, "Memory", OneMemory)
    monkeypatch.setattr(run, "build_on_host", lambda *args: [])
    monkeypatch.setattr(run, "kernels", lambda generation: NOTHING_HIDDEN)
    training = Training(
        config=model["config"],
        weights=precision,
        batch=2,
        seq_len=TINY.seq_len,
        loss_chunk=0,
        attention="eager",
        world_size=world,
        rank=rank,
        generation=80,
        **changes,
    )
    trace = run.recorded(training, config_of(training))[0]
    kept: Counter[str] = Counter()
    for event in trace.events:
        found = trace.allocations[event if event >= 0 else ~event]
        kept[found.component] += found.size if event >= 0 else -found.size
    return {"phases": series(trace), "parts": kept}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 16}
"""Their weights are in one tensor. DeepSpeed gathers a block of Qwen3's as one module; of the other
architecture, the adapters read the weights of layers that do not run."""
ADAPTED_EXPERTS = [
    {
        "method": "lora",
        "lora": Lora(r=12, alpha=16, targets=("all-linear",)),
        "model": {"config": {**TINY.model["config"], "model_type": kind, **EXPERTS}},
        **more,
    }
    for kind, more in [("qwen3_moe", {"accumulation": 2}), ("olmoe", {"gradient_checkpointing": True})]
]
CASES = [
    (Zero(stage=1), "bf16", {"accumulation": 2}),
    (Zero(stage=1, offload_optimizer=True), "bf16", {}),
    (Zero(stage=2), "bf16", {"accumulation": 2}),
    (Zero(stage=2), "fp16", {"gradient_checkpointing": True}),
    (Zero(stage=2), "fp32", {"accumulation": 2}),
    (Zero(stage=2, offload_optimizer=True), "bf16", {"accumulation": 2}),
    (Zero(stage=3), "bf16", {"accumulation": 2}),
    (Zero(stage=3), "fp16", {"gradient_checkpointing": True}),
    (Zero(stage=3, offload_optimizer=True), "bf16", {"accumulation": 2}),
    (Zero(stage=3, offload_optimizer=True, offload_parameters=True), "bf16", {"accumulation": 2}),
    (Zero(stage=3), "bf16", {"method": "lora", "lora": Lora(r=8, alpha=16), "gradient_checkpointing": True}),
]
USUAL = [CASES[number] for number in (0, 3, 9)]
"""Those of `make test`: each stage, precision of 16 bits and change at least once, and the offload
of stage 3."""


@pytest.mark.parametrize(
    ("world", "stage", "precision", "changes"),
    [
        *(pytest.param(2, *case, marks=[] if case in USUAL else pytest.mark.long) for case in CASES),
        (1, *CASES[-2]),
        *(pytest.param(2, Zero(stage=3), "bf16", adapted, marks=pytest.mark.long) for adapted in ADAPTED_EXPERTS),
        *(pytest.param(1, *case, marks=pytest.mark.long) for case in CASES if case is not CASES[-2]),
    ],
    ids=str,
)
def test_every_phase_takes_what_deepspeed_takes(
    world: int, stage: Zero, precision: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = really(tmp_path, world, precision, zero=stage, **{"accumulation": 1} | changes)
    for rank, measured in enumerate(ranks):
        found = foreseen(monkeypatch, rank, world, precision, zero=stage, **changes)
        differences = [
            (name, peak - own_peak, end - own_end)
            for (name, peak, end), (_, own_peak, own_end) in zip(measured["phases"], found["phases"], strict=True)
        ]
        print(rank, differences, {name: (size, found["parts"][name]) for name, size in measured["parts"].items()})
        assert all(abs(peak) < SMALLEST and abs(end) < SMALLEST for _, peak, end in differences), differences
        assert {name: found["parts"][name] for name in measured["parts"]} == measured["parts"]


def test_blocks_that_are_gathered_whole_are_those_of_deepspeed() -> None:
    from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES

    assert set(DEFAULT_LEAF_MODULE_CLASSES) == gathering.LEAVES


ZERO_3 = Zero(stage=3, offload_optimizer=True, offload_parameters=True)


def of_settings(zero: Zero, **changes: Any) -> Training:
    settings = edited(zero=zero, batch=2, world_size=4, loss_chunk=0, **changes)
    return training_of(settings, generation=80, capacity=1 << 34)


def test_a_run_under_zero_computes_in_the_precision_of_its_weights() -> None:
    training = of_settings(Zero(stage=2), precision="auto")
    assert (training.weights, training.autocast, training.built_in) == ("bf16", None, "fp32")
    assert (training.zero.stage, training.world_size, training.sharded_when_read) == (2, 4, False)
    found = foresee(training)
    assert found.fits
    assert {"master weights", "weights"} <= found.components.keys()
    assert sum(found.components.values()) == found.allocated


@pytest.mark.parametrize("pins", [False, True])
def test_page_locked_memory_is_rounded_up_to_powers_of_two(pins: bool) -> None:
    """The weights always are, the rest where there is enough host memory."""
    found = foresee(of_settings(ZERO_3, precision="bf16", pin_memory=pins)).host
    assert found is not None
    assert sum(found.components.values()) == found.allocated
    part = 37280 // 4
    # Of the weights; with the others, those for the optimizer's weights and two for gradients, too.
    assert found.pinned >= 1 << (2 * part - 1).bit_length()
    assert (found.pinned > 3 * 4 * part) is pins
    assert found.components["optimizer"] == pytest.approx(8 * part, rel=0.02)


def test_an_offload_leaves_the_gpu_without_what_it_moves_to_the_host() -> None:
    kept, offloaded = (foresee(of_settings(Zero(stage=2, offload_optimizer=on), precision="bf16")) for on in (False, True))
    assert {"optimizer", "master weights"} <= kept.components.keys()
    assert not {"optimizer", "master weights"} & offloaded.components.keys()
    assert kept.host is not None
    assert offloaded.host is not None
    assert offloaded.host.allocated > kept.host.allocated


def test_without_zero_the_host_is_not_foreseen() -> None:
    assert foresee(of_settings(Zero())).host is None


def test_weights_that_are_read_in_parts_never_are_whole_on_the_gpu() -> None:
    training = msgspec.structs.replace(of_settings(Zero(stage=3), precision="bf16"), sharded_when_read=True)
    trace = run.recorded(training, config_of(training))[0]
    part, live, most = 37280 // 4, 0, 0
    for event in trace.events:
        found = trace.allocations[event if event >= 0 else ~event]
        if found.size == 4 * part:
            break  # the optimizer's weights, in fp32
        if found.place == "gpu":
            live += found.size if event >= 0 else -found.size
            most = max(most, live)
    # One whole weight at a time, and this process's part of all before and after they are flat.
    assert 2 * part <= most < 2 * (260 * 32 + 2 * part) + 1024


@pytest.mark.parametrize("tied", [False, True])
def test_the_process_that_needs_most_is_the_one_with_the_heads_gradient(tied: bool) -> None:
    config = TINY.model["config"] | {"tie_word_embeddings": tied}
    training = of_settings(Zero(stage=2), precision="bf16", model={"config": config})
    chosen = needing_most(training)
    assert chosen.rank == (0 if tied else 3)
    assert foresee(chosen).allocated == max(
        foresee(msgspec.structs.replace(training, rank=rank)).allocated for rank in range(4)
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank": 4}, "rank 4: there are 4 processes"),
        ({"zero": Zero(stage=2, offload_parameters=True)}, "zero.offload_parameters true: needs ZeRO-3"),
        ({"zero": Zero(offload_optimizer=True)}, "zero.offload_optimizer true: needs a ZeRO stage"),
        ({"method": "qlora", "lora": Lora(r=8, alpha=16), "zero": Zero(stage=3)}, "zero.stage 3: a 4-bit base"),
        ({"optimizer": "adafactor"}, "optimizer adafactor: its state cannot be sharded by ZeRO-2"),
        ({"autocast": "bf16"}, "autocast bf16: ZeRO-2 computes"),
        ({"keep_gradients": True}, "keep_gradients true: ZeRO-2 releases"),
    ],
)
def test_what_does_not_go_together_is_one_line(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInputError) as caught:
        foresee(msgspec.structs.replace(of_settings(Zero(stage=2)), **changes))
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
