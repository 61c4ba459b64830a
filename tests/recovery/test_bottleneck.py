"""What limits a run with a half-empty GPU, full RAM and swap in use, and which changes are
proposed or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.presets import load_presets, load_recipes, resolve
from memtop.presets.schema import Settings, Zero, exact_splits
from memtop.supervisor.monitor.values import Band, band_of
from memtop.supervisor.plan import Card
from memtop.supervisor.recovery.batch_trial import Split, Update, measured, split_refusal
from memtop.supervisor.recovery.bottleneck import Measured, advise, loader_processes, ram_band
from memtop.supervisor.recovery.configuration import applied
from memtop.supervisor.recovery.forecast import Estimates
from memtop.supervisor.recovery.values import Advice, Forecast

GIB = 1 << 30
MIB = 1 << 20
CARD = int(19.58 * GIB)
T5 = replace(
    resolve(load_recipes()["pretrain-t5"], preset=load_presets()["standard"]), batch=16, accumulation=8, world_size=3, workers=0
)

# Measurements of a real run. The parts of its update are assumed: the loader keeps up, since the
# GPUs are 100 % busy.
BUSY = Measured(
    updates=20,
    on_gpu=True,
    step_seconds=8.16,
    data_wait_seconds=0.2,
    forward_seconds=2.6,
    backward_seconds=5.2,
    optimizer_seconds=0.16,
    samples_per_second=47.1,
    utilization_fraction=1.0,
    power_fraction=0.9,
    gpu_fraction=11761 / 20480,
    gpu_free_bytes=(20480 - 11761) * MIB,
    host_fraction=30.8 / 32,
    host_total_bytes=32 * GIB,
    host_used_bytes=int(30.8 * GIB),
    available_at_start_bytes=int(28.06 * GIB),
    swap_fraction=2.1 / 4,
    swap_in_bytes_per_second=0.0,
    workers=0,
    cores=16,
)
ROOMY = replace(BUSY, host_fraction=0.5, host_used_bytes=16 * GIB, swap_fraction=0.0)


def line(batch: int) -> Forecast | None:
    """Peaks of 11761 MiB at B 16 and 18.50 + 1.23 GiB at B 32."""
    slope = (19.73 - 11761 / 1024) / 16
    size = int((19.73 + slope * (batch - 32)) * GIB)
    return Forecast(
        peak_bytes=size, total_bytes=CARD, fraction=size / CARD, band=band_of(size / CARD), basis="line through B 16 and B 32"
    )


def ids(measured: Measured, settings: Settings = T5, **more: Any) -> list[str]:
    return [remedy.id for remedy in advise(measured, settings, **more).proposals]


def test_the_evidence_is_computed_from_the_measurements() -> None:
    evidence = "\n".join(advise(BUSY, T5, line).evidence)
    assert "96.2 % used" in evidence or "96.3 % used" in evidence
    assert "52.5 % used" in evidence
    assert "57 % of its memory used" in evidence


def test_the_shares_of_an_update_add_up_to_100_and_the_speed_with_its_pauses_stands_apart() -> None:
    halves = {"data_wait_seconds": 0.105, "forward_seconds": 0.255, "backward_seconds": 0.635, "optimizer_seconds": 0.005}
    for of in (0.98, 1.0, 1.03):
        update, speed, *_ = advise(replace(BUSY, step_seconds=of, samples_per_second=3.1, **halves), T5, line).evidence
        shares = [int(share) for share in re.findall(r"(\d+) %", update)]
        assert sum(shares) == 100, update
        assert update.endswith("median of 20")
        assert speed == "3.1 samples/s over the newest updates: warm-up, evaluations and saves count, too"


def test_a_rank_that_does_next_to_nothing_keeps_less_than_a_tenth_of_a_core_busy() -> None:
    waiting = replace(BUSY, on_gpu=False, rank_cores=0.01)
    assert "keeps less than 0.1 CPU cores busy" in advise(waiting, T5, line).summary
    assert "keeps only 0.2 CPU cores busy" in advise(replace(waiting, rank_cores=0.2), T5, line).summary


def test_a_busy_gpu_that_does_not_wait_is_compute_bound() -> None:
    for values in ({}, {"power_fraction": None}, {"sm_active_fraction": 0.9}):
        advice = advise(replace(BUSY, **values), T5, line)
        assert advice.bottleneck == "compute"
        assert "waits for data" in advice.summary


@pytest.mark.parametrize("busy", [0.0, 0.3, 0.79, 0.8, 1.0])
def test_utilization_alone_never_decides(busy: float) -> None:
    without_split = replace(BUSY, data_wait_seconds=None, utilization_fraction=busy)
    advice = advise(without_split, T5, line)
    assert (advice.bottleneck, advice.proposals) == ("unknown", ())
    # A low utilization does not decide either, because it does not show how well kernels use the
    # GPU.
    kept_up = replace(BUSY, utilization_fraction=min(busy, 0.79), power_fraction=None)
    assert advise(kept_up, T5, line).bottleneck == "unknown"


def test_accumulation_slows_nothing_down() -> None:
    assert any("accumulation 8: so many passes make one update" in text for text in advise(BUSY, T5, line).evidence)
    # A small batch can leave the multiprocessors idle at any utilization.
    small = replace(BUSY, sm_active_fraction=0.2)
    assert advise(small, T5, line).bottleneck == "launch"
    assert advise(replace(BUSY, power_fraction=0.3), T5, line).bottleneck == "launch"


def test_doubling_the_batch_is_refused_with_its_forecast() -> None:
    advice = advise(replace(ROOMY, sm_active_fraction=0.2), T5, line)
    (reason,) = [text for text in advice.refused if text.startswith("batch 16 -> 32")]
    assert "predicted 100.8 %" in reason
    assert "larger_batch" not in [remedy.id for remedy in advice.proposals]
    # B 32 with A 2 would also halve the effective batch.
    assert "384 -> 192 (-50.0 %)" in str(split_refusal(T5, Split(batch=32, accumulation=2), line(32)))


def test_the_batch_grows_by_a_quarter_at_most_and_keeps_the_effective_batch() -> None:
    # 3 x 20 x 8 = 480 = 3 x 16 x 10: one step of a quarter.
    run = replace(T5, accumulation=10)
    (remedy,) = [one for one in advise(ROOMY, run, line).proposals if one.id == "larger_batch"]
    assert remedy.assignments == {"batch": "20", "accumulation": "8"}
    assert remedy.keeps_math
    assert remedy.predicted_peak_bytes == pytest.approx(13.55 * GIB, rel=0.01)
    # Without a prediction it is not proposed.
    assert "larger_batch" not in ids(ROOMY, run)
    assert any("cannot be predicted yet" in text for text in advise(ROOMY, run).refused)


@given(batch=st.integers(1, 64), accumulation=st.integers(1, 64), world=st.integers(1, 8), base=st.floats(1, 15))
def test_every_proposed_batch_keeps_the_effective_batch_and_stays_below_the_limit(
    batch: int, accumulation: int, world: int, base: float
) -> None:
    run = replace(T5, batch=batch, accumulation=accumulation, world_size=world)

    def forecast(size: int) -> Forecast:
        fraction = (base + 0.2 * size) / 20
        return Forecast(peak_bytes=int(fraction * CARD), total_bytes=CARD, fraction=fraction, basis="line")

    for remedy in advise(ROOMY, run, forecast).proposals:
        if remedy.id == "larger_batch":
            new = {name: int(value) for name, value in remedy.assignments.items()}
            assert new["batch"] * new["accumulation"] * world == run.effective_batch
            assert batch < new["batch"]
            is_next = not any(batch < size < new["batch"] for size, _ in exact_splits(run.effective_batch, world))
            limit = 0.85 if new["batch"] <= 1.25 * batch else 0.70 if is_next else 0.0
            assert forecast(new["batch"]).fraction < limit  # type: ignore[operator]


def test_workers_are_counted_over_all_processes() -> None:
    assert loader_processes(6, 3) == 18


def test_workers_are_refused_while_ram_is_full_and_proposed_within_a_budget() -> None:
    waiting = replace(BUSY, data_wait_seconds=4.0)
    assert advise(waiting, T5, line).bottleneck == "data"
    assert "workers" not in ids(waiting)
    assert any(text.startswith("more loader workers: each needs host memory") for text in advise(waiting, T5).refused)
    for fraction in (0.81, 0.86, 0.95):
        full = replace(waiting, host_fraction=fraction, host_used_bytes=int(fraction * 32 * GIB))
        assert "workers" not in ids(full)
    roomy = replace(ROOMY, data_wait_seconds=4.0, worker_bytes=2 * GIB)
    (remedy,) = [one for one in advise(roomy, T5).proposals if one.id == "workers"]
    # 80 % of 32 GiB less 16 in use: 9.6 GiB for 3 processes with 2 GiB each.
    assert remedy.assignments == {"workers": "1"}
    assert "3 in all" in remedy.title
    cheap = replace(roomy, worker_bytes=300 * MIB)
    assert [one.assignments for one in advise(cheap, T5).proposals if one.id == "workers"] == [{"workers": "2"}]


def test_memory_available_at_the_start_and_now_are_both_shown() -> None:
    (text,) = [text for text in advise(BUSY, T5).evidence if text.startswith("host memory")]
    assert "available at the start 28.1 GiB, now 1.2 GiB" in text


def test_speed_is_compared_in_samples() -> None:
    # 200 micro-steps in 204 s; a step of twice the size in 0.6 s is not 70 % faster but 3.4 times
    # as fast.
    before = measured([Update(number=1, samples=16 * 3, seconds=204 / 200)])["samples_per_second"]
    after = measured([Update(number=1, samples=32 * 3, seconds=0.6)])["samples_per_second"]
    assert before == pytest.approx(47.1, abs=0.05)
    assert after == pytest.approx(160)
    assert after / before == pytest.approx(3.4, abs=0.01)


def test_no_proposal_changes_training() -> None:
    for wait in (0.1, 4.0):
        for host in (BUSY, ROOMY):
            for swap in (0.0, 8 * MIB):
                values = replace(host, data_wait_seconds=wait, swap_in_bytes_per_second=swap, sm_active_fraction=0.2)
                assert all(one.keeps_math for one in advise(values, replace(T5, accumulation=10), line).proposals)


def test_a_batch_beyond_the_gpu_and_offload_are_refused_with_reasons() -> None:
    # B 40 at B x A = 120: 3 x 40 x 3.
    run = replace(T5, batch=20, accumulation=6)
    assert "predicted 121.8 %" in str(split_refusal(run, Split(batch=40, accumulation=3), line(40)))
    reasons = advise(BUSY, T5, line).refused
    assert any(text.startswith("optimizer offload: it moves gigabytes into host memory, which is at 96") for text in reasons)
    offloading = replace(T5, zero=Zero(stage=2, offload_optimizer=True))
    assert "offload_off" in ids(BUSY, offloading)
    assert "offload_off" not in ids(replace(BUSY, gpu_fraction=0.75), offloading)
    for world, then in ((3, Zero(stage=2)), (1, Zero())):
        (back,) = [one for one in advise(BUSY, replace(offloading, world_size=world)).proposals if one.id == "offload_off"]
        assert applied(offloading, back).zero == then


def test_taking_an_offload_back_is_judged_by_the_forecast_of_what_the_gpu_then_holds() -> None:
    offloading = replace(T5, world_size=1, zero=Zero(stage=2, offload_optimizer=True))

    def asked(total: int, settings: Settings = offloading) -> Advice:
        return advise(
            replace(BUSY, gpu_fraction=0.75), settings, line, estimates=Estimates(card=Card(total_bytes=total, generation=86))
        )

    (back,) = [one for one in asked(40 * GIB).proposals if one.id == "offload_off"]
    assert back.forecast is not None
    own = Estimates(card=Card(total_bytes=40 * GIB, generation=86)).forecast(applied(offloading, back))
    assert isinstance(own, Forecast)
    assert back.forecast == own
    assert back.title == "optimizer offload off"
    tight = asked(back.forecast.peak_bytes)
    assert "offload_off" not in [one.id for one in tight.proposals]
    (why,) = [text for text in tight.refused if text.startswith("optimizer offload off: predicted ")]
    assert why.endswith("estimate), the limit is 85 %")
    # Without an estimate, three quarters in use are too much.
    unknown = replace(offloading, model={"config": {"model_type": "mamba"}})
    assert (
        "optimizer offload off: 75 % of the GPU is already used, so the optimizer may not fit"
        in asked(40 * GIB, unknown).refused
    )


@pytest.mark.parametrize(
    ("fraction", "band"),
    [
        (0.5, Band.SAFE),
        (0.799, Band.SAFE),
        (0.80, Band.EDGE),
        (0.87, Band.EDGE),
        (0.90, Band.EDGE),
        (0.901, Band.DANGER),
        (0.94, Band.DANGER),
    ],
)
def test_the_bands_of_host_memory(fraction: float, band: Band) -> None:
    assert ram_band(fraction) is band
    assert ram_band(fraction, 0.0) is band
    # Any sustained swap-in is danger, however much is available.
    assert ram_band(fraction, 1.0) is Band.DANGER
    assert ram_band(None) is Band.UNKNOWN


def test_pinning_costs_host_memory_only() -> None:
    unpinned = replace(T5, pin_memory=False)
    (remedy,) = [one for one in advise(replace(ROOMY, data_wait_seconds=4.0), unpinned).proposals if one.id == "pin_memory"]
    assert "costs host memory only" in remedy.why
    assert "pin_memory" not in ids(replace(BUSY, data_wait_seconds=4.0), unpinned)


def test_swapping_is_reported_before_any_other_bottleneck() -> None:
    swapping = replace(BUSY, swap_in_bytes_per_second=6.0 * MIB, data_wait_seconds=5.0)
    advice = advise(swapping, replace(T5, workers=4), line)
    assert advice.bottleneck == "swap"
    assert [remedy.id for remedy in advice.proposals] == ["host_level", "fewer_workers"]
    assert any("larger micro-batch" in text for text in advice.refused)
    # Slow swapping counts if tasks wait for memory, and does not otherwise.
    assert advise(replace(swapping, swap_in_bytes_per_second=2e5, pressure_fraction=0.2), T5).bottleneck == "swap"
    assert advise(replace(BUSY, swap_in_bytes_per_second=2e5, pressure_fraction=0.0), T5).bottleneck == "compute"


def test_on_the_cpu_a_loader_that_keeps_up_means_arithmetic() -> None:
    cpu = Measured(updates=20, on_gpu=False, step_seconds=0.5, data_wait_seconds=0.01, host_fraction=0.4, rank_cores=1.9)
    assert advise(cpu, T5).bottleneck == "compute"
    words = "only 2 % of each update waits for data, but a rank keeps only 0.1 CPU cores busy: it waits for something else"
    assert advise(replace(cpu, rank_cores=0.1), T5).summary == f"not known: {words}"
    assert advise(replace(cpu, rank_cores=None), T5).bottleneck == "unknown"
    work, cores = "compute-bound: only 2 % of each update waits for data", "a rank keeps 1.9 CPU cores busy"
    assert advise(replace(cpu, other_cpu_fraction=0.1), T5).summary == f"{work}, and {cores}"
    shared = advise(replace(cpu, other_cpu_fraction=0.43), T5)
    assert (shared.bottleneck, shared.summary) == (
        "compute",
        f"{work}, {cores}, and other programs use 43 % of the machine's CPU",
    )
    assert advise(replace(cpu, data_wait_seconds=0.2), T5).bottleneck == "data"


def test_too_few_updates_give_no_advice() -> None:
    advice = advise(replace(BUSY, updates=3), T5, line)
    assert advice.bottleneck == "unknown"
    assert "3 updates" in advice.summary


def test_nothing_is_proposed_for_an_external_command() -> None:
    advice = advise(replace(BUSY, data_wait_seconds=4.0), None)
    assert (advice.bottleneck, advice.proposals) == ("data", ())
