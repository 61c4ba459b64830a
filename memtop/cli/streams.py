"""Streams of samples: one JSON document per line, CSV rows, or only the Prometheus endpoint."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memtop.cli.common import state_of, summary
from memtop.cli.dashboard import WatchOptions
from memtop.cli.output import json_text
from memtop.supervisor.clean import clean
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.sampler import Sampler, snapshot_json
from memtop.supervisor.monitor.values import MachineSnapshot, only_gpus
from memtop.supervisor.run import view
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.runs import run_folders
from memtop.supervisor.run.starting import revive
from memtop.supervisor.wire import RunState

if TYPE_CHECKING:
    from memtop.cli.prometheus import Endpoint

_GPU_COLUMNS = (
    *("uuid", "name", "total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "used_fraction", "band"),
    *("utilization_fraction", "memory_utilization_fraction", "temperature_celsius", "power_watts", "power_limit_watts"),
)
_HOST_COLUMNS = (
    *("total_bytes", "used_bytes", "available_bytes", "used_fraction", "band", "limit_bytes", "swap_total_bytes"),
    *("swap_used_bytes", "swap_in_bytes_per_second", "swap_out_bytes_per_second", "pressure_fraction", "cpu_fraction"),
)
_RUN_COLUMNS = (
    *("name", "state", "attempt", "updates", "total_updates", "samples_seen", "epoch", "loss", "learning_rate"),
    *("gradient_norm", "samples_per_second", "tokens_per_second", "step_seconds", "eta_seconds", "run_rss_bytes"),
)
CSV_COLUMNS = (
    "time",
    "gpu",
    *(f"gpu_{name}" for name in _GPU_COLUMNS),
    *(f"host_{name}" for name in _HOST_COLUMNS),
)
CSV_RUN_COLUMNS = tuple(f"run_{name.removeprefix('run_')}" for name in _RUN_COLUMNS)

# A sleeping GPU takes seconds to wake up. A driver that hangs must not delay the stream any longer.
_WAKE_SECONDS = 10.0

Write = Callable[[MachineSnapshot, RunState | None], None]


def stream(
    runs_dir: Path,
    folder: RunFolder | None,
    look: WatchOptions,
    *,
    form: str | None,
    count: int | None,
    endpoint: Endpoint | None = None,
) -> int:
    """Write a sample every `look.interval` seconds to stdout and to the endpoint, `count` times or
    without end.

    `form`: "json", "csv", or None to write nothing to stdout. The exit status is 130 after SIGINT,
    otherwise 0.
    """
    if folder is not None and not look.read_only:
        revive(folder.path)
    try:
        with _stop_signals() as ended, closing(_awake_sampler(runs_dir, ended)) as sampler:
            write = _writer(form, runs_dir, with_run=folder is not None)
            for _ in _ticks(look.interval, count, ended):
                machine = sampler.sample()
                if look.gpus is not None:
                    machine = only_gpus(machine, look.gpus)
                # If the run cannot be read, the stream ends with the error: a row without the run
                # would look like a run without values.
                run = None if folder is None else view.read_state(folder)
                if endpoint is not None:
                    endpoint.update(machine, run)
                write(machine, run)
            return 130 if ended.number == signal.SIGINT else 0
    except BrokenPipeError:
        # The reader closed the pipe. Click would report an error; discard what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _awake_sampler(runs_dir: Path, ended: _StopSignal) -> Sampler:
    """A sampler that waits until the driver has answered once, so that the first sample has the
    GPUs.

    Waking them can take longer than a sample waits, and `watch --csv` prints only one sample. If
    the driver hangs, the first sample reports it.
    """
    reader = NvmlReader()
    first = threading.Thread(target=reader.read, name="memtop-first-read", daemon=True)
    first.start()
    given_up = time.monotonic() + _WAKE_SECONDS
    while first.is_alive() and not ended.event.is_set() and time.monotonic() < given_up:
        first.join(0.05)
    return Sampler(lambda: view.known_runs(runs_dir), nvml=reader)


class _StopSignal:
    """Whether a signal asked to stop, and which."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.number: int | None = None

    def __call__(self, number: int, frame: object) -> None:
        self.number = number
        self.event.set()


@contextlib.contextmanager
def _stop_signals() -> Iterator[_StopSignal]:
    """Make SIGINT and SIGTERM end the stream between two documents, never inside one."""
    ending = _StopSignal()
    before = {number: signal.signal(number, ending) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ticks(interval: float, count: int | None, ending: _StopSignal) -> Iterator[int]:
    """Yield once per interval. The time between two yields does not grow with the time that the
    caller takes."""
    due, number = time.monotonic(), 0
    while not ending.event.is_set():
        yield number
        number += 1
        if number == count:
            return
        # After a long pause (a suspended laptop) continue from now instead of catching up.
        due = max(due + interval, time.monotonic())
        ending.event.wait(due - time.monotonic())


def _writer(form: str | None, runs_dir: Path, *, with_run: bool) -> Write:
    if form == "json":
        return lambda machine, run: _write_json(runs_dir, machine, run)
    if form == "csv":
        return _csv_writer(with_run=with_run)
    return lambda machine, run: None


def _write_json(runs_dir: Path, machine: MachineSnapshot, run: RunState | None) -> None:
    document: dict[str, Any] = snapshot_json(machine)
    if run is not None:
        # `run` has everything about the named run, including its newest step; `runs` is the same as
        # with --once.
        document["run"] = msgspec.to_builtins(run)
        document["runs"] = [view.summary(run)]
    else:
        document["runs"] = [summary(state_of(folder)) for folder in run_folders(runs_dir)]
    sys.stdout.write(json_text(document) + "\n")
    sys.stdout.flush()


def _csv_writer(*, with_run: bool) -> Write:
    """Write one row per sample and GPU, with the columns of the host and the run repeated in each.

    The columns stay the same when GPUs appear or vanish. Without GPUs there is one row per sample,
    with `gpu` empty.
    """
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow([*CSV_COLUMNS, *(CSV_RUN_COLUMNS if with_run else ())])

    def write(machine: MachineSnapshot, run: RunState | None) -> None:
        host = _cells(machine.host, _HOST_COLUMNS)
        training = [] if run is None else _cells(run, _RUN_COLUMNS)
        for gpu in machine.gpus or (None,):
            card = [""] * (len(_GPU_COLUMNS) + 1) if gpu is None else [str(gpu.index), *_cells(gpu, _GPU_COLUMNS)]
            rows.writerow([f"{machine.time:.3f}", *card, *host, *training])
        sys.stdout.flush()

    return write


def _cells(of: object, names: tuple[str, ...]) -> list[str]:
    """The values as text, without control characters; unknown values are empty."""
    values = (getattr(of, name) for name in names)
    return ["" if value is None else clean(str(getattr(value, "value", value))) for value in values]
