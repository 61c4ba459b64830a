"""The position of a training when its batch changes, by what its program counts."""

from __future__ import annotations

import pytest

from memtop.presets.program_profiles import CheckpointRule, Position
from memtop.supervisor.run.positions import Split, converted, moved, samples_of_step, updates_at
from memtop.supervisor.wire import Checkpoint

MICRO = Position(counts="micro_batches", per_epoch=True, order="skipped", length="epochs")
UPDATES = Position(counts="updates", order="skipped", length="updates")
RANDOM = Position(counts="updates", order="random", length="updates")
SAMPLES = Position(counts="samples", order="skipped", length="epochs")
CONVERTED = CheckpointRule(paths=("/out/x.pth",), convert=True)
KEPT = CheckpointRule(paths=("/out/x.pth",))


def at(step: int) -> Checkpoint:
    return Checkpoint(path="/out/x.pth", step=step, complete=True)


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        (Split(8, 4), Split(4, 8), 240),
        (Split(8, 4), Split(16, 2), 60),
        (Split(8, 4), Split(8, 8), 120),
        # To the beginning of an update: 160 would be in the middle of one.
        (Split(8, 4), Split(6, 12), 156),
        (Split(8, 4, processes=2), Split(4, 8, processes=2), 240),
    ],
)
def test_micro_batches_are_converted_to_the_beginning_of_an_update(before: Split, after: Split, new: int) -> None:
    assert converted(MICRO, 120, before, after) == new
    assert new % after.accumulation == 0
    assert new * samples_of_step(MICRO, after) <= 120 * samples_of_step(MICRO, before)


def test_updates_and_samples_are_converted_too() -> None:
    assert converted(UPDATES, 100, Split(8, 2), Split(4, 2)) == 200
    assert converted(SAMPLES, 960, Split(8, 2), Split(4, 2)) == 960


def test_updates_follow_from_the_position_where_they_do() -> None:
    assert updates_at(RANDOM, 7, None, None) == 7
    assert updates_at(MICRO, 120, 0, Split(8, 4)) == 30
    assert updates_at(MICRO, 120, 0, None) is None
    assert updates_at(MICRO, 120, 1, Split(8, 4)) is None, "the length of an epoch is not known"
    assert updates_at(SAMPLES, 960, None, Split(8, 4)) == 30


def test_what_a_restart_means_is_said_before() -> None:
    half = (Split(8, 4), Split(4, 8))
    assert moved(CONVERTED, MICRO, at(120), *half, rate=4.5e-4) == (
        "; its position is converted in a copy of the checkpoint (micro-batches: 120 -> 240), so no sample is repeated or left "
        "out; the learning rate there (about 0.00045) is the same before and after"
    )
    words = moved(CONVERTED, MICRO, at(121), *half)
    assert "(micro-batches: 121 -> 240), so 8 samples are repeated; the learning rate there is the same" in words
    assert moved(KEPT, MICRO, at(120), *half) == (
        "; ! 480 samples are repeated; ! the learning rate there changes with the position"
    )
    assert "! 960 samples are skipped" in moved(KEPT, MICRO, at(120), Split(8, 4), Split(16, 2))
    assert moved(KEPT, UPDATES, at(5), *half).startswith("; no sample is repeated or left out")
    words = moved(KEPT, RANDOM, at(5), Split(8, 4), Split(4, 4))
    assert words.startswith(
        "; its samples are drawn at random; with a fixed seed the program draws those of its beginning again; "
    )
    fewer = moved(KEPT, Position(counts="updates", order="skipped", length="epochs"), at(5), Split(8, 4), Split(4, 4), 0.1)
    assert fewer == (
        "; ! 80 samples are repeated; ! the learning rate there (about 0.1) changes: its schedule has 2 times as many updates"
    )
    assert moved(KEPT, RANDOM, None, *half) == ""


def test_a_program_that_loses_its_place_in_the_epoch_repeats_what_it_saw() -> None:
    lost = Position(counts="micro_batches", per_epoch=True, order="lost")
    words = moved(KEPT, lost, at(120), Split(8, 4), Split(4, 8))
    assert words.startswith("; ! the program begins its epoch again: 960 samples are repeated;")
