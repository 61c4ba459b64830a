"""An update and an evaluation each wait for the GPU once, whatever they compute."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.schema import Lora
from memtop.train.channel import Control, Stopwatch
from memtop.train.data import open_data
from memtop.train.data.tokens import ByteTokens
from memtop.train.engine import PlainEngine
from memtop.train.model import build_model, model_config
from memtop.train.objective import Objective
from memtop.train.optimizers import build_optimizer
from memtop.train.order import Position
from memtop.train.packing import use_packing
from memtop.train.state_files import Cut
from memtop.train.trainer import Trainer
from tests.train.recipes import pairs, write_rows
from tests.train.support import TINY, Recorder, samples
from tests.train.waits import CARD, CardAccelerator, Waits

T5 = {
    "model_type": "t5",
    "vocab_size": 260,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 16,
    "num_heads": 2,
    "num_layers": 1,
    "decoder_start_token_id": 258,
    "pad_token_id": 258,
}
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "T5": {"task": "seq2seq", "model": {"config": T5}},
    "SFT": {"task": "sft"},
    "LoRA": {"task": "sft", "method": "lora", "lora": Lora(r=2, alpha=4, dropout=0.1)},
    "checkpointed": {"gradient_checkpointing": True},
    "unclipped": {"clip_norm": 0.0},
    # On the card nothing is computed in 16 bits; the scale of the losses is as on a GPU.
    "fp16": {"precision": "fp16"},
}


class Counting(Recorder):
    """Notes the waits before each report of an update, and of an evaluation."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.counted: list[tuple[str, list[str]]] = []
        self._waits = waits

    def report(self, kind: str, **values: Any) -> None:
        super().report(kind, **values)
        if kind in ("step", "evaluation"):
            self.counted.append((kind, list(self._waits.found)))
            self._waits.found.clear()


def settings_of(kind: str, folder: Path, accumulation: int) -> Settings:
    rows = [row for row in pairs() if len(row["prompt"]) < 40]
    data = {"train": str(write_rows(folder / "train.jsonl", rows)), "eval": str(write_rows(folder / "eval.jsonl", rows[:9]))}
    changes = {"accumulation": accumulation, "target_samples": 8 * accumulation, "seq_len": 32, "eval_every": 2, **KINDS[kind]}
    if changes.get("task") is None:
        changes["data"] = TINY.data
    return msgspec.structs.replace(TINY, **{"data": data, "save_every": 1000, **changes})


def waits_of(settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Train on the card for two updates, and evaluate once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    # The card has the fused kernels of a GPU.
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices", lambda: [CARD.type])
    # torch knows no autocast for the stand-in's device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    train: Any
    evaluation: Any
    train = evaluation = samples()
    if settings.task != "causal":
        data = open_data(settings, ByteTokens())
        train, evaluation = data.train, data.evaluation
    model: Any = build_model(settings, model_config(settings, ByteTokens()))
    whole: Any = Objective(model, seq2seq=settings.task == "seq2seq")
    # A row of several samples must not wait either.
    assert (use_packing(settings, model, Accelerator(cpu=True)) is None) == (settings.task != "seq2seq")
    accelerator: Any = CardAccelerator()
    if settings.precision == "fp16":
        accelerator.scaler = torch.amp.GradScaler(CARD.type, init_scale=256.0)
    with Waits() as waits:
        whole.to(CARD)
        optimizer = build_optimizer(settings, whole.parameters())
        engine = PlainEngine(accelerator, whole, optimizer, settings)
        channel = Counting(waits)
        position = Position(cuts=(Cut(0, settings.seq_len),))
        trainer = Trainer(settings, engine, train, position, folder / "state", channel, ByteTokens.pad, evaluation=evaluation)
        trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
        before = [parameter.held.clone() for parameter in trained]
        waits.found.clear()
        trainer.run(Control(channel, accelerator))
    assert any(not torch.equal(parameter.held, start) for parameter, start in zip(trained, before, strict=True))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    return channel


@pytest.mark.parametrize(
    ("kind", "accumulation"),
    [
        *((kind, 1) for kind in KINDS),
        ("causal", 4),
        *(pytest.param(kind, 4, marks=pytest.mark.long) for kind in ("T5", "SFT", "LoRA")),
    ],
)
def test_an_update_waits_once_for_the_gpu(
    kind: str, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = waits_of(settings_of(kind, tmp_path, accumulation), tmp_path, monkeypatch)
    assert [what for what, _ in channel.counted] == ["step", "step", "evaluation"]
    for what, waits in channel.counted:
        assert waits == ["_to_copy from the card"], what


class Event:
    """A CUDA event: its time can be read once the GPU has passed it."""

    passed = False

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        assert not Event.passed

    def elapsed_time(self, later: Event) -> float:
        assert Event.passed, "CUDA refuses this: the GPU has not passed both events yet"
        return 250.0


def test_times_on_a_gpu_are_read_without_another_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        raise AssertionError("this waits for the whole GPU")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(Event, "passed", False)
    watch = Stopwatch(torch.device("cuda", 0))
    for name in ("forward_seconds", "backward_seconds", "forward_seconds", "optimizer_seconds"):
        with watch.part(name):
            """The GPU works."""
    # The loss is read.
    Event.passed = True
    seconds = watch.lap()
    assert (seconds["forward_seconds"], seconds["backward_seconds"], seconds["optimizer_seconds"]) == (0.5, 0.25, 0.25)
    assert watch.lap()["forward_seconds"] == 0


def test_the_stand_in_counts_what_waits_on_a_gpu() -> None:
    with Waits() as waits:
        numbers = torch.arange(6.0).to(CARD, non_blocking=True)
        assert waits.found == []
        _ = numbers[numbers > 2], numbers.nonzero(), float(numbers.sum()), numbers.cpu(), bool((numbers > 2).any())
        torch.ones(2).to(CARD)
        numbers[:2] = torch.zeros(2)
        assert waits.found == [
            "index",
            "nonzero",
            "_local_scalar_dense",
            "_to_copy from the card",
            "_local_scalar_dense",
            "_to_copy to the card",
            "copy_ to the card",
        ]
        with pytest.raises(AssertionError, match="on the card and on the CPU"):
            numbers + torch.ones(6)
