"""How an update is computed: plain data parallelism here, ZeRO in `zero.py`. The loop knows only `Engine`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.schema import Zero
from memtop.train.objective import Objective
from memtop.train.optimizers import Moments, read_moments, write_moments

ReadSaved = Callable[[str], dict[str, torch.Tensor]]
"""A parameter's name to its saved tensors: weight, step and moments."""


class Engine(Protocol):
    """Model and optimizer, distributed over the processes. Every method is called by all ranks alike."""

    accelerator: Accelerator
    model: torch.nn.Module
    """The Hugging Face model, whose names the parameters are saved by."""
    objective: torch.nn.Module
    """What the loop calls: the objective, wrapped for its kind of parallelism."""

    loss_chunk: int
    """Tokens whose logits exist at one time; 0: all of them."""

    def quiet(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: where it can be, ranks exchange gradients only in the last one."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of this rank's part of the loss. `last`: the update's last micro-batch."""

    def step(self, rate: float) -> float | None:
        """One optimizer step over the sum of the ranks' gradients; the gradient norm where it is known."""

    def saved_tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """For each trained parameter its name, and weight, step and moments in fp32 on the CPU, one at a time."""

    def load_moments(self, read: ReadSaved) -> None:
        """Put saved moments (and the exact fp32 weights) in place, one parameter at a time."""

    def strategy(self) -> Zero:
        """What really runs, read back from the machinery."""

    def loss_scale(self) -> float | None:
        """The scale of fp16 gradients; None without fp16."""

    def set_loss_scale(self, scale: float) -> None: ...


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained and saved, by their name in the model."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class PlainEngine:
    """One process, or several with a whole model each (DistributedDataParallel)."""

    def __init__(
        self, accelerator: Accelerator, objective: Objective, optimizer: torch.optim.Optimizer, settings: Settings
    ) -> None:
        self.accelerator = accelerator
        self._settings = settings
        self.model = objective.model
        self.loss_chunk = objective.chunk
        self.bare_optimizer = optimizer
        self.objective, self._optimizer = accelerator.prepare(objective, optimizer)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # DDP takes the mean over ranks; the sum is wanted.
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def quiet(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        # DDP decides in the forward pass whether it will exchange gradients in the backward pass.
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.objective)

    def step(self, rate: float) -> float | None:
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

    def loss_scale(self) -> float | None:
        scaler = self.accelerator.scaler
        return None if scaler is None else float(scaler.get_scale())

    def set_loss_scale(self, scale: float) -> None:
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
