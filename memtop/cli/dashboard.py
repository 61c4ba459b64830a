"""Opens the dashboard: on a run, on the machine, on a replay or on the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memtop.cli.common import find_run, living_runs
from memtop.cli.configuration import (
    Layer,
    Value,
    configured,
    default_runs_dir,
    notify_topics,
    read_layers,
    value_of,
    write_user_key,
)
from memtop.cli.output import print_message
from memtop.presets.checks import did_you_mean
from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.monitor.processes.table import TreeProcess, process_tree
from memtop.supervisor.run.notices import targets_of
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ownership import require_own, why_not_own

if TYPE_CHECKING:
    from memtop.cli.prometheus import Endpoint
    from memtop.tui.feed import Feed, Sampling, Turn
    from memtop.tui.notices import TerminalNotices


class WatchOptions(NamedTuple):
    """How to watch: the options that runs and the machine share."""

    interval: float = 1.0
    """Seconds between two samples."""
    read_only: bool = False
    gpus: frozenset[int] | None = None
    """The indices of the GPUs to show; None: all."""
    samples: Sampling | None = None
    """Who samples this machine for a tab of `watch --serve`; None: this process does."""

    def sampler(self, runs_dir: Path) -> Callable[[], Sampling]:
        """Makes what samples this machine. The strays are those of the runs in this folder."""
        from memtop.tui.feed import real_sampler

        shared = self.samples
        return (lambda: real_sampler(runs_dir)) if shared is None else (lambda: shared)


_DEFAULT_LOOK = WatchOptions()
_BELL = "bell"
"""How the terminal tells a run of `--notify desktop` where the configuration has no other way."""


def open_dashboard(
    runs_dir: Path, folder: RunFolder | None, look: WatchOptions, *, pid: int | None = None, endpoint: Endpoint | None = None
) -> int:
    """Open the dashboard on `folder`; if None, on the newest run in progress, or on the machine.

    Without --read-only, only the caller's own runs are opened.

    `pid` limits the machine's view to a process and its children. The result is the exit status.
    """
    if folder is not None:
        return open_run(folder, look, endpoint=endpoint)
    if pid is not None:
        tree_of(pid)
    elif living := [run for run, _ in living_runs(runs_dir) if look.read_only or why_not_own(run.path) is None]:
        return open_run(living[-1], look, endpoint=endpoint)
    need_terminal()
    from memtop.supervisor.observed.shown import NOTE
    from memtop.tui.feed import LocalFeed
    from memtop.tui.observed import AllPrograms, OneProgram

    sample = look.sampler(runs_dir)

    def sampler() -> Sampling:
        # In a thread, after the first frame.
        if not look.read_only:
            from memtop.supervisor.run.queue import revive_queued

            revive_queued(runs_dir)
        return sample()

    turns = _turns(look, endpoint)
    if pid is None:
        feed = LocalFeed(sampler, look.interval, read_only=look.read_only, beside=AllPrograms(), turns=turns)
    else:
        from memtop.supervisor.observed.observer import observer_of

        program = observer_of(pid)
        if program is None:
            feed = LocalFeed(sampler, look.interval, read_only=look.read_only, pid=pid, turns=turns)
        else:
            # memtop only reads a program that it did not start.
            one = OneProgram(program)
            feed = LocalFeed(sampler, look.interval, read_only=True, beside=one, label=NOTE, turns=turns)
    return _show(feed, look, runs_dir=runs_dir, endpoint=endpoint)


def open_runs() -> int:
    """Open the list of all runs, over the machine's dashboard. The result is the exit status."""
    from memtop.tui.feed import LocalFeed
    from memtop.tui.observed import AllPrograms

    runs_dir = default_runs_dir()
    feed = LocalFeed(_DEFAULT_LOOK.sampler(runs_dir), _DEFAULT_LOOK.interval, beside=AllPrograms())
    return _show(feed, _DEFAULT_LOOK, runs_dir=runs_dir, begins_with_runs=True)


def open_run(
    folder: RunFolder, look: WatchOptions = _DEFAULT_LOOK, *, started_here: bool = False, endpoint: Endpoint | None = None
) -> int:
    """Open the dashboard on a run. The exit status reflects the run's failure only if
    `started_here`."""
    if not look.read_only:
        require_own(folder.path)
    need_terminal()
    feed = _feed_of(folder, look, endpoint)
    return _show(feed, look, folder=folder, started_here=started_here, runs_dir=folder.path.parent, endpoint=endpoint)


def _feed_of(folder: RunFolder, look: WatchOptions, endpoint: Endpoint | None) -> Feed:
    from memtop.tui.run_feed import RunFeed

    return RunFeed(
        folder.path,
        read_only=look.read_only,
        interval=look.interval,
        sampler_factory=look.sampler(folder.path.parent),
        turns=_turns(look, endpoint),
    )


def open_replay(runs_dir: Path, run_name: str, interval: float) -> int:
    """Open the dashboard on the recorded history of a run."""
    folder = find_run(run_name, runs_dir)
    need_terminal(f"`memtop report {run_name}` writes the run as a page, and `memtop show {run_name}` prints it")
    from memtop.tui.replay import FolderRecording, ReplayFeed

    return _show(ReplayFeed(lambda: FolderRecording(folder.path)), WatchOptions(interval), silent=True)


def open_demo(interval: float) -> int:
    """Open the dashboard on the recorded run."""
    need_terminal("`memtop watch --demo --serve 8000` shows it in a browser")
    from memtop.tui.demo import demo_feed

    return _show(demo_feed(), WatchOptions(interval), silent=True)


def tree_of(pid: int) -> list[TreeProcess]:
    """The process and all its descendants; UsageError if there is no such process."""
    # The kernel's limit for pids is 2^22 (PID_MAX_LIMIT).
    tree = process_tree(pid) if 0 < pid <= 1 << 22 else None
    if tree is None:
        raise UsageError(f"--pid {pid}: no such process")
    return tree


def need_terminal(instead: str = "`memtop watch --once` prints one snapshot") -> None:
    """UsageError if the dashboard cannot be drawn here. `instead`: what can be done without a
    terminal."""
    if os.environ.get("TEXTUAL_DRIVER"):
        return  # it is not drawn on a terminal
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(f"watch: the dashboard needs a terminal; {instead}")
    if os.environ.get("TERM") == "dumb":
        raise UsageError("TERM=dumb: the dashboard needs a terminal that can move the cursor; try --once or --headless")


def _turns(look: WatchOptions, endpoint: Endpoint | None) -> list[Turn]:
    from memtop.tui.feed import choosing

    turns = [] if look.gpus is None else [choosing(look.gpus)]
    if endpoint is not None:
        turns.append(endpoint.observe)
    return turns


def _show(
    feed: Feed,
    look: WatchOptions,
    *,
    folder: RunFolder | None = None,
    started_here: bool = False,
    silent: bool = False,
    runs_dir: Path | None = None,
    begins_with_runs: bool = False,
    endpoint: Endpoint | None = None,
) -> int:
    """Show the feed, and then each run that the user opens from the list of runs in `runs_dir`.

    `folder`: of the run that the feed shows.
    """
    from memtop.tui import run_dashboard
    from memtop.tui.choices import Choices

    values, ignored = remembered()
    for problem in ignored:
        print_message(f"memtop: {problem}")
    choices = Choices(values, remember, ignored)
    with _closes_on_sigterm():
        while True:
            notices = None if silent else _terminal_notices(folder)
            result = run_dashboard(
                feed,
                interval=look.interval,
                notices=notices,
                runs_dir=runs_dir,
                begins_with_runs=begins_with_runs,
                choices=choices,
            )
            if result.opens is None:
                break
            folder = RunFolder(result.opens)
            feed, started_here, begins_with_runs = _feed_of(folder, look, endpoint), False, False
    if result.message and not silent:
        print_message(f"memtop: {result.message}")
    return 0 if result.action == "ended" and not started_here else result.exit_status


def remember(key: str, value: str) -> tuple[Path, str | None]:
    """Write what the user has chosen on a screen into the user's file. UsageError if this is not
    possible.

    The result is the file, and what the next dashboard takes another value from, if it does.
    """
    path = write_user_key(key, value)
    found = _choice(key, read_layers())
    return path, found.where if found.value != value else None


def remembered() -> tuple[dict[str, str], list[str]]:
    """What the user has chosen on the screens, and a line for each value that cannot be used."""
    from memtop.tui.choices import DEFAULTS, offered

    layers, values, ignored = read_layers(), dict[str, str](), list[str]()
    for key in DEFAULTS:
        try:
            found = _choice(key, layers)
        except UsageError as error:
            ignored.append(f"{error}; it is ignored")
            continue
        if found.value is None:
            continue
        if found.value in (names := offered(key)):
            values[key] = found.value
        else:
            hint = did_you_mean(found.value, names) or f"; there are {', '.join(names)}"
            ignored.append(f"{found.where}: {key} {found.value!r}: unknown, and ignored{hint}")
    return values, ignored


def _choice(key: str, layers: list[Layer]) -> Value:
    """The value of a key, and where it comes from; the theme also comes from Textual's variable."""
    found = value_of(key, layers, os.environ)
    if key == "theme" and found.source != "environment" and os.environ.get("TEXTUAL_THEME"):
        return Value(value=os.environ["TEXTUAL_THEME"], source="environment", where="TEXTUAL_THEME")
    return found


def _terminal_notices(folder: RunFolder | None) -> TerminalNotices | None:
    """Notifications by this terminal, if the user wants them, always or of this run."""
    way = configured("notify-desktop")
    if way.value is None and (folder is None or not _tells_desktop(folder)):
        return None
    from memtop.tui.notices import WAYS, TerminalNotices

    name = _BELL if way.value is None else way.value
    if name not in WAYS:
        raise UsageError(f"{way.where}: notify-desktop {way.value!r}: there are {', '.join(WAYS)}")
    return TerminalNotices(name, notify_topics())


def _tells_desktop(folder: RunFolder) -> bool:
    """Whether the command line that started the run has `--notify desktop`."""
    if why_not_own(folder.path) is not None:
        return False  # another user's run tells its owner
    try:
        return any(target.kind == "desktop" for target in targets_of(folder))
    except RunFolderError as error:
        print_message(f"memtop: {error}")
        return False


@contextlib.contextmanager
def _closes_on_sigterm() -> Iterator[None]:
    """Close the dashboard on SIGTERM as on SIGINT, so that the terminal is restored."""

    def interrupt(number: int, frame: object) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    # In a background job of a shell, SIGINT is ignored; then the raised signal would do nothing.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
