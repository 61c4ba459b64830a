"""What the ranks exchange: a few numbers and values (`Ranks`), and gradients (`GradientSum`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TypeVar

import torch
from accelerate import Accelerator

TIME_LIMIT = timedelta(days=1)
"""How long a rank waits for another one in `Ranks`: the first rank may write or check a large state
on a slow disk. When a rank ends, the others notice at once.
"""
BUCKET_BYTES = 32 << 20
"""Smaller gradients are reduced together in a bucket of this size; larger ones in place."""
_SLOTS = 8

Value = TypeVar("Value")


@lru_cache(maxsize=1)
def _host_group(world: torch.distributed.ProcessGroup) -> torch.distributed.ProcessGroup:
    """A process group of all ranks that communicates through host memory, made once."""
    group: torch.distributed.ProcessGroup = torch.distributed.new_group(backend="gloo", timeout=TIME_LIMIT)
    return group


class Ranks:
    """Brings all ranks together: adds up a few numbers, hands on a value, waits.

    It uses a process group of its own, on the CPU. So it never waits for work in the GPU's queue,
    and the short time limit of the group that exchanges gradients does not apply. The numbers are
    in memory allocated at the start, so it works when memory has run out.

    All ranks call every method together. With one process it returns what it was given.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._several = accelerator.num_processes > 1
        self._group = _host_group(torch.distributed.group.WORLD) if self._several else None
        self._numbers = torch.zeros(_SLOTS, dtype=torch.float64)

    def sums(self, *values: float) -> list[float]:
        """The sum over the ranks of each of up to eight values."""
        return self._reduce(values, torch.distributed.ReduceOp.SUM)

    def most(self, value: float) -> float:
        """The largest value of any rank."""
        return self._reduce((value,), torch.distributed.ReduceOp.MAX)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.most(float(flag)) > 0

    def from_first(self, value: Value) -> Value:
        """The first rank's value."""
        shared = [value]
        if self._several:
            torch.distributed.broadcast_object_list(shared, src=0, group=self._group)
        return shared[0]

    def wait(self) -> None:
        """Return when all ranks have called this."""
        if self._several:
            torch.distributed.barrier(group=self._group)

    def _reduce(self, values: Sequence[float], operation: torch.distributed.ReduceOp.RedOpType) -> list[float]:
        if not self._several:
            return [float(value) for value in values]
        numbers = self._numbers[: len(values)]
        numbers.copy_(torch.tensor(values, dtype=torch.float64))
        torch.distributed.all_reduce(numbers, op=operation, group=self._group)
        return [float(number) for number in numbers.tolist()]


class GradientSum:
    """Sums the gradients of a model over the ranks, after the last backward pass.

    All ranks call every method together.
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._several = accelerator.num_processes > 1
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._bucket = torch.zeros(0)
        if self._several:
            _broadcast_from_first(model)
            small = sum(p.numel() for p in self._parameters if p.numel() * 4 < bucket_bytes)
            self._bucket = torch.zeros(min(bucket_bytes // 4, small), device=accelerator.device)
            self._held = torch.zeros(len(self._parameters), device=accelerator.device)
            self._connect(accelerator.device)

    def _connect(self, device: torch.device) -> None:
        """Reduce zeros once in every size up to the largest.

        At the first all-reduce of each kind, which depends on the size, NCCL connects the ranks and
        allocates memory. Here there is room for that; in the middle of an update that barely fits
        there may be none.
        """
        alone = (p.numel() * p.element_size() for p in self._parameters)
        length = max(len(self._bucket), -(-max(alone, default=0) // self._bucket.element_size()))
        zeros = torch.zeros(length, device=device)
        while length:
            torch.distributed.all_reduce(zeros[:length])
            length //= 8

    def missing(self) -> int:
        """The number of parameters without a gradient on this rank; 0 with one process.

        May run out of memory.

        Notes which ones they are, for `share_missing`.
        """
        if not self._several:
            return 0
        held = [parameter.grad is not None for parameter in self._parameters]
        if all(held):
            self._held.fill_(1.0)
        else:
            self._held.copy_(torch.tensor(held))
        return held.count(False)

    def share_missing(self) -> None:
        """Learn which parameters have a gradient on any rank.

        Call after `missing` on all ranks; allocates nothing.
        """
        torch.distributed.all_reduce(self._held)

    def fill_missing(self) -> int:
        """Allocate zeros for gradients that only other ranks have; return how many.

        Call it after `share_missing`.

        May run out of memory, but never waits for another rank.
        """
        filled = 0
        for parameter, ranks in zip(self._parameters, self._held.tolist(), strict=True):
            if ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                filled += 1
        return filled

    def __call__(self) -> None:
        """Replace each gradient by its sum over the ranks.

        Parameters without a gradient on any rank stay without.
        """
        if not self._several:
            return
        waiting: list[torch.Tensor] = []
        free = len(self._bucket)
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            gradient = _flat(parameter.grad)
            if gradient.dtype != self._bucket.dtype or len(gradient) > len(self._bucket):
                torch.distributed.all_reduce(gradient)
                continue
            if len(gradient) > free:
                self._reduce_bucket(waiting)
                waiting, free = [], len(self._bucket)
            waiting.append(gradient)
            free -= len(gradient)
        self._reduce_bucket(waiting)

    def _reduce_bucket(self, gradients: list[torch.Tensor]) -> None:
        if not gradients:
            return
        lengths = [len(gradient) for gradient in gradients]
        whole = self._bucket[: sum(lengths)]
        parts = list(torch.split(whole, lengths))
        torch._foreach_copy_(parts, gradients)
        torch.distributed.all_reduce(whole)
        torch._foreach_copy_(gradients, parts)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view.

    Gradients have no holes in memory, whatever the order of their dimensions.
    """
    return gradient.view(-1) if gradient.is_contiguous() else gradient.as_strided((gradient.numel(),), (1,))


def _broadcast_from_first(model: torch.nn.Module) -> None:
    """Give every rank the first rank's weights.

    They should be equal already; this makes it certain.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.detach().contiguous()
            torch.distributed.broadcast(whole, src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)
