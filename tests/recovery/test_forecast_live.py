"""The peak of a run is foreseen before its first update, and stands beside what is measured: by the
rules, and in a real run."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from memtop.presets.measured import GpuKind, Learned, Measured, model_key
from memtop.presets.parameters import stored_config
from memtop.supervisor.monitor.values import Band, GpuSample, MachineSnapshot
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.effects import Foresee
from memtop.supervisor.run.events import Foreseen, RemedyFacts, Sampled
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.wire import Phase
from tests.conftest import Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.recovery.injected import TINY, inject
from tests.recovery.support import T5
from tests.run.brain import MIB, PLAN, SETTINGS, SPLIT, STEP, die, proposal, training

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


def test_remedies_know_what_earlier_runs_have_measured() -> None:
    settings = replace(T5, world_size=1)
    card = GpuSample(index=0, uuid="GPU-0", name="A4500", total_bytes=20 << 30)
    brain = training(settings=settings, progress=Progress(), sample=Sampled(machine=MachineSnapshot(time=1.0, gpus=(card,))))
    brain.report({**PLAN, "device_uuid": "GPU-0"})
    half = replace(settings, batch=settings.batch // 2, accumulation=settings.accumulation * 2)
    values = {"run": "/runs/b", "time": 1.0, "gpu": GpuKind("A4500", 20 << 30), "reserved_bytes": 9 << 30}
    row = Measured(**values, model=model_key(stored_config(settings) or {}), settings=half, outside_bytes=300 * MIB)
    die(brain, facts=RemedyFacts(learned=Learned(rows=(row,)), model_config=stored_config(settings)))
    split = next(one for one in proposal(brain).remedies if one.id == "smaller_batch")
    assert split.forecast is not None
    assert split.forecast.basis.startswith("estimate, calibrated by 1 earlier run with these settings")
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
