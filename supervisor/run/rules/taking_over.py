"""How a supervisor begins: it starts the run, adopts a running program, or finishes what an earlier
supervisor began.

An earlier supervisor may have been killed at any moment. Its decisions are in the ledger, in
state.json and in the journals; what it did not write is decided again.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from memtop.supervisor.errors import UsageError
from memtop.supervisor.run.effects import CloseUnstarted, GiveUp, SaveState
from memtop.supervisor.run.events import SupervisorStarted
from memtop.supervisor.run.model import AttemptStage, Cause, CurrentAttempt, Model, Opening, emit, not_by_signal, note
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.configurations import Configurations
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.run.record.ledger import Attempt
from memtop.supervisor.run.rules import attempts, configurations, queue, stopping, survival, trainer, trials
from memtop.supervisor.run.speed import ran_seconds
from memtop.supervisor.wire import Change, Phase

_FINAL = {phase.value: phase for phase in Phase if phase.final}
_UNSTARTED = "its supervisor ended before it could start it"


def opened(model: Model, event: SupervisorStarted) -> Model:
    """Restore the model of an earlier supervisor. The newest attempt's reports follow."""
    model = replace(model, configurations=Configurations(records=event.records), states=event.states)
    newest = newest_started(event.attempts, event.unstarted)
    waits = model.run.waits and not (event.state is not None and event.state.run.state.final)
    if newest is None and event.after_kill and not waits:
        return emit(model, GiveUp(why=_UNSTARTED))
    if newest is None and model.run.waits and event.change is None:
        return queue.begin(model)
    if newest is None:
        return _begin(model, event.change or Change(), Cause.START)
    last = event.attempts[-1]
    model = replace(model, newest_number=last.number)
    for number in sorted(event.unstarted):
        model = emit(model, CloseUnstarted(number=number, why=_UNSTARTED))
    if newest.number in event.unstarted:
        newest = replace(newest, ended=model.now.time, outcome="failed", diagnosis={"summary": _UNSTARTED})
    # state.json of the attempt before: its supervisor was killed before it could write that it had
    # started this one.
    state = event.state if event.state is not None and event.state.run.attempt == newest.number else None
    model = _remember(model, newest, event, state)
    opening = Opening(
        change=event.change,
        state=state,
        is_open=newest.ended is None,
        outcome=newest.outcome,
        summary=(newest.diagnosis or {}).get("summary"),
        trial=event.trial,
    )
    return replace(model, opening=opening)


def newest_started(attempts: tuple[Attempt, ...], unstarted: Collection[int]) -> Attempt | None:
    """The newest attempt whose program was started; if there is none, the newest attempt, or None.

    `unstarted`: attempts that are open in the ledger and have no program.
    """
    started = [row for row in attempts if row.number not in unstarted and row.launched]
    return started[-1] if started else attempts[-1] if attempts else None


def _remember(model: Model, row: Attempt, event: SupervisorStarted, state: StateFile | None) -> Model:
    is_open = row.ended is None
    attempt = CurrentAttempt(
        number=row.number,
        started=row.started,
        since=model.now.monotonic,
        earlier_seconds=ran_seconds(one for one in event.attempts if one.number < row.number) or 0.0,
        stage=AttemptStage.RUNNING if is_open else AttemptStage.OVER,
        ended=row.ended,
        exit_status=row.exit_status,
        ended_by=row.ended_by if state is None or not state.run.state.final else state.run.ended_by,
    )
    model = replace(
        model,
        settings=row.settings,
        attempt=attempt,
        progress=Progress(best_before=event.best_loss, peak_bytes=event.peak_bytes),
        proposal=state.run.proposal if state is not None else None,
        stalled=state.stalled if state is not None else None,
        grip=event.state.grip if event.state is not None else None,
        asked=state.asked if state is not None else None,
        waited_at=event.state.waited_at if event.state is not None else None,
        saved_by_program=event.state.run.checkpoint if event.state is not None and row.settings is None else None,
        announced=event.announced,
        # The phase of the run is known when the reports have been replayed.
        phase=Phase.STARTING if is_open else model.phase,
    )
    if is_open and not model.configurations.has_begun(row.number):
        model = _begin_configuration(model, row, event.state)
    present = model.configurations.present
    if present is None:
        return model
    return replace(model, allocator=present.allocator, knobs=present.configuration.knobs)


def _begin_configuration(model: Model, row: Attempt, state: StateFile | None) -> Model:
    """Add the configuration of an attempt whose supervisor was killed before it could write it."""
    waiting = state.waiting.change if state is not None and state.waiting is not None else None
    requested = state.pending if state is not None else None
    cause = next((one for one in (waiting, requested) if one == row.change), None)
    present = model.configurations.present
    allocator = present.allocator if present is not None else ""
    knobs = present.configuration.knobs if present is not None else {}
    if cause is not None and row.settings is None:
        allocator = cause.assignments.get("allocator", allocator)
        knobs = trainer.knobs_after(replace(model, knobs=knobs), cause)
    begun = model.configurations.begin_attempt(
        row.number,
        row.reason,
        row.settings,
        row.started,
        allocator=allocator,
        knobs=knobs,
        by_memtop=cause is not None and cause is waiting,
        saved=row.start_updates if row.start_updates is not None else model.saved,
    )
    return configurations.put(model, begun)


def replayed(model: Model) -> Model:
    """All reports have been replayed: continue the run."""
    opening = model.opening
    if opening is None:
        return model
    # Only the first update of an attempt shows what an earlier supervisor asked for.
    model = replace(model, opening=None, asked=None if model.progress.step is not None else model.asked)
    present = model.configurations.present
    if present is not None and present.newest_attempt >= model.number and present.configuration.settings is not None:
        # The ledger is newer than the reports: a trial that the end interrupted was undone.
        model = replace(model, settings=present.configuration.settings)
    return _adopt(model, opening) if opening.is_open else _take_up(model, opening)


def _adopt(model: Model, opening: Opening) -> Model:
    """Adopt the program: it is alive, or it has ended and no supervisor has handled the end yet."""
    state = opening.state
    phase = state.run.state if state is not None and not state.run.state.final else Phase.STARTING
    if state is not None and state.waiting is not None and state.pending is None:
        # It ended by itself, and the ledger could not be written: decide again what follows.
        phase = Phase.TRAINING
    if phase is Phase.STARTING and model.progress.step is not None:
        phase = Phase.TRAINING
    if phase is Phase.STOPPING and opening.change is not None:
        phase = Phase.RESTARTING
    pending = state.pending if state is not None else None
    model = replace(model, adopted=True, phase=phase, reason=None, pending=pending)
    model = note(model, "adopted", f"supervisor {model.supervisor_pid} took over attempt {model.number}")
    model = trials.take_over(model, opening.trial)
    if opening.change is not None:
        model = emit(replace(model, pending=opening.change), SaveState())
    if phase in (Phase.STOPPING, Phase.RESTARTING) or model.stalled is not None:
        model = stopping.begin(model, asked=False)
    return model


def _take_up(model: Model, opening: Opening) -> Model:
    """The program has ended: restart with the change, or do what an earlier supervisor began."""
    state = opening.state
    # If the supervisor was killed before it wrote state.json, the ledger has the reason.
    reason = (state.run.reason if state is not None else None) or opening.summary
    pending = state.pending if state is not None else None
    if state is not None and state.waiting is not None:
        model = replace(model, phase=Phase.RESTARTING, reason=reason)
        text = f"supervisor {model.supervisor_pid} took over: the restart after attempt {model.number} waits again"
        model = survival.wait_for(note(model, "adopted", text), state.waiting)
    else:
        final = state.run.state if state is not None and state.run.state.final else None
        phase = final or _FINAL.get(opening.outcome or "", Phase.STOPPED if pending else Phase.FAILED)
        model = replace(model, phase=phase, reason=reason, proposal=None if phase is Phase.FINISHED else model.proposal)
    model = trials.take_over(model, opening.trial)
    if opening.change is not None:
        return _begin(model, opening.change, Cause.START)
    if pending is None or model.launching is not None:
        return model
    try:
        return attempts.launch(replace(model, restart=None), pending, Cause.INHERITED)
    except UsageError as error:
        return inherited_refused(model, str(error))


def inherited_refused(model: Model, why: str) -> Model:
    """A restart requested from an earlier supervisor is impossible: the run stays ended."""
    return emit(note(replace(not_by_signal(model), reason=why), "failed", why), SaveState())


def _begin(model: Model, change: Change, cause: Cause) -> Model:
    try:
        return attempts.launch(model, change, cause)
    except UsageError as error:
        return emit(model, GiveUp(why=str(error), usage=True))
