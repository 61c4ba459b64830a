"""The trainer on a GPU, in this process."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from memtop.presets import Settings
from memtop.train import packing
from tests.gpu.memory import Limit, Measuring, sized
from tests.train.failing import distance, following, fresh, splits_of
from tests.train.recipes import TINY_LLAMA, TINY_T5, Train, pairs, settings_of, write_llama, write_rows
from tests.train.support import Training, edited

PRECISIONS = ("bf16", "fp16", "fp32")
# The largest distance of the final weights, relative to their norm: rounding of other sums. On a
# GPU, products of fp32 matrices are rounded to TF32.
NEAR = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}
Note = Any
pytestmark = pytest.mark.usefixtures("own_state")


def possible(precision: str, device: str) -> None:
    if precision == "fp16" and device == "cpu":
        pytest.skip("fp16 needs a GPU")
    if precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")


# --- recipes --------------------------------------------------------------------------------------


def recipe_settings(recipe: str, folder: Path, device: str, **more: Any) -> Settings:
    """Twelve updates of a recipe with a small model."""
    given: dict[str, Any] = {"device": device, "updates": 12, "seq_len": 64, "save_every": 100, **more}
    if recipe == "pretrain-causal":
        given |= TINY_LLAMA
    if recipe in ("pretrain-t5", "sft-lora", "sft-qlora"):
        given["data__train"] = write_rows(folder / "pairs.jsonl", pairs())
    if recipe == "pretrain-t5":
        given |= {**TINY_T5, "learning_rate": 1e-2}
    if recipe in ("sft-lora", "sft-qlora"):
        given |= {"model__path": write_llama(folder / "llama"), "lora__r": 4, "lora__alpha": 8, "learning_rate": 1e-2}
    return settings_of(recipe, **given)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recipe", ["first-run", "pretrain-causal", "pretrain-t5", "sft-lora", "sft-qlora"])
def test_a_recipe_trains(train: Train, tmp_path: Path, device: str, recipe: str, precision: str, record_property: Note) -> None:
    possible(precision, device)
    done = train(recipe_settings(recipe, tmp_path, device, precision=precision))
    record_property("losses", done.losses)
    assert (done.outcome, done.plan["strategy"]) == ("finished", "plain")
    assert done.plan["device"].startswith(device)
    assert all(map(math.isfinite, done.losses))
    assert sum(done.losses[-3:]) < sum(done.losses[:3])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path, device: str, precision: str) -> None:
    possible(precision, device)
    training = Training(tmp_path / "state", edited(device=device, precision=precision))
    before: dict[int, list[torch.Tensor]] = {}

    def infinite_in_update_4(gradient: torch.Tensor) -> torch.Tensor:
        update = training.trainer.position.updates + 1
        if update not in before:
            before[update] = [tensor.clone() for _, parts in training.engine.saved_tensors() for tensor in parts.values()]
        return gradient * (math.inf if update == 4 else 1)

    next(iter(training.model.parameters())).register_hook(infinite_in_update_4)
    assert training.run() == "finished"
    assert training.channel.of("step")[3]["skipped"]
    assert all(map(torch.equal, before[4], before[5]))
    assert not any(map(torch.equal, before[9], before[10]))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recipe", ["first-run", "sft-lora"])
def test_packed_rows_train_as_padded_ones(
    train: Train,
    tmp_path: Path,
    device: str,
    recipe: str,
    precision: str,
    record_property: Note,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    possible(precision, device)
    calls: list[int] = []
    kernel = packing.varlen

    def counted(rows: Any, starts: torch.Tensor, longest: int, scaling: float | None) -> torch.Tensor:
        calls.append(longest)
        return kernel(rows, starts, longest, scaling)

    monkeypatch.setattr(packing, "varlen", counted)
    texts = ["word " * (1 + n % 9) for n in range(90)]
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": text, "prompt": "Say it", "response": text} for text in texts])
    settings = recipe_settings(recipe, tmp_path, device, precision=precision)
    settings = msgspec.structs.replace(settings, data={"train": str(rows), "tokenizer": settings.data.get("tokenizer")})
    if settings.lora is not None:
        # Random numbers follow the shape of a batch.
        settings = msgspec.structs.replace(settings, lora=msgspec.structs.replace(settings.lora, dropout=0.0))
    padded = train(msgspec.structs.replace(settings, packing=False), name="padded")
    assert not calls
    packed = train(settings, name="packed")
    can = device == "cuda" and precision != "fp32" and torch.cuda.get_device_capability() >= (8, 0)
    assert bool(calls) == can, "torch's kernel for samples of different lengths"
    shares = [max(step["padding_fraction"] for step in done.steps) for done in (padded, packed)]
    record_property("losses", [padded.losses, packed.losses])
    record_property("padding", shares)
    assert shares[0] > 0.2
    assert shares[1] < 0.1
    assert packed.losses == pytest.approx(padded.losses, rel=1e-3 if precision == "fp32" else 0.03)


def test_the_optimizers_resume_from_each_other(train: Train, tmp_path: Path, device: str, record_property: Note) -> None:
    """AdamW, in 8 bits, paged, and back."""
    wide = {"model__config__hidden_size": 64, "model__config__intermediate_size": 128}
    kinds = ("adamw", "adamw_8bit", "paged_adamw_8bit", "adamw")
    losses: list[float] = []
    for number, kind in enumerate(kinds, start=1):
        settings = recipe_settings("first-run", tmp_path, device, optimizer=kind, learning_rate=1e-3, precision="fp32", **wide)
        done = train(settings, stop_after=3 if number < len(kinds) else None)
        assert (done.plan["resumed"], done.plan["updates"]) == (number > 1, 3 * (number - 1))
        losses += done.losses
    plain = train(settings, name="plain").losses
    record_property("losses", losses)
    record_property("losses_of_adamw", plain)
    # 8 bits round the moments.
    assert losses == pytest.approx(plain, rel=0.03)


# --- memory that runs out -------------------------------------------------------------------------

BATCH, UPDATES, LIFTED = 16, 20, 6


def peaks(folder: Path, device: str, precision: str) -> tuple[int, int] | None:
    """The reserved bytes at B / 2 and at B; None on the CPU."""
    if device == "cpu":
        return None
    found = []
    for batch in (BATCH // 2, BATCH):
        channel = Measuring(device)
        settings = sized(device, batch=batch, accumulation=BATCH // batch, target_samples=3 * BATCH, precision=precision)
        fresh(folder / str(batch), settings, channel=channel).run()
        found.append(channel.largest("peak_reserved_bytes"))
        gc.collect()
    return found[0], found[1]


def limited(folder: Path, settings: Settings, device: str, measured: tuple[int, int] | None) -> Training:
    """B does not fit until the limit is lifted after some updates."""
    channel = Measuring(device)
    limit = Limit(device, BATCH // 2, measured)
    training = fresh(folder, settings, channel=channel, memory=limit.memory, patience=3)
    limit.apply(training)
    channel.after[LIFTED] = limit.lift
    return training


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_micro_batch_that_does_not_fit_shrinks_and_grows_back(
    tmp_path: Path, device: str, precision: str, record_property: Note
) -> None:
    possible(precision, device)
    settings = sized(
        device,
        batch=BATCH,
        accumulation=1,
        target_samples=UPDATES * BATCH,
        precision=precision,
        learning_rate=1e-3,
        save_every=1000,
    )
    training = limited(tmp_path / "limited", settings, device, peaks(tmp_path, device, precision))
    assert training.run() == "finished"
    channel = training.channel
    changes = [(change["reason"], change["changes"]) for change in channel.of("settings")]
    splits = splits_of(channel)
    record_property("changes", changes)
    record_property("failures", [{k: v for k, v in report.items() if k != "traceback"} for report in channel.of("oom")])
    record_property("steps", channel.of("step"))
    assert (changes[0][0], changes[-1][0]) == ("allocation failure", "grown back")
    assert splits[1] == (BATCH // 2, 2)
    assert splits[UPDATES] == (BATCH, 1)
    assert all(report["survived"] for report in channel.of("oom"))

    calm = following(tmp_path / "calm", settings, {update: (split,) for update, split in splits.items()})
    calm.run()
    small = fresh(tmp_path / "small", edit(settings, BATCH // 2))
    small.run()
    assert training.digests == calm.digests == small.digests
    apart = {name: distance(training.weights(), other.weights()) for name, other in (("calm", calm), ("small", small))}
    record_property("weight_distance", apart)
    assert max(apart.values()) < NEAR[precision]
    if device == "cuda":
        # What is held after an update is weights and moments alone, before and after a failure.
        held = [step["allocated_bytes"] for step in channel.of("step")]
        assert max(held) - min(held) < 1 << 20


def edit(settings: Settings, batch: int) -> Settings:
    return msgspec.structs.replace(settings, batch=batch, accumulation=settings.effective_batch // batch)
