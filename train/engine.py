"""How an update is computed: plain data parallelism here, ZeRO in `zero.py`. The loop knows only `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.schema import Zero
from memtop.train.gradients import GradientSum
from memtop.train.objective import Objective
from memtop.train.optimizers import Moments, read_moments, write_moments

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
