"""When a smaller micro-batch grows again, and when it shrinks before memory runs out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from memtop.presets import Settings
from memtop.train.batch_sizer import BatchSizer, UnmeasuredMemory
from tests.train.failing import Failing, Failure, Scripted, fails_above, fresh, measured, small, splits_of


class Card:
    """Device memory of 1000 bytes with these peaks by batch."""

    def __init__(self, peaks: dict[int, int]) -> None:
        self.peaks = peaks
        self.batch = max(peaks)
        self.held: int | None = None
        self.retried = 0

    def name(self) -> str | None:
        return "scripted"

    def total_bytes(self) -> int | None:
        return 1000

    def peak_bytes(self) -> int | None:
        return self.peaks[self.batch]

    def end_phase(self) -> int | None:
        return None

    def end_update(self) -> tuple[int, int]:
        return 0, 0

    def held_bytes(self) -> int | None:
        return self.held

    def fullness(self, peak_bytes: int) -> float | None:
        return peak_bytes / 1000

    def retries(self) -> int | None:
        return self.retried

    def reset(self) -> None:
        """Do nothing: nothing is cached."""


def after(peaks: dict[int, int], *, patience: int = 3) -> BatchSizer:
    """A BatchSizer after updates with these batches, the largest first."""
    card = Card(peaks)
    growth = BatchSizer(card, patience)
    for batch in sorted(peaks, reverse=True):
        card.batch = batch
        growth.updated(batch, pressed=False)
    return growth


def test_the_peak_of_a_larger_batch_is_on_the_line_through_two() -> None:
    # 100 for the model, 50 for each sample.
    growth = after({2: 200, 4: 300})
    assert growth.fullness(8) == pytest.approx(0.5)
    assert growth.fullness(16) == pytest.approx(0.9)


def test_a_prediction_is_never_below_what_was_measured() -> None:
    assert after({2: 200, 4: 300, 8: 850}).fullness(8) == pytest.approx(0.85)
    # The peak fell as the batch grew, so something else shaped it and the line is useless.
    assert after({2: 600, 4: 500}).fullness(8) == pytest.approx(0.6)


def test_one_peak_or_an_unknown_limit_predicts_nothing() -> None:
    assert after({4: 300}).fullness(8) == math.inf
    growth = BatchSizer(UnmeasuredMemory(), 1)
    for batch in (8, 4, 2):
        growth.updated(batch, pressed=False)
    assert growth.fullness(8) == math.inf


def test_one_peak_is_joined_with_the_memory_held_at_batch_0() -> None:
    card = Card({4: 300})
    growth = BatchSizer(card, 3)
    growth.updated(4, pressed=False)
    card.held = 100
    assert growth.fullness(8) == pytest.approx(0.5)
    # Once two batches are measured, only they count.
    card.batch, card.peaks = 2, {2: 250}
    growth.updated(2, pressed=False)
    assert growth.fullness(8) == pytest.approx(0.4)


def test_forgotten_peaks_are_predicted_again_from_the_next_one() -> None:
    card = Card({4: 500, 8: 900})
    card.held = 100
    growth = BatchSizer(card, 3)
    growth.updated(8, pressed=False)
    card.batch = 4
    growth.updated(4, pressed=False)
    assert growth.fullness(8) == pytest.approx(0.9)
    growth.changed(forget=True)
    assert growth.fullness(8) == math.inf, "nothing is known of the new setting"
    card.peaks = {4: 200}
    growth.updated(4, pressed=False)
    assert growth.fullness(8) == pytest.approx(0.3)


def test_only_retries_of_updates_are_pressure() -> None:
    card = Card({4: 300})
    growth = BatchSizer(card, 3)
    with growth.outside_updates():
        card.retried += 2
    assert not growth.new_retries()
    # In an optimizer step: after the update's retries were read and before an evaluation.
    card.retried += 1
    with growth.outside_updates():
        card.retried += 5
    with growth.outside_updates():
        card.retried += 1
    assert growth.new_retries()
    assert growth.retries == 9
    assert not growth.new_retries()


def test_retries_of_a_failed_attempt_do_not_count_for_the_next() -> None:
    card = Card({8: 300})
    growth = BatchSizer(card, 3)
    card.retried += 1
    growth.failed(8)
    growth.changed()
    assert not growth.new_retries()


def test_it_waits_for_a_stable_stretch_that_doubles_after_each_growth_that_fails() -> None:
    growth = after({4: 300, 8: 400})

    def updates_until_due() -> int:
        count = 0
        while not growth.due:
            growth.updated(4, pressed=False)
            count += 1
        return count

    waits = []
    for _ in range(3):
        growth.failed(8)
        growth.changed()
        waits.append(updates_until_due())
        growth.changed(grown=True)
    assert waits == [3, 6, 12]
    # A growth that lasts as long as the wait before it is a success.
    assert updates_until_due() == 12
    growth.failed(8)
    growth.changed()
    assert updates_until_due() == 3


def test_a_retry_restarts_the_stable_stretch() -> None:
    growth = after({4: 300, 8: 400})
    growth.changed()
    growth.updated(4, pressed=False)
    growth.updated(4, pressed=True)
    growth.updated(4, pressed=False)
    growth.updated(4, pressed=False)
    assert not growth.due
    growth.updated(4, pressed=False)
    assert growth.due


# --- in a training
# --------------------------------------------------------------------------------------------------


def settings_of(updates: int, *, batch: int = 8, accumulation: int = 1) -> Settings:
    return small(dropout=0.1, batch=batch, accumulation=accumulation, target_samples=batch * accumulation * updates)


def test_the_batch_grows_back_one_step_at_a_time_up_to_the_request(tmp_path: Path) -> None:
    training = measured(tmp_path, settings_of(16, accumulation=2), Scripted(), patience=3)
    Failing(training, [Failure(2, 0.0, False), Failure(3, 0.5, True)])
    training.run()
    assert [(change["update"], change["changes"]["batch"], change["reason"]) for change in training.channel.of("settings")] == [
        (2, 4, "allocation failure"),
        (3, 2, "allocation failure"),
        (6, 4, "grown back"),
        (9, 8, "grown back"),
    ]
    assert splits_of(training.channel)[16] == (8, 2)
    assert all(batch * accumulation == 16 for batch, accumulation in splits_of(training.channel).values())


@pytest.mark.parametrize(("limit", "grows"), [(211, False), (213, True)])
def test_it_grows_only_below_85_percent(tmp_path: Path, limit: int, grows: bool) -> None:
    # At batch 8 the peak is 180 bytes: 85.3 % or 84.5 % of the limit.
    training = measured(tmp_path, settings_of(12), Scripted(limit=limit), patience=2)
    Failing(training, [Failure(2, 0.0, False)])
    training.run()
    assert ("grown back" in [change["reason"] for change in training.channel.of("settings")]) is grows


def test_on_the_cpu_nothing_is_predicted_and_nothing_grows(tmp_path: Path) -> None:
    training = fresh(tmp_path, settings_of(10), patience=1)
    Failing(training, [Failure(2, 0.0, False)])
    training.run()
    assert {batch for update, (batch, _) in splits_of(training.channel).items() if update > 1} == {4}


def test_retries_in_two_consecutive_updates_shrink_the_split(tmp_path: Path) -> None:
    gauge = Scripted(retrying=(2, 4, 5))
    training = measured(tmp_path / "a", settings_of(8), gauge, patience=100)
    training.run()
    assert [report["update"] for report in training.channel.of("pressure")] == [5]
    assert training.channel.of("pressure")[0]["allocation_retries"] == 3
    (change,) = training.channel.of("settings")
    assert (change["update"], change["changes"], change["reason"]) == (6, {"batch": 4, "accumulation": 2}, "pressure")
    assert training.channel.of("oom") == []
    # No update was repeated.
    calm = fresh(tmp_path / "b", training.settings)
    calm.run()
    assert training.digests == calm.digests
    assert training.losses[:5] == calm.losses[:5]


def test_under_pressure_at_batch_one_the_training_continues(tmp_path: Path) -> None:
    settings = settings_of(8, batch=1, accumulation=2)
    training = measured(tmp_path, settings, Scripted(retrying=range(1, 9)), patience=100)
    assert training.run() == "finished"
    assert len(training.losses) == 8
    assert [report["update"] for report in training.channel.of("pressure")] == [2]


def test_a_requested_batch_becomes_the_largest_batch(tmp_path: Path) -> None:
    training = measured(tmp_path, settings_of(14), Scripted(), patience=2)
    training.channel.commands[1] = [(1, "change", {"batch": 4, "accumulation": 2})]
    Failing(training, [Failure(4, 0.0, False)])
    fails_above(training, 4, when=lambda: training.trainer.position.updates > 1)
    training.run()
    splits = splits_of(training.channel)
    assert (splits[1], splits[2], splits[4], splits[14]) == ((8, 1), (4, 2), (2, 4), (4, 2))


def test_it_grows_back_after_checkpointing_was_switched_on(tmp_path: Path) -> None:
    training = measured(tmp_path, settings_of(12), Scripted(), patience=3)
    training.channel.commands[3] = [(1, "change", {"gradient_checkpointing": "true"})]
    Failing(training, [Failure(2, 0.0, False)])
    training.run()
    assert [(change["update"], change["changes"], change["reason"]) for change in training.channel.of("settings")] == [
        (2, {"batch": 4, "accumulation": 2}, "allocation failure"),
        (4, {"gradient_checkpointing": True}, "asked"),
        (7, {"batch": 8, "accumulation": 1}, "grown back"),
    ]


def test_another_edit_does_not_make_a_shrunken_batch_the_largest(tmp_path: Path) -> None:
    training = measured(tmp_path, settings_of(8), Scripted(), patience=3)
    training.channel.commands[2] = [(1, "change", {"eval_batch": 2})]
    Failing(training, [Failure(2, 0.0, False)])
    training.run()
    assert splits_of(training.channel)[8] == (8, 1)
