"""What the trainer reports (to the supervisor, the log and accelerate's trackers), and what it is
requested to do (by commands and signals): save, stop, or change a setting."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec
import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from memtop.presets import Settings, SettingsError
from memtop.presets.checks import check
from memtop.presets.edits import assign
from memtop.presets.fields import LIVE, differing, not_live
from memtop.presets.schema import ranks_text
from memtop.train import BadInputError, first_line
from memtop.train.exchange import Ranks

RECORD_EVERY = 200
"""Updates between two memory records."""
_GIB = 1024**3
_PARTS = ("data_wait_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
# A tracker works with the module of its name. This one works with either.
_MODULES = {"tensorboard": ("tensorboard", "tensorboardX")}
_NUMBERS = ("loss", "learning_rate", "gradient_norm", "samples_seen", "epoch")


class Channel(Protocol):
    """Reports to the supervisor, and its commands.

    `train/agent/__init__.py` lists the reports and their fields.
    """

    def offer(self, *names: str) -> None: ...

    def report(self, kind: str, **values: Any) -> None: ...

    def oom(self, error: BaseException, **values: Any) -> None:
        """Report an allocation failure, once per error.

        The error is not kept: its frames hold tensors.
        """

    def flush(self) -> None: ...

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]: ...

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None: ...

    def readings(self) -> dict[str, int | None]: ...

    def dropped(self) -> int: ...


class Unsupervised:
    """The channel of a trainer without a supervisor: reports go nowhere, and no commands come."""

    def offer(self, *names: str) -> None:
        """Do nothing: no supervisor sends commands."""

    def report(self, kind: str, **values: Any) -> None:
        """Do nothing: no supervisor reads reports."""

    def oom(self, error: BaseException, **values: Any) -> None:
        """Do nothing: no supervisor reads reports."""

    def flush(self) -> None:
        """Do nothing: nothing is queued."""

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]:
        return []

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None:
        raise AssertionError("there was no command to answer")

    def readings(self) -> dict[str, int | None]:
        return {}

    def dropped(self) -> int:
        return 0


def open_channel() -> Channel:
    """The agent if memtop started this process (see `sitecustomize.py`); else `Unsupervised`."""
    agent: Any = sys.modules.get("memtop_agent")
    return Unsupervised() if agent is None else agent


def warn(channel: Channel, text: str) -> None:
    """Warn the user, in the log and in the events of the run."""
    channel.report("warning", message=text)
    print(f"memtop: {text}", flush=True)


def warn_from_first(channel: Channel, accelerator: Accelerator, text: str) -> None:
    """Warn the user once: all ranks call this, and only the first one warns."""
    if accelerator.is_main_process:
        warn(channel, text)


class Stopwatch:
    """Measures how an update's time is spent.

    On CUDA it uses events, and never waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to this part."""
        if self._on_cuda and name != "data_wait_seconds":
            before, after = _event(), _event()
            before.record()
            yield
            after.record()
            self._events.append((name, before, after))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def begin(self) -> None:
        """The next update begins now: what was done since the one before does not count."""
        self._seconds, self._events, self._started = dict.fromkeys(_PARTS, 0.0), [], time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Return the seconds of each part, and of the update as `step_seconds`; start the next.

        Call it after a result of the update was read from the device: then its parts are done.
        """
        for name, before, after in self._events:
            self._seconds[name] += before.elapsed_time(after) / 1000.0
        found = {**self._seconds, "step_seconds": time.perf_counter() - self._started}
        self.begin()
        return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class MemoryRecorder:
    """Records host memory and this rank's GPU memory; the first rank also prints a line."""

    def __init__(self, channel: Channel, accelerator: Accelerator, log: Callable[[str], None] = print) -> None:
        self._channel = channel
        self._device = accelerator.device
        self._first = accelerator.is_main_process
        self._log = log

    def __call__(self, stage: str) -> None:
        """Record now. `stage` names the moment: "after model load", "update 200"."""
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        values: dict[str, Any] = {"stage": stage, "used_bytes": used, "total_bytes": memory.total}
        text = f"[memory - {stage}] host {used / _GIB:.2f} / {memory.total / _GIB:.2f} GiB ({used / memory.total:.1%})"
        if self._device.type == "cuda":
            values["allocated_bytes"] = torch.cuda.memory_allocated(self._device)
            values["reserved_bytes"] = torch.cuda.memory_reserved(self._device)
            # Only this rank's GPU: torch knows nothing of what other processes allocate on the
            # others.
            text += f", GPU {self._device.index} allocated {values['allocated_bytes'] / _GIB:.2f} GiB"
            text += f", reserved {values['reserved_bytes'] / _GIB:.2f} GiB"
        self._channel.report("memory", message=text, **values)
        if self._first:
            self._log(text)


def tracking_options(settings: Settings, folder: Path, more: Sequence[GeneralTracker] = ()) -> dict[str, Any]:
    """The Accelerator's arguments for trackers in `folder`; BadInputError for a missing one."""
    for name in settings.trackers:
        if not any(importlib.util.find_spec(module) for module in _MODULES.get(name, (name,))):
            raise BadInputError(f"trackers {name}: not installed: {sys.executable} -m pip install {name}")
    wanted = [*settings.trackers, *more]
    return {"log_with": wanted, "project_dir": str(folder)} if wanted else {}


class Tracking:
    """Sends metrics to the accelerator's trackers, from the first rank, if there are any."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def start(self, settings: Settings, folder: Path) -> None:
        """Start the trackers; BadInputError if one cannot start (no account, no network, ...)."""
        if not self._accelerator.log_with:
            return
        name = Path(os.environ.get("MEMTOP_RUN", "")).name or settings.recipe
        options = {"wandb": {"dir": str(folder), "name": name}}
        try:
            self._accelerator.init_trackers("memtop", config=_flat(settings), init_kwargs=options)
        # Trackers open files and connect to servers, so any kind of error is possible.
        except Exception as error:  # noqa: BLE001
            names = ", ".join(str(getattr(tracker, "name", tracker)) for tracker in self._accelerator.log_with)
            raise BadInputError(f"trackers {names.lower()}: cannot start: {first_line(error)}") from None

    def step(self, update: int, values: dict[str, Any]) -> None:
        """Log the numbers of one update, without those that are not known."""
        known = {name: values[name] for name in _NUMBERS if values.get(name) is not None}
        self._accelerator.log(known, step=update)

    def evaluation(self, update: int, loss: float) -> None:
        """Log an evaluation's mean loss in nats per token."""
        self._accelerator.log({"evaluation_loss": loss}, step=update)

    def end(self) -> None:
        """After a failure, flush the trackers of this rank. Waits for no other rank."""
        if not self._accelerator.is_main_process:
            return
        for tracker in self._accelerator.trackers:
            tracker.finish()


def _flat(settings: Settings) -> dict[str, Any]:
    """The settings as dotted names and plain values, which every tracker can store."""
    found: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value is not None:
            found[prefix] = value if isinstance(value, bool | int | float | str) else ", ".join(map(str, value))

    walk("", msgspec.to_builtins(settings))
    return found


Changes = tuple[tuple[int, dict[str, Any]], ...]
"""Commands to change settings: the command's id, and the new values by name."""


class Requests(msgspec.Struct, frozen=True):
    """What to do at an update boundary; alike on all ranks, except `commands`."""

    save: bool
    stop: bool
    commands: tuple[int, ...] = ()
    """Ids of this rank's commands that wait for the save."""
    changes: Changes = ()
    save_ended: bool = False
    """Whether the first rank's save in progress has ended since the last boundary."""
    save_failed: bool = False
    leave: bool = False
    """To stop, but only once the state is saved."""
    leaving: tuple[int, ...] = ()
    """Ids of this rank's commands to do so."""


class Control:
    """Collects commands and signals. SIGTERM and SIGINT: finish the update, save and exit, also if
    the state cannot be saved.
    """

    def __init__(self, channel: Channel, accelerator: Accelerator) -> None:
        self._channel = channel
        self._accelerator = accelerator
        self._ranks = Ranks(accelerator)
        self._stop = False
        # The first rank receives changes of settings and broadcasts them.
        channel.offer("checkpoint", "stop", *(("change",) if accelerator.is_main_process else ()))

    def catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def at_boundary(self, saved: tuple[bool, bool] = (False, False)) -> Requests:
        """What was requested of any rank since the last call. All ranks call this together.

        `saved`: whether this rank's save in progress has ended, and whether it failed.
        """
        save, waiting, leaving, changes = False, [], [], []
        for number, name, values in self._channel.take_commands():
            if name == "stop" and values.get("only_saved"):
                leaving.append(number)
            elif name == "stop":
                # Answered at once: the process may end before a later answer could be sent.
                self._stop = True
                self._channel.answer(number, True, "stopping after this update")
            elif name == "change":
                changes.append((number, values))
            else:
                save = True
                waiting.append(number)
        saving, stopping, leave, changing, *ended = self._ranks.sums(save, self._stop, len(leaving), len(changes), *saved)
        requested = self._ranks.from_first(tuple(changes)) if changing else ()
        return Requests(
            save=saving > 0,
            stop=stopping > 0,
            commands=tuple(waiting),
            changes=requested,
            save_ended=ended[0] > 0,
            save_failed=ended[1] > 0,
            leave=leave > 0,
            leaving=tuple(leaving),
        )

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any]) -> None:
        """Answer a change, on the rank that received it."""
        if self._accelerator.is_main_process:
            self._channel.answer(number, ok, message, result)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)


def edit_live(settings: Settings, values: dict[str, Any]) -> Settings:
    """The settings after an edit, checked.

    None among `values` leaves a setting alone. SettingsError if it is not possible.

    As at a restart, changing batch or accumulation leaves the other one unchanged.
    """
    given = {name: _text(value) for name, value in values.items() if value is not None}
    if not given:
        raise SettingsError("change", "{}", f"names no setting; choose from {', '.join(LIVE)}")
    for name, text in given.items():
        if name not in LIVE:
            raise SettingsError(name, text, f"cannot change during a run, only {', '.join(LIVE)} can; restart with it")
    after = assign(settings, given)
    for name in not_live(settings, differing(settings, after)):
        raise SettingsError(name, _text(getattr(after, name)), f"cannot change while {settings.zero} runs; restart with it")
    return check(after)


def _text(value: Any) -> str:
    """The value as it is written after --set."""
    if isinstance(value, list | tuple):
        return ranks_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
