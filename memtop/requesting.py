"""Commands that ask a run's supervisor for something, and what they do until it is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from memtop.supervisor.errors import MemtopError, NotRunningError
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.wire import Answer, Change, Outcome, Request, Restart


def restart(folder: RunFolder, change: Change, *, headless: bool, detach: bool) -> int:
    """By the run's supervisor, or by a new one where the run is over."""
    from memtop.supervisor.run.clients import client
    from memtop.supervisor.run.record.view import needs_supervisor

    begun = time.time()
    if needs_supervisor(folder):
        client.revive(folder.path)
    try:
        answer = asked(folder, lambda number: Restart(id=number, change=change))
        print(answer.message, file=sys.stderr)
    except NotRunningError:
        again = _done_again(folder, change) if detach else None
        risk = risk_of(folder, change)
        client.start_supervisor(folder, change)
        for words in (again, f"memtop: {risk}" if risk else None):
            if words:
                print(words, file=sys.stderr)
    return follow(folder, begun, headless=headless, detach=detach)


def _done_again(folder: RunFolder, change: Change) -> str | None:
    """For those who do not stay to be told by the run: what its next attempt does once more."""
    from memtop.supervisor.run import explain
    from memtop.supervisor.run.record.view import read_state

    state = read_state(folder)
    if state.settings is None or change.state_before is not None:
        return None
    return explain.done_again(state.updates, state.checkpoint)


def risk_of(folder: RunFolder, change: Change) -> str | None:
    """That the run would go on with what it has died of, in one line."""
    from memtop.finding import readable_ledger
    from memtop.presets.comparison import risk
    from memtop.supervisor.recovery.applying import ran_out
    from memtop.supervisor.run.change import edited
    from memtop.supervisor.run.record import view

    with readable_ledger(folder):
        rows = view.read_configurations(folder.path)
    state = view.read_state(folder)
    try:
        after = edited(state.settings, change, state.checkpoint, rows)
    except MemtopError:
        return None  # the supervisor refuses it, and says why
    return None if after is None else risk(after, ran_out(rows))


def ask(folder: RunFolder, make: Callable[[int], Request]) -> int:
    """Send a request, to a new supervisor where the old one died, and print what came of it."""
    from memtop.supervisor.run.clients import client
    from memtop.supervisor.run.record.view import needs_supervisor

    if needs_supervisor(folder):
        client.revive(folder.path)
    print(asked(folder, make).message)
    return 0


def asked(folder: RunFolder, make: Callable[[int], Request]) -> Answer:
    """The final answer of the run's supervisor."""
    from memtop.supervisor.run.clients import client

    try:
        return client.ask(folder, make, on_accepted=_say, until=Outcome.DONE)
    except ConnectionError:
        # It was leaving as we wrote; that is its end, not that of our own output.
        raise NotRunningError(f"the supervisor of run {folder.name!r} went away: memtop watch {folder.name}") from None


def _say(answer: object) -> None:
    print(getattr(answer, "message", answer), file=sys.stderr)


def follow(folder: RunFolder, begun: float, *, headless: bool, detach: bool) -> int:
    """Stay with a run that was just started: in its dashboard, or without one; or only say what it is called."""
    if detach:
        print(folder.name)
        return 0
    if headless or not (sys.stdin.isatty() and sys.stdout.isatty()):
        from memtop.headless import follow as stay

        return stay(folder, since=begun)
    from memtop.opening import open_run

    return open_run(folder, started_here=True)
