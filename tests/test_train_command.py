"""`memtop train`: the settings of a new run; a preset chosen by free GPU memory is reported with
the reason."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from memtop.cli import gpus as gpus_of
from memtop.cli import train
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.wire import Change
from tests.conftest import Runs

GIB = 1 << 30


def machine(*free_gib: float | None) -> MachineSnapshot:
    gpus = tuple(GpuSample(index=i, free_bytes=None if f is None else int(f * GIB)) for i, f in enumerate(free_gib))
    return MachineSnapshot(time=0.0, gpus=gpus)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Path("pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    return Change(assignments={"data.train": "pairs.jsonl"})


@pytest.mark.parametrize(
    ("free", "gpus", "preset", "said"),
    [
        ((13.0,), None, "deepspeed", "13.00 GiB of GPU memory free, from 12 GiB on; --preset"),
        ((13.0, 5.0), None, "stage3", "from 4 up to 6 GiB on GPU 1, the fullest of 2"),
        ((13.0, 5.0), ["0"], "deepspeed", "from 12 GiB on; --preset"),
        ((13.0, None), None, "deepspeed", "13.00 GiB"),
        ((None,), None, "standard", "the free GPU memory is not known"),
        ((), None, "standard", "the free GPU memory is not known"),
    ],
)
def test_the_fullest_gpu_decides(
    data: Change,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free: tuple[float | None, ...],
    gpus: list[str] | None,
    preset: str,
    said: str,
) -> None:
    monkeypatch.setattr(gpus_of, "sample", lambda: machine(*free))
    settings = train.settings_for("sft-lora", None, data, gpus)
    assert settings.preset == preset
    # Chosen automatically, not named: the recipe's own values stay.
    assert (settings.effective_batch, settings.seq_len) == (16, 1024)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_gpus_hidden_from_cuda_do_not_decide_the_preset(data: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = machine(3.0, 13.0).gpus
    seen = MachineSnapshot(time=0.0, gpus=(small, msgspec.structs.replace(large, visible_index=0)))
    monkeypatch.setattr(gpus_of, "sample", lambda: seen)
    # The variable can hold UUIDs or numbers: the monitor interprets it.
    for value in ("1", "GPU-b"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert train.settings_for("sft-lora", None, data, None).preset == "deepspeed"


def test_training_on_the_cpu_samples_no_gpu(data: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_of, "sample", lambda: pytest.fail("asked the machine"))
    cpu = Change(assignments={**data.assignments, "device": "cpu"})
    assert train.settings_for("sft-lora", None, cpu, None).preset == "standard"


def test_a_named_preset_is_taken_whole_where_it_is_meant_and_with_fresh_anywhere(data: Change) -> None:
    whole = train.settings_for("sft-lora", "stage2_offload", data, None)
    assert (whole.effective_batch, whole.seq_len, whole.epochs, whole.target_samples) == (18, 1792, 3.0, 0)
    kept = train.settings_for("pretrain-causal", "stage2_offload", Change(), None)
    assert (kept.effective_batch, kept.seq_len, kept.target_samples) == (64, 512, 2000 * 64)
    fresh = train.settings_for("pretrain-causal", "stage2_offload", Change(), None, fresh=True)
    assert (fresh.effective_batch, fresh.seq_len, fresh.target_samples) == (18, 1792, 2000 * 18)
    edited = train.settings_for("first-run", "deepspeed", Change(assignments={"seq_len": "64"}), None, fresh=True)
    assert (edited.seq_len, edited.effective_batch) == (64, 16)


def test_files_and_folders_are_kept_by_their_whole_path(data: Change, tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    asked = Change(assignments={**data.assignments, "model.path": "qwen", "data.eval": "pairs.jsonl"})
    settings = train.settings_for("sft-lora", "standard", asked, None)
    assert settings.data["train"] == settings.data["eval"] == str(tmp_path / "pairs.jsonl")
    assert settings.model == {"path": str(tmp_path / "qwen")}
    hub = train.settings_for("sft-lora", "standard", data, None)
    assert hub.model == {"path": "Qwen/Qwen2.5-0.5B"}


def test_a_missing_library_is_named_before_anything_starts(data: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None if name == "deepspeed" else object())
    with pytest.raises(
        UsageError, match=r"RECIPE sft-lora, preset stage3: this needs deepspeed: in memtop's folder, pip install '\.\[train\]'"
    ):
        train.settings_for("sft-lora", "stage3", data, None)


def test_a_missing_tracker_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"tensorboardX"}
    monkeypatch.setattr(
        train.importlib.util,
        "find_spec",
        lambda name: None if name in {"tensorboard", "tensorboardX", "wandb"} - there else object(),
    )
    asked = Change(assignments={"trackers": "tensorboard,wandb"})
    with pytest.raises(UsageError, match=r"^trackers wandb: not installed: pip install wandb$"):
        train.settings_for("first-run", "standard", asked, None)
    there.add("wandb")
    assert train.settings_for("first-run", "standard", asked, None).trackers == ("tensorboard", "wandb")


def test_a_model_that_cannot_be_built_is_wrong_usage_of_one_line(runs: Runs) -> None:
    done = runs.memtop("train", "--headless", "--set", "model.config.hidden_act=nope", "--set", "device=cpu", status=2)
    assert done.stderr.splitlines()[-1] == (
        "memtop: run first-run: failed (exit status 2: model.config: no llama model works with these values: "
        "KeyError: 'nope'); memtop show first-run"
    )
    assert "Traceback" not in done.stderr
    assert "Traceback" not in (runs.path / "first-run/attempts/0001/output.log").read_text()
