"""The end of an attempt: its last words, what it left behind, why it ended, and what the run is now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.recovery.policy import Decision
from memtop.supervisor.run import explain
from memtop.supervisor.run.intake import read_reports
from memtop.supervisor.run.processes.attempt import UNKNOWN_STATUS, ExitFile, clear_leftovers
from memtop.supervisor.run.record.checkpoints import newest_checkpoint
from memtop.supervisor.wire import Change, Phase

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor


async def finish(supervisor: Supervisor, ended: ExitFile) -> None:
    """The program has ended: read its last words, clear what it left behind, decide what the run is now."""
    assert supervisor.attempt is not None
    read_reports(supervisor, to_the_end=True)
    # Among them may be the trainer itself, whose launcher or wrapper has ended: what it still says counts.
    attempt = supervisor.attempt
    await clear_leftovers(attempt, lambda text: supervisor.event("leftovers", text), supervisor.ladder, supervisor.keep_up)
    read_reports(supervisor, to_the_end=True)
    progress, status = supervisor.progress, None if ended.status == UNKNOWN_STATUS else ended.status
    supervisor.ended, supervisor.exit_status = ended.ended, status
    supervisor.checkpoint = newest_checkpoint(supervisor.folder.latest_state)
    phase, reason, diagnosis = explain.outcome(
        attempt.log_path,
        progress.end,
        status,
        supervisor.lifecycle.phase,
        own_program=supervisor.settings is None,
        end_rank=progress.end_rank,
    )
    if supervisor.survival.stalled is not None and supervisor.pending is None and phase in (Phase.STOPPED, Phase.FINISHED):
        phase, reason = Phase.FAILED, f"stood still after: {supervisor.survival.stalled}"
    examined = await _examine(supervisor, ended, status) if phase is Phase.FAILED else None
    if examined is not None:
        diagnosis, cause = explain.with_cause(examined, diagnosis, reason)
        # A program that says itself what is not saved says it best.
        reason = explain.not_saved(progress.end) or cause
        if (examined.reason or "").startswith("not_examined"):
            supervisor.event("warning", examined.summary)
    # Asked for while we read: it counts.
    outcome = "restarted" if supervisor.pending is not None else phase.value
    supervisor.survival.ended(outcome, examined)
    decision = _decision(supervisor, phase, examined)
    # In this order: once the ledger has it, the next supervisor takes the attempt for done with, and does what state.json says.
    if decision is not None:
        supervisor.save_state()
    # If the ledger cannot take it now, the next supervisor finds the attempt open and its exit file, and comes here again.
    supervisor.update_attempt(
        ended=ended.ended,
        exit_status=status,
        outcome=outcome,
        diagnosis=diagnosis,
        updates=progress.update,
        samples_seen=progress.step.samples_seen if progress.step else None,
        peak_bytes=progress.peak_bytes,
    )
    if supervisor.pending is None:
        _end(supervisor, phase, reason, decision)
    else:
        _restart(supervisor, supervisor.pending)


def _decision(supervisor: Supervisor, phase: Phase, examined: Diagnosis | None) -> Decision | None:
    """What is done about the death by itself; None where it was none, or somebody has asked for something else."""
    # Whoever told it to stop, be it from outside memtop, does not want it to come back.
    told = supervisor.lifecycle.phase is Phase.STOPPING or (
        supervisor.progress.end is not None and supervisor.progress.end.outcome == "stopped"
    )
    died = phase is Phase.FAILED and not told
    return supervisor.survival.decide(examined) if examined is not None and died and supervisor.pending is None else None


def _restart(supervisor: Supervisor, change: Change) -> None:
    """What was asked for while it ran: the next attempt begins."""
    assert supervisor.attempt is not None
    if supervisor.lifecycle.phase is not Phase.RESTARTING:
        supervisor.move(Phase.RESTARTING)
    if unsaved := explain.not_saved(supervisor.progress.end):
        supervisor.event("warning", f"attempt {supervisor.attempt.number}: {unsaved}")
    try:
        supervisor.launch(supervisor.next_number(), explain.restart_reason(change), change)
    except MemtopError as error:
        # A change that cannot be made after all leaves a run that has stopped as it was asked to.
        phase = Phase.STOPPED if isinstance(error, UsageError) else Phase.FAILED
        supervisor.pending = None
        supervisor.update_attempt(outcome=phase.value)
        supervisor.move(phase, str(error))
        supervisor.event(phase.value, str(error))


async def _examine(supervisor: Supervisor, ended: ExitFile, status: int | None) -> Diagnosis:
    """Why the program ended; whoever looks on is kept up to date meanwhile."""
    stalled = supervisor.survival.stalled is not None
    stopping = supervisor.lifecycle.phase in (Phase.STOPPING, Phase.RESTARTING)
    asked = stopping or (supervisor.ladder is not None and not stalled)
    # A program that says itself that it failed to save may still end with status 0, which would prove that all is well;
    # and one that we ended because it stood still ended of our signal.
    known = None if status == 0 or stalled else status
    return await supervisor.survival.examine(ended, known, asked=asked, meanwhile=supervisor.publish)


def _end(supervisor: Supervisor, phase: Phase, reason: str | None, decision: Decision | None) -> None:
    """The run is over, unless it is to come back by itself."""
    supervisor.event(phase.value, reason or phase.value, {"exit_status": supervisor.exit_status})
    if decision is not None:
        supervisor.event("remedy", explain.decided(decision))
    if supervisor.survival.comeback is not None:
        supervisor.move(Phase.RESTARTING, reason)
    else:
        supervisor.move(phase, reason)
