"""Follows Lightning's Trainer: a callback that is added when `fit` begins.

Both packages are followed, `lightning.pytorch` and `pytorch_lightning`. `Trainer.fit` and
`Trainer.save_checkpoint` are wrapped: the first adds the callback, the second tells where a
checkpoint lies. If the callback fails, it is off for the rest of the process, and the optimizer
hook counts on.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import math
import os
import sys
import time
from types import ModuleType
from typing import Any, Callable

from . import memory
from .frameworks import Split, Training, Trainings, batch_of, number_on_cpu, report_checkpoint, samples_by_position, whole
from .hooks import learning_rate
from .orders import COMMANDS, Agreement, Orders

_EVENTS = (
    "train_start",
    "train_batch_start",
    "train_batch_end",
    "validation_start",
    "validation_end",
    "train_end",
    "exception",
)


def follow(module: ModuleType, trainings: Trainings) -> None:
    """Follow the class `Trainer` of this module."""
    root = module.__name__[: -len(".trainer.trainer")]
    trainer: Any = getattr(module, "Trainer", None)
    base = getattr(module, "Callback", None)
    if not isinstance(base, type) or trainings.agent.reports_steps:
        return
    version = getattr(sys.modules.get(root), "__version__", None) or getattr(sys.modules.get("lightning"), "__version__", "")
    callbacks = Callbacks(base, trainings, ("lightning %s" % version).strip())
    trainer.fit = callbacks.added_by(trainer.fit)
    trainer.save_checkpoint = callbacks.told_by(trainer.save_checkpoint)


class Callbacks:
    """The callbacks of each Trainer. They cannot fail; its `LightningTraining` does the work.

    The first in the list reports an update before other callbacks save its state. The last saves if
    the supervisor asks: then all others have seen the update.
    """

    def __init__(self, base: type, trainings: Trainings, library: str) -> None:
        self._trainings = trainings
        self._library = library
        # A Trainer may be pickled or copied: the copy has no agent.
        shared: dict[str, Any] = {"__reduce__": lambda self: (base, ())}
        events = {"on_" + name: self._guarded(name) for name in _EVENTS}
        self._first = type("MemtopCallback", (base,), dict(shared, **events))
        self._last = type("MemtopOrders", (base,), dict(shared, on_train_batch_end=self._obeying()))

    def added_by(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """`Trainer.fit` that first adds the callbacks."""

        @functools.wraps(fit)
        def added(trainer: Any, *given: Any, **named: Any) -> Any:
            if not self._trainings.off and not self._trainings.agent.reports_steps:
                try:
                    self.add(trainer)
                except Exception as error:  # noqa: BLE001 - the training must go on, whatever goes wrong here
                    self._trainings.give_up(error)
            result = fit(trainer, *given, **named)
            with contextlib.suppress(Exception):
                training = self._of(trainer)
                if training is not None:
                    training.make_newest()
            return result

        return added

    def add(self, trainer: Any) -> None:
        """Add both callbacks, unless this Trainer has them."""
        if self._of(trainer) is None:
            first: Any = self._first()
            last: Any = self._last()
            first.memtop = last.memtop = LightningTraining(self._trainings, self._library)
            trainer.callbacks.insert(0, first)
            trainer.callbacks.append(last)

    def _of(self, trainer: Any) -> LightningTraining | None:
        found: Any = next((one for one in trainer.callbacks if isinstance(one, self._first)), None)
        return None if found is None else found.memtop

    def told_by(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """`Trainer.save_checkpoint` that reports the checkpoint afterwards."""

        @functools.wraps(save)
        def told(trainer: Any, filepath: Any, weights_only: Any = None, *given: Any, **named: Any) -> Any:
            began = time.monotonic()
            result = save(trainer, filepath, weights_only, *given, **named)
            if not self._trainings.off and not self._trainings.agent.reports_steps:
                try:
                    training = self._of(trainer)
                    # Without the optimizer's state, training cannot continue from it.
                    if training is not None and not weights_only:
                        training.saved(trainer, filepath, time.monotonic() - began)
                except Exception as error:  # noqa: BLE001 - the training must go on, whatever goes wrong here
                    self._trainings.give_up(error)
            return result

        return told

    def _guarded(self, name: str) -> Callable[..., None]:
        trainings = self._trainings

        def event(self: Any, trainer: Any, module: Any, *others: Any, **named: Any) -> None:
            if not trainings.off and not trainings.agent.reports_steps:
                try:
                    getattr(self.memtop, name)(trainer, *others)
                except Exception as error:  # noqa: BLE001 - the training must go on, whatever goes wrong here
                    trainings.give_up(error)

        return event

    def _obeying(self) -> Callable[..., None]:
        trainings = self._trainings

        def event(self: Any, trainer: Any, module: Any, *others: Any, **named: Any) -> None:
            if not trainings.agent.reports_steps:
                # Also after a failure: the other ranks wait for this one.
                with contextlib.suppress(Exception):
                    self.memtop.obey(trainer)

        return event


class LightningTraining(Training):
    """One Trainer: its methods are the events that it calls its callbacks for."""

    def __init__(self, trainings: Trainings, library: str) -> None:
        super().__init__(trainings)
        self._library = library
        self._done = 0
        """The Trainer's count of updates."""
        self._obeyed = 0
        self._losses: list[float | None] = []
        """Of the present update's micro-batches; None for what would have to be read from a
        GPU."""
        self._rate: float | None = None
        self._used: Callable[[int, int], int | None] = _not_known
        self._batches = 0
        """Of the present epoch."""
        self._validates_since = 0.0
        self._stopped_with: str | None = None
        """The checkpoint that was saved before a stop."""

    def train_start(self, trainer: Any) -> None:
        trainings, loader = self.trainings, trainer.train_dataloader
        self._done = self._obeyed = trainer.global_step
        trainings.begin(self, self._done)
        self._losses, self._batches = [], 0
        self.split = _split_of(trainer, loader)
        self._used = _samples_of(trainer, loader, self.split)
        ranks = trainer.world_size
        self.orders = Orders(trainings.agent, Agreement(trainings.agent.folder, trainings.begun) if ranks > 1 else None)
        # Before the first report, which names what is offered. On a GPU a rank may be several
        # updates ahead, so that the ranks could not agree.
        together = trainer.num_nodes == 1 and trainer.strategy.root_device.type == "cpu"
        trainings.agent.offer_for_now(COMMANDS if ranks == 1 or together else ())
        total = _total(trainer)
        trainings.agent.report(
            "plan",
            updates=self.base + self._done,
            total_updates=None if total is None else self.base + total,
            samples_seen=self._samples(trainer) if self._done == 0 else None,
            resumed=self._done > 0,
            device_uuid=memory.device_uuid(),
            framework=self._library,
            effective_batch=self.split.effective,
            knobs={
                "batch": {"value": self.split.batch, "name": "batch_size", "source": "DataLoader"},
                "accumulation": {"value": self.split.accumulation, "name": "accumulate_grad_batches", "source": "Trainer"},
            },
        )
        if trainings.stopping:
            trainer.should_stop = True
        self._continue()

    def train_batch_start(self, trainer: Any, *_: Any) -> None:
        # After the update the rate is that of the next one.
        self._rate = learning_rate(trainer.optimizers[0]) if trainer.optimizers else None

    def train_batch_end(self, trainer: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        now = time.monotonic()
        self._batches = batch_idx + 1
        done = trainer.global_step
        self._losses.append(_loss_of(outputs, read=_is_read_anyway(trainer)))
        if done <= self._done:
            return
        self._done = done
        update = self.base + done
        self.trainings.reached(update)
        losses, self._losses = self._losses, []
        loss = self._mean(losses, trainer)
        self.trainings.agent.report(
            "step",
            **self.measured(update, now),
            logged=loss is not None,
            loss=loss,
            learning_rate=self._rate,
            epoch=_epoch(trainer, self._batches),
            samples_seen=self._samples(trainer),
        )
        self.since = now

    def _mean(self, losses: list[float | None], trainer: Any) -> float | None:
        """The mean of those that are known."""
        known = [loss for loss in losses if loss is not None]
        # Lightning has divided them, unless the program does its updates itself.
        divided = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
        return sum(known) / len(known) * divided if known else None

    def validation_start(self, trainer: Any) -> None:
        self._validates_since = time.monotonic()

    def validation_end(self, trainer: Any) -> None:
        if not trainer.sanity_checking:
            seconds = time.monotonic() - self._validates_since
            # With several ranks, to read the metrics may be an exchange.
            metrics = trainer.callback_metrics if trainer.world_size == 1 else {}
            names = (name for name in metrics if "loss" in name and not name.startswith("train"))
            loss = next((number_on_cpu(metrics[name]) for name in names), None)
            self.trainings.agent.report("evaluation", update=self.trainings.update, loss=loss, seconds=seconds)
        self._continue()

    def saved(self, trainer: Any, filepath: Any, seconds: float) -> None:
        # Once it stops, Lightning ends the epoch, and saves as if this had been the whole epoch.
        if trainer.is_global_zero and not self.trainings.stopping:
            path = os.path.abspath(os.fspath(filepath))
            update = self.base + trainer.global_step
            report_checkpoint(self.trainings.agent, update, self._samples(trainer), path, seconds)
        self._continue()

    def train_end(self, trainer: Any) -> None:
        self.ended = True
        self.orders.refuse("the training has ended")
        self.trainings.agent.report("end", outcome="stopped" if self.trainings.stopping else "finished")
        self.trainings.end()

    def exception(self, trainer: Any, *_: Any) -> None:
        self.orders.refuse("the training has ended with an error")
        self.trainings.end()

    def obey(self, trainer: Any) -> None:
        """Save, and then stop, as the supervisor has asked; also after a failure."""
        orders, done = self.orders, trainer.global_step
        if done <= self._obeyed:
            return
        self._obeyed = done
        if self.trainings.off:
            self.keep_agreement(done)
        else:
            orders.after(done)
        if not orders.saves:
            return
        path = os.path.join(_folder(trainer), "memtop-step=%d.ckpt" % done)
        try:
            trainer.save_checkpoint(path)
        except Exception as error:  # noqa: BLE001 - the training must go on, also if the disk is full
            if trainer.world_size > 1:
                # The other ranks wait here.
                trainer.strategy.barrier("Trainer.save_checkpoint")
            orders.refuse("%s: cannot be saved: %s" % (path, error))
            return
        orders.saved("saved at update %d: %s" % (self.base + done, path))
        if orders.stops:
            self._stopped_with = path
            self.trainings.stopping = trainer.should_stop = True

    def make_newest(self) -> None:
        """Whoever looks for the newest checkpoint by its time finds the one that continues in the
        middle of the epoch."""
        if self._stopped_with is not None:
            # The clock of the file system may give both files the same time.
            now = time.time_ns()
            inside = glob.glob(os.path.join(glob.escape(self._stopped_with), "*"))  # of a folder
            for path in (self._stopped_with, *inside):
                os.utime(path, ns=(now, now))

    def _samples(self, trainer: Any) -> int | None:
        # At the end of an epoch its number is still the same, and the batches are all.
        return self.seen(self._used(trainer.current_epoch, self._batches))

    def _continue(self) -> None:
        """The next update begins now: what came before is no part of it."""
        self.trainings.watch.data_wait()
        self.since = time.monotonic()


def _not_known(epochs: int, batches: int) -> int | None:
    return None


def _split_of(trainer: Any, loader: Any) -> Split:
    batch = batch_of(loader, trainer.world_size)
    if batch is None:
        batch = whole(getattr(loader, "batch_size", None))
    ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
    # A program that does its updates itself also accumulates itself.
    accumulates = trainer.lightning_module.automatic_optimization
    return Split(batch, whole(trainer.accumulate_grad_batches) if accumulates else None, whole(ranks))


def _samples_of(trainer: Any, loader: Any, split: Split) -> Callable[[int, int], int | None]:
    steps = trainer.num_training_batches
    try:
        rows = len(loader.dataset)
    except (AttributeError, TypeError):
        return _not_known
    return samples_by_position(rows, int(steps), split) if math.isfinite(steps) else _not_known


def _total(trainer: Any) -> int | None:
    """How many updates the training does, if nothing ends it before."""
    if not trainer.lightning_module.automatic_optimization:
        return trainer.max_steps if trainer.max_steps > 0 else None
    total = None
    # It is not known with some schedules of the accumulation.
    with contextlib.suppress(Exception):
        total = trainer.estimated_stepping_batches
    return int(total) if total is not None and math.isfinite(total) and total >= 0 else None


def _epoch(trainer: Any, batches: int) -> float | None:
    steps = trainer.num_training_batches
    return trainer.current_epoch + batches / steps if steps and math.isfinite(steps) else None


def _is_read_anyway(trainer: Any) -> bool:
    """Whether the Trainer reads its metrics from the GPU after this batch."""
    return bool(trainer.loggers) and trainer.log_every_n_steps > 0 and trainer.global_step % trainer.log_every_n_steps == 0


def _loss_of(outputs: Any, *, read: bool) -> float | None:
    """The loss of a micro-batch. `read`: also from a GPU."""
    value = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if value is None:
        return None
    if read and getattr(value, "is_cuda", False):
        return float(value.detach())
    return number_on_cpu(value)


def _folder(trainer: Any) -> str:
    """Where the program saves its checkpoints."""
    found = getattr(trainer.checkpoint_callback, "dirpath", None)
    return os.path.abspath(found or os.path.join(trainer.default_root_dir, "checkpoints"))
