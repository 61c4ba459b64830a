"""Updates under DeepSpeed's ZeRO, and the way of its sharded state to tensors per parameter name and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.schema import Zero
from memtop.train.engine import LossScale, ReadSaved, trained_parameters
from memtop.train.objective import Objective
from memtop.train.optimizers import MOMENTS, full_moments


class ZeroEngine:
    """A DeepSpeed engine, driven by hand: it is told where an update ends, since the last one of a run may be short."""

    # ZeRO-2 and 3 shard gradients as they arise, ZeRO-3 gathers weights in every layer: a rank that breaks off leaves the
    # others waiting, and the engine's buffers half full. Only a restart helps.
    retries = False

    def __init__(
        self, accelerator: Accelerator, objective: Objective, optimizer: torch.optim.Optimizer, settings: Settings
    ) -> None:
        self.accelerator = accelerator
        self._settings = settings
        self.model = objective.model
        self.loss_chunk = objective.chunk
        self._base = optimizer
        self._engine: Any = accelerator.prepare(objective, optimizer)[0]
        self.objective: torch.nn.Module = self._engine
        self._zero: Any = self._engine.optimizer

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        # DeepSpeed divides by its accumulation steps and takes the mean over ranks; the sum is wanted.
        self._engine.backward(loss * (self._settings.accumulation * self.accelerator.num_processes))
        if not last:
            self._engine.step()

    def gaps(self) -> int:
        return 0

    def share_gaps(self) -> None:
        """DeepSpeed exchanges gradients itself."""

    def fill_gaps(self) -> None:
        """There are none."""

    def drop_gradients(self) -> None:
        raise AssertionError("an update under ZeRO is never given up")

    def step(self, rate: float) -> float | None:
        for group in (*self._base.param_groups, *self._zero.param_groups):
            group["lr"] = rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def saved_tensors(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        step = torch.as_tensor(float(self._step_count()))
        for name, parameter in trained_parameters(self.model).items():
            found = {"weight": safe_get_full_fp32_param(parameter)}
            for kind in MOMENTS:
                found[kind] = safe_get_full_optimizer_state(parameter, kind)
            shape = getattr(parameter, "ds_shape", parameter.shape)
            yield (
                name,
                {
                    "step": step,
                    **{kind: tensor.detach().to("cpu", torch.float32).reshape(shape) for kind, tensor in found.items()},
                },
            )

    def load_moments(self, read: ReadSaved) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        ready = False
        for name, parameter in trained_parameters(self.model).items():
            saved = read(name)
            if not ready:
                self._make_optimizer_state(float(saved["step"]))
                ready = True
            device = self.accelerator.device
            # The 16-bit working copy has these weights already, rounded; these are the exact ones.
            safe_set_full_fp32_param(parameter, saved["weight"].to(device))
            shape = getattr(parameter, "ds_shape", parameter.shape)
            for kind, tensor in full_moments(saved, shape).items():
                safe_set_full_optimizer_state(parameter, tensor.to(device), kind)

    def _pieces(self) -> list[torch.Tensor]:
        """The flat fp32 pieces of this rank that the optimizer steps over."""
        if self._settings.zero.stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return [parameter for group in self._base.param_groups for parameter in group["params"]]

    def _make_optimizer_state(self, step: float) -> None:
        """The optimizer makes its state at its first step; here it must exist before, with the right step count."""
        whole = type(self._base).__name__ == "DeepSpeedCPUAdam"
        for piece in self._pieces():
            self._base.state[piece] = {
                "step": int(step) if whole else torch.tensor(step),
                **{kind: torch.zeros_like(piece) for kind in MOMENTS},
            }
        if self._settings.zero.stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def _step_count(self) -> float:
        steps = [float(self._base.state[piece]["step"]) for piece in self._pieces() if piece in self._base.state]
        return max(steps, default=0.0)

    def strategy(self) -> Zero:
        offload = self._engine.zero_offload_optimizer()
        parameters = self._engine.zero_offload_param()
        return Zero(
            stage=self._engine.zero_optimization_stage(),
            offload_optimizer=offload is not None and str(getattr(offload.device, "value", offload.device)) == "cpu",
            offload_parameters=parameters is not None and str(getattr(parameters.device, "value", parameters.device)) == "cpu",
        )

    def loss_scale(self) -> LossScale | None:
        if not self._engine.fp16_enabled():
            return None
        scaler = self._zero.loss_scaler
        return LossScale(float(scaler.cur_scale), scaler.cur_iter - scaler.last_overflow_iter - 1, scaler.cur_hysteresis)

    def set_loss_scale(self, saved: LossScale) -> None:
        if not self._engine.fp16_enabled():
            return
        scaler = self._zero.loss_scaler
        scaler.cur_scale = saved.scale
        if saved.stable is not None:
            scaler.last_overflow_iter = scaler.cur_iter - 1 - saved.stable
        if saved.hysteresis is not None:
            scaler.cur_hysteresis = saved.hysteresis
