"""The peak at another batch from measured ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.presets import Settings
from memtop.presets.choosing import COMMUNICATION_BYTES
from memtop.presets.estimate import estimate
from memtop.presets.host_estimate import host_estimate
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Lora, Zero
from memtop.supervisor.monitor.values import Band, GpuProcess, GpuSample, HostSample
from memtop.supervisor.plan import SURE, Card, Need, estimated
from memtop.supervisor.recovery.configuration import applied, settings_key
from memtop.supervisor.recovery.forecast import Estimates, forecaster_of
from memtop.supervisor.recovery.peak_line import PeakLine, forecast, line_through, peaks_of
from memtop.supervisor.recovery.situation import HostFacts
from memtop.supervisor.recovery.values import Forecast, Peak
from memtop.supervisor.wire import Configuration, Phase, RunState
from tests.recovery.support import CARD, FIRST, GIB, LORA, T5, T5_OOM, climb, gib, ids, measured, named, peak


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


@given(accumulation=st.integers(2, 512))
def test_how_much_accumulates_never_changes_the_peak(accumulation: int) -> None:
    other = replace(T5, accumulation=accumulation)
    assert settings_key(other) == settings_key(T5)
    assert forecast(other, measured(), CARD) == forecast(T5, measured(), CARD)


def test_without_accumulation_no_gradients_stay_so_the_peak_is_another() -> None:
    """The estimate says so, and a peak with A = 1 is not taken for one with A > 1."""

    def reserved(settings: Settings) -> int:
        return estimate(settings, settings.model["config"], generation=86).reserved

    assert T5.accumulation > 1
    once = replace(T5, accumulation=1)
    assert reserved(once) < 0.96 * reserved(T5)
    assert reserved(replace(T5, accumulation=T5.accumulation + 3)) == reserved(T5)
    assert settings_key(once) != settings_key(T5)
    assert forecast(once, measured(), CARD) == "nothing was measured with these settings yet"
    # Of several processes with their own split, one that accumulates is enough.
    mixed = replace(T5, world_size=2, rank_splits=((T5.batch, 1), (4, 2)))
    assert mixed.accumulates
    assert not replace(mixed, rank_splits=((T5.batch, 1), (4, 1))).accumulates
    on = Card(total_bytes=24 * GIB, generation=86)
    low = Peak(batch=T5.batch, bytes=2 * GIB, updates=9, settings_key=settings_key(once, on_gpu=True))
    found = Estimates(card=on, known=((once, low),)).forecast(T5)
    assert isinstance(found, Forecast)
    assert found.peak_bytes > low.bytes
    assert not found.basis.startswith("measured")


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
    assert (found.forecast(8, CARD).source, found.forecast(8, CARD).basis) == ("measured", "measured at B 8")
    drawn = found.forecast(12, CARD)
    assert (drawn.source, drawn.basis) == ("line", "line through peaks at B 4 and B 8 and B 16")


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
    drawn = found.forecast(32, CARD)
    assert drawn.source == "estimate"
    assert drawn.basis.startswith("estimate: checkpointing")
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


# --- by the estimate ------------------------------------------------------------------------------

CONTEXT = gib(0.3)
A20 = Card(total_bytes=CARD, generation=86, context_bytes=CONTEXT)


def need(settings: Settings) -> Need:
    found = estimated(settings, A20)
    assert isinstance(found, Need), found
    return found


def known(settings: Settings, scale: float, *, failed: bool = False) -> tuple[Settings, Peak]:
    """A measured peak that is so many times its estimate."""
    size = round(need(settings).reserved * scale) + CONTEXT
    key = settings_key(settings, on_gpu=True)
    return settings, Peak(batch=settings.batch, bytes=size, updates=9, failed=failed, outside_bytes=CONTEXT, settings_key=key)


def by_estimate(settings: Settings, *peaks: tuple[Settings, Peak]) -> Forecast:
    found = Estimates(card=A20, known=peaks).forecast(settings)
    assert isinstance(found, Forecast), found
    return found


def test_without_a_measurement_the_estimate_has_its_known_errors() -> None:
    found = by_estimate(T5)
    size, outside = need(T5).reserved, CONTEXT + COMMUNICATION_BYTES
    assert (found.peak_bytes, found.source, found.basis, found.total_bytes) == (size + outside, "estimate", "estimate", CARD)
    assert (found.least_bytes, found.most_bytes) == tuple(round(size * part) + outside for part in SURE["estimate"])


def test_a_measured_peak_scales_the_estimate_of_another_batch_and_makes_it_surer() -> None:
    small = replace(T5, batch=8, accumulation=8)
    found = by_estimate(T5, known(small, 1.1))
    assert found.basis == "estimate, calibrated at B 8"
    assert found.peak_bytes == pytest.approx(need(T5).reserved * 1.1 + CONTEXT, rel=1e-6)
    rough = by_estimate(T5)
    width = [(one.most_bytes or 0) - (one.least_bytes or 0) for one in (found, rough)]
    assert width[0] < width[1]
    two = by_estimate(T5, known(small, 1.1), known(replace(T5, batch=4), 0.9))
    assert two.basis == "estimate, calibrated at B 4 and B 8"
    assert two.peak_bytes == pytest.approx(need(T5).reserved + CONTEXT, rel=1e-6)
    assert (two.most_bytes or 0) - (two.least_bytes or 0) > width[0], "the residuals differ"


def test_peaks_with_the_same_settings_count_more_than_those_with_others() -> None:
    other = replace(T5, gradient_checkpointing=True)
    assert by_estimate(T5, known(other, 0.8)).basis == "estimate, calibrated at B 32 with other settings"
    both = by_estimate(T5, known(other, 0.8), known(replace(T5, batch=8), 1.1))
    assert both.basis == "estimate, calibrated at B 8"


def test_a_failure_lifts_the_estimate_and_never_lowers_it() -> None:
    small = replace(T5, batch=8)
    kept = by_estimate(small, known(T5, 0.5, failed=True))
    assert (kept.peak_bytes, kept.basis) == (need(small).reserved + CONTEXT, "estimate")
    lifted = by_estimate(small, known(T5, 1.2, failed=True))
    assert lifted.peak_bytes == pytest.approx(need(small).reserved * 1.2 + CONTEXT, rel=1e-6)
    assert lifted.basis == "estimate; lifted, because it needed more than foreseen when it ran out of memory"
    expandable = replace(small, allocator="expandable_segments:True")
    assert "lifted" not in by_estimate(expandable, known(T5, 1.2, failed=True)).basis, "fragments may have been the cause"


def test_what_was_measured_bounds_the_estimate() -> None:
    assert by_estimate(T5, known(T5, 1.1)).basis == "measured at B 32"
    assert by_estimate(T5, known(T5, 1.1)).least_bytes is None
    peaks = known(replace(T5, batch=16), 2.0), known(replace(T5, batch=48), 0.7)
    found = by_estimate(T5, *peaks)
    assert peaks[0][1].bytes <= found.peak_bytes == found.least_bytes == found.most_bytes


def test_it_foresees_the_failure_of_a_real_run_from_its_peak_at_half_the_batch() -> None:
    half, whole = measured()
    found = by_estimate(T5, (replace(T5, batch=16), half))
    assert found.band in (Band.EDGE, Band.DANGER), "it ran out of memory there"
    assert (found.most_bytes or 0) > max(whole.bytes, CARD)
    safe = by_estimate(replace(T5, batch=24), (replace(T5, batch=16), half))
    assert (safe.least_bytes or 0) < gib(15.61) < (safe.most_bytes or 0)


def test_an_unknown_architecture_gives_both_reasons() -> None:
    odd = replace(T5, model={"config": {"model_type": "mamba"}})
    found = forecaster(odd).predicted(odd)
    assert isinstance(found, str)
    assert found.startswith("nothing was measured with these settings yet; no estimate: model.config.model_type mamba")
    gone = replace(T5, model={"path": "nobody/has-this"})
    assert forecaster(gone).predicted(gone) == (
        "nothing was measured with these settings yet; no estimate: what the model is made of is not known before it is loaded"
    )


def forecaster(settings: Settings, *peaks: tuple[Settings, Peak], **fields: Any) -> Any:
    gpu = GpuSample(index=0, uuid="GPU-1", total_bytes=CARD, free_bytes=CARD - gib(5), **fields)
    rows = [
        Configuration(number=number, attempt=1, started=0, reason="", settings=of, peak=peak)
        for number, (of, peak) in enumerate(peaks, 1)
    ]
    run = RunState(name="one", folder="", state=Phase.TRAINING, alive=True, created=0, settings=settings)
    return forecaster_of(run, rows, [gpu], HostSample(total_bytes=64 * GIB))


def test_the_line_of_two_measured_batches_comes_before_the_estimate() -> None:
    peaks = known(replace(T5, batch=4), 1.0), known(replace(T5, batch=8), 1.0)
    found = forecaster(T5, *peaks).predicted(T5)
    assert found.basis == "line through peaks at B 4 and B 8"
    one = forecaster(T5, peaks[0]).predicted(T5)
    assert one.basis == "estimate, calibrated at B 4"


def test_what_other_processes_hold_counts_unless_the_runs_own_is_not_known() -> None:
    own, other = (GpuProcess(pid=pid, used_bytes=gib(size), run=run) for pid, size, run in ((1, 3, "one"), (2, 2, None)))
    found = forecaster(T5, processes=(own, other)).predicted(T5)
    assert found.fraction == pytest.approx((found.peak_bytes + gib(2)) / CARD)
    for processes in ((), (other,), (replace(own, used_bytes=None), other)):
        alone = forecaster(T5, processes=processes).predicted(T5)
        assert alone.fraction == pytest.approx(alone.peak_bytes / CARD)


ON_CPU = replace(T5, device="cpu", batch=4, accumulation=16)


def on_host(*peaks: Peak, settings: Settings = ON_CPU, held: float = 6.0, **fields: Any) -> Any:
    """Of a run with 2 GiB on a machine of 64 GiB, of which `held` are used in all."""
    rows = [
        Configuration(number=number, attempt=1, started=0, reason="", settings=replace(settings, batch=of.batch), peak=of)
        for number, of in enumerate(peaks, 1)
    ]
    run = RunState(name="one", folder="", state=Phase.TRAINING, alive=True, created=0, settings=settings, **fields)
    return forecaster_of(run, rows, [], HostSample(total_bytes=64 * GIB, used_bytes=gib(held)))


def host_peak(batch: int, size: float, **fields: Any) -> Peak:
    key = settings_key(replace(ON_CPU, batch=batch), on_gpu=False)
    return Peak(batch=batch, bytes=gib(size), settings_key=key, **{"updates": 9, **fields})


def test_on_the_cpu_the_estimate_of_a_plan_foresees_host_memory_with_what_others_hold() -> None:
    found = on_host(run_rss_bytes=gib(2)).predicted(ON_CPU)
    plan = host_estimate(ON_CPU, stored_config(ON_CPU) or {}, on_gpu=False, available=60 * GIB)
    assert (found.peak_bytes, found.least_bytes, found.most_bytes) == (plan.peak, plan.least, plan.most)
    assert found.fraction == pytest.approx((plan.peak + gib(4)) / (64 * GIB))
    assert found.basis == "estimate; other processes hold 4.0 GiB"
    measured_now = on_host(host_peak(4, 2.0), run_rss_bytes=gib(2)).measured(ON_CPU)
    assert measured_now.fraction == pytest.approx(gib(6) / (64 * GIB))
    unknown = on_host().predicted(ON_CPU)
    assert unknown.fraction == pytest.approx(unknown.peak_bytes / (64 * GIB)), "what the run holds is not known"
    odd = replace(ON_CPU, model={"config": {"model_type": "mamba"}})
    assert "; no estimate: model.config.model_type mamba" in on_host(settings=odd).predicted(odd)


def test_on_the_cpu_a_measured_peak_raises_the_estimate_and_never_lowers_it() -> None:
    eight = replace(ON_CPU, batch=8, accumulation=8)
    plain = on_host().predicted(eight).peak_bytes
    of_four = host_estimate(ON_CPU, stored_config(ON_CPU) or {}, on_gpu=False, available=64 * GIB).peak / GIB
    assert on_host(host_peak(4, of_four / 2)).predicted(eight).peak_bytes == plain
    assert on_host(host_peak(4, 2 * of_four, updates=0)).predicted(eight).peak_bytes == plain, "it had no update"
    for more in (host_peak(4, 2 * of_four), host_peak(4, 2 * of_four, failed=True)):
        raised = on_host(more).predicted(eight)
        assert raised.peak_bytes == pytest.approx(2 * plain, rel=1e-6)
        assert raised.basis == "estimate; raised, because the run has needed more than foreseen"
    earlier = on_host(host_peak(8, 3.0), host_peak(4, of_four)).predicted(eight)
    assert earlier.basis.startswith("line through peaks") or earlier.is_measured
    assert earlier.peak_bytes == gib(3)


# --- in the remedies ------------------------------------------------------------------------------


def test_the_estimate_chooses_the_smaller_batch_and_is_what_remedies_say() -> None:
    estimates = Estimates(card=A20, config=None)
    found = climb(T5_OOM, T5, estimates=estimates)
    split = named(found, "smaller_batch")
    assert split.forecast is not None
    assert split.forecast.basis.startswith("estimate")
    assert split.assignments == {"batch": "16", "accumulation": "4"}
    assert named(found, "checkpointing").forecast is not None
    # What is near the limit comes after what is not.
    near = [one.forecast is not None and (one.forecast.fraction or 0) >= 0.85 for one in found.remedies if one.keeps_math]
    assert near == sorted(near)
    # A card of half the size: no more than a quarter of the batch is safe.
    small = climb(replace(T5_OOM, total_bytes=CARD // 2), T5, estimates=estimates)
    assert int(named(small, "smaller_batch").assignments["batch"]) < 16


def test_under_zero_and_with_an_offload_the_estimate_comes_before_a_line_made_by_hand() -> None:
    """The run has measured half the batch, so there would be a line for each."""
    half, whole = measured()
    estimates = Estimates(card=A20, known=((replace(T5, batch=16), half),))
    for zero in (Zero(), Zero(stage=2), Zero(stage=3)):
        settings = replace(T5, world_size=3, zero=zero)
        peaks = [replace(one, settings_key=settings_key(settings, on_gpu=True)) for one in (half, whole)]
        found = climb(T5_OOM, settings, peaks=peaks, estimates=estimates, host=HostFacts(available_bytes=64 * GIB))
        offload = named(found, "offload_optimizer")
        assert offload.forecast is not None
        assert offload.forecast.basis.startswith("estimate, calibrated at B 16"), zero
        after = applied(settings, offload)
        rough = estimated(after, A20)
        assert isinstance(rough, Need)
        assert after.zero.offload_optimizer
        # Adam's moments are gone, shared or not.
        own = estimated(settings, A20)
        assert isinstance(own, Need)
        assert rough.reserved < own.reserved


def test_a_remedy_that_is_forecast_near_the_limit_is_the_last_of_those_without_consent() -> None:
    small = replace(T5, batch=2, accumulation=32)
    tight = replace(T5_OOM, total_bytes=gib(3.3), process_bytes=gib(3.2), requested_bytes=gib(0.1), requested_logits=None)
    found = climb(tight, small, estimates=Estimates(card=A20))
    without = [one for one in found.remedies if not one.needs_consent]
    fractions = [0.0 if one.forecast is None else one.forecast.fraction or 0.0 for one in without]
    assert any(fraction >= 0.85 for fraction in fractions), ids(found)
    assert [fraction >= 0.85 for fraction in fractions] == sorted(fraction >= 0.85 for fraction in fractions)
