"""`memtop plan`: what it says of wrong and incomplete inputs, and what it assumes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from memtop.cli import gpus as gpus_of
from memtop.cli import run
from memtop.cli.plan_output import of_model
from memtop.presets import checks, host_estimate
from memtop.presets.parameters import least_size, model_parameters
from memtop.supervisor import plan
from memtop.supervisor.run.record.folder import RunSpec
from tests.test_plan import LLAMA, estimated_once, first_run


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and a Python without torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for module in (plan, host_estimate):
        monkeypatch.setattr(module, "estimate", estimated_once)
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


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
}
EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
RANKS = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
NARROW = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def true_size(kind: str, values: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The whole configuration of such a model of transformers, and its number of parameters."""
    config = AutoConfig.for_model(kind, **SMALL | values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return json.loads(config.to_json_string(use_diff=False)), sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("mixtral", EIGHT),
        ("mixtral", {**EIGHT, "head_dim": 16, "tie_word_embeddings": True}),
        ("qwen3_moe", NARROW),
        ("qwen3_moe", {**NARROW, "decoder_sparse_step": 2, "mlp_only_layers": [1], "head_dim": 32}),
        ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    ],
)
def test_all_experts_of_a_known_mixture_are_counted(kind: str, values: dict[str, Any]) -> None:
    config, true = true_size(kind, values)
    assert model_parameters(config) == model_parameters({**SMALL, **values, "model_type": kind}) == true


@pytest.mark.parametrize(
    ("kind", "values", "least"),
    [
        ("qwen2_moe", {**NARROW, "shared_expert_intermediate_size": 16}, 0.4),
        ("deepseek_v2", {**ROUTED, **RANKS, "first_k_dense_replace": 1}, 0.4),
        ("glm4_moe", {**ROUTED, "first_k_dense_replace": 2, "n_shared_experts": 1, "head_dim": 8}, 0.4),
        ("gpt_oss", {**EIGHT, "head_dim": 8}, 0.4),
        ("phimoe", EIGHT, 0.4),
        ("granitemoe", EIGHT, 0.4),
        ("llama4_text", {**EIGHT, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2, "head_dim": 8}, 0.1),
        ("jamba", {"num_experts": 8, "expert_layer_period": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False}, 0.01),
    ],
)
def test_the_bound_of_another_mixture_counts_experts_but_never_too_many(
    kind: str, values: dict[str, Any], least: float
) -> None:
    config, true = true_size(kind, values)
    # With all values, and with the decisive ones only.
    decisive = {name: config[name] for name in (*SMALL, *values) if name in config}
    shares = []
    for known in (config, decisive):
        found = least_size(first_run(model={"config": {**known, "model_type": "quokka"}}))
        assert not isinstance(found, str)
        shares.append(found.parameters / true)
    assert least < max(shares) <= 1
    assert min(shares) > 0


def test_a_bound_says_that_it_counts_experts(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8}
    (model / "config.json").write_text(json.dumps(mixtral))
    gpu = document(capsys, "--model", str(model), "--vram", "48")["gpu"]
    assert gpu["counted"] == "the weights of its architecture"
    assert gpu["least_bytes"] == 16 * (model_parameters(mixtral) or 0) > 16 * 2 * 8 * 3 * 64 * 128
    (model / "config.json").write_text(json.dumps({**mixtral, "model_type": "quokka"}))
    gpu = document(capsys, "--model", str(model), "--vram", "48")["gpu"]
    assert gpu["counted"] == "the embeddings, the experts and other feed-forward parts, as its configuration gives them"


WIDE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TRIED = "tried       smaller batches, gradient checkpointing, the presets, "
NOTHING = "T down to 128: nothing of it fits this GPU and host with this method\ninstead     "


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # Full training offloads more than the host has.
        pytest.param(
            ["--vram", "80", "--host-ram", "23"],
            r"--model \S+ --method lora (--.* )?trains adapters, \d+ x .*: ~[\d.]+ GiB of GPU memory",
            marks=pytest.mark.long,
        ),
        (
            ["--vram", "16", "--host-ram", "23"],
            r"--model \S+ --method qlora (--.* )?trains adapters on a base in 4 bits, \d+ x .*: ~",
        ),
        (["--vram", "4", "--host-ram", "23"], "take a smaller model"),
        pytest.param(["--vram", "3", "--host-ram", "64", "--method", "qlora"], "take a smaller model", marks=pytest.mark.long),
        (["--vram", "80", "--host-ram", "400"], None),
    ],
)
def test_a_way_out_is_named_where_nothing_of_the_method_fits(
    words: list[str], said: str | None, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(WIDE))
    assert run(["plan", "--model", str(model), *words]) == 0
    out = capsys.readouterr().out
    if said is None:
        assert "instead" not in out
        return
    assert re.search(f"^{TRIED}.*{NOTHING}{said}", out, re.MULTILINE)
    found = document(capsys, "--model", str(model), *words)
    assert found["tried"][-1] == "T down to 128"
    assert (found["instead"] is None) is ("smaller model" in said)
    if found["instead"] is not None:
        named = document(capsys, *words[:4], *found["instead"]["options"])
        assert (named["gpu"]["band"], named["host"]["band"]) == ("safe", "safe"), "the plan of that method fits"
        for name in ("method", "batch", "accumulation", "seq_len"):
            assert named["settings"][name] == found["instead"][name]
        assert named["gpu"]["peak_bytes"] == found["instead"]["peak_bytes"]
        assert named["host"]["peak_bytes"] == found["instead"]["host_peak_bytes"]


def test_a_plan_of_a_model_says_how_to_train_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA))
    data = model / "my data.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}\n')
    given = ("--batch", "2", "--set", "lora.r=8", "--set", f"data.train={data}")
    assert run(["plan", "--model", str(model), "--method", "lora", "--vram", "8", *given]) == 0
    printed = re.search(r"^train       memtop (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert printed is not None
    started: list[RunSpec] = []
    monkeypatch.setattr("memtop.cli.train._start", lambda where, spec, **_: started.append(spec))
    monkeypatch.setattr("memtop.cli.foreground.stay", lambda *_, **__: 0)
    monkeypatch.delenv("MEMTOP_PYTHON")
    assert run([*shlex.split(printed[1]), "--runs-dir", str(model / "runs")]) == 0
    settings = started[0].settings
    assert settings is not None
    assert settings.lora is not None
    assert (settings.recipe, settings.batch, settings.lora.r) == ("sft-lora", 2, 8)
    assert settings.model == {"path": str(model)}


def test_experts_that_are_not_quantized_are_named(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mixtral", "num_local_experts": 4}))
    options = ("--model", str(model), "--vram", "8", "--set", "lora.targets=q_proj", "--method")
    said = "the experts of mixtral stay in 16 bits: transformers 5 keeps those of a layer in one tensor, "
    for method, count in (("qlora", 1), ("lora", 0)):
        assumed = document(capsys, *options, method)["assumed"]
        assert [words.startswith(said) for words in assumed].count(True) == count
    settings = replace(first_run(), method="qlora")
    named = {version: len(of_model(settings, {"model_type": "mixtral"}, version)) for version in ("4.57.1", "5.23.0")}
    assert named["5.23.0"] == named["4.57.1"] + 1, "before, each expert was a linear layer"


def test_a_mixture_whose_layers_cannot_be_counted_ends_in_one_line(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    mixture = {**WIDE, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64, "decoder_sparse_step": 0}
    (model / "config.json").write_text(json.dumps(mixture))
    run(["plan", "--model", str(model), "--vram", "80"])
    assert "Traceback" not in capsys.readouterr().err


def test_the_copy_for_saving_is_said_to_need_room(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 300_000}))
    for room, words in (("64", 1), ("2.3", 0)):
        assert run(["plan", "--model", str(model), "--vram", "8", "--host-ram", room]) == 0
        said = r"copy for saving [\d.]+ [MG]iB \(made only if there is room; else memtop saves without it\)"
        assert len(re.findall(said, capsys.readouterr().out)) == words


@pytest.mark.parametrize(
    ("precision", "assumed"),
    [
        ("auto", ["the GPU has bf16 and flash attention, as those of compute capability 8.0 and above"]),
        ("fp16", ["the GPU has flash attention, as those of compute capability 8.0 and above"]),
        ("fp32", []),
    ],
)
def test_of_an_unknown_gpu_only_what_the_precision_needs_is_assumed(
    precision: str, assumed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    bare = replace(gpus_of.sample(), gpus=())
    monkeypatch.setattr(gpus_of, "sample", lambda: bare)
    (model / "config.json").write_text(json.dumps(LLAMA))
    found = document(capsys, "--model", str(model), "--vram", "8", "--set", f"precision={precision}")
    assert found["assumed"] == assumed


def test_a_plan_says_who_chose_the_preset_and_what_slower_means(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA))
    assert run(["plan", "--model", str(model), "--vram", "8"]) == 0
    told = capsys.readouterr().err
    assert "memtop: preset standard is chosen for 8.0 GiB of free GPU memory; --preset NAME chooses another\n" in told
    assert run(["plan", "--model", str(model), "--vram", "8", "--all"]) == 0
    told = capsys.readouterr().err
    assert told.endswith("memtop: faster and slower: than preset standard with 16 x 4 x 1, T 512\n")
    assert "foreseeing" not in told, "only a terminal says what goes on"


def test_a_plan_of_all_presets_says_on_a_terminal_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run(["plan", "--model", str(model), "--vram", "8", "--all"]) == 0
    assert "memtop: foreseeing preset stage3\n" in capsys.readouterr().err


def test_a_plan_for_a_gpu_refuses_a_training_on_the_cpu(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA))
    assert run(["plan", "--model", str(model), "--vram", "8", "--set", "device=cpu"]) == 2
    assert capsys.readouterr().err.startswith("memtop: device cpu: this plan is for a GPU, ")


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_each_row_of_all_is_what_its_preset_gives(method: str, capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps(WIDE))
    words = ("--model", str(model), "--method", method, "--vram", "24", "--host-ram", "64")
    rows = document(capsys, *words, "--all")
    foreseen = [row for row in rows if row["peak_bytes"] is not None]
    assert len(foreseen) >= 6
    for row in foreseen:
        alone = document(capsys, *words, *row["options"])
        assert (row["peak_bytes"], row["host"]) == (alone["gpu"]["peak_bytes"], alone["host"]), row["preset"]
        assert [row[name] for name in SHAPE] == [alone["settings"][name] for name in SHAPE], row["preset"]


SHAPE = ("preset", "batch", "accumulation", "seq_len", "method", "gradient_checkpointing", "zero", "optimizer")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("full", ("--vram", "80", "--host-ram", "400")),
        ("lora", ("--vram", "24", "--host-ram", "64")),
        ("lora", ("--vram", "80", "--host-ram", "64", "--seq-len", "512", "--set", "learning_rate=3e-4")),
        ("lora", ("--vram", "24", "--host-ram", "64", "--preset", "stage2_offload", "--set", "batch=1")),
        ("qlora", ("--vram", "16", "--host-ram", "64", "--batch", "2", "--accum", "2")),
    ],
)
def test_the_options_of_a_proposal_give_exactly_its_settings(
    method: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(WIDE))
    asked = ("--model", str(model), "--method", method, *words)
    found = document(capsys, *asked)
    assert found["alternatives"]
    for row in found["alternatives"]:
        back = document(capsys, *asked, *row["options"])
        assert [back["settings"][name] for name in SHAPE] == [row[name] for name in SHAPE]
        assert (back["gpu"]["peak_bytes"], back["host"]) == (row["peak_bytes"], row["host"]), row["options"]
        assert (back["settings"]["lora"] or {"r": None})["r"] == row["lora_r"]
        if row["training_unchanged"]:
            same = ("learning_rate", "lora", "warmup_samples", "epochs", "target_samples", "precision")
            assert [back["settings"][name] for name in same] == [found["settings"][name] for name in same]
    if found["max_safe_batch"] is not None:
        back = document(capsys, *asked, *found["max_safe_options"])["settings"]
        split = {"batch": found["max_safe_batch"], "accumulation": found["max_safe_accumulation"]}
        assert back == found["settings"] | split
    assert run(["plan", *asked]) == 0
    out = capsys.readouterr().out
    assert all(f"\nadd         {shlex.join(row['options'])}\n" in out for row in found["alternatives"])


def test_the_options_of_a_proposal_for_a_command_are_those_of_the_program(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(WIDE))
    (model / "run_clm.py").touch()
    command = ("python", str(model / "run_clm.py"), "--model_name_or_path", str(model), "--bf16", "--use_peft", "--lora_r", "8")
    command += ("--block_size", "2048", "--per_device_train_batch_size", "8")
    found = document(capsys, "--vram", "48", "--", *command)
    options = [row["options"] for row in found["alternatives"]]
    assert options[0][-2:] == ["--gradient_checkpointing", "true"]
    for row in found["alternatives"]:
        if row["options"] is None:
            assert row["changes"] == ["method lora -> qlora"], "no option of the Trainer alone does that"
            continue
        back = document(capsys, "--vram", "48", "--", *command, *row["options"])
        assert back["gpu"]["peak_bytes"] == row["peak_bytes"]
        assert (back["settings"]["batch"], back["settings"]["seq_len"]) == (row["batch"], row["seq_len"])


def test_a_preset_that_memtop_chose_is_said_to_be_other_settings_than_the_named_one(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(WIDE))
    assert run(["plan", "--model", str(model), "--method", "qlora", "--vram", "10"]) == 0
    said = "memtop: --preset qlora-16g-min would give other settings: T 1024 -> 512, LoRA r 32 -> 16, LoRA alpha 64 -> 32\n"
    assert said in capsys.readouterr().err


GEMMA = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 256000,
}
ONE_BILLION = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


def test_more_halvings_and_the_recipes_own_presets_are_tried(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps(GEMMA))
    words = ("--model", str(model), "--method", "qlora", "--vram", "12", "--host-ram", "64")
    found = document(capsys, *words)
    assert (found["max_safe_batch"], found["gpu"]["fits"], found["host"]["fits"]) == (None, False, True)
    options = [row["options"] for row in found["alternatives"]]
    assert ["--preset", "qlora-16g-min"] in options, "with its own values"
    assert ["--seq-len", "256"] in options
    # At 512 the present strategy is not safe, and another one is.
    assert 512 in [row["seq_len"] for row in found["alternatives"] if "--preset" not in row["options"]]
    assert {row["band"] for row in found["alternatives"]} == {"safe"}
    assert not any(row["training_unchanged"] for row in found["alternatives"])


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_the_size_of_a_model_is_known_where_the_estimate_knows_its_architecture(
    method: str, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    values = {**SMALL, "model_type": "gemma2", "head_dim": 16, "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(values))
    adapters = 0
    for inputs, outputs in ((32, 64), (32, 32), (32, 32), (64, 32), (32, 48), (32, 48), (48, 32)):
        adapters += 4 * 32 * (inputs + outputs)
    whole = true_size("gemma2", {"head_dim": 16, "tie_word_embeddings": True})[1]
    found = document(capsys, "--model", str(model), "--method", method, "--vram", "8")["model"]
    assert (found["parameters"], found["trained_parameters"]) == (whole, whole if method == "full" else adapters)


def test_an_optimizer_in_8_bits_is_proposed_and_not_called_the_same_training(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(ONE_BILLION))
    words = ("--model", str(model), "--method", "full", "--vram", "16", "--host-ram", "23")
    found = document(capsys, *words)
    assert (found["settings"]["preset"], found["host"]["band"]) == ("stage2_offload", "danger")
    first = found["alternatives"][0]
    assert "optimizer adamw -> adamw_8bit" in first["changes"]
    assert "optimizer=adamw_8bit" in first["options"]
    assert (first["training_unchanged"], first["seq_len"], first["host"]["band"]) == (False, 512, "safe")
    assert run(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^or .* adamw_8bit\).*; training is not exactly the same; speed not known$", out, re.MULTILINE)
    assert "instead" not in out


def test_a_sample_that_is_far_too_long_is_halved_until_it_fits(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps(WIDE))
    words = ("--model", str(model), "--method", "lora", "--vram", "24", "--host-ram", "64", "--seq-len", "200000")
    lengths = {row["seq_len"] for row in document(capsys, *words, "--batch", "1")["alternatives"]}
    assert lengths
    assert lengths <= {200000 >> times for times in range(2, 10)}
