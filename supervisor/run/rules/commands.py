"""Requests of clients. Every request gets an answer; a refusal contains its reason."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.recovery.configuration import live_values
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import Reply
from memtop.supervisor.run.events import AgentAnswer, Answered, Requested
from memtop.supervisor.run.grip import after_stop, consequences, no_checkpoint
from memtop.supervisor.run.model import (
    Ask,
    AttemptStage,
    Cause,
    Model,
    Purpose,
    Waiter,
    ask,
    emit,
    note,
    refused,
)
from memtop.supervisor.run.rules import attempts, ending, queue, restart, spikes, stopping, trainer, trials
from memtop.supervisor.wire import (
    AcceptSpike,
    Answer,
    Change,
    CheckpointNow,
    Edit,
    FreeCache,
    Outcome,
    Phase,
    Request,
    Restart,
    Stop,
    Try,
    saves_when_stopped,
)

RECONNECT_SECONDS = 10.0
"""After a supervisor has taken over: how long a request waits for the ranks to connect again."""
_NEEDS = {
    FreeCache: "free_cache",
    CheckpointNow: "checkpoint",
    Stop: "stop",
    Restart: "stop",
    Edit: "change",
    Try: "change",
}
"""By request: the command that the program must carry out for it, if it can."""


def requested(model: Model, event: Requested) -> Model:
    """Carry out the request, or hold it back until the ranks have connected again."""
    model = replace(model, states=event.states)
    # While the checkpoint for a launch is copied, a request waits for the program.
    if _connects_again(model, event) or model.launching is not None:
        return replace(model, held=(*model.held, event))
    return _carry_out(model, event)


def resume(model: Model) -> Model:
    """Carry out the requests that were held back, once nothing holds them any longer."""
    held = model.held
    if not held:
        return model
    model = replace(model, held=())
    for event in held:
        model = requested(model, replace(event, states=model.states))
    return model


def _connects_again(model: Model, event: Requested) -> bool:
    """Whether this supervisor has just taken over, and ranks that can carry out the request have
    not connected to it yet.
    """
    attempt, progress = model.attempt, model.progress
    if not model.adopted or attempt is None or attempt.stage is not AttemptStage.RUNNING or model.ladder is not None:
        return False
    if model.now.monotonic - attempt.since >= RECONNECT_SECONDS:
        return False
    if isinstance(event.request, AcceptSpike):
        return False
    wanted = frozenset(progress.ranks) if isinstance(event.request, FreeCache) else frozenset({0})
    return _NEEDS[type(event.request)] in (progress.offers or ()) and not wanted <= model.agents


def _carry_out(model: Model, event: Requested) -> Model:
    """Answer at once if possible; otherwise accept the request and answer again when it is done."""
    client, request = event.client, event.request
    try:
        match request:
            case Stop():
                return _stop(model, client, request)
            case Restart():
                return _restart(model, client, request)
            case Try():
                return _try(model, client, request)
            case FreeCache():
                _check_agents(model, FreeCache)
                model = accept(model, client, request.id, "the training process frees its cache after the present update")
                return ask(model, "free_cache", model.agents, Purpose.FREE, client=client, request=request.id)
            case CheckpointNow():
                _check_saves(model)
                model = accept(model, client, request.id, "the training process saves after the present update")
                return ask(model, "checkpoint", frozenset({0}), Purpose.CHECKPOINT, client=client, request=request.id)
            case AcceptSpike():
                return done(spikes.accept(model), client, request.id, "the training goes on as it is")
            case Edit():
                return _edit(model, client, request)
    except MemtopError as error:
        return refuse(model, client, request.id, str(error), usage=isinstance(error, UsageError))


def _check_agents(model: Model, request: type[Request]) -> None:
    if model.phase.final:
        raise MemtopError(_over(model, request))
    if model.stopped:
        raise MemtopError(explain.program_stopped(model.stopped, model.trainer_pid))
    if not model.agents:
        raise MemtopError("no training process is connected yet: it is still loading, or it never steps an optimizer")


def _over(model: Model, request: type[Request]) -> str:
    ended = model.attempt.ended if model.attempt is not None else None
    return explain.over(model.run.name, model.word, ended, request)


def _check_saves(model: Model) -> None:
    _check_agents(model, CheckpointNow)
    if model.settings is None and "checkpoint" not in (model.progress.offers or ()):
        raise MemtopError("this program cannot save on request")


def _stop(model: Model, client: int, request: Stop) -> Model:
    if model.phase.final and model.holding is not None:
        return _call_off(model, client, request)
    if model.phase.final:
        raise MemtopError(_over(model, Stop))
    if model.phase is Phase.QUEUED:
        return done(queue.leave(model), client, request.id, "stopped before it began")
    if model.phase is not Phase.STOPPING or model.pending is not None:
        model = stopping.stop_run(model)
    if saves_when_stopped(model.settings, model.progress.offers):
        text = "the program finishes its update, saves and exits"
    else:
        text = stopping.manner_of(model)
    model = accept(model, client, request.id, f"stopping: {text}")
    return replace(model, waiters=(*model.waiters, Waiter(client=client, request=request.id, purpose="stop")))


def _call_off(model: Model, client: int, request: Stop) -> Model:
    """The program has ended by itself while its checkpoint is copied for a restart."""
    holding = model.holding
    assert holding is not None
    model = replace(model, holding=None)
    if holding.client is not None:
        model = withdraw(model, holding.client, holding.request, "called off by a request to stop")
    return done(model, client, request.id, f"the restart is called off; the run is {model.word}")


def _restart(model: Model, client: int, request: Restart) -> Model:
    settings = attempts.foreseen(model, request.change)
    if model.phase is Phase.STOPPING:
        raise MemtopError("the run is being stopped; restart it when it has stopped")
    if model.holding is not None or (model.phase is Phase.RESTARTING and model.restart is None):
        raise MemtopError("a restart is under way already")
    text = _restarting(model) + _consequences(model, request.change, settings) + _of_knobs(model, request.change)
    waiter = Waiter(client=client, request=request.id, purpose="restart", attempt=model.number, accepts=text)
    model = restart.begin(model, request.change, Cause.REQUEST, client=client, request=request.id)
    is_certain = model.launching is None and model.holding is None
    model = replace(model, waiters=(*model.waiters, waiter))
    return confirm(model, client, request.id) if is_certain else model


def _restarting(model: Model) -> str:
    """Where the run begins again, as far as memtop knows."""
    if model.grip is not None:
        return _resuming(model)
    if model.settings is None:
        return f"restarting: the same command {explain.FROM_ZERO}"
    if model.saved is None and not model.alive:
        newest = model.states.newest
        return "starting at the first update: nothing has been saved yet" if newest is None else explain.none_whole(newest)
    return "restarting from train_latest_state"


def _resuming(model: Model) -> str:
    found = model.states.program
    if found is not None and found.complete:
        where = "" if found.updates is None else f" at update {found.updates}"
        if not model.alive:
            return f"restarting from the program's checkpoint{where}"
        return f"restarting from the program's checkpoint{where}, or a newer one"
    if model.alive and saves_when_stopped(model.settings, model.progress.offers):
        return "restarting from the checkpoint that the program saves now"
    assert model.grip is not None
    return f"starting at the first update: {no_checkpoint(model.grip, found)}"


def _of_knobs(model: Model, change: Change) -> str:
    """What the change means for the user's own program."""
    if model.grip is None:
        return ""
    step, saves = model.progress.step, model.alive and saves_when_stopped(model.settings, model.progress.offers)
    reached = step.update if step is not None else None
    at, total = after_stop(model.states.program, reached, saves=saves), model.progress.total_updates
    loop = model.progress.loop
    grip = model.grip if loop is None else model.grip.with_seen(loop.knobs)
    knobs = trainer.knobs_after(model, change)
    return consequences(grip, knobs, at, reached, total, model.rate_at_save, ended=not model.alive)


def confirm(model: Model, client: int, request: int) -> Model:
    """Confirm to the client that the requested restart begins."""
    for waiter in model.waiters:
        if (waiter.client, waiter.request) == (client, request) and waiter.accepts is not None:
            model = accept(_without(model, waiter), client, request, waiter.accepts)
            model = replace(model, waiters=(*model.waiters, replace(waiter, accepts=None)))
    return model


def withdraw(model: Model, client: int, request: int, why: str, *, usage: bool = False) -> Model:
    """Refuse the requested restart: it turned out to be impossible."""
    for waiter in model.waiters:
        if (waiter.client, waiter.request) == (client, request) and waiter.accepts is not None:
            model = refuse(_without(model, waiter), client, request, why, usage=usage)
    return model


def _without(model: Model, waiter: Waiter) -> Model:
    return replace(model, waiters=tuple(other for other in model.waiters if other is not waiter))


def _consequences(model: Model, change: Change, after: Settings | None) -> str:
    """How a change affects the effective batch and the end of the run, and a warning if its
    settings ran out of memory before.
    """
    length = attempts.length_text(model, change, after, attempts.reached_by(model, change))
    split = explain.split_change(model.settings, after) + length
    return split + explain.risk_of(after, model.configurations.rows)


def _edit(model: Model, client: int, request: Edit) -> Model:
    _check_agents(model, Edit)
    after = attempts.foreseen(model, request.change)
    values = live_values(model.settings, after, trials.in_place(model))
    if not values:
        return done(model, client, request.id, "nothing changes: the run has these settings")
    before, split = model.settings, ""
    if before is not None and after is not None and before.splits != after.splits:
        split = f": {before.split_text} -> {after.split_text}"
    answer = f"from the next update on{split}{_consequences(model, request.change, after)}"
    model = accept(model, client, request.id, answer)
    return ask(model, "change", frozenset({0}), Purpose.EDIT, values, client=client, request=request.id)


def _try(model: Model, client: int, request: Try) -> Model:
    model, why = trials.begin(model, client, request)
    if why is not None:
        return refuse(model, client, request.id, why)
    assert model.trial is not None
    return accept(model, client, request.id, f"trying {model.trial.trial.title}: measuring before and after")


def answered(model: Model, pending: Ask, event: Answered) -> Model:
    """The ranks have carried out the request of a client."""
    assert pending.client is not None
    problem = refused(event.answers)
    if problem is not None:
        return fail(model, pending.client, pending.request, problem)
    if pending.purpose is Purpose.FREE:
        return _freed(model, pending.client, pending.request, event.answers)
    answer = event.answers[0]
    words = {Purpose.CHECKPOINT: "checkpoint written", Purpose.EDIT: "changed"}[pending.purpose]
    return done(model, pending.client, pending.request, answer.message or words, answer.result)


def _freed(model: Model, client: int, request: int, answers: tuple[AgentAnswer, ...]) -> Model:
    device, host = (_total(answers, name) for name in ("returned_device_bytes", "returned_host_bytes"))
    where = "no GPU in use" if device is None else f"{units.size(device)} returned to the device"
    message = f"cache freed: {where}, {units.size(host)} returned to the system"
    data = {
        "returned_device_bytes": device,
        "returned_host_bytes": host,
        "ranks": [{"rank": answer.rank, **answer.result} for answer in answers],
    }
    return done(note(model, "free", message), client, request, message, data)


def _total(answers: tuple[AgentAnswer, ...], name: str) -> int | None:
    known = [value for answer in answers if isinstance(value := answer.result.get(name), int)]
    return sum(known) if known else None


def answer_waiters(model: Model) -> Model:
    """Answer the clients whose stop or restart is complete."""
    left = []
    for waiter in model.waiters:
        begun = waiter.purpose == "restart" and model.number > waiter.attempt
        if waiter.accepts is not None or (not begun and not (model.phase.final and model.launching is None)):
            left.append(waiter)
        elif begun:
            again = f"; {model.repeated}" if model.repeated else ""
            text, data = f"attempt {model.number} started{again}", {"attempt": model.number}
            model = done(model, waiter.client, waiter.request, text, data)
        elif waiter.purpose == "restart":
            model = fail(model, waiter.client, waiter.request, model.reason or f"the run is {model.word}")
        else:
            model = _stopped(model, waiter)
    return replace(model, waiters=tuple(left))


def _stopped(model: Model, waiter: Waiter) -> Model:
    word, reason = model.word, model.reason or ""
    # "stopped at update 7, ..." names the phase already.
    message = f"{word}: {reason}" if reason and not reason.startswith(word) else reason or word
    message += f"; {model.signalled}" if model.signalled is not None else ""
    # The stop was requested; losing the state was not.
    if explain.not_saved(model.progress.end) or (model.phase is Phase.STOPPED and ending.lost_by_stop(model)):
        return fail(model, waiter.client, waiter.request, message)
    return done(model, waiter.client, waiter.request, message)


def accept(model: Model, client: int, request: int, message: str) -> Model:
    return _reply(model, client, Answer(id=request, outcome=Outcome.ACCEPTED, message=message))


def done(model: Model, client: int, request: int, message: str, data: dict[str, Any] | None = None) -> Model:
    return _reply(model, client, Answer(id=request, outcome=Outcome.DONE, message=message, data=data or {}))


def fail(model: Model, client: int, request: int, message: str) -> Model:
    return _reply(model, client, Answer(id=request, outcome=Outcome.FAILED, message=message))


def refuse(model: Model, client: int, request: int, message: str, *, usage: bool = False) -> Model:
    return _reply(model, client, Answer(id=request, outcome=Outcome.REFUSED, message=message, usage=usage))


def _reply(model: Model, client: int, answer: Answer) -> Model:
    return emit(model, Reply(client=client, answer=answer))
