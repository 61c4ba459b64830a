"""How attempts begin: the settings of the next one, its start, and the model after it."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery.configuration import edited, kept_length
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import DropRows, Launch, ReleaseState
from memtop.supervisor.run.events import Launched
from memtop.supervisor.run.grip import values_of
from memtop.supervisor.run.model import Cause, CurrentAttempt, Launching, Model, emit, move, note, warn
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.checkpoints import newest_until
from memtop.supervisor.run.rules import configurations, trainer
from memtop.supervisor.wire import Change, Checkpoint, Phase


def foreseen(model: Model, change: Change) -> Settings | None:
    """The settings that result if this change is made now; UsageError if it is not possible.

    A run in progress first finishes one more update.
    """
    if model.settings is None or model.phase.final or change.state_before is not None:
        return settings_after(model, change)
    update = 0 if model.progress.step is None else model.progress.step.update + 1
    if change.max_updates is not None and 0 < change.max_updates < update:
        raise UsageError(f"max_updates {change.max_updates}: the run will have done {update} when it stops; give more")
    return edited(model.proven, change, reached_by(model, change), model.configurations.rows)


def reached_by(model: Model, change: Change) -> Checkpoint | None:
    """Where the run goes on with this change: after the update in progress, or from its newest
    saved state."""
    settings, step = model.proven, model.progress.step
    if model.phase.final or change.state_before is not None or settings is None or step is None:
        return _resumed_from(model, change)
    seen = (step.samples_seen or 0) + settings.effective_batch
    return Checkpoint(path="", updates=step.update + 1, samples_seen=seen, complete=True)


def settings_after(model: Model, change: Change) -> Settings | None:
    """The settings of an attempt that begins with this change; UsageError if it is not possible."""
    if model.proven is None:
        trainer.knobs_after(model, change)
        return None
    after = edited(model.proven, change, _resumed_from(model, change), model.configurations.rows)
    _check_length(model, change, after)
    return after


def _check_length(model: Model, change: Change, after: Settings | None) -> None:
    """UsageError if the run has finished and these settings leave nothing to do."""
    before, at = model.proven, _resumed_from(model, change)
    if model.phase is not Phase.FINISHED or before is None or after is None or at is None or not at.complete:
        return
    if after.target_samples:
        left = at.samples_seen is None or at.samples_seen < after.target_samples
    else:
        left = bool(before.target_samples) or after.epochs > before.epochs or change.state_before is not None
    if not left:
        done = at.updates or 0
        raise UsageError(explain.nothing_left(model.run.name, done, model.progress.total_updates or done))


def _resumed_from(model: Model, change: Change) -> Checkpoint | None:
    return model.checkpoint if change.state_before is None else newest_until(model.states.kept, change.state_before)


def launch(model: Model, change: Change, cause: Cause, *, client: int | None = None, request: int = 0) -> Model:
    """Start the next attempt from the newest complete state, with the changed settings.

    The model keeps everything about the previous attempt until this one has started. UsageError if
    the change is not possible.
    """
    settings = settings_after(model, change)
    allocator = change.assignments.get("allocator", model.allocator) if settings is None else ""
    knobs = trainer.knobs_after(model, change) if settings is None else {}
    number = model.newest_number + 1
    reason = "start" if number == 1 and cause in (Cause.START, Cause.QUEUE) else explain.restart_reason(change)
    launching = Launching(
        number=number,
        cause=cause,
        change=change,
        reason=reason,
        settings=settings,
        allocator=allocator,
        knobs=knobs,
        client=client,
        request=request,
    )
    if model.holding is not None and model.holding.change == change:
        # The program has ended before it was asked to stop for this change.
        model = replace(model, holding=None)
    model = configurations.keep(replace(model, newest_number=number, launching=launching))
    effect = Launch(
        number=number,
        reason=reason,
        change=change,
        settings=settings,
        allocator=allocator,
        state_before=change.state_before,
        grip=model.grip,
        knobs=values_of(knobs, model.grip) if model.grip is not None else {},
    )
    return emit(model, effect)


def launched(model: Model, event: Launched) -> Model:
    """The program of the next attempt was started."""
    launching = model.launching
    assert launching is not None
    change, settings, number = launching.change, launching.settings, launching.number
    meant = explain.split_change(model.settings, settings) + length_text(model, change, settings, event.states.newest)
    repeated = _repeated(model, change, event)
    by_memtop, knobs_before = launching.cause is Cause.DEATH, model.knobs
    if by_memtop and model.restart is not None and model.restart.waiting.disk_bytes is not None:
        model = replace(model, waited_at=model.saved or 0)
    model = _anew(model, launching, event, repeated)
    begun = model.configurations.begin_attempt(
        number,
        launching.reason,
        settings,
        event.started,
        allocator=launching.allocator,
        knobs=launching.knobs,
        by_memtop=by_memtop,
        saved=model.saved,
    )
    model = configurations.put(model, begun)
    newest = event.states.newest
    for topic in ("report", "log", "spike"):
        model = warn(model, topic, None)
    model = warn(model, "checkpoint", newest.problem if newest is not None else None)
    model = move(emit(model, ReleaseState()), Phase.STARTING)
    if settings is None:
        # An external command counts its updates from its start, unless memtop makes it resume; the
        # built-in trainer reports where it resumes.
        since = 0 if event.resumed is None else event.resumed.updates
        # Where the checkpoint does not say its update, the first output does.
        model = trainer.begun(model if since is None else emit(model, DropRows(since + 1)), event, knobs_before)
        model = configurations.note_uses(model)
        if number == 1 or event.resumed is not None:
            model = model if since is None else configurations.put(model, model.configurations.resumed(since))
    if event.set_aside is not None:
        model = note(model, "rollback", f"states after update {change.state_before} moved to {event.set_aside}")
    again = f"; {repeated}" if repeated else ""
    return note(model, "attempt", f"attempt {number}: {launching.reason}{meant}{again}")


def length_text(model: Model, change: Change, after: Settings | None, reached: Checkpoint | None) -> str:
    """How a change moves the end of the run and the learning rate, as the end of a sentence; empty
    if it does not. `reached`: where the run goes on."""
    length = explain.length_change(model.settings, after, reached, model.progress.total_updates)
    length = length or kept_length(change, after, model.configurations.rows)
    return f"; {length}" if length else ""


def _anew(model: Model, launching: Launching, event: Launched, repeated: str | None) -> Model:
    """The model at the start of an attempt: everything about the previous attempt is reset."""
    return replace(
        model,
        launching=None,
        attempt=CurrentAttempt(
            number=launching.number,
            started=event.started,
            since=model.now.monotonic,
            earlier_seconds=0.0 if model.attempt is None else model.attempt.seconds_until(event.started),
        ),
        settings=launching.settings,
        states=event.states,
        progress=Progress(best_before=model.progress.best_loss),
        output=None,
        repeated=repeated,
        pending=None,
        restart=None,
        ladder=None,
        signalled=None,
        left_over=(),
        verdict=None,
        adopted=False,
        alive=True,
        trainer_pid=None,
        torch_loaded=False,
        stalled=None,
        agents=frozenset(),
        announced=frozenset(),
        allocator=launching.allocator,
        knobs=launching.knobs,
        asked=None,
        host_bytes=None,
        trends=(),
        own_trends=(),
        leak_handled=False,
        advice=None,
    )


def _repeated(model: Model, change: Change, event: Launched) -> str | None:
    """Which updates of the previous attempt are repeated, in words.

    None if the run went back to an earlier state on purpose, and for external commands of which
    memtop does not know where they resume.
    """
    if model.settings is None:
        at = event.resumed
        return None if at is None or at.updates is None else explain.done_again(model.update, at)
    return None if change.state_before is not None else explain.done_again(model.progress.update, event.states.newest)
