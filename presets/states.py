"""What is in the GPU's memory during a whole training, and the precision of it: weights, the
optimizer's moments, gradients between passes and buffers; with DeepSpeed's ZeRO, one process's part
of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from memtop.presets.parameters import LeastSize
from memtop.presets.schema import Settings

_BUCKET, _BUCKETS = 16 << 20, 2
"""Through which several processes sum their gradients: see train/exchange.py."""


class UnknownMemoryError(ValueError):
    """The memory cannot be estimated; the text says why, as one line."""


class WrongValueError(UnknownMemoryError):
    """No model works with this value."""


class Parameter(NamedTuple):
    """A matrix, or with 0 columns a vector. `item`: bytes of a number; 0: it is in 4 bits."""

    rows: int
    columns: int
    item: int
    trained: bool

    @property
    def numbers(self) -> int:
        return self.rows * (self.columns or 1)


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of numbers, 4 or 2, and what is trained."""

    weights: int
    """Of the base's matrices and embeddings."""
    kept: int
    """Of matrices that are never in 4 bits."""
    vectors: int
    """Of its norms and biases."""
    compute: int
    """Of matrix products."""
    stream: int
    """Of the sum to which the layers add their outputs."""
    half: str | None = None
    """The precision in 16 bits, if there is one."""
    autocast: bool = False
    """Whether products get copies of their operands in 16 bits."""
    narrow_norms: bool = False
    """Whether norms give what they compute in fp32 in 16 bits."""
    replaces_linear: bool = False
    """Whether linear layers are DeepSpeed's own, which keep their input also if their weight gets
    no gradient."""
    gathers: bool = False
    """Whether ZeRO-3 gathers each weight when a module needs it."""
    full: bool = True
    """Whether everything is trained; otherwise only the adapters are."""
    quantized: bool = False
    rank: int = 0
    adapters: int = 4
    """Bytes of the adapters' numbers."""
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """The layers with adapters, with ("all-linear",) all."""
    expandable: bool = False
    """Whether torch's allocator has expandable segments."""


def numbers_of(settings: Settings, half: str | None) -> Numbers:
    """As train.model builds the model: see there. `half`: bf16, fp16 or None."""
    full, quantized = settings.method == "full", settings.method == "qlora"
    if not full and settings.lora is None:
        raise UnknownMemoryError(f"method {settings.method}: needs lora.r and lora.alpha")
    lora = None if full else settings.lora
    sharded = bool(settings.zero.stage) and half is not None
    in_16_bits = half is not None and (quantized or (settings.method == "lora" and bool(settings.model.get("path"))))
    weights = 2 if in_16_bits or sharded else 4
    vectors = 4 if quantized and not sharded else weights
    # DeepSpeed has everything in 16 bits, without autocast.
    autocast = half is not None and not sharded
    narrow_norms = settings.bf16_residual and half == "bf16" and autocast
    stream = 2 if narrow_norms or (weights == vectors == 2 and (half == "bf16" or sharded)) else 4
    return Numbers(
        weights=weights,
        # Of T5: transformers keeps it in fp32 rather than in fp16; DeepSpeed converts it.
        kept=4 if quantized and half == "fp16" and not sharded else weights,
        vectors=vectors,
        compute=2 if half else 4,
        half=half,
        stream=stream,
        autocast=autocast,
        narrow_norms=narrow_norms,
        replaces_linear=settings.zero.stage == 3,
        gathers=settings.zero.stage == 3,
        full=full,
        quantized=quantized,
        rank=lora.r if lora else 0,
        dropout=lora.dropout if lora else 0.0,
        targets=lora.targets if lora else (),
        adapters=2 if sharded else 4,
        expandable="expandable_segments:True" in settings.allocator,
    )


def ring_bytes(settings: Settings, trained: Sequence[Parameter]) -> int:
    """The buckets through which several processes sum their gradients: see `plan_buckets` in
    train/exchange.py. Those of DistributedDataParallel hold all gradients once more."""
    if settings.world_size == 1:
        return 0
    if settings.ddp:
        return sum(one.numbers * one.item for one in trained)
    sizes: list[int] = []
    filling: dict[int, int] = {}
    for one in reversed(trained):
        size = one.numbers * one.item
        if 4 * size >= _BUCKET:
            sizes += [min(size - start, _BUCKET) for start in range(0, size, _BUCKET)]
        elif filling.get(one.item, 0) + size > _BUCKET:
            sizes.append(filling[one.item])
            filling[one.item] = size
        else:
            filling[one.item] = filling.get(one.item, 0) + size
    sizes += filling.values()
    return min(_BUCKETS, len(sizes)) * max(sizes)


def weight_sizes(one: Parameter) -> list[int]:
    """Bytes of each tensor of a weight in 4 bits."""
    # A scale of 8 bits for 64 weights, one of 32 bits for 256 scales, and two tables.
    blocks = -(-one.numbers // 64)
    return [-(-one.numbers // 2), blocks, -(-blocks // 256) * 4, 2048]


def least_bytes(settings: Settings, size: LeastSize, half: str | None) -> dict[str, int]:
    """What one process has on its GPU in each update at the least, by what it is for: torch
    allocates more. Adapters, buffers, scales of 4-bit weights and activations are not counted."""
    numbers, count, zero = numbers_of(settings, half), size.parameters, settings.zero
    part = settings.world_size if zero.stage else 1
    weights = count * numbers.weights
    if numbers.quantized:
        # At the least: the input embeddings are not in 4 bits.
        weights = (count - size.embedded) // 2 + size.embedded * numbers.weights
    if zero.stage == 3:
        weights = 0 if zero.offload_parameters else weights // part
    found = {"weights": weights}
    if not numbers.full:
        return found
    moments = {"adafactor": 0, "paged_adamw_8bit": 0, "adamw_8bit": 2}.get(settings.optimizer, 8)
    if not zero.stage:
        found |= {"gradients": 4 * count, "optimizer": moments * count}
    elif not zero.offload_optimizer:
        found |= {"optimizer": 8 * count // part}
        if half is not None:
            found["master weights"] = 4 * count // part
    return found


def optimizer_sizes(kind: str, one: Parameter) -> list[int]:
    """Bytes of each tensor that the optimizer keeps of a parameter, in the order in which they are
    made."""
    count = one.numbers
    if kind == "adafactor":
        return [512, *([4 * one.rows, 4 * one.columns] if one.columns else [4 * count])]
    if kind in ("adamw_8bit", "paged_adamw_8bit"):
        # bitsandbytes keeps small moments in 32 bits. What it pages is not in torch's memory.
        if count < 4096:
            return [4 * count] * 2
        moments = [] if kind == "paged_adamw_8bit" and count >= 100_000 else [count] * 2
        return [*moments, *[-(-count // 256) * 4] * 2]
    return [512, *[count * one.item] * 2]
