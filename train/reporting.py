"""The built-in trainer's side of the agent: the agent if this process has one, otherwise nobody.

Where the time of an update goes, without stopping the device more often than once per update.

Host memory on the training side: the one reading that decides, sent to all ranks, and the record of it over time.

Other places that get the metrics: accelerate's trackers, named in the settings or handed over as objects."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from memtop.presets import Settings
from memtop.train import BadInputError


class Channel(Protocol):
    """What the trainer says and hears. See `train/agent/__init__.py` for the reports' fields."""

    def offer(self, *names: str) -> None: ...

    def report(self, kind: str, **values: Any) -> None: ...

    def oom(self, error: BaseException, **values: Any) -> None:
        """Report an allocation failure, once for each error, and keep nothing of it: its frames hold tensors."""

    def flush(self) -> None: ...

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]: ...

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None: ...

    def readings(self) -> dict[str, int | None]: ...

    def dropped(self) -> int: ...


class Unsupervised:
    """No supervisor: nobody to tell, nobody who asks."""

    def offer(self, *names: str) -> None:
        """Nobody to take it up."""

    def report(self, kind: str, **values: Any) -> None:
        """Nobody to read it."""

    def oom(self, error: BaseException, **values: Any) -> None:
        """Nobody to read it."""

    def flush(self) -> None:
        """Nothing is queued."""

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]:
        return []

    def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None:
        raise AssertionError("nobody asked")

    def readings(self) -> dict[str, int | None]:
        return {}

    def dropped(self) -> int:
        return 0


def open_channel() -> Channel:
    """The agent that `sitecustomize` loaded into this process, if memtop launched it."""
    agent: Any = sys.modules.get("memtop_agent")
    return Unsupervised() if agent is None else agent


PARTS = ("data_wait_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")


class Stopwatch:
    """Sums the seconds of each part. On CUDA the parts are measured by events and read at the end of the update."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
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

    def lap(self) -> dict[str, float]:
        """Seconds of the update that ends here, by part and as `step_seconds`; starts the next. Waits for the device."""
        if self._events:
            torch.cuda.synchronize()
            for name, before, after in self._events:
                self._seconds[name] += before.elapsed_time(after) / 1000.0
        now = time.perf_counter()
        found = {**self._seconds, "step_seconds": now - self._started}
        self._seconds, self._events, self._started = dict.fromkeys(PARTS, 0.0), [], now
        return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


RECORD_EVERY = 200
"""Updates between two memory records, as the guides have it."""
_GB = 1024**3


class MemoryRecord:
    """The guides' memory lines, as reports and in the log: host used and total, this rank's GPU allocated and reserved."""

    def __init__(self, channel: Channel, accelerator: Accelerator, say: Callable[[str], None] = print) -> None:
        self._channel = channel
        self._device = accelerator.device
        self._first = accelerator.is_main_process
        self._rank = accelerator.process_index
        self._say = say

    def __call__(self, stage: str) -> None:
        """Record now; `stage` says where the training is: "after model load", "update 200"."""
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        values: dict[str, Any] = {"stage": stage, "used_bytes": used, "total_bytes": memory.total}
        text = f"[memory - {stage}] host {used / _GB:.2f}GB / {memory.total / _GB:.2f}GB ({used / memory.total:.1%})"
        if self._device.type == "cuda":
            values["allocated_bytes"] = torch.cuda.memory_allocated(self._device)
            values["reserved_bytes"] = torch.cuda.memory_reserved(self._device)
            # One's own card only: of the others' this process knows nothing, and nothing is not 0.
            text += f", GPU {self._device.index} allocated {values['allocated_bytes'] / _GB:.2f}GB"
            text += f" reserved {values['reserved_bytes'] / _GB:.2f}GB"
        self._channel.report("memory", message=text, **values)
        if self._first:
            self._say(text)


# What a tracker needs, any one of them, and what to install for it.
_PACKAGES = {"tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"), "wandb": (("wandb",), "wandb")}
_NUMBERS = ("loss", "learning_rate", "gradient_norm", "samples_seen", "epoch")


def tracking_options(settings: Settings, folder: Path, more: Sequence[GeneralTracker] = ()) -> dict[str, Any]:
    """Arguments for Accelerator, which keeps the trackers; they may write into `folder`. BadInputError if one is missing."""
    for name in settings.trackers:
        if name not in _PACKAGES:
            raise BadInputError(f"trackers {name}: unknown; there are {', '.join(_PACKAGES)}")
        modules, package = _PACKAGES[name]
        if not any(importlib.util.find_spec(module) for module in modules):
            raise BadInputError(f"trackers {name}: not installed: pip install {package}")
    wanted = [*settings.trackers, *more]
    return {"log_with": wanted, "project_dir": str(folder)} if wanted else {}


class Tracking:
    """Sends what the loop reports to the trackers of the accelerator; without any it does nothing. First rank only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def start(self, settings: Settings, folder: Path) -> None:
        """Begin; BadInputError says why a tracker cannot (no account, no network, ...)."""
        if not self._accelerator.log_with:
            return
        name = Path(os.environ.get("MEMTOP_RUN", "")).name or settings.recipe
        place = {"wandb": {"dir": str(folder), "name": name}}
        try:
            self._accelerator.init_trackers("memtop", config=_flat(settings), init_kwargs=place)
        # They are programs of many authors, which open files and talk to servers.
        except Exception as error:  # noqa: BLE001
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            names = ", ".join(str(getattr(tracker, "name", tracker)) for tracker in self._accelerator.log_with)
            raise BadInputError(f"trackers {names.lower()}: cannot be started: {first}") from None

    def step(self, update: int, values: dict[str, Any]) -> None:
        """The numbers of one update; what is not known is left out."""
        known = {name: values[name] for name in _NUMBERS if values.get(name) is not None}
        self._accelerator.log(known, step=update)

    def evaluation(self, update: int, loss: float) -> None:
        """Mean loss in nats per token."""
        self._accelerator.log({"evaluation_loss": loss}, step=update)

    def end(self) -> None:
        """After a failure: have the trackers write what they hold, and leave the process group: others may wait in it."""
        if not self._accelerator.is_main_process:
            return
        for tracker in self._accelerator.trackers:
            tracker.finish()


def _flat(settings: Settings) -> dict[str, Any]:
    """Settings as dotted names and plain values, which every tracker can store."""
    found: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value is not None:
            found[prefix] = value if isinstance(value, bool | int | float | str) else ", ".join(map(str, value))

    walk("", msgspec.to_builtins(settings))
    return found
