"""Builds the model that the settings name, new or read from a folder or hub name; with adapters."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PretrainedConfig,
)

from memtop.presets import Settings, SettingsError
from memtop.presets.checks import check_model, did_you_mean
from memtop.train import BadInputError, UnknownModelError, first_line
from memtop.train.agent.failures import is_lack_of_memory
from memtop.train.compile_lock import without_compiler
from memtop.train.data.tokens import Tokens, load_tokens

_LONGEST_REASON = 300
COMPUTE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute precisions by accelerate's names."""


def accelerate_name(precision: str) -> str:
    """What accelerate calls fp32, bf16 or fp16."""
    return "no" if precision == "fp32" else precision


def tokens_and_config(settings: Settings) -> tuple[Tokens, Any]:
    """The tokenizer and the model's configuration.

    A missing model is reported before its tokenizer.
    """
    path = settings.model.get("path")
    if path:
        config_at(str(path))
    tokens = load_tokens(settings.data.get("tokenizer"), path)
    return tokens, model_config(settings, tokens)


def model_config(settings: Settings, tokens: Tokens) -> Any:
    """The Hugging Face configuration; BadInputError if missing or unfit for the tokenizer."""
    if settings.model.get("path"):
        config = config_at(str(settings.model["path"]))
        refuse_other_models(settings, config)
        known = config.get_text_config().vocab_size
        if known < tokens.vocabulary:
            name = settings.data.get("tokenizer") or settings.model["path"]
            raise BadInputError(
                f"data.tokenizer {name}: has {tokens.vocabulary} ids, but model.path {settings.model['path']} knows {known}; "
                "use the tokenizer of the model"
            )
        return config
    values = dict(settings.model.get("config") or {})
    kind = values.pop("model_type", None)
    if not kind:
        raise BadInputError("model.config.model_type: missing; name a Hugging Face architecture such as llama")
    if settings.task == "seq2seq":
        # As in T5, the decoder starts with the padding id.
        values |= {"decoder_start_token_id": tokens.pad, "pad_token_id": tokens.pad, "eos_token_id": tokens.end}
    try:
        config = AutoConfig.for_model(kind, **values)
    # Each model's configuration checks its values in its own way.
    except Exception as error:  # noqa: BLE001
        raise BadInputError(f"model.config: {brief(error)}") from None
    refuse_other_models(settings, config)
    _refuse_unknown(values, config)
    if config.vocab_size < tokens.vocabulary:
        raise BadInputError(f"model.config.vocab_size {config.vocab_size}: the tokenizer needs {tokens.vocabulary}")
    return config


def _refuse_unknown(values: Mapping[str, Any], config: Any) -> None:
    """BadInputError for a misspelt key: a configuration class keeps a key that nothing reads as an
    attribute and says nothing.

    Other keys that nothing reads are accepted: published configurations contain some.
    """
    kind = type(config)
    bases: tuple[Any, ...] = kind.__mro__
    declared = {name for base in bases for name in inspect.signature(base.__init__).parameters}
    own = declared - {"self", "args", "kwargs"} | set(kind.attribute_map)
    known = {*own, *dir(kind), *vars(PretrainedConfig()), *vars(GenerationConfig())}
    for key in values:
        # At most two letters differ. BART's own files have classif_dropout and classifier_dropout.
        near = did_you_mean(key, own, max(0.8, 1 - 1.1 / (len(key) or 1)))
        if near and key not in known and key in vars(config) and not _is_named_in_source(key, kind):
            raise BadInputError(f"model.config.{key}: {kind.__name__} has no such key{near}")


def _is_named_in_source(key: str, kind: type) -> bool:
    """Whether the source of the model names the key, as `config.KEY` or as a string. Models read
    some keys that their configuration does not declare."""
    named = re.compile(rf"config\.{re.escape(key)}\b|[\"']{re.escape(key)}[\"']")
    sources = Path(inspect.getfile(kind)).parent.glob("*.py")
    return any(named.search(source.read_text(encoding="utf-8")) for source in sources)


def config_at(path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            values = PretrainedConfig.get_config_dict(path)[0]
            if not isinstance(values, dict):
                raise BadInputError(f"model.path {path}: its config.json is not a JSON object") from None
            if "auto_map" not in values:  # else its code is what is missing, and the error says so
                refuse_unknown_type(f"model.path {path}", values.get("model_type"))
        raise BadInputError(_no_model(path, error)) from None
    # Each model's configuration checks its values in its own way.
    except Exception as error:  # noqa: BLE001
        raise BadInputError(f"model.path {path}: its config.json has wrong values: {brief(error)}") from None


def refuse_unknown_type(where: str, kind: Any) -> None:
    """UnknownModelError if transformers has no such architecture."""
    if kind and kind not in CONFIG_MAPPING:
        raise UnknownModelError(f"{where}: transformers {transformers.__version__} does not know the architecture {kind}")


def refuse_other_models(settings: Settings, config: Any) -> None:
    """BadInputError for a model that is not for the task (of images, or an encoder alone), or has
    fewer positions than the run."""
    kinds = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if settings.task == "seq2seq" else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in kinds:
        try:
            check_model(settings, config.to_dict())
        except SettingsError as error:
            raise BadInputError(str(error)) from None
        return
    kind = config.model_type
    if hasattr(config, "vision_config"):
        raise BadInputError(
            f"model_type {kind}: it reads images, too, and memtop trains language models; give the language model alone"
        )
    if settings.task == "seq2seq":
        raise BadInputError(
            f"model_type {kind}: transformers has no model of this kind with an encoder and a decoder, as seq2seq needs"
        )
    if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise BadInputError(
            f"model_type {kind}: it has an encoder and a decoder, and this recipe trains causal language models; "
            "take recipe pretrain-t5"
        )
    raise BadInputError(
        f"model_type {kind}: transformers has no causal language model of this kind, and memtop trains no other kind"
    )


def _no_model(path: str, error: Exception) -> str:
    folder = Path(path)
    if folder.is_dir():
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        return f"model.path {path}: cannot read a model there (found {there}): {first_line(error)}"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return f"model.path {path}: no such folder, and HF_HUB_OFFLINE=1 forbids a download; give a local folder"
    return f"model.path {path}: no such folder, and not found on the hub: {first_line(error)}"


def brief(error: Exception) -> str:
    """All lines of the message as one, and of a long one the beginning."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]}…"


@contextlib.contextmanager
def blaming_config(settings: Settings) -> Iterator[None]:
    """Make an error in here a BadInputError if the user chose the model's configuration: not every
    architecture checks its values before it uses them.

    A lack of memory stays what it is.
    """
    try:
        yield
    except Exception as error:
        if settings.model.get("path") or isinstance(error, BadInputError) or is_lack_of_memory(error):
            raise
        raise BadInputError(
            f"model.config: no {settings.model['config']['model_type']} model works with these values: "
            f"{type(error).__name__}: {brief(error)}"
        ) from error


def build_model(settings: Settings, config: Any, *, mixed: str = "no") -> torch.nn.Module:
    """The model, with its trained parameters in fp32. The same seed gives the same weights.

    `mixed` is the compute precision on this machine: "no" (fp32), "bf16" or "fp16".
    """
    return prepared(settings, build_base(settings, config, mixed=mixed), mixed=mixed)


def prepared(settings: Settings, model: Any, *, mixed: str) -> torch.nn.Module:
    """The model with what the settings add to it: a residual stream in another precision,
    adapters, gradient checkpointing."""
    # DeepSpeed has everything in the compute precision, without autocast.
    if mixed == "fp16" and not settings.zero.stage:
        _add_layers_in(model, torch.float32)
    elif mixed == "bf16" and settings.bf16_residual and not settings.zero.stage:
        _add_layers_in(model, torch.bfloat16)
    if settings.method != "full":
        model = with_adapters(settings, model)
    if settings.gradient_checkpointing:
        set_checkpointing(model, on=True)
    trainable: torch.nn.Module = model
    return trainable


def compile_layers(model: torch.nn.Module, **options: Any) -> None:
    """torch.compile each layer; equal layers share one compilation.

    What is around the layers stays as it is: it decides whether attention needs a mask, and it has
    the loss in pieces. `options` are those of torch.compile.
    """
    names: Any = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for layer in layers or [model]:
        layer.compile(**options)


def _add_layers_in(model: Any, dtype: torch.dtype) -> None:
    """Make the sum to which each layer adds its output (the residual stream) a sum in this dtype,
    under autocast.

    In fp16 it would exceed the range of fp16 in some models, so it is in fp32 then. In bf16 it
    takes half the memory of fp32. What is trained and saved stays the same: only results change.
    """
    width = model.get_input_embeddings().embedding_dim
    for module in model.modules():
        is_embedding = isinstance(module, torch.nn.Embedding) and module.embedding_dim == width
        # A norm has trained weights in fp32, and would give fp32 to each of the products after it.
        if is_embedding or (dtype == torch.bfloat16 and type(module).__name__.endswith("Norm")):
            module.register_forward_hook(
                lambda module, inputs, output: output.to(dtype) if torch.is_autocast_enabled(output.device.type) else output
            )


def set_checkpointing(model: Any, *, on: bool) -> None:
    """Switch gradient checkpointing at the start or between updates; BadInputError without it."""
    adapted = hasattr(model, "peft_config")
    base = model.get_base_model() if adapted else model
    if on and not base.supports_gradient_checkpointing:
        raise BadInputError(f"gradient_checkpointing true: {type(base).__name__} does not support it; leave it out")
    # transformers 5 renamed these methods; 6 removes the old names.
    if on:
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    else:
        disable = getattr(base, "activation_checkpointing_disable", None) or base.gradient_checkpointing_disable
        disable()
    if adapted:
        # The base is frozen: without this, no gradient would reach the checkpointed layers.
        change = base.enable_input_require_grads if on else base.disable_input_require_grads
        change()


def build_base(settings: Settings, config: Any, *, mixed: str = "no") -> Any:
    """The model without adapters, new or read from files; in 4 bits for QLoRA."""
    torch.manual_seed(settings.seed)
    kind = COMPUTE[mixed]
    return _quantized(settings, config, kind) if settings.method == "qlora" else _whole(settings, config, kind)


def model_class(settings: Settings) -> Any:
    return AutoModelForSeq2SeqLM if settings.task == "seq2seq" else AutoModelForCausalLM


def _whole(settings: Settings, config: Any, kind: torch.dtype) -> Any:
    if not settings.model.get("path"):
        with blaming_config(settings):
            return model_class(settings).from_config(config, dtype=torch.float32)
    # What is trained is kept in fp32. A frozen base is in the compute precision: autocast would
    # copy every other weight in each layer, and keep the copies for the backward pass.
    return _read(settings, dtype=kind if settings.method == "lora" else torch.float32)


def _read(settings: Settings, **options: Any) -> Any:
    path = str(settings.model["path"])
    try:
        model = model_class(settings).from_pretrained(path, trust_remote_code=False, **options)
    except pickle.UnpicklingError:
        raise BadInputError(
            f"model.path {path}: its pickled weights are damaged or hold more than tensors, and memtop executes "
            "nothing that a model's files contain; use weights in safetensors files"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInputError(_no_model(path, error)) from None
    if options["dtype"] == torch.float16:
        _refuse_overflow(model, path)
    return model


def _refuse_overflow(model: torch.nn.Module, path: str) -> None:
    """BadInputError if a weight does not fit into fp16. Autocast would make infinity of it, too."""
    for name, parameter in model.named_parameters():
        # Sharded, this rank's part; in 4 bits, the mean of the scales.
        numbers = getattr(parameter, "ds_tensor", parameter)
        numbers = getattr(getattr(parameter, "quant_state", None), "offset", numbers)
        if numbers.is_floating_point() and not bool(torch.isfinite(numbers).all()):
            raise BadInputError(
                f"model.path {path}: {name} has numbers that fp16 cannot hold; give --set precision=bf16 or fp32"
            )


def _quantized(settings: Settings, config: Any, kind: torch.dtype) -> Any:
    """The base in 4 bits (NF4 with double quantization), prepared for training adapters."""
    import tempfile

    with without_compiler():
        from bitsandbytes.nn.modules import Linear4bit
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=kind,
    )
    where = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() and settings.device != "cpu" else "cpu"
    options: dict[str, Any] = {"quantization_config": how, "device_map": {"": where}, "dtype": kind}
    if settings.model.get("path"):
        model = _read(settings, **options)
    else:
        # New weights are quantized like real ones: by reading a file in 4 bits.
        with tempfile.TemporaryDirectory(prefix="memtop-base-") as folder:
            model_class(settings).from_config(config, dtype=torch.float32).save_pretrained(folder)
            model = model_class(settings).from_pretrained(folder, **options)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # On a CPU with AVX-512, a pass in evaluation mode would re-pack the weights for a
            # kernel without gradients.
            module.support_avx512bf16_for_cpu = False
    # peft's preparation also makes the embeddings and the head fp32, gigabytes of a large model.
    for parameter in model.parameters():
        parameter.requires_grad = False
        if parameter.dtype == kind and parameter.dim() == 1:
            # Norms are small, and rounded in every layer.
            parameter.data = parameter.data.float()
    return model


def with_adapters(settings: Settings, model: Any) -> Any:
    """The model with LoRA adapters: new from the seed, in fp32, and the only trained parameters."""
    with without_compiler():  # peft loads bitsandbytes
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
    # peft has replaced some of them when it fails.
    layers = _layers(model)
    # Seed again: the base may have drawn any number of values.
    torch.manual_seed(settings.seed)
    try:
        return get_peft_model(model, how)
    except ValueError as error:
        why = first_line(error)
        if settings.lora.dropout and "lora_dropout" in why:
            # One tensor has the weights of all experts.
            why = "adapters of the experts of this model can have no dropout; add --set lora.dropout=0"
            raise BadInputError(f"lora.dropout {settings.lora.dropout:g}: {why}") from None
        raise BadInputError(
            f"lora.targets {', '.join(targets)}: {why} (there are {layers}); all of them: --set lora.targets=all-linear"
        ) from None


def _layers(model: torch.nn.Module) -> str:
    """The names of the layers that can get an adapter."""
    from transformers.pytorch_utils import Conv1D

    # GPT-2 has its weights in the last.
    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)}
    return ", ".join(sorted(names)) or "no linear layers"
