"""The training loop: one update after another, each a token-weighted mean over its whole effective batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader

from memtop.presets import Settings
from memtop.presets.host_memory import HostPlan, host_plan
from memtop.train import checkpoint
from memtop.train.channel import Channel
from memtop.train.control import Control
from memtop.train.corpus import collate
from memtop.train.engine import Engine
from memtop.train.errors import TrainingError
from memtop.train.evaluation import Evaluation, Evaluator
from memtop.train.host import RECORD_EVERY, MemoryRecord
from memtop.train.manifest import Cut, Manifest
from memtop.train.objective import IGNORED, predicted_tokens
from memtop.train.order import Key, SampleOrder, Samples, UpdatePlan, plan_updates, sample_digest
from memtop.train.packed import PackedText, RowSamples
from memtop.train.schedule import learning_rate
from memtop.train.stopwatch import Stopwatch
from memtop.train.trackers import Tracking

Batch = dict[str, torch.Tensor]


class Position(msgspec.Struct, kw_only=True):
    """Where a training stands: updates and samples done, and the cuts of the texts so far."""

    updates: int = 0
    samples_seen: int = 0
    cuts: tuple[Cut, ...]


class Trainer:
    """`run` trains from a position to the target, or to a stop at an update boundary."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        samples: Samples,
        position: Position,
        state_dir: Path,
        channel: Channel,
        pad: int,
        *,
        host: HostPlan | None = None,
        evaluation: PackedText | RowSamples | None = None,
    ) -> None:
        self.settings = settings
        self.position = position
        self._engine = engine
        self._accelerator = engine.accelerator
        self._samples = samples
        self._state_dir = state_dir
        self._channel = channel
        self._pad = pad
        self._host = host or host_plan(settings, None, on_gpu=self._accelerator.device.type == "cuda")
        self._record = MemoryRecord(channel, self._accelerator)
        self._tracking = Tracking(self._accelerator)
        self._evaluator = Evaluator(settings, engine, evaluation, pad) if settings.eval_every and evaluation else None
        self._evaluated: Evaluation | None = None
        self._best = checkpoint.best_loss(state_dir)
        self._saved_at: int | None = None
        self.save_problem: str | None = None
        """Why the newest save failed; None if it did not."""
        self._order = SampleOrder(samples, settings.seed, position.cuts)
        self.target_samples = settings.target_samples or self._order.end_of(settings.epochs)

    def run(self, control: Control) -> str:
        """Train; "finished" or "stopped". The state is saved in both cases."""
        stopwatch = Stopwatch(self._accelerator.device)
        self._engine.objective.train()
        batches = iter(self._loader())
        trained = False
        for plan in self._plans(self._order):
            self._update(plan, batches, stopwatch)
            trained = True
            better = self._evaluate(plan.number)
            asked = control.at_boundary()
            if asked.save or asked.stop or better or plan.number % self.settings.save_every == 0:
                control.saved(asked, self._save(best=better))
            if plan.number % RECORD_EVERY == 0:
                self._record(f"update {plan.number}")
            if asked.stop:
                return "stopped"
        if trained and self._saved_at != self.position.updates:
            self._save()
        return "finished"

    def _plans(self, order: SampleOrder) -> Iterator[UpdatePlan]:
        return plan_updates(
            order,
            updates=self.position.updates,
            position=self.position.samples_seen,
            target=self.target_samples,
            effective_batch=self.settings.effective_batch,
        )

    def _loader(self) -> DataLoader[Any]:
        samples: Any = self._samples
        loader: DataLoader[Any] = DataLoader(
            samples,
            batch_sampler=self._micro_batches(),
            num_workers=self._host.workers,
            collate_fn=partial(collate, pad=self._pad),
            pin_memory=self._host.pin_memory,
        )
        return loader

    def _micro_batches(self) -> Any:
        s, rank = self.settings, self._accelerator.process_index
        # An order of its own: with worker processes the loader runs ahead of the updates.
        for plan in self._plans(SampleOrder(self._samples, s.seed, self.position.cuts)):
            for keys in plan.micro_batches(s.batch, s.world_size, rank):
                # A rank without samples in a short last update takes one along and masks it, to stay in step with the others.
                yield keys or plan.keys[:1]

    def _update(self, plan: UpdatePlan, batches: Iterator[Batch], stopwatch: Stopwatch) -> None:
        """One optimizer step over the plan's samples, whatever the split into micro-batches and ranks."""
        s, engine, accelerator = self.settings, self._engine, self._accelerator
        # The random state is a function of the position: a resumed or re-split run draws the same, nothing is saved.
        torch.manual_seed((s.seed * 1_000_003 + plan.position) * 64 + accelerator.process_index)
        with stopwatch.part("data_wait_seconds"):
            mine = self._fetch(plan.micro_batches(s.batch, s.world_size, accelerator.process_index), batches)
            total_tokens = self._count_tokens(mine)
        loss_sum = torch.zeros((), device=accelerator.device)
        for number, batch in enumerate(mine, start=1):
            last = number == len(mine)
            on_device = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
            with engine.quiet(last):
                with stopwatch.part("forward_seconds"):
                    loss = engine.objective(**on_device) / total_tokens
                with stopwatch.part("backward_seconds"):
                    engine.backward(loss, last=last)
            loss_sum += loss.detach()
        with stopwatch.part("optimizer_seconds"):
            rate = learning_rate(s, plan.position + len(plan.keys), self.target_samples)
            norm = engine.step(rate)
        # The one point where the CPU waits for the device.
        loss_value = float(accelerator.reduce(loss_sum, reduction="sum"))
        if not math.isfinite(loss_value):
            raise TrainingError(
                f"loss is {loss_value} at update {plan.number}: stopped, nothing saved since the last checkpoint"
            )
        self.position.updates, self.position.samples_seen = plan.number, plan.position + len(plan.keys)
        self._report(plan, loss_value, rate, norm, total_tokens, stopwatch.lap())

    @staticmethod
    def _fetch(keys: list[list[Key]], batches: Iterator[Batch]) -> list[Batch]:
        """All micro-batches of an update, still on the CPU: their tokens must be counted before the first one is trained on."""
        found = []
        for ids in keys:
            batch = next(batches)
            if not ids:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            found.append(batch)
        return found

    def _count_tokens(self, mine: list[Batch]) -> int:
        """Predicted tokens of the update over all ranks; at least 1."""
        seq2seq = self.settings.task == "seq2seq"
        count = sum(predicted_tokens(batch["labels"], seq2seq=seq2seq) for batch in mine)
        if self._accelerator.num_processes > 1:
            over_ranks = torch.tensor(count, device=self._accelerator.device, dtype=torch.int64)
            count = int(self._accelerator.reduce(over_ranks, reduction="sum"))
        return max(1, count)

    def _report(
        self, plan: UpdatePlan, loss: float, rate: float, norm: float | None, tokens: int, seconds: dict[str, float]
    ) -> None:
        values = {
            "samples_seen": self.position.samples_seen,
            "epoch": self._order.epoch_at(self.position.samples_seen),
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
        }
        self._tracking.step(plan.number, values)
        self._channel.report(
            "step",
            update=plan.number,
            tokens=tokens,
            sample_digest=sample_digest(plan.ids),
            dropped=self._channel.dropped(),
            **values,
            **seconds,
            **self._channel.readings(),
        )
        if self._accelerator.is_main_process and plan.number % self.settings.log_every == 0:
            speed = len(plan.keys) / seconds["step_seconds"]
            print(f"update {plan.number}  loss {loss:.4f}  lr {rate:.3g}  {speed:.1f} samples/s", flush=True)

    def _evaluate(self, update: int) -> bool:
        """Evaluate if this update asks for it; whether the model is better than it ever was."""
        if self._evaluator is None or update % self.settings.eval_every:
            return False
        found = self._evaluated = self._evaluator()
        self._channel.report("evaluation", update=update, **msgspec.to_builtins(found))
        self._tracking.evaluation(update, found.loss)
        if self._accelerator.is_main_process:
            print(f"update {update}  evaluation loss {found.loss:.4f} over {found.samples} samples", flush=True)
        # The loss is the same on every rank: it was summed over all of them.
        return self._best is None or found.loss < self._best

    def _save(self, *, best: bool = False) -> tuple[bool, str]:
        """Write train_latest_state; whether it worked, and what happened in words. All ranks take part."""
        self._accelerator.wait_for_everyone()
        # Every update that a checkpoint covers is in the journal before the checkpoint exists.
        self._channel.flush()
        watch = Stopwatch(torch.device("cpu"))
        progress = checkpoint.Progress(
            updates=self.position.updates,
            samples_seen=self.position.samples_seen,
            epoch=self._order.epoch_at(self.position.samples_seen),
            cuts=self.position.cuts,
            target_samples=self.target_samples,
            evaluation_loss=self._evaluated.loss if self._evaluated else None,
        )
        done = (True, f"checkpoint at update {self.position.updates}")
        try:
            manifest = checkpoint.save_state(self._state_dir, self._engine, progress, self.settings)
        except checkpoint.NoSpaceError as error:
            self._channel.report("warning", message=str(error))
            print(f"memtop: {error}", flush=True)
            self.save_problem = str(error)
            done = (False, str(error))
        else:
            self._saved_at, self.save_problem = self.position.updates, None
            if best and self._evaluated is not None:
                self._best = self._evaluated.loss
            if manifest is not None:
                if best:
                    checkpoint.keep_best(self._state_dir)
                done = (True, self._say_saved(manifest, watch.lap()["step_seconds"]))
        self._accelerator.wait_for_everyone()
        return done

    def _say_saved(self, manifest: Manifest, seconds: float) -> str:
        size = sum(file.size_bytes for file in manifest.files)
        self._channel.report(
            "checkpoint",
            path=str(self._state_dir),
            updates=manifest.updates,
            samples_seen=manifest.samples_seen,
            seconds=seconds,
            size_bytes=size,
        )
        return f"checkpoint at update {manifest.updates}: {size / 2**20:.1f} MiB in {self._state_dir.name}"
