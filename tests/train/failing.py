"""Real allocation failures at chosen places of a training, and gauges that a test reads out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from memtop.presets import Settings
from memtop.train.trainer import Trainer
from tests.train.support import TINY, Recorder, Training

TOO_MUCH = 2**46
"""Elements that no machine has room for, so that the request is refused and not merely slow."""


class Failure(msgspec.Struct, frozen=True):
    """At which update (from 1), where among its micro-batches (0: the first, below 1: the last), and in which pass."""

    update: int
    where: float
    backward: bool


def drawn(seed: int, count: int, updates: int) -> list[Failure]:
    """Failures at random updates, each in another one."""
    draw = random.Random(seed)
    chosen = sorted(draw.sample(range(1, updates + 1), count))
    return [Failure(update, draw.random(), draw.random() < 0.5) for update in chosen]


class Failing:
    """Asks for too much memory inside the model, once for each failure of the list."""

    def __init__(self, training: Training, failures: list[Failure]) -> None:
        self._trainer = training.trainer
        self._waiting = {failure.update: failure for failure in failures}
        self._update = self._micro = 0
        self.seen: Callable[[torch.Tensor], None] = lambda hidden: None
        """Called with what the try had computed before it fails."""
        model: Any = training.model
        model.base_model.register_forward_hook(self._forward)

    @property
    def left(self) -> int:
        """Failures that are still to come."""
        return len(self._waiting)

    def _forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        update, accumulation = self._trainer.position.updates + 1, self._trainer.settings.accumulation
        self._micro = self._micro + 1 if update == self._update else 0
        self._update = update
        failure = self._waiting.get(update)
        if failure is None or self._micro != int(failure.where * accumulation):
            return
        del self._waiting[update]
        # The next try counts from its first micro-batch on.
        self._update = 0
        self.seen(output[0])
        if failure.backward:
            output[0].register_hook(lambda gradient: torch.empty(TOO_MUCH))
        else:
            torch.empty(TOO_MUCH)


class Scripted:
    """A gauge whose peak grows with the batch, and whose allocator has to retry in the updates of `retrying`."""

    def __init__(self, *, limit: int = 1_000_000, retrying: Iterable[int] = ()) -> None:
        self.trainer: Trainer | None = None
        self._limit = limit
        self._retrying = set(retrying)
        self._retries = 0

    def peak_bytes(self) -> int | None:
        assert self.trainer is not None
        return 100 + 10 * self.trainer.settings.batch

    def held_bytes(self) -> int | None:
        return 100

    def share(self, peak_bytes: int) -> float | None:
        return peak_bytes / self._limit

    def retries(self) -> int | None:
        if self.trainer is not None and self.trainer.position.updates + 1 in self._retrying:
            self._retries += 1
        return self._retries

    def reset(self) -> None:
        """The batch alone says how much it is."""


DROPOUT = {"model_type": "gpt2", "vocab_size": 260, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}


def small(*, dropout: float, **changes: Any) -> Settings:
    """A GPT-2 of one layer: it has dropout after each of its parts."""
    shares = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = {"config": {**DROPOUT, **shares, **ends}}
    return msgspec.structs.replace(TINY, **{"model": model, "save_every": 1_000_000, "learning_rate": 1e-3, **changes})


def measured(folder: Path, settings: Settings, gauge: Scripted, *, patience: int) -> Training:
    """A training in a folder of its own that may grow back by what the gauge says."""
    training = fresh(folder, settings, memory=gauge, patience=patience)
    gauge.trainer = training.trainer
    return training


def fresh(folder: Path, settings: Settings, **options: Any) -> Training:
    """A training in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    return Training(folder / "train_latest_state", settings, **options)


def splits_of(channel: Recorder) -> dict[int, tuple[int, int]]:
    """By update the split that it was done with."""
    return {step["update"]: (step["batch"], step["accumulation"]) for step in channel.of("step")}


def following(folder: Path, settings: Settings, splits: dict[int, tuple[int, int]]) -> Training:
    """A training that is asked for these splits, each at the boundary before its update."""
    now = splits[1]
    training = fresh(folder, msgspec.structs.replace(settings, batch=now[0], accumulation=now[1]))
    for update, split in splits.items():
        if split != now:
            now = split
            training.channel.commands[update - 1] = [(update, "change", {"batch": now[0], "accumulation": now[1]})]
    return training


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights, relative to the norm of the second."""
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in other)
    whole = sum(float(weight.double().square().sum()) for weight in other.values())
    return float((apart / whole) ** 0.5)
