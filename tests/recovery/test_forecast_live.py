"""The peak of a run is foreseen before its first update, and stands beside what is measured: by the
rules, and in a real run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from memtop.cli.common import proposal_lines
from memtop.presets.measured import GpuKind, Learned, model_key
from memtop.presets.measured import Measured as EarlierRun
from memtop.presets.parameters import stored_config
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.monitor.values import Band, GpuSample, MachineSnapshot
from memtop.supervisor.recovery.batch_trial import refusal
from memtop.supervisor.recovery.bottleneck import Measured
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.effects import Foresee, SaveConfigurations
from memtop.supervisor.run.events import Foreseen, RemedyFacts, Sampled
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.rules.prevention import advised, forecast
from memtop.supervisor.wire import Phase
from tests.conftest import Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.recovery.injected import TINY, inject
from tests.recovery.support import T5
from tests.run.brain import HELLO, MIB, PLAN, SETTINGS, SPLIT, STEP, die, proposal, training

GIB = 1 << 30


def test_the_peak_of_a_configuration_is_foreseen_once_where_it_trains() -> None:
    card = GpuSample(index=0, uuid="GPU-0", total_bytes=1 << 34)
    sample = Sampled(machine=MachineSnapshot(time=1.0, gpus=(card, replace(card, uuid="GPU-1", total_bytes=1 << 30))))
    brain = training(progress=Progress(), sample=sample)
    brain.report({**PLAN, "device_uuid": "GPU-0"})
    (asked,) = brain.asked(Foresee)
    assert (asked.number, asked.settings, asked.gpu, asked.earlier) == (1, SETTINGS, card, ())
    found = Forecast(peak_bytes=1 << 33, total_bytes=1 << 34, fraction=0.5, band=Band.SAFE, basis="estimate")
    brain.tell(Foreseen(number=1, found=found))
    brain.tell(Foreseen(number=1, found=replace(found, peak_bytes=1)))
    assert brain.messages("foreseen") == ["GPU memory is foreseen to peak at 8.0 GiB of 16.0 GiB (50.0 %, safe): estimate"]
    brain.report({**PLAN, "device_uuid": "GPU-0", "time": 991.0})
    assert len(brain.asked(Foresee)) == 1, "what was foreseen stays"
    brain.report(SPLIT)
    first, second = brain.model.configurations.rows
    assert (first.foreseen, second.foreseen) == (found, None)
    assert brain.asked(Foresee)[-1].number == 2
    assert brain.asked(Foresee)[-1].earlier == (first,)
    brain.tell(Foreseen(number=2, found="no estimate"))
    assert brain.model.configurations.rows[-1].foreseen is None


def test_what_was_foreseen_is_kept_if_the_settings_have_changed_meanwhile() -> None:
    """The answer comes from a thread."""
    card = GpuSample(index=0, uuid="GPU-0", total_bytes=1 << 34)
    brain = training(progress=Progress(), sample=Sampled(machine=MachineSnapshot(time=1.0, gpus=(card,))))
    brain.report({**PLAN, "device_uuid": "GPU-0"}, SPLIT)
    found = Forecast(peak_bytes=1 << 33, total_bytes=1 << 34, fraction=0.5, band=Band.SAFE, basis="estimate")
    for number, size in ((1, 1 << 33), (2, 1 << 32), (1, 7), (3, 7)):
        brain.tell(Foreseen(number=number, found=replace(found, peak_bytes=size)))
    rows = brain.model.configurations.rows
    assert [row.foreseen and row.foreseen.peak_bytes for row in rows] == [1 << 33, 1 << 32]
    saved = [record.configuration for one in brain.asked(SaveConfigurations) for record in one.records]
    assert any(row.number == 1 and row.foreseen == found for row in saved), "it is written"
    assert [re.search(r"[0-9.]+ GiB", text)[0] for text in brain.messages("foreseen")] == ["8.0 GiB", "4.0 GiB"]  # type: ignore[index]


def test_remedies_are_foreseen_by_the_estimate_with_what_was_measured() -> None:
    settings = replace(T5, world_size=1)
    card = GpuSample(index=0, uuid="GPU-0", total_bytes=20 << 30)
    sample = Sampled(machine=MachineSnapshot(time=1.0, gpus=(card,)), gpu_base_bytes={"GPU-0": 300 * MIB})
    brain = training(settings=settings, progress=Progress(), sample=sample, phase=Phase.STARTING)
    on_card = {"device_uuid": "GPU-0", "peak_reserved_bytes": 15 << 30}
    brain.report({**PLAN, "device_uuid": "GPU-0"}, {**STEP, **on_card})
    die(brain)
    split = next(one for one in proposal(brain).remedies if one.id == "smaller_batch")
    assert split.forecast is not None
    assert split.forecast.basis.startswith("estimate")
    assert "lifted" in split.forecast.basis, "15 GiB were not enough"
    assert split.forecast.least_bytes is not None
    (row,) = brain.model.configurations.rows
    assert row.peak is not None
    assert (row.peak.outside_bytes, row.peak.failed) == (300 * MIB, True)


def test_a_larger_batch_and_a_trial_are_judged_by_the_estimate_of_the_run() -> None:
    """One measured peak scales it; as if all of the peak grew with the batch, twice the batch would
    be refused."""
    settings = replace(T5, world_size=1, batch=8, accumulation=16)
    held, room = 12 << 30, 20 << 30
    card = GpuSample(
        index=0, uuid="GPU-0", total_bytes=room, used_bytes=held, free_bytes=room - held, used_fraction=held / room
    )
    machine = MachineSnapshot(time=1.0, gpus=(card,))
    sample = Sampled(machine=machine, gpu_base_bytes={"GPU-0": 300 * MIB}, model_config=settings.model["config"])
    brain = training(settings=settings, progress=Progress(), sample=sample, phase=Phase.STARTING)
    brain.report(HELLO, {**PLAN, "device_uuid": "GPU-0"}, {**STEP, "device_uuid": "GPU-0", "peak_reserved_bytes": 11 << 30})
    (row,) = brain.model.configurations.rows
    assert row.peak is not None
    measured = row.peak.bytes
    found = forecast(brain.model, 16)
    assert found is not None
    assert found.basis == f"estimate, calibrated at B 8; other processes hold {units.size(held - measured)}"
    assert measured < found.peak_bytes < 1.9 * measured
    (bound,) = [one for one in [forecast(replace(brain.model, sample=replace(sample, model_config={})), 16)] if one is not None]
    assert (bound.peak_bytes, bound.basis[:8]) == (2 * measured, "at most:"), "without the model's configuration"
    busy = Measured(updates=20, on_gpu=True, step_seconds=1.0, data_wait_seconds=0.01, sm_active_fraction=0.9)
    advice = advised(brain.model, busy).advice
    assert advice is not None
    after = replace(settings, batch=16, accumulation=8)
    tried = refusal(settings, after, lambda batch: forecast(brain.model, batch), ())
    assert tried is not None
    assert tried in advice.refused, "advice and trial follow one rule"
    assert tried.endswith(f"predicted {units.percent(found.fraction)}; more than +25 % at once is tried only below 70 %")
    # With a second measured batch, the line says it.
    brain.report(
        {**SPLIT, "reason": "live", "changes": {"batch": 4, "accumulation": 32}},
        {**STEP, "update": 2, "peak_reserved_bytes": 7 << 30},
    )
    line = forecast(brain.model, 16)
    assert line is not None
    assert line.basis.startswith("line through peaks at B 4 and B 8")
    whole = forecast(brain.model, 128)
    assert whole is not None
    assert whole.basis.startswith("estimate, calibrated"), "with A = 1 no gradients stay: that is another line"


def test_a_remedy_says_how_long_the_run_then_takes() -> None:
    """From the state after update 5, at the speed that was measured and the remedy's factor."""
    brain = training(progress=Progress())
    each = SETTINGS.effective_batch
    steps = [{**STEP, "update": n, "time": 20.0 + 2 * n, "samples_seen": n * each} for n in range(1, 9)]
    brain.report(HELLO, PLAN, *steps)
    die(brain, Kind.HOST_OOM_ALLOC)
    split = next(one for one in proposal(brain).remedies if one.id == "smaller_batch")
    assert split.speed is not None
    updates = SETTINGS.target_samples // each - 5
    assert split.seconds_left == pytest.approx(2 * updates / split.speed)
    shorter = next(one for one in proposal(brain).remedies if one.id == "seq_len")
    assert shorter.seconds_left is None, "of how much faster it is, nothing is known"
    text = "\n".join(proposal_lines(proposal(brain)))
    assert f"slower, about {units.duration(split.seconds_left)} left]" in text


def test_remedies_know_what_earlier_runs_have_measured() -> None:
    settings = replace(T5, world_size=1)
    card = GpuSample(index=0, uuid="GPU-0", name="A4500", total_bytes=20 << 30)
    brain = training(settings=settings, progress=Progress(), sample=Sampled(machine=MachineSnapshot(time=1.0, gpus=(card,))))
    brain.report({**PLAN, "device_uuid": "GPU-0"})
    half = replace(settings, batch=settings.batch // 2, accumulation=settings.accumulation * 2)
    values = {"run": "/runs/b", "time": 1.0, "gpu": GpuKind("A4500", 20 << 30), "reserved_bytes": 9 << 30}
    row = EarlierRun(**values, model=model_key(stored_config(settings) or {}), settings=half, outside_bytes=300 * MIB)
    die(brain, facts=RemedyFacts(learned=Learned(rows=(row,)), model_config=stored_config(settings)))
    split = next(one for one in proposal(brain).remedies if one.id == "smaller_batch")
    assert split.forecast is not None
    # Its samples differ in length, so it says how much is needed at least.
    assert split.forecast.basis.startswith("estimate; raised, because an earlier run needed more than foreseen")
    assert split.forecast.peak_bytes == (9 << 30) + 300 * MIB


def test_nothing_is_foreseen_on_the_cpu() -> None:
    card = GpuSample(index=0, uuid="GPU-0", total_bytes=1 << 34)
    brain = training(progress=Progress(), sample=Sampled(machine=MachineSnapshot(time=1.0, gpus=(card,))))
    brain.report(PLAN)
    assert not brain.asked(Foresee)


_ON_A_GPU = """
    import memtop.train.devices
    memtop.train.devices.device_uuid = lambda device: "GPU-0"
"""
"""The trainer computes on the CPU and says that it is the GPU of the scripted driver."""


def test_the_foreseen_peak_is_in_the_ledger_and_in_every_view(
    runs: Runs,
    tmp_path: Path,
    nvml_library: Path,  # noqa: F811
) -> None:
    script = Script(tmp_path / "script").gpu(0, total=20 * GIB, used=GIB, uuid="GPU-0", name="A4500")
    runs.environment |= script.write().env(nvml_library)
    inject(runs, _ON_A_GPU)
    runs.memtop("train", *TINY, "--headless", "--name", "a", "--max-updates", "3", "--preset", "standard")
    (row,) = runs.show("a")["configurations"]
    found = row["foreseen"]
    basis = "estimate; other processes hold 1.0 GiB"
    assert (found["basis"], found["total_bytes"], found["band"]) == (basis, 20 * GIB, "safe")
    # With the context, and with what other programs held when it began.
    assert GIB // 2 < found["peak_bytes"] < GIB
    assert found["fraction"] > found["peak_bytes"] / (20 * GIB) + 0.04
    (event,) = runs.events("a", "foreseen")
    assert event.message.startswith("GPU memory is foreseen to peak at ")
    assert event.data["peak_bytes"] == found["peak_bytes"]
    assert ", foreseen " in runs.memtop("show", "a").stdout
    page = tmp_path / "report.html"
    runs.memtop("report", "a", "--html", str(page))
    assert "foreseen peak" in page.read_text(encoding="utf-8")
