"""The end of an attempt: end leftover processes, find out why it ended, choose the next phase."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery.policy import Decision
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import ClearLeftovers, Examine, SaveState, UpdateAttempt
from memtop.supervisor.run.events import Examined, LeftoversCleared, LeftoversFound, ProgramEnded, RemedyFacts
from memtop.supervisor.run.model import AttemptStage, AttemptVerdict, Cause, Model, emit, move, not_by_signal, note, warn
from memtop.supervisor.run.rules import attempts, spikes, survival, verification
from memtop.supervisor.run.stop_ladder import LEFTOVER_SECONDS
from memtop.supervisor.wire import Change, Checkpoint, Phase


def program_ended(model: Model, event: ProgramEnded) -> Model:
    """End leftover processes: ranks of a dead launcher and loader workers would keep its memory."""
    attempt, ladder = model.attempt, model.ladder
    if attempt is None or attempt.stage is not AttemptStage.RUNNING:
        return model
    attempt = replace(attempt, stage=AttemptStage.CLEARING, ended=event.ended, exit_status=event.status)
    # After a stop, they may still be saving: they get the time that the program would have had.
    untouched, terminate = (0.0, LEFTOVER_SECONDS) if ladder is None else ladder.patience(model.now.monotonic)
    model = replace(model, attempt=attempt)
    saved = None if model.settings is not None else model.progress.reported
    return emit(model, ClearLeftovers(untouched_seconds=untouched, terminate_seconds=terminate, saved=saved))


def leftovers_found(model: Model, event: LeftoversFound) -> Model:
    """Name the processes that the program left behind."""
    words = explain.names(event.processes)
    if event.name is None:
        return note(model, "leftovers", f"left behind by the program and still there after SIGKILL: {words}")
    others = (one for one in event.processes if one not in model.left_over)
    model = replace(model, left_over=(*model.left_over, *others))
    return note(model, "leftovers", f"{event.name} to what the program left behind: {words}")


def leftovers_cleared(model: Model, event: LeftoversCleared) -> Model:
    """All reports have been read: determine how the program ended."""
    attempt = model.attempt
    if attempt is None or attempt.stage is not AttemptStage.CLEARING:
        return model
    model = warn(replace(model, states=event.states, alive=False, trainer_pid=None), "stop", None)
    newest, gone = event.states.program, _gone(event)
    if newest is not None and (gone is not None or (model.grip is not None and model.grip.profile is not None)):
        model = replace(model, saved_by_program=newest)
    progress, status = model.progress, attempt.exit_status
    lost = None if gone is None else explain.gone(gone, model.update, newest)
    external = model.settings is None
    trained = external and progress.is_trained and not (newest is not None and newest.complete)
    phase, reason, diagnosis = explain.outcome(
        event.log,
        progress.end,
        status,
        model.phase,
        external=external,
        end_rank=progress.end_rank,
        lost=lost,
        trained=trained,
    )
    if phase is Phase.STOPPED and model.phase is Phase.STOPPING and (unsaved := lost_by_stop(model)) is not None:
        reason = f"{reason}; {unsaved}"
    if model.stalled is not None and model.pending is None and phase in (Phase.STOPPED, Phase.FINISHED):
        phase, reason = Phase.FAILED, f"stood still after: {model.stalled}"
    if phase is Phase.FINISHED and (why := verification.without_training(model)) is not None:
        phase, reason, diagnosis = Phase.FAILED, why, {"summary": why, "evidence": list(event.log.lines)}
    resumed = model.settings is not None or (model.asked is not None and model.asked.checkpoint is not None)
    if phase is Phase.FINISHED and resumed and model.number > 1 and model.update is None:
        reason = f"attempt {model.number} made no updates"
    verdict = AttemptVerdict(phase=phase, reason=reason, diagnosis=diagnosis)
    if phase is Phase.FINISHED and model.left_over:
        verdict = _with_leftovers(model, event)
        phase = verdict.phase
    if phase is not Phase.FAILED:
        return _conclude(replace(model, verdict=verdict), None, None)
    stalled = model.stalled is not None
    stopping = model.phase in (Phase.STOPPING, Phase.RESTARTING)
    if not (stalled or stopping or model.ladder is not None):
        verdict = replace(verdict, ended_by=event.log.fatal_signal(status))
    examine = Examine(
        ended=attempt.ended or model.now.time,
        # Two exit statuses would mislead: 0 from a program that failed to save, and the signal with
        # which memtop ended a program that hung.
        status=None if status == 0 or stalled else status,
        stop_requested=stopping or (model.ladder is not None and not stalled),
        settings=model.settings,
    )
    return emit(replace(model, attempt=replace(attempt, stage=AttemptStage.EXAMINING), verdict=verdict), examine)


def lost_by_stop(model: Model) -> str | None:
    """Which updates of memtop's own trainer a stop has lost, in words; None if it has reported how
    it ended. On a full disk it cannot report.
    """
    if model.settings is None or model.progress.end is not None:
        return None
    return explain.lost(model.update, model.checkpoint)


def _gone(event: LeftoversCleared) -> Checkpoint | None:
    """The newest checkpoint that the program has reported, if it is not there any more and none
    replaces it."""
    saved, newest = event.saved, event.states.program
    if saved is None:
        return None
    replaced = newest is not None and newest.complete and (newest.updates or 0) >= (saved.updates or 0)
    return None if replaced else saved


def _with_leftovers(model: Model, event: LeftoversCleared) -> AttemptVerdict:
    """The main program ended well, and memtop ended what it left behind. If that was still
    training, the run has not finished.
    """
    end = model.progress.end
    ranks = {rank.pid for rank in model.progress.ranks.values()}
    trained = [one for one in model.left_over if one.pid in ranks]
    if not trained or (end is not None and end.outcome == "finished"):
        words = f"the main program ended; memtop ended the processes that it left behind: {explain.names(model.left_over)}"
        return AttemptVerdict(phase=Phase.FINISHED, reason=words)
    words = (
        f"the main program ended while {explain.names(trained)} was still training, so memtop ended that process. "
        "Let the main program wait for it."
    )
    diagnosis = {"summary": words, "evidence": list(event.log.lines)}
    return AttemptVerdict(phase=Phase.FAILED, reason=words, diagnosis=diagnosis)


def examined(model: Model, event: Examined) -> Model:
    """The post-mortem is finished."""
    verdict = model.verdict
    attempt = model.attempt
    if attempt is None or attempt.stage is not AttemptStage.EXAMINING or verdict is None:
        return model
    found = event.diagnosis
    if event.problem is not None:
        model = note(model, "warning", event.problem)
    diagnosis, cause = explain.with_cause(found, verdict.diagnosis, verdict.reason)
    # The program's own report of what is not saved is the most reliable.
    reason = explain.not_saved(model.progress.end) or cause
    if (found.reason or "").startswith("not_examined"):
        model = note(model, "warning", found.summary)
    # If the kernel killed all processes of the attempt, none was left to write the exit status.
    ended_by = signal.SIGKILL if attempt.exit_status is None and explain.killed_for_memory(found) else verdict.ended_by
    model = replace(model, verdict=replace(verdict, reason=reason, diagnosis=diagnosis, ended_by=ended_by))
    return _conclude(model, found, event.facts)


def _conclude(model: Model, found: Diagnosis | None, facts: RemedyFacts | None) -> Model:
    """Write the end into the ledger, then begin what follows."""
    attempt, verdict, progress = model.attempt, model.verdict, model.progress
    assert attempt is not None
    assert verdict is not None
    if model.pending is not None and (why := _nothing_to_restart(model, verdict, model.pending)) is not None:
        verdict = replace(verdict, phase=Phase.FINISHED, reason=why)
        model = replace(model, pending=None)
    # A restart that was requested while the log was read counts.
    outcome = "restarted" if model.pending is not None else verdict.phase.value
    model = survival.ended(model, outcome, verdict.ended_by, found)
    model = verification.after_end(model)
    if _died_by_itself(model, verdict) and (back := verification.going_back(model) or spikes.going_back(model)) is not None:
        model = replace(model, pending=back)
    decision: Decision | None = None
    if found is not None and facts is not None and _died_by_itself(model, verdict):
        model, decision = survival.decide(model, found, facts)
    attempt = replace(attempt, stage=AttemptStage.OVER, ended_by=verdict.ended_by)
    model = replace(model, attempt=attempt, ladder=None, verdict=None)
    if verdict.phase is Phase.FINISHED:
        # It may have finished without an update: the attempt that failed had saved the last one.
        model = replace(model, proposal=None)
    if decision is not None:
        # Before the ledger: once it has the end, the next supervisor follows state.json.
        model = emit(model, SaveState())
    ended = {
        "ended": attempt.ended,
        "exit_status": attempt.exit_status,
        "outcome": outcome,
        "diagnosis": {**(verdict.diagnosis or {}), **_signal_of(verdict)} or None,
        "updates": model.update,
        "samples_seen": progress.step.samples_seen if progress.step is not None else None,
        "peak_bytes": progress.peak_bytes,
    }
    # If the ledger cannot be written now, the next supervisor finds the attempt open, with its
    # exit file, and repeats this step.
    model = emit(model, UpdateAttempt(number=attempt.number, values=ended))
    return _over(model, verdict, decision) if model.pending is None else _restart(model)


def _nothing_to_restart(model: Model, verdict: AttemptVerdict, change: Change) -> str | None:
    """Why the requested restart would train nothing: the program was at its last update. None if it
    has something to do."""
    assert model.attempt is not None
    # The user's own program says only by its exit status that it has finished.
    ended_well = model.settings is None and verdict.phase is Phase.STOPPED and model.attempt.exit_status == 0
    if verdict.phase is not Phase.FINISHED and not ended_well:
        return None
    finished = replace(model, phase=Phase.FINISHED)
    why = _refusal(finished, change)
    # A change that makes the training too short does not make it complete.
    complete = why is not None and (verdict.phase is Phase.FINISHED or _refusal(finished, Change()) is not None)
    return why if complete else None


def _refusal(model: Model, change: Change) -> str | None:
    try:
        attempts.settings_after(model, change)
    except UsageError as error:
        return str(error)
    return None


def _died_by_itself(model: Model, verdict: AttemptVerdict) -> bool:
    """Whether the program failed by itself: without a stop or a requested restart."""
    end = model.progress.end
    stopped = model.phase is Phase.STOPPING or (end is not None and end.outcome == "stopped")
    return verdict.phase is Phase.FAILED and not stopped and model.pending is None


def _over(model: Model, verdict: AttemptVerdict, decision: Decision | None) -> Model:
    """The run is over, unless memtop restarts it."""
    attempt = model.attempt
    assert attempt is not None
    reason = verdict.reason
    data = {"exit_status": attempt.exit_status, **_signal_of(verdict)}
    model = note(model, verdict.phase.value, reason or verdict.phase.value, data)
    if decision is not None:
        model = note(model, "remedy", explain.decided(decision))
    return move(model, Phase.RESTARTING if model.restart is not None else verdict.phase, reason)


def _signal_of(verdict: AttemptVerdict) -> dict[str, int]:
    return {} if verdict.ended_by is None else {"ended_by": int(verdict.ended_by)}


def _restart(model: Model) -> Model:
    """Begin the attempt that was requested while the program ran."""
    change = model.pending
    assert change is not None
    if model.phase is not Phase.RESTARTING:
        model = move(model, Phase.RESTARTING)
    if unsaved := explain.not_saved(model.progress.end):
        model = note(model, "warning", f"attempt {model.number}: {unsaved}")
    try:
        return attempts.launch(model, change, Cause.PENDING)
    except UsageError as error:
        return restart_refused(model, str(error), usage=True)


def restart_refused(model: Model, why: str, *, usage: bool) -> Model:
    """The restart is impossible. If the change was invalid, the run has stopped as requested; after
    any other refusal it has failed.
    """
    phase = Phase.STOPPED if usage else Phase.FAILED
    model = emit(
        replace(not_by_signal(model), pending=None), UpdateAttempt(number=model.number, values={"outcome": phase.value})
    )
    return note(move(model, phase, why), phase.value, why)
