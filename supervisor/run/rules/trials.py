"""Connects a trial (`run/trial.py`) with the run: passes events to it and performs its actions."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery import batch_trial
from memtop.supervisor.run import explain, trial
from memtop.supervisor.run.effects import Reply, SaveState
from memtop.supervisor.run.events import Answered
from memtop.supervisor.run.model import Cause, Model, Purpose, ask, emit, is_connected, note, refused
from memtop.supervisor.run.reports import Oom, Report, SettingsChanged, Step
from memtop.supervisor.run.rules import attempts, configurations, prevention, restart
from memtop.supervisor.run.trial_state import (
    Action,
    AskChange,
    AskSave,
    PutBack,
    Record,
    ReplaceRestart,
    RequestRestart,
    Result,
    RunFacts,
)
from memtop.supervisor.wire import Answer, Change, Outcome, Try


def begin(model: Model, client: int, request: Try) -> tuple[Model, str | None]:
    """Begin a trial of the change, or of the first proposal. MemtopError, or a str, says why it
    does not begin."""
    facts = _facts(model)
    trial.check_request(model.run.name, facts, model.trial)
    change = batch_trial.proposed(model.advice) if request.change is None else request.change
    before, after = model.settings, attempts.foreseen(model, change)
    assert before is not None
    assert after is not None
    failed = prevention.failed_batches(model)
    why = batch_trial.refusal(before, after, lambda batch: prevention.forecast(model, batch), failed)
    waiting = None if why is not None else client
    state, actions = trial.begin(change, after, facts, model.now.time, refused=why, client=waiting, request=request.id)
    return _perform(replace(model, trial=state), actions), why


def after_report(model: Model, rank: int, report: Report) -> Model:
    """A rank has reported something."""
    state = model.trial
    if state is None or not state.running:
        return model
    match report:
        case Oom():
            return _apply(model, trial.oom_reported(state, _facts(model), report))
        case SettingsChanged() if rank == 0:
            return _apply(model, trial.settings_reported(state, _facts(model), report))
        case Step() if rank == 0:
            return _apply(model, trial.step_reported(state, _facts(model), report))
    return model


def answered(model: Model, event: Answered) -> Model:
    if model.trial is None:
        return model
    problem = refused(event.answers)
    update = event.answers[0].result.get("update") if event.answers and problem is None else None
    return _apply(model, trial.answered(model.trial, _facts(model), problem, update if isinstance(update, int) else None))


def launched(model: Model, change: Change) -> Model:
    return model if model.trial is None else _apply(model, trial.attempt_begun(model.trial, _facts(model), change))


def launch_refused(model: Model, why: str) -> Model:
    return model if model.trial is None else _apply(model, trial.restart_refused(model.trial, _facts(model), why))


def tick(model: Model) -> Model:
    if model.trial is None or not model.trial.running:
        return model
    return _apply(model, trial.tick(model.trial, _facts(model)))


def take_over(model: Model, data: dict[str, Any] | None) -> Model:
    """Undo a trial that an earlier supervisor left unfinished."""
    if data is None:
        return model
    found = trial.taken_over(data, _facts(model))
    return note(model, "warning", found) if isinstance(found, str) else _apply(model, found)


def in_place(model: Model) -> list[str]:
    """The settings of which a trial may have put unproven values in place."""
    state = model.trial
    return state.changed if state is not None and state.unproven else []


def _apply(model: Model, result: Result) -> Model:
    state, actions = result
    return model if state is model.trial and not actions else _perform(replace(model, trial=state), actions)


def _perform(model: Model, actions: tuple[Action, ...]) -> Model:
    for action in actions:
        match action:
            case Record(message=message, data=data):
                model = note(model, "trial", message, data)
            case AskSave():
                model = ask(model, "checkpoint", frozenset({0}), Purpose.TRIAL)
            case AskChange(values=values):
                model = ask(model, "change", frozenset({0}), Purpose.TRIAL, values)
            case RequestRestart(change=change):
                try:
                    model = restart.begin(model, change, Cause.TRIAL)
                except UsageError as error:
                    model = launch_refused(model, str(error))
            case ReplaceRestart(change=change):
                model = _replace_restart(model, change)
            case PutBack(settings=settings, reason=reason):
                model = configurations.put_back(model, settings, reason)
    return _answer_client(model)


def _replace_restart(model: Model, change: Change) -> Model:
    """The program died in a trial and a restart waits: begin it with the settings before the
    trial."""
    state = model.trial
    if model.restart is None or state is None:
        return model
    known = model.restart.change == change
    model = replace(model, restart=model.restart.with_change(change))
    if known:
        return model  # an earlier supervisor has recorded it
    if model.proposal is not None:
        remedy = trial.undo_remedy(state, model.run.name)
        model = replace(model, proposal=replace(model.proposal, remedies=(remedy, *model.proposal.remedies)))
    return emit(note(model, "remedy", f"instead: {explain.restart_reason(change)}"), SaveState())


def _answer_client(model: Model) -> Model:
    """Send the outcome to the client that requested the trial."""
    state = model.trial
    if state is None or state.running or state.client is None:
        return model
    found = state.trial
    message = f"{found.title}: {found.state}: {found.reason}"
    outcome = Outcome.FAILED if found.state in ("refused", "failed") else Outcome.DONE
    answer = Answer(id=state.request, outcome=outcome, message=message, data=msgspec.to_builtins(found))
    return emit(replace(model, trial=replace(state, client=None)), Reply(client=state.client, answer=answer))


def _facts(model: Model) -> RunFacts:
    present = model.configurations.present
    return RunFacts(
        configuration=present.configuration.number if present is not None else None,
        phase=model.phase,
        reason=model.reason,
        ended_by=model.attempt.ended_by if model.attempt is not None else None,
        attempt=model.number,
        settings=model.settings,
        start_update=model.progress.start_update,
        restart_requested=model.pending is not None or model.holding is not None or model.launching is not None,
        restart_waiting=model.restart is not None,
        at_the_end=model.progress.at_the_end,
        connected=0 in model.agents,
        saves_on_request=model.progress.offers is not None and is_connected(model, "checkpoint"),
        died_of=_died_of(model),
        host_bytes=model.sample.host_memory.size if model.sample is not None else None,
        swap_bytes=model.sample.machine.host.swap_used_bytes if model.sample is not None else None,
        monotonic=model.now.monotonic,
    )


def _died_of(model: Model) -> Kind | None:
    return model.proposal.diagnosis.kind if model.proposal is not None else None
