"""A requested restart: stop the program first, then begin the next attempt with the change."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor.run.effects import HoldState, KeepCheckpoint, ReleaseState, SaveState
from memtop.supervisor.run.grip import values_of
from memtop.supervisor.run.model import Cause, Holding, Model, emit, move, note
from memtop.supervisor.run.rules import attempts, stopping, trainer
from memtop.supervisor.wire import Change, Phase


def begin(model: Model, change: Change, cause: Cause, *, client: int | None = None, request: int = 0) -> Model:
    """Stop the attempt; when it has ended, the next one starts. An ended run starts at once.
    UsageError if the
    change is not possible.
    """
    if model.phase.final or model.phase is Phase.QUEUED or model.restart is not None:
        return attempts.launch(model, change, cause, client=client, request=request)
    if change.state_before is not None:
        # The program saves once more when it stops, which may remove the oldest state.
        holding = Holding(change=change, client=client, request=request)
        return emit(replace(model, holding=holding), HoldState(change.state_before))
    model = emit(model, ReleaseState())
    if model.grip is not None:
        # It may save over its only checkpoint, or be killed while it does.
        holding = Holding(change=change, client=client, request=request)
        after = model.grip.given(values_of(trainer.knobs_after(model, change), model.grip))
        return emit(replace(model, holding=holding), KeepCheckpoint(grip=model.grip, after=after))
    return proceed(model, change)


def held(model: Model) -> Model:
    """The state to which the run returns is protected: stop the program. UsageError if it has ended
    meanwhile, and the change is not possible."""
    holding = model.holding
    assert holding is not None
    model = replace(model, holding=None)
    if model.phase is Phase.STOPPING:
        return model
    if model.phase.final or model.restart is not None:
        return attempts.launch(model, holding.change, Cause.REQUEST, client=holding.client, request=holding.request)
    return proceed(model, holding.change)


def not_held(model: Model, problem: str) -> Model:
    """Cancel the restart; the run continues."""
    model = replace(model, holding=None, pending=None)
    return note(model, "warning", f"not restarted: {problem}")


def proceed(model: Model, change: Change) -> Model:
    model = replace(model, pending=change)
    model = move(model, Phase.RESTARTING) if model.phase is not Phase.RESTARTING else emit(model, SaveState())
    return stopping.ask_to_stop(model)
