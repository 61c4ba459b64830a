"""Parameter counts from a configuration, compared with the built models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from memtop.presets.checks import TABLES
from memtop.presets.parameters import adapter_parameters, model_parameters, smaller_model, trained_parameters
from memtop.presets.schema import ALL_TARGETS, ATTENTION_TARGETS, Lora
from tests.recovery.support import FIRST, LORA, RECIPES, T5

T5_CONFIG = T5.model["config"]
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 500}
CONFIGS: list[dict[str, Any]] = [
    T5_CONFIG,
    {**T5_CONFIG, "num_layers": 3, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"},
    FIRST.model["config"],
    RECIPES["pretrain-causal"].model["config"],
    {**SMALL, "model_type": "llama", "num_key_value_heads": 2},
    {**SMALL, "model_type": "mistral", "num_key_value_heads": 1},
    {**SMALL, "model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    QWEN_7B,
]


@pytest.mark.parametrize(("kind", "length"), list(TABLES.items()))
def test_these_architectures_fail_beyond_their_positions(kind: str, length: int) -> None:
    """And only the others can be asked for more."""
    from transformers import AutoConfig, AutoModelForCausalLM

    assert AutoConfig.for_model(kind).max_position_embeddings == length
    # Not all of them know all of these names.
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "dff": 16, "vocab_size": 50}
    sizes |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "word_embed_proj_dim": 16}
    if kind == "gpt_neo":
        sizes |= {"attention_types": [[["global"], 1]]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, max_position_embeddings=8, **sizes))
    model(input_ids=torch.ones(1, 8, dtype=torch.long))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.ones(1, 9, dtype=torch.long))


def built(config: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    values = dict(config)
    kind = values.pop("model_type")
    maker = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    with torch.device("meta"):
        model: torch.nn.Module = maker.from_config(AutoConfig.for_model(kind, **values))
    return model


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}-{config['vocab_size']}")
def test_the_count_is_that_of_the_built_model(config: dict[str, Any]) -> None:
    assert model_parameters(config) == sum(parameter.numel() for parameter in built(config).parameters())


@pytest.mark.parametrize(("changes", "millions"), [({}, 196.6), ({"vocab_size": 29298}, 187.7)])
def test_the_parameters_of_a_t5(changes: dict[str, int], millions: float) -> None:
    found = model_parameters({**T5_CONFIG, **changes})
    assert found is not None
    assert round(found / 1e6, 1) == millions


def test_the_smaller_t5_has_46_4_million_parameters() -> None:
    values = smaller_model(T5_CONFIG)
    assert values == {"d_model": 384, "d_ff": 1536, "num_heads": 6, "num_layers": 4}
    found = model_parameters({**T5_CONFIG, **values})
    assert found is not None
    assert round(found / 1e6, 1) == 46.4
    assert 1 - found / 196_648_704 == pytest.approx(0.76, abs=0.005)


def test_without_a_decoder_count_the_decoder_keeps_its_layers() -> None:
    config = {name: value for name, value in T5_CONFIG.items() if name != "num_decoder_layers"}
    values = smaller_model(config)
    assert values is not None
    assert (values["num_layers"], values["num_decoder_layers"]) == (4, 10)


@pytest.mark.parametrize(("r", "millions"), [(64, 159.9), (32, 80.0), (16, 40.0)])
def test_adapters_of_qwen_7b_have_the_known_sizes(r: int, millions: float) -> None:
    lora = Lora(r=r, alpha=2 * r)
    found = adapter_parameters(QWEN_7B, lora)
    assert found is not None
    assert round(found / 1e6, 1) == millions
    assert found == adapter_parameters(QWEN_7B, replace(lora, targets=("all-linear",)))


@pytest.mark.parametrize("targets", [ATTENTION_TARGETS, ALL_TARGETS])
def test_adapters_where_keys_are_shared(targets: tuple[str, ...]) -> None:
    from peft import LoraConfig, get_peft_model

    config = {**SMALL, "model_type": "qwen2", "num_key_value_heads": 2}
    with torch.device("meta"):
        model = get_peft_model(built(config), LoraConfig(r=4, target_modules=list(targets)))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert adapter_parameters(config, Lora(r=4, alpha=8, targets=targets)) == trained


def test_unknown_values_are_none() -> None:
    assert model_parameters({"model_type": "mamba", "hidden_size": 8}) is None
    assert model_parameters({"model_type": "t5", "d_model": 8}) is None
    assert model_parameters({**T5_CONFIG, "tie_word_embeddings": False}) is None
    assert trained_parameters(LORA) is None, "named by path"
    assert trained_parameters(LORA, QWEN_7B) == adapter_parameters(QWEN_7B, LORA.lora or Lora(r=1, alpha=1))
    assert adapter_parameters(T5_CONFIG, Lora(r=8, alpha=8)) is None
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        for value in (None, "wide"):
            assert adapter_parameters({**QWEN_7B, name: value}, Lora(r=8, alpha=8, targets=("all-linear",))) is None
    assert adapter_parameters(QWEN_7B, Lora(r=8, alpha=8, targets=("c_attn",))) is None
    assert smaller_model({"model_type": "llama", "hidden_size": 7, "intermediate_size": 8, "num_attention_heads": 1}) is None
