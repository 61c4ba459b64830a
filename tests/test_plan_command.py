"""`memtop plan`: what a run would need, and what else would fit."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bench.predict import drawn
from memtop.cli import gpus as gpus_of
from memtop.cli import run
from memtop.cli.plan_host import host_text, planned_host, share_text
from memtop.cli.plan_output import bound_text
from memtop.presets import Settings, host_estimate, parameters
from memtop.presets.choosing import COMMUNICATION_BYTES, CONTEXT_BYTES
from memtop.presets.estimate import estimate
from memtop.presets.measured import GpuKind, Measured, learned, model_key, place, remember
from memtop.presets.parameters import least_size
from memtop.presets.schema import Lora
from memtop.supervisor import dry_runs, language, plan, units
from memtop.supervisor.dry_runs import DryRuns
from memtop.supervisor.interpreters import Search
from memtop.supervisor.monitor.processes.proc import identify, is_alive
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.plan import (
    SURE,
    Bound,
    Card,
    bound_of,
)
from memtop.supervisor.recovery.forecast import words_at_launch
from tests.forking import Program
from tests.test_plan import CARD, GIB, LLAMA, MIB, estimated_once, first_run


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Path) -> None:
    """A cache of its own, in which only the answers of dry runs are shared with the other tests;
    and dry runs are forks of a process that has the libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "memtop").mkdir(parents=True)
    (tmp_path / "cache" / "memtop" / "dry_runs").symlink_to(answers)
    monkeypatch.setenv("COLUMNS", "200")
    for module in (plan, host_estimate):
        monkeypatch.setattr(module, "estimate", estimated_once)
    forked = functools.partial(Program, imported=("peft", "bitsandbytes"))
    monkeypatch.setattr(dry_runs, "subprocess", SimpleNamespace(Popen=forked, PIPE=subprocess.PIPE))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "model"


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_by_a_dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cache" / "memtop" / "dry_runs").unlink()
    found = document(capsys, "first-run", "--vram", "1")
    gpu = found["gpu"]
    assert gpu["basis"] == "dry run"
    assert sum(gpu["components"].values()) == gpu["peak_bytes"]
    assert gpu["total_bytes"] == GIB
    assert gpu["band"] == "safe"
    assert gpu["peak_phase"] in ("forward", "backward", "optimizer")
    assert found["effective_batch"] == found["settings"]["batch"] * found["settings"]["accumulation"] == 32
    assert found["max_safe_batch"] == 32
    host = found["host"]
    assert sum(host["components"].values()) == host["peak_bytes"] > GIB
    assert host["least_bytes"] < host["peak_bytes"] < host["most_bytes"]
    assert "assumption" in host["reason"]
    assert found["model"]["parameters"] > 1e6
    # The second time, the answers that were kept are the same.
    again = document(capsys, "first-run", "--vram", "1")
    for one in (found, again):
        # How much of the host's memory is free has changed meanwhile.
        one["host"] = None
        one["alternatives"] = [{**way, "host": None} for way in one["alternatives"]]
    assert again == found
    assert list((tmp_path / "cache").rglob("dry_runs/*"))


def test_a_plan_knows_what_earlier_runs_have_measured(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = GpuSample(index=0, name="A4500", total_bytes=20 * GIB, free_bytes=20 * GIB)
    here = replace(gpus_of.sample(), gpus=(gpu,))
    monkeypatch.setattr(gpus_of, "sample", lambda: here)
    words = ("--model", str(model), "--method", "full", "--preset", "standard", "--batch", "2", "--accum", "3")
    before = document(capsys, *words)
    settings = msgspec.convert(before["settings"], Settings)
    assert (before["gpu"]["context_measured"], before["measured"]) == (False, None)
    exact = before["gpu"]["peak_bytes"] - before["gpu"]["components"]["context"]
    row = {"run": "/runs/first", "time": 1.0, "gpu": GpuKind("A4500", 20 * GIB), "model": model_key(LLAMA)}
    measured = Measured(**row, settings=settings, reserved_bytes=2 * exact, outside_bytes=300 * MIB)
    remember(measured)
    found = document(capsys, *words)
    assert found["gpu"]["context_measured"]
    assert found["gpu"]["components"]["context"] == 300 * MIB
    assert found["gpu"]["peak_bytes"] == 2 * exact + 300 * MIB, "what these settings took is better than the dry run"
    assert found["gpu"]["calibrated"] == "dry run, corrected by 1 earlier run with these settings"
    width = [one["gpu"]["most_bytes"] - one["gpu"]["least_bytes"] for one in (before, found)]
    assert width[1] == pytest.approx(2 * width[0], rel=1e-3), "as sure as a dry run"
    seen = {"run": "/runs/first", "is_whole": True, "peak_bytes": 2 * exact + 300 * MIB, "of_foreseen": 2.0}
    assert found["measured"] == seen
    assert run(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "in first, an earlier run with these settings: 100.0 % more than the dry run alone foresees" in said
    assert "measured context 300 MiB" in said
    # Without torch it estimates, and the earlier run scales the estimate.
    monkeypatch.setattr("memtop.cli.plan.search", lambda: Search(found=None))
    estimated = document(capsys, *words)["gpu"]
    assert (estimated["basis"], estimated["calibrated"]) == (
        "estimate",
        "estimate, calibrated by 1 earlier run with these settings",
    )
    assert estimated["peak_bytes"] == pytest.approx(2 * exact + 300 * MIB, rel=1e-4)
    path = place()
    assert path is not None
    path.write_text("broken\n")
    assert run(["plan", *words]) == 0
    assert f"memtop: earlier runs: {path}: line 1 is left out: " in capsys.readouterr().err


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_run_that_may_not_have_seen_the_longest_samples_raises_a_plan_and_never_lowers_it(
    capsys: pytest.CaptureFixture[str], model: Path, a4500: GpuKind, factor: float
) -> None:
    words = ("--model", str(model), "--method", "lora", "--preset", "standard")
    before = document(capsys, *words)
    settings, exact = msgspec.convert(before["settings"], Settings), before["gpu"]["peak_bytes"] - CONTEXT_BYTES
    assert settings.task == "sft"
    keep(a4500, settings, round(factor * exact), updates=5)
    found = document(capsys, *words)
    assert found["gpu"]["peak_bytes"] == pytest.approx(max(1, factor) * exact + 300 * MIB, rel=1e-4)
    raised = "dry run; raised, because an earlier run needed more than foreseen"
    assert (found["gpu"]["calibrated"] == raised) is (factor > 1)
    row = found["measured"]
    assert (row["run"], row["is_whole"]) == ("/runs/first", False)
    assert row["of_foreseen"] == pytest.approx(factor, rel=1e-4)
    assert run(["plan", *words]) == 0
    assert " in first, an earlier run with these settings; longer samples may need more\n" in capsys.readouterr().out


@pytest.fixture
def a4500(monkeypatch: pytest.MonkeyPatch) -> GpuKind:
    """A GPU with 2 GiB."""
    gpu = GpuSample(index=0, name="A4500", total_bytes=2 * GIB, free_bytes=2 * GIB)
    here = replace(gpus_of.sample(), gpus=(gpu,))
    monkeypatch.setattr(gpus_of, "sample", lambda: here)
    return GpuKind("A4500", 2 * GIB)


def keep(kind: GpuKind, settings: Settings, reserved_bytes: int, **values: Any) -> None:
    model = model_key(settings.model.get("config") or LLAMA)
    row = {"run": "/runs/first", "time": 1.0, "gpu": kind, "model": model, "outside_bytes": 300 * MIB}
    remember(Measured(**row, settings=settings, reserved_bytes=reserved_bytes, **values))


@pytest.mark.parametrize("failed", [False, True])
def test_what_did_not_fit_here_is_not_the_largest_safe_batch(
    capsys: pytest.CaptureFixture[str], a4500: GpuKind, failed: bool
) -> None:
    words = ("first-run", "--preset", "standard")
    before = document(capsys, *words)
    best = before["max_safe_batch"]
    settings = msgspec.convert(before["settings"], Settings)
    largest = replace(settings, batch=best, accumulation=settings.effective_batch // best)
    keep(a4500, largest, round(1.9 * GIB), failed=failed)
    found = document(capsys, *words, "--batch", str(best), "--accum", str(largest.accumulation))
    assert found["gpu"]["peak_bytes"] == round(1.9 * GIB) + 300 * MIB
    assert found["gpu"]["basis"] == "dry run"
    assert ("lifted" in found["gpu"]["calibrated"]) is failed
    assert found["gpu"]["most_bytes"] > found["gpu"]["peak_bytes"]
    assert found["max_safe_batch"] is None or found["max_safe_batch"] < best
    assert all((way["preset"], way["batch"]) != ("standard", best) or way["changes"] for way in found["alternatives"])
    # A launch says the same.
    said = next(words_at_launch(largest, Card.of(gpus_of.sample().gpus[0]), learned(a4500)))
    assert "danger" in said


def test_alternatives_are_not_called_calibrated_where_the_dry_run_scales_them(
    capsys: pytest.CaptureFixture[str], a4500: GpuKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("first-run", "--preset", "standard", "--batch", "16", "--accum", "2")
    before = document(capsys, *words)
    settings = msgspec.convert(before["settings"], Settings)
    other = replace(settings, batch=2)
    keep(a4500, other, round(0.1 * GIB))
    found = document(capsys, *words)
    assert found["gpu"]["calibrated"] is None
    assert found["alternatives"]
    for way in found["alternatives"]:
        assert way["calibrated"] is None
        inside, sure = way["peak_bytes"] - 300 * MIB, SURE[way["basis"]]
        assert way["least_bytes"] == pytest.approx(sure[0] * inside + 300 * MIB, rel=1e-3)
        assert way["most_bytes"] == pytest.approx(sure[1] * inside + 300 * MIB, rel=1e-3)
    # The dry run decides; a measurement with another batch has scaled the estimate once, not twice.
    same = {(way["preset"], way["batch"], way["seq_len"]): way for way in before["alternatives"]}
    for way in found["alternatives"]:
        known = same[way["preset"], way["batch"], way["seq_len"]]
        assert way["peak_bytes"] - 300 * MIB == pytest.approx(known["peak_bytes"] - CONTEXT_BYTES, rel=1e-3)
    monkeypatch.setattr("memtop.cli.plan.search", lambda: Search(found=None))
    assert document(capsys, *words)["gpu"]["calibrated"] == "estimate, calibrated by 1 earlier run with another batch"


def test_the_presets_are_foreseen_by_what_earlier_runs_have_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMTOP_RUNS_DIR", str(tmp_path / "runs"))
    gpu = GpuSample(index=0, name="A4500", total_bytes=20 * GIB, free_bytes=20 * GIB)
    here = replace(gpus_of.sample(), gpus=(gpu,))
    monkeypatch.setattr(gpus_of, "sample", lambda: here)

    def forecast() -> Any:
        assert run(["presets", "standard", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["forecast"]

    assert forecast()["basis"] == "estimate"
    settings = first_run()
    model = model_key(settings.model["config"])
    row = {"run": "/runs/first", "time": 1.0, "gpu": GpuKind("A4500", 20 * GIB), "model": model}
    remember(Measured(**row, settings=settings, reserved_bytes=3 * GIB, outside_bytes=300 * MIB))
    found = forecast()
    assert found["basis"] == "estimate, calibrated by 1 earlier run with these settings"
    assert found["peak_bytes"] == pytest.approx(3 * GIB + 300 * MIB, rel=1e-6)


def test_a_plan_for_two_gpus_names_the_memory_of_nccl(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (document(capsys, "first-run", "--vram", "4", "--gpus", gpus)["gpu"]["components"] for gpus in "12")
    assert two["communication"] == COMMUNICATION_BYTES
    assert "communication" not in one


def test_a_plan_for_several_gpus_is_for_the_fullest_of_those_that_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = (20, 6, 21)
    cards = tuple(GpuSample(index=at, total_bytes=24 * GIB, free_bytes=size * GIB) for at, size in enumerate(free))
    monkeypatch.setattr(gpus_of, "sample", lambda: MachineSnapshot(time=0, gpus=cards))
    for gpus, others in (("1", 3), ("2", 4), ("4", 18)):
        found = document(capsys, "first-run", "--gpus", gpus)["gpu"]
        assert found["fraction"] == pytest.approx((found["peak_bytes"] + others * GIB) / (24 * GIB))


def test_a_plan_for_a_model_and_a_method(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    found = document(capsys, "--model", str(model), "--method", "lora", "--batch", "2", "--accum", "3", "--vram", "0.6")
    assert found["settings"]["recipe"] == "sft-lora"
    assert found["model"]["model_type"] == "llama"
    assert found["effective_batch"] == 6
    assert found["model"]["trained_parameters"] == 2 * 64 * (4 * (64 + 64) + 3 * (64 + 128))
    same = document(
        capsys, "--model", str(model / "config.json"), "--method", "lora", "--batch", "2", "--accum", "3", "--vram", "0.6"
    )
    assert {**same, "host": None} == {**found, "host": None}


def test_without_a_gpu_the_host_memory_is_that_of_a_training_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "first-run", "--host-ram", "1")
    host = found["host"]
    assert (host["total_bytes"], host["available_bytes"], host["reason"]) == (GIB, GIB, "")
    assert host["fraction"] == host["peak_bytes"] / GIB
    assert {"weights", "activations", "optimizer"} <= host["components"].keys()
    assert host["band"] == "safe"
    assert document(capsys, "first-run", "--host-ram", "0.45")["host"]["band"] == "danger"
    assert run(["plan", "first-run", "--host-ram", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("host memory ") and "· safe" in line for line in lines)
    assert any("trained on this CPU: between" in line for line in lines)
    assert not any(line.startswith("fits ") for line in lines)


def test_what_the_host_cannot_hold_is_named_and_no_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "first-run", "--vram", "1", "--batch", "16", "--accum", "1"]
    assert document(capsys, *words[1:], "--host-ram", "64")["alternatives"]
    assert document(capsys, *words[1:], "--host-ram", "0.5")["alternatives"] == []
    assert run([*words, "--host-ram", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "fits        no: the run needs more host memory than there is" in lines
    assert not any(line.startswith("or ") for line in lines)


def test_pages_of_the_models_file_that_the_system_can_drop_are_no_need(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    config = {"model_type": "llama", **sizes, "num_key_value_heads": 8, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = first_run(
        model={"path": str(tmp_path)}, device="cuda", method="lora", lora=Lora(r=8, alpha=16), precision="bf16"
    )
    found = planned_host(settings, HostSample(total_bytes=64 * GIB, available_bytes=64 * GIB), None, on_gpu=True)
    assert found.foreseen is not None
    row = found.row
    assert "mapped weights" not in row["components"]
    assert row["fraction"] == row["peak_bytes"] / (64 * GIB)
    assert row["with_files_bytes"] - row["peak_bytes"] > 4 * 1.2e9, "the file, in 32 bits"
    assert any(line.startswith("while read  up to ") for line in host_text(found, on_gpu=True))


def test_the_host_memory_of_a_model_that_was_not_downloaded_is_unknown() -> None:
    settings = first_run(model={"path": "nobody/nothing"})
    found = planned_host(settings, HostSample(total_bytes=GIB, available_bytes=GIB), None, on_gpu=False)
    assert found.row["peak_bytes"] is None
    assert found.row["band"] == "unknown"
    assert "not known before it is downloaded" in found.reason
    assert [*host_text(found, on_gpu=False)] == [f"host memory –: {found.reason}"]


def test_in_a_limited_cgroup_the_limit_counts() -> None:
    host = HostSample(total_bytes=64 * GIB, limit_bytes=GIB, available_bytes=GIB // 2)
    found = planned_host(first_run(), host, None, on_gpu=False)
    assert found.foreseen is not None
    assert found.total == GIB
    assert found.fraction == (GIB // 2 + found.foreseen.peak) / GIB


def test_without_torch_it_is_an_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    bare = Path(sys.base_prefix) / "bin" / "python3"
    (tmp_path / "bare").symlink_to(bare)
    monkeypatch.setenv("MEMTOP_PYTHON", str(tmp_path / "bare"))
    assert run(["plan", "--model", str(model), "--vram", "8"]) == 0
    out, told = capsys.readouterr()
    assert "by          estimate: between" in out
    assert "estimated without a dry run: no Python with torch was found" in told


MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 2}


def test_without_a_gpu_a_model_without_an_estimate_gets_a_bound_and_the_way_to_a_dry_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    bare = replace(gpus_of.sample(), gpus=())
    monkeypatch.setattr(gpus_of, "sample", lambda: bare)
    (model / "config.json").write_text(json.dumps(MIXTRAL))
    assert run(["plan", "--model", str(model)]) == 0
    out, told = capsys.readouterr()
    assert "GPU memory  at least " in out
    assert "only a bound: model.config.model_type mixtral: no estimate for this architecture" in told
    assert "memtop: no GPU is here: with --vram GIB, which says how large yours is, a dry run foresees this model" in told
    less = {name: value for name, value in MIXTRAL.items() if name != "intermediate_size"}
    (model / "config.json").write_text(json.dumps(less))
    assert run(["plan", "--model", str(model)]) == 2
    assert "its configuration lacks intermediate_size; no GPU is here: with --vram GIB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words", "said"),
    [
        ({"model_type": "t5"}, ["--method", "lora"], "this recipe trains causal language models"),
        ({"model_type": "gpt2"}, ["--method", "lora", "--set", "lora.targets=nope"], "lora.targets nope: "),
        ({"model_type": "gpt2"}, ["--method", "qlora"], "lora.targets q_proj"),
    ],
)
def test_without_a_gpu_wrong_settings_are_named(
    config: dict[str, Any],
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
) -> None:
    bare = replace(gpus_of.sample(), gpus=())
    monkeypatch.setattr(gpus_of, "sample", lambda: bare)
    (model / "config.json").write_text(json.dumps(config))
    assert run(["plan", "--model", str(model), *words]) == 2
    assert said in capsys.readouterr().err


NEW = {**LLAMA, "model_type": "quokka", "tie_word_embeddings": False}
NEW_LEAST = 300 * 64 + 2 * 3 * 64 * 128 // 2


@pytest.fixture
def new_model(tmp_path: Path) -> Path:
    """Of an architecture that transformers does not know."""
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NEW))
    return folder


def test_a_model_of_an_unknown_architecture_gets_a_bound(capsys: pytest.CaptureFixture[str], new_model: Path) -> None:
    found = document(capsys, "--model", str(new_model), "--vram", "1")
    gpu = found["gpu"]
    assert (gpu["basis"], gpu["peak_bytes"], gpu["most_bytes"], gpu["fits"], gpu["band"]) == (
        "bound",
        None,
        None,
        None,
        "unknown",
    )
    # fp32 weights, gradients and two moments.
    assert gpu["least_bytes"] == sum(gpu["components"].values()) == 16 * NEW_LEAST
    assert "does not know the architecture quokka" in gpu["reason"]
    assert (found["max_safe_batch"], found["alternatives"], found["smallest_peak_bytes"]) == (None, [], None)
    assert run(["plan", "--model", str(new_model), "--vram", "1"]) == 0
    out, told = capsys.readouterr()
    assert f"GPU memory  at least {units.size(16 * NEW_LEAST)} of 1.0 GiB" in out
    assert "fits        not known: the peak is higher" in out
    assert "by          bound: the embeddings and the feed-forward part of each layer" in out
    assert "this is no peak, only a bound: " in told
    (new_model / "config.json").write_text(json.dumps({**NEW, "vocab_size": 2_000_000, "hidden_size": 1024}))
    gpu = document(capsys, "--model", str(new_model), "--vram", "1")["gpu"]
    assert gpu["least_bytes"] > gpu["total_bytes"] == GIB
    assert (gpu["fits"], gpu["band"]) == (False, "danger")
    assert run(["plan", "--model", str(new_model), "--vram", "1"]) == 0
    assert "fits        no: this alone is more than there is" in capsys.readouterr().out
    assert run(["plan", "--model", str(new_model), "--vram", "1", "--all"]) == 0
    assert re.search(r"^deepspeed +\S+ x \S+ x 1 +bound: at least .* GiB: ", capsys.readouterr().out, re.MULTILINE)


def test_the_files_of_a_model_say_how_large_it_is(capsys: pytest.CaptureFixture[str], new_model: Path) -> None:
    shapes = {"emb.weight": [300, 64], "lm_head.weight": [300, 64], "blocks.0.mix": [64, 500], "norm": [64]}
    header = json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()})
    (new_model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    gpu = document(capsys, "--model", str(new_model), "--vram", "1")["gpu"]
    assert (gpu["basis"], gpu["counted"]) == ("bound", "the weights in its files")
    count = 2 * 300 * 64 + 64 * 500 + 64
    assert gpu["least_bytes"] == 16 * count
    # A tied head is no second matrix, also if an old file has it.
    (new_model / "config.json").write_text(json.dumps({**NEW, "tie_word_embeddings": True}))
    assert document(capsys, "--model", str(new_model), "--vram", "1")["gpu"]["least_bytes"] == 16 * (count - 300 * 64)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "quokka", "hidden_size": 64},
            "its configuration lacks num_hidden_layers, vocab_size, intermediate_size",
        ),
        ({**NEW, "quantization_config": {"bits": 4}}, "there is no bound: its weights are quantized"),
        ({**NEW, "model_type": "vit"}, "model_type vit: transformers has no causal language model of this kind"),
        ({**NEW, "model_type": "umt5"}, "model_type umt5: it has an encoder and a decoder"),
        ({**NEW, "model_type": "llava"}, "model_type llava: it reads images, too"),
        ({**LLAMA, "model_type": "distilbert"}, "model_type distilbert: transformers has no causal language model"),
    ],
)
def test_a_model_without_a_bound_is_refused(
    config: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str], new_model: Path
) -> None:
    (new_model / "config.json").write_text(json.dumps(config))
    assert run(["plan", "--model", str(new_model), "--vram", "1"]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert said in told
    assert told.count("\n") == 1


def test_a_bound_is_below_what_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_FAMILIES", {})
    card, rng, shares = replace(CARD, generation=90), random.Random(3), []
    for _ in range(80):
        one = drawn(rng)
        values = {"num_hidden_layers": 4, "intermediate_size": 3072} if one.config["model_type"] == "gpt2" else {}
        config = one.config | values | ({"vocab_size": 50257, "hidden_size": one.config["n_embd"]} if values else {})
        settings = replace(one.settings, model={"config": config})
        if values and one.config["n_layer"] < 4:
            continue
        bound = bound_of(settings, card)
        if isinstance(bound, str):
            assert one.settings.zero.offload_parameters
            continue
        shares.append(bound.bytes / estimate(settings, one.config, generation=90, capacity=80 * GIB).allocated)
    # The rest has all of it in host memory.
    assert len(shares) > 50
    assert 0 < min(shares) < max(shares) <= 1


def test_a_bound_never_counts_layers_that_may_differ() -> None:
    def least(**changes: Any) -> int:
        found = least_size(first_run(model={"config": {**NEW, **changes}}))
        assert not isinstance(found, str)
        return found.parameters

    words, part = 300 * 64, 3 * 64 * 128 // 2
    assert least() == words + 2 * part
    assert least(num_hidden_layers=4, layers_block_type=["a", "b", "a", "b"]) == words + part
    assert least(num_hidden_layers=12, num_hidden_groups=1, embedding_size=32) == words // 2 + part
    # Only one of two layers may have experts.
    assert least(num_experts=8, moe_intermediate_size=32) == words + 3 * part
    assert least(num_experts=2, moe_intermediate_size=32) == words + 2 * part // 2
    assert least(num_experts=8, moe_intermediate_size=32, first_k_dense_replace=0) == words + 4 * part
    assert least(num_hidden_layers=4, layer_types=["a_attention", "b_attention"] * 2) == words + 4 * part
    assert least(num_hidden_layers=None, text_config={**NEW, "num_hidden_layers": 3}) == words + 3 * part


def test_all_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "first-run", "--all", "--vram", "1", "--json"]) == 0
    rows = {row["preset"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"standard", "deepspeed", "stage2_offload", "stage3", "minimal"} <= set(rows)
    assert rows["stage2_offload"]["peak_bytes"] < rows["standard"]["peak_bytes"]
    of_host = {name: row["host"]["peak_bytes"] for name, row in rows.items()}
    assert of_host["stage2_offload"] > of_host["standard"]
    speeds = {name: row["speed_class"] for name, row in rows.items()}
    assert speeds["standard"] == "about the same"
    assert (speeds["stage2_offload"], speeds["minimal"]) == ("slower", "much slower")
    assert all(row["speed_basis"] for row in rows.values())
    assert run(["plan", "first-run", "--all", "--vram", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^minimal .* much slower$", out, re.MULTILINE)
    # The bands stand below each other, and host memory has one, too.
    assert (
        len({line.index("  dry run  ") if "  dry run  " in line else line.index("  estimate  ") for line in out.splitlines()})
        == 1
    )
    assert all(re.search(r" %  \S+ \w+ .*  RAM [\d.]+ GiB  \S+ \w+ ", line) for line in out.splitlines()), out


def test_the_share_names_the_memory_of_other_programs_before_the_percentage_that_has_it() -> None:
    assert share_text(2 << 30, 8 << 30, 0, "25.0 % · safe") == "2.0 / 8.0 GiB, 25.0 % · safe"
    with_others = share_text(2 << 30, 8 << 30, 4 << 30, "75.0 % · safe")
    assert with_others == "2.0 / 8.0 GiB; with 4.0 GiB of other programs 75.0 % · safe"


def test_on_a_terminal_lines_are_broken_between_words_below_their_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    bound = Bound(bytes=9 * GIB, components={f"part {number}": GIB for number in range(9)}, counted="its weights")
    rows = [*bound_text(bound, CARD)]
    assert all(len(row) <= 80 for row in rows), rows
    (first, second) = (row for row in rows if "part" in row)
    assert first.startswith("parts       part 0 1.0 GiB, ")
    assert re.match(r" {12}\S", second)


def test_alternatives_say_how_fast_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "pretrain-causal", "--preset", "standard", "--vram", "1.5")["alternatives"]
    assert {row["speed_class"] for row in found} <= {"faster", "about the same", "slower", "much slower", None}
    (checkpointed,) = [row for row in found if row["changes"] == ["gradient checkpointing on"]]
    assert checkpointed["speed_class"] == "slower"
    assert "activations are computed twice: 20 to 30 % slower" in checkpointed["speed_basis"]
    assert run(["plan", "pretrain-causal", "--preset", "standard", "--vram", "1.5"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("or  ")]
    assert any(line.endswith("; training is unchanged; slower") for line in rows), rows
    assert all(re.search(r": ~?[\d.]+ [MG]iB, between [\d.]+ [MG]iB and [\d.]+ [MG]iB; ", line) for line in rows), rows


@pytest.mark.parametrize("words", [("pretrain-causal", "--vram", "1.5"), ("first-run", "--vram", "0.8", "--batch", "32")])
def test_the_first_proposal_is_what_a_dry_run_foresees(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *words)
    first = found["alternatives"][0]
    assert (first["basis"], first["band"]) == ("dry run", "safe")
    back = document(capsys, *words, *first["options"])
    assert back["gpu"]["peak_bytes"] == first["peak_bytes"]
    assert {row["basis"] for row in found["alternatives"][1:]} <= {"estimate"}, "no more dry runs than that"


def test_in_chinese_no_comma_and_no_bracket_is_of_half_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMTOP_LANG", "zh")
    try:
        assert run(["plan", "pretrain-causal", "--preset", "standard", "--vram", "1.5"]) == 0
    finally:
        language.use("en")
    out = capsys.readouterr().out
    assert "或  " in out
    assert "；更慢\n" in out
    assert not re.search(r"[,()]", out), out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "python", __file__], "-- COMMAND: it names no model"),
        (["--", "python", "nope.py"], f"COMMAND python nope.py: no such file; looked for {Path.cwd() / 'nope.py'}"),
        (["--model", "gpt2", "--", "python", "nope.py"], "COMMAND python nope.py: no such file"),
        (["--", "nope"], "-- COMMAND: memtop can read only a Python script (python train.py ...); leave out the command"),
        (["--", "torchrun", "nope/train.py", "--lr", "1"], "COMMAND torchrun nope/train.py: no such file; looked for "),
        (["--", "python", "-m", "nope"], "-- COMMAND: it names no model"),
        (["first-run", "--", "python", "train.py"], "RECIPE with -- COMMAND: leave it out"),
        (["--all", "--", "python", "train.py"], "--all with -- COMMAND: leave it out"),
        (["first-run", "--method", "lora"], "--method lora: recipe first-run is for method full"),
        (["first-run", "--all", "--preset", "standard"], "--all with --preset standard: give one of them"),
        (["--model", "/nowhere/at/all"], "no such folder"),
        (["--model", __file__], "is a file; give a folder with a config.json"),
        (["frist-run"], "did you mean first-run"),
        (["first-run", "--vram", "0"], "'0' is not a size: give GiB as a number"),
        (["first-run", "--vram", "24G"], "'24G' is not a size: give GiB as a number, such as 24"),
        (["first-run", "--host-ram", "nan"], "'nan' is not a size"),
        (["--set", "lora.r=8", "--", "python", "train.py"], "--set with -- COMMAND: leave it out"),
        (["first-run", "--set", "lora.x=3"], "--set lora.x: unknown key"),
        (["first-run", "--gpus", "0"], "--gpus 0: at least one; here it is how many GPUs, not which"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *words]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert said in told
    assert told.count("\n") == 1


def test_a_batch_that_cannot_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("first-run", "--set", "precision=bf16", "--vram", "0.55")
    assert run(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "no: each batch that keeps the effective batch needs 85 % of the GPU or more" in said
    assert re.search(r"^smallest    1 x \d+ x 1: ~.* !! danger$", said, re.MULTILINE)
    found = document(capsys, *words)
    assert found["max_safe_batch"] is None
    assert found["assumed"] == ["the GPU has bf16 and flash attention, as those of compute capability 8.0 and above"]
    assert f"assumed {found['assumed'][0]}" in " ".join(said.split())
    assert found["smallest_peak_bytes"] > 0.85 * found["gpu"]["total_bytes"]


def test_a_plan_takes_every_setting_of_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    plain = document(capsys, "first-run", "--vram", "4")
    found = document(capsys, "first-run", "--vram", "4", "--set", "gradient_checkpointing=true", "--batch", "4")
    assert found["settings"]["gradient_checkpointing"]
    assert found["settings"]["batch"] == 4
    assert found["gpu"]["components"]["activations"] < plain["gpu"]["components"]["activations"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_key_value_heads": 3}, "model.config.num_key_value_heads 3: does not divide num_attention_heads 4"),
        ({"num_hidden_layers": 0}, "model.config.num_hidden_layers 0: must be a whole number from 1 on"),
        ({"num_hidden_layers": 10**9}, "model.config.num_hidden_layers 1000000000: must be at most 10000"),
        ({"hidden_size": 10**12}, "model.config.hidden_size 1000000000000: must be at most 16777216"),
        ({"model_type": "mixtral", "vocab_size": 10**12}, "model.config.vocab_size 1000000000000: must be at most 16777216"),
        ({"attention_dropout": 1.5}, "model.config.attention_dropout 1.5: must be a number from 0 to 1"),
        (
            {"model_type": "gpt2", "n_positions": 256},
            "seq_len 512: beyond the model's 256 positions; give at most 256",
        ),
    ],
)
def test_a_model_that_cannot_run_is_refused(
    values: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | values))
    assert run(["plan", "--model", str(model), "--vram", "8"]) == 2
    assert capsys.readouterr() == ("", f"memtop: {said}\n")


def test_a_length_that_the_model_is_not_made_for_is_said(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 64}))
    said = "T 128 is longer than the 64 tokens that the model is made for: longer samples may fail, or train it badly"
    for length, words in (("64", 0), ("128", 1)):
        assert run(["plan", "--model", str(model), "--vram", "8", "--seq-len", length]) == 0
        assert capsys.readouterr().err.count(f"memtop: {said}\n") == words


def test_a_lora_that_matches_no_layer_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}))
    assert run(["plan", "--model", str(tmp_path), "--method", "lora", "--vram", "4"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("memtop: lora.targets q_proj, k_proj")
    assert "; all of its own: --set lora.targets=c_attn,c_proj,c_fc; peft's own default is c_attn\n" in said


def test_targets_of_lora_that_match_no_layer_are_named(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    options = ("--method", "lora", "--vram", "4", "--set", "lora.targets=q_proj,foo", "--json")
    assert run(["plan", "--model", str(model), *options]) == 0
    assumed = json.loads(capsys.readouterr().out)["assumed"]
    said = "llama has no layers foo: adapters are only at q_proj; all of its linear layers: lora.targets=q_proj,k_proj,"
    assert [words.startswith(said) for words in assumed].count(True) == 1


def test_a_plan_for_a_command_is_that_of_the_same_training(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    split = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps=2")
    script = model / "run_clm.py"
    script.touch()
    command = ("python", str(script), "--model_name_or_path", str(model), *split, "--block_size", "64", "--fp16")
    more = ("--optim", "adamw_bnb_8bit", "--gradient_checkpointing")
    assert run(["plan", "--vram", "1", "--json", "--", *command, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    settings = found["settings"]
    needed = {"recipe": "", "preset": "", "save_every": 1, "learning_rate": 1e-4, "device": "cuda"}
    expected = {"batch": 4, "accumulation": 2, "seq_len": 64, "precision": "fp16", "optimizer": "adamw_8bit", "loss_chunk": 0}
    assert {name: settings[name] for name in expected} == expected
    assert (settings["method"], settings["gradient_checkpointing"], settings["world_size"]) == ("full", True, 1)
    assert "the weights are in fp32" in found["assumed"]
    assert (found["host"]["peak_bytes"], found["host"]["reason"]) == (None, "not foreseen for your own program")
    assert {row["preset"] for row in found["alternatives"]} <= {None}, "presets are for recipes"
    assert {name for name, value in settings.items() if value is not None} == {
        *("batch", "accumulation", "seq_len", "world_size", "model", "method", "precision", "optimizer", "zero"),
        *("gradient_checkpointing", "loss_chunk"),
    }, "nothing else is in the command"
    assert set(settings) == set(msgspec.to_builtins(first_run())), "every key stays"
    known = {name: value for name, value in settings.items() if value is not None}
    with contextlib.closing(DryRuns("")) as runs:
        own = runs.foresee(msgspec.convert(needed | known, Settings), generation=80, capacity=GIB - CONTEXT_BYTES)
    assert found["gpu"]["peak_bytes"] == own.reserved + CONTEXT_BYTES
    assert found["gpu"]["components"].get("communication") is None
    two = ("torchrun", "--nproc_per_node", "2", *command[1:])
    assert run(["plan", "--vram", "4", "--json", "--", *two]) == 0
    found = json.loads(capsys.readouterr().out)
    parts, trained = found["gpu"]["components"], found["model"]["trained_parameters"]
    assert parts["communication"] == COMMUNICATION_BYTES
    assert found["settings"]["ddp"]
    assert parts["buckets"] > 4 * trained, "the buckets of DistributedDataParallel"
    assert run(["plan", "--vram", "1", "--batch", "2", "--", *command]) == 0
    assert "your program: 2 x 2 x 1 = 4, T 64" in capsys.readouterr().out


def test_presets_say_the_peak_on_the_gpu_that_is_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMTOP_RUNS_DIR", str(tmp_path))
    card = GpuSample(index=0, total_bytes=GIB, free_bytes=GIB)
    monkeypatch.setattr(gpus_of, "sample", lambda: MachineSnapshot(time=0, gpus=(card,)))
    assert run(["presets", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    found = rows["standard"]["forecast"]
    assert (found["basis"], found["total_bytes"], found["band"]) == ("estimate", GIB, "safe")
    assert found["least_bytes"] < found["peak_bytes"] < found["most_bytes"]
    # Recipes name this model by its hub name, and it is not here.
    assert rows["qlora-16g-safe"]["forecast"] is None
    assert "not known before it is loaded" in rows["qlora-16g-safe"]["forecast_unknown"]
    assert run(["presets"]) == 0
    out = capsys.readouterr().out
    assert "of 1.0 GiB (" in out
    why = "what the model is made of is not known before it is loaded"
    assert f"the peak of GPU memory (sft-lora, sft-qlora) cannot be foreseen: {why}\n" in out
    assert "speed: not known: whether" in out
    monkeypatch.setattr(gpus_of, "sample", lambda: MachineSnapshot(time=0, gpu_note="no NVIDIA GPU: no driver"))
    assert run(["presets", "--json"]) == 0
    assert {row["forecast_unknown"] for row in json.loads(capsys.readouterr().out)} == {"no NVIDIA GPU: no driver"}


def test_a_dry_run_ends_with_the_process_that_asked_for_it() -> None:
    asking = """if True:
        from msgspec.structs import replace
        from memtop.presets import load_presets, load_recipes, resolve
        from memtop.presets.schema import Zero
        from memtop.supervisor.dry_runs import DryRuns

        settings = resolve(load_recipes()["first-run"], preset=load_presets()["standard"], whole=False)
        # With ZeRO each layer runs, and that takes many minutes.
        model = {"config": settings.model["config"] | {"num_hidden_layers": 9000}}
        runs = DryRuns("")
        print(runs._process.pid, flush=True)
        runs.foresee(replace(settings, model=model, zero=Zero(stage=3)), generation=80, capacity=1 << 40)
    """

    def wait_for(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.1)

    with subprocess.Popen([sys.executable, "-c", asking], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = identify(int(parent.stdout.readline()))
        assert child is not None
        # It loads torch when it has got the question.
        wait_for(lambda: "libtorch" in Path(f"/proc/{child.pid}/maps").read_text(encoding="utf-8"))
        parent.terminate()
    try:
        wait_for(lambda: not is_alive(child))
    finally:
        if is_alive(child):
            os.kill(child.pid, signal.SIGKILL)
