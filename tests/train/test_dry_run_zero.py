"""The dry run's ZeRO against DeepSpeed's, which runs on the CPU: to the byte, phase by phase."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from memtop.presets.schema import Zero
from memtop.train import zero as configured
from memtop.train.dry_run import run, zero
from memtop.train.dry_run.build import Training, config_of
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
        return two_ranks(WORKER, folder, *what)
    ended(["-m", WORKER, str(folder), *what], environment() | LAUNCHED, imported=("deepspeed",))
    return [json.loads((folder / "rank-0.json").read_text())]


def foreseen(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, precision: Any, **changes: Any) -> dict[str, Any]:
    monkeypatch.setattr(configured, "_SMALLEST_BUCKET", BUCKET)
    monkeypatch.setattr(configured, "LIVE_PARAMETERS", LIVE)
    monkeypatch.setattr(run, "Memory", OneMemory)
    monkeypatch.setattr(run, "build_on_host", lambda *args: [])
    monkeypatch.setattr(run, "kernels", lambda generation: NOTHING_HIDDEN)
    training = Training(
        config=TINY.model["config"],
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


@pytest.mark.parametrize(
    ("stage", "precision", "changes"),
    [
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
    ],
    ids=str,
)
@pytest.mark.parametrize("world", [1, 2])
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
