"""What going back to an earlier configuration means: the change to send, or why not, and its consequences in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from memtop.presets.comparison import describe_split
from memtop.supervisor import units
from memtop.supervisor.wire import Change, Configuration
from memtop.tui.configuration_rows import differences, peak_words, went_badly
from memtop.tui.restart_plan import where_it_resumes
from memtop.tui.store import Store


def present_of(rows: Sequence[Configuration]) -> Configuration | None:
    """The newest one, which the run has now or had when it ended."""
    return rows[-1] if rows else None


def undone(rows: Sequence[Configuration]) -> Configuration | None:
    """The one before the present one."""
    return rows[-2] if len(rows) > 1 else None


def rollback(row: Configuration, rows: Sequence[Configuration], *, with_state: bool) -> Change | str:
    """The change that goes back to it, or why that is not possible."""
    if row is present_of(rows):
        return f"configuration {row.number} is the present one"
    if not with_state:
        return Change(configuration=row.number)
    if row.until_update is None:
        return f"the update at which configuration {row.number} ended is not known: its checkpoint cannot be told"
    return Change(configuration=row.number, state_before=row.until_update)


def consequences(row: Configuration, store: Store, *, with_state: bool) -> list[str]:
    """What the question before a rollback says."""
    run, now = store.run, present_of(store.configurations)
    name = run.name if run is not None else "the run"
    lines = [f"Restart {name} with the settings of configuration {row.number}?", ""]
    lines.append(f"Changes: {'; '.join(differences(row, now))}.")
    if row.settings is not None and now is not None and now.settings is not None:
        lines.append(f"{describe_split(now.settings, row.settings)}.".capitalize())
    if row.peak is not None:
        lines.append(f"Its peak was {peak_words(row.peak)} (measured).")
    if went_badly(row.outcome):
        lines.append(f"! It ended in {row.outcome}: that may happen again.")
    elif row.peak is not None and row.peak.failed:
        lines.append("! It ran out of memory then: that may happen again.")
    if with_state:
        lines.append(
            f"Goes back to the newest kept state at or before update {units.count(row.until_update)}: the updates after it are "
            "trained again, their state is set aside, not deleted."
        )
    elif run is not None:
        words = where_it_resumes(run)
        lines.append(f"{words[0].upper()}{words[1:]}.")
    return lines
