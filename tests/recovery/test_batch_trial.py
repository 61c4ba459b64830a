"""When a trial is kept, and which steps may be tried."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.presets import load_presets, load_recipes, resolve
from memtop.presets.schema import with_splits
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.recovery.batch_trial import (
    ForecastOf,
    Split,
    Update,
    larger_splits,
    measured,
    next_split,
    proposed,
    refusal,
    split_refusal,
    spread,
    title_of,
    upper_bound,
    verdict,
)
from memtop.supervisor.recovery.configuration import configuration_key, settings_key
from memtop.supervisor.recovery.values import Advice, Forecast, Remedy
from memtop.supervisor.wire import Change

FIRST = replace(resolve(load_recipes()["first-run"], preset=load_presets()["standard"]), batch=8, accumulation=5)
GIB = 1 << 30


def small(batch: int) -> Forecast:
    return upper_bound(2 * GIB, 8, batch, 16 * GIB)


def stretch(speed: float, noise: float, seed: int, count: int = 20) -> dict[str, float]:
    random_ = random.Random(seed)
    return measured(
        [
            Update(number=at, samples=40, seconds=40 / (speed * max(0.1, random_.gauss(1, noise))), tokens=5120, peak_bytes=at)
            for at in range(count)
        ]
    )


def test_a_step_is_the_largest_within_a_quarter() -> None:
    assert larger_splits(FIRST) == [Split(batch=b, accumulation=a) for b, a in ((10, 4), (20, 2), (40, 1))]
    step, refused = next_split(FIRST, small)
    assert step == Split(batch=10, accumulation=4)
    assert "+150 %" in refused[0]
    step, _ = next_split(replace(FIRST, batch=20, accumulation=12), small)
    assert step == Split(batch=24, accumulation=10)


@pytest.mark.parametrize("recipe", load_recipes())
def test_the_next_exact_split_of_each_recipe_is_tried_where_it_leaves_much_room(recipe: str) -> None:
    """None of them has an exact split within a quarter."""
    run = resolve(load_recipes()[recipe], preset=load_presets()["standard"], whole=False)
    larger = larger_splits(run)
    assert all(split.batch > 1.25 * run.batch for split in larger)

    def taking(share: float) -> ForecastOf:
        return lambda batch: Forecast(peak_bytes=int(share * GIB), total_bytes=GIB, fraction=share, basis="line")

    assert next_split(run, taking(0.0125))[0] == next_split(run, taking(0.69))[0] == larger[0]
    step, refused = next_split(run, taking(0.70))
    assert step is None
    assert refused[0].endswith("predicted 70.0 %; more than +25 % at once is tried only below 70 %")
    step, refused = next_split(run, lambda batch: None)
    assert step is None
    assert "cannot be predicted yet" in refused[0]


def test_a_split_that_ran_out_of_memory_is_not_tried_again() -> None:
    step, refused = next_split(FIRST, small, failed={10})
    assert step is None
    assert "B 10 ran out of memory" in refused[0]


def test_one_peak_alone_gives_an_upper_bound() -> None:
    bound = upper_bound(8 * GIB, 8, 10, 16 * GIB)
    assert (bound.peak_bytes, bound.fraction) == (10 * GIB, 0.625)
    assert "at most" in bound.basis
    assert split_refusal(FIRST, Split(batch=10, accumulation=4), upper_bound(11 * GIB, 8, 10, 16 * GIB)) is not None
    assert upper_bound(GIB, 8, 10, None).fraction is None


def test_a_whole_batch_cannot_grow() -> None:
    step, refused = next_split(replace(FIRST, batch=40, accumulation=1), small)
    assert step is None
    assert "whole effective batch" in refused[0]


def test_outliers_do_not_change_the_measurement() -> None:
    updates = [Update(number=at, samples=40, seconds=1.0) for at in range(20)]
    updates[7] = replace(updates[7], seconds=30.0)  # it wrote a checkpoint
    found = measured(updates)
    assert (found["samples_per_second"], found["samples_per_second_spread"]) == (40, 0)
    assert "peak_bytes" not in found  # unknown values are left out


def test_a_spread_is_a_standard_deviation() -> None:
    random_ = random.Random(1)
    assert spread([random_.gauss(100, 5) for _ in range(5000)]) == pytest.approx(5, rel=0.05)


@given(gain=st.floats(1.15, 3), seed=st.integers(0, 9999))
def test_a_gain_beyond_the_spread_is_kept(gain: float, seed: int) -> None:
    kept, reason = verdict(stretch(100, 0.02, seed), stretch(100 * gain, 0.02, seed + 1))
    assert kept
    assert "+" in reason


@given(loss=st.floats(0.3, 1.0), noise=st.floats(0, 0.05), seed=st.integers(0, 9999))
def test_a_change_that_is_not_faster_is_undone(loss: float, noise: float, seed: int) -> None:
    before = stretch(100, noise, seed)
    after = {**before, "samples_per_second": before["samples_per_second"] * loss}
    kept, reason = verdict(before, after)
    assert not kept
    assert (": slower, by" in reason) == (after["samples_per_second"] < before["samples_per_second"])


def test_the_same_speed_is_seldom_taken_for_a_gain() -> None:
    kept = sum(verdict(stretch(100, 0.1, seed), stretch(100, 0.1, seed + 50_000))[0] for seed in range(1000))
    assert kept < 60  # two standard errors: about one in forty


def test_less_than_a_percent_is_not_worth_it() -> None:
    assert not verdict(stretch(100, 0, 1), stretch(100.9, 0, 1))[0]
    assert verdict(stretch(100, 0, 1), stretch(101.1, 0, 1))[0]


BEFORE = replace(FIRST, batch=4, accumulation=4)


def test_changes_that_must_not_be_tried() -> None:
    def unknown(_: int) -> None:
        return None

    refused = refusal(BEFORE, replace(BEFORE, batch=5), unknown, ())
    assert refused is not None
    assert refused.startswith("a trial must not change training; effective batch 16 -> 20")
    refused = refusal(BEFORE, replace(BEFORE, batch=8, accumulation=2), unknown, {8})
    assert refused == "batch 4 -> 8: B 8 ran out of memory in this run"
    assert refusal(BEFORE, replace(BEFORE, batch=2, accumulation=8), unknown, ()) is None


def test_the_title_names_what_changes() -> None:
    assert title_of(BEFORE, replace(BEFORE, batch=8, accumulation=2)) == "batch 4 -> 8, accumulation 4 -> 2"
    assert "workers" in title_of(BEFORE, replace(BEFORE, workers=2))
    assert title_of(BEFORE, BEFORE) == ""


def test_the_first_proposal_that_can_be_tried_is() -> None:
    typed = Remedy(id="swap", title="more swap", keeps_math=True, resumable="none", command="mkswap")
    asks = Remedy(id="seq", title="T", keeps_math=False, resumable="resumes", needs_consent=True, assignments={"seq_len": "8"})
    workers = Remedy(id="workers", title="workers", keeps_math=True, resumable="live", assignments={"workers": "2"})
    advice = Advice(bottleneck="data", summary="waits for data", proposals=(typed, asks, workers), refused=("no room",))
    assert proposed(advice) == Change(assignments={"workers": "2"}, reason="trial")
    with pytest.raises(MemtopError, match="nothing to try: waits for data; no room"):
        proposed(replace(advice, proposals=(typed, asks)))
    with pytest.raises(MemtopError, match="not been measured for long enough"):
        proposed(None)


def test_no_larger_batch_is_tried_where_processes_have_their_own() -> None:
    uneven = with_splits(replace(FIRST, world_size=2), [(3, 4), (1, 4)])
    allowed, refused = next_split(uneven, lambda batch: None)
    assert allowed is None
    assert refused == ["batch 3,1: the processes have batches of their own; a larger one is yours to give"]
    even = replace(FIRST, batch=2, accumulation=4, world_size=2)
    why = refusal(even, uneven, lambda batch: None, ())
    assert why == "batch 3,1: a trial changes the batch of all processes; restart with it"
    assert title_of(uneven, even) == "split 3+1 x 4 -> 2 x 4 x 2"


def test_peaks_of_processes_with_batches_of_their_own_have_a_line_of_their_own() -> None:
    even, uneven = (with_splits(replace(FIRST, world_size=2), splits) for splits in ([(2, 4)] * 2, [(3, 4), (1, 4)]))
    later = with_splits(uneven, [(3, 8), (1, 8)])
    assert settings_key(even) != settings_key(uneven) == settings_key(later)
    assert configuration_key(even) != configuration_key(uneven) == configuration_key(later)
