"""Every recipe trains on the CPU with a small model, through the same code as a real run."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator

from memtop.presets import Settings, SettingsError
from memtop.presets.schema import Zero
from memtop.train import BadInputError
from memtop.train.engine import trained_parameters
from memtop.train.model import build_base, build_model, tokens_and_config, with_adapters
from memtop.train.run import open_engine
from memtop.train.state_files import ShardReader, read_manifest
from tests.train.data.support import build_tokenizer
from tests.train.launching import run_trainer
from tests.train.recipes import (
    TINY_LLAMA,
    TINY_T5,
    Train,
    documents,
    pairs,
    settings_of,
    trainer_in,
    write_llama,
    write_rows,
)


class Planted:
    """Its pickle executes a function when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def plant_pickle(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Planted(mark)}, folder / "pytorch_model.bin")


def plant_header(folder: Path, _: Path) -> None:
    """A file whose header claims to be a terabyte."""
    (folder / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")


def plant_code(folder: Path, mark: Path) -> None:
    """An architecture that transformers does not have, with the code of it."""
    (folder / "planted.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    described = msgspec.json.decode((folder / "config.json").read_bytes())
    described |= {"model_type": "planted", "auto_map": {"AutoConfig": "planted.Planted"}}
    (folder / "config.json").write_bytes(msgspec.json.encode(described))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (plant_pickle, "its pickled weights are damaged or hold more than tensors"),
        (plant_header, "header too large"),
        (plant_code, "contains custom code"),
    ],
)
def test_a_models_files_execute_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path, Path], None], words: str
) -> None:
    def asked(_: str = "") -> str:
        raise AssertionError("a person is asked to run the code")

    monkeypatch.setattr(builtins, "input", asked)
    folder, mark = write_llama(tmp_path / "model"), tmp_path / "mark"
    plant(folder, mark)
    settings = settings_of("pretrain-causal", model__path=str(folder))
    with pytest.raises(BadInputError, match=words) as refused:
        build_base(settings, tokens_and_config(settings)[1])
    assert "\n" not in str(refused.value)
    assert not mark.exists()


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    yield from trainer_in(tmp_path, monkeypatch)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama")


def fine_tuning(recipe: str, llama: Path, **more: Any) -> Settings:
    """Eight updates of 8 samples; one prompt of 300 characters in twenty is longer than T."""
    data = write_rows(llama.parent / "pairs.jsonl", pairs())
    small = {"seq_len": 96, "updates": 8, "lora__r": 4, "lora__alpha": 8, "lora__dropout": 0, "save_every": 100}
    return settings_of(recipe, data__train=data, model__path=llama, **(small | more))


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "txt"])
@pytest.mark.parametrize("tokenizer", ["bytes", "library"])
def test_pretrain_causal_trains_on_any_file(train: Train, tmp_path: Path, ending: str, tokenizer: str) -> None:
    data = write_rows(tmp_path / f"data.{ending}", [{"text": text} for text in documents()])
    how = "bytes" if tokenizer == "bytes" else build_tokenizer(tmp_path / "tokenizer")
    more = {"data__source": "", "data__train": data, "data__tokenizer": how}
    done = train(settings_of("pretrain-causal", seq_len=32, updates=12, **more, **TINY_LLAMA))
    assert (done.outcome, len(done.losses)) == ("finished", 12)
    assert done.losses[-1] < done.losses[0] - 1
    # All tokens are trained on: each sample of t tokens predicts t - 1.
    assert 8 * 10 < done.steps[0]["tokens"] <= 8 * 31
    assert done.plan["trained_parameters"] == done.plan["parameters"]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_pretrain_t5_trains_responses_on_prompts(train: Train, tmp_path: Path, ending: str) -> None:
    data = write_rows(tmp_path / f"data.{ending}", pairs())
    settings = settings_of("pretrain-t5", data__train=data, seq_len=64, epochs=2, learning_rate=1e-2, **TINY_T5)
    done = train(settings)
    # Two epochs of 60 pairs, 8 an update.
    assert (done.outcome, done.plan["target_samples"], len(done.losses)) == ("finished", 120, 15)
    assert done.losses[-1] < done.losses[0] - 1
    # Only responses are trained on: "It is N." and the end, at most 11 tokens.
    assert all(8 * 9 <= step["tokens"] <= 8 * 11 for step in done.steps[:7])
    (note,) = [report["message"] for report in done.channel.of("warning")]
    assert note.startswith("data.train: 3 of 60 examined samples exceed T 64 and are cut; ")


def test_sft_lora_trains_on_responses_only_and_reports_cuts(train: Train, llama: Path) -> None:
    done = train(fine_tuning("sft-lora", llama))
    assert done.outcome == "finished"
    assert done.losses[-1] < done.losses[0] - 0.3
    # Of a dialogue of up to 96 tokens only the response counts: "It is N." and the end.
    assert all(8 * 8 <= step["tokens"] <= 8 * 12 for step in done.steps)
    assert [report["message"] for report in done.channel.of("warning")] == [
        "data.train: 3 of 60 examined samples exceed T 96 and are cut; "
        + done.channel.of("warning")[0]["message"].partition("are cut; ")[2]
    ]
    # A and B of r 4 on seven layers, twice; the base is unchanged.
    assert done.plan["trained_parameters"] < done.plan["parameters"] / 5
    assert {name.split(".")[-3] for name in saved_names(done.state_dir)} == {"lora_A", "lora_B"}


def saved_names(state_dir: Path) -> set[str]:
    return ShardReader(state_dir, read_manifest(state_dir).files).names


def test_auto_precision_on_a_cpu_reads_the_frozen_base_in_fp32(llama: Path) -> None:
    settings = fine_tuning("sft-lora", llama)
    assert settings.precision == "auto"
    engine, _ = open_engine(settings, Accelerator(cpu=True), tokens_and_config(settings)[1], None)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}


# --- QLoRA
# --------------------------------------------------------------------------------------------------


def test_sft_qlora_trains_adapters_on_nf4_with_quantised_scales(llama: Path) -> None:
    import bitsandbytes

    settings = fine_tuning("sft-qlora", llama)
    model = build_model(settings, tokens_and_config(settings)[1])
    linear = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(linear) == 2 * 7
    for module in linear:
        assert (module.weight.quant_type, module.weight.quant_state.nested) == ("nf4", True)
    assert {name.split(".")[-3] for name in trained_parameters(model)} == {"lora_A", "lora_B"}
    assert {parameter.dtype for parameter in trained_parameters(model).values()} == {torch.float32}


def test_an_interrupted_sft_qlora_run_ends_like_an_uninterrupted_one(train: Train, llama: Path) -> None:
    # With dropout: its random numbers must be reproduced, too.
    settings = fine_tuning("sft-qlora", llama, gradient_checkpointing=True, lora__dropout=0.1)
    whole = train(settings, name="whole")
    first = train(settings, name="parts", stop_after=3)
    assert (first.outcome, len(first.losses)) == ("stopped", 3)
    assert {name.split(".")[-3] for name in saved_names(first.state_dir)} == {"lora_A", "lora_B"}
    rest = train(settings, name="parts")
    assert (rest.outcome, rest.plan["resumed"], rest.plan["updates"]) == ("finished", True, 3)
    assert first.losses + rest.losses == whole.losses
    assert whole.losses[-1] < whole.losses[0] - 0.3


def test_gradients_through_the_4_bit_base_are_those_through_its_numbers(llama: Path) -> None:
    """Also after an evaluation, which makes bitsandbytes re-pack the weights for inference on some
    CPUs.
    """
    settings = fine_tuning("sft-qlora", llama)
    config = tokens_and_config(settings)[1]
    ids = torch.arange(3, 43).reshape(1, 40)
    gradients = []
    for base in (build_base(settings, config), build_base(settings, config).dequantize(dtype=torch.float32)):
        model = with_adapters(settings, base)
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in trained_parameters(model).items()})
    for name, wanted in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], wanted, rtol=1e-3, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")


def test_qlora_loses_little_compared_with_the_full_base(llama: Path) -> None:
    """The 4-bit base is the requested model."""
    settings = fine_tuning("sft-qlora", llama)
    config = tokens_and_config(settings)[1]
    ids = torch.arange(3, 43).reshape(1, 40)
    plain = build_base(msgspec.structs.replace(settings, method="lora"), config).eval()
    quantised = build_base(settings, config).eval()
    with torch.no_grad():
        wanted, found = plain(input_ids=ids).logits, quantised(input_ids=ids).logits
    assert float((found - wanted).norm() / wanted.norm()) < 0.2


# --- strategies
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["sft-lora", "sft-qlora"])
def test_gradient_checkpointing_changes_no_loss(train: Train, llama: Path, recipe: str) -> None:
    plain = train(fine_tuning(recipe, llama), name="plain")
    saving = train(fine_tuning(recipe, llama, gradient_checkpointing=True), name="saving")
    assert saving.losses == pytest.approx(plain.losses, rel=1e-6)


def test_t5_trains_the_same_with_gradient_checkpointing(train: Train, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", pairs())
    small = {"seq_len": 64, "updates": 5, "model__config__dropout_rate": 0.0, **TINY_T5}
    losses = [
        train(settings_of("pretrain-t5", data__train=data, gradient_checkpointing=on, **small), name=str(on)).losses
        for on in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "zero"),
    [
        pytest.param("sft-lora", Zero(stage=2), marks=pytest.mark.long),
        ("sft-lora", Zero(stage=3)),
        ("sft-qlora", Zero(stage=2)),
    ],
)
def test_adapters_train_the_same_under_zero(train: Train, llama: Path, tmp_path: Path, recipe: str, zero: Zero) -> None:
    settings = fine_tuning(recipe, llama, precision="fp32")
    plain = train(settings, name="plain")
    sharded = run_trainer(tmp_path / "sharded", msgspec.structs.replace(settings, zero=zero))
    assert sharded.strategy == str(zero)
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-4)
    assert saved_names(sharded.state_dir) == saved_names(plain.state_dir)


# --- bad input
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["sft-lora", "sft-qlora"])
def test_a_path_without_a_model_is_named(llama: Path, tmp_path: Path, recipe: str) -> None:
    def refused(folder: Path | str) -> str:
        settings = fine_tuning(recipe, llama)
        settings = msgspec.structs.replace(settings, model={"path": str(folder)})
        with pytest.raises(BadInputError) as caught:
            build_model(settings, tokens_and_config(settings)[1])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refused("no/where") == (
        "model.path no/where: no such folder, and HF_HUB_OFFLINE=1 forbids a download; give a local folder"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(empty).startswith(f"model.path {empty}: cannot read a model there (found nothing): ")
    tokenizer = build_tokenizer(tmp_path / "tokenizer")
    assert refused(tokenizer).startswith(f"model.path {tokenizer}: cannot read a model there (found tokenizer.json, ")
    for values, words in (
        ("[1]", "is not a JSON object"),
        ('{"model_type": "llama", "hidden_size": "x"}', "has wrong values: "),
    ):
        wrong = tmp_path / words.partition(":")[0].replace(" ", "-")
        wrong.mkdir()
        (wrong / "config.json").write_text(values)
        assert refused(wrong).startswith(f"model.path {wrong}: its config.json {words}")
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert refused(llama).startswith(f"model.path {llama}: cannot read a model there (found ")
    weights.unlink()
    assert "model.safetensors" in refused(llama).partition("): ")[2]


def test_adapters_on_missing_layers_are_refused(llama: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        fine_tuning("sft-lora", llama, lora__targets="c_attn")
    every = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    assert str(caught.value) == f"lora.targets c_attn: llama has no such layers; all of its own: --set lora.targets={every}"


def test_the_layers_of_gpt2_are_named_too(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = fine_tuning("sft-lora", tmp_path / "gpt2", lora__targets="q_proj")
    with pytest.raises(BadInputError, match=r"\(there are c_attn, c_fc, c_proj, lm_head, wpe, wte\); all of them: "):
        with_adapters(settings, GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1, n_positions=8)))


def test_more_tokens_than_the_model_knows_are_refused(tmp_path: Path) -> None:
    small = write_llama(tmp_path / "small", vocabulary=64)
    with pytest.raises(BadInputError) as caught:
        tokens_and_config(fine_tuning("sft-lora", small))
    assert str(caught.value) == (
        f"data.tokenizer {small}: has 100 ids, but model.path {small} knows 64; use the tokenizer of the model"
    )
    with pytest.raises(BadInputError, match=r"data.tokenizer bytes: has 259 ids, but model.path .* knows 64"):
        tokens_and_config(fine_tuning("sft-lora", small, data__tokenizer="bytes"))
