"""Where a run stands whose newest attempt has done no update."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.speed import NEWEST, Done, speed
from memtop.supervisor.wire import RunState


def lacks_update(state: RunState) -> bool:
    """Whether a later attempt of the run has ended without an update."""
    return state.state.final and state.attempt > 1 and state.loss is None and state.step_seconds is None


def with_last_update(state: RunState, ledger: Ledger) -> RunState:
    """The run stands where the attempt before has left it, with the loss and the speed of that
    one."""
    rows = ledger.metrics(NEWEST)
    row = rows[-1] if rows else None
    if row is None or row.attempt == state.attempt or state.updates not in (None, row.update):
        return state
    done = [
        Done(one.time, one.update, one.samples_seen, one.tokens)
        for one in rows
        if one.attempt == row.attempt and one.time is not None and one.updates == 1
    ]
    measured = speed(done, state.effective_batch)
    return replace(
        state,
        updates=row.update,
        samples_seen=state.samples_seen or row.samples_seen,
        loss=row.loss,
        learning_rate=row.learning_rate,
        samples_per_second=measured.samples_per_second,
        tokens_per_second=measured.tokens_per_second,
    )
