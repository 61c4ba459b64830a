"""Describes a training, and builds its model from tensors without contents."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from transformers import AutoConfig, BitsAndBytesConfig

from memtop.presets import Settings
from memtop.presets.host_memory import host_plan
from memtop.presets.schema import Lora, Method, Positive, Zero
from memtop.train import BadInputError
from memtop.train.compile_lock import without_compiler
from memtop.train.dry_run.cuda import Attention
from memtop.train.dry_run.results import fake
from memtop.train.dry_run.trace import Trace
from memtop.train.model import (
    blaming_config,
    brief,
    config_at,
    model_class,
    prepared,
    refuse_other_models,
    refuse_unknown_type,
)

Optimizer = Literal["adamw", "adamw_foreach", "adamw_8bit", "paged_adamw_8bit", "adafactor"]
"""The trainer's, of which `adamw` is fused; and torch's own choice of AdamW on a GPU."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BF16_FROM = 80
"""The compute capability from which on a GPU computes in bf16."""
_QUANTIZED_BLOCK, _SCALES_BLOCK = 64, 256
"""Weights that share a scale in 4 bits, and scales that share one with double quantization."""


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the memory of a training on one GPU, in one of its processes."""

    config: Any
    """A Hugging Face configuration, or its values with a `model_type`."""
    task: Literal["causal", "seq2seq"] = "causal"
    method: Method = "full"
    lora: Lora | None = None
    """With method lora and qlora."""
    double_quantization: bool = True
    """With method qlora: the scales of the 4-bit weights are in 8 bits."""
    in_fp32: Literal["all", "vectors", "nothing"] = "vectors"
    """With method qlora, of what is not in 4 bits: all as peft prepares a model, which converts it
    on the GPU; vectors as in the built-in trainer."""
    weights: Literal["fp32", "bf16", "fp16"] = "fp32"
    autocast: Literal["bf16", "fp16"] | None = None
    bf16_residual: bool = False
    batch: Positive
    seq_len: Positive
    label_len: Positive | None = None
    """Tokens of the labels of a seq2seq sample; None: seq_len."""
    accumulation: Positive = 1
    padded: bool = False
    """Samples differ in length, and the batch comes with an attention mask."""
    gradient_checkpointing: bool = False
    attention: Attention = "sdpa"
    optimizer: Optimizer = "adamw"
    loss: Literal["pieces", "whole"] = "pieces"
    """The built-in trainer's, with the head run in pieces; or Hugging Face's own."""
    loss_chunk: int = -1
    """With loss in pieces, the setting of that name; -1 needs a capacity."""
    outputs_until: Literal["loss", "backward", "step", "next"] = "loss"
    """With whole loss, up to the end of what a variable keeps the logits; next: of the next forward
    pass, as in a loop that only assigns it."""
    keep_gradients: bool = False
    """Gradients are set to zero between updates instead of released."""
    world_size: Positive = 1
    """Processes, with a GPU each. Without ZeRO they sum their gradients with the built-in trainer's
    buckets, or with those of `ddp`."""
    ddp: bool = False
    """torch's DistributedDataParallel sums the gradients. When it is made it allocates buckets for
    all of them. By default, gradients are not views of these buckets."""
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Which of these processes. With ZeRO-1 and 2 the first one often needs the most memory, and
    the last one if the head has weights of its own."""
    zero: Zero = Zero()
    """DeepSpeed's strategy, with the built-in trainer's configuration. The precision is that of
    `weights`, without autocast; the optimizer updates fp32 weights."""
    pin_memory: bool = False
    """With an offload: host memory is page-locked."""
    built_in: Literal["fp32", "bf16", "fp16"] = "fp32"
    """With ZeRO: the precision of the model in host memory, before DeepSpeed converts it."""
    sharded_when_read: bool = False
    """With ZeRO-3: each process reads only its part of the weights."""
    generation: Positive
    """The GPU's compute capability without its point: 75, 80, 90, ..."""
    expandable_segments: bool = False
    capacity: Positive | None = None
    """Bytes that torch can reserve on the GPU."""

    def settings(self, config: Any) -> Settings:
        """What the built-in trainer's own functions need to know."""
        return Settings(
            recipe="",
            preset="",
            batch=self.batch,
            accumulation=self.accumulation,
            seq_len=self.seq_len,
            save_every=1,
            learning_rate=1e-4,
            task=self.task,
            method=self.method,
            lora=self.lora,
            optimizer="adamw" if self.optimizer == "adamw_foreach" else self.optimizer,
            gradient_checkpointing=self.gradient_checkpointing,
            bf16_residual=self.bf16_residual,
            loss_chunk=self.loss_chunk,
            zero=self.zero,
            world_size=self.world_size,
            model={"config": {"model_type": config.model_type}},
        )


def training_of(settings: Settings, *, generation: int, capacity: int | None, host_bytes: int | None = None) -> Training:
    """A run of the built-in trainer on a GPU.

    `capacity`: the bytes that torch can reserve there. `host_bytes`: the host memory that is free
    beside what an offload takes; None if that is not known.
    """
    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if generation >= _BF16_FROM else "fp16"
    path = settings.model.get("path")
    # As `train.model` builds the base: see there.
    base_in_16_bits = settings.method == "qlora" or (settings.method == "lora" and path)
    built_in = precision if base_in_16_bits else "fp32"
    # DeepSpeed has everything in the compute precision, without autocast.
    sharded = settings.zero.stage > 0
    return Training(
        config=config_at(str(path)) if path else settings.model.get("config") or {},
        task="seq2seq" if settings.task == "seq2seq" else "causal",
        method=settings.method,
        lora=settings.lora,
        weights=precision if sharded else built_in,
        autocast=None if sharded or precision == "fp32" else precision,
        bf16_residual=settings.bf16_residual,
        batch=settings.batch,
        seq_len=settings.seq_len,
        accumulation=settings.accumulation,
        padded=settings.task == "seq2seq",
        gradient_checkpointing=settings.gradient_checkpointing,
        optimizer="adamw" if settings.optimizer == "cpu_adam" else settings.optimizer,
        loss_chunk=settings.loss_chunk,
        world_size=settings.world_size,
        ddp=settings.ddp,
        zero=settings.zero,
        pin_memory=host_plan(settings, host_bytes, on_gpu=True).pin_memory,
        built_in=built_in,
        sharded_when_read=settings.zero.stage == 3 and bool(path),
        generation=generation,
        expandable_segments="expandable_segments:True" in settings.allocator,
        capacity=capacity,
    )


def config_of(training: Training) -> Any:
    """The Hugging Face configuration; BadInputError if it or the training contradicts itself."""
    if training.method != "full" and training.lora is None:
        raise BadInputError(f"method {training.method}: needs lora.r and lora.alpha")
    _refuse_contradictions(training)
    if not isinstance(training.config, dict):
        refuse_other_models(training.settings(training.config), training.config)
        return training.config
    values = dict(training.config)
    kind = values.pop("model_type", None)
    if not kind:
        raise BadInputError("model.config.model_type: missing; name a Hugging Face architecture such as llama")
    if training.task == "seq2seq":
        values = {"decoder_start_token_id": 0, "pad_token_id": 0} | values
    refuse_unknown_type("model.config.model_type", kind)
    try:
        config = AutoConfig.for_model(kind, **values)
    # Each model's configuration checks its values in its own way.
    except Exception as error:  # noqa: BLE001
        raise BadInputError(f"model.config: {brief(error)}") from None
    refuse_other_models(training.settings(config), config)
    return config


def _refuse_contradictions(training: Training) -> None:
    zero, stage = training.zero, training.zero.stage
    if training.rank >= training.world_size:
        raise BadInputError(f"rank {training.rank}: there are {training.world_size} processes, counted from 0")
    if zero.offload_parameters and stage != 3:
        raise BadInputError("zero.offload_parameters true: needs ZeRO-3, where parameters are sharded")
    if zero.offload_optimizer and not stage:
        raise BadInputError("zero.offload_optimizer true: needs a ZeRO stage")
    if not stage:
        return
    if training.method == "qlora" and stage == 3:
        raise BadInputError("zero.stage 3: a 4-bit base cannot be sharded; take stage 2")
    if training.optimizer not in ("adamw", "adamw_foreach"):
        raise BadInputError(f"optimizer {training.optimizer}: its state cannot be sharded by {zero}; take adamw")
    if training.autocast is not None:
        raise BadInputError(f"autocast {training.autocast}: {zero} computes in the precision of the weights; leave it out")
    if training.keep_gradients:
        raise BadInputError(f"keep_gradients true: {zero} releases gradients in each update; leave it out")


_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""The keys of a configuration for the number of layers."""


def layers_of(config: Any) -> int | None:
    """How many layers the model has, in the encoder as in the decoder; None if these numbers differ
    or the configuration describes its layers one by one."""
    counts = {getattr(config, name) for name in _LAYERS if isinstance(getattr(config, name, None), int)}
    kinds = set(getattr(config, "layer_types", None) or ())
    return counts.pop() if len(counts) == 1 and len(kinds) < 2 and config.get_text_config() is config else None


def with_layers(config: Any, count: int) -> Any:
    """The configuration with another number of layers."""
    found = copy.deepcopy(config)
    for name in _LAYERS:
        if isinstance(getattr(found, name, None), int):
            setattr(found, name, count)
    # Of some models it is a property, which follows the number.
    if vars(found).get("layer_types"):
        found.layer_types = found.layer_types[:count]
    return found


def meta_model(training: Training, config: Any) -> Any:
    """The model as it is trained, with shapes and precisions only."""
    settings, kind = training.settings(config), DTYPES[training.weights]
    options = {"attn_implementation": "eager"} if training.attention == "eager" else {}
    # New weights are random numbers, here without effect.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), blaming_config(settings):
        model = model_class(settings).from_config(config, dtype=kind, **options)
        if training.method == "qlora":
            _in_4_bits(training, model, kind)
        # The built-in trainer alone changes the residual stream.
        mixed = training.autocast if training.loss == "pieces" and training.autocast else "no"
        found = prepared(settings, model, mixed=mixed).train()
        if training.zero.stage:
            # Adapters too; packed weights are integers.
            for parameter in found.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(kind)
        return found


def check(training: Training) -> None:
    """BadInputError if it cannot be built. Without a capacity, this is all that is known of a
    training whose loss follows it."""
    meta_model(training, config_of(training))


def _in_4_bits(training: Training, model: Any, kind: torch.dtype) -> None:
    with without_compiler():
        from bitsandbytes.nn.modules import Linear4bit
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    compute = DTYPES[training.autocast or training.weights]
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=training.double_quantization,
        bnb_4bit_compute_dtype=compute,
    )
    # Layers of a few architectures that transformers never quantizes, and loads in fp32, not fp16.
    kept = list(getattr(model, "_keep_in_fp32_modules", None) or [])
    replace_with_bnb_linear(model, modules_to_not_convert=get_keys_to_not_convert(model) + kept, quantization_config=how)
    # peft asks for it.
    model.is_loaded_in_4bit = True
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    for name, parameter in model.named_parameters():
        parameter.requires_grad = False
        if type(parameter) is torch.nn.Parameter:
            in_fp32 = kind == torch.float16 and not {*name.split(".")}.isdisjoint(kept)
            vector = training.in_fp32 == "vectors" and parameter.dim() == 1
            wide = training.in_fp32 == "all" or vector or in_fp32
            # DeepSpeed gives every weight its precision anew.
            if training.in_fp32 == "all" and not in_fp32 and not training.zero.stage:
                parameter.read_in = kind  # type: ignore[attr-defined]
            parameter.data = parameter.data.to(torch.float32 if wide else kind)


def make_fake(model: torch.nn.Module, mode: FakeTensorMode, trace: Trace, loaded: torch.dtype) -> None:
    """Give every parameter and buffer memory that the trace counts, first those of the base.

    Tied parameters stay one. `loaded` is the precision of weights before they are in 4 bits.
    """
    known: dict[int, torch.Tensor] = {}
    for trained in (False, True):
        for tensors, name in _places(model):
            tensor = tensors[name]
            if isinstance(tensor, FakeTensor) or tensor.requires_grad != trained:
                continue
            if id(tensor) not in known:
                known[id(tensor)] = _fake(tensor, mode, trace, loaded)
            tensors[name] = known[id(tensor)]
        if not trained:
            _convert(model, trace)


def _convert(model: torch.nn.Module, trace: Trace) -> None:
    """Bring to fp32 what was read in 16 bits, as peft does: one after the other, on the GPU."""
    for parameter in model.parameters():
        if hasattr(parameter, "read_in"):
            parameter.data = parameter.data.to(torch.float32)
            trace.count(parameter.data, "weights")


def build_on_host(model: torch.nn.Module, mode: FakeTensorMode, trace: Trace, built_in: torch.dtype) -> list[torch.Tensor]:
    """The model in host memory as it is before it comes to the GPU: built in one precision, and
    converted parameter by parameter to its own. With 4-bit weights, only the rest."""
    parameters = [one for one in model.parameters() if one.is_floating_point() and not hasattr(one, "quant_type")]
    with trace.placed("host"):
        found = [empty(mode, one.shape, built_in) for one in parameters]
        for tensor in found:
            trace.count(tensor, "weights")
        for number, one in enumerate(parameters):
            found[number] = found[number].to(one.dtype)
            trace.count(found[number], "weights")
    return found


def _places(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    for module in model.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            for name in [name for name, tensor in tensors.items() if tensor is not None]:
                yield tensors, name


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, trace: Trace, loaded: torch.dtype) -> torch.Tensor:
    if hasattr(tensor, "quant_type"):
        return _fake_4_bits(tensor, mode, trace, loaded)
    read_in = getattr(tensor, "read_in", None)
    found = empty(mode, tensor.shape, read_in or tensor.dtype)
    trace.count(found, "weights")
    if not isinstance(tensor, torch.nn.Parameter):
        return found
    parameter = torch.nn.Parameter(found, tensor.requires_grad)
    if read_in is not None:
        parameter.read_in = read_in  # type: ignore[attr-defined]
    return parameter


def _fake_4_bits(tensor: Any, mode: FakeTensorMode, trace: Trace, loaded: torch.dtype) -> torch.Tensor:
    """A weight of bitsandbytes' linear layer, packed in bytes, with its scales."""
    from bitsandbytes import functional

    quant_state: Any = functional.QuantState

    count = tensor.numel()
    # It comes to the GPU as it was saved.
    unpacked = empty(mode, tensor.shape, loaded)
    trace.count(unpacked, "temporary")

    def part(size: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = empty(mode, (size,) if isinstance(size, int) else size, dtype)
        trace.count(found, "weights")
        return found

    packed = part((-(-count // 2), 1), torch.uint8)
    blocks = -(-count // _QUANTIZED_BLOCK)
    state: Any = {"shape": tensor.shape, "blocksize": _QUANTIZED_BLOCK, "quant_type": tensor.quant_type, "dtype": loaded}
    if tensor.compress_statistics:
        scales = part(-(-blocks // _SCALES_BLOCK), torch.float32)
        nested = quant_state(absmax=scales, blocksize=_SCALES_BLOCK, code=part(256, torch.float32), dtype=torch.float32)
        state |= {"absmax": part(blocks, torch.uint8), "offset": part((), torch.float32), "state2": nested}
    else:
        state["absmax"] = part(blocks, torch.float32)
    found = torch.nn.Parameter(packed, requires_grad=False)
    found.quant_state = quant_state(  # type: ignore[attr-defined]
        code=part(16, torch.float32), **state
    )
    return found


def empty(mode: FakeTensorMode, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without contents that says it is on the CPU."""
    with no_dispatch():
        meta = torch.empty(shape, dtype=dtype, device="meta")
    return fake(meta, mode)
