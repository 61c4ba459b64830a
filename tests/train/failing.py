"""Real allocation failures at chosen places of a training, and simulated device memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import PartialState

from memtop.presets import Settings
from memtop.presets.schema import with_splits
from memtop.train.trainer import Trainer
from tests.train.support import TINY, Recorder, Training

TOO_MUCH = 2**46
"""More elements than any machine can hold, so that the allocation fails at once."""


class Failure(msgspec.Struct, frozen=True):
    """The update (from 1), the place among its micro-batches (0: the first, almost 1: the last),
    and the pass.
    """

    update: int
    where: float
    backward: bool


def drawn(seed: int, count: int, updates: int) -> list[Failure]:
    """Failures at random updates, at most one per update."""
    draw = random.Random(seed)
    chosen = sorted(draw.sample(range(1, updates + 1), count))
    return [Failure(update, draw.random(), draw.random() < 0.5) for update in chosen]


class Counting:
    """Counts the micro-batches of each update."""

    def __init__(self, training: Training) -> None:
        self.trainer = training.trainer
        self.micro = 0
        self.update = 0
        """From 1. At 0, a repeated update counts from its first micro-batch."""
        model: Any = training.model
        model.base_model.register_forward_hook(self._forward)

    def _forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            update = self.trainer.position.updates + 1
            self.micro = self.micro + 1 if update == self.update else 0
            self.update = update
            self.passed(output[0])

    def passed(self, hidden: torch.Tensor) -> None:
        """Called with the activations of each micro-batch."""


class Failing(Counting):
    """Allocates too much memory inside the model, once for each failure of the list."""

    def __init__(self, training: Training, failures: list[Failure]) -> None:
        super().__init__(training)
        self._waiting = {failure.update: failure for failure in failures}
        self.seen: Callable[[torch.Tensor], None] = lambda hidden: None
        """Called with the activations of the attempt before it fails."""

    @property
    def left(self) -> int:
        """The number of failures that have not happened yet."""
        return len(self._waiting)

    def passed(self, hidden: torch.Tensor) -> None:
        accumulation = self.trainer.settings.splits[PartialState().process_index][1]
        failure = self._waiting.get(self.update)
        if failure is None or self.micro != int(failure.where * accumulation):
            return
        del self._waiting[self.update]
        self.update = 0
        self.seen(hidden)
        if failure.backward:
            hidden.register_hook(lambda gradient: torch.empty(TOO_MUCH, device=gradient.device))
        else:
            torch.empty(TOO_MUCH, device=hidden.device)


def fails_above(training: Training, rows: int, *, when: Callable[[], bool] = lambda: True) -> None:
    """Let micro-batches with more rows not fit, while `when` says so."""

    def fail(module: torch.nn.Module, args: Any, values: Any) -> None:
        if len(values["input_ids"]) > rows and when():
            torch.empty(TOO_MUCH)

    training.model.register_forward_pre_hook(fail, with_kwargs=True)


class Scripted:
    """Device memory whose peak grows with the batch; its allocator retries in the updates of
    `retrying`.
    """

    def __init__(self, *, limit: int = 1_000_000, retrying: Iterable[int] = ()) -> None:
        self.trainer: Trainer | None = None
        self.limit = limit
        self.held = 100
        self._retrying = set(retrying)
        self._retries = 0

    def name(self) -> str | None:
        return "scripted"

    def total_bytes(self) -> int | None:
        return self.limit

    def peak_bytes(self) -> int | None:
        assert self.trainer is not None
        return 100 + 10 * self.trainer.settings.splits[PartialState().process_index][0]

    def end_phase(self) -> int | None:
        return None

    def end_update(self) -> tuple[int, int]:
        return 0, 0

    def held_bytes(self) -> int | None:
        return self.held

    def fullness(self, peak_bytes: int) -> float | None:
        return peak_bytes / self.limit

    def generation(self) -> int | None:
        return None

    def retries(self) -> int | None:
        if self.trainer is not None and self.trainer.position.updates + 1 in self._retrying:
            self._retries += 1
        return self._retries

    def reset(self) -> None:
        """Do nothing: the peak depends only on the batch."""


class Filled(Scripted):
    """Device memory whose peak grows with the largest micro-batch since the last reset."""

    largest = 0

    def follow(self, training: Training, *, fails_from: int) -> None:
        """Measure this training. Micro-batches from `fails_from` on do not fit."""

        def filled(module: torch.nn.Module, args: Any, values: Any) -> None:
            self.largest = max(self.largest, len(values["input_ids"]))

        self.trainer = training.trainer
        training.model.register_forward_pre_hook(filled, with_kwargs=True)
        fails_above(training, fails_from - 1)

    def peak_bytes(self) -> int | None:
        return 100 + 10 * self.largest

    def reset(self) -> None:
        self.largest = 0


class Clock:
    """Replaces `time.perf_counter`: only the forward passes of a training take time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def follow(self, training: Training, seconds_of: Callable[[int], float]) -> None:
        """Let each pass of this training take the seconds for its samples."""

        def passed(module: torch.nn.Module, args: Any, values: Any) -> None:
            self.now += seconds_of(len(values["input_ids"]))

        training.model.register_forward_pre_hook(passed, with_kwargs=True)


DROPOUT = {"model_type": "gpt2", "vocab_size": 260, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}


def small(*, dropout: float, **changes: Any) -> Settings:
    """A GPT-2 of one layer: it has dropout after each of its parts."""
    shares = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = {"config": {**DROPOUT, **shares, **ends}}
    return msgspec.structs.replace(TINY, **{"model": model, "save_every": 1_000_000, "learning_rate": 1e-3, **changes})


def measured(folder: Path, settings: Settings, gauge: Scripted, *, patience: int) -> Training:
    """A training in a new folder, whose batch may grow back according to this memory."""
    training = fresh(folder, settings, memory=gauge, patience=patience)
    gauge.trainer = training.trainer
    return training


def fresh(folder: Path, settings: Settings, **options: Any) -> Training:
    """A training in a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return Training(folder / "train_latest_state", settings, **options)


def splits_of(channel: Recorder) -> dict[int, tuple[int, int]]:
    """The split of each update."""
    return {step["update"]: (step["batch"], step["accumulation"]) for step in channel.of("step")}


def rank_splits_of(settings: Settings, channel: Recorder) -> dict[int, tuple[tuple[int, int], ...]]:
    """The split of each update on each rank."""
    changed = {report["update"]: report["changes"] for report in channel.of("settings")}
    found = {}
    for step in channel.of("step"):
        settings = msgspec.structs.replace(settings, **changed.get(step["update"], {}))
        found[step["update"]] = settings.splits
    return found


def following(folder: Path, settings: Settings, splits: dict[int, tuple[tuple[int, int], ...]]) -> Training:
    """A training that changes to these splits of the ranks by commands, each before its update.

    Only the first rank gets commands.
    """
    now = splits[1]
    training = fresh(folder, with_splits(settings, now))
    for update, split in splits.items():
        if split != now and PartialState().is_main_process:
            now = split
            after = with_splits(settings, now)
            values = {"batch": after.batch_text, "accumulation": after.accumulation}
            training.channel.commands[update - 1] = [(update, "change", values)]
    return training


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights, relative to the second one's norm."""
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in other)
    whole = sum(float(weight.double().square().sum()) for weight in other.values())
    return float((apart / whole) ** 0.5)
