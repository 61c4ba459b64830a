"""What the dry runs of DeepSpeed's ZeRO have in common, and ZeRO-1 in bf16.

DeepSpeed itself does not run here: its engine needs an accelerator and other processes. Each class
allocates, in the same order, what a part of DeepSpeed allocates on CUDA in one of the processes,
with the configuration of `train.zero`: `ZeroStage1InBf16` is `bf16_optimizer.py`, `zero12.py` is
`stage_1_and_2.py`, and `zero3.py` is `stage3.py`. Collectives allocate nothing: NCCL's memory is
not torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._utils import _flatten_dense_tensors as flatten

from memtop.train.dry_run.build import Training, empty
from memtop.train.dry_run.trace import Component, Trace
from memtop.train.zero import width_of, zero_config

OptimizerOf = Callable[[list[torch.Tensor]], Any]
FP32 = torch.float32


class Memory:
    """Makes tensors in the memory of the GPU and of the host, and copies between them."""

    def __init__(self, mode: FakeTensorMode, trace: Trace, *, pins: bool) -> None:
        self.mode, self.trace, self.pins = mode, trace, pins

    def empty(self, size: int, dtype: torch.dtype, component: Component) -> torch.Tensor:
        found = empty(self.mode, (size,), dtype)
        self.trace.count(found, component)
        return found

    def on_host(self, size: int, dtype: torch.dtype, component: Component) -> torch.Tensor:
        """Memory that DeepSpeed makes on the host, page-locked if it is so configured."""
        with self.trace.placed("host"):
            found = self.empty(size, dtype, component)
        return self.page_locked(found, component) if self.pins else found

    def page_locked(self, tensor: torch.Tensor, component: Component) -> torch.Tensor:
        """A copy in page-locked memory."""
        with self.trace.placed("pinned"):
            return self.empty(tensor.numel(), tensor.dtype, component)

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with self.trace.placed("host"):
            # The host converts: first it gets the tensor as it is.
            return tensor.clone().to(dtype)

    def to_gpu(self, tensor: torch.Tensor, component: Component) -> torch.Tensor:
        found = tensor.clone()
        self.trace.count(found, component)
        return found


def configuration(training: Training, config: Any) -> dict[str, Any]:
    """What the trainer writes for DeepSpeed."""
    return zero_config(training.settings(config), hidden_size=width_of(config), precision=training.weights)


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad and one.numel()]


def scaled(training: Training, loss: torch.Tensor) -> torch.Tensor:
    """The loss as the trainer and DeepSpeed scale it."""
    return loss * (training.accumulation * training.world_size) / training.accumulation * 1.0


def flat_weights(parameters: list[torch.nn.Parameter], world: int) -> torch.Tensor:
    """All weights in one tensor, padded so that each process can get an aligned part."""
    missing = -sum(one.numel() for one in parameters) % (2 * world)
    sources = [one.data for one in parameters]
    if missing:
        sources.append(torch.zeros(missing, dtype=sources[0].dtype))
    found: torch.Tensor = flatten(sources)  # type: ignore[no-untyped-call]
    return found


def has_inf_or_nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(tensor.amax()).logical_and(torch.isfinite(tensor.amin())).logical_not()


class ZeroStage1InBf16:
    """DeepSpeed's BF16_Optimizer, which it takes for ZeRO-1 in bf16 if nothing is offloaded. Every
    process has all gradients in fp32."""

    def __init__(self, training: Training, model: Any, memory: Memory, optimizer_of: OptimizerOf) -> None:
        self._training, self._trace = training, memory.trace
        self._trained = trained(model)
        config = configuration(training, model.config)
        self._clips = config["gradient_clipping"] > 0
        with torch.no_grad():
            weights = flat_weights(self._trained, training.world_size)
            memory.trace.count(weights, "weights")
            start = 0
            for one in self._trained:
                one.data = weights.narrow(0, start, one.numel()).view(one.shape)
                start += one.numel()
            size = len(weights) // training.world_size
            part = slice(training.rank * size, (training.rank + 1) * size)
            self._part = weights[part]
            self._master = self._part.clone().to(FP32)
            memory.trace.count(self._master, "master weights")
            sums = torch.zeros_like(weights, dtype=FP32)
            memory.trace.count(sums, "gradients")
            self._sums, self._own_sums = sums, sums[part]
            counts = [one.numel() for one in self._trained]
            self._sum_of = torch.split(sums[: sum(counts)], counts)
        self._master.requires_grad_()
        self._optimizer = optimizer_of([self._master])
        for one in self._trained:
            one.register_post_accumulate_grad_hook(lambda one: memory.trace.count(one.grad, "gradients"))  # type: ignore[no-untyped-call]

    def before_forward(self) -> None:
        """Do nothing."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return scaled(self._training, loss)

    def before_backward(self, *, last: bool) -> None:
        self._is_last = last

    @torch.no_grad()
    def after_backward(self) -> None:
        # Before the next backward pass the gradients in bf16 are set to zero, not released.
        for one, total in zip(self._trained, self._sum_of, strict=True):
            if one.grad is not None:
                total.add_(one.grad.to(FP32).view(-1))
        if self._is_last:
            self._sums.copy_(self._sums.to(torch.bfloat16))

    @torch.no_grad()
    def step(self) -> None:
        norms = [total.norm(2) for total in self._sum_of]
        norm = torch.stack(norms).pow(2).sum().pow(0.5)
        del norms
        if self._clips:
            self._sums.mul_(1.0 / norm)
        self._master.grad = self._own_sums
        self._optimizer.step()
        self._part.copy_(self._master)
        for one in self._trained:
            one.grad = None
