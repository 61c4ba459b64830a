"""Plain data parallelism by hand: each rank's gradients become the sum over all ranks, after the last backward pass.

torch's DistributedDataParallel exchanges gradients while the backward pass computes them. A rank whose memory runs out there
leaves the others waiting for ever in an exchange that it will never join. Here nothing is exchanged before all ranks have said
that they hold their gradients, and the exchange itself takes no memory that was not taken at the start.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator

BUCKET_BYTES = 32 << 20
"""Small gradients are gathered up to this size and exchanged together; larger ones where they lie."""


class GradientSum:
    """Sums the gradients of these parameters over the ranks. Every method is called by all ranks alike."""

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._several = accelerator.num_processes > 1
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._bucket = torch.zeros(0)
        if self._several:
            _send_from_first(model)
            small = sum(p.numel() for p in self._parameters if p.numel() * 4 < bucket_bytes)
            self._bucket = torch.zeros(min(bucket_bytes // 4, small), device=accelerator.device)
            self._held = torch.zeros(len(self._parameters), device=accelerator.device)
            self._connect(accelerator.device)

    def _connect(self, device: torch.device) -> None:
        """Exchange zeros once, of all sizes up to the largest that will come.

        NCCL connects the ranks at the first exchange of each kind, of which it chooses one by the size, and takes memory for
        that: here, where there is room, and not in the middle of an update that just fits.
        """
        alone = (p.numel() * p.element_size() for p in self._parameters)
        length = max(len(self._bucket), -(-max(alone, default=0) // self._bucket.element_size()))
        zeros = torch.zeros(length, device=device)
        while length:
            torch.distributed.all_reduce(zeros[:length])
            length //= 8

    def gaps(self) -> int:
        """How many parameters this rank has no gradient of; 0 where there is nobody to exchange with. Which they are is noted
        for `share_gaps`: that takes memory, and may fail for lack of it."""
        if not self._several:
            return 0
        held = [parameter.grad is not None for parameter in self._parameters]
        if all(held):
            self._held.fill_(1.0)
        else:
            self._held.copy_(torch.tensor(held))
        return held.count(False)

    def share_gaps(self) -> None:
        """Have every rank know of which parameters any rank has a gradient; takes no memory. After `gaps` on all ranks."""
        torch.distributed.all_reduce(self._held)

    def fill_gaps(self) -> None:
        """Give this rank a gradient of zeros wherever another rank has one, after `share_gaps`. This takes memory, and may fail
        for lack of it, but waits for nobody."""
        for parameter, ranks in zip(self._parameters, self._held.tolist(), strict=True):
            if ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def __call__(self) -> None:
        """Sum. What no rank has a gradient of stays without one."""
        if not self._several:
            return
        waiting: list[torch.Tensor] = []
        room = len(self._bucket)
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            gradient = _flat(parameter.grad)
            if gradient.dtype != self._bucket.dtype or len(gradient) > len(self._bucket):
                torch.distributed.all_reduce(gradient)
                continue
            if len(gradient) > room:
                self._exchange(waiting)
                waiting, room = [], len(self._bucket)
            waiting.append(gradient)
            room -= len(gradient)
        self._exchange(waiting)

    def _exchange(self, gradients: list[torch.Tensor]) -> None:
        if not gradients:
            return
        lengths = [len(gradient) for gradient in gradients]
        whole = self._bucket[: sum(lengths)]
        parts = list(torch.split(whole, lengths))
        torch._foreach_copy_(parts, gradients)
        torch.distributed.all_reduce(whole)
        torch._foreach_copy_(gradients, parts)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient's own memory in one dimension: gradients have no holes, whatever the order of their dimensions."""
    return gradient.view(-1) if gradient.is_contiguous() else gradient.as_strided((gradient.numel(),), (1,))


def _send_from_first(model: torch.nn.Module) -> None:
    """Every rank begins with the first one's weights. They are the same by construction; this makes it certain."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.detach().contiguous()
            torch.distributed.broadcast(whole, src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)
