"""An update's peak and retries exclude the work between two updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memtop.presets import Settings
from memtop.presets.schema import Sampling
from memtop.train.batch_sizer import CudaMemory
from memtop.train.data.tokens import ByteTokens
from tests.train.card import Card, Reading, put_in
from tests.train.failing import TOO_MUCH, Failing, Failure, fresh, small, splits_of
from tests.train.support import Training, held_out

GPU = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return put_in(monkeypatch)


def settings_of(updates: int, **changes: Any) -> Settings:
    # Each sample has a row of its own, so that the rows of a micro-batch give its size.
    return small(dropout=0.1, batch=8, accumulation=1, target_samples=8 * updates, eval_batch=8, packing=False, **changes)


def on_card(folder: Path, card: Card, settings: Settings, *, evaluating: int = 100, patience: int = 2) -> Training:
    """A training whose micro-batches take 60 bytes per sample in addition to what is held, and
    evaluations this much.
    """
    # Loading the model took more than anything later.
    card.take(990)
    gauge, channel = CudaMemory(GPU), Reading(card)
    options = {"channel": channel, "memory": gauge, "patience": patience, "tokens": ByteTokens()}
    training = fresh(folder, settings, evaluation=held_out(), **options)

    def taken(module: torch.nn.Module, args: Any, values: Any) -> None:
        card.take(card.held + 60 * len(values["input_ids"]) if module.training else evaluating)

    training.model.register_forward_pre_hook(taken, with_kwargs=True)
    return training


def peaks_of(training: Training) -> dict[int, int]:
    return {step["update"]: step["peak_reserved_bytes"] for step in training.channel.of("step")}


def test_the_peak_of_an_evaluation_is_reported_separately(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(8, eval_every=1), evaluating=930)
    Failing(training, [Failure(2, 0.0, False)])
    training.run()
    assert peaks_of(training) == {1: 580, 2: 340, 3: 340, 4: 580, 5: 580, 6: 580, 7: 580, 8: 580}
    evaluations = training.channel.of("evaluation")
    assert len(evaluations) == 8
    assert {(found["peak_bytes"], found["peak_reserved_bytes"]) for found in evaluations} == {(930, 930)}
    # A peak of 930 of 1000 bytes would have kept the batch small forever.
    assert [change["reason"] for change in training.channel.of("settings")] == ["allocation failure", "grown back"]


def test_the_peak_of_samples_is_reported_separately(tmp_path: Path, card: Card) -> None:
    (tmp_path / "prompts.txt").write_text("once upon a time\n")
    sample = Sampling(prompts=str(tmp_path / "prompts.txt"), every=2, max_new_tokens=2)
    training = on_card(tmp_path, card, settings_of(4, sample=sample), evaluating=930)
    training.run()
    assert peaks_of(training) == {1: 580, 2: 580, 3: 580, 4: 580}
    found = training.channel.of("sample")
    assert [(one["update"], one["peak_bytes"], one["peak_reserved_bytes"]) for one in found] == [(2, 930, 930), (4, 930, 930)]


def test_the_peak_of_a_save_is_not_an_updates_peak(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(6, save_every=1))
    tensors = training.engine.saved_tensors

    def saved_tensors() -> Iterator[Any]:
        card.take(950)
        yield from tensors()

    training.engine.saved_tensors = saved_tensors
    Failing(training, [Failure(2, 0.0, False)])
    training.run()
    assert len(training.channel.of("checkpoint")) == 6
    assert peaks_of(training) == {1: 580, 2: 340, 3: 340, 4: 580, 5: 580, 6: 580}


def test_a_retried_evaluation_reports_the_peak_of_the_smaller_one(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(4, eval_every=2), evaluating=400)

    def full(module: torch.nn.Module, args: Any, values: Any) -> None:
        if not module.training and len(values["input_ids"]) > 4:
            card.take(1000)
            card.retried += 1
            torch.empty(TOO_MUCH)

    training.model.register_forward_pre_hook(full, with_kwargs=True)
    training.run()
    assert [(found["peak_bytes"], found["update"]) for found in training.channel.of("evaluation")] == [(400, 2), (400, 4)]
    assert set(peaks_of(training).values()) == {580}


def test_retries_of_evaluations_do_not_shrink_the_split(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(6, eval_every=1))

    def retried(module: torch.nn.Module, args: Any) -> None:
        if not module.training:
            card.retried += 1

    training.model.register_forward_pre_hook(retried)
    training.run()
    assert card.retried > 6
    assert training.channel.of("pressure") == []
    assert set(splits_of(training.channel).values()) == {(8, 1)}


def test_retries_of_the_optimizer_count_once(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(6, eval_every=1), patience=100)

    def retried(*_: Any) -> None:
        card.retried += training.trainer.settings.batch == 8

    training.optimizer.register_step_pre_hook(retried)
    training.run()
    # The retries of the first two updates are noticed in the two after them.
    assert [report["update"] for report in training.channel.of("pressure")] == [3]
    assert [(change["update"], change["reason"]) for change in training.channel.of("settings")] == [(4, "pressure")]


PHASES = ("forward", "backward", "optimizer")


def phases_of(training: Training) -> dict[int, tuple[int, ...] | None]:
    """By update, the peaks of its phases; None where they were not measured."""
    names = [f"{phase}_peak_bytes" for phase in PHASES]
    steps = training.channel.of("step")
    return {step["update"]: tuple(step[name] for name in names) if names[0] in step else None for step in steps}


def taking(training: Training, card: Card, *, backward: Callable[[], int], optimizer: int) -> None:
    """The backward passes and the optimizer steps of this training take this much, too."""
    passed, stepped = training.engine.backward, training.engine.step

    def pass_back(loss: torch.Tensor, *, last: bool) -> None:
        card.take(backward())
        passed(loss, last=last)

    def step(rate: float) -> Any:
        card.take(optimizer)
        return stepped(rate)

    training.engine.backward, training.engine.step = pass_back, step


def test_the_first_updates_report_the_peak_of_each_phase_and_their_own_peak_is_that_of_all(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(6, eval_every=2), evaluating=930)
    taking(training, card, backward=lambda: 700, optimizer=300)
    training.run()
    found = phases_of(training)
    assert {update: found[update] for update in (1, 2, 3)} == dict.fromkeys((1, 2, 3), (580, 700, 300))
    assert [found[update] for update in (4, 5, 6)] == [None] * 3, "then no update is slowed"
    steps = training.channel.of("step")
    assert {(step["peak_bytes"], step["peak_reserved_bytes"]) for step in steps} == {(700, 700)}
    # The peaks decide about the batch, too.
    assert training.trainer._sizer.peaks == {8: 700}


def test_a_new_highest_peak_and_other_settings_are_measured_again(tmp_path: Path, card: Card) -> None:
    training = on_card(tmp_path, card, settings_of(9))
    size = {"backward": 700}
    taking(training, card, backward=lambda: size["backward"], optimizer=300)

    def at(update: int) -> None:
        if update == 5:
            size["backward"] = 800

    training.model.register_forward_pre_hook(lambda *_: at(training.trainer.position.updates + 1))
    Failing(training, [Failure(8, 0.0, False)])
    training.run()
    found = phases_of(training)
    assert [update for update, phases in found.items() if phases is not None] == [1, 2, 3, 6, 8, 9]
    assert found[6] == (580, 800, 300)
    assert found[8] == (340, 800, 300), "the attempt that failed is not of the smaller batch"


def test_on_the_cpu_no_phase_is_measured(tmp_path: Path) -> None:
    training = fresh(tmp_path, settings_of(2))
    training.run()
    assert set(phases_of(training).values()) == {None}
    assert all(step.get("peak_bytes") is None for step in training.channel.of("step"))


def test_cached_memory_is_freed_before_a_peak_is_measured(card: Card) -> None:
    gauge = CudaMemory(GPU)
    card.take(800)
    assert gauge.peak_bytes() == 800
    gauge.reset()
    assert (gauge.peak_bytes(), gauge.held_bytes()) == (100, 100)
    card.take(300)
    assert gauge.peak_bytes() == 300
