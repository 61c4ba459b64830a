"""`memtop rollback`: return to the settings, and on request the state, of an earlier
configuration."""

from __future__ import annotations

from pathlib import Path

import click

from memtop.cli.lookup import find_run, readable_ledger
from memtop.cli.options import (
    RUN_HELP,
    WHOLE,
    detach_option,
    headless_option,
    refuse_both,
    run_argument,
    runs_dir_option,
)
from memtop.cli.restart import restart_with
from memtop.supervisor.errors import UsageError
from memtop.supervisor.run.record.configurations import before_the_present, same
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.view import read_configurations
from memtop.supervisor.wire import Change


@click.command(epilog=f"{RUN_HELP} N is the number of a configuration.")
@run_argument
@click.argument("number", required=False, type=WHOLE, metavar="[N]")
@click.option("--state", is_flag=True, help="return to its newest saved state too; later states are moved aside, not deleted")
@headless_option
@detach_option
@runs_dir_option
def rollback(run_name: str, number: int | None, state: bool, headless: bool, detach: bool, runs_dir: Path | None) -> int:
    """Return a run to the settings of an earlier configuration.

    `memtop show RUN` lists the configurations. Without N, it is the one before the present one.
    """
    refuse_both(headless, detach)
    folder = find_run(run_name, runs_dir)
    return restart_with(folder, change_to(folder, number, with_state=state), headless=headless, detach=detach)


def change_to(folder: RunFolder, number: int | None, *, with_state: bool) -> Change:
    """The change that returns to configuration `number`; None: the newest one with other settings
    than the present.

    UsageError if there is no such configuration, or if nothing would change.
    """
    with readable_ledger(folder):
        rows = read_configurations(folder.path)
    there = f"it has 1 to {rows[-1].number}" if rows else "it was never started"
    if number is None:
        chosen = before_the_present(rows)
        if chosen is None:
            raise UsageError(f"run {folder.name!r}: there is no configuration before the present one: {there}")
    else:
        chosen = next((row for row in rows if row.number == number), None)
        if chosen is None:
            raise UsageError(f"N {number}: run {folder.name!r} has no such configuration: {there}")
    if chosen.settings is None:
        raise UsageError("this run's program is your own: memtop cannot change its settings")
    if not with_state:
        if same(chosen.settings, rows[-1].settings):
            raise UsageError(_nothing_to_do(folder.name, chosen.number, rows[-1].number))
        return Change(configuration=chosen.number)
    if chosen.until_update is None:
        raise UsageError(f"--state: configuration {chosen.number} is the present one; its state is the newest")
    return Change(configuration=chosen.number, state_before=chosen.until_update)


def _nothing_to_do(run: str, number: int, present: int) -> str:
    what = "is the present one" if number == present else f"has the settings of the present one, {present}"
    return f"N {number}: configuration {number} of run {run!r} {what}; `memtop restart {run}` starts it again unchanged"
