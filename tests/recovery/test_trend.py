"""A leak is reported soon and measured well; a series that only looks like one is not, whatever its noise."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memtop.supervisor.recovery.trend import CONFIDENT, Growth, Slope, Sustained

MIB = 1 << 20


def named(
    shape: Callable[[int], float], updates: int, noise: float = 0.0, seed: int = 0, growth: Growth | None = None
) -> list[tuple[int, Slope]]:
    """The updates at which a series (in MiB, one update each half second) is called a leak."""
    random_, growth, found = random.Random(seed), growth or Growth(), []
    for update in range(1, updates + 1):
        growth.add(update, update / 2, max(0.0, shape(update) + random_.gauss(0, noise)) * MIB)
        if (slope := growth.leaking) is not None:
            found.append((update, slope))
    return found


@settings(max_examples=60, deadline=None)
@given(rate=st.floats(0.5, 200), base=st.floats(0, 20_000), noise=st.floats(0, 0.8), seed=st.integers(0, 999))
def test_a_leak_is_named_within_100_updates_and_measured_within_a_fifth(
    rate: float, base: float, noise: float, seed: int
) -> None:
    # 1 MiB per update is in the middle of it; noise as a share of what one update leaks times two.
    found = named(lambda update: base + rate * update, 100, noise * 2 * rate, seed)
    assert found
    _, slope = found[-1]
    assert slope.per_unit == pytest.approx(rate * MIB, rel=0.2)
    assert slope.per_second == pytest.approx(2 * slope.per_unit, rel=0.01)


@settings(max_examples=200, deadline=None)
@given(
    period=st.integers(2, 72),
    height=st.floats(1, 5000),
    phase=st.integers(0, 80),
    fill=st.sampled_from(["ramp", "fast first", "slow first", "plateau"]),
    noise=st.floats(0, 0.3),
    seed=st.integers(0, 999),
)
def test_a_sawtooth_is_never_named(period: int, height: float, phase: int, fill: str, noise: float, seed: int) -> None:
    def shape(update: int) -> float:
        part = ((update + phase) % period) / period
        curve = {"ramp": part, "fast first": math.sqrt(part), "slow first": part**3, "plateau": min(1.0, 2 * part)}[fill]
        return 500 + height * curve

    assert named(shape, 2500, noise * height, seed) == []


@settings(max_examples=40, deadline=None)
@given(period=st.integers(73, 600), height=st.floats(50, 5000), seed=st.integers(0, 999))
def test_a_tooth_longer_than_all_data_so_far_is_withdrawn_when_it_falls_and_not_reported_again(
    period: int, height: float, seed: int
) -> None:
    found = named(lambda update: 500 + height * ((update % period) / period), 12 * period, height / 200, seed)
    assert all(update <= period + 8 for update, _ in found)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(1, 900), height=st.floats(10, 5000), noise=st.floats(0, 0.2), seed=st.integers(0, 999))
def test_a_step_is_not_named(at: int, height: float, noise: float, seed: int) -> None:
    assert named(lambda update: 800 + (height if update >= at else 0), 1000, noise * height, seed) == []


@settings(max_examples=60, deadline=None)
@example(updates=53.5, height=137.0, noise=0.0078125, seed=375)
@given(updates=st.floats(1, 55), height=st.floats(10, 5000), noise=st.floats(0, 0.05), seed=st.integers(0, 999))
def test_a_warm_up_is_not_named(updates: float, height: float, noise: float, seed: int) -> None:
    """Levels off with a time constant of so many updates."""
    assert named(lambda update: 800 + height * (1 - math.exp(-update / updates)), 2000, noise * height, seed) == []


@settings(max_examples=60, deadline=None)
@given(sigma=st.floats(0.1, 500), seed=st.integers(0, 9999))
def test_noise_is_not_named(sigma: float, seed: int) -> None:
    assert named(lambda _: 2000, 3000, sigma, seed) == []


@settings(max_examples=30, deadline=None)
@given(period=st.integers(5, 60), height=st.floats(5, 200), rate=st.floats(0.5, 5))
def test_a_leak_below_a_sawtooth_is_named_after_several_teeth(period: int, height: float, rate: float) -> None:
    found = named(lambda update: 500 + rate * update + height * ((update % period) / period), 900)
    assert found
    assert found[-1][1].per_unit == pytest.approx(rate * MIB, rel=0.2)


def test_an_evaluation_every_fifty_updates_is_a_tooth() -> None:
    assert named(lambda update: 900 + (400 if update % 50 < 6 else 0), 3000, 2.0) == []


def test_a_leak_that_begins_late_is_named_within_100_updates_of_its_beginning() -> None:
    found = named(lambda update: 900 + max(0, update - 5000), 5200, 0.5)
    assert 5000 < found[0][0] <= 5100


def test_a_leak_after_a_freed_plateau_is_not_mistaken_for_a_long_tooth() -> None:
    """The cache is freed at update 3000. The time on the plateau does not count as a rise."""
    found = named(lambda update: 2000 if update < 3000 else 900 + max(0, update - 3050), 3300, 0.5)
    assert 3050 < found[0][0] <= 3150


def test_a_leak_that_is_fixed_is_withdrawn() -> None:
    found = named(lambda update: 900 + min(update, 200), 600, 0.3)
    assert 90 < found[0][0] <= 100
    assert found[-1][0] < 300


def test_slow_growth_that_noise_hides_at_first_is_found_over_more_updates() -> None:
    found = named(lambda update: 900 + 0.1 * update, 3000, 5.0)
    assert found[0][0] > 300
    assert found[-1][1].per_unit == pytest.approx(0.1 * MIB, rel=0.2)


def test_growth_of_a_few_bytes_is_not_reported() -> None:
    assert named(lambda update: 900 + 0.02 * update, 400) == []


def test_memory_is_bounded() -> None:
    growth = Growth()
    named(lambda update: 900 + update, 2_000, growth=growth)
    early = len(pickle.dumps(growth))
    named(lambda update: 900 + update, 20_000, growth=growth)
    assert len(pickle.dumps(growth)) < 3 * early


def test_updates_that_are_seen_now_and_then_only() -> None:
    """The supervisor reads five times a second, which is every fortieth of these quick updates."""
    growth = Growth()
    for update in range(1, 4000, 40):
        growth.add(update, update / 200, update * MIB)
    assert growth.leaking is not None
    assert growth.leaking.per_unit == pytest.approx(MIB, rel=0.01)


def test_confidence_is_between_0_and_1() -> None:
    growth = Growth()
    for update in range(1, 400):
        growth.add(update, update, (500 + update % 3 * 10) * MIB)
        if growth.slope is not None:
            assert 0 <= growth.slope.confidence < CONFIDENT


def test_a_rate_counts_if_it_lasts_for_more_than_half_of_the_values() -> None:
    swapping = Sustained(10)
    for value in (0, 0, 5, 0):
        swapping.add(value)
    assert swapping.value is None  # too little is known
    swapping.add(0)
    assert swapping.value == 0  # one moment of it is not sustained
    for _ in range(8):
        swapping.add(4e6)
    assert swapping.value == 4e6
    assert swapping.share == 0.8
