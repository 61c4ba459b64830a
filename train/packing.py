"""Several samples in one row, without padding, that do not attend to each other.

The tokens of a micro-batch's samples follow each other in one row [1, n]. The positions begin
at 0 in each sample, and the attention gets the lengths of the samples. So the tokens of a sample
see what they would see in a row of their own, and padding costs neither time nor memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator
from torch.func import functional_call
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memtop.presets import Settings
from memtop.train.agent.failures import is_lack_of_memory
from memtop.train.agent.memory import free_cache
from memtop.train.exchange import Ranks
from memtop.train.model import COMPUTE

ATTENTION = "memtop_packed"
"""The name of `packed_attention` in transformers. A name without a mask function gets no mask."""
_CAUSAL = {"full_attention", "sliding_attention"}
# For models that are sharded while they are built, which cannot run before DeepSpeed wraps them:
# architectures that pass the test in `_mixes_samples`.
_PASSED = {"llama", "mistral", "qwen2", "qwen3"}
_TOLERANCE = {"no": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


def packed_row(lengths: Sequence[int]) -> dict[str, Any]:
    """What a model needs about a row of samples with these lengths, in addition to its tokens.

    `position_ids` [1, n] and `sample_starts` [samples + 1] are tensors, the `sample_lengths`
    numbers: to read them from a GPU would wait for it.
    """
    return {
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        "sample_starts": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        "sample_lengths": tuple(lengths),
    }


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sample_lengths: tuple[int, ...] | None = None,
    sample_starts: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention in each sample of one row; without samples, torch's ordinary attention.

    query [1, heads, n, d], key and value [1, key heads, n, d]; the result is [1, n, heads, d].
    """
    if sample_lengths is None:
        found: torch.Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)[0]
        return found, None
    if attention_mask is not None:
        raise ValueError("a row of several samples takes no attention mask")
    if sample_starts is not None and not dropout:
        # Under autocast, torch casts the inputs of its own attention, but not of this kernel:
        # rotary positions may have made the query fp32.
        inputs = [_cast(tensor) for tensor in (query, key, value)]
        if varlen_fits(*inputs):
            rows = [tensor.transpose(1, 2).squeeze(0) for tensor in inputs]
            return varlen(rows, sample_starts, max(sample_lengths), scaling).unsqueeze(0), None
    lengths = list(sample_lengths)
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *part, None, dropout, scaling, **options)[0] for part in parts]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(ATTENTION, packed_attention)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def varlen_fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's kernel for samples of different lengths takes these tensors."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        # Above 192, some cards have no backward pass.
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 192
        and query.shape[-1] % 8 == 0
        and varlen_kernel() is not None
        and _has_flash(query.device)
    )


def varlen(rows: Sequence[torch.Tensor], starts: torch.Tensor, longest: int, scaling: float | None) -> torch.Tensor:
    """Query [n, heads, d], key and value [n, key heads, d]; the result is [n, heads, d]."""
    kernel = varlen_kernel()
    assert kernel is not None
    # The window (-1, 0) means causal.
    found: torch.Tensor = kernel(*rows, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True)
    return found


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """torch's kernel; None if this torch has none, or an early one with other arguments."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= known.keys() else None


def _has_flash(device: torch.device) -> bool:
    built = torch.version.cuda is not None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)


def use_packing(settings: Settings, model: torch.nn.Module, accelerator: Accelerator) -> str | None:
    """Prepare the model for rows of several samples.

    Return None if it is prepared, or the reason why it stays as it is.
    """
    adapted: Any = model
    base = adapted.get_base_model() if hasattr(model, "peft_config") else adapted
    reason = _unfit(settings, base)
    if reason is not None:
        return reason
    base.set_attn_implementation(ATTENTION)
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        reason = None if base.config.model_type in _PASSED else f"{base.config.model_type} cannot be tested while it is sharded"
    else:
        reason = _mixes_samples_in_the_run(model, accelerator)
    # One way for all ranks: it decides which samples a rank gets.
    if Ranks(accelerator).any(reason is not None):
        base.set_attn_implementation("sdpa")
        return reason or "another rank cannot"
    return None


def is_prepared(model: torch.nn.Module) -> bool:
    """Whether the model takes rows of several samples."""
    config: Any = model.config
    return bool(config._attn_implementation == ATTENTION)


def _unfit(settings: Settings, base: Any) -> str | None:
    """Why rows of several samples are impossible, from the settings and the configuration alone."""
    if settings.task == "seq2seq":
        return "an encoder has a mask for padding and none for several samples"
    if settings.compile:
        return "torch.compile would compile again for each set of lengths"
    config = base.config.get_text_config()
    if base.config._attn_implementation != "sdpa" or not hasattr(base, "set_attn_implementation"):
        return f"the attention of {type(base).__name__} cannot be replaced"
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds <= _CAUSAL:
        return f"layers of the kind {min(kinds - _CAUSAL)} do not take the lengths of samples"
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    if window is not None and sliding and window < settings.seq_len:
        return f"its attention sees {window} tokens back, less than T {settings.seq_len}"
    return None


def _mixes_samples_in_the_run(model: torch.nn.Module, accelerator: Accelerator) -> str | None:
    """As `_mixes_samples`, on the device and in the precision of the run.

    Under ZeRO the model is still on the CPU, in fp32.
    """
    device, own = accelerator.device, next(model.parameters()).device
    if own.type == device.type:
        return _mixes_samples(model, accelerator, own, model)
    try:
        reason = _mixes_samples(model, accelerator, device, _copied(model, device, COMPUTE[accelerator.mixed_precision]))
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
    else:
        free_cache()
        return reason
    # The whole model does not fit: each rank will hold only a part of it.
    free_cache()
    return _mixes_samples(model, accelerator, own, model)


def _copied(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """The model with copies of its tensors, as DeepSpeed will make them."""
    copies = {
        name: tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    return lambda **inputs: functional_call(model, copies, kwargs=inputs)


def _mixes_samples(
    model: torch.nn.Module, accelerator: Accelerator, device: torch.device, call: Callable[..., Any]
) -> str | None:
    """Why this model cannot take several samples in a row, found by running two samples; or None.

    The second must give the same as in a row of its own, whatever the first one is. `call` runs
    the model on the device.
    """
    tolerance = _TOLERANCE[accelerator.mixed_precision]
    row = {name: value.to(device) if torch.is_tensor(value) else value for name, value in packed_row((4, 3)).items()}
    ids = torch.arange(1, 8, device=device).unsqueeze(0)
    other = ids.clone()
    other[:, :4] += 8
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            first, second = (call(input_ids=given, use_cache=False, **row).logits[:, 4:].float() for given in (ids, other))
            alone = call(input_ids=ids[:, 4:], use_cache=False).logits.float()
    # Each model has code of its own, and fails in its own way.
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        return f"{type(model).__name__} does not take rows of several samples ({type(error).__name__}: {error})"
    finally:
        model.train(training)
    scale = tolerance * float(alone.abs().max())
    if float((first - second).abs().max()) > scale or float((first - alone).abs().max()) > scale:
        return f"in {type(model).__name__} a sample would change the others in its row"
    return None
