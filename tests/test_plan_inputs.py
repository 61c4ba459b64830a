"""`memtop plan`: what it says of wrong and incomplete inputs, and what it assumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from memtop.cli import run
from memtop.presets import checks
from tests.test_plan_command import LLAMA


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and a Python without torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "bare").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    monkeypatch.setenv("MEMTOP_PYTHON", str(tmp_path / "bare"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run(["plan", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


T5 = {"model_type": "t5", "d_model": 64, "is_encoder_decoder": True}


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("this is not { json", [], "model.path {folder}: its config.json is not valid JSON"),
        ("[1, 2]", [], "model.path {folder}: its config.json is not a JSON object"),
        (None, [], "model.path {folder}: no config.json in it"),
        (
            json.dumps(T5),
            ["--method", "lora"],
            "model_type t5: it has an encoder and a decoder, and this recipe trains causal language models; "
            "take recipe pretrain-t5",
        ),
        (
            json.dumps(LLAMA),
            ["pretrain-t5"],
            "model_type llama: transformers has no model of this kind with an encoder and a decoder, as seq2seq needs",
        ),
        (
            json.dumps({**LLAMA, "hidden_size": 1000, "num_attention_heads": 32}),
            [],
            "model.config.num_attention_heads 32: does not divide hidden_size 1000",
        ),
    ],
)
def test_without_torch_a_wrong_model_is_refused_for_its_own_reason(
    text: str | None, words: list[str], said: str, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    if text is not None:
        (model / "config.json").write_text(text)
    assert run(["plan", "--model", str(model), *words]) == 2
    out, told = capsys.readouterr()
    assert (out, told.splitlines()[-1]) == ("", f"memtop: {said.format(folder=model)}")


def test_the_architectures_that_go_with_one_task_only_are_those_of_transformers() -> None:
    causal, seq2seq = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    assert set(checks.ENCODER_DECODERS) & causal == set()
    assert set(checks.DECODERS) & seq2seq == set()
    assert set(checks.DECODERS) <= causal


def test_the_values_that_a_configuration_leaves_out_are_named(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4096}))
    assumed = document(capsys, "--model", str(model))["assumed"]
    assert assumed == [
        "what the model's configuration leaves out, as in transformers: "
        "intermediate_size 11008, num_hidden_layers 32, num_attention_heads 32, vocab_size 32000"
    ]
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2", "hidden_size": 64, "n_layer": 2, "n_head": 2}))
    assumed = document(capsys, "--model", str(model))["assumed"]
    assert assumed == ["what the model's configuration leaves out, as in transformers: vocab_size 50257"]
    (model / "config.json").write_text(json.dumps(LLAMA))
    assert document(capsys, "--model", str(model))["assumed"] == []
