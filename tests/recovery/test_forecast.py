"""The peak at another batch from measured ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.presets.schema import Lora, Zero
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.forecast import PeakLine, forecast, line_through, peaks_of
from memtop.supervisor.recovery.values import Forecast, Peak
from tests.recovery.support import CARD, FIRST, GIB, LORA, T5, gib, measured, peak


def line(*points: tuple[int, float] | tuple[int, float, bool], base: float | None = None) -> PeakLine:
    found = why(*points, base=base)
    assert isinstance(found, PeakLine), found
    return found


def why(*points: Any, base: float | None = None) -> PeakLine | str:
    peaks = [Peak(batch=b, bytes=gib(size), updates=9, failed=bool(rest)) for b, size, *rest in points]
    return line_through(peaks, base_bytes=None if base is None else gib(base))


def test_two_batches_give_slope_and_base() -> None:
    found = line((16, 11.49), (32, 19.73, True))
    assert found.slope_bytes / GIB == pytest.approx(0.515, abs=1e-9)
    assert found.base_bytes / GIB == pytest.approx(3.25, abs=1e-6)
    # 11761 MiB is 11.485 GiB.
    assert line((16, 11761 / 1024), (32, 19.73, True)).base_bytes / GIB == pytest.approx(3.24, abs=0.005)
    assert found.at_least, "one of the two was a failure, which wanted more"


@pytest.mark.parametrize(
    ("batch", "size", "fraction", "band"),
    [
        *((20, 13.55, 0.69, Band.SAFE), (24, 15.61, 0.797, Band.SAFE), (26, 16.64, 0.850, Band.SAFE)),
        *((28, 17.67, 0.902, Band.DANGER), (32, 19.73, 1.008, Band.DANGER)),
    ],
)
def test_forecasts_at_other_batches(batch: int, size: float, fraction: float, band: Band) -> None:
    found = forecast(replace(T5, batch=batch), measured(), CARD)
    assert isinstance(found, Forecast)
    assert found.peak_bytes / GIB == pytest.approx(size, rel=0.001)
    assert found.fraction == pytest.approx(fraction, abs=0.003)
    assert found.band is band


@pytest.mark.parametrize("batch", [32, 40, 48, 64])
def test_a_batch_that_does_not_fit_is_forecast_above_the_gpu(batch: int) -> None:
    found = forecast(replace(T5, batch=batch), measured(), CARD)
    assert isinstance(found, Forecast)
    assert found.fraction is not None
    assert found.fraction > 1
    assert found.band is Band.DANGER
    if batch == 40:
        assert found.peak_bytes / GIB == pytest.approx(23.9, abs=0.1)


@given(accumulation=st.integers(1, 512))
def test_accumulation_never_changes_the_peak(accumulation: int) -> None:
    other = replace(T5, accumulation=accumulation)
    assert settings_key(other) == settings_key(T5)
    assert forecast(other, measured(), CARD) == forecast(T5, measured(), CARD)


def test_one_batch_needs_a_base() -> None:
    assert why((8, 5.0)) == "one measured peak is known (B 8); a forecast needs two batches"
    found = line((8, 5.0), base=1.0)
    assert (found.slope_bytes, found.base_bytes, found.at_least) == (gib(0.5), gib(1.0), False)
    assert found.at(4) == gib(3.0)
    assert found.forecast(4, CARD).basis == "one peak at B 8, measured base 1.0 GiB"


def test_a_failure_alone_is_a_lower_bound() -> None:
    assert why((8, 5.0, True)) == "one measured peak is known, cut short by the failure (B 8); a forecast needs two whole ones"
    found = line((8, 5.0, True), base=1.0)
    assert found.at_least
    assert found.at(4) == gib(3.0)
    assert found.basis.startswith("at least: the failure at B 8")
    assert not found.measured


def test_an_end_before_the_first_update_is_not_a_peak() -> None:
    loading = Peak(batch=16, bytes=gib(1), updates=0)
    real = [Peak(batch=batch, bytes=gib(size), updates=1) for batch, size in ((4, 3.0), (8, 5.0))]
    assert line_through([*real, loading]) == line_through(real)
    assert isinstance(line_through([real[0], loading]), str)


def test_without_a_measurement_the_reason_is_given() -> None:
    assert why() == "nothing was measured with these settings yet"


def test_a_forecast_at_a_measured_batch_is_the_measurement() -> None:
    found = line((4, 3.0), (8, 5.0), (16, 9.4))
    assert found.at(8) == gib(5.0)
    assert found.forecast(8, CARD).basis == "measured at B 8"
    assert found.forecast(12, CARD).basis == "line through peaks at B 4 and B 8 and B 16"


@pytest.mark.parametrize("stray", [0, 2, 4])
def test_one_outlier_does_not_move_the_line(stray: int) -> None:
    sizes = {2: 2.0, 4: 3.0, 8: 5.0, 12: 7.0, 16: 9.0}
    sizes[sorted(sizes)[stray]] += 0.8
    found = line(*sizes.items())
    assert found.at(32) / GIB == pytest.approx(17.0, abs=0.5)


def test_a_failure_lifts_the_line_and_never_lowers_it() -> None:
    plain = line((4, 3.0), (8, 5.0))
    lifted = line((4, 3.0), (8, 5.0), (16, 10.0, True))
    assert lifted.base_bytes - plain.base_bytes == gib(1.0)
    assert lifted.at(12) == plain.at(12) + gib(1.0)
    assert "lifted by 1.0 GiB" in lifted.basis
    assert lifted.at_least
    assert line((4, 3.0), (8, 5.0), (16, 4.0, True)).at(16) == plain.at(16)


def test_a_batch_that_ever_failed_is_no_measurement() -> None:
    found = line((4, 3.0), (8, 5.0), (16, 8.0), (16, 11.0, True))
    assert 16 not in found.measured
    assert found.at(16) >= gib(11.0)


def test_a_larger_batch_that_was_measured_is_a_ceiling_for_smaller_ones() -> None:
    found = line((4, 3.0), (8, 5.0), (16, 5.2))
    assert found.at(12) <= gib(5.2)
    assert found.at(6) >= gib(3.0)


def test_peaks_that_do_not_grow_give_no_line() -> None:
    assert why((4, 3.0), (8, 3.0)) == "the peak does not grow with the batch (B 4 and B 8)"
    assert isinstance(why((4, 3.0), (8, 2.0)), str)


def test_a_base_below_zero_is_noise() -> None:
    found = line((4, 3.0), (8, 9.0))
    assert found.base_bytes == 0
    assert found.at(16) == 2 * gib(9.0)


SIZES = st.floats(0.5, 60)


@given(
    base=st.floats(0.1, 20),
    slope=st.floats(0.01, 3),
    batches=st.lists(st.integers(1, 128), min_size=2, max_size=6, unique=True),
    failures=st.lists(st.tuples(st.integers(1, 256), SIZES), max_size=3),
)
def test_a_forecast_is_never_below_a_failure_and_grows_with_the_batch(
    base: float, slope: float, batches: list[int], failures: list[tuple[int, float]]
) -> None:
    found = why(*((b, base + slope * b) for b in batches), *((b, size, True) for b, size in failures))
    if isinstance(found, str):
        return
    clean = why(*((b, base + slope * b) for b in batches if b not in {b for b, _ in failures}))
    sizes = [found.at(batch) for batch in range(1, 300)]
    assert sizes == sorted(sizes)
    beyond = max(found.measured, default=0)
    for batch, size in failures:
        if batch > beyond:
            assert found.at(batch) >= gib(size) - 2
    if isinstance(clean, PeakLine) and len(clean.measured) >= 2:
        assert all(found.at(batch) >= clean.at(batch) - 2 for batch in range(1, 300)), "a failure lowered the line"


def test_an_estimate_is_named_as_one() -> None:
    found = line((16, 11.49), (32, 19.73)).with_activations(0.7, "checkpointing")
    assert found.forecast(32, CARD).basis.startswith("estimate: checkpointing")
    assert found.at(32) / GIB == pytest.approx(3.25 + 0.7 * 16.48, abs=0.01)
    assert not found.measured
    assert line((16, 11.49), (32, 19.73)).shifted(-gib(1), "moments").at(32) == pytest.approx(gib(18.73), abs=2)


def test_an_unknown_size_of_the_gpu_is_an_unknown_band() -> None:
    found = line((4, 3.0), (8, 5.0)).forecast(8, None)
    assert (found.fraction, found.band) == (None, Band.UNKNOWN)


SHAPING: list[dict[str, Any]] = [
    *({"seq_len": 512}, {"gradient_checkpointing": True}, {"zero": Zero(stage=2)}, {"loss_chunk": 0}, {"precision": "bf16"}),
    *({"allocator": "expandable_segments:True"}, {"model": {"path": "x"}}, {"optimizer": "adamw_8bit"}, {"compile": True}),
    *({"lora": Lora(r=8, alpha=16), "method": "lora"}, {"eval_every": 10, "eval_batch": 4}),
]


@pytest.mark.parametrize("changes", SHAPING)
def test_peaks_under_other_settings_are_not_on_the_line(changes: dict[str, Any]) -> None:
    other = replace(FIRST, **changes)
    assert settings_key(other) != settings_key(FIRST)
    assert peaks_of(other, [peak(FIRST, 4, 1.0)]) == ()
    assert forecast(other, [peak(FIRST, 4, 1.0), peak(FIRST, 8, 2.0)], CARD) == "nothing was measured with these settings yet"


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"batch": 4},
            {"accumulation": 9},
            {"learning_rate": 1e-5},
            {"save_every": 3},
            {"target_samples": 10},
            {"preset": "low"},
        ),
        *({"log_every": 7}, {"warmup_fraction": 0.5}, {"eval_every": 5}),
    ],
)
def test_settings_that_do_not_shape_the_peak_are_not_in_the_key(changes: dict[str, Any]) -> None:
    assert settings_key(replace(FIRST, **changes)) == settings_key(FIRST)


def test_workers_count_only_in_host_memory() -> None:
    more = replace(FIRST, workers=4)
    assert settings_key(more, on_gpu=True) == settings_key(FIRST, on_gpu=True)
    assert settings_key(more, on_gpu=False) != settings_key(FIRST, on_gpu=False)
    assert settings_key(replace(more, device="cpu")) != settings_key(replace(FIRST, device="cpu"))


def test_processes_count_if_they_share_state_or_communicate() -> None:
    def keyed(world: int, zero: Zero) -> str:
        return settings_key(replace(LORA, world_size=world, zero=zero))

    assert keyed(2, Zero()) == keyed(8, Zero()) != keyed(1, Zero())
    assert len({keyed(world, Zero(stage=2)) for world in (1, 2, 8)}) == 3
