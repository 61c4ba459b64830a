"""`Engine` computes gradients and steps: plain data parallelism here, ZeRO in `zero.py`.

Plain data parallelism does not use torch's DistributedDataParallel. If one rank runs out of memory
there in its last backward pass, the others wait forever for an all-reduce that it never joins.
`exchange.py` also communicates during the backward pass, but a rank that fails joins the rest of
the all-reduces, and allocates nothing for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.schema import Zero
from memtop.train.exchange import GradientSum
from memtop.train.objective import Objective
from memtop.train.optimizers import Moments, read_moments, write_moments
from memtop.train.state_files import LossScale

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

    sharded: bool
    """Whether each rank holds only a part of the state: saving then gathers it from all ranks."""

    retries: bool
    """Whether an update can be repeated: forward and backward wait for no other rank."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of this rank's part of the loss.

        `last`: this is the update's last micro-batch.
        """

    def abandon(self) -> None:
        """Do what other ranks wait for after a failure on this rank, before they can vote.

        Allocates nothing. All ranks drop their gradients afterwards.
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
        It is inf or nan if a gradient is.

        The norm stays on the device: reading it would wait for the step.
        """

    def saved_tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield each trained parameter's name, with weight, step and moments.

        The tensors are on any device and in any precision; the next update changes them.
        """

    def load_moments(self, read: ReadSaved) -> None:
        """Restore saved moments (and exact fp32 weights), one parameter at a time."""

    def strategy(self) -> Zero:
        """The ZeRO strategy that really runs, as the engine reports it."""

    def loss_scale(self) -> LossScale | None:
        """The scale of fp16 losses; None without fp16."""

    def set_loss_scale(self, saved: LossScale) -> None:
        """Continue with a saved scale; does nothing without fp16."""


def fault_of(engine: Engine, loss: float, norm: float | None) -> str | None:
    """What is not finite after an update, so that its weights must not be saved; else None."""
    if not math.isfinite(loss):
        return f"loss is {loss}"
    if norm is None or math.isfinite(norm) or engine.loss_scale() is not None:
        # With a scale for fp16 losses, an overflow leaves out the step.
        return None
    return f"gradient norm is {norm}"


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained and saved, by their name in the model."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class PlainEngine:
    """One process, or several with a whole model each that sum their gradients before the step."""

    sharded = False
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
        if last:
            self._sum_gradients.begin()
        self.accelerator.backward(loss)
        if last:
            self._sum_gradients.end()

    def abandon(self) -> None:
        self._sum_gradients.abandon()

    def missing_gradients(self) -> int:
        return self._sum_gradients.missing()

    def share_missing(self) -> None:
        self._sum_gradients.share_missing()

    def fill_missing(self) -> int:
        return self._sum_gradients.fill_missing()

    def drop_gradients(self) -> None:
        self._sum_gradients.finish()
        self.bare_optimizer.zero_grad(set_to_none=True)

    def step(self, rate: float) -> torch.Tensor | float | None:
        self._sum_gradients()
        norm: torch.Tensor | None = None
        if self._settings.clip_norm > 0:
            norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), self._settings.clip_norm)
        elif self.accelerator.scaler is None:
            # Shows whether the gradients are finite. A scaler looks itself.
            gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        for group in self.bare_optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def saved_tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        for name, parameter in trained_parameters(self.model).items():
            yield name, {"weight": parameter.detach(), **read_moments(self.bare_optimizer, parameter)}

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
