"""A run learns from what earlier runs of the same model have measured on such a GPU."""

from __future__ import annotations

import asyncio
import errno
import math
import re
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.presets import Settings
from memtop.presets.choosing import COMMUNICATION_BYTES, CONTEXT_BYTES
from memtop.presets.measured import ENOUGH_UPDATES, KEPT, GpuKind, Learned, Measured, learned, model_key, place, remember
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Zero
from memtop.supervisor import units
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.plan import SURE, Card, Need, estimated, peak_of
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.forecast import Estimates, estimates_on, forecaster_of, forecaster_on, spread, words_at_launch
from memtop.supervisor.recovery.values import Forecast, Peak
from memtop.supervisor.run.effects import Foresee, SaveConfigurations
from memtop.supervisor.run.events import Now, Sampled
from memtop.supervisor.run.measurements import Measurements
from memtop.supervisor.run.performer import Performer
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.wire import Configuration, Phase, RunState
from tests.conftest import Runs, wait_for_file
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.recovery.injected import TINY, inject
from tests.recovery.support import FIRST, LORA, T5
from tests.run.brain import HELLO, PLAN, STEP, Brain, training

MIB, GIB = 1 << 20, 1 << 30
A4500 = GpuKind("A4500", 20 * GIB)
CARD = Card(total_bytes=20 * GIB, generation=86, kind=A4500)
ONE = replace(T5, world_size=1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def need(settings: Settings) -> Need:
    found = estimated(settings, CARD)
    assert isinstance(found, Need), found
    return found


def row(settings: Settings, ratio: float = 1.0, **values: Any) -> Measured:
    """A run whose peak was so many times its estimate."""
    model = model_key(stored_config(settings) or {})
    known = {"run": "/runs/a", "time": 1.0, "gpu": A4500, "torch": "2.8.0", "model": model, "updates": ENOUGH_UPDATES}
    return Measured(**{**known, "settings": settings, "reserved_bytes": round(need(settings).reserved * ratio), **values})


def by(settings: Settings, *rows: Measured) -> Forecast:
    found = Estimates(card=CARD, learned=Learned(rows=rows)).forecast(settings)
    assert isinstance(found, Forecast), found
    return found


def named(count: int, ratios: list[float], first: Settings = ONE) -> list[Measured]:
    """Runs with other settings than `first`, each of its own."""
    settings = [replace(first, seq_len=first.seq_len // 2, batch=first.batch - number) for number in range(count)]
    return [row(one, ratio, run=f"/runs/{n}") for n, (one, ratio) in enumerate(zip(settings, ratios, strict=True))]


# --- what is kept ---------------------------------------------------------------------------------


def test_what_is_remembered_is_read_for_such_a_gpu_and_torch() -> None:
    assert learned(A4500) == Learned()
    rows = [row(ONE), row(replace(ONE, batch=8), torch="2.9.1+cu128"), row(ONE, gpu=GpuKind("A4000", 16 * GIB))]
    for one in rows:
        remember(one)
    # The driver and torch count the memory of a GPU with a small difference.
    assert learned(GpuKind("A4500", 20 * GIB - 200 * MIB)).rows == (rows[0], rows[1])
    assert learned(A4500, "2.8.0+cu126").rows == (rows[0],)
    assert learned(GpuKind("A4500", 24 * GIB)).rows == ()
    assert learned(A4500, without="/runs/a").rows == ()
    assert learned(None) == Learned()


def test_the_highest_peak_of_the_same_is_kept_and_the_oldest_rows_are_dropped() -> None:
    remember(row(ONE, 1.1, outside_bytes=300 * MIB))
    higher = row(replace(ONE, accumulation=9), 1.2, run="/runs/b", outside_bytes=None)
    remember(higher)
    assert learned(A4500).rows == (replace(higher, outside_bytes=300 * MIB),)
    short = row(ONE, 0.45, run="/runs/short", time=2.0, updates=3, outside_bytes=320 * MIB)
    remember(short)
    assert learned(A4500).rows == (replace(higher, settings=ONE, time=2.0, outside_bytes=320 * MIB),)
    failed = row(ONE, 0.9, failed=True)
    remember(failed)
    apart = [row(replace(ONE, world_size=2)), row(replace(ONE, accumulation=1)), row(ONE, torch="2.9.0")]
    for one in apart:
        remember(one)
    assert list(learned(A4500).rows[1:]) == [failed, *apart], "they measure something else"
    for number in range(KEPT):
        remember(replace(row(ONE), settings=replace(ONE, seq_len=2 + number)))
    assert len(learned(A4500).rows) == KEPT
    assert failed not in learned(A4500).rows


def test_a_row_that_cannot_be_read_is_left_out_and_named() -> None:
    remember(row(ONE))
    path = place()
    assert path is not None
    path.write_bytes(b'{"half\n' + path.read_bytes() + b'{"run": 3}\n')
    found = learned(A4500)
    assert found.rows == (row(ONE),)
    assert found.problem is not None
    assert found.problem.startswith(f"{path}: line 1 is left out: ")
    remember(row(replace(ONE, batch=8)))
    assert (len(learned(A4500).rows), learned(A4500).problem) == (2, found.problem)
    lines = path.read_bytes().splitlines()
    assert (len(lines), lines[0], lines[2]) == (4, b'{"half', b'{"run": 3}'), "a newer version may know them"
    path.write_bytes(b"odd\n" * 2 * KEPT)
    remember(row(ONE))
    assert len(path.read_bytes().splitlines()) == KEPT
    path.unlink()
    path.mkdir()
    assert learned(A4500) == Learned(problem=f"{path}: cannot be read: Is a directory")


def test_a_file_that_cannot_be_read_or_replaced_stays_and_nothing_is_left_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(row(ONE))
    path = place()
    assert path is not None
    before, plain = path.read_bytes(), Path.read_bytes

    def no_read(self: Path) -> bytes:
        if self == path:
            raise OSError(errno.ESTALE, "Stale file handle")
        return plain(self)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", no_read)
        with pytest.raises(OSError, match="Stale"):
            remember(row(replace(ONE, batch=8)))
    assert path.read_bytes() == before
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
        with pytest.raises(OSError, match="no space"):
            remember(row(replace(ONE, batch=8)))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("odd", [{"reserved_bytes": 0}, {"reserved_bytes": -1}, {"outside_bytes": -1}, {"updates": -1}])
def test_a_row_with_an_odd_number_is_left_out(odd: dict[str, int]) -> None:
    remember(row(ONE))
    path = place()
    assert path is not None
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(row(ONE)) | odd))
    found = learned(A4500)
    assert found.rows == ()
    assert found.problem is not None
    assert (
        f"line 1 is left out: Expected `int` >= {1 if 'reserved_bytes' in odd else 0} - at `$.{next(iter(odd))}`"
        in found.problem
    )


def test_a_model_is_known_by_its_configuration_whatever_wrote_it() -> None:
    config = {"model_type": "llama", "hidden_size": 64}
    assert model_key(config) == model_key(
        {"hidden_size": 64, "model_type": "llama", "_name_or_path": "/x", "transformers_version": "5"}
    )
    assert model_key(config) != model_key({**config, "hidden_size": 128})


# --- what it changes in a forecast ----------------------------------------------------------------


def test_an_earlier_run_with_these_settings_counts_most_then_one_with_another_batch_then_one_of_the_model() -> None:
    other = row(replace(ONE, gradient_checkpointing=not ONE.gradient_checkpointing), 1.4, run="/runs/other")
    near = row(replace(ONE, batch=ONE.batch // 2), 1.2, run="/runs/near")
    same = row(replace(ONE, accumulation=7), 1.1, run="/runs/same")
    size = need(ONE).reserved
    for rows, ratio, basis in (
        ([other], 1.4, "estimate, calibrated by 1 earlier run of this model"),
        ([other, near], 1.2, "estimate, calibrated by 1 earlier run with another batch"),
        ([other, near, same], 1.1, "estimate, calibrated by 1 earlier run with these settings"),
    ):
        found = by(ONE, *rows)
        assert found.basis == basis
        assert found.peak_bytes == pytest.approx(size * ratio + CARD.context_bytes, rel=1e-6)
        assert not found.is_measured, "this run has measured nothing"
        # One ratio moves the middle; the range stays that of any calibrated estimate.
        least, most = SURE["calibrated"]
        assert found.least_bytes == pytest.approx(size * ratio * least + CARD.context_bytes, rel=1e-6)
        assert found.most_bytes == pytest.approx(size * ratio * most + CARD.context_bytes, rel=1e-6)


def test_another_model_or_method_says_nothing() -> None:
    lora = replace(LORA, model=ONE.model)
    for one in (row(FIRST, 1.5), replace(row(ONE, 1.5), settings=lora)):
        assert by(ONE, one).basis == "estimate"


OTHER_DATA = replace(ONE, data={**ONE.data, "train": "/other.parquet"})
ALIKE = {"same": ONE, "near": replace(ONE, batch=2 * ONE.batch), "model": replace(ONE, gradient_checkpointing=True)}


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        *((one, updates) for one in ALIKE.values() for updates in (None, 2, ENOUGH_UPDATES - 1)),
        (OTHER_DATA, ENOUGH_UPDATES),
        (replace(ONE, packing=not ONE.packing), ENOUGH_UPDATES),
        (replace(ONE, seq_len=2 * ONE.seq_len), ENOUGH_UPDATES),
        (replace(ONE, gradient_checkpointing=True, batch=2 * ONE.batch), ENOUGH_UPDATES),
    ],
)
def test_samples_that_may_have_been_shorter_than_others_raise_a_forecast_and_never_lower_it(
    settings: Settings, updates: int | None
) -> None:
    plain, size = by(ONE), need(ONE).reserved
    assert by(ONE, row(settings, 0.45, updates=updates)) == plain
    raised = by(ONE, row(settings, 1.2, updates=updates))
    assert raised.basis == "estimate; raised, because an earlier run needed more than foreseen"
    assert raised.peak_bytes == pytest.approx(1.2 * size + CARD.context_bytes, rel=1e-6)
    assert raised.most_bytes is not None
    assert plain.most_bytes is not None
    assert raised.most_bytes > plain.most_bytes


def test_a_short_run_does_not_hide_a_long_one_of_other_settings() -> None:
    near = row(replace(ONE, batch=ONE.batch // 2), 1.2, run="/runs/near")
    short = {"updates": 3, "run": "/runs/short"}
    assert by(ONE, near, row(ONE, 0.45, **short)) == by(ONE, near)
    both = by(ONE, near, row(ONE, 1.5, **short))
    raised = "raised, because an earlier run needed more than foreseen"
    assert both.basis == f"estimate, calibrated by 1 earlier run with another batch; {raised}"
    other = row(replace(ONE, gradient_checkpointing=True), 1.5, **short)
    assert by(ONE, near, other) == by(ONE, near), "it is less like these settings"


def test_a_few_updates_with_samples_of_one_length_or_many_with_others_lower_a_forecast() -> None:
    assert by(FIRST, row(FIRST, 0.7, updates=2)).basis == "estimate, calibrated by 1 earlier run with these settings"
    for settings in ALIKE.values():
        if settings.batch <= ONE.batch:
            assert by(ONE, row(settings, 0.7)).peak_bytes == pytest.approx(
                0.7 * need(ONE).reserved + CARD.context_bytes, rel=1e-6
            )
    assert (
        by(replace(ONE, seq_len=2 * ONE.seq_len), row(ONE, 0.7)).basis == "estimate, calibrated by 1 earlier run of this model"
    )


def test_the_number_of_processes_and_whether_gradients_stay_make_other_settings() -> None:
    sharded = replace(FIRST, zero=Zero(stage=3), world_size=1)
    known = Learned(rows=(row(replace(sharded, world_size=2)),))
    assert known.calibrating(sharded)[1] == "model"
    assert known.calibrating(replace(sharded, world_size=2))[1] == "same"
    summed = Learned(rows=(row(replace(FIRST, accumulation=4)),))
    assert summed.calibrating(replace(FIRST, accumulation=1))[1] == "model"
    assert summed.calibrating(replace(FIRST, batch=FIRST.batch + 1, accumulation=1))[1] == "model"
    assert summed.calibrating(replace(FIRST, batch=FIRST.batch + 1, accumulation=3))[1] == "near"
    assert summed.calibrating(replace(FIRST, accumulation=2))[1] == "same"


def test_what_the_run_has_measured_with_its_settings_comes_before_earlier_runs() -> None:
    gpu = GpuSample(index=0, name="A4500", total_bytes=20 * GIB, free_bytes=20 * GIB)

    def own(settings: Settings, ratio: float) -> Configuration:
        size = round(need(settings).reserved * ratio)
        peak = Peak(
            batch=settings.batch, bytes=size, updates=9, outside_bytes=0, settings_key=settings_key(settings, on_gpu=True)
        )
        return Configuration(number=1, attempt=1, started=0, reason="", settings=settings, peak=peak)

    half = own(replace(ONE, batch=ONE.batch // 2), 1.3)
    other = own(replace(ONE, seq_len=ONE.seq_len // 2), 1.3)
    known = Learned(rows=(row(ONE, 1.1),))
    distant = Learned(rows=(row(replace(ONE, seq_len=ONE.seq_len // 4), 1.1),))

    def basis(rows: list[Configuration], learned: Learned) -> str:
        found = estimates_on(gpu, rows, learned=learned).forecast(ONE)
        assert isinstance(found, Forecast)
        return found.basis

    assert basis([half], known) == f"estimate, calibrated at B {ONE.batch // 2}"
    assert basis([other], known) == "estimate, calibrated by 1 earlier run with these settings"
    assert basis([other], distant) == f"estimate, calibrated at B {ONE.batch} with other settings"


def test_a_failure_of_an_earlier_run_lifts_the_estimate() -> None:
    failed = row(ONE, 1.3, failed=True)
    found = by(replace(ONE, batch=ONE.batch // 2), failed)
    assert found.basis == "estimate; lifted, because it needed more than foreseen when it ran out of memory"
    assert "lifted" not in by(ONE, replace(failed, settings=replace(ONE, allocator="expandable_segments:True"))).basis


def test_five_ratios_show_how_sure_the_estimate_is() -> None:
    least, most = SURE["calibrated"]
    few, alike, apart = spread([1.1] * 4), spread([1.1] * 5), spread([0.7, 1.0, 1.1, 1.2, 1.6])
    assert few == pytest.approx((1.1 * least, 1.1 * most))
    assert few[0] < alike[0] < 1.1 < alike[1] < few[1], "they agree: it is surer"
    assert alike[1] / alike[0] > 1.2, "five settings do not show that all others are alike"
    assert apart[0] < 0.7 < 1.6 < apart[1]
    widths = [most / least for least, most in (spread([1.0] * count) for count in (5, 8, 12))]
    assert all(one > other for one, other in pairwise(widths))
    found = by(ONE, *named(5, [1.1] * 5))
    assert found.basis == "estimate, calibrated by 5 earlier runs of this model"
    size = need(ONE).reserved
    assert found.most_bytes == pytest.approx(size * alike[1] + CARD.context_bytes, rel=1e-5)


@given(st.lists(st.floats(0.3, 3.0), min_size=1, max_size=12))
def test_the_range_has_every_ratio_in_it_and_is_never_a_point(ratios: list[float]) -> None:
    least, most = spread(ratios)
    assert least <= min(ratios) <= max(ratios) <= most
    assert math.log(most / least) > 0.15


# --- the context ----------------------------------------------------------------------------------


def test_the_context_is_that_of_the_newest_run_of_any_model_on_such_a_gpu() -> None:
    rows = (
        row(FIRST, outside_bytes=300 * MIB),
        row(FIRST, outside_bytes=420 * MIB),
        row(ONE, outside_bytes=None),
        row(replace(FIRST, world_size=2), outside_bytes=800 * MIB),
    )
    known = Learned(rows=rows)
    gpu = GpuSample(index=0, name="A4500", total_bytes=20 * GIB)
    two = replace(ONE, world_size=2)

    def outside(settings: Settings, learned: Learned, *rows: Configuration) -> tuple[int, int]:
        card = estimates_on(gpu, rows, learned=learned).card_for(settings)
        return card.context_bytes, card.communication_bytes

    assert outside(ONE, Learned()) == (CONTEXT_BYTES, 0)
    assert outside(two, Learned()) == (CONTEXT_BYTES, COMMUNICATION_BYTES)
    assert outside(ONE, known) == (420 * MIB, 0)
    assert outside(two, known) == (800 * MIB, 0), "a measured context of several has NCCL's buffers in it"
    assert outside(two, Learned(rows=rows[:2])) == (CONTEXT_BYTES, COMMUNICATION_BYTES), "that of one says nothing"
    peak = Peak(batch=4, bytes=GIB, updates=3, outside_bytes=900 * MIB)
    own = Configuration(number=1, attempt=1, started=0, reason="", settings=two, peak=peak)
    assert outside(two, known, own) == (900 * MIB, 0), "its own comes first"
    assert outside(ONE, known, own) == (420 * MIB, 0), "with one process it is less"


@pytest.mark.parametrize("measured", [False, True])
def test_nccls_buffers_are_in_all_forecasts_of_several_processes(measured: bool) -> None:
    two, bytes_of_one = replace(ONE, world_size=2), CARD.context_bytes
    known = Learned(rows=(row(replace(FIRST, world_size=2), outside_bytes=700 * MIB),)) if measured else Learned()
    outside = 700 * MIB if measured else bytes_of_one + COMMUNICATION_BYTES
    estimates = Estimates(card=CARD, learned=known)
    inside = estimates.plain(two)
    assert isinstance(inside, Need)
    found = estimates.forecast(two)
    assert isinstance(found, Forecast)
    assert found.peak_bytes == inside.reserved + outside
    assert found.most_bytes == round(SURE["estimate"][1] * inside.reserved) + outside
    phases = estimates.with_phases(found, two).phases
    assert phases
    assert phases.items() <= inside.peaks.items(), "what is outside torch is in no phase"
    # A launch, the restart form, the preset table and a plan say the same.
    gpu = GpuSample(index=0, uuid="GPU-0", name="A4500", total_bytes=20 * GIB)
    run = RunState(name="a", folder="/a", state=Phase.TRAINING, alive=True, created=0, settings=replace(two, device="cuda"))
    form = forecaster_of(run, (), (gpu,), HostSample(), known).predicted(two)
    assert isinstance(form, Forecast)
    assert form.peak_bytes == peak_of(inside, estimates.card_for(two)).bytes == found.peak_bytes
    assert f"foreseen to peak at {units.size(found.peak_bytes)} of" in next(words_at_launch(two, CARD, known))
    # Of a peak whose context is not known, torch may have taken what NCCL takes at the most.
    whole = Peak(batch=4, bytes=found.peak_bytes, updates=9, settings_key=settings_key(two, on_gpu=True))
    half = replace(two, batch=4)
    near = Estimates(card=CARD, learned=known, known=((half, whole),)).forecast(two)
    half_need = estimates.plain(half)
    assert isinstance(near, Forecast)
    assert isinstance(half_need, Need)
    ratio = (found.peak_bytes - bytes_of_one) / half_need.reserved
    assert near.peak_bytes == pytest.approx(inside.reserved * ratio + outside, rel=1e-6)


def test_a_start_names_what_its_forecast_rests_on() -> None:
    plain = next(words_at_launch(ONE, CARD))
    assert plain.endswith(": estimate")
    known = Learned(rows=(row(ONE, 1.2, outside_bytes=300 * MIB),))
    assert next(words_at_launch(ONE, CARD, known)).endswith(": estimate, calibrated by 1 earlier run with these settings")


# --- what a run remembers -------------------------------------------------------------------------


def on_card(**more: Any) -> Brain:
    card = GpuSample(index=0, uuid="GPU-0", name="A4500", total_bytes=20 * GIB)
    sample = Sampled(machine=MachineSnapshot(time=1.0, gpus=(card,)), gpu_base_bytes={"GPU-0": 300 * MIB})
    brain = training(progress=Progress(), sample=sample, **more)
    brain.report({**HELLO, "packages": {"torch": "2.8.0+cu126"}}, {**PLAN, "device_uuid": "GPU-0"})
    return brain


def told(brain: Brain, kept: Measurements) -> Any:
    """What the run's newest configurations give to the file; they are saved now and then."""
    if not kept.note(brain.model.configurations.records, brain.model):
        return None
    assert kept.begin()
    kept.write()
    return kept.end()


def later(brain: Brain, seconds: float) -> None:
    brain.now += seconds
    brain.model = replace(brain.model, now=Now(brain.wall, brain.now))


ON_CARD = {**STEP, "device_uuid": "GPU-0", "peak_reserved_bytes": 2 * GIB}


def test_a_run_remembers_its_peaks_from_the_second_update_on() -> None:
    brain, kept = on_card(), Measurements()
    brain.report(ON_CARD)
    assert told(brain, kept) is None
    assert learned(A4500).rows == (), "the first update allocates the moments at its end"
    brain.report({**ON_CARD, "update": 2})
    told(brain, kept)
    (found,) = learned(A4500, "2.8.0").rows
    assert (found.run, found.reserved_bytes, found.outside_bytes, found.torch) == ("/runs/a", 2 * GIB, 300 * MIB, "2.8.0+cu126")
    assert found.updates == 2


def test_a_growing_peak_is_written_once_a_minute_and_at_the_end() -> None:
    brain, kept = on_card(), Measurements()
    brain.report(ON_CARD, {**ON_CARD, "update": 2})
    told(brain, kept)
    for update, peak in ((3, 3 * GIB), (4, 4 * GIB)):
        brain.report({**ON_CARD, "update": update, "peak_reserved_bytes": peak})
        assert not kept.note(brain.model.configurations.records, brain.model), "not at each new peak"
    later(brain, 60)
    told(brain, kept)
    assert learned(A4500).rows[0].reserved_bytes == 4 * GIB
    later(brain, 60)
    assert not kept.note(brain.model.configurations.records, brain.model), "there is nothing new"
    brain.report({**ON_CARD, "update": 5, "peak_reserved_bytes": 5 * GIB})
    later(brain, 60)
    told(brain, kept)
    brain.report({**ON_CARD, "update": 6, "peak_reserved_bytes": 6 * GIB})
    brain.model = replace(brain.model, configurations=brain.model.configurations.end("finished", 6, 6))
    told(brain, kept)
    (found,) = learned(A4500).rows
    assert (found.reserved_bytes, found.updates) == (6 * GIB, 6)


def test_a_run_remembers_when_enough_updates_show_its_peak() -> None:
    brain, kept = on_card(), Measurements()
    for update in range(1, ENOUGH_UPDATES + 1):
        brain.report({**ON_CARD, "update": update})
        later(brain, 60)
        told(brain, kept)
        if update > 1:
            assert learned(A4500).rows[0].updates == (2 if update < ENOUGH_UPDATES else update)


def test_a_run_remembers_only_what_its_present_attempt_has_measured() -> None:
    brain, kept = on_card(), Measurements()
    brain.report(ON_CARD, {**ON_CARD, "update": 2})
    configurations = brain.model.configurations.end("failed", 2, 2)
    attempt = brain.model.attempt
    assert attempt is not None
    again = configurations.begin_attempt(attempt.number + 1, "restart", brain.model.settings, 20.0)
    # It goes on with another torch on another GPU.
    card = GpuSample(index=0, uuid="GPU-0", name="A4000", total_bytes=16 * GIB)
    sample = Sampled(machine=MachineSnapshot(time=2.0, gpus=(card,)), gpu_base_bytes={"GPU-0": 200 * MIB})
    progress = replace(brain.model.progress, torch="2.9.0")
    attempt = replace(attempt, number=attempt.number + 1)
    brain.model = replace(brain.model, attempt=attempt, configurations=again, sample=sample, progress=progress)
    told(brain, kept)
    brain.report({**ON_CARD, "update": 3, "peak_reserved_bytes": GIB}, {**ON_CARD, "update": 4, "peak_reserved_bytes": GIB})
    later(brain, 60)
    told(brain, kept)
    (found,) = learned(GpuKind("A4000", 16 * GIB)).rows
    assert (found.reserved_bytes, found.outside_bytes, found.torch) == (GIB, 200 * MIB, "2.9.0")
    assert learned(A4500).rows == ()


def test_what_the_driver_does_not_tell_of_a_process_is_not_known() -> None:
    brain, kept = on_card(), Measurements()
    assert brain.model.sample is not None
    brain.model = replace(brain.model, sample=replace(brain.model.sample, gpu_base_bytes={}))
    brain.report(ON_CARD, {**ON_CARD, "update": 2})
    told(brain, kept)
    (found,) = learned(A4500).rows
    assert (found.reserved_bytes, found.outside_bytes) == (2 * GIB, None)
    rows = brain.model.configurations.rows
    (row,) = rows
    assert row.peak is not None
    assert (row.peak.bytes, row.peak.outside_bytes) == (2 * GIB, None)
    assert row.settings is not None
    gpu = GpuSample(index=0, name="A4500", total_bytes=20 * GIB)
    seen = estimates_on(gpu, rows).forecast(row.settings)
    assert isinstance(seen, Forecast)
    assert seen.peak_bytes == 2 * GIB + CARD.context_bytes, "it has a context, of the usual size"
    line = forecaster_on(gpu, rows, 0)
    assert [peak.bytes for peak in line.peaks] == [seen.peak_bytes]


def test_a_file_that_cannot_be_written_is_named_once_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "memtop").write_text("in the way")
    brain, kept = on_card(), Measurements()
    brain.report(ON_CARD, {**ON_CARD, "update": 2})
    news = told(brain, kept)
    assert news is not None
    assert news[0].endswith("later runs cannot learn from this one's peaks")
    later(brain, 60)
    assert told(brain, kept) is None
    (tmp_path / "cache" / "memtop").unlink()
    assert not kept.note((), brain.model), "not at once"
    later(brain, 60)
    assert told(brain, kept) == (None,), "the warning is taken back, though the peak has not grown"
    assert learned(A4500).rows[0].reserved_bytes == 2 * GIB


def test_a_folder_that_does_not_answer_holds_up_one_thread_and_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    brain, answers, asked = on_card(), threading.Event(), []

    def hung(row: Measured) -> None:
        asked.append(row.reserved_bytes)
        assert answers.wait(60)

    monkeypatch.setattr("memtop.supervisor.run.measurements.remember", hung)
    outbox = Mock()
    rest = dict.fromkeys(("publisher", "agents", "sensors", "socket", "is_displaced", "post", "read_reports"), Mock())
    performer = Performer(Mock(), Mock(), outbox=outbox, **rest)

    async def noted() -> None:
        brain.report(ON_CARD, {**ON_CARD, "update": 2})
        for size in (2, 3, 4):
            brain.report({**ON_CARD, "update": 1 + size, "peak_reserved_bytes": size * GIB})
            later(brain, 60)
            effect = SaveConfigurations(brain.model.configurations.records)
            assert performer.perform(effect, brain.model) is None
            await asyncio.sleep(0)
        while not asked:
            await asyncio.sleep(0.01)
        assert asked == [2 * GIB], "the others wait for it"
        answers.set()
        await asyncio.wait(performer.tasks)
        performer.collect()

    asyncio.run(noted())
    assert asked == [2 * GIB, 4 * GIB]
    assert outbox.save_configurations.call_count == 3


def test_a_forecast_is_asked_for_when_the_gpus_are_read_after_the_plan() -> None:
    card = GpuSample(index=0, uuid="GPU-0", name="A4500", total_bytes=20 * GIB)
    brain = training(progress=Progress(), sample=None)
    brain.report(HELLO, {**PLAN, "device_uuid": "GPU-0"})
    assert brain.asked(Foresee) == []
    brain.tell(Sampled(machine=MachineSnapshot(time=1.0)))
    assert brain.asked(Foresee) == []
    for time in (2.0, 3.0):
        brain.tell(Sampled(machine=MachineSnapshot(time=time, gpus=(card,))))
        assert [effect.gpu for effect in brain.asked(Foresee)] == [card]


# --- real runs ------------------------------------------------------------------------------------

_ON_A_GPU = """
    import memtop.train.channel, memtop.train.devices
    memtop.train.devices.device_uuid = lambda device: "GPU-0"
    plain = memtop.train.channel.open_channel
    def open_channel():
        channel = plain()
        read = channel.readings
        held = {"allocated_bytes": 400 << 20, "reserved_bytes": 700 << 20, "peak_bytes": 600 << 20}
        channel.readings = lambda: {**read(), **held, "peak_reserved_bytes": 700 << 20}
        return channel
    memtop.train.channel.open_channel = open_channel
    import memtop.train.batch_sizer as sizer
    class Memory(sizer.UnmeasuredMemory):
        def end_phase(self):
            return 500 << 20
    sizer.open_device_memory = lambda device: Memory()
"""
"""The trainer computes on the CPU, says that it is the GPU of the scripted driver, and that its
allocator held 700 MiB, and 500 MiB of them in each phase."""


def test_the_second_run_is_foreseen_by_what_the_first_has_measured(
    runs: Runs,
    tmp_path: Path,
    nvml_library: Path,  # noqa: F811
) -> None:
    script = Script(tmp_path / "script").gpu(0, total=20 * GIB, used=0, uuid="GPU-0", name="A4500")
    runs.environment |= script.write().env(nvml_library) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    inject(runs, _ON_A_GPU)
    start = ("train", *TINY, "--headless", "--max-updates", "3", "--preset", "standard")
    runs.memtop(*start, "--name", "a")

    def foreseen(name: str) -> dict[str, Any]:
        """A thread of the supervisor foresees it, which may be after the end of a short run."""
        return runs.wait(name, lambda shown: shown["configurations"][0]["foreseen"] is not None)

    (first,) = foreseen("a")["configurations"]
    assert first["foreseen"]["basis"] == "estimate"
    assert first["peak"]["bytes"] >= 700 * MIB
    # A thread writes what was measured, which may be after the end of the run.
    wait_for_file(tmp_path / "cache" / "memtop" / "measured.jsonl")
    runs.memtop(*start, "--name", "b")
    (second,) = foreseen("b")["configurations"]
    found = second["foreseen"]
    assert found["basis"] == "estimate, calibrated by 1 earlier run with these settings"
    assert found["peak_bytes"] == pytest.approx(700 * MIB + GIB // 2, rel=0.01)
    assert found["least_bytes"] < found["peak_bytes"] < found["most_bytes"]
    assert found["phases"].keys() == {"forward", "backward", "optimizer"}
    assert max(found["phases"].values()) < 700 * MIB
    assert second["peak"]["phases"] == dict.fromkeys(("forward", "backward", "optimizer"), 500 * MIB)
    assert second["phases_unknown"] is None
    said = runs.memtop("show", "b").stdout
    assert re.search(
        r"allocated     forward ~\d+ / 500, backward ~\d+ / 500, optimizer ~\d+ / 500 MiB, foreseen / measured", said
    )
    page = tmp_path / "report.html"
    runs.memtop("report", "b", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert "Memory of each phase" in text
    assert "<td>optimizer</td>" in text
