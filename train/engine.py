"""`Engine` computes gradients and steps: plain data parallelism here, ZeRO in `zero.py`.

Plain data parallelism does not use torch's DistributedDataParallel, which communicates during the
backward pass. If one rank runs out of memory there, the others wait forever for an all-reduce that
it never joins. Here the ranks first agree that all of them hold their gradients, and the all-reduce
itself allocates no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.schema import Zero
from memtop.train.objective import Objective
from memtop.train.optimizers import Moments, read_moments, write_moments
from memtop.train.state_files import LossScale

_SLOTS = 8
BUCKET_BYTES = 32 << 20
"""Smaller gradients are reduced together in a bucket of this size; larger ones in place."""

ReadSaved = Callable[[str], dict[str, torch.Tensor]]
"""Maps a parameter's name to its saved tensors: weight, step and moments."""


class Engine(Protocol):
    """Model and optimizer, distributed over the processes. All ranks call every method together."""

    accelerator: Accelerator
    model: torch.nn.Module
    """The Hugging Face model. Parameters are saved under its names."""
    objective: torch.nn.Module
    """The model with its loss, wrapped for its kind of parallelism: what the trainer calls."""

    loss_chunk: int
    """Tokens whose logits exist at one time; 0 for all."""

    retries: bool
    """Whether an update can be repeated: forward and backward wait for no other rank."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of this rank's part of the loss.

        `last`: this is the update's last micro-batch.
        """

    def missing_gradients(self) -> int:
        """The number of parameters without a gradient on this rank. May run out of memory."""

    def share_missing(self) -> None:
        """Learn which parameters have a gradient on any rank.

        Allocates nothing: `missing_gradients` has prepared it.
        """

    def fill_missing(self) -> int:
        """Allocate zeros for gradients that only other ranks have; return how many.

        May run out of memory, never waits.
        """

    def drop_gradients(self) -> None:
        """Discard the gradients of an update that was given up."""

    def step(self, rate: float) -> torch.Tensor | float | None:
        """Do one optimizer step over the sum of all ranks' gradients; return its norm, if known.

        The norm stays on the device: reading it would wait for the step.
        """

    def saved_tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield each trained parameter's name, with weight, step and moments in fp32 on the CPU."""

    def load_moments(self, read: ReadSaved) -> None:
        """Restore saved moments (and exact fp32 weights), one parameter at a time."""

    def strategy(self) -> Zero:
        """The ZeRO strategy that really runs, as the engine reports it."""

    def loss_scale(self) -> LossScale | None:
        """The scale of fp16 losses; None without fp16."""

    def set_loss_scale(self, saved: LossScale) -> None:
        """Continue with a saved scale; does nothing without fp16."""


class Ranks:
    """Reduces a few numbers over all ranks, in memory allocated at the start.

    So it works when memory has run out.

    All ranks call every method together. With one process it returns what it was given.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._several = accelerator.num_processes > 1
        self._numbers = torch.zeros(_SLOTS, dtype=torch.float64, device=accelerator.device)

    def sums(self, *values: float) -> list[float]:
        """The sum over the ranks of each of up to eight values."""
        return self._reduce(values, torch.distributed.ReduceOp.SUM)

    def most(self, value: float) -> float:
        """The largest value of any rank."""
        return self._reduce((value,), torch.distributed.ReduceOp.MAX)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.most(float(flag)) > 0

    def add_up(self, numbers: torch.Tensor) -> None:
        """Replace numbers on the device by their sums over the ranks. Does not wait for them."""
        if self._several:
            torch.distributed.all_reduce(numbers)

    def _reduce(self, values: tuple[float, ...], operation: torch.distributed.ReduceOp.RedOpType) -> list[float]:
        if not self._several:
            return [float(value) for value in values]
        numbers = self._numbers[: len(values)]
        numbers.copy_(torch.tensor(values, dtype=torch.float64))
        torch.distributed.all_reduce(numbers, op=operation)
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


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained and saved, by their name in the model."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class PlainEngine:
    """One process, or several with a whole model each that sum their gradients before the step."""

    retries = True

    def __init__(
        self, accelerator: Accelerator, objective: Objective, optimizer: torch.optim.Optimizer, settings: Settings
    ) -> None:
        self.accelerator = accelerator
        self._settings = settings
        self.model = objective.model
        self.loss_chunk = objective.chunk
        self.bare_optimizer = optimizer
        # evaluation_mode: accelerate's mixed precision and placement, without its
        # DistributedDataParallel.
        self.objective: torch.nn.Module = accelerator.prepare_model(objective, evaluation_mode=True)
        self._optimizer = accelerator.prepare_optimizer(optimizer)
        self._sum_gradients = GradientSum(accelerator, self.objective)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.accelerator.backward(loss)

    def missing_gradients(self) -> int:
        return self._sum_gradients.missing()

    def share_missing(self) -> None:
        self._sum_gradients.share_missing()

    def fill_missing(self) -> int:
        return self._sum_gradients.fill_missing()

    def drop_gradients(self) -> None:
        self.bare_optimizer.zero_grad(set_to_none=True)

    def step(self, rate: float) -> torch.Tensor | float | None:
        self._sum_gradients()
        norm: torch.Tensor | None = None
        if self._settings.clip_norm > 0:
            norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), self._settings.clip_norm)
        for group in self.bare_optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def saved_tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        for name, parameter in trained_parameters(self.model).items():
            weight = parameter.detach().to("cpu", torch.float32)
            yield name, {"weight": weight, **read_moments(self.bare_optimizer, parameter)}

    def load_moments(self, read: ReadSaved) -> None:
        for name, parameter in trained_parameters(self.model).items():
            saved: Moments = read(name)
            saved.pop("weight")
            write_moments(self.bare_optimizer, parameter, saved)

    def strategy(self) -> Zero:
        return Zero()

    def loss_scale(self) -> LossScale | None:
        scaler = self.accelerator.scaler
        if scaler is None:
            return None
        state = scaler.state_dict()
        return LossScale(float(state["scale"]), int(state["_growth_tracker"]))

    def set_loss_scale(self, saved: LossScale) -> None:
        scaler = self.accelerator.scaler
        if scaler is not None:
            state = scaler.state_dict()
            # torch grows the scale when the count equals the interval. DeepSpeed's count can be
            # past it, so wrap it.
            state |= {"scale": saved.scale, "_growth_tracker": saved.stable % state["growth_interval"]}
            scaler.load_state_dict(state)
