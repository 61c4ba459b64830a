"""The training loop: one update after another, each a token-weighted mean over its whole effective batch.

The gradients of one update: a token-weighted mean over its whole effective batch, whatever the split and the ranks."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from memtop.presets import Settings, SettingsError
from memtop.presets.fields import LIVE
from memtop.presets.host_memory import HostPlan, host_plan
from memtop.train import BadInputError, TrainingError, checkpoint
from memtop.train.agent.memory import free_cache
from memtop.train.auto_batch import PATIENCE, SAFE_FRACTION, Gauge, Growth, Guard, larger_split, open_gauge, smaller_split
from memtop.train.batches import Batch, Feed, Position, agree_on_host_plan
from memtop.train.checkpoint import ROUND_SECONDS, Room
from memtop.train.data.samples import PackedText, RowSamples
from memtop.train.engine import Engine, Ranks
from memtop.train.evaluation import Evaluation, Evaluator
from memtop.train.model import set_checkpointing
from memtop.train.objective import predicted_tokens
from memtop.train.optimizers import learning_rate
from memtop.train.order import SampleOrder, Samples, UpdatePlan, sample_digest
from memtop.train.reporting import RECORD_EVERY, Channel, MemoryRecord, Stopwatch, Tracking
from memtop.train.requests import Control, edit_live
from memtop.train.state_files import Manifest, newest_update

__all__ = ["Position", "Trainer"]


class Trainer:
    """`run` trains from a position to the target, or to a stop at an update boundary.

    `gauge` and `patience` (updates) are for the micro-batch that a failure made smaller: when it may grow back. `waits`: a
    finished training whose state does not fit on the disk stays in memory until it does, or until it is stopped.
    """

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
        gauge: Gauge | None = None,
        patience: int = PATIENCE,
        waits: bool = False,
        room: Room | None = None,
    ) -> None:
        self.settings = settings
        """As they are now: the split changes when memory runs out, and what a person may change while it runs."""
        self.position = position
        self._engine = engine
        self._accelerator = engine.accelerator
        self._state_dir = state_dir
        self._channel = channel
        self._host = host or host_plan(settings, None, on_gpu=self._accelerator.device.type == "cuda")
        self._record = MemoryRecord(channel, self._accelerator)
        self._tracking = Tracking(self._accelerator)
        self._ranks = Ranks(self._accelerator)
        self._guard = Guard(channel, retries=engine.retries)
        self._gauge = gauge or open_gauge(self._accelerator.device)
        self._growth = Growth(self._gauge, patience)
        self._most_batch = settings.batch
        self._order, ahead = (SampleOrder(samples, settings.seed, position.cuts) for _ in range(2))
        self._feed = Feed(samples, (self._order, ahead), pad, self._accelerator.process_index)
        self._gradients = Gradients(engine, self._feed, self._ranks, self._guard, self._growth)
        self._evaluator = Evaluator(settings, engine, evaluation, pad) if settings.eval_every and evaluation else None
        self._evaluated: Evaluation | None = None
        self._best = checkpoint.best_loss(state_dir)
        self._waits = waits
        self._room = room or Room()
        # What was taken up is saved already.
        self._saved_at = position.updates
        self.save_problem: str | None = None
        """Why the newest save failed; None if it did not, and on all ranks but the first."""
        self.target_samples = settings.target_samples or self._order.end_of(settings.epochs)

    @property
    def total_updates(self) -> int:
        """Updates of the whole run, as the settings are now."""
        left = max(0, self.target_samples - self.position.samples_seen)
        return self.position.updates + math.ceil(left / self.settings.effective_batch)

    @property
    def _at_target(self) -> bool:
        return self.position.samples_seen >= self.target_samples

    @property
    def unsaved(self) -> str | None:
        """That the present state is not on the disk, and why; None where it is."""
        if self._saved_at == self.position.updates:
            return None
        how = "finished" if self._at_target else "stopped at"
        return f"{how} update {self.position.updates}, not saved: {self.save_problem or 'the first rank tells why'}"

    def run(self, control: Control) -> str:
        """Train; "finished" or "stopped". The state is saved in both cases, or `unsaved` says why not."""
        try:
            return self._run(control)
        except Exception as error:
            self._guard.tell(error)
            raise

    def _run(self, control: Control) -> str:
        stopwatch = Stopwatch(self._accelerator.device)
        self._engine.objective.train()
        self._start_feed()
        while (plan := self._feed.plan()) is not None:
            self._update(plan, stopwatch)
            better = self._evaluate(plan.number)
            asked = control.at_boundary()
            for number, values in asked.changes:
                control.answer(number, *self._edit(values))
            self._adapt()
            due = plan.number % self.settings.save_every == 0 and not self._at_target
            if asked.save or asked.stop or better or due:
                control.saved(asked, self._save(best=better))
            if plan.number % RECORD_EVERY == 0:
                self._record(f"update {plan.number}")
            if asked.stop:
                return "stopped"
        return self._finish(control)

    def _finish(self, control: Control) -> str:
        """Save the end. Without room for it the work stays in memory, on all ranks, until there is some or it is stopped."""
        if self.unsaved is not None:
            self._save(end=True)
        while self.unsaved is not None and self._waits:
            time.sleep(ROUND_SECONDS)
            # All ranks come here every second: none waits for another for longer than a process group allows.
            asked = control.at_boundary()
            for number, _ in asked.changes:
                control.answer(number, False, "training is finished: it waits for room to be saved", {})
            if self._ranks.any(asked.save or self._room.due(at_once=asked.stop)):
                control.saved(asked, self._save(end=True))
            if asked.stop and self.unsaved is not None:
                return "stopped"
        return "finished"

    def _start_feed(self) -> None:
        self._feed.start(self.settings, self._host, self.position, self.target_samples)

    def _update(self, plan: UpdatePlan, stopwatch: Stopwatch) -> None:
        """One optimizer step over the plan's samples; in smaller and smaller pieces where memory runs out before it."""
        self._guard.update = plan.number
        while (computed := self._gradients(plan, self.settings, stopwatch)) is None:
            self._engine.drop_gradients()
            free_cache()
            self._shrink("allocation failure")
            # The same samples, in smaller pieces.
            self._feed.plan()
        if not math.isfinite(computed.loss):
            raise TrainingError(
                f"loss is {computed.loss} at update {plan.number}: stopped, nothing saved since the last checkpoint"
            )
        self._guard.phase = "optimizer"
        with stopwatch.part("optimizer_seconds"):
            rate = learning_rate(self.settings, plan.position + len(plan.keys), self.target_samples)
            norm = self._engine.step(rate)
        self._guard.phase = "unknown"
        self.position.updates, self.position.samples_seen = plan.number, plan.position + len(plan.keys)
        if self._growth.updated(self.settings.batch, pressed=computed.pressed):
            self._channel.report("pressure", update=plan.number, allocation_retries=self._growth.retries)
        self._report(plan, computed, rate, norm, stopwatch.lap())

    def _shrink(self, reason: str) -> None:
        """Go on with the next smaller split; the failure is raised if there is none."""
        split = smaller_split(self.settings)
        if split is None:
            self._guard.give_up(f"update {self.position.updates + 1}")
        else:
            self._growth.failed(self.settings.batch)
            self._change(reason, batch=split[0], accumulation=split[1])

    def _adapt(self) -> None:
        """At a boundary: a smaller split before memory runs out, or a larger one after a stable stretch where it would fit."""
        if not self._engine.retries or self._at_target:
            return
        if self._growth.pressed:
            if smaller_split(self.settings) is not None:
                self._shrink("pressure")
            return
        split = larger_split(self.settings, self._most_batch) if self._growth.due else None
        if split is None:
            return
        # The fullest rank decides for all.
        if self._ranks.most(self._growth.share(split[0])) < SAFE_FRACTION:
            self._change("grown back", batch=split[0], accumulation=split[1])
        else:
            self._growth.refused()

    def _edit(self, values: dict[str, Any]) -> tuple[bool, str, dict[str, Any]]:
        """Change what a person asked for, from the next update on; whether it was done, and in words."""
        try:
            after = edit_live(self.settings, values)
            if after.gradient_checkpointing != self.settings.gradient_checkpointing:
                set_checkpointing(self._engine.model, on=after.gradient_checkpointing)
        except (SettingsError, BadInputError) as error:
            return False, str(error), {}
        if after.batch != self.settings.batch or values.get("batch") is not None:
            self._most_batch = after.batch
        before, update = self.settings, self.position.updates + 1
        changes = {name: getattr(after, name) for name in LIVE if getattr(after, name) != getattr(before, name)}
        if not changes:
            return True, "nothing to change: it is so already", {"update": update, "changes": {}}
        self._change("asked", **changes)
        short = "workers" in changes and self._host.workers != after.workers
        note = f" ({self._host.workers} workers for now: host memory is short)" if short else ""
        told = ", ".join(f"{name} {getattr(before, name)} -> {value}" for name, value in changes.items())
        return True, f"from update {update} on: {told}{note}", {"update": update, "changes": changes}

    def _change(self, reason: str, **changes: Any) -> None:
        """Other settings from here on. The position stays: the next update takes the very samples it would have taken."""
        before, self.settings = self.settings, msgspec.structs.replace(self.settings, **changes)
        if "workers" in changes:
            workers = agree_on_host_plan(self.settings, self._accelerator).workers
            self._host = msgspec.structs.replace(self._host, workers=workers)
        # What the allocator kept for the old split comes in pieces of the wrong size, and its peak is not the new one's.
        self._gauge.reset()
        if changes.keys() & {"batch", "accumulation"}:
            self._growth.changed(grown=reason == "grown back", forget=reason == "asked")
        elif "gradient_checkpointing" in changes:
            self._growth.changed(forget=True)
        if changes.keys() & {"batch", "accumulation", "workers"}:
            self._start_feed()
        update = self.position.updates + 1
        self._channel.report("settings", update=update, changes=changes, reason=reason, total_updates=self.total_updates)
        if self._accelerator.is_main_process:
            told = ", ".join(f"{name} {getattr(before, name)} -> {value}" for name, value in changes.items())
            print(f"memtop: from update {update} on: {told} ({reason})", flush=True)

    def _report(self, plan: UpdatePlan, computed: Computed, rate: float, norm: float | None, seconds: dict[str, float]) -> None:
        loss = computed.loss
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
            tokens=computed.tokens,
            batch=self.settings.batch,
            accumulation=self.settings.accumulation,
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
        self._guard.phase = "evaluation"
        with self._growth.aside():
            while (found := self._evaluator(self._evaluation_batch, self._guard, self._ranks)) is None:
                if self._evaluation_batch == 1:
                    self._guard.give_up(f"evaluation after update {update}")
                free_cache()
                self._change("allocation failure", eval_batch=self._evaluation_batch // 2)
            read = self._channel.readings()
        self._guard.phase, self._evaluated = "unknown", found
        peaks = {name: read.get(name) for name in ("peak_bytes", "peak_reserved_bytes")}
        self._channel.report("evaluation", update=update, **msgspec.to_builtins(found), **peaks)
        self._tracking.evaluation(update, found.loss)
        if self._accelerator.is_main_process:
            print(f"update {update}  evaluation loss {found.loss:.4f} over {found.samples} samples", flush=True)
        # The loss is the same on every rank: it was summed over all of them.
        return self._best is None or found.loss < self._best

    @property
    def _evaluation_batch(self) -> int:
        return self.settings.eval_batch or self.settings.batch

    def _save(self, *, best: bool = False, end: bool = False) -> tuple[bool, str]:
        """Write train_latest_state; whether it worked, and what happened in words. All ranks take part."""
        with self._growth.aside():
            return self._write(best=best, end=end)

    def _write(self, *, best: bool, end: bool) -> tuple[bool, str]:
        self._guard.phase = "save"
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
            done = (False, self._say_no_room(error, waiting=end and self._waits))
        else:
            self.save_problem = None
            if manifest is not None:
                done = (True, self._say_saved(manifest, watch.lap()["step_seconds"]))
                if best:
                    self._keep_best()
        # The first rank writes for all: what it could not write is saved for nobody, and all must know it alike.
        if not self._ranks.any(not done[0]):
            self._saved_at = self.position.updates
            if best and self._evaluated is not None:
                self._best = self._evaluated.loss
        self._accelerator.wait_for_everyone()
        self._guard.phase = "unknown"
        return done

    def _keep_best(self) -> None:
        try:
            checkpoint.keep_best(self._state_dir)
        except checkpoint.NoSpaceError as error:
            text = f"the best state is not kept: {error}"
            self._channel.report("warning", message=text)
            print(f"memtop: {text}", flush=True)

    def _say_no_room(self, error: checkpoint.NoSpaceError, *, waiting: bool) -> str:
        """Remember and tell that this save failed; in words."""
        self._room.failed(error)
        update, kept = self.position.updates, newest_update(self._state_dir)
        kept_words = "nothing saved yet" if kept is None else f"the state of update {kept} is kept"
        self.save_problem = f"{error}; {kept_words}"
        if waiting:
            text = f"finished update {update}, waiting for room: {error}; free some, or stop the run"
        else:
            text = f"update {update} not saved: {error}; {kept_words}; free some space"
        if not waiting or self._room.is_news(text):
            self._channel.report("save_failed", update=update, message=text, waiting=waiting)
            print(f"memtop: {text}", flush=True)
        return text

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


class Computed(msgspec.Struct, frozen=True):
    """What all ranks know once each of them holds its gradients: mean loss in nats per token, predicted tokens."""

    loss: float
    tokens: int
    pressed: bool
    """Whether the allocator of any rank had to free its cache."""


class Gradients:
    """Computes the gradients of an update and leaves them in the parameters. All ranks call it together.

    Where it can be tried again no rank waits for another between the votes, so one that fails holds up nobody: each part
    ends with a vote, and if any rank's memory ran out in it, all of them give the try up.
    """

    def __init__(self, engine: Engine, feed: Feed, ranks: Ranks, guard: Guard, growth: Growth) -> None:
        self._engine = engine
        self._feed = feed
        self._ranks = ranks
        self._guard = guard
        self._growth = growth

    def __call__(self, plan: UpdatePlan, settings: Settings, stopwatch: Stopwatch) -> Computed | None:
        """None: memory ran out on some rank, and nothing of this try may be used."""
        device, rank = self._engine.accelerator.device, self._engine.accelerator.process_index
        split = {"batch": settings.batch, "accumulation": settings.accumulation}
        # The random state is a function of the position: a resumed or re-split run draws the same, nothing is saved.
        torch.manual_seed((settings.seed * 1_000_003 + plan.position) * 64 + rank)
        with stopwatch.part("data_wait_seconds"):
            self._guard.phase = "data"
            mine = self._guard.attempt(lambda: self._fetch(plan, settings), **split)
            failed, counted = self._ranks.sums(mine is None, 0 if mine is None else mine[1])
        if failed or mine is None:
            return None
        batches, tokens = mine[0], max(1, int(counted))
        done = self._guard.attempt(lambda: (self._backward(batches, tokens, stopwatch, device), self._engine.gaps()), **split)
        failed, total, gaps, pressed = self._ranks.sums(done is None, *(done or (0.0, 0)), self._growth.new_retries())
        if not failed and gaps:
            self._engine.share_gaps()
            filled = self._guard.attempt(self._fill_gaps, **split)
            failed = self._ranks.sums(filled is None)[0]
        return None if failed else Computed(total, tokens, pressed > 0)

    def _fetch(self, plan: UpdatePlan, settings: Settings) -> tuple[list[Batch], int]:
        """This rank's micro-batches, and how many tokens are predicted in them."""
        mine = self._feed.fetch(plan)
        seq2seq = settings.task == "seq2seq"
        return mine, sum(predicted_tokens(batch["labels"], seq2seq=seq2seq) for batch in mine)

    def _backward(self, mine: list[Batch], tokens: int, stopwatch: Stopwatch, device: torch.device) -> float:
        """Forward and backward of all micro-batches; this rank's part of the loss."""
        total = torch.zeros((), device=device)
        for number, batch in enumerate(mine, start=1):
            self._guard.phase = "forward"
            on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with stopwatch.part("forward_seconds"):
                loss = self._engine.objective(**on_device) / tokens
            self._guard.phase = "backward"
            with stopwatch.part("backward_seconds"):
                self._engine.backward(loss, last=number == len(mine))
            total += loss.detach()
        # The one point where the CPU waits for the device: what failed there is known from here on.
        return float(total)

    def _fill_gaps(self) -> bool:
        self._engine.fill_gaps()
        return True
