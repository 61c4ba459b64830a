"""A run that waits for another one, or for a free place, before its first attempt."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor.errors import UsageError
from memtop.supervisor.run.events import Tick
from memtop.supervisor.run.model import Cause, Model, move, note
from memtop.supervisor.run.rules import attempts
from memtop.supervisor.wire import Change, Phase


def begin(model: Model) -> Model:
    """Wait: `tick` says how long."""
    return move(model, Phase.QUEUED, "looks what else runs")


def tick(model: Model, event: Tick) -> Model:
    """Start as soon as nothing is ahead any more."""
    queue = event.queue
    if model.phase is not Phase.QUEUED or model.launching is not None or queue is None:
        return model
    if queue.waits_for is not None:
        if queue.waits_for == model.reason:
            return model
        return note(replace(model, reason=queue.waits_for), "queued", queue.waits_for)
    try:
        return attempts.launch(model, Change(), Cause.QUEUE)
    except UsageError as error:
        return refused(model, str(error))


def refused(model: Model, why: str) -> Model:
    """The run's turn has come, and it cannot be started."""
    return note(move(model, Phase.FAILED, why), "failed", why)


def leave(model: Model) -> Model:
    """The run is stopped before it has begun."""
    why = "stopped before it began"
    return note(move(model, Phase.STOPPED, why), "stopped", why)
