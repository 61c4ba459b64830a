"""`memtop train`: the settings of a new run; a preset chosen by free GPU memory is reported with
the reason."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memtop.cli import gpus as gpus_of
from memtop.cli import run, train
from memtop.cli.options import assignments_of
from memtop.presets import Settings, load_recipes
from memtop.presets.gpu_support import TorchBuild
from memtop.presets.measured import GpuKind, Measured, model_key, remember
from memtop.presets.schema import Zero
from memtop.supervisor import language
from memtop.supervisor.errors import UsageError
from memtop.supervisor.interpreters import Search
from memtop.supervisor.monitor.values import GpuDetails, GpuSample, MachineSnapshot, MigInstance
from memtop.supervisor.program import name_of
from memtop.supervisor.wire import Change
from tests.conftest import Runs
from tests.forking import LONG
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.recovery.injected import TINY

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[1]


def machine(*free_gib: float | None, **more: Any) -> MachineSnapshot:
    gpus = tuple(
        GpuSample(index=i, uuid=f"GPU-{i}", free_bytes=None if f is None else int(f * GIB)) for i, f in enumerate(free_gib)
    )
    return MachineSnapshot(time=0.0, gpus=gpus, **more)


def settings_for(*arguments: Any, **more: Any) -> Settings:
    """The settings of the new run that these arguments of `new_run` give."""
    settings = train.new_run(*arguments, **more).settings
    assert settings is not None
    return settings


def gpus_in(found: train.NewRun) -> str:
    """The GPUs in the settings of a new run."""
    assert found.settings is not None
    return found.settings.gpus


LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that can compute on every GPU; nothing in Hugging Face's cache."""
    monkeypatch.setattr(gpus_of, "build_of", lambda _: TorchBuild(version="2.13.0+cu130", cuda="13.0"))
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Path("pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    return Change(assignments={"data.train": "pairs.jsonl"})


@pytest.mark.parametrize(
    ("free", "preset", "said"),
    [
        (
            (80.0,),
            "standard",
            "preset standard: 80.00 GiB of GPU memory free, base, adapters and optimizer need ~15.73 GiB",
        ),
        ((19.0,), "standard", "need ~15.73 GiB; --preset NAME chooses another"),
        ((18.0,), "stage2_offload", "need ~15.73 GiB; with this offload ~13.35 GiB; --preset"),
        ((8.0,), "minimal", "preset minimal: 8.00 GiB of GPU memory free, base, adapters"),
        ((0.5,), "minimal", " GiB: not below 85 % of the free memory; --preset NAME chooses another"),
        ((None,), "standard", "the free GPU memory is not known"),
        ((), "standard", "the free GPU memory is not known"),
    ],
)
def test_one_process_offloads_only_what_does_not_fit(
    data: Change,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free: tuple[float | None, ...],
    preset: str,
    said: str,
) -> None:
    """ZeRO on one process saves nothing, and switches survival and live edits off."""
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA_7B))
    monkeypatch.setattr(gpus_of, "sample", lambda: machine(*free))
    asked = Change(assignments={**data.assignments, "model.path": "llama"})
    found = train.new_run("sft-lora", None, asked, None)
    assert found.settings is not None
    assert (found.settings.preset, found.settings.gpus) == (preset, "")
    assert found.settings.zero.stage == 0 or found.settings.zero.saves_memory(1)
    # Chosen automatically, not named: the recipe's own values stay.
    assert (found.settings.effective_batch, found.settings.seq_len) == (16, 1024)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err == f"memtop: {found.choice}\n"


def of_size(gib: float, *, taken: float = 0.0, count: int = 1) -> MachineSnapshot:
    """A machine whose GPUs have so much memory, of which other programs have taken a part."""
    gpus = machine(*[gib - taken] * count).gpus
    return MachineSnapshot(time=0.0, gpus=tuple(replace(gpu, total_bytes=int(gib * GIB)) for gpu in gpus))


@pytest.mark.parametrize(
    ("recipe", "gpus"),
    [
        ("pretrain-causal", None),
        ("pretrain-t5", ["0", "1"]),
        pytest.param("pretrain-t5", None, marks=pytest.mark.long),
        pytest.param("pretrain-causal", ["0", "1"], marks=pytest.mark.long),
    ],
)
def test_a_launch_and_a_plan_say_of_the_chosen_preset_what_chose_it(
    data: Change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str, gpus: list[str] | None
) -> None:
    """On every card of which some preset is foreseen to take less than 85 %."""
    monkeypatch.setattr("memtop.cli.plan.search", lambda: Search(found=None))
    chosen = set()
    for gib in (3.0, 4.0, 6.0, 8.0, 12.0, 24.0) if LONG else (3.0, 8.0, 24.0):
        monkeypatch.setattr(gpus_of, "sample", lambda gib=gib: of_size(gib, count=len(gpus or "1")))
        settings = settings_for(recipe, None, data, gpus)
        reason, *others = capsys.readouterr().err.splitlines()
        assert reason.startswith(f"memtop: preset {settings.preset}: {gib:.2f} GiB of GPU memory free")
        (launch,) = [line for line in others if "GPU memory is foreseen" in line]
        assert ", safe)" in launch
        peaks = re.findall(r"(?:at|peak at|offload) ~(\S+) GiB", reason)
        said = re.search(r"peak at (\S+) ([GM])iB of", launch)
        assert said is not None
        if peaks:
            assert float(peaks[-1]) == pytest.approx(float(said[1]) / (1 if said[2] == "G" else 1024), abs=0.06)
        assert settings.effective_batch == load_recipes()[recipe].batch * load_recipes()[recipe].accumulation
        chosen.add((settings.preset, settings.batch))
        many = [] if gpus is None else ["--gpus", "2"]
        assert run(["plan", recipe, *many, "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert (planned["settings"]["preset"], planned["settings"]["batch"]) == (settings.preset, settings.batch)
        assert planned["gpu"]["band"] == "safe"
    assert len(chosen) > 1


@pytest.mark.parametrize(("gib", "measured", "batches"), [(16.0, 14.5, (24, 16)), (12.0, 9.0, (16, 24))])
def test_what_earlier_runs_have_measured_counts_in_the_choice(
    data: Change, monkeypatch: pytest.MonkeyPatch, gib: float, measured: float, batches: tuple[int, int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    (gpu,) = of_size(gib).gpus
    monkeypatch.setattr(gpus_of, "sample", lambda: MachineSnapshot(time=0.0, gpus=(replace(gpu, name="A4500"),)))
    settings, config = settings_for("pretrain-t5", "standard", data, None), load_recipes()["pretrain-t5"].model["config"]
    before = settings_for("pretrain-t5", None, data, None)
    # With the same samples it is a whole peak, which can also lower a forecast.
    remember(
        Measured(
            run="/runs/first",
            time=1.0,
            gpu=GpuKind("A4500", int(gib * GIB)),
            model=model_key(config),
            settings=replace(settings, batch=24, accumulation=2),
            reserved_bytes=int(measured * GIB),
            outside_bytes=GIB // 2,
            updates=200,
        )
    )
    after = settings_for("pretrain-t5", None, data, None)
    assert (before.preset, after.preset, (before.batch, after.batch)) == ("standard", "standard", batches)


def test_a_new_run_says_the_peak_and_what_would_be_safe(
    data: Change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(total: float, **assignments: str) -> str:
        cards = tuple(replace(gpu, total_bytes=int(total * GIB)) for gpu in machine(total).gpus)
        monkeypatch.setattr(gpus_of, "sample", lambda: MachineSnapshot(time=0.0, gpus=cards))
        train.new_run("pretrain-t5", "standard", Change(assignments={**data.assignments, **assignments}), None)
        return capsys.readouterr().err

    safe = said(80.0)
    assert "memtop: GPU memory is foreseen to peak at " in safe
    assert " of 80.0 GiB (" in safe
    assert "%, safe): estimate" in safe
    assert safe.count("\n") == 1
    tight = said(8.0, batch="32", accumulation="2")
    assert "danger): estimate\n" in tight
    advice = re.search(r"--batch (\d+) --accum (\d+) keeps the effective batch, and peaks at about (\S+) GiB\n", tight)
    assert advice is not None
    batch, accumulation, peak = advice.groups()
    assert int(batch) * int(accumulation) == 64
    assert int(batch) < 32
    assert float(peak) < 0.85 * 8
    assert "safe): estimate\n" in said(8.0, batch=batch, accumulation=accumulation)
    assert "no split with this effective batch is foreseen to be safe" in said(1.0)
    assert "foreseen" not in said(8.0, device="cpu")
    assert "foreseen" not in said(8.0, auto_batch="true"), "it measures"
    assert "cannot be foreseen: what the model is made of is not known" in said(8.0, **{"model.path": "nobody/has-this"})


def test_headless_leaves_out_only_a_peak_that_the_launch_has_said(
    data: Change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus_of, "sample", lambda: of_size(24.0))

    def told(**assignments: str) -> int | None:
        return train.new_run("sft-lora", None, Change(assignments={**data.assignments, **assignments}), None).told

    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps({**LLAMA_7B, "num_hidden_layers": 2, "max_position_embeddings": 2048}))
    assert told(**{"model.path": "llama"}) == 1
    assert "made for" not in capsys.readouterr().err
    assert told(**{"model.path": "llama", "seq_len": "4096"}) == 1
    assert (
        "memtop: T 4096 is longer than the 2048 tokens that the model is made for: longer samples may fail, "
        in capsys.readouterr().err
    )
    assert told(**{"model.path": "llama", "lora.targets": "q_proj,foo"}) == 1
    assert "memtop: llama has no layers foo: adapters are only at q_proj; " in capsys.readouterr().err
    assert told(**{"model.path": "nobody/has-this"}) is None, "its peak is foreseen after its download"
    assert told(**{"model.path": "llama", "device": "cpu"}) is None


@pytest.mark.parametrize("recipe", ["pretrain-causal", "pretrain-t5", "sft-lora"])
def test_a_card_of_the_size_that_people_have_trains_without_zero(
    data: Change, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    for free in (6.0, 12.0, 24.0, 80.0):
        monkeypatch.setattr(gpus_of, "sample", lambda free=free: machine(free))
        settings = settings_for(recipe, None, data, None)
        assert (settings.preset, settings.zero) == ("standard", Zero())
        assert settings.batch == load_recipes()[recipe].batch


def test_a_model_that_is_not_here_yet_is_not_guessed(
    data: Change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus_of, "sample", lambda: machine(3.0))
    assert settings_for("sft-lora", None, data, None).preset == "standard"
    assert "what the model needs cannot be estimated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("free", "gpus", "preset", "said"),
    [
        ((13.0, 5.0), ["0", "1"], "stage3", "meant for 4 up to 6 GiB; GPU 1 is the fullest of 2; --preset"),
        ((13.0, 14.0), ["0", "1"], "deepspeed", "meant for 12 GiB and more; GPU 0 is the fullest of 2"),
    ],
)
def test_the_fullest_gpu_decides(
    data: Change,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free: tuple[float, ...],
    gpus: list[str],
    preset: str,
    said: str,
) -> None:
    """For several processes, which the smallest must hold, as the guide says."""
    monkeypatch.setattr(gpus_of, "sample", lambda: machine(*free))
    assert settings_for("sft-lora", None, data, gpus).preset == preset
    told = capsys.readouterr().err
    assert said in told
    language.use("zh")
    try:
        (chosen,) = [line for line in map(language.tr, told.splitlines()) if "--preset" in line]
    finally:
        language.use("en")
    assert not re.search(r"[a-z]+ [a-z]+ [a-z]+", chosen), "the reason is Chinese"


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (
            {"auto_batch": "true"},
            "preset standard: --batch auto is not possible under ZeRO; 5.00 GiB of GPU memory free; GPU 1 is",
        ),
        (
            {"batch": "3,1", "accumulation": "4"},
            "preset standard: --batch 3,1 is not possible under ZeRO; 5.00 GiB of GPU memory free; GPU 1 is",
        ),
    ],
)
def test_no_zero_is_chosen_for_a_batch_that_it_cannot_have(
    data: Change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], split: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(gpus_of, "sample", lambda: machine(13.0, 5.0))
    settings = settings_for("sft-lora", None, Change(assignments={**data.assignments, **split}), ["0", "1"])
    assert (settings.preset, settings.zero) == ("standard", Zero())
    assert said in capsys.readouterr().err


def test_a_search_where_the_model_does_not_fit_says_how_to_offload(
    data: Change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus_of, "sample", lambda: machine(0.5))
    asked = Change(assignments={**data.assignments, "auto_batch": "true"})
    assert settings_for("pretrain-causal", None, asked, None).preset == "standard"
    said = capsys.readouterr().err
    advice = "memtop cannot offload with --batch auto; to offload, give --batch a number; --preset NAME chooses another\n"
    assert said.endswith(f" GiB: not below 85 % of the free memory. {advice}")


def test_one_process_is_pinned_to_the_emptiest_gpu(
    data: Change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus_of, "sample", lambda: machine(5.0, None, 13.0))
    found = train.new_run("pretrain-causal", None, Change(), None)
    assert gpus_in(found) == "GPU-2"
    assert "13.00 GiB of GPU memory free" in str(found.choice)
    assert "trains on GPU 2, the emptiest of 3; --gpus chooses others" in capsys.readouterr().err
    assert gpus_in(train.new_run("first-run", None, Change(), None)) == "GPU-2", "whatever the preset is"
    # What the person chose stays.
    assert gpus_in(train.new_run("pretrain-causal", None, Change(), ["0"])) == "0"
    assert "5.00 GiB of GPU memory free" in capsys.readouterr().err
    assert gpus_in(train.new_run("pretrain-causal", None, Change(assignments={"device": "cpu"}), None)) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert gpus_in(train.new_run("pretrain-causal", None, Change(), None)) == ""


def test_of_a_gpu_with_mig_the_emptiest_instance_is_taken(data: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = machine(20.0, 13.0).gpus
    parts = tuple(MigInstance(position=n, uuid=f"MIG-{n}", free_bytes=int(free * GIB)) for n, free in ((0, 2.0), (3, 9.5)))
    split = replace(one, mig=parts, details=GpuDetails(mig_mode=True))
    bare = replace(two, details=GpuDetails(mig_mode=True))
    # CUDA cannot use a GPU in MIG mode that has no instance.
    monkeypatch.setattr(gpus_of, "sample", lambda: MachineSnapshot(time=0.0, gpus=(split, bare)))
    for gpus in (None, ["0"]):
        found = train.new_run("pretrain-causal", None, Change(), gpus)
        assert gpus_in(found) == "MIG-3"
        assert "9.50 GiB of GPU memory free" in str(found.choice)
        others = "" if gpus else "; --gpus chooses others"
        assert str(found.choice).endswith(f"; trains on GPU 0, MIG 3, the emptiest of 2{others}")


def test_a_gpu_without_a_uuid_is_pinned_by_its_index(data: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(replace(gpu, uuid=None) for gpu in machine(5.0, 13.0).gpus)
    monkeypatch.setattr(gpus_of, "sample", lambda: MachineSnapshot(time=0.0, gpus=gpus))
    assert gpus_in(train.new_run("pretrain-causal", None, Change(), None)) == "1"


def test_the_pinned_gpu_is_in_the_environment_of_the_program(runs: Runs, tmp_path: Path, nvml_library: Path) -> None:  # noqa: F811
    script = Script(tmp_path / "script")
    for index, used in enumerate((5, 1)):
        script.gpu(index, total=20 * GIB, used=used * GIB, uuid=f"GPU-{index}", name="A4500")
    # A torch for CUDA that cannot be loaded: the run ends at once.
    torch = tmp_path / "packages" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('no torch')\n")
    (torch / "version.py").write_text("__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n")
    runs.environment |= script.write().env(nvml_library) | {"PYTHONPATH": str(torch.parent)}
    runs.environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = runs.memtop("train", "--headless", "--name", "a", status=None)
    assert "memtop: trains on GPU 1, the emptiest of 2; --gpus chooses others" in done.stderr
    command = json.loads((runs.path / "a/attempts/0001/command.json").read_text())
    assert command["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert runs.show("a")["choice"] == "trains on GPU 1, the emptiest of 2; --gpus chooses others"

    done = runs.memtop("restart", "a", "--gpus", "2", "--detach", status=2)
    assert done.stderr == "memtop: --gpus 2: this machine has no GPU 2; there are 0, 1\n"
    for attempt, gpus, processes, split in ((2, "1,0", 2, [8, 2]), (3, "0", 1, [8, 4])):
        runs.memtop("restart", "a", "--gpus", gpus, "--headless", status=None)
        command = json.loads((runs.path / f"a/attempts/{attempt:04}/command.json").read_text())
        assert command["environment"]["CUDA_VISIBLE_DEVICES"] == gpus
        shown = runs.show("a")
        settings = shown["settings"]
        assert (settings["gpus"], settings["world_size"]) == (gpus, processes)
        assert [settings["batch"], settings["accumulation"]] == split, "the effective batch is kept"
        assert shown["choice"] is None, "the person has chosen since"
    # A configuration has its GPUs.
    runs.memtop("rollback", "a", "1", "--headless", status=None)
    assert (runs.show("a")["settings"]["gpus"], runs.show("a")["settings"]["world_size"]) == ("GPU-1", 1)


@pytest.mark.long  # tests/train/test_portable_state.py goes on with two processes
def test_a_restart_with_more_processes_goes_on_with_the_next_sample(runs: Runs, tmp_path: Path, nvml_library: Path) -> None:  # noqa: F811
    script = Script(tmp_path / "script").gpu(0, total=GIB, used=0).gpu(1, total=GIB, used=0)
    runs.environment |= script.write().env(nvml_library)
    train_on_the_cpu = ("train", "--headless", "--set", "device=cpu", "--set", "data.max_bytes=100000", *TINY)
    runs.memtop(*train_on_the_cpu, "--name", "a", "--max-updates", "2")
    runs.memtop("restart", "a", "--gpus", "0,1", "--max-updates", "4", "--headless")
    runs.memtop(*train_on_the_cpu, "--name", "whole", "--max-updates", "4")
    moved, whole = (runs.show(name, metrics=True) for name in ("a", "whole"))
    assert (moved["settings"]["world_size"], whole["settings"]["world_size"]) == (2, 1)
    assert [row["attempt"] for row in moved["metrics"]] == [1, 1, 2, 2]
    assert [row["sample_digest"] for row in moved["metrics"]] == [row["sample_digest"] for row in whole["metrics"]]


def test_gpus_hidden_from_cuda_do_not_decide_the_preset(
    data: Change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = machine(3.0, 13.0).gpus
    seen = MachineSnapshot(time=0.0, gpus=(small, replace(large, visible_index=0)))
    monkeypatch.setattr(gpus_of, "sample", lambda: seen)
    # The variable can hold UUIDs or numbers: the monitor interprets it.
    for value in ("1", "GPU-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        train.new_run("pretrain-causal", None, Change(), None)
        assert "13.00 GiB of GPU memory free" in capsys.readouterr().err
    # CUDA's first GPU is the one that a single process takes, not the emptiest.
    both = MachineSnapshot(time=0.0, gpus=(replace(small, visible_index=0), replace(large, visible_index=1)))
    monkeypatch.setattr(gpus_of, "sample", lambda: both)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    train.new_run("pretrain-causal", None, Change(), None)
    assert "3.00 GiB of GPU memory free" in capsys.readouterr().err


CPU_BUILD = TorchBuild(version="2.13.0+cpu", cuda=None)
CUDA_13 = TorchBuild(version="2.13.0+cu130", cuda="13.0")


@pytest.mark.parametrize(
    ("build", "cuda", "capability", "words"),
    [
        (
            CPU_BUILD,
            "13.0",
            "9.0",
            "torch 2.13.0+cpu is built for CPUs only and cannot use the GPU here (NVIDIA H100); install",
        ),
        (
            CUDA_13,
            "12.4",
            "9.0",
            "the NVIDIA driver 550.1 supports CUDA up to 12.4, and torch 2.13.0+cu130 needs",
        ),
        (CUDA_13, "13.0", "7.0", "torch 2.13.0+cu130 has no kernels for the NVIDIA H100 (compute capability 7.0); install"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_one_line_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    build: TorchBuild,
    cuda: str,
    capability: str,
    words: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = machine(80.0).gpus
    gpu = replace(gpu, name="NVIDIA H100", details=GpuDetails(compute_capability=capability))
    seen = MachineSnapshot(time=0.0, gpus=(gpu,), driver_version="550.1", cuda_version=cuda)
    monkeypatch.setattr(gpus_of, "sample", lambda: seen)
    monkeypatch.setattr(gpus_of, "build_of", lambda _: build)
    found = train.new_run("pretrain-causal", None, Change(), None)
    assert gpus_in(found) == ""
    problem, choice = capsys.readouterr().err.splitlines()
    assert problem.startswith(f"memtop: device auto: trains on the CPU: {words}")
    assert "preset standard: the free GPU memory is not known" in choice, "not chosen by the memory of that GPU"
    with pytest.raises(UsageError) as refused:
        train.new_run("pretrain-causal", None, Change(), ["0"])
    assert str(refused.value).startswith(f"--gpus 0: {words}")
    with pytest.raises(UsageError, match=r"^device cuda: .*; install"):
        train.new_run("pretrain-causal", None, Change(assignments={"device": "cuda"}), None)
    assert train.new_run("pretrain-causal", None, Change(assignments={"device": "cpu"}), None).choice is not None


def test_a_gpu_without_kernels_is_passed_over(data: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = machine(30.0, 13.0).gpus
    old = replace(old, name="Tesla V100", details=GpuDetails(compute_capability="7.0"))
    new = replace(new, details=GpuDetails(compute_capability="8.6"))
    seen = MachineSnapshot(time=0.0, gpus=(old, new), driver_version="580.1", cuda_version="13.0")
    monkeypatch.setattr(gpus_of, "sample", lambda: seen)
    found = train.new_run("pretrain-causal", None, Change(), None)
    assert gpus_in(found) == "GPU-1"
    assert "trains on GPU 1" in str(found.choice)


def test_training_on_the_cpu_samples_no_gpu(data: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_of, "sample", lambda: pytest.fail("asked the machine"))
    cpu = Change(assignments={**data.assignments, "device": "cpu"})
    assert settings_for("sft-lora", None, cpu, None).preset == "standard"


def test_a_named_preset_is_taken_whole_where_it_is_meant_and_with_fresh_anywhere(data: Change) -> None:
    whole = settings_for("sft-lora", "stage2_offload", data, None)
    assert (whole.effective_batch, whole.seq_len, whole.epochs, whole.target_samples) == (18, 1792, 3.0, 0)
    kept = settings_for("pretrain-causal", "stage2_offload", Change(), None)
    assert (kept.effective_batch, kept.seq_len, kept.target_samples) == (64, 512, 2000 * 64)
    fresh = settings_for("pretrain-causal", "stage2_offload", Change(), None, fresh=True)
    assert (fresh.effective_batch, fresh.seq_len, fresh.target_samples) == (18, 1792, 2000 * 18)
    edited = settings_for("first-run", "deepspeed", Change(assignments={"seq_len": "64"}), None, fresh=True)
    assert (edited.seq_len, edited.effective_batch) == (64, 16)


def test_files_and_folders_are_kept_by_their_whole_path(data: Change, tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    asked = Change(assignments={**data.assignments, "model.path": "qwen", "data.eval": "pairs.jsonl"})
    settings = settings_for("sft-lora", "standard", asked, None)
    assert settings.data["train"] == settings.data["eval"] == str(tmp_path / "pairs.jsonl")
    assert settings.model == {"path": str(tmp_path / "qwen")}
    hub = settings_for("sft-lora", "standard", data, None)
    assert hub.model == {"path": "Qwen/Qwen2.5-0.5B"}


def test_a_missing_library_is_named_before_anything_starts(data: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else object())
    command = re.escape(f"{sys.executable} -m pip install '{ROOT}[train]'")
    with pytest.raises(UsageError, match=f"RECIPE sft-lora, preset stage3: this needs deepspeed: {command}"):
        settings_for("sft-lora", "stage3", data, None)


def test_a_missing_tracker_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"tensorboardX"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in {"tensorboard", "tensorboardX", "wandb"} - there else ModuleSpec(name, None),
    )
    asked = Change(assignments={"trackers": "tensorboard,wandb"})
    with pytest.raises(UsageError, match=r"^trackers wandb: not installed: .* pip install wandb$"):
        settings_for("first-run", "standard", asked, None)
    there.add("wandb")
    assert settings_for("first-run", "standard", asked, None).trackers == ("tensorboard", "wandb")


def test_a_model_that_cannot_be_built_is_wrong_usage_of_one_line(runs: Runs) -> None:
    done = runs.memtop("train", "--headless", "--set", "model.config.pad_token_id=999999", "--set", "device=cpu", status=2)
    assert done.stderr.splitlines()[-1] == (
        "memtop: run first-run: failed (exit status 2: model.config: no llama model works with these values: "
        "AssertionError: Padding_idx must be within num_embeddings); memtop show first-run"
    )
    assert "Traceback" not in done.stderr
    assert "Traceback" not in (runs.path / "first-run/attempts/0001/output.log").read_text()


def test_each_process_may_be_given_its_own_batch(data: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_of, "sample", lambda: machine(20.0, 10.0))
    asked = Change(assignments={**assignments_of((), batch="3,1", accumulation=8)})
    settings = settings_for("first-run", None, asked, ["0", "1"])
    assert (settings.split_text, settings.effective_batch) == ("3+1 x 8", 32)
    monkeypatch.setattr(gpus_of, "sample", lambda: machine(20.0, 10.0, 10.0))
    pairs = Change(assignments={"rank_splits": "8x2,4x2,4x2"})
    settings = settings_for("first-run", None, pairs, ["0", "1", "2"])
    assert (settings.rank_splits, settings.effective_batch) == (((8, 2), (4, 2), (4, 2)), 32)
    with pytest.raises(UsageError, match=r"^batch 3,1: gives 2 sizes, the run has 1 process; give one for each"):
        train.new_run("first-run", None, asked, None)
    with pytest.raises(UsageError, match=r"^batch 3,1: ZeRO-2 needs the same .* on all processes; .* --preset standard$"):
        train.new_run("first-run", "deepspeed", asked, ["0", "1"])


@pytest.mark.parametrize("text", ["3,a", "4x2,", "3,1_0"])
def test_sizes_of_the_processes_are_whole_numbers(text: str) -> None:
    with pytest.raises(
        UsageError, match=f"^batch '{text}': must be a whole number, or one size for each process: B,B or BxA,BxA$"
    ):
        train.new_run("first-run", None, Change(assignments=assignments_of((), batch=text)), ["0", "1"])


def test_a_batch_that_memtop_finds_is_given_by_a_word() -> None:
    assert assignments_of((), batch="auto", accumulation=None) == {"auto_batch": "true"}
    assert assignments_of((), batch=4, accumulation=None) == {"batch": "4"}
    with pytest.raises(UsageError, match=r"^--accum 8: --batch auto finds the accumulation, too; leave it out$"):
        assignments_of((), batch="auto", accumulation=8)


def test_a_setting_is_given_once(data: Change) -> None:
    assert assignments_of(("batch=4", "lr=1e-4"), batch=4) == {"batch": "4", "lr": "1e-4"}
    for text, given, words in (
        ("batch=4", {"batch": 8}, "--batch says 8"),
        ("accum=4", {"accumulation": 8}, "--accum says 8"),
        ("batch=4", {"batch": "auto"}, "--batch says auto"),
        ("save_every=4", {"save_every": 8}, "--save-every says 8"),
    ):
        with pytest.raises(UsageError, match=f"^--set {text}: {words}; give one of them$"):
            assignments_of((text,), **given)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --a b.yaml", "train.py"),
        ("torchrun --nproc-per-node 2 src/train.py", "train.py"),
        ("env PYTHONPATH=. python -m pkg.train", "pkg.train"),
        ("python -m torch.distributed.run --nproc-per-node 2 -m pkg.train", "pkg.train"),
        ("bash run.sh", "run.sh"),
        ("python -m", "python"),
        ("/opt/bin/train", "train"),
    ],
)
def test_a_program_has_the_name_of_its_script(command: str, name: str) -> None:
    assert name_of(command.split()) == name


def test_a_program_that_is_not_there_is_refused_before_the_run_is_created(runs: Runs, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('step 1 loss 1.0')")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    runs.environment["PATH"] = f"{folder}:/bin"

    def refused(*command: str) -> str:
        said = runs.memtop("train", "--detach", "--", *command, status=2).stderr
        assert not list(runs.path.glob("*/run.json")), "nothing was created"
        return said

    assert "COMMAND pyton: no such program on PATH; did you mean python?" in refused("pyton", str(script))
    assert f"COMMAND {tmp_path}/trian.py: no such file; looked for" in refused(f"{tmp_path}/trian.py")
    missing = refused("python", "-u", f"{tmp_path}/train.pyy", "--batch", "2")
    assert f"train.pyy: no such file; looked for {tmp_path}/train.pyy; did you mean {script}?" in missing
    assert runs.memtop("train", "--detach", "--name", "a", "--", "python", str(script))
    runs.wait("a", lambda run: run["state"] == "finished" and run["supervisor_pid"] is None)


@pytest.mark.parametrize("command", ["python -m pkg.train", "python -c 1", "python -X dev no.py", "env A=1 no.py", "python"])
def test_what_may_be_there_is_not_refused(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    train.refuse_not_found(command.split())
    # A run that waits may find its files when it begins.
    train.refuse_not_found(["python", "no.py"], waits=True)
    train.refuse_not_found(["./no"], waits=True)
