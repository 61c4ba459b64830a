"""The user's own program: other settings, and where it resumes.

If it is built on Hugging Face's Trainer, its agent reports what the Trainer uses. A restart gives
the program the changes and a checkpoint through the environment (`train/agent/knobs.py`). If it has
a profile, a restart changes its command and copies of its files (`profiled.py`).
"""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery.configuration import OWN_PROGRAM, STILL_LOADING
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import SaveState
from memtop.supervisor.run.events import Launched
from memtop.supervisor.run.grip import (
    POSITION,
    Asked,
    Grip,
    done_after_stop,
    knobs_of,
    length_with,
    no_checkpoint,
    only_knobs,
    values_of,
    why_not_continued,
)
from memtop.supervisor.run.model import Model, emit, note
from memtop.supervisor.run.reports import Plan, Saved, TrainerFound
from memtop.supervisor.wire import Change, Checkpoint, Phase, saves_when_stopped


def knobs_after(model: Model, change: Change) -> dict[str, str]:
    """The settings that the next attempt is given; UsageError if the change is not possible."""
    wanted = knobs_of(change)
    if replace(change, assignments={}, reason="", configuration=None, max_updates=None) != Change():
        raise UsageError(_unknown(model) if model.grip is None else only_knobs(model.grip))
    knobs = model.knobs if change.configuration is None else _earlier(model, change.configuration)
    is_lost = _position_given(change)
    if not wanted and (knobs == model.knobs or model.grip is None) and (is_lost or not _begins_again(model)):
        _check_length(model, change, knobs)
        return knobs
    if model.grip is None:
        raise UsageError(_unknown(model))
    values_of(wanted, model.grip)  # refuses what is not possible
    _check_length(model, change, {**knobs, **wanted})
    if not is_lost and (why := why_not_continued(model.grip) or _unusable(model, model.grip)) is not None:
        raise UsageError(f"{why}; `--set {POSITION}=lost` restarts it nevertheless")
    return {**knobs, **wanted}


def _unknown(model: Model) -> str:
    """Why memtop cannot change the settings of a program that it does not hold."""
    is_loading = model.alive and model.phase is Phase.STARTING and "silent" not in model.warnings
    return STILL_LOADING if is_loading else OWN_PROGRAM


def _check_length(model: Model, change: Change, knobs: dict[str, str]) -> None:
    """UsageError if no update is left to do: the Trainer would do one too many, others end at once,
    and without a checkpoint they begin from zero. A program that has failed may have something to
    do after its last update."""
    grip, saved, total = model.grip, model.states.program, model.total_updates
    if grip is None or why_not_continued(grip) is not None:
        return
    row = None if change.configuration is None else model.configurations.numbered(change.configuration)
    length = length_with(grip, knobs, model.knobs, {} if row is None else row.uses, total)
    finished = model.phase is Phase.FINISHED or (model.alive and model.progress.is_trained)
    has_saved = saved is not None and saved.complete
    at = _saved_after(model, saved) if saved is not None and has_saved else 0 if finished else None
    saves = model.alive and saves_when_stopped(model.settings, model.progress.offers)
    done = done_after_stop(at, model.update, saves=saves, finished=finished)
    if done is None or length is None or done < length or _position_given(change):
        return
    if total is not None and length < total and done < total:
        raise UsageError(explain.nothing_would_be_left(done, length))
    if change.max_updates is not None or finished:
        by_memtop = grip.profile is None
        raise UsageError(explain.nothing_left(model.run.name, done, length, by_memtop=by_memtop, saved=has_saved))


def _saved_after(model: Model, saved: Checkpoint) -> int | None:
    """After how many updates the program saved this. Where its counter begins again in each epoch,
    the lines that it has printed say how long an epoch is; None if they do not."""
    seen = model.output
    if saved.updates is not None or saved.epoch is None or saved.step is None or seen is None or seen.steps_of_epoch is None:
        return saved.updates
    return (saved.epoch * seen.steps_of_epoch + saved.step) // seen.steps_per_update


def _begins_again(model: Model) -> bool:
    """Whether a restart would throw away what the program has trained."""
    if model.grip is None:
        return False
    return (bool(model.update) and why_not_continued(model.grip) is not None) or _unusable(model, model.grip) is not None


def _unusable(model: Model, grip: Grip) -> str | None:
    """Why a program with a profile, which has ended, cannot resume though it has saved; None if it
    can, or has saved nothing."""
    found = model.states.program
    if grip.profile is None or model.alive or found is None or found.complete:
        return None
    return f"this program would begin from zero: {no_checkpoint(grip, found)}"


def _position_given(change: Change) -> bool:
    """Whether a person has said that the position may be lost."""
    text = change.assignments.get(POSITION)
    if text is not None and text != "lost":
        raise UsageError(f"{POSITION} {text}: lost is the only value; with it the program counts from zero again")
    return text is not None


def _earlier(model: Model, number: int) -> dict[str, str]:
    row = model.configurations.numbered(number)
    if row is None:
        there = f"there are 1 to {len(model.configurations.rows)}" if model.configurations.rows else "there is none yet"
        raise UsageError(f"configuration {number}: this run has no such configuration; {there}")
    return row.knobs


def found(model: Model, report: TrainerFound, *, replayed: bool) -> Model:
    """The program begins to train: from now on memtop can change its settings."""
    known = model.grip if model.grip is not None and model.grip.output_dir == report.output_dir else None
    grip = Grip(
        output_dir=report.output_dir,
        saves_in="" if known is None else known.saves_in,
        since=model.run.created,
        made_in=report.made_in,
        batch=report.batch,
        accumulation=report.accumulation,
        processes=report.processes or 1,
        seq_len=report.seq_len,
        peak_rate=report.peak_rate,
        schedule=report.schedule,
        warmup=report.warmup,
        fixed_length=report.fixed_length,
        saves_on_sigterm=report.saves_on_sigterm,
        earlier=report.earlier if known is None else known.earlier,
        first=None if known is None else known.first,
        resumes=None if known is None else known.resumes,
    )
    if grip == known:
        return model
    model = replace(model, grip=grip)
    return model if replayed else emit(model, SaveState())


def saved(model: Model, report: Saved, *, replayed: bool) -> Model:
    """The agent has seen where the program saves."""
    grip = model.grip
    if grip is None or report.path is None or (after := grip.with_seen_at(report.path)) is grip:
        return model
    model = replace(model, grip=after)
    return model if replayed else emit(model, SaveState())


def begins(model: Model, plan: Plan) -> Model:
    """The program has reported where it begins: it may have resumed by itself."""
    by_memtop = model.asked is not None and model.asked.resumed is not None
    if model.grip is None or not plan.resumed or by_memtop:
        return model
    return emit(replace(model, grip=replace(model.grip, first=plan.updates)), SaveState())


def begun(model: Model, event: Launched, before: dict[str, str]) -> Model:
    """An attempt has started: remember what its first update must show."""
    if event.grip is not None:
        model = replace(model, grip=event.grip)
    if model.grip is None:
        return model
    at = event.resumed
    model = replace(model, asked=Asked(before=before, resumed=at.updates if at is not None else None, checkpoint=at))
    if at is None:
        return model
    where = f"at update {at.updates}, " if at.updates is not None else f"at step {at.step}, " if at.step is not None else ""
    return note(model, "resume", f"attempt {event.number} is to resume {where}from {at.path}")
