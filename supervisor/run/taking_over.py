"""How a supervisor begins: it starts the run, adopts a program that an earlier one left behind, or takes up what that one had
still to do. Any of them may have died at any moment: what was decided is in the ledger, in state.json and in the journals.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from memtop.supervisor.errors import MemtopError
from memtop.supervisor.run import explain
from memtop.supervisor.run.intake import read_reports
from memtop.supervisor.run.processes.attempt import RunningAttempt
from memtop.supervisor.run.processes.launch import was_begun
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.run.record.ledger import Attempt
from memtop.supervisor.run.reports import Report
from memtop.supervisor.wire import Change, Phase

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor

_FINAL = {phase.value: phase for phase in Phase if phase.final}


def take_over(supervisor: Supervisor, change: Change | None) -> None:
    """Begin with what is known of the run. MemtopError where the change (or the first start) cannot be made."""
    _close_never_begun(supervisor)
    attempts = supervisor.ledger.attempts()
    if not attempts:
        supervisor.launch(1, "start", change or Change())
        return
    last, state = attempts[-1], supervisor.folder.state()
    # An attempt that could not be started never was what this run is.
    begun = [attempt for attempt in attempts if (attempt.diagnosis or {}).get("started", True)]
    newest = begun[-1] if begun else last
    _remember(supervisor, newest, state)
    if state is not None and state.run.attempt != newest.number:
        state = None  # of the attempt before: its supervisor died before it could tell of this one
    if last.ended is None:
        _adopt(supervisor, state)
        supervisor.pending = change or supervisor.pending
    else:
        _take_up(supervisor, newest, state, change)


def _close_never_begun(supervisor: Supervisor) -> None:
    """An attempt that is in the ledger and has no program: its supervisor died before it could start it."""
    ledger = supervisor.ledger
    last = next(reversed(ledger.attempts()), None)
    if last is not None and last.ended is None and not was_begun(supervisor.folder.attempt(last.number)):
        number, why = last.number, "its supervisor ended before it could start it"
        supervisor.ledgered(lambda: ledger.close_unstarted(number, why, time.time()))


def _remember(supervisor: Supervisor, last: Attempt, state: StateFile | None) -> None:
    """Know again what an earlier supervisor knew of the run's newest attempt."""
    supervisor.settings = last.settings
    supervisor.attempt = RunningAttempt(supervisor.folder, last.number, shim_pid=None)
    supervisor.survival.remember(last, state)
    losses = [metric.loss for metric in supervisor.ledger.metrics() if metric.loss is not None]
    supervisor.progress = Progress(best_loss=min(losses, default=None))
    supervisor.started, supervisor.ended, supervisor.exit_status = last.started, last.ended, last.exit_status

    def replay(rank: int, report: Report) -> None:
        supervisor.progress = supervisor.progress.after(rank, report)
        supervisor.survival.replay(rank, report)

    supervisor.attempt.replay(lambda rank: supervisor.ledger.journal_offset(last.number, rank), replay)
    present = supervisor.survival.configurations.present
    if present is not None and present.newest_attempt >= last.number and present.configuration.settings is not None:
        # Later than what the program said: a trial that its end cut short was taken back.
        supervisor.settings = present.configuration.settings
    if last.ended is not None:
        # What the ledger could not take at its end.
        read_reports(supervisor, to_the_end=True)


def _adopt(supervisor: Supervisor, state: StateFile | None) -> None:
    """The program lives, or has ended and nobody has seen to that yet."""
    assert supervisor.attempt is not None
    supervisor.adopted = True
    phase = state.run.state if state is not None and not state.run.state.final else Phase.STARTING
    if state is not None and state.waiting is not None and state.pending is None:
        # It has ended by itself, which the ledger could not take: what is done about it is decided anew.
        phase = Phase.TRAINING
    supervisor.resume_in(phase)
    supervisor.pending = state.pending if state is not None else None
    supervisor.event("adopted", f"supervisor {os.getpid()} took over attempt {supervisor.attempt.number}")
    supervisor.prevention.trials.take_up()
    if phase in (Phase.STOPPING, Phase.RESTARTING) or supervisor.survival.stalled is not None:
        supervisor.begin_stop(asked=False)


def _take_up(supervisor: Supervisor, last: Attempt, state: StateFile | None, change: Change | None) -> None:
    """The program has ended: begin anew with the change, or with what an earlier supervisor had still to do."""
    # Where the supervisor died before it had put both together, the ledger knows why the program ended.
    reason = (state.run.reason if state is not None else None) or (last.diagnosis or {}).get("summary")
    if state is not None and state.waiting is not None:
        supervisor.resume_in(Phase.RESTARTING, reason)
        supervisor.event("adopted", f"supervisor {os.getpid()} took over: the restart after attempt {last.number} waits again")
        supervisor.survival.wait_again(state.waiting)
    else:
        final = state is not None and state.run.state.final
        supervisor.resume_in(state.run.state if state and final else _FINAL.get(last.outcome or "", Phase.FAILED), reason)
    supervisor.prevention.trials.take_up()
    owed = state.pending if state is not None else None
    if change is not None:
        supervisor.launch(supervisor.next_number(), explain.restart_reason(change), change)
    elif owed is not None:
        try:
            supervisor.launch(supervisor.next_number(), explain.restart_reason(owed), owed)
        except MemtopError as error:
            supervisor.lifecycle.reason = str(error)
            supervisor.event("failed", str(error))
