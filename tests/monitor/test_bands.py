"""Bands and their hysteresis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtop.supervisor.monitor.sampler import Hysteresis
from memtop.supervisor.monitor.values import Band, band_of, mark


@pytest.mark.parametrize(
    ("fraction", "band"),
    [
        (None, Band.UNKNOWN),
        (float("nan"), Band.UNKNOWN),
        (0.0, Band.SAFE),
        (0.849, Band.SAFE),
        (0.85, Band.EDGE),
        (17 / 20, Band.EDGE),
        (0.87, Band.EDGE),
        (0.90, Band.EDGE),
        (9 / 10, Band.EDGE),
        (0.901, Band.DANGER),
        (1.0, Band.DANGER),
    ],
)
def test_band(fraction: float | None, band: Band) -> None:
    assert band_of(fraction) is band


def test_every_band_has_its_own_mark() -> None:
    assert [mark(band) for band in (Band.SAFE, Band.EDGE, Band.DANGER, Band.UNKNOWN)] == ["·", "^", "!!", "?"]


def bands(*fractions: float | None) -> list[str]:
    gauge = Hysteresis()
    return [gauge.update(fraction).value for fraction in fractions]


def test_the_first_value_decides_at_once() -> None:
    assert bands(0.851) == ["edge"]


def test_a_value_on_the_border_does_not_flicker() -> None:
    assert bands(0.848, 0.852, 0.849, 0.853, 0.848, 0.852) == ["safe"] * 6


def test_three_samples_beyond_the_border_change_the_band() -> None:
    assert bands(0.84, 0.851, 0.852, 0.851) == ["safe", "safe", "safe", "edge"]
    assert bands(0.91, 0.899, 0.899, 0.899) == ["danger", "danger", "danger", "edge"]


def test_one_percentage_point_changes_the_band_at_once() -> None:
    assert bands(0.84, 0.86) == ["safe", "edge"]
    assert bands(0.88, 0.91) == ["edge", "danger"]
    assert bands(0.95, 0.89) == ["danger", "edge"]
    assert bands(0.88, 0.84) == ["edge", "safe"]


def test_a_jump_over_both_borders_changes_the_band_at_once() -> None:
    assert bands(0.2, 0.99) == ["safe", "danger"]
    assert bands(0.99, 0.2) == ["danger", "safe"]


def test_a_jump_just_over_the_second_border_has_to_stay_there() -> None:
    assert bands(0.2, 0.905, 0.905, 0.905) == ["safe", "edge", "edge", "danger"]


def test_a_missing_sample_is_unknown_and_the_band_is_remembered() -> None:
    assert bands(0.84, None, 0.851) == ["safe", "unknown", "safe"]


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(0, 1))
def test_a_steady_value_has_its_band_after_three_samples(before: list[float], value: float) -> None:
    assert bands(*before, value, value, value)[-1] == band_of(value).value


@given(st.lists(st.floats(0.841, 0.859), min_size=2, max_size=2))
def test_two_samples_within_the_margin_never_change_the_band(values: list[float]) -> None:
    assert bands(0.5, *values) == ["safe"] * 3
