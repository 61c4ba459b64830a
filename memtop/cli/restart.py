"""`memtop restart`: start a run again from its saved state, or change its settings while it
runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from memtop.cli.foreground import stay
from memtop.cli.lookup import find_run, readable_ledger
from memtop.cli.options import (
    RUN_HELP,
    assignments_of,
    detach_option,
    edit_options,
    headless_option,
    refuse_both,
    run_argument,
    runs_dir_option,
)
from memtop.cli.requests import ask, final_answer
from memtop.presets.comparison import risk
from memtop.supervisor.errors import MemtopError, NotRunningError, UsageError
from memtop.supervisor.recovery.configuration import failed_settings
from memtop.supervisor.run import explain
from memtop.supervisor.run.change import edited
from memtop.supervisor.run.clients import client
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.view import needs_supervisor, read_configurations, read_state
from memtop.supervisor.wire import Change, Edit, Restart


@click.command(epilog=RUN_HELP)
@run_argument
@edit_options
@click.option("--live", is_flag=True, help="change the running program at its next update, without a restart")
@headless_option
@detach_option
@runs_dir_option
def restart(
    run_name: str,
    preset: str | None,
    batch: int | None,
    accum: int | None,
    seq_len: int | None,
    assignments: tuple[str, ...],
    max_updates: int | None,
    live: bool,
    headless: bool,
    detach: bool,
    runs_dir: Path | None,
) -> int:
    """Restart a run from its saved state, with other settings.

    A run in progress finishes its update and saves its state first. --live refuses settings that
    need a restart.
    """
    refuse_both(headless, detach)
    folder = find_run(run_name, runs_dir)
    values = assignments_of(assignments, batch=batch, accumulation=accum, seq_len=seq_len)
    change = Change(preset=preset, assignments=values, max_updates=max_updates)
    if not live:
        return restart_with(folder, change, headless=headless, detach=detach)
    if headless or detach:
        raise UsageError("--live: does not restart the run; leave out --headless and --detach")
    return ask(folder, lambda number: Edit(id=number, change=change))


def restart_with(folder: RunFolder, change: Change, *, headless: bool, detach: bool) -> int:
    """Restart the run and stay with it. A run that is over gets a new supervisor."""
    begun = time.time()
    if needs_supervisor(folder):
        client.revive(folder.path)
    try:
        answer = final_answer(folder, lambda number: Restart(id=number, change=change))
        print(answer.message, file=sys.stderr)
    except NotRunningError:
        again = _repeated_updates(folder, change) if detach else None
        warning = risk_of(folder, change)
        client.start_supervisor(folder, change)
        for line in (again, f"memtop: {warning}" if warning else None):
            if line:
                print(line, file=sys.stderr)
    return stay(folder, begun, headless=headless, detach=detach)


def _repeated_updates(folder: RunFolder, change: Change) -> str | None:
    """Which updates the next attempt repeats. Without --detach the run's events report it."""
    state = read_state(folder)
    if state.settings is None or change.state_before is not None:
        return None
    return explain.done_again(state.updates, state.checkpoint)


def risk_of(folder: RunFolder, change: Change) -> str | None:
    """A warning, in one line, if the run would continue with settings that ran out of memory."""
    with readable_ledger(folder):
        rows = read_configurations(folder.path)
    state = read_state(folder)
    try:
        after = edited(state.settings, change, state.checkpoint, rows)
    except MemtopError:
        return None  # The supervisor refuses it and reports the reason.
    return None if after is None else risk(after, failed_settings(rows))
