"""Small numbers that all ranks agree on, in memory that was taken at the start: it works where nothing else can be had.

Plain data parallelism by hand: each rank's gradients become the sum over all ranks, after the last backward pass.

torch's DistributedDataParallel exchanges gradients while the backward pass computes them. A rank whose memory runs out there
leaves the others waiting for ever in an exchange that it will never join. Here nothing is exchanged before all ranks have said
that they hold their gradients, and the exchange itself takes no memory that was not taken at the start.


How an update is computed: plain data parallelism here, ZeRO in `zero.py`. The loop knows only `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.schema import Zero
from memtop.train.objective import Objective
from memtop.train.optimizers import Moments, read_moments, write_moments

_SLOTS = 8


class Ranks:
    """Every method is called by all ranks alike. With one process it hands back what it was given."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._several = accelerator.num_processes > 1
        self._numbers = torch.zeros(_SLOTS, dtype=torch.float64, device=accelerator.device)
        # torch's own words: an operation of the library, whose class is known only where it is compiled in.
        self._sum, self._most = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.MAX

    def sums(self, *values: float) -> list[float]:
        """The sum over the ranks of each of up to eight values."""
        return self._reduce(values, self._sum)

    def most(self, value: float) -> float:
        """The largest value of any rank."""
        return self._reduce((value,), self._most)[0]

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return self.most(float(flag)) > 0

    def _reduce(self, values: tuple[float, ...], operation: torch.distributed.ReduceOp.RedOpType) -> list[float]:
        if not self._several:
            return [float(value) for value in values]
        numbers = self._numbers[: len(values)]
        numbers.copy_(torch.tensor(values, dtype=torch.float64))
        torch.distributed.all_reduce(numbers, op=operation)
        return [float(number) for number in numbers.tolist()]


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


ReadSaved = Callable[[str], dict[str, torch.Tensor]]
"""A parameter's name to its saved tensors: weight, step and moments."""


class LossScale(msgspec.Struct, frozen=True):
    """By what fp16 losses are multiplied, so that small gradients do not vanish, and what decides when that changes next."""

    scale: float
    stable: int | None = None
    """Updates without an overflow since the scale changed (DeepSpeed: since the last overflow); None where it was not kept."""
    hysteresis: int | None = None
    """Overflows until DeepSpeed lowers the scale; None elsewhere."""


class Engine(Protocol):
    """Model and optimizer, distributed over the processes. Every method is called by all ranks alike."""

    accelerator: Accelerator
    model: torch.nn.Module
    """The Hugging Face model, whose names the parameters are saved by."""
    objective: torch.nn.Module
    """What the loop calls: the objective, wrapped for its kind of parallelism."""

    loss_chunk: int
    """Tokens whose logits exist at one time; 0: all of them."""

    retries: bool
    """Whether an update can be given up before its step and done again: no rank waits for another in forward and backward."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of this rank's part of the loss. `last`: the update's last micro-batch."""

    def gaps(self) -> int:
        """Parameters of which other ranks may have a gradient and this one has none. May fail for lack of memory."""

    def share_gaps(self) -> None:
        """Hear what gradients the others have, in memory that `gaps` has prepared. For all ranks, if any has gaps."""

    def fill_gaps(self) -> None:
        """Make room for those that others have. Waits for nobody; may fail for lack of memory."""

    def drop_gradients(self) -> None:
        """Forget the gradients of an update that was given up."""

    def step(self, rate: float) -> float | None:
        """One optimizer step over the sum of the ranks' gradients; the gradient norm where it is known."""

    def saved_tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """For each trained parameter its name, and weight, step and moments in fp32 on the CPU, one at a time."""

    def load_moments(self, read: ReadSaved) -> None:
        """Put saved moments (and the exact fp32 weights) in place, one parameter at a time."""

    def strategy(self) -> Zero:
        """What really runs, read back from the machinery."""

    def loss_scale(self) -> LossScale | None:
        """The scale of fp16 losses; None without fp16."""

    def set_loss_scale(self, saved: LossScale) -> None:
        """Go on with a scale that was saved; nothing without fp16."""


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained and saved, by their name in the model."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class PlainEngine:
    """One process, or several with a whole model each, which exchange gradients when all of them have theirs."""

    retries = True

    def __init__(
        self, accelerator: Accelerator, objective: Objective, optimizer: torch.optim.Optimizer, settings: Settings
    ) -> None:
        self.accelerator = accelerator
        self._settings = settings
        self.model = objective.model
        self.loss_chunk = objective.chunk
        self.bare_optimizer = optimizer
        # Mixed precision and placement as accelerate does them, but nothing that communicates behind our back.
        self.objective: torch.nn.Module = accelerator.prepare_model(objective, evaluation_mode=True)
        self._optimizer = accelerator.prepare_optimizer(optimizer)
        self._sum_gradients = GradientSum(accelerator, self.objective)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.accelerator.backward(loss)

    def gaps(self) -> int:
        return self._sum_gradients.gaps()

    def share_gaps(self) -> None:
        self._sum_gradients.share_gaps()

    def fill_gaps(self) -> None:
        self._sum_gradients.fill_gaps()

    def drop_gradients(self) -> None:
        self.bare_optimizer.zero_grad(set_to_none=True)

    def step(self, rate: float) -> float | None:
        self._sum_gradients()
        norm = None
        if self._settings.clip_norm > 0:
            norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), self._settings.clip_norm)
        for group in self.bare_optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return None if norm is None else float(norm)

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
            # It grows when the count is reached: DeepSpeed's, which goes on counting, would be beyond it for ever.
            state |= {"scale": saved.scale, "_growth_tracker": (saved.stable or 0) % state["growth_interval"]}
            scaler.load_state_dict(state)
