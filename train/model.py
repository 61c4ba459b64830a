"""Builds the model of a recipe from its configuration, with weights drawn from the seed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memtop.presets import Settings
from memtop.train.data import VOCABULARY
from memtop.train.errors import BadInputError


def build_model(settings: Settings) -> torch.nn.Module:
    """A causal language model in fp32; the same weights for the same seed, whatever was drawn before."""
    values = dict(settings.model.get("config") or {})
    kind = values.pop("model_type", None)
    if not kind:
        raise BadInputError("model.config.model_type: missing; name a Hugging Face architecture such as llama")
    try:
        config = AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise BadInputError(f"model.config: {str(error).splitlines()[0]}") from None
    if config.vocab_size < VOCABULARY:
        raise BadInputError(f"model.config.vocab_size {config.vocab_size}: byte-level tokens need {VOCABULARY}")
    torch.manual_seed(settings.seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    if settings.gradient_checkpointing:
        # Renamed in transformers 5; the old name goes away in 6.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    trainable: torch.nn.Module = model
    return trainable
