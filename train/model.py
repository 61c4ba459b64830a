"""Builds the model that the settings name: drawn from a configuration, or read from a folder or hub name; with adapters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from memtop.presets import Settings
from memtop.train import BadInputError
from memtop.train.data.tokens import Tokens, load_tokens

# The number format of the arithmetic, by what accelerate calls it.
_COMPUTE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tokens_and_config(settings: Settings) -> tuple[Tokens, Any]:
    """What the text becomes and what the model is like; a model that is not there is named before its tokenizer."""
    path = settings.model.get("path")
    if path:
        _config_of(str(path))
    tokens = load_tokens(settings.data.get("tokenizer"), path)
    return tokens, model_config(settings, tokens)


def model_config(settings: Settings, tokens: Tokens) -> Any:
    """The Hugging Face configuration; BadInputError says what there is instead of it."""
    if settings.model.get("path"):
        config = _config_of(str(settings.model["path"]))
        known = config.get_text_config().vocab_size
        if known < tokens.vocabulary:
            name = settings.data.get("tokenizer") or settings.model["path"]
            raise BadInputError(
                f"data.tokenizer {name}: has {tokens.vocabulary} ids, but model.path {settings.model['path']} knows {known}; "
                "take the tokenizer that the model came with"
            )
        return config
    values = dict(settings.model.get("config") or {})
    kind = values.pop("model_type", None)
    if not kind:
        raise BadInputError("model.config.model_type: missing; name a Hugging Face architecture such as llama")
    if settings.task == "seq2seq":
        # A decoder starts from padding, as T5 does it.
        values |= {"decoder_start_token_id": tokens.pad, "pad_token_id": tokens.pad, "eos_token_id": tokens.end}
    try:
        config = AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise BadInputError(f"model.config: {str(error).splitlines()[0]}") from None
    if config.vocab_size < tokens.vocabulary:
        raise BadInputError(f"model.config.vocab_size {config.vocab_size}: these tokens need {tokens.vocabulary}")
    return config


def _config_of(path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise BadInputError(_no_model(path, error)) from None


def _no_model(path: str, error: Exception) -> str:
    folder = Path(path)
    if folder.is_dir():
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        return f"model.path {path}: no model can be read there (found {there}): {_first_line(error)}"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return f"model.path {path}: no such folder, and HF_HUB_OFFLINE=1 forbids a download; give a local folder"
    return f"model.path {path}: no such folder, and not found on the hub: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def build_model(settings: Settings, config: Any, *, mixed: str = "no") -> torch.nn.Module:
    """The model with what is trained in fp32; the same weights for the same seed, whatever was drawn before.

    `mixed` is what the precision came to on this machine: "no" (fp32), "bf16" or "fp16".
    """
    model = build_base(settings, config, mixed=mixed)
    if settings.method != "full":
        model = with_adapters(settings, model)
    if settings.gradient_checkpointing:
        set_checkpointing(model, on=True)
    trainable: torch.nn.Module = model
    return trainable


def set_checkpointing(model: Any, *, on: bool) -> None:
    """Keep the activations of the layers' borders only and compute the others again, or keep all; BadInputError where the
    model cannot do that. May change between any two updates."""
    adapted = hasattr(model, "peft_config")
    base = model.get_base_model() if adapted else model
    if on and not base.supports_gradient_checkpointing:
        raise BadInputError(f"gradient_checkpointing true: {type(base).__name__} has no such thing; leave it out")
    # Renamed in transformers 5; the old names go away in 6.
    if on:
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    else:
        disable = getattr(base, "activation_checkpointing_disable", None) or base.gradient_checkpointing_disable
        disable()
    if adapted:
        # The base is frozen: without this no gradient would flow into the checkpointed layers.
        change = base.enable_input_require_grads if on else base.disable_input_require_grads
        change()


def build_base(settings: Settings, config: Any, *, mixed: str = "no") -> Any:
    """The model before adapters: drawn or read; in 4 bits for QLoRA."""
    torch.manual_seed(settings.seed)
    kind = _COMPUTE[mixed]
    return _quantized(settings, config, kind) if settings.method == "qlora" else _whole(settings, config, kind)


def model_class(settings: Settings) -> Any:
    return AutoModelForSeq2SeqLM if settings.task == "seq2seq" else AutoModelForCausalLM


def _whole(settings: Settings, config: Any, kind: torch.dtype) -> Any:
    if not settings.model.get("path"):
        return model_class(settings).from_config(config, dtype=torch.float32)
    # A frozen base needs no more precision than its adapters' arithmetic; what is trained is kept in fp32.
    # Under fp16 too it lies in bf16: large weights do not fit into fp16's range.
    frozen = torch.bfloat16 if settings.method == "lora" and kind != torch.float32 else torch.float32
    return _read(settings, dtype=frozen)


def _read(settings: Settings, **options: Any) -> Any:
    path = str(settings.model["path"])
    try:
        return model_class(settings).from_pretrained(path, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInputError(_no_model(path, error)) from None


def _quantized(settings: Settings, config: Any, kind: torch.dtype) -> Any:
    """Weights in 4 bits (NF4, the scales quantised once more), prepared for training adapters on them."""
    import tempfile

    import peft
    from bitsandbytes.nn.modules import Linear4bit
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=kind,
    )
    where = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() and settings.device != "cpu" else "cpu"
    options: dict[str, Any] = {"quantization_config": how, "device_map": {"": where}}
    if settings.model.get("path"):
        model = _read(settings, **options)
    else:
        # Drawn weights take the same way as real ones: through a file that is read in 4 bits.
        with tempfile.TemporaryDirectory(prefix="memtop-base-") as folder:
            model_class(settings).from_config(config, dtype=torch.float32).save_pretrained(folder)
            model = model_class(settings).from_pretrained(folder, **options)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # On a CPU with AVX-512 one pass in evaluation mode would re-pack the weights for a kernel without gradients.
            module.support_avx512bf16_for_cpu = False
    prepare: Any = peft.prepare_model_for_kbit_training
    return prepare(model, use_gradient_checkpointing=False)


def with_adapters(settings: Settings, model: Any) -> Any:
    """The model under LoRA adapters, which alone are trained: drawn from the seed, in fp32."""
    from peft import LoraConfig, get_peft_model

    assert settings.lora is not None, "checked with the settings"
    targets = settings.lora.targets
    how = LoraConfig(
        r=settings.lora.r,
        lora_alpha=settings.lora.alpha,
        lora_dropout=settings.lora.dropout,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        task_type="SEQ_2_SEQ_LM" if settings.task == "seq2seq" else "CAUSAL_LM",
    )
    # Drawn anew: how many numbers the base took shall not matter.
    torch.manual_seed(settings.seed)
    try:
        return get_peft_model(model, how)
    except ValueError as error:
        raise BadInputError(f"lora.targets {', '.join(targets)}: {_first_line(error)} (there are {_layers(model)})") from None


def _layers(model: torch.nn.Module) -> str:
    """Names of the layers that could get an adapter."""
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)}
    return ", ".join(sorted(names)) or "no linear layers"
