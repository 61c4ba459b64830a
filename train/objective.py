"""The training loss: cross entropy summed over the predicted tokens, with the head run in chunks.

A language model's largest tensors are its logits, batch x length x vocabulary, in 16 bits, in 32
bits and as a gradient. Here the head and the cross entropy run over a few tokens at a time and keep
only what the gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The label of positions that do not count, the default of torch's cross entropy."""
CHUNK_BYTES = 64 << 20
"""fp32 logits that exist at one time by default."""


class Objective(torch.nn.Module):
    """A Hugging Face model with its loss: the sum over the predicted tokens, fp32 scalar in nats.

    `chunk` is the number of tokens whose logits exist at one time: 0 for all, -1 for as many as
    CHUNK_BYTES hold.
    """

    def __init__(self, model: torch.nn.Module, *, seq2seq: bool = False, chunk: int = -1) -> None:
        super().__init__()
        self.model = model
        self.seq2seq = seq2seq
        vocabulary = self.head.out_features if isinstance(self.head, torch.nn.Linear) else 1
        self.chunk = max(1, CHUNK_BYTES // (4 * vocabulary)) if chunk < 0 else chunk
        if self.chunk and not _head_gives_the_logits(self):
            # The model changes the logits after its head (a cap, a scale), so they must be computed
            # whole.
            self.chunk = 0

    @property
    def head(self) -> torch.nn.Module:
        model: Any = self.model
        head: torch.nn.Module = model.get_output_embeddings()
        return head

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        counted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids and attention_mask [b, t]; labels [b, t], or [b, u] for seq2seq.

        `counted` [n] are the `counted_positions`. With it, the others (masked prompts) get no
        logits.
        """
        inputs: dict[str, torch.Tensor] = {"input_ids": input_ids}
        if self.seq2seq:
            model: Any = self.model
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
            if attention_mask is not None:
                inputs["attention_mask"] = attention_mask
            wanted = labels
        else:
            # No mask: padding is at the end, and causal attention does not look ahead.
            wanted = _next_tokens(labels)
        if self.chunk == 0:
            logits = self.model(**inputs, use_cache=False).logits
            return cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
        with _catching(self.head) as caught:
            self.model(**inputs, use_cache=False)
        hidden, wanted = caught[0].flatten(0, 1), wanted.flatten()
        if counted is not None:
            # A mask in place of the positions would wait for the device, to know how many there
            # are.
            hidden, wanted = hidden.index_select(0, counted), wanted.index_select(0, counted)
        return self._chunked(hidden, wanted)

    def _chunked(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """hidden [n, h], labels [n]."""
        if len(labels) <= self.chunk:
            return _piece(self.head, hidden, labels)
        weight = getattr(self.head, "weight", None)
        if type(self.head) is torch.nn.Linear and not hasattr(weight, "ds_id"):
            return _ChunkedLoss.apply(hidden, self.head.weight, self.head.bias, labels, self.chunk)  # type: ignore[no-untyped-call,no-any-return]
        # A head with adapters, in 4 bits or sharded: call its forward, and recompute it in the
        # backward pass.
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(labels), self.chunk):
            part = slice(start, start + self.chunk)
            total = total + checkpoint(_piece, self.head, hidden[part], labels[part], use_reentrant=False)
        return total


def _next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """What each position of a causal model predicts; the last one predicts nothing."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def counted_positions(labels: torch.Tensor, *, seq2seq: bool) -> torch.Tensor:
    """The positions [n] of the flattened batch whose predictions count in the loss."""
    wanted = labels if seq2seq else _next_tokens(labels)
    return (wanted.flatten() != IGNORED).nonzero().flatten()


def _piece(head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
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


@contextmanager
def _catching(head: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Inside the block, the head does not compute; its input is appended to the list."""
    caught: list[torch.Tensor] = []

    def keep(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        caught.append(hidden)
        # A tensor that the model can treat as its logits.
        return hidden[..., :1]

    with _in_place_of(head, keep):
        yield caught


def _head_gives_the_logits(objective: Objective) -> bool:
    """Whether the logits are the head's output, tested with numbers that any cap would change."""
    model: Any = objective.model
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        # Sharded while it was built: it cannot run before DeepSpeed wraps it.
        return model.config.model_type in _PLAIN_HEADS
    device = next(model.parameters()).device
    ids = torch.arange(6, device=device).reshape(1, 6)
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if objective.seq2seq else {})}
    sentinel = torch.linspace(-200.0, 200.0, 60, device=device).reshape(1, 6, 10)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _in_place_of(objective.head, lambda hidden, *args, **kwargs: sentinel):
            return torch.equal(model(**inputs, use_cache=False).logits, sentinel)
    finally:
        model.train(training)


# For models that are sharded from the start: architectures that passed the test above.
_PLAIN_HEADS = {"llama", "mistral", "qwen2", "qwen3", "t5", "gpt2", "gpt_neox"}


class _ChunkedLoss(torch.autograd.Function):
    """Summed cross entropy of a linear head over hidden [n, h], `chunk` tokens at a time.

    The gradients of a chunk are computed together with its loss, while its logits exist; backward
    only scales them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, chunk: int
    ) -> torch.Tensor:
        kind = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else weight.dtype
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        matrix = weight.to(kind)
        total = torch.zeros((), device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if need_hidden else None
        weight_gradient = torch.zeros_like(weight) if need_weight else None
        bias_gradient = torch.zeros_like(bias) if bias is not None and need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(labels), chunk):
                part = slice(start, start + chunk)
                piece = hidden[part].to(kind)
                logits = linear(piece, matrix, None if bias is None else bias.to(kind)).float()
                counted = (labels[part] != IGNORED).unsqueeze(1)
                wanted = labels[part].unsqueeze(1).clamp_min(0)
                norm = torch.logsumexp(logits, dim=1, keepdim=True)
                total += ((norm - logits.gather(1, wanted)) * counted).sum()
                # The gradient of the logits is softmax minus one-hot, computed in place.
                gradient = logits.sub_(norm).exp_()
                gradient.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=gradient.dtype)).mul_(counted)
                if bias_gradient is not None:
                    bias_gradient += gradient.sum(0)
                small = gradient.to(kind)
                if hidden_gradient is not None:
                    hidden_gradient[part] = small @ matrix
                if weight_gradient is not None:
                    weight_gradient.addmm_(small.T.to(weight.dtype), piece.to(weight.dtype))
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*(None if g is None else g.mul_(grad.to(g.dtype)) for g in ctx.saved_tensors), None, None)
