"""A Trainer that resumes inside an epoch uses the same samples in the same updates.

`OldTrainer` makes the mistakes of transformers 4 with accelerate 1.10, which cannot be installed
next to the present versions; `test_agent_knobs.py` has the present ones.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from memtop.train.agent.position import corrected

BATCH = 2


class Loader:
    def __init__(self, samples: int, skip: int = 0) -> None:
        self.samples, self.skip = samples, skip
        self.iteration = 0

    def __len__(self) -> int:
        return -(-self.samples // BATCH) - self.skip

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.samples))
        random.Random(self.iteration).shuffle(order)
        self.iteration += 1
        yield from [order[at : at + BATCH] for at in range(0, self.samples, BATCH)][self.skip :]


def skip_first_batches(loader: Loader, number: int) -> Loader:
    return Loader(loader.samples, number)


class OldTrainer:
    def __init__(self, module: types.ModuleType, samples: int, accumulation: int) -> None:
        self.module, self.samples = module, samples
        self.args = types.SimpleNamespace(gradient_accumulation_steps=accumulation)
        self.updates: list[list[int]] = []
        self.begun: list[int] = []
        """The accumulation that is set when an update begins, trains and ends."""
        self._present: list[int] = []

    def get_batch_samples(self, batches: Iterator[list[int]], wanted: int) -> tuple[list[list[int]], None]:
        return [batch for _, batch in zip(range(wanted), batches, strict=False)], None

    def training_step(self, batch: list[int]) -> float:
        self.begun.append(self.args.gradient_accumulation_steps)
        self._present += batch
        return 0.0

    def train(self, epochs: int, done: int = 0) -> None:
        loader, args = Loader(self.samples), self.args
        steps = len(loader)
        updates = -(-steps // args.gradient_accumulation_steps)
        first, skipped = divmod(done, updates)
        for epoch in range(first, epochs):
            loader.iteration = epoch
            rest = loader
            if skipped:
                rest = self.module.__dict__["skip_first_batches"](loader, skipped * args.gradient_accumulation_steps)
                skipped = 0
            batches, step = iter(rest), -1
            remainder = steps % args.gradient_accumulation_steps or args.gradient_accumulation_steps
            for update in range(updates):
                wanted = args.gradient_accumulation_steps if update != updates - 1 else remainder
                for batch in self.get_batch_samples(batches, wanted)[0]:
                    step += 1
                    ends = (step + 1) % args.gradient_accumulation_steps == 0 or step + 1 == steps
                    self.training_step(batch)
                    if ends:
                        self.updates.append(self._present)
                        self._present = []


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("transformers.trainer")
    module.__dict__["skip_first_batches"] = skip_first_batches
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    return module


def told(words: str) -> Any:
    return contextlib.nullcontext()


@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [24, 25, 30])
def test_the_rest_of_an_epoch_has_the_same_samples_in_the_same_updates(
    module: types.ModuleType, samples: int, accumulation: int
) -> None:
    whole = OldTrainer(module, samples, accumulation)
    whole.train(4)
    wrong = 0
    for done in range(1, len(whole.updates)):
        alone = OldTrainer(module, samples, accumulation)
        alone.train(4, done)
        wrong += alone.updates != whole.updates[done:]
        resumed = OldTrainer(module, samples, accumulation)
        with corrected(resumed, told):
            resumed.train(4, done)
        assert resumed.updates == whole.updates[done:], done
        assert set(resumed.begun) == {accumulation}
        assert resumed.args.gradient_accumulation_steps == accumulation
    assert wrong
    assert module.__dict__["skip_first_batches"] is skip_first_batches


def test_data_without_a_length_and_other_versions_are_left_alone(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Loader, "__len__")
    trainer = OldTrainer(module, 24, 2)
    with corrected(trainer, told):
        rest = module.__dict__["skip_first_batches"](Loader(24), 1)
        assert rest.skip == 1
    assert "training_step" not in vars(trainer)
    del module.__dict__["skip_first_batches"]
    with corrected(trainer, told):
        assert "skip_first_batches" not in vars(module)
