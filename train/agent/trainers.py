"""Follows Hugging Face's Trainer, and what is built on it: a callback among its default ones.

Each Trainer makes a callback of its own from the class that `TrainerGrip.hook` adds. The callback
reads what the Trainer has computed for its logs; it reads no tensor. If it fails, the grip is off
for the rest of the process, and the optimizer hook counts on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from types import ModuleType
from typing import Any, Callable, Mapping, NamedTuple, Protocol, Sequence

from . import memory
from .hooks import StepWatch, learning_rate

COMMANDS = ("checkpoint", "stop")
_EVENTS = ("train_begin", "step_begin", "step_end", "epoch_end", "log", "evaluate", "predict", "save", "train_end")
_LENGTHS = ("max_length", "max_seq_length")
"""What TRL's arguments call the sequence length."""
_AHEAD = 2
"""In how many updates several ranks save together; see `Agreement`."""


class Reporter(Protocol):
    """What the grip needs of the agent."""

    @property
    def dropped(self) -> int: ...

    @property
    def folder(self) -> str | None: ...

    @property
    def reports_steps(self) -> bool: ...

    @property
    def resumes_after(self) -> int | None: ...

    def adopt(self) -> None: ...

    def readings(self) -> dict[str, int | None]: ...

    def report(self, kind: str, **values: Any) -> None: ...

    def offer_for_now(self, names: Sequence[str]) -> None: ...

    def flush(self) -> None: ...

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]: ...

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None: ...


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


class TrainerGrip:
    """The trainings by any Trainer of this process, one after another."""

    def __init__(self, agent: Reporter, watch: StepWatch) -> None:
        self.agent = agent
        self.watch = watch
        self.library = "transformers"
        self.off = False
        self.stopping = False
        """The supervisor has asked for a stop: later trainings of this process end at once."""
        self.begun = 0
        """How many trainings have begun."""
        self.update = 0
        """The newest update of this process, by any Trainer."""
        self.samples: int | None = 0
        """The samples that this process has used so far; None if not known."""
        self._present: Training | None = None

    def hook(self, module: ModuleType) -> None:
        """Add the callback to the default ones of `transformers.trainer`."""
        defaults, base = getattr(module, "DEFAULT_CALLBACKS", None), getattr(module, "TrainerCallback", None)
        if isinstance(defaults, list) and isinstance(base, type) and not self.agent.reports_steps:
            version = getattr(sys.modules.get("transformers"), "__version__", "")
            self.library = ("transformers %s" % version).strip()
            defaults.append(callback_class(base, self))

    def begin(self, training: Training, start: int) -> None:
        """Begin its count where the training before it in this process has ended.

        A Trainer that resumes its own training goes on with its count. `start`: the Trainer's
        number of updates now.
        """
        self.agent.adopt()
        self.begun += 1
        is_same = training is self._present and (start > 0 or not training.ended)
        if not is_same:
            training.base, training.samples_before = self.update, self.samples
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
            message = "no further reports by transformers' Trainer, so loss and checkpoints are not known: %r" % (error,)
            self.agent.report("warning", message=message)
            self.agent.offer_for_now(())
            for number, _, _ in self.agent.take_commands():
                self.agent.answer(number, False, "the callback in the program has failed")
            if self._present is not None:
                self._present.refuse("the callback in the program has failed")
        with contextlib.suppress(Exception):
            self.watch.resume()


def callback_class(base: type, grip: TrainerGrip) -> type:
    """A class of callbacks that cannot fail. Of each Trainer's one, a `Training` does the work."""

    def start(self: Any) -> None:
        self.memtop = Training(grip)

    # A Trainer may be pickled or copied (for Ray, for example): the copy has no agent.
    methods: dict[str, Any] = {"__init__": start, "__reduce__": lambda self: (base, ())}
    for name in _EVENTS:
        methods["on_" + name] = _guarded(grip, name)
    return type("MemtopCallback", (base,), methods)


def _guarded(grip: TrainerGrip, name: str) -> Callable[..., None]:
    def event(self: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        if not grip.off and not grip.agent.reports_steps:
            try:
                getattr(self.memtop, name)(args, state, control, named)
            except Exception as error:  # noqa: BLE001 - the training must go on, whatever goes wrong here
                grip.give_up(error)

    return event


class Training:
    """One Trainer: its methods are the events that it calls its callbacks for."""

    def __init__(self, grip: TrainerGrip) -> None:
        self.base = 0
        """The updates that earlier trainings of this process have done."""
        self.samples_before: int | None = 0
        self.ended = False
        self._grip = grip
        self._split = Split(None, None, None)
        self._agreement: Agreement | None = None
        self._asked: list[tuple[int, str]] = []
        self._saves = False
        """The next save is one that the supervisor has asked for."""
        self._held: dict[str, Any] | None = None
        """The report of the newest update, while the Trainer is about to log its loss."""
        self._sent: dict[str, Any] | None = None
        self._samples: Callable[[Any], int | None] = _not_known
        self._tokens = 0
        self._rate: float | None = None
        self._since = self._busy_since = 0.0
        """When the present update began; when whatever is not an update began."""

    def train_begin(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        grip, loader = self._grip, named.get("train_dataloader")
        grip.begin(self, state.global_step)
        self.ended, self._held, self._saves = False, None, False
        self._split = split_of(args, loader)
        self._samples = samples_of(loader, self._split)
        self._tokens = _whole(getattr(state, "num_input_tokens_seen", None)) or 0
        ranks = _whole(getattr(args, "world_size", None)) or 1
        self._agreement = Agreement(grip.agent.folder, grip.begun) if ranks > 1 else None
        # Before the first report, which names what is offered.
        grip.agent.offer_for_now(COMMANDS if ranks == 1 or _ranks_stay_together(args, ranks) else ())
        grip.agent.report(
            "plan",
            updates=self.base + state.global_step,
            total_updates=self.base + state.max_steps if state.max_steps > 0 else None,
            samples_seen=self._seen(state),
            resumed=state.global_step > 0,
            device_uuid=memory.device_uuid(),
            framework=grip.library,
            effective_batch=self._split.effective,
            knobs=knobs_of(args, self._split),
        )
        grip.refuse_to_begin_again(state.global_step)
        if grip.stopping:
            control.should_training_stop = True
        self._continue()

    def step_begin(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._settle()
        # After the update the rate is that of the next one.
        self._rate = learning_rate(named.get("optimizer"))

    def step_end(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        agent, now, update = self._grip.agent, time.monotonic(), self.base + state.global_step
        self._settle()
        self._grip.reached(update)
        tokens = _whole(getattr(state, "num_input_tokens_seen", None)) or 0
        self._held = dict(
            agent.readings(),
            update=update,
            logged=False,
            epoch=_number(state.epoch),
            learning_rate=self._rate,
            batch=self._split.batch,
            accumulation=self._split.accumulation,
            samples_seen=self._seen(state),
            tokens=tokens - self._tokens if tokens > self._tokens else None,
            step_seconds=now - self._since,
            data_wait_seconds=self._grip.watch.data_wait(),
            dropped=agent.dropped,
            device_uuid=memory.device_uuid(),
        )
        self._tokens, self._since, self._busy_since = tokens, now, now
        self._obey(state, control)
        if not control.should_log:
            self._settle()

    def epoch_end(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._busy_since = time.monotonic()

    def log(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        logs, report = named.get("logs") or {}, self._held or self._sent
        if "loss" in logs and report is not None and report["update"] == self.base + state.global_step:
            report["logged"] = True
            report["loss"] = _number(logs["loss"])
            report["gradient_norm"] = _number(logs.get("grad_norm"))
            if report["learning_rate"] is None:
                report["learning_rate"] = _number(logs.get("learning_rate"))
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
        update = self._grip.update
        self._grip.agent.report("evaluation", update=update, loss=_number(loss), seconds=_number(seconds))
        self._continue()

    def predict(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._settle()
        self._continue()

    def save(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._settle()
        seconds, update = time.monotonic() - self._busy_since, self.base + state.global_step
        path = os.path.abspath(os.path.join(args.output_dir, "checkpoint-%d" % state.global_step))
        found = path if os.path.isdir(path) else None
        if args.should_save:
            self._grip.agent.report(
                "checkpoint",
                updates=update,
                samples_seen=self._seen(state),
                path=found,
                size_bytes=None if found is None else _size(found),
                seconds=seconds,
                pause_seconds=seconds,
            )
        self._saves = False
        asked, self._asked = self._asked, []
        for number, _ in asked:
            self._grip.agent.answer(number, True, "saved at update %d: %s" % (update, found or args.output_dir))
        if self._grip.stopping:
            control.should_training_stop = True
        self._continue()

    def train_end(self, args: Any, state: Any, control: Any, named: Mapping[str, Any]) -> None:
        self._settle()
        self.ended = True
        self._asked += [(number, name) for number, name, _ in self._grip.agent.take_commands()]
        self.refuse("the training has ended")
        stopped = self._grip.stopping and state.global_step < state.max_steps
        self._grip.agent.report("end", outcome="stopped" if stopped else "finished")
        self._grip.end()

    def refuse(self, why: str) -> None:
        """Answer what is asked and cannot be done any more."""
        asked, self._asked = self._asked, []
        for number, _ in asked:
            self._grip.agent.answer(number, False, why)

    def _continue(self) -> None:
        """The next update begins now: what came before is no part of it."""
        self._grip.watch.data_wait()
        self._since = self._busy_since = time.monotonic()

    def _seen(self, state: Any) -> int | None:
        here, before = self._samples(state), self.samples_before
        self._grip.samples = None if here is None or before is None else before + here
        return self._grip.samples

    def _settle(self) -> None:
        """Report the newest update, unless that is done."""
        report, self._held = self._held, None
        if report is not None:
            self._sent = report
            self._grip.agent.report("step", **report)

    def _obey(self, state: Any, control: Any) -> None:
        """Save, and then stop, as the supervisor has asked."""
        agreement, update = self._agreement, state.global_step
        agreed = None if agreement is None else agreement.at(update)
        waits = agreement is not None and agreement.is_open(update)
        asked = [] if waits else [(number, name) for number, name, _ in self._grip.agent.take_commands()]
        self._asked += asked
        if agreement is not None:
            if asked:
                agreement.propose(update, any(name == "stop" for _, name in asked))
            self._saves = self._saves or agreed is not None
            self._grip.stopping = self._grip.stopping or agreed == "stop"
        else:
            self._saves = self._saves or bool(asked)
            self._grip.stopping = self._grip.stopping or any(name == "stop" for _, name in asked)
        if self._saves:
            # Evaluation may unset it (save_strategy "best"); then the next update sets it again.
            control.should_save = True


class Agreement:
    """The update after which all ranks save, in a file of the attempt's folder.

    Only the first rank is asked. If it saved alone, the other ranks would wait for it in their next
    exchange. It writes the update after the next one. No rank can end that update without the
    first rank's part of the next one, and the first rank begins that only after it has written the
    file. So all ranks read it in time, and no rank waits. The file is not replaced before all ranks
    have begun the update after that.
    """

    def __init__(self, folder: str | None, training: int) -> None:
        self._path = os.path.join(folder or "", "agreed.json")
        self._training = training
        self._proposed: int | None = None
        self._stamp: tuple[int, int] | None = None
        self._update: int | None = None
        self._what = ""

    def is_open(self, update: int) -> bool:
        """Whether some rank may still have to read what the first rank has written."""
        return self._proposed is not None and update <= self._proposed

    def propose(self, update: int, stop: bool) -> None:
        """After this update of the first rank."""
        self._proposed = update + _AHEAD
        content = {"training": self._training, "update": self._proposed, "what": "stop" if stop else "checkpoint"}
        with open(self._path + ".new", "w") as file:
            json.dump(content, file)
        os.replace(self._path + ".new", self._path)

    def at(self, update: int) -> str | None:
        """What all ranks do after this update: "checkpoint", "stop" or None."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            with open(self._path) as file:
                content = json.load(file)
            self._stamp = stamp
            self._update = content["update"] if content["training"] == self._training else None
            self._what = content["what"]
        return self._what if update == self._update else None


def _ranks_stay_together(args: Any, ranks: int) -> bool:
    """Whether no rank can be more than one update ahead, and all see one folder."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    # On a GPU a process may queue several updates. This filter reads each loss, which waits.
    waits = bool(getattr(args, "logging_nan_inf_filter", False)) or getattr(args.device, "type", "") == "cpu"
    return waits and local is not None and local == str(ranks)


def split_of(args: Any, loader: Any) -> Split:
    """The split of this training. The loader knows the batch, also one that comes from a
    checkpoint."""
    ranks = _whole(getattr(args, "world_size", None)) or 1
    sampler = getattr(loader, "batch_sampler", None)
    batch = _whole(getattr(sampler, "batch_size", None))
    if batch is None:
        batch = _whole(getattr(args, "train_batch_size", None))
    elif getattr(sampler, "split_batches", False):
        batch //= ranks
    # With tensor or context parallelism several processes share their samples.
    shared = getattr(args, "parallelism_config", None) is not None
    return Split(batch, _whole(getattr(args, "gradient_accumulation_steps", None)), None if shared else ranks)


def knobs_of(args: Any, split: Split) -> dict[str, Any]:
    """The settings by memtop's names, with the program's own."""
    source = type(args).__name__
    devices = max(1, _whole(getattr(args, "n_gpu", None)) or 1)
    batch = None if split.batch is None else split.batch // devices
    found = {
        "batch": {"value": batch, "name": "per_device_train_batch_size", "source": source},
        "accumulation": {"value": split.accumulation, "name": "gradient_accumulation_steps", "source": source},
    }
    for name in _LENGTHS:
        length = _whole(getattr(args, name, None))
        if length is not None:
            found["seq_len"] = {"value": length, "name": name, "source": source}
            break
    return found


def samples_of(loader: Any, split: Split) -> Callable[[Any], int | None]:
    """How many samples the Trainer has used, from its position in the epoch.

    Not known if the data has no length.
    """
    try:
        rows, steps = len(loader.dataset), len(loader)
    except (AttributeError, TypeError):
        return _not_known
    if split.batch is None or split.ranks is None or not steps:
        return _not_known
    at_once = split.batch * split.ranks
    of_epoch = min(rows, steps * at_once)

    def seen(state: Any) -> int | None:
        epoch = _number(state.epoch)
        if epoch is None:
            return None
        whole = int(epoch + 1e-9)
        return whole * of_epoch + min(of_epoch, round((epoch - whole) * steps) * at_once)

    return seen


def _not_known(state: Any) -> int | None:
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    """A number that needs no reading from a device."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _size(folder: str) -> int:
    """The bytes of all files in it."""
    return sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(folder) for name in names)
