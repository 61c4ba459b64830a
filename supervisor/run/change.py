"""What a restart's change makes of a run's settings, and whether it can be made."""

from __future__ import annotations

from memtop.presets import SettingsError, edit_settings
from memtop.presets.schema import Settings
from memtop.supervisor.errors import UsageError
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.wire import Change, Checkpoint


def edited(settings: Settings | None, change: Change, checkpoint: Checkpoint | None) -> Settings | None:
    """The settings that a change gives, counted from that checkpoint if it is complete; UsageError if it cannot be."""
    if settings is None:
        if change != Change():
            raise UsageError("this run's program is your own: its settings are not memtop's to change")
        return None
    done = checkpoint if checkpoint is not None and checkpoint.complete else None
    try:
        return edit_settings(
            settings,
            batch=change.batch,
            accumulation=change.accumulation,
            seq_len=change.seq_len,
            preset=change.preset,
            max_updates=change.max_updates,
            assignments=change.assignments,
            updates_done=(done.updates or 0) if done else 0,
            samples_seen=(done.samples_seen or 0) if done else 0,
        )
    except SettingsError as error:
        raise UsageError(str(error)) from None


def edited_live(
    settings: Settings | None, change: Change, checkpoint: Checkpoint | None, progress: Progress
) -> Settings | None:
    """The same for a run in progress, counted from where it will have stopped: after one more update."""
    step = progress.step
    if settings is None or not isinstance(step.get("update"), int):
        return edited(settings, change, checkpoint)
    update, seen = step["update"] + 1, (step.get("samples_seen") or 0) + settings.effective_batch
    if change.max_updates is not None and 0 < change.max_updates < update:
        raise UsageError(f"max_updates {change.max_updates}: the run will have done {update} when it stops; give more")
    return edited(settings, change, Checkpoint(path="", updates=update, samples_seen=seen, complete=True))
