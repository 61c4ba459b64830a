"""The training loss: cross entropy summed over the predicted tokens, with the head run in pieces.

A language model's largest tensors are its logits, batch x length x vocabulary, in 16 bits, in 32
bits and as a gradient. Here the head and the cross entropy run over some of the tokens at a time,
and keep only what the gradient needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from memtop.presets.logits import MOST_TOKENS, ROWS, tokens_at_once
from memtop.train.devices import free_bytes

IGNORED = -100
"""The label of positions that do not count, the default of torch's cross entropy."""
_16_BITS = (torch.float16, torch.bfloat16)


class Objective(torch.nn.Module):
    """A Hugging Face model with its loss: the sum over the predicted tokens, fp32 scalar in nats.

    `chunk`, the setting `loss_chunk`, is the number of tokens in a piece, whose logits exist at one
    time: 0 for all, -1 for a number that `tokens_at_once` chooses. `free` gives the bytes that are
    free then, if not torch. `plain`: whether the logits are what the head gives; None: the model is
    tested.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        seq2seq: bool = False,
        chunk: int = -1,
        free: Callable[[torch.device], int | None] | None = None,
        plain: bool | None = None,
    ) -> None:
        super().__init__()
        self._free = free
        self.model = model
        self.seq2seq = seq2seq
        config: Any = model.config
        if seq2seq and getattr(config, "decoder_start_token_id", None) is None:
            # As in T5.
            config.decoder_start_token_id = config.pad_token_id
        # If the model changes the logits after its head (a cap, a scale), they must be computed
        # whole.
        self._chunk = chunk if chunk and (_head_gives_the_logits(self) if plain is None else plain) else 0

    @property
    def head(self) -> torch.nn.Module:
        model: Any = self.model
        head: torch.nn.Module = model.get_output_embeddings()
        return head

    @property
    def chunk(self) -> int:
        """The most tokens whose logits exist at one time with the memory that is free now; 0 for
        all."""
        return self._chunk if self._chunk >= 0 else self._chosen(next(self.model.parameters()), MOST_TOKENS)

    @property
    def _has_own_gradient(self) -> bool:
        """Whether `_LossInPieces` computes the loss: not in an evaluation, not with adapters."""
        return type(self.head) is torch.nn.Linear and torch.is_grad_enabled()

    def _chosen(self, like: torch.Tensor, tokens: int) -> int:
        free = (self._free or free_bytes)(like.device)
        if free is not None and not self._has_own_gradient:
            # The logits in 32 bits and their softmax exist too, and for autograd their gradients.
            free //= 8
        elif free is not None:
            free = max(0, free - self._gradient_bytes(like))
        return tokens_at_once(free, getattr(self.head, "out_features", 1), tokens, _compute_dtype(like).itemsize)

    def _gradient_bytes(self, like: torch.Tensor) -> int:
        """What the fp32 gradient of the head's weight takes in addition to the logits."""
        weight: Any = self.head.weight
        if not weight.requires_grad:
            return 0
        # Otherwise a product and the sum of the products before exist at the same time.
        in_place = _HAS_FP32_PRODUCTS or _compute_dtype(like) not in _16_BITS
        return (4 if in_place else 8) * int(getattr(weight, "ds_numel", weight.numel()))

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        counted: torch.Tensor | None = None,
        **row: Any,
    ) -> torch.Tensor:
        """input_ids and attention_mask [b, t]; labels [b, t], or [b, u] for seq2seq.

        `counted` [n] are the `counted_positions`. With it, the others (masked prompts) get no
        logits. `row` is what `packed_row` gives for a row of several samples.

        Without labels there is no loss: the result is the logits [b, v] of the last position. `row`
        has the decoder's ids then, if there is a decoder.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids, **row}
        if labels is None:
            with without_mask_checks():
                logits: torch.Tensor = self.model(**inputs, use_cache=False).logits
            return logits[:, -1]
        if self.seq2seq:
            model: Any = self.model
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
            if attention_mask is not None:
                inputs["attention_mask"] = attention_mask
            wanted = labels
        else:
            # No mask: padding is at the end, and causal attention does not look ahead.
            wanted = _next_tokens(labels)
        # A row is one sample, or `packed_attention` gets the lengths of its samples.
        with without_mask_checks():
            return self._loss(inputs, wanted.flatten(), counted)

    def _loss(self, inputs: dict[str, Any], labels: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
        if self._chunk == 0:
            logits = self.model(**inputs, use_cache=False).logits
            return cross_entropy(logits.float().flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
        head = self.head
        compute: Callable[[torch.Tensor], torch.Tensor] = head.forward

        def loss_in_place_of_logits(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # As a result of the head, it goes through the head's hooks: DeepSpeed gathers a sharded
            # weight there, once in the forward pass and once in the backward pass.
            hidden, wanted = hidden.flatten(0, 1), labels
            if counted is not None:
                # A mask in place of the positions would wait for the device, to know how many there
                # are.
                hidden, wanted = hidden.index_select(0, counted), wanted.index_select(0, counted)
            return self._in_pieces(compute, hidden, wanted).reshape(1, 1, 1)

        with _in_place_of(head, loss_in_place_of_logits):
            found: torch.Tensor = self.model(**inputs, use_cache=False).logits
        return found.reshape(())

    def _in_pieces(
        self, head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """hidden [n, h], labels [n]."""
        module: Any = self.head
        chunk = self._chunk if self._chunk > 0 else self._chosen(hidden, len(labels))
        if hidden.is_cpu and len(labels) <= chunk:
            # On a CPU, autograd is the fastest for few logits.
            return _piece(head, hidden, labels)
        if self._has_own_gradient:
            return _LossInPieces.apply(hidden, module.weight, module.bias, labels, chunk)  # type: ignore[no-untyped-call,no-any-return]
        # A head with adapters or in 4 bits: call its forward, and recompute it in the backward
        # pass. Without gradients, nothing is kept.
        total = torch.zeros((), device=hidden.device)
        for rows in _pieces(len(labels), chunk):
            total = total + checkpoint(_piece, head, hidden[rows], labels[rows], use_reentrant=False)
        return total


def _next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """What each position of a causal model predicts; the last one predicts nothing."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def counted_positions(labels: torch.Tensor, *, seq2seq: bool) -> torch.Tensor:
    """The positions [n] of the flattened batch whose predictions count in the loss."""
    wanted = labels if seq2seq else _next_tokens(labels)
    return (wanted.flatten() != IGNORED).nonzero().flatten()


@contextmanager
def without_mask_checks() -> Iterator[None]:
    """Inside the block, transformers takes each row for one sample, and a given mask for padding.

    It would look for several samples in the position ids that it has made itself, and for zeros in
    the mask. Each look waits for the GPU, in every micro-batch. A compiled model cannot look: it
    would always build a mask, and flash attention takes none. A batch without padding has no mask.
    """
    own = {name: getattr(masking_utils, name) for name in _CHECKS if hasattr(masking_utils, name)}
    try:
        for name in own:
            setattr(masking_utils, name, _CHECKS[name])
        yield
    finally:
        for name, function in own.items():
            setattr(masking_utils, name, function)


def _not_packed(position_ids: torch.Tensor) -> torch.Tensor | None:
    return None


def _needs_no_mask(padding: torch.Tensor | None, length: int, local_attention_size: int | None = None) -> bool:
    """Whether attention in both directions needs no mask."""
    return padding is None and (local_attention_size is None or length < local_attention_size)


_CHECKS: dict[str, Callable[..., Any]] = {
    "find_packed_sequence_indices": _not_packed,
    "_ignore_bidirectional_mask_sdpa": _needs_no_mask,
}


def _pieces(count: int, chunk: int) -> list[slice]:
    """At least one, so that no tokens give zeros."""
    return [slice(start, start + chunk) for start in range(0, max(1, count), chunk)]


def _compute_dtype(like: torch.Tensor) -> torch.dtype:
    """The precision of matrix products with this tensor."""
    device = _autocast_device(like)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype


def _autocast_device(like: torch.Tensor) -> str:
    return "cuda" if like.is_cuda else "cpu"


def _piece(head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(head(hidden).float(), labels, ignore_index=IGNORED, reduction="sum")


@contextmanager
def _in_place_of(head: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Replace the head's forward inside the block."""
    own = head.__dict__.get("forward")
    head.forward = forward
    try:
        yield
    finally:
        if own is None:
            del head.__dict__["forward"]
        else:
            head.forward = own


def _head_gives_the_logits(objective: Objective) -> bool:
    """Whether the logits are the head's output, tested with numbers that any cap would change."""
    model: Any = objective.model
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        # Sharded while it was built: it cannot run before DeepSpeed wraps it.
        return model.config.model_type in _PLAIN_HEADS
    device = next(model.parameters()).device
    ids = torch.arange(6, device=device).reshape(1, 6)
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if objective.seq2seq else {})}
    # One column: what a model adds for each word of the vocabulary would give it more.
    sentinel = torch.linspace(-200.0, 200.0, 6, device=device).reshape(1, 6, 1)
    # Without autocast, weights in fp32 and in 16 bits do not go together.
    kind = next((p.dtype for p in model.parameters() if p.dtype in _16_BITS), None)
    training = model.training
    model.eval()
    try:
        mixed = torch.autocast(device.type, kind, enabled=kind is not None)
        with torch.no_grad(), mixed, _in_place_of(objective.head, lambda hidden, *args, **kwargs: sentinel):
            found = model(**inputs, use_cache=False).logits
        return found.shape == sentinel.shape and torch.equal(found, sentinel)
    finally:
        model.train(training)


# For models that are sharded from the start: architectures that passed the test above.
_PLAIN_HEADS = {"llama", "mistral", "qwen2", "qwen3", "t5", "gpt2", "gpt_neox"}


class _LossInPieces(torch.autograd.Function):
    """Summed cross entropy of a linear head over hidden [n, h], `chunk` tokens at a time.

    The gradients of a piece are computed together with its loss, while its logits exist; backward
    only scales them. Until then they are in fp32: the gradients of a sum over tokens are larger
    than fp16 holds, and 16 bits would round them again with every piece and with the scale.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, chunk: int
    ) -> torch.Tensor:
        # Without autocast, the weight decides: DeepSpeed's are in 16 bits.
        kind = _compute_dtype(weight)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        matrix, offset = weight.to(kind), None if bias is None else bias.to(kind)
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden, dtype=torch.float32) if need_hidden else None
        weight_gradient, bias_gradient = None, None
        with torch.autocast(_autocast_device(hidden), enabled=False):
            for rows in _pieces(len(labels), chunk):
                piece, counted = hidden[rows], (labels[rows] != IGNORED).unsqueeze(1)
                logits = linear(piece.to(kind), matrix, offset)
                losses, gradient, scale = _gradient(logits, labels[rows].unsqueeze(1).clamp_min(0))
                del logits
                total += (losses * counted).sum()
                scale = scale * counted
                if hidden_gradient is not None:
                    torch.mul(_product(gradient, matrix), scale, out=hidden_gradient[rows])
                if need_weight:
                    weight_gradient = _product(gradient.T, (piece * scale).to(kind), weight_gradient)
                if need_bias:
                    # The factors are exact in 16 bits.
                    bias_gradient = _product(gradient.T, scale.to(kind), bias_gradient)
                # It is in the memory of these logits, which the next ones do not need twice.
                del gradient
        bias_gradient = None if bias_gradient is None else bias_gradient.squeeze(1)
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(None if g is None else g.mul_(grad).to(dtype) for g, dtype in gradients), None, None)


def _gradient(logits: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """The losses [n, 1] of logits [n, v] for the wanted tokens [n, 1]; their gradient, which is
    softmax minus one-hot; and a factor for each of its rows. Overwrites the logits.
    """
    if logits.dtype not in _16_BITS:
        # In place: divided by its sum, the row is the softmax.
        logits.sub_(logits.amax(1, keepdim=True))
        picked = logits.gather(1, wanted)
        sums = logits.exp_().sum(1, keepdim=True)
        logits.scatter_(1, wanted, picked.exp() - sums)
        return sums.log() - picked, logits, 1 / sums
    # Many probabilities are smaller than fp16's smallest number.
    larger = 1024 if logits.dtype == torch.float16 else 1
    losses = torch.empty(wanted.shape, device=logits.device)
    for rows in _pieces(len(logits), ROWS):
        block, index = logits[rows], wanted[rows]
        softmax = torch.log_softmax(block, 1, dtype=torch.float32)
        picked = softmax.gather(1, index)
        losses[rows] = -picked
        torch.exp(softmax if larger == 1 else softmax.add_(math.log(larger)), out=block)
        del softmax
        block.scatter_(1, index, ((picked.exp() - 1) * larger).to(block.dtype))
    return losses, logits, 1 / larger


def _product(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """The product of two matrices, added to the fp32 total if there is one.

    In fp32, unless bf16 holds it too: fp16 does not hold a sum over a piece, or over a vocabulary
    of large weights.
    """
    if left.dtype not in _16_BITS:
        return left @ right if total is None else total.addmm_(left, right)
    if not left.is_cpu and _HAS_FP32_PRODUCTS:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        # Without a second matrix of the total's size.
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    product = left.float() @ right.float() if left.dtype == torch.float16 else left @ right
    return product.float() if total is None else total.add_(product)


_HAS_FP32_PRODUCTS = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether GPUs can multiply matrices in 16 bits to one in fp32: from torch 2.8 on."""
