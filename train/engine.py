"""`Engine` computes gradients and steps: plain data parallelism here, ZeRO in `zero.py`.

Plain data parallelism does not use torch's DistributedDataParallel. If one rank runs out of memory
there in its last backward pass, the others wait forever for an all-reduce that it never joins.
`exchange.py` also communicates during the backward pass, but a rank that fails joins the rest of
the all-reduces, and allocates nothing for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.schema import Zero
from memtop.train import TrainingError
from memtop.train.exchange import GradientSum
from memtop.train.objective import Objective
from memtop.train.optimizers import Moments, read_moments, write_moments
from memtop.train.state_files import LossScale, SavedTensors

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
        It is inf or nan if a gradient is. Most optimizers then skip the step.

        The norm stays on the device: reading it would wait for the step.
        """

    def skipped(self, norm: float | None) -> bool:
        """Whether the last step, with this norm, was skipped: weights and moments are unchanged."""

    def saved_tensors(self) -> SavedTensors:
        """Yield each trained parameter's name, with weight, step and moments.

        The tensors are on any device and in any precision; the next update changes them.
        """

    def load_moments(self, read: ReadSaved) -> None:
        """Restore saved moments (and exact fp32 weights), one parameter at a time."""

    def gathered_bytes(self, module: torch.nn.Module) -> int:
        """The most that the weights gathered for a forward pass of this module allocate."""

    def release_gathered(self) -> None:
        """Give up the weights that a forward pass has gathered and that nobody will use."""

    def strategy(self) -> Zero:
        """The ZeRO strategy that really runs, as the engine reports it."""

    def loss_scale(self) -> LossScale | None:
        """The scale of fp16 losses; None without fp16."""

    def set_loss_scale(self, saved: LossScale) -> None:
        """Continue with a saved scale; does nothing without fp16."""


MOST_SKIPPED = 8
"""So many skipped steps in a row end the training."""


class SkippedSteps:
    """Notices updates whose optimizer step was skipped. A resumed run counts them from 0 again."""

    def __init__(self, engine: Engine, tell: Callable[[str], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._in_a_row = 0
        self.doubt: str | None = None
        """Why the weights may be bad, so that the last saved state is the better one; else None."""

    def check(self, update: int, loss: float, norm: float | None, *, last: bool) -> bool:
        """Whether the step of this update was skipped, because a gradient is not finite.

        TrainingError if a step was done although the loss or a gradient is not finite, or if too
        many steps in a row were skipped. Before the end of the training two are too many, and one
        if the loss of the `last` update is not finite.
        """
        skipped, finite = self._engine.skipped(norm), math.isfinite(loss)
        self.doubt = None if finite else self.doubt or f"the loss is {loss} since update {update}"
        if not skipped:
            self._in_a_row = 0
            if finite and (norm is None or math.isfinite(norm)):
                return False
        elif finite and (scale := self._engine.loss_scale()) is not None and scale.scale >= 1:
            # Skipped steps are how the scale of fp16 losses is found.
            return True
        self._in_a_row += 1
        if not skipped or self._in_a_row == MOST_SKIPPED or (last and (not finite or self._in_a_row > 1)):
            what = f"gradient norm is {norm}" if finite else f"loss is {loss}"
            times = f" ({self._in_a_row} updates in a row)" if self._in_a_row > 1 else ""
            raise TrainingError(f"{what} at update {update}{times}; stopped, the last saved checkpoint is unchanged")
        if self._in_a_row == 1:
            self._tell(
                f"update {update}: a gradient is not finite (loss {loss:.4g}, gradient norm {norm}), so its optimizer "
                f"step is skipped; {MOST_SKIPPED} such updates in a row end the training"
            )
        return True


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained and saved, by their name in the model."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def count_parameters(parameters: Iterable[torch.nn.Parameter]) -> int:
    """The number of elements. A sharded parameter counts with its whole size."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


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
        # torch's name for it. Such an optimizer reads on the device whether to skip its step.
        self._reads_found_inf = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

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
        if self._settings.clip_norm > 0:
            norm: torch.Tensor = self.accelerator.clip_grad_norm_(self.objective.parameters(), self._settings.clip_norm)
        else:
            self.accelerator.unscale_gradients()
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.objective.parameters() if p.grad is not None])
        optimizer: Any = self.bare_optimizer
        if self._reads_found_inf and self.accelerator.scaler is None:
            # A scaler sets it itself.
            optimizer.found_inf = (~norm.isfinite()).float()
        for group in optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def skipped(self, norm: float | None) -> bool:
        can_skip = self._reads_found_inf or self.accelerator.scaler is not None
        return can_skip and norm is not None and not math.isfinite(norm)

    def saved_tensors(self) -> SavedTensors:
        for name, parameter in trained_parameters(self.model).items():
            yield name, {"weight": parameter.detach(), **read_moments(self.bare_optimizer, parameter)}

    def load_moments(self, read: ReadSaved) -> None:
        for name, parameter in trained_parameters(self.model).items():
            saved: Moments = read(name)
            saved.pop("weight")
            write_moments(self.bare_optimizer, parameter, saved)

    def gathered_bytes(self, module: torch.nn.Module) -> int:
        return 0

    def release_gathered(self) -> None:
        """Do nothing: every rank has all weights."""

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
