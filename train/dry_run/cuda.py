"""Makes fake tensors on the CPU allocate what tensors on a GPU would.

Where CPU and CUDA differ: which kernel computes attention, dropout, softmax and autocast, and what
kernels allocate that is not a result. Sizes of the latter are those in PyTorch's and bitsandbytes'
sources. Everything ends with the `with` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from memtop.train.dry_run.trace import Kernels
from memtop.train.objective import without_mask_checks

Attention = Literal["sdpa", "eager", "flash", "efficient"]
"""How attention is computed: torch chooses its kernel; with whole matrices of scores; by the
flash-attn package; by torch's memory-efficient kernel, with keys and values repeated for all
heads."""
Kernel = Literal["flash", "efficient", "math"]
_16_BITS = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


@contextmanager
def allocating_like_cuda(
    generation: int, attention: Attention, answers: Mapping[Any, Callable[..., Any]] = MappingProxyType({})
) -> Iterator[None]:
    """`generation` is the GPU's compute capability without the point: 75, 90, ... `answers`: by
    function of torch, what is called in its place."""
    own = torch.is_autocast_enabled

    def enabled(device_type: str = "cpu") -> bool:
        # Without a device it asks for CUDA.
        return own(device_type)

    torch.is_autocast_enabled = enabled
    try:
        with without_mask_checks(), _windows_without_masks(attention), _LikeCuda(generation, attention, answers):
            yield
    finally:
        torch.is_autocast_enabled = own


@contextmanager
def _windows_without_masks(attention: Attention) -> Iterator[None]:
    """The flash-attn package takes a window as a number. For torch's attention, transformers makes
    a mask of one that is not longer than the samples."""
    if attention != "flash":
        yield
        return
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    own = masks["sdpa"]

    def mask(*args: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        return None if attention_mask is None else own(*args, attention_mask=attention_mask, **options)

    masks["sdpa"] = mask
    try:
        yield
    finally:
        del masks["sdpa"]


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, without its first lines: they would call what answers torch's functions,
    which is off while it answers, and checkpoints call others in the backward pass."""
    gradients = (torch.ones_like(loss),)
    torch.autograd.graph._engine_run_backward(
        (loss,), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _LikeCuda(TorchFunctionMode):
    """Answers calls of torch's functions as CUDA would."""

    def __init__(self, generation: int, attention: Attention, answers: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._generation, self._attention = generation, attention
        self._answers: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attend,
            F.dropout: _dropout,
            F.softmax: _softmax,
            torch.softmax: _softmax,
            torch.Tensor.softmax: _softmax,
            F.log_softmax: _log_softmax,
            torch.log_softmax: _log_softmax,
            torch.Tensor.log_softmax: _log_softmax,
            F.cross_entropy: _cross_entropy,
            vars(torch._C.TensorBase)["is_cpu"].__get__: lambda tensor: False,
            **answers,
        }
        if hasattr(torch, "_grouped_mm"):
            self._answers[torch._grouped_mm] = _grouped_product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = self._answers.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tuple(map(_widened, args)), {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
        kernel = self._kernel(query, key, value, attn_mask, dropout_p)
        if self._attention == "flash" and attn_mask is not None:
            # The package leaves padding out: it copies the tokens that are left, all at the most.
            query, key, value = (tensor.transpose(1, 2).clone().transpose(1, 2) for tensor in (query, key, value))
        if kernel == "flash":
            options: dict[str, Any] = {"scale": scale}
            found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, **options)
        elif kernel == "efficient":
            if key.shape[-3] != query.shape[-3]:
                times = query.shape[-3] // key.shape[-3]
                key, value = (tensor.repeat_interleave(times, -3) for tensor in (key, value))
            keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            found = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
            )
        else:
            found = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
        result: torch.Tensor = found[0]
        return result

    def _kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float
    ) -> Kernel:
        if self._attention in ("flash", "efficient"):
            return self._attention
        width = query.shape[-1]
        in_16_bits = query.dtype in _16_BITS
        equal = width == key.shape[-1] == value.shape[-1]
        # A consumer card has no backward pass for the widest heads.
        too_wide = self._generation in (86, 89, 120, 121) and (width > 224 or (width > 192 and dropout > 0))
        if self._generation >= 80 and in_16_bits and mask is None and equal and width <= 256 and not too_wide:
            return "flash"
        aligned = width % (8 if in_16_bits else 4) == 0 and value.shape[-1] % (8 if in_16_bits else 4) == 0
        supported = query.dtype != torch.bfloat16 or self._generation >= 80
        return "efficient" if aligned and supported and query.shape[-3] == key.shape[-3] else "math"


class _GroupedProduct(torch.autograd.Function):
    """Rows [n, i] times the matrix of their group [g, i, o], as of mixtures of experts. In other
    precisions than bf16, CUDA multiplies group by group into the results, without copies."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(one) if needs else None for one, needs in needed)


def _grouped_product(rows: torch.Tensor, matrices: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, matrices, **kwargs)
    found: torch.Tensor = _GroupedProduct.apply(rows, matrices)  # type: ignore[no-untyped-call]
    return found


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else tensor


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask as a matrix to add to the scores, for every head, as the kernel takes it."""
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = bias.masked_fill_(mask.logical_not(), float("-inf"))
    elif mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    length = mask.shape[-1]
    if length % 16:
        mask = F.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    found: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return found


def _softmax(
    input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _normalized(torch._softmax, torch.Tensor.softmax, input, dim, dtype)


def _log_softmax(
    input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _normalized(torch._log_softmax, torch.Tensor.log_softmax, input, dim, dtype)


def _normalized(fused: Any, plain: Any, input: torch.Tensor, dim: int | None, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None and input.dtype in _16_BITS and torch.is_autocast_enabled("cpu"):
        dtype = torch.float32
    dim = -1 if dim is None else dim
    if input.dtype == torch.float16 and dtype == torch.float32:
        # One kernel reads fp16 and writes fp32; there is none for bf16.
        return fused(input, dim, True)  # type: ignore[no-any-return]
    return plain(input, dim, dtype=dtype)  # type: ignore[no-any-return]


def _cross_entropy(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if input.dtype == torch.float16 and torch.is_autocast_enabled("cpu") and not args and not kwargs.get("label_smoothing"):
        options = {name: value for name, value in kwargs.items() if name != "label_smoothing"}
        return F.nll_loss(torch._log_softmax(input, 1, True), target, **options)
    return F.cross_entropy(input, target, *args, **kwargs)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _16_BITS else value


_IN_FP32 = frozenset(
    getattr(place, name)
    for place in (torch, torch.Tensor, F)
    for name in (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
        *("tan", "pow", "__pow__", "softplus", "layer_norm", "group_norm", "norm", "cumsum", "cumprod", "prod", "sum"),
        *("logsumexp", "mse_loss", "l1_loss", "kl_div", "cosine_similarity", "binary_cross_entropy_with_logits"),
    )
    if hasattr(place, name)
)
"""What autocast computes in fp32 on CUDA, of functions that models call."""


def kernels(generation: int) -> Kernels:
    """What the kernels of this generation allocate that is not a result."""
    operations: Any = torch.ops
    before = {}
    if hasattr(operations, "bitsandbytes") and hasattr(operations.bitsandbytes, "gemm_4bit"):
        before[operations.bitsandbytes.gemm_4bit.default] = _dequantized
    return Kernels(
        before=before,
        after={
            # It compares absolute values.
            aten.isinf.default: lambda tensor: [tensor.nbytes],
            aten._softmax_backward_data.default: lambda gradient, *args, **kwargs: [gradient.nbytes],
            aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
            aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
        },
        products=frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mm.dtype)),
        # 32 MiB from Hopper on; before, 4096 x 2 KiB + 16 x 8 KiB.
        workspace=32 << 20 if generation >= 90 else 8_519_680,
    )


def _dequantized(
    inputs: torch.Tensor, weight: Any, shape: Sequence[int], absmax: Any, *args: Any, absmax_8bit: Any = None, **kwargs: Any
) -> list[int]:
    """A weight in 4 bits is unpacked for a product with more than a few tokens."""
    scales = [] if absmax_8bit is None else [4 * absmax_8bit.numel()] * 2
    return [*scales, shape[0] * shape[1] * inputs.element_size()]


def _flash_backward(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> list[int]:
    """Sums in fp32 over the keys; and with fewer key heads the gradients of each query head."""
    batch, heads, length, width = query.shape
    rows = batch * heads * -(-length // 128) * 128
    sizes = [4 * rows, 4 * rows * -(-width // 32) * 32]
    if key.shape[1] != heads:
        sizes += [batch * heads * key.shape[2] * width * key.element_size()] * 2
    return sizes


def _efficient_backward(gradient: torch.Tensor, query: torch.Tensor, *args: Any, **kwargs: Any) -> list[int]:
    """The sums over each row, and in 16 bits the query's gradient in fp32."""
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    return [4 * rows] + ([4 * rows * query.shape[3]] if query.dtype in _16_BITS else [])
