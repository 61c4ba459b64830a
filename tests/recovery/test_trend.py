"""A leak is reported soon and measured well. A series that only resembles one is not reported,
whatever its noise."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memtop.supervisor.recovery.trend import CONFIDENT, Growth, Slope, Sustained
from tests.forking import LONG

MIB = 1 << 20
SEEDS = st.integers(0, 9999)


def leaks(
    shape: Callable[[int], float], updates: int, noise: float = 0.0, seed: int = 0, growth: Growth | None = None
) -> list[tuple[int, Slope]]:
    """The updates at which a series (in MiB, two updates per second) is called a leak."""
    gauss, growth, found = random.Random(seed).gauss, growth or Growth(), []
    for update in range(1, updates + 1):
        growth.add(update, update / 2, max(0.0, shape(update) + (gauss(0, noise) if noise else 0.0)) * MIB)
        if (slope := growth.leaking) is not None:
            found.append((update, slope))
    return found


@settings(max_examples=60, deadline=None)
@given(rate=st.floats(0.5, 200), base=st.floats(0, 20_000), noise=st.floats(0, 0.8), seed=SEEDS)
def test_a_leak_is_reported_within_100_updates_and_measured_within_a_fifth(
    rate: float, base: float, noise: float, seed: int
) -> None:
    """The noise reaches 1.6 times what one update leaks."""
    found = leaks(lambda update: base + rate * update, 100, noise * 2 * rate, seed)
    assert found
    _, slope = found[-1]
    assert slope.per_unit == pytest.approx(rate * MIB, rel=0.2)
    assert slope.per_second == pytest.approx(2 * slope.per_unit, rel=0.01)
    assert CONFIDENT <= slope.confidence <= 1


FILLS: dict[str, Callable[[float], float]] = {
    "ramp": lambda part: part,
    "fast first": math.sqrt,
    "slow first": lambda part: part**3,
    "plateau": lambda part: min(1.0, 2 * part),
}


@settings(max_examples=200 if LONG else 80, deadline=None)
@given(
    period=st.integers(2, 72),
    height=st.floats(1, 5000),
    phase=st.integers(0, 80),
    fill=st.sampled_from(sorted(FILLS)),
    noise=st.floats(0, 0.3),
    seed=SEEDS,
)
def test_a_sawtooth_is_never_reported(period: int, height: float, phase: int, fill: str, noise: float, seed: int) -> None:
    curve = FILLS[fill]
    assert leaks(lambda update: 500 + height * curve(((update + phase) % period) / period), 1800, noise * height, seed) == []


@settings(max_examples=40 if LONG else 25, deadline=None)
@given(period=st.integers(73, 600), height=st.floats(50, 5000), seed=SEEDS)
def test_a_tooth_longer_than_all_data_so_far_is_withdrawn_when_it_falls_and_not_reported_again(
    period: int, height: float, seed: int
) -> None:
    found = leaks(lambda update: 500 + height * ((update % period) / period), 8 * period, height / 200, seed)
    assert all(update <= period + 8 for update, _ in found)


@settings(max_examples=60 if LONG else 40, deadline=None)
@given(at=st.integers(1, 900), height=st.floats(10, 5000), noise=st.floats(0, 0.2), seed=SEEDS)
def test_a_step_is_not_reported(at: int, height: float, noise: float, seed: int) -> None:
    assert leaks(lambda update: 800 + (height if update >= at else 0), 1000, noise * height, seed) == []


@settings(max_examples=60 if LONG else 40, deadline=None)
@example(updates=53.5, height=137.0, noise=0.0078125, seed=375)
@given(updates=st.floats(1, 55), height=st.floats(10, 5000), noise=st.floats(0, 0.05), seed=SEEDS)
def test_a_warm_up_is_not_reported(updates: float, height: float, noise: float, seed: int) -> None:
    """It levels off with a time constant of this many updates."""
    assert leaks(lambda update: 800 + height * (1 - math.exp(-update / updates)), 1500, noise * height, seed) == []


@settings(max_examples=60 if LONG else 40, deadline=None)
@given(sigma=st.floats(0.1, 500), seed=SEEDS)
def test_noise_is_not_reported(sigma: float, seed: int) -> None:
    assert leaks(lambda _: 2000, 2000, sigma, seed) == []


@settings(max_examples=40 if LONG else 25, deadline=None)
@given(period=st.integers(5, 60), height=st.floats(5, 200), rate=st.floats(0.5, 5))
def test_a_leak_below_a_sawtooth_is_reported_after_several_teeth(period: int, height: float, rate: float) -> None:
    found = leaks(lambda update: 500 + rate * update + height * ((update % period) / period), 900)
    assert found
    assert found[-1][1].per_unit == pytest.approx(rate * MIB, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "updates", "noise"),
    [
        pytest.param(lambda update: 900 + (400 if update % 50 < 6 else 0), 3000, 2.0, id="an evaluation every 50 updates"),
        pytest.param(lambda update: 900 + 0.02 * update, 400, 0.0, id="growth of a few bytes"),
        pytest.param(lambda update: 500 + update % 3 * 10, 400, 0.0, id="no growth"),
    ],
)
def test_other_series_are_not_reported(shape: Callable[[int], float], updates: int, noise: float) -> None:
    assert leaks(shape, updates, noise) == []


@pytest.mark.parametrize(
    ("shape", "updates", "start"),
    [
        pytest.param(lambda update: 900 + max(0, update - 5000), 5200, 5000, id="late"),
        # The cache is freed at update 3000. The time on the plateau does not count as a rise.
        pytest.param(lambda u: 2000 if u < 3000 else 900 + max(0, u - 3050), 3300, 3050, id="after a freed plateau"),
    ],
)
def test_a_leak_is_reported_within_100_updates_of_its_start(shape: Callable[[int], float], updates: int, start: int) -> None:
    assert start < leaks(shape, updates, 0.5)[0][0] <= start + 100


def test_a_leak_that_is_fixed_is_withdrawn() -> None:
    found = leaks(lambda update: 900 + min(update, 200), 600, 0.3)
    assert 90 < found[0][0] <= 100
    assert found[-1][0] < 300


def test_slow_growth_that_noise_hides_at_first_is_found_over_more_updates() -> None:
    found = leaks(lambda update: 900 + 0.1 * update, 3000, 5.0)
    assert found[0][0] > 300
    assert found[-1][1].per_unit == pytest.approx(0.1 * MIB, rel=0.2)


def test_memory_is_bounded() -> None:
    growth = Growth()
    leaks(lambda update: 900 + update, 2_000, growth=growth)
    early = len(pickle.dumps(growth))
    leaks(lambda update: 900 + update, 20_000, growth=growth)
    assert len(pickle.dumps(growth)) < 3 * early


def test_only_some_updates_are_seen() -> None:
    """The supervisor reads five times per second, which is every fortieth of these quick
    updates."""
    growth = Growth()
    for update in range(1, 4000, 40):
        growth.add(update, update / 200, update * MIB)
    assert growth.leaking is not None
    assert growth.leaking.per_unit == pytest.approx(MIB, rel=0.01)


def test_a_rate_counts_if_it_lasts_for_more_than_half_of_the_values() -> None:
    swapping = Sustained(10)
    for value in (0, 0, 5, 0):
        swapping.add(value)
    assert swapping.value is None, "too few values"
    swapping.add(0)
    assert swapping.value == 0, "a single value is not sustained"
    for _ in range(8):
        swapping.add(4e6)
    assert (swapping.value, swapping.share) == (4e6, 0.8)
