"""How many parameters the model of a run has, without loading it: from its Hugging Face
configuration, or from the headers of its weight files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memtop.presets.schema import ALL_TARGETS, Lora, Settings

Config = Mapping[str, Any]

TRAINED_BYTES = 16
"""Bytes of one trained parameter in fp32 with Adam: weight 4, gradient 4, two moments 8. An offload
needs the same amount of host memory."""
MOMENT_BYTES = 8
"""Of these, the bytes that certainly leave the GPU with an offload."""
LIVE_PARAMETERS = 100_000_000
"""With offloaded parameters: how many DeepSpeed keeps on the GPU at one time."""


def model_parameters(config: Config) -> int | None:
    """All parameters of a model with this Hugging Face configuration; None for unknown families."""
    count = _FAMILIES.get(str(config.get("model_type")))
    try:
        return None if count is None else count(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def trained_parameters(settings: Settings, config: Config | None = None) -> int | None:
    """The parameters that the run trains: all, or the adapters'; None if not known.

    `config`: the model's configuration, if the settings name the model only by path.
    """
    known = config if config is not None else settings.model.get("config")
    if not known:
        return None
    return model_parameters(known) if settings.lora is None else adapter_parameters(known, settings.lora)


def adapter_parameters(config: Config, lora: Lora) -> int | None:
    """r x (inputs + outputs), summed over all layers with an adapter; None for unknown families and
    targets, and for a configuration with wrong values."""
    if config.get("model_type") not in _LLAMA_LIKE:
        return None
    try:
        shapes = _llama_shapes(config)
        targets = tuple(shapes) if lora.targets == ("all-linear",) else lora.targets
        return int(config["num_hidden_layers"]) * sum(lora.r * sum(shapes[target]) for target in targets)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LINEAR_LAYERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), ALL_TARGETS),
    # peft takes the experts' one tensor under these names.
    **dict.fromkeys(("qwen3_moe", "olmoe"), ALL_TARGETS),
    "mixtral": (*_ATTENTION, "w1", "w2", "w3"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "t5": ("q", "k", "v", "o", "wi", "wo"),
}


def linear_layers(config: Config) -> tuple[str, ...] | None:
    """The names of the linear layers inside the model, which can get an adapter; None if they are
    not known without torch."""
    found = _LINEAR_LAYERS.get(str(config.get("model_type")))
    if found and str(config.get("feed_forward_proj")).startswith("gated"):
        return tuple(part for name in found for part in (("wi_0", "wi_1") if name == "wi" else (name,)))
    return found


def smaller_model(config: Config) -> dict[str, int] | None:
    """The values for a model of about a quarter of the size; None if the family is not known.

    Width and number of heads are halved, so that heads x head width is still the model's width. For
    T5, the encoder also keeps only 4 of 10 layers; the decoder keeps all.
    """
    halves = {
        "t5": ("d_model", "d_ff", "num_heads"),
        **dict.fromkeys(_LLAMA_LIKE, ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")),
    }.get(str(config.get("model_type")), ())
    values = {name: config[name] for name in halves if name in config}
    if not values or any(not isinstance(value, int) or value < 2 or value % 2 for value in values.values()):
        return None
    smaller = {name: value // 2 for name, value in values.items()}
    layers = config.get("num_layers")
    if config.get("model_type") == "t5" and isinstance(layers, int) and layers > 1:
        smaller["num_layers"] = max(1, layers * 2 // 5)
        if "num_decoder_layers" not in config:
            # The default of num_decoder_layers is num_layers.
            smaller["num_decoder_layers"] = layers
    return smaller


def _t5(config: Config) -> int | None:
    if not config.get("tie_word_embeddings", True):
        # Whether the head then has separate weights depends on the version of transformers.
        return None
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    attention = 4 * width * inner + width
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    forward = (3 if gated else 2) * width * config["d_ff"] + width
    buckets = config.get("relative_attention_num_buckets", 32) * config["num_heads"]
    encoder = config["num_layers"] * (attention + forward) + buckets + width
    decoder = config.get("num_decoder_layers", config["num_layers"]) * (2 * attention + forward) + buckets + width
    return int(config["vocab_size"] * width + encoder + decoder)


_LLAMA_LIKE = ("llama", "mistral", "qwen2")


def _llama_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """Linear layer name to its numbers of inputs and outputs."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    keys = (config.get("num_key_value_heads") or heads) * head
    return {
        "q_proj": (width, heads * head),
        "k_proj": (width, keys),
        "v_proj": (width, keys),
        "o_proj": (heads * head, width),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }


def _llama(config: Config) -> int:
    shapes, width = _llama_shapes(config), config["hidden_size"]
    layer = sum(inputs * outputs for inputs, outputs in shapes.values()) + 2 * width
    if config["model_type"] == "qwen2":
        layer += sum(shapes[name][1] for name in ("q_proj", "k_proj", "v_proj"))
    embeddings = config["vocab_size"] * width * (1 if config.get("tie_word_embeddings", False) else 2)
    return int(embeddings + config["num_hidden_layers"] * layer + width)


def _experts(config: Config) -> int | None:
    """Mixtures of experts with the attention of Llama."""
    kind, width, layers = config["model_type"], config["hidden_size"], config["num_hidden_layers"]
    count = _value(config, _EXPERTS)
    if count is None or config.get("attention_bias"):
        return None
    shapes = _llama_shapes({**config, "intermediate_size": 0})
    layer = sum(inputs * outputs for inputs, outputs in shapes.values()) + 2 * width
    inner, dense = config["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"], 0
    if kind == "qwen3_moe":
        layer += 2 * (config.get("head_dim") or width // config["num_attention_heads"])
        step, without = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        dense = sum(number in without or (number + 1) % step > 0 for number in range(layers))
    elif kind == "olmoe":
        layer += shapes["q_proj"][1] + shapes["k_proj"][1]
    forward = (layers - dense) * count * width * (3 * inner + 1)
    if dense:
        forward += dense * 3 * width * config["intermediate_size"]
    embeddings = config["vocab_size"] * width * (1 if config.get("tie_word_embeddings", False) else 2)
    return int(embeddings + layers * layer + forward + width)


_FAMILIES: dict[str, Callable[[Config], int | None]] = {
    "t5": _t5,
    **dict.fromkeys(_LLAMA_LIKE, _llama),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe"), _experts),
}


# --- of a run, from its files ---------------------------------------------------------------------


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a model as a run trains it."""

    all: int
    """Without adapters."""
    trained: int
    """All, or the adapters'."""
    embedded: int = 0
    """Of all, those of the input embeddings and of an output head of its own; 0 if not known."""


def stored_config(settings: Settings) -> dict[str, Any] | None:
    """The model's configuration. None if only the trainer can know it: a hub name whose files were
    not downloaded yet."""
    config, folder = settings.model.get("config"), _model_folder(settings)
    if config is None and folder is not None:
        try:
            config = msgspec.json.decode((folder / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None  # no such folder, or it cannot be read
    return config if isinstance(config, dict) else None


def unreadable_model(settings: Settings) -> str | None:
    """Why the model's folder holds no configuration that can be read; None if it does, or if the
    model is in no folder of the user's."""
    path = settings.model.get("path")
    if "config" in settings.model or not isinstance(path, str) or not os.path.isdir(path):  # noqa: PTH112 - as above
        return None
    try:
        found = msgspec.json.decode((Path(path) / "config.json").read_bytes())
    except FileNotFoundError:
        return f"model.path {path}: no config.json in it"
    except OSError as error:
        return f"model.path {path}: its config.json cannot be read: {error.strerror}"
    except (ValueError, RecursionError):
        return f"model.path {path}: its config.json is not valid JSON"
    return None if isinstance(found, dict) else f"model.path {path}: its config.json is not a JSON object"


def model_size(settings: Settings) -> ModelSize | None:
    """The size of the run's model; None if it is not known before the model is loaded."""
    config = stored_config(settings) or {}
    found, trained = model_parameters(config), trained_parameters(settings, config)
    if found is None or trained is None:
        shapes = _stored_shapes(settings)
        stored = sum(map(math.prod, shapes.values())) or None
        found = found or stored
        trained = trained or (found if settings.lora is None else _adapters_of(shapes, settings.lora))
    if found is None or trained is None:
        return None
    width, words = config.get("hidden_size") or config.get("d_model"), config.get("vocab_size")
    copies = 1 if config.get("tie_word_embeddings", False) else 2
    embedded = width * words * copies if isinstance(width, int) and isinstance(words, int) else 0
    return ModelSize(all=found, trained=trained, embedded=min(embedded, found))


def too_large(config: Config) -> tuple[str, int, int] | None:
    """A value beyond all models that exist: its name, itself, and the most. With more, only
    counting the layers takes minutes."""
    for name, value in config.items():
        if type(value) is int and value > (most := _MOST.get(name, value)):
            return name, value, most
    part = language_part(config)
    found = None if part is config else too_large(part)
    return None if found is None else (f"text_config.{found[0]}", *found[1:])


def as_stored(value: object) -> str:
    """A value as the file of the configuration has it: a text has quotes."""
    return msgspec.json.encode(value).decode()


def language_part(config: Config) -> Config:
    """Of a configuration for several kinds of input, that of the language model; else itself."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


class LeastSize(NamedTuple):
    """What is known of a model's size: the true one is not smaller."""

    parameters: int
    embedded: int
    """Of these, those of the input embeddings."""
    counted: str
    """What was counted, as one sentence."""


_WIDTH = ("hidden_size", "d_model", "n_embd", "dim")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_WORDS = ("vocab_size",)
_INNER = ("intermediate_size", "d_ff", "ffn_dim", "n_inner")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_INNER_OF_EXPERTS = ("moe_intermediate_size", "expert_ffn_hidden_size")
_WITHOUT_EXPERTS = ("first_k_dense_replace", "num_dense_layers")
"""How many of the first layers have no experts."""
_STEP = ("decoder_sparse_step", "interleave_moe_layer_step")
"""Only each so-many-th layer has experts."""
_MOST = {
    **dict.fromkeys((*_LAYERS, "num_decoder_layers", "encoder_layers", "decoder_layers"), 10_000),
    **dict.fromkeys((*_WIDTH, *_WORDS, *_INNER, "num_attention_heads", "n_head", "num_heads", "head_dim", "d_kv"), 1 << 24),
}
_NARROW = ("embedding_size", "word_embed_proj_dim")
"""Of models whose embeddings are narrower than their layers."""
_SHARED = ("num_hidden_groups", "num_mem_blocks")
"""Of models in which several layers have the same weights."""


def least_size(settings: Settings) -> LeastSize | str:
    """How large the model of any architecture is at least; or which values are missing to say it.

    Its files say it. The values of its configuration give the embeddings, and the feed-forward part
    of each layer: two matrices between the width of the model and that inside a layer, or three of
    half the width inside. Attention, a third whole matrix and an output head are not counted,
    because not every architecture has them. Of a mixture of experts, each expert counts.
    """
    config = stored_config(settings)
    if config is None:
        return "its configuration is not known before it is downloaded"
    if config.get("quantization_config") and settings.method != "qlora":
        return "its weights are quantized"
    words, width = _value(config, _WORDS) or 0, _value(config, _WIDTH) or 0
    stored = _stored_shapes(settings)
    if stored:
        # Old files have a head that is the input embeddings once more.
        tied = config.get("tie_word_embeddings") is not False
        copies = sum(shape == [words, width] for shape in stored.values()) - 1
        count = sum(map(math.prod, stored.values())) - (max(0, copies) * words * width if tied else 0)
        return LeastSize(count, words * width if copies >= 0 else 0, "the weights in its files")
    exact = model_parameters(config)
    if exact is not None:
        return LeastSize(exact, words * width, "the weights of its architecture")
    config = config.get("text_config") or config
    if not isinstance(config, dict):
        return "its configuration has no text_config that can be read"
    values = {names: _value(config, names) for names in (_WIDTH, _LAYERS, _WORDS, (*_INNER, *_INNER_OF_EXPERTS))}
    missing = [names[0] for names, value in values.items() if value is None]
    if missing:
        return f"its configuration lacks {', '.join(missing)}"
    width, layers, words, inner = (value or 0 for value in values.values())
    layers = min(layers, _value(config, _SHARED) or layers)
    if any("pattern" in name or "block_type" in name or _differs(name, value, layers) for name, value in config.items()):
        # Its layers differ; perhaps only one has a feed-forward part.
        layers = 1
    embedded = words * min(width, _value(config, _NARROW) or width)
    part, mixed = 3 * width * inner // 2, _mixed(config, width, layers)
    if mixed is None:
        counted = "the embeddings and the feed-forward part of each layer, as its configuration gives them"
        return LeastSize(embedded + layers * part, embedded, counted)
    with_experts, experts = mixed
    counted = "the embeddings, the experts and other feed-forward parts, as its configuration gives them"
    return LeastSize(embedded + with_experts * experts + (layers - with_experts) * min(part, experts), embedded, counted)


def _mixed(config: Config, width: int, layers: int) -> tuple[int, int] | None:
    """Of a mixture of experts: how many layers have experts at the least, and how many parameters
    those of one layer. None if that is not known.

    Where its configuration does not say which layers have none, each second one has some.
    """
    count, inner = _value(config, _EXPERTS), _value(config, _INNER_OF_EXPERTS)
    if inner is None and "num_local_experts" in config:
        inner = _value(config, _INNER)
    if count is None or inner is None:
        return None
    matrices = count * width * inner
    without, step = ([config[name] for name in names if type(config.get(name)) is int] for names in (_WITHOUT_EXPERTS, _STEP))
    only, kinds = config.get("mlp_only_layers"), config.get("mlp_layer_types")
    with_experts = layers // 2
    if isinstance(kinds, list):
        with_experts = min(layers, kinds.count("sparse"))
    elif without or step:
        with_experts = (layers - sum(without) - (len(only) if isinstance(only, list) else 0)) // max(1, *step, 1)
    gated = config.get("hidden_act", config.get("activation_function")) in ("silu", "swish")
    return max(1, with_experts), 3 * matrices if gated else 3 * matrices // 2


def _differs(name: str, value: Any, layers: int) -> bool:
    """Whether this may be a list of layers that differ in more than their attention and experts."""
    if not isinstance(value, list) or len(value) != layers or layers == 1 or name == "mlp_layer_types":
        return False
    return not (name == "layer_types" and all(str(kind).endswith("attention") for kind in value))


def _value(config: Config, names: tuple[str, ...]) -> int | None:
    """The first of these values that is a number."""
    return next((value for name in names if type(value := config.get(name)) is int and value > 0), None)


def _model_folder(settings: Settings) -> Path | None:
    """The folder that the settings name, or that of a hub name in Hugging Face's cache."""
    path = settings.model.get("path")
    if not isinstance(path, str):
        return None
    folder = os.path.expanduser(path)  # noqa: PTH111 - as in memtop/cli/recipes.py
    if os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises for some texts
        return Path(folder)
    variables, home = os.environ, os.path.expanduser("~/.cache")  # noqa: PTH111 - as in memtop/cli/recipes.py
    cache = variables.get("HF_HOME") or f"{variables.get('XDG_CACHE_HOME') or home}/huggingface"
    repository = Path(variables.get("HF_HUB_CACHE") or f"{cache}/hub") / f"models--{path.replace('/', '--')}"
    try:
        return repository / "snapshots" / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


_LARGEST_HEADER = 100_000_000
"""As in the safetensors library."""


def _stored_shapes(settings: Settings) -> dict[str, list[int]]:
    """The shapes of all weights by name, from the headers of the safetensors files; empty if there
    are none, or if their weights are quantized."""
    folder = _model_folder(settings)
    found: dict[str, list[int]] = {}
    if folder is None or (stored_config(settings) or {}).get("quantization_config"):
        return {}
    try:
        for path in folder.glob("model*.safetensors"):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = msgspec.json.decode(file.read(min(length, _LARGEST_HEADER)))
            found |= {name: list(map(int, of["shape"])) for name, of in header.items() if name != "__metadata__"}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return {}  # damaged: the trainer says so
    return found


_NO_LAYERS = ("embed", "lm_head", "shared", "wte", "wpe")
"""Parts of names of matrices that are no linear layer inside the model."""


def _adapters_of(shapes: Mapping[str, list[int]], lora: Lora) -> int | None:
    """r x (inputs + outputs), summed over all matrices that get an adapter; None if there are
    none."""
    matrices = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) == 2}
    if lora.targets == ("all-linear",):
        chosen = [shape for name, shape in matrices.items() if not any(part in name for part in _NO_LAYERS)]
    else:
        chosen = [shape for name, shape in matrices.items() if name.rpartition(".")[2] in lora.targets]
    return sum(lora.r * sum(shape) for shape in chosen) or None
