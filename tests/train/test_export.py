"""The exported model is the trained one: loaded by the libraries that users load it with, compared
with the trainer's.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from memtop.train import BadInputError, TrainingError
from memtop.train import export as exporting
from memtop.train.checkpoint import best_state
from memtop.train.export import export
from memtop.train.model import tokens_and_config
from memtop.train.run import open_engine
from memtop.train.state_files import MANIFEST_NAME, newest_complete, previous_of, read_manifest
from tests import forking
from tests.train.data.support import build_tokenizer
from tests.train.launching import ROOT, environment
from tests.train.recipes import (
    TINY_LLAMA,
    TINY_T5,
    Train,
    Trained,
    documents,
    pairs,
    settings_of,
    trainer_in,
    write_llama,
    write_rows,
)

IDS = torch.tensor([[70, 72, 75, 80, 65, 66, 67, 68], [71, 73, 76, 81, 90, 91, 92, 93]])


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    yield from trainer_in(tmp_path, monkeypatch)


def causal(folder: Path, **more: Any) -> Any:
    data = write_rows(folder / "data.jsonl", [{"text": text} for text in documents()])
    small = {"data__source": "", "data__train": data, "seq_len": 32, "updates": 4, "save_every": 100, **TINY_LLAMA}
    return settings_of("pretrain-causal", **(small | more))


def tuning(recipe: str, folder: Path, **more: Any) -> Any:
    data = write_rows(folder / "pairs.jsonl", pairs())
    small = {"data__train": data, "model__path": write_llama(folder / "llama"), "seq_len": 64, "updates": 4}
    return settings_of(recipe, **(small | {"lora__r": 4, "lora__alpha": 8, "save_every": 100} | more))


def trained_model(run: Trained) -> Any:
    """The model that the trainer would resume with."""
    found = newest_complete(run.state_dir)
    assert found is not None
    config = tokens_and_config(run.settings)[1]
    return open_engine(run.settings, Accelerator(cpu=True), config, found[:2])[0].model.eval()


def logits(model: Any) -> torch.Tensor:
    """[2, 8, vocabulary] for two sequences of 8 tokens."""
    with torch.no_grad():
        more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
        found: torch.Tensor = model.eval()(input_ids=IDS, **more).logits
    return found


def test_a_whole_model_gives_the_trainers_logits(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(causal(tmp_path))
    out = export(run.settings, run.state_dir, tmp_path / "new" / "model")
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("memtop: exported update 4 (train_latest_state): the model, in fp32, ")
    )
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(model), logits(trained_model(run)))
    # Tied weights are stored once, and are one tensor after loading.
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.bos_token_id, model.config.eos_token_id, model.generation_config.pad_token_id) == (256, 257, 258)
    meaning = json.loads((out / "tokenizer_bytes.json").read_text())
    assert (meaning["kind"], meaning["begin"], meaning["end"], meaning["pad"]) == ("bytes", 256, 257, 258)
    assert list(out.parent.iterdir()) == [out]
    assert list(run.state_dir.parent.glob("export-*")) == []


def test_a_t5_gives_the_trainers_logits(train: Train, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "pairs.parquet", pairs())
    run = train(settings_of("pretrain-t5", data__train=data, seq_len=64, updates=2, **TINY_T5))
    model = AutoModelForSeq2SeqLM.from_pretrained(export(run.settings, run.state_dir, tmp_path / "model"))
    assert torch.equal(logits(model), logits(trained_model(run)))
    assert model.config.decoder_start_token_id == 258


def test_bf16_runs_are_exported_in_bf16(train: Train, tmp_path: Path) -> None:
    run = train(causal(tmp_path, precision="bf16"))
    assert read_manifest(run.state_dir).precision == "bf16"
    out = export(run.settings, run.state_dir, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    found, wanted = logits(model.float()), logits(trained_model(run))
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.02


def test_a_merged_adapter_gives_the_trainers_logits(train: Train, tmp_path: Path) -> None:
    run = train(tuning("sft-lora", tmp_path))
    out = export(run.settings, run.state_dir, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(model), logits(trained_model(run)), rtol=1e-4, atol=1e-5)
    assert not (out / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(out).chat_template


@pytest.mark.parametrize("recipe", ["sft-lora", "sft-qlora"])
def test_an_adapter_on_its_base_gives_the_trainers_logits(train: Train, tmp_path: Path, recipe: str) -> None:
    from peft import PeftModel

    run = train(tuning(recipe, tmp_path))
    out = export(run.settings, run.state_dir, tmp_path / "adapter", form="adapter" if recipe == "sft-lora" else None)
    described = json.loads((out / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["r"], described["lora_alpha"]) == (str(tmp_path / "llama"), 4, 8)
    assert not (out / "model.safetensors").exists()
    trained = trained_model(run)
    # The base that was trained on, built again and without adapters.
    base = exporting.build_base(run.settings, None)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, out)), logits(trained), rtol=1e-5, atol=1e-6)


def test_qlora_is_merged_on_request(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tuning("sft-qlora", tmp_path))
    model = AutoModelForCausalLM.from_pretrained(export(run.settings, run.state_dir, tmp_path / "model", form="merge"))
    assert getattr(model.config, "quantization_config", None) is None
    torch.testing.assert_close(logits(model), logits(trained_model(run)), rtol=1e-3, atol=1e-4)
    assert "the base with the adapter merged, dequantized" in capsys.readouterr().err


def test_load_best_at_end_exports_the_best_state(train: Train, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "held.jsonl", [{"text": text} for text in documents(5)])
    run = train(causal(tmp_path, data__eval=data, eval_every=1, load_best_at_end=True, save_every=1))
    best = best_state(run.state_dir)
    assert best.is_dir()
    last = msgspec.structs.replace(run.settings, load_best_at_end=False)
    # Make the best state differ from the last one.
    (best / MANIFEST_NAME).unlink()
    for path in best.iterdir():
        path.unlink()
    for path in previous_of(run.state_dir).iterdir():
        (best / path.name).hardlink_to(path)
    models = [
        AutoModelForCausalLM.from_pretrained(export(settings, run.state_dir, tmp_path / name))
        for settings, name in ((run.settings, "best"), (last, "last"))
    ]
    assert not torch.equal(logits(models[0]), logits(models[1]))
    assert torch.equal(logits(models[1]), logits(trained_model(run)))


def test_a_file_system_without_hard_links(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    run = train(causal(tmp_path))
    monkeypatch.setattr(os, "link", refuse)
    assert (export(run.settings, run.state_dir, tmp_path / "model") / "model.safetensors").is_file()


def test_a_broken_state_is_named_and_the_previous_one_exported(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(causal(tmp_path, save_every=3))
    (run.state_dir / MANIFEST_NAME).write_text("{")
    out = export(run.settings, run.state_dir, tmp_path / "model")
    err = capsys.readouterr().err
    assert f"memtop: {run.state_dir / MANIFEST_NAME}: cannot be read: " in err
    assert f"using {previous_of(run.state_dir)} instead\n" in err
    assert "exported update 3 (train_latest_state.previous)" in err
    (previous_of(run.state_dir) / MANIFEST_NAME).unlink()
    with pytest.raises(BadInputError, match=r"train_latest_state/manifest.json: cannot be .*; no complete state is left"):
        export(run.settings, run.state_dir, tmp_path / "again")
    assert [path.name for path in tmp_path.glob("*again*")] == []
    assert out.is_dir()


def test_a_save_during_the_export_does_not_mix_two_states(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(causal(tmp_path))
    wanted = logits(trained_model(run))
    longer = msgspec.structs.replace(run.settings, target_samples=run.settings.target_samples * 2)
    original = exporting.build_model

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        train(longer)
        return original(*arguments, **options)

    monkeypatch.setattr(exporting, "build_model", meanwhile)
    out = export(run.settings, run.state_dir, tmp_path / "model")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), wanted)
    assert read_manifest(run.state_dir).updates == 8


def test_a_full_disk_leaves_nothing_behind(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(causal(tmp_path))

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporting.ShardReader, "get", full)
    out = tmp_path / "model"
    with pytest.raises(TrainingError, match=f"{out}: cannot be written: No space left on device"):
        export(run.settings, run.state_dir, out)
    assert list(tmp_path.glob("model*")) == []


def test_a_refused_export_is_one_line(train: Train, tmp_path: Path) -> None:
    settings = causal(tmp_path)
    state = tmp_path / "none" / "train_latest_state"
    with pytest.raises(BadInputError, match=f"{state}: no state was saved yet; `memtop checkpoint` saves one"):
        export(settings, state, tmp_path / "model")
    with pytest.raises(BadInputError, match="--adapter: pretrain-causal trained the whole model, so there is no adapter"):
        export(settings, state, tmp_path / "model", form="adapter")
    drawn = msgspec.structs.replace(tuning("sft-qlora", tmp_path), model=settings.model)
    with pytest.raises(BadInputError, match=r"--adapter: the base was drawn from the run's seed .*; give --merge"):
        export(drawn, state, tmp_path / "model")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    with pytest.raises(BadInputError, match=f"DIR {full}: exists already and is not empty; give another folder"):
        export(settings, state, full)
    with pytest.raises(BadInputError, match=f"DIR {full / 'file'}: exists already; give another folder"):
        export(settings, state, full / "file")


def test_the_command_prints_only_the_folder(train: Train, tmp_path: Path) -> None:
    build_tokenizer(tmp_path / "tokenizer")
    run = train(causal(tmp_path, data__tokenizer=tmp_path / "tokenizer"))
    out = tmp_path / "model"
    # An empty folder is accepted.
    out.mkdir()
    settings = run.state_dir.parent / "settings.json"
    command = [sys.executable, "-m", "memtop.train.export", "--settings", str(settings), "--state-dir", str(run.state_dir)]

    def call() -> subprocess.CompletedProcess[str]:
        return forking.run(
            [*command, "--out", str(out)], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    done = call()
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert "memtop: exported update 4" in done.stderr
    assert AutoTokenizer.from_pretrained(out).encode("hello")
    again = call()
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"memtop: DIR {out}: exists already and is not empty; give another folder\n"
