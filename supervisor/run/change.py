"""What a restart's change makes of a run's settings, and whether it can be made."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from memtop.presets import SettingsError, edit_settings
from memtop.presets.fields import LIVE, differing, not_live
from memtop.presets.schema import Settings
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery.configuration import failed_settings
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.wire import Change, Checkpoint, Configuration


def edited(
    settings: Settings | None, change: Change, checkpoint: Checkpoint | None, rows: Sequence[Configuration] = ()
) -> Settings | None:
    """The settings that a change gives, counted from that checkpoint if it is complete; UsageError
    if it cannot be.

    `rows`: the run's configurations, to one of which the change may go back.
    """
    if settings is None:
        if replace(change, assignments={}, reason="") != Change() or set(change.assignments) - {"allocator"}:
            raise UsageError("this run's program is your own: its settings are not memtop's to change (but for allocator)")
        return None
    done = checkpoint if checkpoint is not None and checkpoint.complete else None
    try:
        return edit_settings(
            _base(settings, change.configuration, rows),
            preset=change.preset,
            max_updates=change.max_updates,
            assignments=change.assignments,
            updates_done=(done.updates or 0) if done else 0,
            samples_seen=(done.samples_seen or 0) if done else 0,
            failed=failed_settings(rows),
        )
    except SettingsError as error:
        raise UsageError(str(error)) from None


def _base(settings: Settings, number: int | None, rows: Sequence[Configuration]) -> Settings:
    """What is edited: the present settings, or those of an earlier configuration with the run's
    present length.
    """
    if number is None:
        return settings
    earlier = next((row.settings for row in rows if row.number == number), None)
    if earlier is None:
        there = f"there are 1 to {rows[-1].number}" if rows else "there is none yet"
        raise UsageError(f"configuration {number}: this run has no such configuration; {there}")
    return replace(earlier, target_samples=settings.target_samples, epochs=settings.epochs)


def edited_live(
    settings: Settings | None,
    change: Change,
    checkpoint: Checkpoint | None,
    progress: Progress,
    rows: Sequence[Configuration] = (),
) -> Settings | None:
    """The same for a run in progress, counted from where it will have stopped: after one more
    update.
    """
    step = progress.step
    if settings is None or step is None:
        return edited(settings, change, checkpoint, rows)
    update, seen = step.update + 1, (step.samples_seen or 0) + settings.effective_batch
    if change.max_updates is not None and 0 < change.max_updates < update:
        raise UsageError(f"max_updates {change.max_updates}: the run will have done {update} when it stops; give more")
    return edited(settings, change, Checkpoint(path="", updates=update, samples_seen=seen, complete=True), rows)


_SPLIT = ("batch", "accumulation")


def live_values(before: Settings | None, after: Settings | None, also: Collection[str] = ()) -> dict[str, object]:
    """The values that the running program must set; UsageError, with the reason, where the change
    takes a restart.

    Batch and accumulation go together, so that the program ends up with the announced split,
    whatever it has now. `also`: fields that are set even if they do not seem to change.
    """
    if before is None or after is None:
        raise UsageError("this program is your own: it cannot change while it runs; restart it")
    fields = differing(before, after)
    if fixed := not_live(before, fields):
        why = "cannot change while the program runs"
        if before.zero.stage and set(fixed) <= set(LIVE):
            why = f"cannot change while {before.zero} runs, whose engine is built for one split"
        raise UsageError(f"{', '.join(fixed)}: {why}; restart it instead")
    if fields:
        fields += [name for name in also if name in LIVE and name not in fields]
    if set(_SPLIT) & set(fields):
        fields = [*_SPLIT, *(name for name in fields if name not in _SPLIT)]
    return {name: getattr(after, name) for name in fields}
