"""Follows Hugging Face's Trainer, and what is built on it: a callback among its default ones.

Each Trainer makes a callback of its own from the class that `TrainerGrip.hook` adds. The callback
reads what the Trainer has computed for its logs; it reads no tensor. If it fails, it is off for the
rest of the process, and the optimizer hook counts on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from types import ModuleType
from typing import Any, Callable, Mapping

from . import memory
from .frameworks import Split, Training, Trainings, batch_of, number, report_checkpoint, samples_by_position, whole
from .hooks import learning_rate
from .knobs import STATE
from .orders import COMMANDS, Agreement, Orders

_EVENTS = ("train_begin", "step_begin", "step_end", "epoch_end", "log", "evaluate", "predict", "save", "train_end")
_LENGTHS = ("max_length", "max_seq_length")
"""What TRL's arguments call the sequence length."""
_OTHERS = (
    ("eval_batch", "per_device_eval_batch_size"),
    ("gradient_checkpointing", "gradient_checkpointing"),
    ("gradient_checkpointing", "activation_checkpointing"),
    ("optimizer", "optim"),
)
"""Further settings that a restart can change."""
_DEPTH, _MOST_ENTRIES = 2, 1000
"""How deep below its folder, and among how many entries, a checkpoint of the Trainer is looked for.
"""
_CLOCK_SECONDS = 2.0


def follow(module: ModuleType, trainings: Trainings) -> None:
    """Add the callback to the default ones of `transformers.trainer`."""
    defaults, base = getattr(module, "DEFAULT_CALLBACKS", None), getattr(module, "TrainerCallback", None)
    if isinstance(defaults, list) and isinstance(base, type) and not trainings.agent.reports_steps:
        version = getattr(sys.modules.get("transformers"), "__version__", "")
        defaults.append(_callback_class(base, trainings, ("transformers %s" % version).strip()))


def _callback_class(base: type, trainings: Trainings, library: str) -> type:
    """A class of callbacks that cannot fail. Of each Trainer's one, a `TrainerTraining` does the
    work."""

    def start(self: Any) -> None:
        self.memtop = TrainerTraining(trainings, library)

    # A Trainer may be pickled or copied (for Ray, for example): the copy has no agent.
    methods: dict[str, Any] = {"__init__": start, "__reduce__": lambda self: (base, ())}
    for name in _EVENTS:
        methods["on_" + name] = _guarded(trainings, name)
    return type("MemtopCallback", (base,), methods)


def _guarded(trainings: Trainings, name: str) -> Callable[..., None]:
    def event(self: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        if trainings.agent.reports_steps:
            return
        training: TrainerTraining = self.memtop
        if not trainings.off:
            try:
                getattr(training, name)(args, state, control, named)
            except Exception as error:  # noqa: BLE001 - the training must go on, whatever goes wrong here
                trainings.give_up(error)
        # Also after a failure: the other ranks wait for this one.
        with contextlib.suppress(Exception):
            training.obey(name, args, state, control)

    return event


class TrainerTraining(Training):
    """One Trainer: its methods are the events that it calls its callbacks for."""

    def __init__(self, trainings: Trainings, library: str) -> None:
        super().__init__(trainings)
        self._library = library
        self._held: dict[str, Any] | None = None
        """The report of the newest update, while the Trainer is about to log its loss."""
        self._sent: dict[str, Any] | None = None
        self._samples: Callable[[Any], int | None] = _not_known
        self._tokens = 0
        self._rate: float | None = None
        self._busy_since = 0.0
        """When whatever is not an update began."""
        self._limited = False
        """The program allows one checkpoint; until the end, memtop allows one more."""

    def train_begin(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        trainings, loader = self.trainings, named.get("train_dataloader")
        self.folder = os.path.realpath(args.output_dir)
        trainings.begin(self, state.global_step)
        self._held = None
        self.split = _split_of(args, loader)
        self._samples = _samples_of(loader, self.split)
        self._tokens = whole(getattr(state, "num_input_tokens_seen", None)) or 0
        ranks = whole(getattr(args, "world_size", None)) or 1
        self.orders = Orders(trainings.agent, Agreement(trainings.agent.folder, trainings.begun) if ranks > 1 else None)
        # Before the first report, which names what is offered.
        trainings.agent.offer_for_now(COMMANDS if ranks == 1 or _ranks_stay_together(args, ranks) else ())
        trainings.agent.report(
            "plan",
            updates=self.base + state.global_step,
            total_updates=self.base + state.max_steps if state.max_steps > 0 else None,
            samples_seen=self.seen(self._samples(state)),
            resumed=state.global_step > 0,
            device_uuid=memory.device_uuid(),
            framework=self._library,
            effective_batch=self.split.effective,
            knobs=_knobs_of(args, self.split),
        )
        trainings.refuse_to_begin_again(state.global_step)
        if trainings.stopping:
            control.should_training_stop = True
        self._continue()

    def step_begin(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._settle()
        # After the update the rate is that of the next one.
        self._rate = learning_rate(named.get("optimizer"))

    def step_end(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        now, update = time.monotonic(), self.base + state.global_step
        self._settle()
        self.trainings.reached(update)
        tokens = whole(getattr(state, "num_input_tokens_seen", None)) or 0
        self._held = dict(
            self.measured(update, now),
            logged=False,
            epoch=number(state.epoch),
            learning_rate=self._rate,
            samples_seen=self.seen(self._samples(state)),
            tokens=tokens - self._tokens if tokens > self._tokens else None,
        )
        self._tokens, self.since, self._busy_since = tokens, now, now
        self.orders.after(state.global_step)
        if not control.should_log:
            self._settle()

    def epoch_end(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._busy_since = time.monotonic()

    def log(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        logs, report = named.get("logs") or {}, self._held or self._sent
        if "loss" in logs and report is not None and report["update"] == self.base + state.global_step:
            report["logged"] = True
            report["loss"] = number(logs["loss"])
            report["gradient_norm"] = number(logs.get("grad_norm"))
            if report["learning_rate"] is None:
                report["learning_rate"] = number(logs.get("learning_rate"))
            # At the end of an epoch the update is reported already: once more, with its loss.
            self._held = report
        self._settle()
        self._busy_since = time.monotonic()

    def evaluate(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._settle()
        metrics = named.get("metrics") or {}
        loss = next((value for name, value in metrics.items() if name.endswith("loss")), None)
        seconds = next((value for name, value in metrics.items() if name.endswith("_runtime")), None)
        # A Trainer may only evaluate, without having trained.
        update = self.trainings.update
        self.trainings.agent.report("evaluation", update=update, loss=number(loss), seconds=number(seconds))
        self._continue()

    def predict(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._settle()
        self._continue()

    def save(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._settle()
        update = self.base + state.global_step
        path = os.path.abspath(os.path.join(args.output_dir, "checkpoint-%d" % state.global_step))
        if args.should_save:
            seconds = time.monotonic() - self._busy_since
            if not os.path.isdir(path):
                path = _saved_below(args.output_dir, os.path.basename(path), time.time() - seconds) or path
            report_checkpoint(self.trainings.agent, update, self.seen(self._samples(state)), path, seconds)
        self.orders.saved("saved at update %d: %s" % (update, path if os.path.isdir(path) else args.output_dir))
        self._continue()

    def train_end(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._settle()
        self.ended = True
        self.orders.refuse("the training has ended")
        stopped = self.trainings.stopping and state.global_step < state.max_steps
        self.trainings.agent.report("end", outcome="stopped" if stopped else "finished")
        self.trainings.end()

    def obey(self, event: str, args: Any, state: Any, control: Any) -> None:
        """Save, and then stop, as the supervisor has asked; also after a failure."""
        orders = self.orders
        if event == "step_end":
            if self.trainings.off:
                self.keep_agreement(state.global_step)
            self.trainings.stopping = self.trainings.stopping or orders.stops
            if orders.saves:
                # Evaluation may unset it (save_strategy "best"); then the next update sets it
                # again.
                control.should_save = True
        elif event == "save":
            orders.saves = False
            if orders.stops:
                control.should_training_stop = True
                if args.save_total_limit == 1:
                    # With this limit, the Trainer deletes it at its end if another one is the best.
                    self._limited, args.save_total_limit = True, 2
        elif event == "train_end" and self._limited:
            self._limited, args.save_total_limit = False, 1

    def _continue(self) -> None:
        """The next update begins now: what came before is no part of it."""
        self.trainings.watch.data_wait()
        self.since = self._busy_since = time.monotonic()

    def _settle(self) -> None:
        """Report the newest update, unless that is done."""
        report, self._held = self._held, None
        if report is not None:
            self._sent = report
            self.trainings.agent.report("step", **report)


def _saved_below(top: str, name: str, since: float) -> str | None:
    """The checkpoint of this name that the Trainer has just saved in a folder below its own, as a
    subclass may; None if there is none, or if there are several. Links are not followed."""
    found, left = [], _MOST_ENTRIES
    folders = [(os.path.abspath(top), 0)]
    while folders and left > 0:
        folder, depth = folders.pop(0)
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in itertools.islice(entries, left):
                left -= 1
                if not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.name == name:
                    # A file system may store times that are a little too early.
                    with contextlib.suppress(OSError):
                        saved = os.stat(os.path.join(entry.path, STATE)).st_mtime
                        found += [entry.path] if saved >= since - _CLOCK_SECONDS else []
                elif depth < _DEPTH and not entry.name.startswith("checkpoint-"):
                    folders.append((entry.path, depth + 1))
    return found[0] if len(found) == 1 else None


def _ranks_stay_together(args: Any, ranks: int) -> bool:
    """Whether no rank can be more than one update ahead, and all see one folder."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    # On a GPU a process may queue several updates. This filter reads each loss, which waits.
    waits = bool(getattr(args, "logging_nan_inf_filter", False)) or getattr(args.device, "type", "") == "cpu"
    return waits and local is not None and local == str(ranks)


def _split_of(args: Any, loader: Any) -> Split:
    """The split of this training. The loader knows the batch, also one that comes from a
    checkpoint."""
    ranks = whole(getattr(args, "world_size", None)) or 1
    batch = batch_of(loader, ranks)
    if batch is None:
        batch = whole(getattr(args, "train_batch_size", None))
    # With tensor or context parallelism several processes share their samples.
    shared = getattr(args, "parallelism_config", None) is not None
    return Split(batch, whole(getattr(args, "gradient_accumulation_steps", None)), None if shared else ranks)


def _knobs_of(args: Any, split: Split) -> dict[str, Any]:
    """The settings by memtop's names, with the program's own."""
    source = type(args).__name__
    devices = max(1, whole(getattr(args, "n_gpu", None)) or 1)
    batch = None if split.batch is None else split.batch // devices
    found = {
        "batch": {"value": batch, "name": "per_device_train_batch_size", "source": source},
        "accumulation": {"value": split.accumulation, "name": "gradient_accumulation_steps", "source": source},
    }
    for name in _LENGTHS:
        length = whole(getattr(args, name, None))
        if length is not None:
            found["seq_len"] = {"value": length, "name": name, "source": source}
            break
    for name, field in _OTHERS:
        value = getattr(args, field, None)
        # `optim` is an enumeration.
        value = getattr(value, "value", value)
        if isinstance(value, (bool, int, str)):
            found.setdefault(name, {"value": value, "name": field, "source": source})
    return found


def _samples_of(loader: Any, split: Split) -> Callable[[Any], int | None]:
    """How many samples the Trainer has used, from its position in the epoch.

    Not known if the data has no length.
    """
    try:
        rows, steps = len(loader.dataset), len(loader)
    except (AttributeError, TypeError):
        return _not_known
    used = samples_by_position(rows, steps, split)

    def seen(state: Any) -> int | None:
        epoch = number(state.epoch)
        if epoch is None:
            return None
        epochs = int(epoch + 1e-9)
        return used(epochs, round((epoch - epochs) * steps))

    return seen


def _not_known(state: Any) -> int | None:
    return None
