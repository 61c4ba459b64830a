"""The training loop: `Trainer.train_step` is one update, `Trainer.run` repeats it.

Read on in `order.py` (which samples an update uses), `batches.py` (its micro-batches),
`objective.py` (the loss), `engine.py` or `zero.py` (backward pass and optimizer step),
`batch_sizer.py` (what happens when memory runs out), and `live_settings.py` (what changes between
two updates).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from memtop.presets import Settings
from memtop.presets.host_memory import HostPlan, host_plan
from memtop.train.agent.memory import free_cache
from memtop.train.batch_search import BatchSearch
from memtop.train.batch_sizer import PATIENCE, BatchSizer, DeviceMemory, OomGuard, PhasePeaks, open_device_memory
from memtop.train.batches import Batch, Batches, to_device
from memtop.train.channel import RECORD_EVERY, Channel, Control, MemoryRecorder, Requests, Stopwatch, Tracking, warn_from_first
from memtop.train.checkpoint import SavedProgress
from memtop.train.data.samples import PackedText, RowSamples
from memtop.train.data.tokens import Tokens
from memtop.train.engine import Engine, SkippedSteps
from memtop.train.evaluation import Evaluation, Evaluator
from memtop.train.exchange import Ranks
from memtop.train.live_settings import LiveSettings
from memtop.train.order import Position, SampleOrder, Samples, UpdatePlan, sample_digest
from memtop.train.packing import is_prepared
from memtop.train.sampling import Sampler
from memtop.train.spikes import SpikeWatch
from memtop.train.state_saver import ROUND_SECONDS, DiskWait, StateSaver


class Gradients(msgspec.Struct, frozen=True):
    """What every rank knows once all ranks hold the gradients of an update."""

    tokens: int
    """Predicted tokens of all ranks."""
    padding: float | None
    """The share of padding in the micro-batches of all ranks; None without any."""
    pressed: bool
    """Whether the allocator of any rank had to free its cache."""


class Trainer:
    """Trains from a position to the target, or until it is asked to stop.

    `memory` and `patience` (updates) decide when a micro-batch that a failure made smaller may grow
    again. With `wait_for_disk`, a finished training whose state does not fit on the disk stays in
    memory until it fits or is stopped.
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
        tokens: Tokens | None = None,
        memory: DeviceMemory | None = None,
        patience: int = PATIENCE,
        wait_for_disk: bool = False,
        disk_wait: DiskWait | None = None,
    ) -> None:
        self.position = position
        self._engine = engine
        self._accelerator = engine.accelerator
        self._channel = channel
        host = host or host_plan(settings, None, on_gpu=self._accelerator.device.type == "cuda")
        self._record = MemoryRecorder(channel, self._accelerator)
        self._tracking = Tracking(self._accelerator)
        self._ranks = Ranks(self._accelerator)
        self._guard = OomGuard(channel, retries=engine.retries)
        self._skipped_steps = SkippedSteps(engine, partial(warn_from_first, channel, self._accelerator))
        self._sizer = BatchSizer(memory or open_device_memory(self._accelerator.device), patience)
        self._phases = PhasePeaks(self._sizer.memory)
        self._stopwatch = Stopwatch(self._accelerator.device)
        self._order = SampleOrder(samples, settings.seed, position.cuts)
        on_cpu = self._accelerator.device.type == "cpu"
        rank, packed = self._accelerator.process_index, settings.packing and is_prepared(engine.model)
        self._batches = Batches(samples, self._order, pad, rank, ahead=not on_cpu, packed=packed)
        # On the device: the loss of the update, as the mean over the predicted tokens of all ranks
        # in nats per token, and the gradient's norm. They are read together.
        self._results = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)
        # The first sum over the ranks may need memory, and here there is some.
        self._ranks.add_up(self._results)
        self._evaluator: Evaluator | None = None
        if settings.eval_every and evaluation:
            self._evaluator = Evaluator(settings, engine, evaluation, pad, pin=host.pin_memory)
        self._evaluated: Evaluation | None = None
        self._sampler: Sampler | None = None
        if settings.sample.every and tokens is not None:
            self._sampler = Sampler(settings, engine, tokens, self._ranks)
            if self._sampler.problem is not None:
                warn_from_first(channel, self._accelerator, self._sampler.problem)
        self._saver = StateSaver(
            state_dir,
            engine,
            channel,
            self._ranks,
            disk_wait or DiskWait(),
            position.updates,
            pin_memory=host.pin_memory,
        )
        self._wait_for_disk = wait_for_disk
        self._spikes = SpikeWatch(channel, state_dir, first=self._accelerator.is_main_process)
        self._put_off = False
        """A save is due, and waits until it is clear whether a spike of the loss has begun."""
        self.target_samples = settings.target_samples or self._order.end_of(settings.epochs)
        self._live = LiveSettings(
            settings,
            position,
            self.target_samples,
            engine=engine,
            batches=self._batches,
            channel=channel,
            host=host,
            guard=self._guard,
            sizer=self._sizer,
            search=BatchSearch(engine, samples, pad, self._guard, self._sizer, channel),
        )

    @property
    def settings(self) -> Settings:
        """The settings in effect now; memory failures and live edits change them."""
        return self._live.now

    @property
    def total_updates(self) -> int:
        """Updates of the whole run with the settings in effect now."""
        return self._live.total_updates

    @property
    def best_loss(self) -> float | None:
        """The lowest evaluation loss whose state was saved; None without one."""
        return self._saver.best_loss

    @property
    def unsaved(self) -> str | None:
        """Why the present state is not on the disk; None if it is."""
        if self._saver.saved_update == self.position.updates:
            return None
        how = "finished" if self._at_target else "stopped at"
        problem = self._skipped_steps.doubt or self._saver.problem or "the first rank reports the reason"
        return f"{how} update {self.position.updates}, not saved: {problem}"

    @property
    def _at_target(self) -> bool:
        return self.position.samples_seen >= self.target_samples

    def run(self, control: Control) -> str:
        """Train and save the state; return "finished" or "stopped".

        If the state could not be saved, `unsaved` says why.
        """
        try:
            return self._run(control)
        except Exception as error:
            self._guard.report(error)
            self._saver.wait_after_failure()
            raise
        finally:
            self._batches.close()

    def _run(self, control: Control) -> str:
        self._engine.objective.train()
        self._live.begin()
        self._stopwatch.begin()
        while (plan := self._batches.next_update()) is not None:
            self.train_step(plan)
            best = self._evaluate(plan.number) and not self._spikes.suspects
            self._sample(plan.number)
            requests = self._at_boundary(control)
            for number, values in requests.changes:
                control.answer(number, *self._live.edit(values))
            if not self._at_target:
                self._live.adapt_batch()
            due = self._due(plan.number)
            if (doubt := self._skipped_steps.doubt) is not None:
                for number in requests.commands:
                    control.answer(number, False, f"not saved: {doubt}; the last saved checkpoint is unchanged", {})
            elif requests.save or requests.stop or requests.leave or best or due:
                self._put_off = False
                self.save(best=best, commands=requests.commands, background=not (requests.stop or requests.leave))
            if (plan.number + 1) % self.settings.save_every == 0:
                self._saver.prepare()
            if plan.number % RECORD_EVERY == 0:
                self._record(f"update {plan.number}")
            if self._leaves(requests) or requests.stop:
                self._saver.finish()
                return "finished" if self._at_target and self.unsaved is None else "stopped"
        return self._finish(control)

    def _due(self, update: int) -> bool:
        """Whether to save by itself: not while the loss may have begun to spike, but afterwards."""
        due = self._put_off or (update % self.settings.save_every == 0 and not self._at_target)
        self._put_off = due and self._spikes.suspects
        return due and not self._put_off

    def _leaves(self, requests: Requests) -> bool:
        """Whether to stop only once the state is saved, and it is; answer who has asked for that.
        Weights that may be bad need not be saved.
        """
        leaves = requests.leave and (self._skipped_steps.doubt is not None or self.unsaved is None)
        problem = f"update {self.position.updates} not saved: {self._saver.problem}"
        for number in requests.leaving:
            if leaves or requests.stop:
                self._channel.answer(number, True, "stopping after this update")
            else:
                self._channel.answer(number, False, problem, {"unsaved": True})
        return leaves

    def _at_boundary(self, control: Control) -> Requests:
        """What is requested; also note on all ranks whether the save in progress has ended."""
        self._guard.phase = "save"
        requests = control.at_boundary(self._saver.ended())
        self._guard.phase = "unknown"
        if requests.save_ended:
            self._saver.note(failed=requests.save_failed)
        return requests

    def train_step(self, plan: UpdatePlan) -> None:
        """Do one update over the samples of `plan`. All ranks call this together.

        If memory runs out before the optimizer step, the update is repeated with a smaller
        micro-batch and more accumulation, so the result is the same. If a gradient is not finite,
        the samples count as seen, and the weights stay as they are; TrainingError if that happens
        in many updates in a row.
        """
        self._guard.update = plan.number
        while (gradients := self._compute_gradients(plan)) is None:
            self._engine.drop_gradients()
            free_cache()
            self._live.shrink("allocation failure", here=self._guard.failed)
            # The batches start again at this update, with the smaller split.
            self._batches.next_update()
        end = plan.end
        self._guard.phase = "optimizer"
        with self._stopwatch.part("optimizer_seconds"):
            rate = self.settings.rate_at(end, self.target_samples)
            norm = self._engine.step(rate)
        self._phases.end("optimizer")
        digest = sample_digest(plan.ids)
        loss, norm = self._read_results(norm)
        skipped = self._skipped_steps.check(plan.number, loss, norm, last=end >= self.target_samples)
        self._guard.phase = "unknown"
        self.position.updates, self.position.samples_seen = plan.number, end
        if self._sizer.updated(self._live.split[0], pressed=gradients.pressed):
            self._channel.report("pressure", update=plan.number, allocation_retries=self._sizer.retries)
        values = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
        more = {"tokens": gradients.tokens, "padding_fraction": gradients.padding}
        self._report(plan, values, skipped=skipped, sample_digest=digest, **more)
        self._spikes(plan, loss, norm, self.settings, self._saver.finish)

    def _compute_gradients(self, plan: UpdatePlan) -> Gradients | None:
        """Run forward and backward over all micro-batches; None if memory ran out on any rank.

        Work that can run out of memory never waits for another rank. After each such part, one
        small all-reduce reports to every rank whether any of them failed; if so, all give up this
        attempt together.
        """
        self._guard.failed = False
        self._phases.begin(self.settings)
        split = dict(zip(("batch", "accumulation"), self._live.split, strict=True))
        # The random state depends on the position alone, so a resumed or re-split run draws the
        # same numbers.
        torch.manual_seed((self.settings.seed * 1_000_003 + plan.position) * 64 + self._accelerator.process_index)
        with self._stopwatch.part("data_wait_seconds"):
            self._guard.phase = "data"
            fetched = self._guard.attempt(self._batches.fetch, **split)
            sizes = (0, 0, 0) if fetched is None else (fetched.tokens, fetched.places, fetched.filled)
            failed, counted, places, filled = self._ranks.sums(fetched is None, *sizes)
        if failed or fetched is None:
            return None
        batches, tokens = fetched.batches, max(1, int(counted))
        found = self._guard.attempt(lambda: self._forward_backward(batches, tokens), **split)
        if found is None:
            self._engine.abandon()
        failed, missing, pressed = self._ranks.sums(found is None, found or 0, self._sizer.new_retries())
        if not failed and missing:
            self._engine.share_missing()
            allocated = self._guard.attempt(self._engine.fill_missing, **split)
            failed = self._ranks.sums(allocated is None)[0]
        if failed:
            return None
        self._ranks.add_up(self._results[:1])
        return Gradients(tokens, 1 - filled / places if places else None, pressed > 0)

    def _forward_backward(self, batches: list[Batch], tokens: int) -> int:
        """Run forward and backward; return the number of gradients that only other ranks have.

        This rank's part of the mean loss goes to the results. Nothing here waits for the device, so
        its queue is never empty.
        """
        device = self._accelerator.device
        self._results.zero_()
        for number, batch in enumerate(batches, start=1):
            self._guard.phase = "forward"
            on_device = to_device(batch, device)
            with self._stopwatch.part("forward_seconds"):
                loss = self._engine.objective(**on_device) / tokens
            self._phases.end("forward")
            self._guard.phase = "backward"
            with self._stopwatch.part("backward_seconds"):
                self._engine.backward(loss, last=number == len(batches))
            self._phases.end("backward")
            self._results[0].add_(loss.detach())
        return self._engine.missing_gradients()

    def _read_results(self, norm: torch.Tensor | float | None) -> tuple[float, float | None]:
        """The update's loss and gradient norm.

        This is the only wait for the device in an update. It raises the error of any operation of
        the update that failed on the device.
        """
        if norm is not None:
            self._results[1].fill_(norm)
        loss, length = self._results.cpu().tolist()
        return loss, None if norm is None else length

    def _report(self, plan: UpdatePlan, values: dict[str, Any], **more: Any) -> None:
        seconds, seen = self._stopwatch.lap(), self.position.samples_seen
        values |= {"samples_seen": seen, "epoch": self._order.epoch_at(seen)}
        self._tracking.step(plan.number, values)
        self._channel.report(
            "step",
            update=plan.number,
            batch=self.settings.batch,
            accumulation=self.settings.accumulation,
            dropped=self._channel.dropped(),
            **values,
            **more,
            **seconds,
            **self._phases.of_update(self._channel.readings()),
        )
        if self._accelerator.is_main_process and plan.number % self.settings.log_every == 0:
            speed = len(plan.keys) / seconds["step_seconds"]
            loss, rate = values["loss"], values["learning_rate"]
            print(f"update {plan.number}  loss {loss:.4f}  lr {rate:.3g}  {speed:.1f} samples/s", flush=True)

    def _evaluate(self, update: int) -> bool:
        """Evaluate if it is due after this update; return whether the loss is the lowest so far."""
        if self._evaluator is None or update % self.settings.eval_every:
            return False
        with self._between_updates("evaluation"):
            while (found := self._evaluator(self._evaluation_batch, self._guard, self._ranks)) is None:
                if self._evaluation_batch == 1:
                    self._guard.give_up(f"evaluation after update {update}")
                free_cache()
                self._live.change("allocation failure", eval_batch=self._evaluation_batch // 2)
            read = self._channel.readings()
        self._evaluated = found
        peaks = {name: read.get(name) for name in ("peak_bytes", "peak_reserved_bytes")}
        self._channel.report("evaluation", update=update, **msgspec.to_builtins(found), **peaks)
        self._tracking.evaluation(update, found.loss)
        if self._accelerator.is_main_process:
            print(f"update {update}  evaluation loss {found.loss:.4f} over {found.samples} samples", flush=True)
        # Summed over all ranks, so every rank decides alike.
        return found.loss < (math.inf if self.best_loss is None else self.best_loss)

    def _sample(self, update: int) -> None:
        """Write samples if they are due after this update."""
        if self._sampler is None or self._sampler.is_off or update % self.settings.sample.every:
            return
        with self._between_updates("sampling"):
            found = self._sampler(self.settings.sample)
            read = self._channel.readings()
        if self._accelerator.is_main_process:
            peaks = {name: read.get(name) for name in ("peak_bytes", "peak_reserved_bytes")}
            self._channel.report("sample", update=update, **msgspec.to_builtins(found), **peaks)

    @property
    def _evaluation_batch(self) -> int:
        # The smallest batch of any rank fits on all of them.
        return self.settings.eval_batch or min(batch for batch, _ in self.settings.splits)

    def save(self, *, best: bool = False, end: bool = False, commands: tuple[int, ...] = (), background: bool = False) -> None:
        """Save the state and answer the commands. All ranks call this together.

        `background`: train on while the state is written.
        """
        progress = SavedProgress(
            updates=self.position.updates,
            samples_seen=self.position.samples_seen,
            epoch=self._order.epoch_at(self.position.samples_seen),
            cuts=self.position.cuts,
            target_samples=self.target_samples,
            evaluation_loss=self._evaluated.loss if self._evaluated else None,
        )
        with self._between_updates("save", tell=not background):
            self._saver.begin(
                progress,
                self.settings,
                best=best,
                waiting=end and self._wait_for_disk,
                commands=commands,
                background=background,
            )
            if not background:
                self._saver.finish()

    @contextmanager
    def _between_updates(self, phase: str, *, tell: bool = True) -> Iterator[None]:
        """Around an evaluation, a sampling or a save: report that it has begun and that it is over.
        Its time does not count as that of the next update. After an error the phase stays, so that
        the report of the failure names it.

        `tell`: False where it takes a moment only.
        """
        self._guard.phase = phase
        if tell:
            self._channel.report("phase", phase=phase)
        with self._sizer.outside_updates():
            yield
        self._stopwatch.begin()
        self._guard.phase = "unknown"
        if tell:
            self._channel.report("phase", phase="training")

    def _finish(self, control: Control) -> str:
        """Save the final state.

        If the disk is full, keep it in memory until there is space or a stop is requested.
        """
        with self._between_updates("save"):
            self._saver.finish()
        if self.unsaved is not None:
            self.save(end=True)
        while self.unsaved is not None and self._wait_for_disk:
            time.sleep(ROUND_SECONDS)
            # All ranks meet here every second, so none waits longer than a process group's time
            # limit.
            requests = control.at_boundary()
            for number, _ in requests.changes:
                control.answer(number, False, "training has finished; it waits for disk space to save its state", {})
            if self._ranks.any(requests.save or self._saver.retry_due(at_once=requests.stop or requests.leave)):
                self.save(end=True, commands=requests.commands)
            self._leaves(requests)
            if requests.stop and self.unsaved is not None:
                return "stopped"
        return "finished"
