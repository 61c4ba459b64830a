"""The training loop: one update after another, each a token-weighted mean over its whole effective batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from memtop.presets import Settings
from memtop.train import checkpoint
from memtop.train.channel import Channel
from memtop.train.control import Control
from memtop.train.data import IGNORED, ByteSamples, collate
from memtop.train.errors import TrainingError
from memtop.train.order import SampleOrder, UpdatePlan, plan_updates, sample_digest
from memtop.train.schedule import learning_rate
from memtop.train.stopwatch import Stopwatch

Batch = tuple[torch.Tensor, torch.Tensor]


class Trainer:
    """Model, optimizer and position; `run` trains to the target, or to a stop at an update boundary."""

    def __init__(
        self,
        settings: Settings,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        samples: ByteSamples,
        state_dir: Path,
        channel: Channel,
    ) -> None:
        self.settings = settings
        self.updates = 0
        self.samples_seen = 0
        self._accelerator = accelerator
        # The bare ones, for saving; what prepare returns wraps them.
        self._bare_model, self._bare_optimizer = model, optimizer
        self._model, self._optimizer = accelerator.prepare(model, optimizer)
        self._samples = samples
        self._state_dir = state_dir
        self._channel = channel
        self._saved_at: int | None = None

    def run(self, control: Control) -> str:
        """Train; "finished" or "stopped". The state is saved in both cases."""
        stopwatch = Stopwatch(self._accelerator.device)
        order = SampleOrder(len(self._samples), self.settings.seed)
        plans = list(
            plan_updates(
                order,
                updates=self.updates,
                position=self.samples_seen,
                target=self.settings.target_samples,
                effective_batch=self.settings.effective_batch,
            )
        )
        self._model.train()
        batches = iter(self._loader(plans))
        for plan in plans:
            self._update(plan, batches, stopwatch)
            asked = control.at_boundary()
            if asked.save or asked.stop or plan.number % self.settings.save_every == 0:
                control.saved(asked, self._save())
            if asked.stop:
                return "stopped"
        if self._saved_at != self.updates and plans:
            self._save()
        return "finished"

    def _loader(self, plans: list[UpdatePlan]) -> DataLoader[Any]:
        s, rank = self.settings, self._accelerator.process_index
        micro_batches = [
            # A rank without samples in a short last update takes one along and masks it, to stay in step with the others.
            ids or plan.ids[:1]
            for plan in plans
            for ids in plan.micro_batches(s.batch, s.world_size, rank)
        ]
        loader: DataLoader[Any] = DataLoader(
            self._samples,
            batch_sampler=micro_batches,
            num_workers=s.workers,
            collate_fn=collate,
            pin_memory=self._accelerator.device.type == "cuda",
        )
        return loader

    def _update(self, plan: UpdatePlan, batches: Iterator[Batch], stopwatch: Stopwatch) -> None:
        """One optimizer step over the plan's samples, whatever the split into micro-batches and ranks."""
        s, accelerator = self.settings, self._accelerator
        # The random state is a function of the position: a resumed or re-split run draws the same, nothing is saved.
        torch.manual_seed((s.seed * 1_000_003 + plan.position) * 64 + accelerator.process_index)
        total_tokens = self._samples.label_tokens(plan.ids)
        mine = plan.micro_batches(s.batch, s.world_size, accelerator.process_index)
        loss_sum = torch.zeros((), device=accelerator.device)
        for number, ids in enumerate(mine, start=1):
            with stopwatch.part("data_wait_seconds"):
                tokens, labels = next(batches)
                if not ids:
                    labels = torch.full_like(labels, IGNORED)
                tokens = tokens.to(accelerator.device, non_blocking=True)
                labels = labels.to(accelerator.device, non_blocking=True)
            # Ranks exchange gradients once per update, at the last micro-batch.
            quiet = contextlib.nullcontext() if number == len(mine) else accelerator.no_sync(self._model)
            with quiet:
                with stopwatch.part("forward_seconds"):
                    loss = summed_loss(self._model, tokens, labels) / total_tokens
                with stopwatch.part("backward_seconds"):
                    # DDP takes the mean over ranks; the sum is wanted.
                    accelerator.backward(loss * s.world_size)
            loss_sum += loss.detach()
        with stopwatch.part("optimizer_seconds"):
            norm = self._step(plan)
        # The one point where the CPU waits for the device.
        loss_value = float(accelerator.reduce(loss_sum, reduction="sum"))
        if not math.isfinite(loss_value):
            raise TrainingError(
                f"loss is {loss_value} at update {plan.number}: stopped, nothing saved since the last checkpoint"
            )
        self.updates, self.samples_seen = plan.number, plan.position + len(plan.ids)
        self._report(plan, loss_value, norm, total_tokens, stopwatch.lap())

    def _step(self, plan: UpdatePlan) -> torch.Tensor | None:
        s = self.settings
        norm = None
        if s.clip_norm > 0:
            norm = self._accelerator.clip_grad_norm_(self._model.parameters(), s.clip_norm)
        rate = learning_rate(s, plan.position + len(plan.ids))
        for group in self._bare_optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _report(self, plan: UpdatePlan, loss: float, norm: Any, tokens: int, seconds: dict[str, float]) -> None:
        rate = self._bare_optimizer.param_groups[0]["lr"]
        self._channel.report(
            "step",
            update=plan.number,
            samples_seen=self.samples_seen,
            epoch=self.samples_seen / len(self._samples),
            loss=loss,
            learning_rate=rate,
            gradient_norm=None if norm is None else float(norm),
            tokens=tokens,
            sample_digest=sample_digest(plan.ids),
            dropped=self._channel.dropped(),
            **seconds,
            **self._channel.readings(),
        )
        if self._accelerator.is_main_process:
            speed = len(plan.ids) / seconds["step_seconds"]
            print(f"update {plan.number}  loss {loss:.4f}  lr {rate:.3g}  {speed:.1f} samples/s", flush=True)

    def _save(self) -> tuple[bool, str]:
        """Write train_latest_state from the main process; whether it worked, and what happened in words."""
        self._accelerator.wait_for_everyone()
        done = (True, f"checkpoint at update {self.updates}")
        if self._accelerator.is_main_process:
            done = self._write()
        self._accelerator.wait_for_everyone()
        return done

    def _write(self) -> tuple[bool, str]:
        # Every update that a checkpoint covers is in the journal before the checkpoint exists.
        self._channel.flush()
        watch = Stopwatch(torch.device("cpu"))
        try:
            manifest = checkpoint.save_state(
                self._state_dir,
                self._bare_model,
                self._bare_optimizer,
                settings=self.settings,
                updates=self.updates,
                samples_seen=self.samples_seen,
                epoch=self.samples_seen / len(self._samples),
            )
        except checkpoint.NoSpaceError as error:
            self._channel.report("warning", message=str(error))
            print(f"memtop: {error}", flush=True)
            return False, str(error)
        self._saved_at = self.updates
        size = sum(file.size_bytes for file in manifest.files)
        self._channel.report(
            "checkpoint",
            path=str(self._state_dir),
            updates=self.updates,
            samples_seen=self.samples_seen,
            seconds=watch.lap()["step_seconds"],
            size_bytes=size,
        )
        return True, f"checkpoint at update {self.updates}: {size / 2**20:.1f} MiB in {self._state_dir.name}"


def summed_loss(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats, summed over all predicted tokens of tokens [b, t]; a scalar in fp32."""
    # Padding is at the end only: causal attention keeps it out of everything before it, no mask is needed.
    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )
