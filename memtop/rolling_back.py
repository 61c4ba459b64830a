"""From `memtop rollback RUN [N] [--state]` to what a restart changes."""

from __future__ import annotations

from memtop.finding import readable_ledger
from memtop.supervisor.errors import UsageError
from memtop.supervisor.run.record.configurations import before_the_present, same
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.view import read_configurations
from memtop.supervisor.wire import Change


def change_to(folder: RunFolder, number: int | None, *, with_state: bool) -> Change:
    """Back to configuration `number`, None: the newest one that is another than the present; UsageError if it cannot be."""
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
        raise UsageError("this run's program is your own: its settings are not memtop's to change")
    if not with_state:
        if same(chosen.settings, rows[-1].settings):
            raise UsageError(_nothing_to_do(folder.name, chosen.number, rows[-1].number))
        return Change(configuration=chosen.number)
    if chosen.until_update is None:
        raise UsageError(f"--state: configuration {chosen.number} is the present one; its state is the newest")
    return Change(configuration=chosen.number, state_before=chosen.until_update)


def _nothing_to_do(run: str, number: int, present: int) -> str:
    what = "is the present one" if number == present else f"has the settings of the present one, {present}"
    return f"N {number}: configuration {number} of run {run!r} {what}; `memtop restart {run}` starts it again as it is"
