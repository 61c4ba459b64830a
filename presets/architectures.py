"""The architectures whose memory `estimate.py` knows: their sizes from a Hugging Face
configuration, and the operations of their layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from memtop.presets.autograd import BIAS, Tensor
from memtop.presets.layers import Kernel, Layer
from memtop.presets.parameters import as_stored, too_large
from memtop.presets.states import UnknownMemoryError, WrongValueError

BF16_FROM = 80
"""The compute capability from which on a GPU computes in bf16 and has flash attention."""
CPU = 0
"""In place of a compute capability: the kernels of a CPU."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the sizes of a model's tensors."""

    kind: str
    hidden: int
    inner: int
    layers: int
    """With an encoder, those of the encoder."""
    decoder_layers: int = 0
    """0: there is no encoder."""
    heads: int
    key_heads: int
    width: int
    """Of a head."""
    vocabulary: int
    tied: bool
    """Whether the output head has the weights of the input embeddings."""
    activation: str
    gated: bool = True
    norm: str = "llama"
    query_bias: bool = False
    output_bias: bool = False
    inner_bias: bool = False
    head_norms: bool = False
    """Whether queries and keys have norms."""
    norms_after: bool = False
    """Whether attention and the inner layers have norms before and after them."""
    fused: bool = False
    """Whether queries, keys and values, and both inner layers, are one matrix."""
    scaled_embeddings: bool = False
    positions: int = 0
    """Trained position embeddings."""
    buckets: int = 0
    """Of trained distances, which are added to the scores of attention."""
    windows: tuple[int, ...] = ()
    """For each layer, how far it looks back; 0: to the start."""
    score_cap: bool = False
    logit_cap: bool = False
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    scaled_output: bool = False


_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": None,
    "layer_types": None,
}
_GEMMA = _LLAMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_QWEN = _LLAMA | {
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "phi3": _LLAMA | {"hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32064, "resid_pdrop": 0.0},
    "gemma": _GEMMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": None,
    },
    "gemma2": _GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": _GEMMA | {"vocab_size": 262_208, "final_logit_softcapping": None, "sliding_window_pattern": 6},
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
        "add_cross_attention": False,
    },
    "t5": {
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": None,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "dropout_rate": 0.1,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
}
"""transformers' values for what a configuration leaves out."""
OTHER_NAMES = {
    "gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    | {"max_position_embeddings": "n_positions"},
    "t5": {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    | {"head_dim": "d_kv"},
}


class _Values:
    """A configuration's values, with transformers' where it has none."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("model_type")
        if (large := too_large(config)) is not None:
            name, value, most = large
            raise WrongValueError(f"model.config.{name} {value}: must be at most {most}")
        if not kind:
            raise UnknownMemoryError("model.config.model_type: missing; name a Hugging Face architecture such as llama")
        if not isinstance(kind, str) or kind not in DEFAULTS:
            known = ", ".join(sorted(DEFAULTS))
            raise UnknownMemoryError(f"model.config.model_type {kind}: no estimate for this architecture; known are {known}")
        self.kind = kind
        renamed = {OTHER_NAMES.get(kind, {}).get(name, name): value for name, value in config.items()}
        self._values = DEFAULTS[kind] | renamed

    def whole(self, name: str) -> int:
        value = self._values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise WrongValueError(f"model.config.{name} {as_stored(value)}: must be a whole number from 1 on")
        return value

    def whole_or(self, name: str, other: int) -> int:
        return other if self._values.get(name) is None else self.whole(name)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def share(self, name: str) -> float:
        value = self._values.get(name) or 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise WrongValueError(f"model.config.{name} {as_stored(value)}: must be a number from 0 to 1")
        return float(value)

    def is_on(self, name: str) -> bool:
        return bool(self._values.get(name))

    def text(self, name: str) -> str:
        return str(self._values.get(name))

    def activation(self, name: str, value: str | None = None) -> str:
        value = self.text(name) if value is None else value
        if value not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise UnknownMemoryError(f"model.config.{name} {value}: no estimate for this function; known are {known}")
        return value

    def sliding(self, layers: int) -> tuple[int, ...]:
        """How far each layer looks back; empty: all look back to the start."""
        if self._values.get("sliding_window") is None or self.kind in ("llama", "gemma"):
            return ()
        types = self._values.get("layer_types")
        if isinstance(types, list | tuple) and len(types) >= layers:
            near = [kind == "sliding_attention" for kind in types[:layers]]
        elif self.kind in ("mistral", "phi3"):
            near = [True] * layers
        elif self.kind in ("qwen2", "qwen3"):
            is_on = self.is_on("use_sliding_window")
            from_layer = self.whole("max_window_layers") if is_on and self.is_on("max_window_layers") else 0
            near = [is_on and number >= from_layer for number in range(layers)]
        else:
            pattern = 2 if self.kind == "gemma2" else self.whole("sliding_window_pattern")
            near = [bool((number + 1) % pattern) for number in range(layers)]
        return tuple(self.whole("sliding_window") if one else 0 for one in near) if any(near) else ()


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The sizes of the model with this configuration; UnknownMemoryError if it is not known, and
    WrongValueError if it makes no sense."""
    values = _Values(config)
    return {"gpt2": _gpt2_shape, "t5": _t5_shape}.get(values.kind, _causal_shape)(values)


def _causal_shape(values: _Values) -> Shape:
    kind, hidden, heads = values.kind, values.whole("hidden_size"), values.whole("num_attention_heads")
    gemma = kind.startswith("gemma")
    layers, key_heads = values.whole("num_hidden_layers"), values.whole_or("num_key_value_heads", heads)
    _divides("num_key_value_heads", key_heads, "num_attention_heads", heads)
    if not values.has("head_dim"):
        # Positions rotate pairs of numbers. Whether it works with heads of an even width depends on
        # the version of transformers; phi3 may rotate only a part.
        odd = hidden // heads % 2 and kind != "phi3"
        _divides("num_attention_heads", heads, "hidden_size", hidden, WrongValueError if odd else UnknownMemoryError)
    biased = values.is_on("attention_bias") and kind != "mistral"
    return Shape(
        kind=kind,
        hidden=hidden,
        inner=values.whole("intermediate_size"),
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        width=values.whole_or("head_dim", hidden // heads),
        vocabulary=values.whole("vocab_size"),
        tied=values.is_on("tie_word_embeddings"),
        activation=values.activation("hidden_activation" if kind in ("gemma2", "gemma3_text") else "hidden_act"),
        norm="gemma" if gemma else "llama",
        query_bias=biased or kind == "qwen2",
        output_bias=biased,
        inner_bias=values.is_on("mlp_bias") and kind == "llama",
        head_norms=kind in ("qwen3", "gemma3_text"),
        norms_after=kind in ("gemma2", "gemma3_text"),
        fused=kind == "phi3",
        scaled_embeddings=gemma,
        windows=values.sliding(layers),
        score_cap=kind == "gemma2" and values.is_on("attn_logit_softcapping"),
        logit_cap=kind in ("gemma2", "gemma3_text") and values.is_on("final_logit_softcapping"),
        attention_dropout=values.share("attention_dropout"),
        residual_dropout=values.share("resid_pdrop") if kind == "phi3" else 0.0,
    )


def _gpt2_shape(values: _Values) -> Shape:
    if values.is_on("add_cross_attention"):
        raise UnknownMemoryError("model.config.add_cross_attention true: no estimate for a decoder without its encoder")
    hidden, heads = values.whole("n_embd"), values.whole("n_head")
    _divides("n_head", heads, "n_embd", hidden)
    return Shape(
        kind="gpt2",
        hidden=hidden,
        inner=values.whole_or("n_inner", 4 * hidden),
        layers=values.whole("n_layer"),
        heads=heads,
        key_heads=heads,
        width=hidden // heads,
        vocabulary=values.whole("vocab_size"),
        tied=values.is_on("tie_word_embeddings"),
        activation=values.activation("activation_function"),
        gated=False,
        norm="layer",
        query_bias=True,
        output_bias=True,
        inner_bias=True,
        fused=True,
        positions=values.whole("n_positions"),
        residual_dropout=values.share("resid_pdrop"),
        embedding_dropout=values.share("embd_pdrop"),
        attention_dropout=values.share("attn_pdrop"),
    )


def _t5_shape(values: _Values) -> Shape:
    hidden, heads, layers = values.whole("d_model"), values.whole("num_heads"), values.whole("num_layers")
    gate, _, function = values.text("feed_forward_proj").rpartition("-")
    rate = values.share("dropout_rate")
    return Shape(
        kind="t5",
        hidden=hidden,
        inner=values.whole("d_ff"),
        layers=layers,
        decoder_layers=values.whole_or("num_decoder_layers", layers),
        heads=heads,
        key_heads=heads,
        width=values.whole("d_kv"),
        vocabulary=values.whole("vocab_size"),
        tied=True,
        # As T5Config reads it.
        activation=values.activation("feed_forward_proj", "gelu_new" if gate and function == "gelu" else function),
        gated=bool(gate),
        norm="t5",
        buckets=values.whole("relative_attention_num_buckets"),
        residual_dropout=rate,
        embedding_dropout=rate,
        attention_dropout=rate,
        # Only what its file calls untied, version 1.1, does not scale: see T5Config.
        scaled_output=values.is_on("tie_word_embeddings"),
    )


def _divides(name: str, value: int, of: str, whole: int, error: type[UnknownMemoryError] = WrongValueError) -> None:
    if whole % value:
        raise error(f"model.config.{name} {value}: does not divide {of} {whole}")


def kernel_of(shape: Shape, generation: int, *, half: str | None, masked: bool) -> Kernel:
    """What computes attention on a GPU of this compute capability; `half`: bf16, fp16 or None."""
    if shape.kind == "gemma2":
        return "eager"
    if generation == CPU:
        # It takes shared keys and masks, but neither dropout nor a bias that is trained.
        return "math" if shape.buckets or shape.attention_dropout else "flash"
    width, step = shape.width, 8 if half else 4
    # A consumer card has no backward pass for the widest heads.
    rate = shape.attention_dropout
    too_wide = generation in (86, 89, 120, 121) and (width > 224 or (width > 192 and rate > 0))
    if half and generation >= BF16_FROM and not masked and not shape.buckets and width <= 256 and not too_wide:
        return "flash"
    supported = width % step == 0 and (half != "bf16" or generation >= BF16_FROM)
    shared = shape.key_heads != shape.heads and not masked and width <= 256
    return "efficient" if supported and not shared else "math"


def causal_layer(layer: Layer, shape: Shape, x: Tensor, kernel: Kernel, mask_bytes: int) -> Tensor:
    # The module that called holds what it gave until it gets the result.
    normed = layer.norm(x, shape.hidden, shape.norm)
    attended = _attend(layer, shape, normed, kernel, mask_bytes)
    if shape.kind == "gpt2":
        # It gives the sum the name of what the attention got, and its layers end with a dropout.
        normed = x = layer.add(attended, x)
        normed = layer.norm(x, shape.hidden, shape.norm)
        inner = _inner(layer, shape, normed)
        found = layer.add(x, inner)
        del normed
        return found
    del normed
    if shape.norms_after:
        attended = layer.norm(attended, shape.hidden, shape.norm)
    x = layer.add(x, layer.dropout(attended, shape.residual_dropout))
    del attended
    normed = layer.norm(x, shape.hidden, shape.norm)
    inner = _inner(layer, shape, normed)
    del normed
    if shape.norms_after:
        inner = layer.norm(inner, shape.hidden, shape.norm)
    found = layer.add(x, layer.dropout(inner, shape.residual_dropout))
    del inner
    return found


def _attend(layer: Layer, shape: Shape, x: Tensor, kernel: Kernel, mask_bytes: int) -> Tensor:
    hidden, queries, keys = shape.hidden, shape.heads * shape.width, shape.key_heads * shape.width
    stream = x.item if shape.norm == "layer" else layer.numbers.stream
    module, first = layer.begin(), len(layer.parameters)
    if shape.fused:
        name = "c_attn" if shape.kind == "gpt2" else "qkv_proj"
        whole = layer.linear(x, hidden, queries + 2 * keys, name, bias=shape.query_bias)
        if shape.positions:
            query, key, value = layer.parts(whole, (queries, keys, keys))
        else:
            query, key, value = (layer.view(whole, layer.tokens * width) for width in (queries, keys, keys))
            query, key = layer.headed(query), layer.headed(key)
        del whole
    else:
        norms_at_once = shape.head_norms and shape.norm != "gemma"
        query = layer.headed(layer.linear(x, hidden, queries, "q_proj", bias=shape.query_bias))
        if norms_at_once:
            query = layer.norm(query, shape.width, shape.norm)
        key = layer.headed(layer.linear(x, hidden, keys, "k_proj", bias=shape.query_bias))
        if norms_at_once:
            key = layer.norm(key, shape.width, shape.norm)
        value = layer.linear(x, hidden, keys, "v_proj", bias=shape.query_bias)
        if shape.head_norms and not norms_at_once:
            query = layer.norm(query, shape.width, shape.norm)
            key = layer.norm(key, shape.width, shape.norm)
        if kernel in ("eager", "math"):
            value = layer.headed(value)
    if not shape.positions:
        query, key = (layer.rotated(one, stream, joined=shape.fused) for one in (query, key))
    found = layer.attention(
        query,
        key,
        value,
        kernel,
        shape.heads,
        shape.key_heads,
        mask_bytes=mask_bytes,
        cap=shape.score_cap,
        rate=shape.attention_dropout,
        by_head=shape.fused and not shape.positions,
    )
    own = layer.parameters[first:]
    # What goes in ends before the queries, keys and values do.
    found = layer.linear(found, queries, hidden, "c_proj" if shape.kind == "gpt2" else "o_proj", bias=shape.output_bias)
    if shape.kind == "phi3":  # Its layer of the output is its first.
        layer.parameters[first:] = [*layer.parameters[first + len(own) :], *own]
    if shape.kind == "gpt2":
        found = layer.dropout(found, shape.residual_dropout)
    return layer.end(module, found)


def _inner(layer: Layer, shape: Shape, x: Tensor) -> Tensor:
    hidden, inner, module = shape.hidden, shape.inner, layer.begin()
    if shape.kind == "gpt2":
        wide = layer.linear(x, hidden, inner, "c_fc", bias=True)
        wide = layer.activation(wide, shape.activation)
        wide = layer.linear(wide, inner, hidden, "c_proj", bias=True)
        return layer.end(module, layer.dropout(wide, shape.residual_dropout))
    if shape.fused:
        # The gate is held until the end, and with it the whole result, for longer than the product.
        gate, other = layer.parts(layer.linear(x, hidden, 2 * inner, "gate_up_proj"), (inner, inner))
        product = layer.multiply(other, layer.activation(gate, shape.activation))
    else:
        gate = layer.activation(layer.linear(x, hidden, inner, "gate_proj", bias=shape.inner_bias), shape.activation)
        other = layer.linear(x, hidden, inner, "up_proj", bias=shape.inner_bias)
        product = layer.multiply(gate, other)
        del gate, other
    return layer.end(module, layer.linear(product, inner, hidden, "down_proj", bias=shape.inner_bias))


def t5_layer(
    layer: Layer, shape: Shape, x: Tensor, kernel: Kernel, biases: tuple[Tensor, Tensor | None], seen: Tensor | None
) -> Tensor:
    """`biases`: what is added to the scores of a layer's attention, and to those of its attention
    to `seen`, the encoder's result, if it is a decoder's layer."""
    for source, bias in ((None, biases[0]), (seen, biases[1]))[: 1 if seen is None else 2]:
        assert bias is not None
        normed = layer.norm(x, shape.hidden, "t5")
        attended = _t5_attend(layer, shape, normed, source or normed, kernel, bias, batched=source is not None or seen is None)
        found = layer.add(x, layer.dropout(attended, shape.residual_dropout))
        if source is None:
            del attended, normed
        else:
            del normed, attended
        x = found
        del found
        x = layer.clamped(x)
    normed = layer.norm(x, shape.hidden, "t5")
    rate = shape.residual_dropout
    active: Tensor | None = None
    other: Tensor | None = None
    if shape.gated:
        active = layer.activation(layer.linear(normed, shape.hidden, shape.inner, "wi_0"), shape.activation)
        other = layer.linear(normed, shape.hidden, shape.inner, "wi_1")
        wide = layer.multiply(active, other)
    else:
        wide = layer.activation(layer.linear(normed, shape.hidden, shape.inner, "wi"), shape.activation)
    wide = layer.dropout(wide, rate)
    # What leaves the inner layers has the precision of their weights, never in 4 bits.
    wide = layer.cast(wide, layer.numbers.kept)
    inner = layer.linear(wide, shape.inner, shape.hidden, "wo", whole=True)
    del wide, active, other, normed
    found = layer.add(x, layer.dropout(inner, rate))
    del inner, x
    return layer.clamped(found)


def _t5_attend(layer: Layer, shape: Shape, x: Tensor, seen: Tensor, kernel: Kernel, bias: Tensor, *, batched: bool) -> Tensor:
    heads, inner, module = shape.heads, shape.heads * shape.width, layer.begin()
    query = layer.linear(x, shape.hidden, inner, "q")
    key = layer.linear(seen, shape.hidden, inner, "k")
    value = layer.linear(seen, shape.hidden, inner, "v")
    layer.events.append(BIAS)
    # Without a mask, a decoder makes its own in each layer; for all samples it is the same.
    times, mask = (layer.batch, 0) if batched else (1, layer.length**2)
    added = layer.shares_with(bias, heads * layer.length**2 * times, mask)
    if seen is x:
        # The distances are in another order than the kernel's.
        added = layer.copied(added)
    found = layer.attention(query, key, value, kernel, heads, heads, bias=added, rate=shape.attention_dropout)
    del added
    found = layer.linear(found, inner, shape.hidden, "o")
    del query, key, value
    return layer.end(module, found)
