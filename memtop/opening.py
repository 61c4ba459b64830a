"""The way into the dashboard."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memtop.finding import find_run, run_folders, state_of
from memtop.looking import tree_of
from memtop.supervisor.errors import UsageError
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.run.record import view
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.wire import RunState

if TYPE_CHECKING:
    from memtop.prometheus import Endpoint
    from memtop.tui.feed import Feed, Turn


class Look(NamedTuple):
    """How to look, at whatever it is."""

    interval: float = 1.0
    read_only: bool = False
    gpus: frozenset[int] | None = None
    """Only these; None: all."""


_USUAL = Look()


def open_dashboard(
    runs_dir: Path, folder: RunFolder | None, look: Look, *, pid: int | None = None, endpoint: Endpoint | None = None
) -> int:
    """The dashboard on a run; without one on the newest living run, else on the machine."""
    if folder is not None:
        return open_run(folder, look, endpoint=endpoint)
    if pid is not None:
        tree_of(pid)
    elif living := _living(runs_dir):
        return open_run(living[-1], look, endpoint=endpoint)
    need_terminal()
    from memtop.tui.feed import TurnedLocalFeed

    feed = TurnedLocalFeed(lambda: Sampler(lambda: view.known_runs(runs_dir)), look.interval, read_only=look.read_only, pid=pid)
    feed.turns = _turns(look, endpoint)
    return _show(feed, look.interval)


def open_run(folder: RunFolder, look: Look = _USUAL, *, started_here: bool = False, endpoint: Endpoint | None = None) -> int:
    """The dashboard on a run. Who started it gets its failure as exit status; who only looked at it does not."""
    need_terminal()
    from memtop.tui.feed import TurnedRunFeed

    def sampler() -> Sampler:
        return Sampler(lambda: view.known_runs(folder.path.parent))

    feed = TurnedRunFeed(folder.path, read_only=look.read_only, interval=look.interval, sampler_factory=sampler)
    feed.turns = _turns(look, endpoint)
    return _show(feed, look.interval, started_here=started_here)


def open_replay(runs_dir: Path, run_name: str, interval: float) -> int:
    """The dashboard on what a run's ledger remembers."""
    folder = find_run(run_name, runs_dir)
    need_terminal()
    from memtop.tui.replay import ReplayFeed

    return _show(ReplayFeed(folder.path), interval, silent=True)


def open_demo(interval: float) -> int:
    need_terminal()
    from memtop.tui.demo import DemoFeed

    return _show(DemoFeed(interval=interval), interval)


def need_terminal() -> None:
    """UsageError where the dashboard cannot be drawn."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("watch: the dashboard needs a terminal; `memtop watch --once` prints one snapshot without")
    if os.environ.get("TERM") == "dumb":
        raise UsageError("TERM=dumb: the dashboard needs a terminal that can move its cursor; try --once or --headless")


def _turns(look: Look, endpoint: Endpoint | None) -> list[Turn]:
    from memtop.tui.feed import choosing

    turns = [] if look.gpus is None else [choosing(look.gpus)]
    if endpoint is not None:
        turns.append(endpoint.overhear)
    return turns


def _living(runs_dir: Path) -> list[RunFolder]:
    looks = [(folder, state_of(folder)) for folder in run_folders(runs_dir)]
    return [folder for folder, state in looks if isinstance(state, RunState) and state.alive]


def _show(feed: Feed, interval: float, *, started_here: bool = False, silent: bool = False) -> int:
    from memtop.tui import run_dashboard

    with _terminated_in_good_order():
        result = run_dashboard(feed, interval=interval)
    if result.message and not silent:
        print(f"memtop: {result.message}", file=sys.stderr)
    return 0 if result.action == "ended" and not started_here else result.exit_status


@contextlib.contextmanager
def _terminated_in_good_order() -> Iterator[None]:
    """SIGTERM leaves the dashboard as SIGINT does: dying at once would leave the terminal in raw mode, on the other screen."""

    def interrupt(number: int, frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    # A shell's background job has SIGINT ignored: then nothing would end it any more.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
