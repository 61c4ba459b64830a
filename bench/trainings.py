"""The trainings over which the estimate is compared with the dry run: see `predict.py`.

`drawn_deep` draws trainings that somebody would try: a published model at its whole depth, on a
card, with a batch that roughly fits. `drawn` draws a harder set: the same widths and vocabularies
with two to four layers, and any batch. There a single tensor is a large part of the whole.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench.published import CONFIGS, llama
from memtop.presets import Settings
from memtop.presets.choosing import CONTEXT_BYTES
from memtop.presets.schema import ATTENTION_TARGETS, Lora, Method, Zero
from memtop.train.dry_run.build import training_of
from memtop.train.dry_run.run import Foresight, foresee, needing_most

GIB = 1 << 30


_TARGETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "t5": (("q", "v"), ("all-linear",)),
    "gpt2": (("c_attn",), ("all-linear",)),
    "phi3": (("qkv_proj", "o_proj"), ("all-linear",)),
}
_OTHER_OPTIMIZERS = ("adamw_8bit", "paged_adamw_8bit", "adafactor")
KINDS = ("llama", "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3_text", "gpt2", "t5", "t5")
_SIZES = (
    (576, 1536, 9, 3),
    (1024, 2816, 16, 4),
    (1536, 8960, 12, 2),
    (2048, 5632, 16, 16),
    (2048, 8192, 32, 8),
    (4096, 14336, 32, 8),
)
"""Width, width inside a layer, heads, and heads of keys."""


class Compared(msgspec.Struct, frozen=True):
    """A training of which the memory is estimated and foreseen."""

    settings: Settings
    config: dict[str, Any]
    generation: int
    capacity: int
    name: str = ""
    """Of a published model."""

    @property
    def from_folder(self) -> bool:
        """Whether its weights would be read, and so be in 16 bits if they are frozen."""
        return "path" in self.settings.model

    def foreseen(self) -> Foresight:
        if not self.from_folder:
            return foresee(needing_most(training_of(self.settings, generation=self.generation, capacity=self.capacity)))
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config))
            settings = msgspec.structs.replace(self.settings, model={"path": folder})
            return foresee(needing_most(training_of(settings, generation=self.generation, capacity=self.capacity)))


def drawn(rng: random.Random, kind: str | None = None) -> Compared:
    """A training of any architecture, or of this one."""
    kind = kind or rng.choice(KINDS)
    config = _config(rng, kind)
    method, lora = _method(rng, kind)
    generation = rng.choice((75, 80, 86, 90))
    precision = rng.choice(("bf16", "bf16", "bf16", "fp16", "fp32") if generation >= 80 else ("fp16", "fp32"))
    length, tokens = rng.choice((256, 512, 1024, 2048)), rng.choice((1024, 2048, 4096, 8192, 16384))
    if kind in ("gpt2", "t5", "gemma2") or generation == 75 or precision == "fp32":
        length = min(length, 1024)  # matrices of scores
    reads = method == "lora" and rng.random() < 0.6
    zero = _zero(rng, method) if rng.random() < 0.35 else Zero()
    settings = Settings(
        recipe="",
        preset="",
        save_every=1,
        learning_rate=1e-4,
        model={"path": "read"} if reads else {"config": config},
        task="seq2seq" if kind == "t5" else "causal",
        method=method,
        lora=lora,
        precision=precision,
        batch=max(1, tokens // length),
        seq_len=length,
        accumulation=rng.choice((1, 1, 4)),
        gradient_checkpointing=rng.random() < 0.4,
        loss_chunk=rng.choice((-1, -1, 0, 512, 1024, 4096)),
        optimizer="adamw" if zero.stage else rng.choice(("adamw", "adamw", "adamw", *_OTHER_OPTIMIZERS)),
        world_size=rng.choice((1, 2, 4, 8) if zero.stage else (1, 1, 2)),
        zero=zero,
        bf16_residual=rng.random() < 0.3,
        allocator=rng.choice(("", "expandable_segments:True")),
    )
    return Compared(settings, config, generation, rng.choice((24, 80)) * GIB)


def _method(rng: random.Random, kind: str) -> tuple[Method, Lora | None]:
    method: Method = rng.choice(("full", "full", "lora", "lora", "qlora"))
    targets = _TARGETS.get(kind, (ATTENTION_TARGETS, ("q_proj", "v_proj"), ("all-linear",)))
    lora = Lora(r=rng.choice((8, 16, 64)), alpha=16, dropout=rng.choice((0.0, 0.05)), targets=rng.choice(targets))
    return method, None if method == "full" else lora


def _zero(rng: random.Random, method: str) -> Zero:
    """A base in 4 bits cannot be sharded."""
    stage, offloads = rng.choice((1, 2) if method == "qlora" else (1, 2, 3, 3)), rng.random() < 0.4
    return Zero(stage=stage, offload_optimizer=offloads, offload_parameters=stage == 3 and offloads and rng.random() < 0.5)


def _config(rng: random.Random, kind: str) -> dict[str, Any]:
    layers, tied = rng.choice((2, 2, 2, 3, 3, 4)), rng.random() < 0.5
    if kind == "t5":
        width, inner, heads = rng.choice(((512, 2048, 8), (768, 3072, 12), (1024, 2816, 16)))
        return {
            "model_type": kind,
            "d_model": width,
            "d_ff": inner,
            "num_heads": heads,
            "d_kv": 64,
            "num_layers": layers,
            "num_decoder_layers": rng.choice((2, 3, 4)),
            "vocab_size": rng.choice((29298, 32128)),
            "feed_forward_proj": rng.choice(("relu", "gated-gelu")),
            "tie_word_embeddings": tied,
            "dropout_rate": rng.choice((0.0, 0.1)),
            "decoder_start_token_id": 0,
        }
    if kind == "gpt2":
        width = rng.choice((768, 1280))
        return {"model_type": kind, "n_embd": width, "n_head": width // 64, "n_layer": layers}
    hidden, inner, heads, key_heads = rng.choice(_SIZES)
    config = llama(hidden, inner, layers, heads, key_heads, rng.choice((32000, 50257, 128256, 151936)))
    config |= {"model_type": kind, "tie_word_embeddings": tied, "pad_token_id": 0}
    if kind.startswith("gemma"):
        config |= {"head_dim": rng.choice((64, 128, 256)), "vocab_size": rng.choice((32000, 256000))}
    if kind in ("mistral", "gemma3_text"):
        config["sliding_window"] = rng.choice((512, 4096))
    return config


# --- published models -----------------------------------------------------------------------------


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return llama(hidden, inner, layers, heads, 8, 151936, model_type="qwen3", head_dim=128, **more)


def _gemma(kind: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return llama(*sizes, model_type=kind, head_dim=256, pad_token_id=0, **more)


def _t5(width: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    found = {"model_type": "t5", "d_model": width, "d_ff": inner, "num_layers": layers, "num_decoder_layers": layers}
    return found | {"num_heads": heads, "d_kv": 64, "decoder_start_token_id": 0, **more}


def _flan(*sizes: int) -> dict[str, Any]:
    return _t5(*sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": width, "n_head": heads, "n_layer": layers}


_UNTIED = {"tie_word_embeddings": False}
DEEP: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.2-1B": (CONFIGS["Llama-3.2-1B"], 1236),
    "Llama-3.2-3B": (CONFIGS["Llama-3.2-3B"], 3213),
    "Llama-3.1-8B": (CONFIGS["Llama-3.1-8B"], 8030),
    "Llama-2-7B": (llama(4096, 11008, 32, 32, 32, 32000, **_UNTIED), 6738),
    "TinyLlama-1.1B": (llama(2048, 5632, 22, 32, 4, 32000, **_UNTIED), 1100),
    "SmolLM2-135M": (CONFIGS["SmolLM2-135M"], 135),
    "SmolLM2-360M": (CONFIGS["SmolLM2-360M"], 362),
    "SmolLM2-1.7B": (CONFIGS["SmolLM2-1.7B"], 1711),
    "Qwen2.5-0.5B": (llama(896, 4864, 24, 14, 2, 151936, model_type="qwen2"), 494),
    "Qwen2.5-1.5B": (CONFIGS["Qwen2.5-1.5B"], 1544),
    "Qwen2.5-7B": (llama(3584, 18944, 28, 28, 4, 152064, model_type="qwen2", **_UNTIED), 7616),
    "Qwen3-0.6B": (_qwen3(1024, 3072, 28, 16), 596),
    "Qwen3-1.7B": (_qwen3(2048, 6144, 28, 16), 1720),
    "Qwen3-4B": (_qwen3(2560, 9728, 36, 32), 4022),
    "Qwen3-8B": (_qwen3(4096, 12288, 36, 32, **_UNTIED), 8191),
    "Mistral-7B-v0.1": (llama(4096, 14336, 32, 32, 8, 32000, model_type="mistral", sliding_window=4096, **_UNTIED), 7242),
    "Mistral-7B-v0.3": (llama(4096, 14336, 32, 32, 8, 32768, model_type="mistral", sliding_window=None, **_UNTIED), 7248),
    "Phi-3-mini-4k": (
        llama(3072, 8192, 32, 32, 32, 32064, model_type="phi3", sliding_window=2047, pad_token_id=0, **_UNTIED),
        3821,
    ),
    "Gemma-2B": (_gemma("gemma", 2048, 16384, 18, 8, 1, 256000), 2506),
    "Gemma-2-2B": (_gemma("gemma2", 2304, 9216, 26, 8, 4, 256000), 2614),
    "Gemma-3-1B": (_gemma("gemma3_text", 1152, 6912, 26, 4, 1, 262144, sliding_window=512), 1000),
    "Gemma-3-4B": (_gemma("gemma3_text", 2560, 10240, 34, 8, 4, 262208, sliding_window=1024), 3880),
    "GPT-2-124M": (_gpt2(768, 12, 12), 124),
    "GPT-2-355M": (_gpt2(1024, 24, 16), 355),
    "GPT-2-774M": (_gpt2(1280, 36, 20), 774),
    "GPT-2-1.5B": (_gpt2(1600, 48, 25), 1558),
    "T5-small": (_t5(512, 2048, 6, 8), 60),
    "T5-base": (_t5(768, 3072, 12, 12), 223),
    "T5-large": (_t5(1024, 4096, 24, 16), 738),
    "Flan-T5-small": (_flan(512, 1024, 8, 6), 77),
    "Flan-T5-base": (_flan(768, 2048, 12, 12), 248),
    "Flan-T5-large": (_flan(1024, 2816, 24, 16), 783),
    "Flan-T5-XL": (_flan(2048, 5120, 24, 32), 2850),
}
"""Published models: configuration, and parameters in millions."""
_CARDS = ((75, 16), (86, 24), (86, 48), (89, 24), (89, 48), (80, 40), (80, 80), (90, 80), (90, 141))
"""Compute capability and GiB: T4, RTX 3090, A6000, RTX 4090, L40S, two A100, H100, H200."""


def drawn_deep(rng: random.Random, kind: str | None = None) -> Compared:
    """A training that somebody would try, of any of the models or of one of this architecture.

    What it needs by a rule of thumb (`_rough_bytes`) is at least 2 GiB, and at most 200 GiB and
    1.25 times the card's memory: so some of the trainings do not fit.
    """
    names = [name for name, (config, _) in DEEP.items() if kind in (None, config["model_type"])]
    while True:
        found = _drawn_deep(rng, rng.choice(names))
        rough = _rough_bytes(found)
        if 2 * GIB <= rough <= min(200 * GIB, 1.25 * found.capacity):
            return found


def _drawn_deep(rng: random.Random, name: str) -> Compared:
    config, _ = DEEP[name]
    kind = config["model_type"]
    generation, gib = rng.choice(_CARDS)
    method, lora = _method(rng, kind)
    precision = rng.choice(("bf16", "bf16", "bf16", "bf16", "fp16", "fp32") if generation >= 80 else ("fp16", "fp16", "fp32"))
    zero = _zero(rng, method) if rng.random() < 0.35 else Zero()
    settings = Settings(
        recipe="",
        preset="",
        save_every=1,
        learning_rate=1e-4,
        model={"path": "read"} if method == "lora" and rng.random() < 0.7 else {"config": config},
        task="seq2seq" if kind == "t5" else "causal",
        method=method,
        lora=lora,
        precision=precision,
        batch=rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 32)),
        seq_len=rng.choice((256, 512, 1024) if kind in ("t5", "gpt2") else (512, 1024, 2048, 4096)),
        accumulation=rng.choice((1, 1, 4)),
        gradient_checkpointing=rng.random() < 0.5,
        loss_chunk=rng.choice((-1, -1, -1, 0, 512, 2048)),
        optimizer="adamw" if zero.stage else rng.choice(("adamw", "adamw", "adamw", *_OTHER_OPTIMIZERS)),
        world_size=rng.choice((1, 2, 4, 8) if zero.stage else (1, 1, 2, 4)),
        zero=zero,
        bf16_residual=rng.random() < 0.2,
        allocator=rng.choice(("", "expandable_segments:True")),
    )
    return Compared(settings, config, generation, gib * GIB - CONTEXT_BYTES, name)


def _rough_bytes(one: Compared) -> float:
    """A rule of thumb, not the estimate: weights, gradients and moments by the number of
    parameters; 17 numbers for each token, layer and unit of the width; scores and logits."""
    settings, config = one.settings, one.config
    parameters, world = 1e6 * DEEP[one.name][1], settings.world_size
    item = 4 if settings.precision == "fp32" else 2
    if settings.method != "full":
        known = 0.7 if settings.method == "qlora" else item if one.from_folder or settings.zero.stage else 4
        state = known / (world if settings.zero.stage == 3 else 1)
    elif not settings.zero.stage:
        state = {"adamw": 16, "adafactor": 9, "adamw_8bit": 11, "paged_adamw_8bit": 10}[settings.optimizer]
    else:
        moments = 0 if settings.zero.offload_optimizer else 12 / world
        state = {1: 2 * item, 2: item + item / world, 3: 2 * item / world}[settings.zero.stage] + moments
    hidden = next(config[name] for name in ("hidden_size", "d_model", "n_embd") if name in config)
    layers = next(config[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if name in config)
    layers *= 2 if settings.task == "seq2seq" else 1
    tokens = settings.batch * settings.seq_len
    one_layer = 17 * item * tokens * hidden
    heads = next(config[name] for name in ("num_attention_heads", "num_heads", "n_head") if name in config)
    if one.generation < 80 or item == 4 or config["model_type"] in ("gemma2", "t5", "gpt2"):
        one_layer += 2 * item * tokens * settings.seq_len * heads
    saved = layers * (2 * item * tokens * hidden if settings.gradient_checkpointing else one_layer)
    logits = 12 * tokens * config.get("vocab_size", 50257) if settings.loss_chunk == 0 else 0
    return state * parameters + saved + one_layer + logits
