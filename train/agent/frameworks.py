"""What following the trainer of any framework needs: one count of updates in a process, and what
its reports have in common.

`trainers.py` follows Hugging Face's Trainer, `lightning.py` Lightning's, and `accelerators.py` a
loop of the program's own that uses accelerate.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, NamedTuple, Protocol, Sequence

from . import hooks, memory
from .orders import Commander, Orders


class Reporter(hooks.Reporter, Commander, Protocol):
    """What the followers need of the agent."""

    @property
    def folder(self) -> str | None: ...

    @property
    def reports_steps(self) -> bool: ...

    @property
    def resumes_after(self) -> int | None: ...

    def flush(self) -> None: ...

    def offer_for_now(self, names: Sequence[str]) -> None: ...


class Split(NamedTuple):
    """How an update's samples are divided; None where that is not known."""

    batch: int | None
    accumulation: int | None
    ranks: int | None
    """Processes that train on different samples."""

    @property
    def effective(self) -> int | None:
        known = [value for value in self if value is not None]
        return known[0] * known[1] * known[2] if len(known) == 3 else None


class Trainings:
    """The trainings of this process by a framework's trainer, one after another."""

    def __init__(self, agent: Reporter, watch: hooks.StepWatch) -> None:
        self.agent = agent
        self.watch = watch
        self.off = False
        """Something in memtop has failed: report no more."""
        self.stopping = False
        """The supervisor has asked for a stop: later trainings of this process end at once."""
        self.begun = 0
        """How many trainings have begun."""
        self.update = 0
        """The newest update of this process, by any trainer."""
        self.samples: int | None = 0
        """The samples that this process has used so far; None if not known."""
        self._present: Training | None = None

    def begin(self, training: Training, start: int) -> None:
        """Begin its count where the training before it in this process has ended.

        A trainer that resumes goes on with the count of its own training, or of the one before it
        that saved into the same folder. `start`: the trainer's number of updates now.
        """
        self.agent.adopt()
        self.begun += 1
        before = self._present
        is_same = training is before and (start > 0 or not training.ended)
        if before is not None and before.folder is not None and before.folder == training.folder and start > 0:
            training.base, training.samples_before = before.base, before.samples_before
        elif not is_same:
            training.base, training.samples_before = self.update, self.samples
        training.ended = False
        self._present = training
        self.reached(training.base + start)

    def refuse_to_begin_again(self, update: int) -> None:
        """End the program if memtop has started it again to resume, and it does not.

        It would train from zero, and overwrite its checkpoints.
        """
        wanted = self.agent.resumes_after
        if self.begun != 1 or wanted is None or update >= wanted:
            return
        words = "the program did not resume: it begins after update %d instead of %d, so it was ended before it trained"
        message = words % (update, wanted)
        self.agent.report("end", outcome="failed", message=message)
        self.agent.flush()
        raise SystemExit("memtop: " + message)

    def reached(self, update: int) -> None:
        """This update is done; the optimizer hook is silent."""
        self.update = update
        self.watch.follow(update)

    def end(self) -> None:
        """The optimizer hook reports the steps of whatever the program does now."""
        self.agent.offer_for_now(())
        self.watch.resume()

    def give_up(self, error: Exception) -> None:
        """Report no more; the optimizer hook counts on."""
        self.off = True
        with contextlib.suppress(Exception):
            self.agent.adopt()
            message = "no further reports by the program's trainer, so loss and checkpoints are not known: %r" % (error,)
            self.agent.report("warning", message=message)
            self.agent.offer_for_now(())
            if self._present is not None:
                self._present.orders.refuse("memtop's callback in the program has failed")
        with contextlib.suppress(Exception):
            self.watch.resume()


class Training:
    """The training by one trainer of a framework."""

    def __init__(self, trainings: Trainings) -> None:
        self.base = 0
        """The updates that earlier trainings of this process have done."""
        self.samples_before: int | None = 0
        self.folder: str | None = None
        """Where it saves; None if that is not known."""
        self.ended = False
        self.trainings = trainings
        self.split = Split(None, None, None)
        self.orders = Orders(trainings.agent)
        self.since = 0.0
        """When the present update began."""

    def keep_agreement(self, update: int) -> None:
        """After an update of which nothing is reported any more: save if other ranks do."""
        with contextlib.suppress(Exception):
            self.orders.agreed(update)

    def seen(self, here: int | None) -> int | None:
        """The samples of this process, if this training has used so many."""
        before = self.samples_before
        self.trainings.samples = None if here is None or before is None else before + here
        return self.trainings.samples

    def measured(self, update: int, now: float) -> dict[str, Any]:
        """What a report of an update contains for every framework."""
        agent = self.trainings.agent
        return dict(
            agent.readings(),
            update=update,
            batch=self.split.batch,
            accumulation=self.split.accumulation,
            step_seconds=now - self.since,
            data_wait_seconds=self.trainings.watch.data_wait(),
            dropped=agent.dropped,
            device_uuid=memory.device_uuid(),
        )


def report_checkpoint(agent: Reporter, update: int | None, samples: int | None, path: str, seconds: float) -> None:
    """The program has saved; nothing is known about the path if nothing is there."""
    found = path if os.path.exists(path) else None
    agent.report(
        "checkpoint",
        updates=update,
        samples_seen=samples,
        path=found,
        size_bytes=None if found is None else size(found),
        seconds=seconds,
        pause_seconds=seconds,
    )


def batch_of(loader: Any, ranks: int) -> int | None:
    """The samples of one process in one batch of a torch or accelerate data loader."""
    sampler = getattr(loader, "batch_sampler", None)
    batch = whole(getattr(sampler, "batch_size", None))
    # accelerate may split each batch among the ranks.
    return batch // ranks if batch is not None and getattr(sampler, "split_batches", False) else batch


def samples_by_position(rows: int, steps: int, split: Split) -> Callable[[int, int], int | None]:
    """A function: the samples used after so many whole epochs, and batches of the present one.

    `rows`: samples of the data set; `steps`: batches of an epoch.
    """
    batch, ranks = split.batch, split.ranks
    if batch is None or ranks is None or not steps:
        return lambda epochs, batches: None
    at_once = batch * ranks
    of_epoch = min(rows, steps * at_once)
    return lambda epochs, batches: epochs * of_epoch + min(of_epoch, batches * at_once)


def whole(value: Any) -> int | None:
    """A whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """A number that needs no reading from a device."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def number_on_cpu(value: Any) -> float | None:
    """A number, also in a tensor on the CPU."""
    if getattr(getattr(value, "device", None), "type", "") == "cpu" and value.numel() == 1:
        return float(value.item())
    return number(value)


def size(path: str) -> int | None:
    """The bytes of a file, or of all files in a folder; None if they cannot be read."""
    try:
        if os.path.isfile(path):
            return os.path.getsize(path)
        return sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(path) for name in names)
    except OSError:
        return None
