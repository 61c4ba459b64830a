"""Tries a change for speed: measures 20 updates, makes the change, measures 20 more, then keeps the
change or undoes it.

A trial is a frozen `TrialState`. Each function here takes the state, what happened, and the run at
that moment (`RunFacts`); it returns the next state and the actions that the supervisor must
perform. What may be tried, and what is kept, is decided in `recovery/batch_trial.py`.

From the moment the change is requested until it is kept, the settings in place are not proven.
Whatever starts or ends in that time starts from, or ends with, the settings before the trial. Every
state is recorded as an event of kind `trial` before anything is requested, so a new supervisor can
undo a trial that another one left unfinished.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.recovery import batch_trial
from memtop.supervisor.recovery.batch_trial import Update, measured, verdict
from memtop.supervisor.recovery.values import Remedy, trial_word
from memtop.supervisor.run import reports
from memtop.supervisor.run.trial_state import (
    AT_THE_END,
    RESTARTED,
    Action,
    AskChange,
    AskSave,
    PutBack,
    Record,
    ReplaceRestart,
    RequestRestart,
    Result,
    RunFacts,
    TrialStage,
    TrialState,
    Trouble,
)
from memtop.supervisor.wire import Change, Phase, Trial

UPDATES = 20
"""Updates that are measured before the change, and again after it."""
WARM_UP = 3
"""Updates right after the change that are not measured: buffers, autotuning and the loader are
still warming up."""
RECONNECT_SECONDS = 10.0
"""Time in which agents connect to a new supervisor."""
_ORPHANED = "its supervisor ended in the middle of it"


_MEASURING = (TrialStage.MEASURING_BEFORE, TrialStage.MEASURING_AFTER)
_UNDO = (TrialStage.UNDOING, TrialStage.UNDO_RESTARTING, TrialStage.SETTLING, TrialStage.WAITING_FOR_END)


# --- what may be tried ---------------------------------------------------------------------------


def check_request(run: str, facts: RunFacts, present: TrialState | None) -> None:
    """MemtopError (UsageError) if the run cannot begin a trial now."""
    if facts.settings is None:
        raise UsageError("this run executes an external command: memtop cannot change its settings")
    if facts.phase is not Phase.TRAINING:
        raise MemtopError(f"run {run!r} is not training: it is {facts.word}")
    if facts.at_the_end:
        raise MemtopError(f"nothing can be tried any more: {AT_THE_END}")
    if present is not None and present.running:
        raise MemtopError(f"a trial is under way: {present.trial.title}")


def begin(
    change: Change,
    after: Settings,
    facts: RunFacts,
    time: float,
    *,
    refused: str | None = None,
    client: int | None = None,
    request: int = 0,
) -> Result:
    """Begin a trial after `check_request`; UsageError if the change has no effect.

    `after`: the settings that the change leads to; `refused`: why it must not be tried, see
    `refusal`. A refused trial is over at once.
    """
    before = facts.settings
    assert before is not None, "check_request refuses external commands"
    title = batch_trial.title_of(before, after)
    if not title:
        raise UsageError("nothing changes: the run has these settings")
    state = TrialState(
        stage=TrialStage.MEASURING_BEFORE,
        trial=Trial(title=title, started=time, state="measuring before"),
        change=replace(change, reason=f"trial of {title}"),
        undo=Change(configuration=facts.configuration, reason=f"trial undone: {title}"),
        before=before,
        after=after,
        attempt=facts.attempt,
        client=client,
        request=request,
    )
    return _finish(state, "refused", refused) if refused is not None else _record(state, "measuring before")


# --- what happens --------------------------------------------------------------------------------


def step_reported(state: TrialState, facts: RunFacts, report: reports.Step) -> Result:
    """Rank 0 has done an update."""
    if state.stage is TrialStage.SETTLING and report.update >= state.since:
        state = replace(state, settled=True)
    return _guarded(state, facts, lambda: _advance(_measure(state, facts, report), facts))


def oom_reported(state: TrialState, facts: RunFacts, report: reports.Oom) -> Result:
    """An allocation of any rank has failed."""
    if not state.running:
        return state, ()
    why = f"memory ran out at update {report.update}: {report.message}"
    # The program dies of a failure that it does not survive; only when it has ended can it be
    # started again.
    state = _troubled(state, Trouble(why)) if report.survived else replace(state, dying=why)
    return _guarded(state, facts, lambda: _advance(state, facts))


def settings_reported(state: TrialState, facts: RunFacts, report: reports.SettingsChanged) -> Result:
    """The program runs with other settings, which `facts` already has."""
    if not state.running:
        return state, ()
    if report.reason != "asked":
        state = _troubled(state, Trouble(f"the settings changed meanwhile: {report.reason}"))
    elif state.requested and _agrees(report.changes, state.after):
        state = replace(state, confirmed=True)
    elif not _agrees(report.changes, state.before):
        state = _edited(state, facts)
    return _guarded(state, facts, lambda: _advance(state, facts))


def answered(state: TrialState, facts: RunFacts, problem: str | None, update: int | None = None) -> Result:
    """The agent has answered `AskSave` or `AskChange`. `problem`: why it did not do it; `update`:
    the first one with the new settings."""
    return _guarded(state, facts, lambda: _after_answer(state, facts, problem, update))


def attempt_begun(state: TrialState, facts: RunFacts, change: Change) -> Result:
    """An attempt was started with this change. Any restart but the trial's own starts from the
    settings before the trial."""
    if not state.running:
        return state, ()
    if change not in (state.change, state.undo):
        state = replace(state, unproven=False)
    return _guarded(state, facts, lambda: _advance(state, facts))


def restart_refused(state: TrialState, facts: RunFacts, why: str) -> Result:
    """The restart that the trial has requested could not be started."""
    if state.stage is TrialStage.RESTARTING:
        return _guarded(state, facts, lambda: _give_up(state, facts, why))
    if state.stage is TrialStage.UNDO_RESTARTING:
        return _guarded(state, facts, lambda: _wait_for_end(state, facts, why))
    return state, ()


def tick(state: TrialState, facts: RunFacts) -> Result:
    """Some time has passed, or the run's phase has changed."""
    return _guarded(state, facts, lambda: _advance(state, facts))


def taken_over(data: dict[str, Any], facts: RunFacts) -> Result | str:
    """The trial that an earlier supervisor recorded last, to be undone if it was left unfinished. A
    str says why `data` cannot be read."""
    try:
        state = msgspec.convert(data.get("state"), TrialState)
    except msgspec.ValidationError as error:
        return f"the run's last trial cannot be read: {error}"
    if not state.running:
        return state, ()
    if not state.unproven:
        return _give_up(state, facts, _ORPHANED)
    state = replace(state, stage=TrialStage.TAKEN_OVER, attempt=facts.attempt, client=None, deadline=None, reason=_ORPHANED)
    return _guarded(state, facts, lambda: _advance(state, facts))


# --- the machine ---------------------------------------------------------------------------------


def _guarded(state: TrialState, facts: RunFacts, transition: Callable[[], Result]) -> Result:
    """An error in memtop must not leave settings on trial in place: it ends the trial, and undoes
    it."""
    if not state.running:
        return state, ()
    try:
        return transition()
    except Exception as error:  # noqa: BLE001
        why = f"an error in memtop: {type(error).__name__}: {error}"
    if state.stage in _UNDO:
        return _wait_for_end(replace(state, failed=True), facts, why)
    try:
        return _give_up(replace(state, failed=True), facts, why)
    except Exception as error:  # noqa: BLE001
        also = f"an error in memtop: {type(error).__name__}: {error}"
        return _wait_for_end(replace(state, failed=True, reason=why), facts, also)


def _agrees(values: dict[str, Any], settings: Settings) -> bool:
    known = msgspec.json.decode(msgspec.json.encode(settings))
    return all(known.get(name) == value for name, value in values.items())


def _edited(state: TrialState, facts: RunFacts) -> TrialState:
    """A person has edited the settings, starting from those before the trial."""
    edited, why = facts.settings, "the settings were changed meanwhile"
    if not state.unproven or state.confirmed or edited is None:
        # Nothing on trial is in place, or no longer: an edit sets all that the trial has changed.
        return _troubled(replace(state, unproven=False), Trouble(why, undo=False))
    # The edit came first: what the trial has requested comes on top of it.
    tried = {name: getattr(state.after, name) for name in state.changed}
    undo = replace(state.undo, configuration=facts.configuration)
    return _troubled(replace(state, before=edited, after=replace(edited, **tried), undo=undo), Trouble(why))


def _measure(state: TrialState, facts: RunFacts, report: reports.Step) -> TrialState:
    if state.stage not in _MEASURING or report.update < state.since:
        return state
    settings = state.before if state.stage is TrialStage.MEASURING_BEFORE else state.after
    if report.batch is not None and report.batch != settings.batch:
        return _troubled(state, Trouble("the settings were changed meanwhile"))
    if not report.step_seconds:
        return state
    update = Update(
        number=report.update,
        samples=settings.effective_batch,
        seconds=report.step_seconds,
        tokens=report.tokens,
        peak_bytes=report.peak_reserved_bytes or report.peak_bytes,
        host_bytes=facts.host_bytes,
        swap_bytes=facts.swap_bytes,
    )
    return replace(state, updates=(*state.updates, update))


def _troubled(state: TrialState, trouble: Trouble) -> TrialState:
    """The first trouble stays, unless a later one means that the settings may not be changed
    back."""
    return state if state.trouble is not None and trouble.undo else replace(state, trouble=trouble)


def _advance(state: TrialState, facts: RunFacts) -> Result:
    """Go on as far as the run allows."""
    match state.stage:
        case TrialStage.MEASURING_BEFORE | TrialStage.MEASURING_AFTER:
            trouble = state.trouble_in(facts)
            if trouble is not None:
                return _give_up(state, facts, trouble.reason, undo=trouble.undo)
            return _measured(state, facts) if len(state.updates) >= UPDATES else (state, ())
        case TrialStage.SAVING | TrialStage.CHANGING:
            # The agent may carry out a command that was sent: wait for its answer, unless the
            # program has ended.
            gone = facts.died or facts.phase.final or facts.attempt != state.attempt
            trouble = state.trouble_in(facts) if gone else None
            return (state, ()) if trouble is None else _give_up(state, facts, trouble.reason, undo=trouble.undo)
        case TrialStage.RESTARTING | TrialStage.UNDO_RESTARTING:
            return _after_restart(state, facts)
        case TrialStage.TAKEN_OVER:
            return _take_back(state, facts)
        case TrialStage.UNDOING if facts.died or facts.phase.final:
            return _undo_by_restart(state, facts)
        case TrialStage.SETTLING if (state.confirmed or state.settled) and state.is_gone(facts.settings):
            return _finish(state, "failed" if state.failed else "undone", state.reason)
        case TrialStage.UNDOING if not state.unproven:
            return _after_end(state, facts)
        case TrialStage.SETTLING | TrialStage.WAITING_FOR_END:
            return _after_end(state, facts)
    return state, ()


def _measured(state: TrialState, facts: RunFacts) -> Result:
    """All updates are measured: before the change, make it; after it, keep it or undo it."""
    found, state = measured(state.updates), replace(state, updates=())
    if state.stage is TrialStage.MEASURING_AFTER:
        state = replace(state, trial=replace(state.trial, after=found))
        kept, reason = verdict(state.trial.before, found)
        return _finish(state, "kept", reason) if kept else _give_up(state, facts, reason)
    state = replace(state, trial=replace(state.trial, before=found))
    if facts.saves_on_request and facts.connected:
        return replace(state, stage=TrialStage.SAVING), (AskSave(),)
    return _change(state, facts)


def _after_answer(state: TrialState, facts: RunFacts, problem: str | None, update: int | None) -> Result:
    match state.stage:
        case TrialStage.SAVING if problem is not None:
            return _give_up(state, facts, f"the state could not be saved before the change: {problem}", undo=False)
        case TrialStage.SAVING:
            trouble = state.trouble_in(facts)
            return _change(state, facts) if trouble is None else _give_up(state, facts, trouble.reason, undo=trouble.undo)
        case TrialStage.CHANGING if problem is not None:
            return _give_up(state, facts, state.dying or problem)
        case TrialStage.CHANGING:
            state = replace(state, stage=TrialStage.MEASURING_AFTER, since=(update or 0) + WARM_UP)
            return _advance(state, facts)
        case TrialStage.UNDOING if problem is not None:
            # The running program does not accept them.
            return _undo_by_restart(state, facts)
        case TrialStage.UNDOING:
            return _advance(replace(state, stage=TrialStage.SETTLING, since=update or 0), facts)
    return state, ()


def _change(state: TrialState, facts: RunFacts) -> Result:
    """Request the settings on trial."""
    state, recorded = _record(replace(state, requested=True, unproven=True), "measuring after")
    values = facts.live_values(state.after)
    if values is not None:
        return replace(state, stage=TrialStage.CHANGING), (*recorded, AskChange(values))
    refused = facts.why_no_restart()
    if refused is not None:
        state, actions = _wait_for_end(replace(state, reason=refused), facts, None)
    else:
        state = replace(state, stage=TrialStage.RESTARTING, attempt=facts.attempt)
        actions = (RequestRestart(state.change),)
    return state, (*recorded, *actions)


def _after_restart(state: TrialState, facts: RunFacts) -> Result:
    """A restart was requested: go on when the program trains again."""
    undoing = state.stage is TrialStage.UNDO_RESTARTING
    if facts.attempt == state.attempt or facts.phase is Phase.STARTING:
        if facts.is_over and facts.attempt == state.attempt and not facts.restart_requested:
            why = f"the run is {facts.word}"
            return _wait_for_end(state, facts, why) if undoing else _give_up(state, facts, why, undo=False)
        return state, ()
    if not state.unproven:
        return _wait_for_end(state, facts, RESTARTED) if undoing else _give_up(state, facts, RESTARTED, undo=False)
    state = replace(state, attempt=facts.attempt)
    if undoing:
        return _advance(replace(state, stage=TrialStage.SETTLING, settled=True), facts)
    since = facts.start_update + 1 + WARM_UP
    return _advance(replace(state, stage=TrialStage.MEASURING_AFTER, since=since), facts)


def _take_back(state: TrialState, facts: RunFacts) -> Result:
    """Undo the trial of an earlier supervisor, once the agent is connected."""
    if not state.unproven or facts.is_over:
        return _wait_for_end(state, facts, None)
    if facts.restart_waiting:
        return _undo_by_restart(state, facts)
    if facts.phase is not Phase.TRAINING or facts.restart_requested:
        # It loads, or a person has stopped or restarted it.
        return state, ()
    deadline = facts.monotonic + RECONNECT_SECONDS if state.deadline is None else state.deadline
    if not facts.connected and facts.monotonic <= deadline:
        return replace(state, deadline=deadline), ()
    return _give_up(state, facts, _ORPHANED)


def _give_up(state: TrialState, facts: RunFacts, reason: str, *, undo: bool = True) -> Result:
    """End the trial. If its settings may be in place, go back to those before: with the program if
    `undo`, else at its end."""
    if not state.unproven:
        undone = "undone" if state.requested else "refused"
        return _finish(state, "failed" if state.failed else undone, reason)
    state = replace(state, reason=reason, trouble=None)
    if not undo:
        return _wait_for_end(state, facts, None)
    values = facts.live_values(state.before)
    if values is None:
        return _undo_by_restart(state, facts)
    return replace(state, stage=TrialStage.UNDOING, attempt=facts.attempt), (AskChange(values),)


def _undo_by_restart(state: TrialState, facts: RunFacts) -> Result:
    refused = facts.why_no_restart(dying=state.dying is not None)
    if refused is not None:
        return _wait_for_end(state, facts, refused)
    state = replace(state, stage=TrialStage.UNDO_RESTARTING, attempt=facts.attempt)
    # A waiting restart can be cancelled, and waits until the memory of the dead program is free.
    waiting = facts.restart_waiting
    return state, (ReplaceRestart(state.undo) if waiting else RequestRestart(state.undo),)


def _wait_for_end(state: TrialState, facts: RunFacts, why: str | None) -> Result:
    """The settings cannot be changed back now; `why` if the reason of the trial's end does not say
    it."""
    reason = state.reason if why is None else f"{state.reason}; not undone at once: {why}" if state.reason else why
    state = replace(state, stage=TrialStage.WAITING_FOR_END, reason=reason)
    recorded: tuple[Action, ...] = ()
    if state.failed and why is not None:
        state, recorded = _record(state, "measuring after", reason)
    state, actions = _after_end(state, facts)
    return state, (*recorded, *actions)


def _after_end(state: TrialState, facts: RunFacts) -> Result:
    """Finish once the run has ended, or was started again or edited from the settings before."""
    if state.unproven and not facts.is_over:
        return state, ()
    put_back: tuple[Action, ...] = (PutBack(state.before, state.undo.reason),) if state.unproven else ()
    reason = f"{state.reason}; whatever starts next starts from the settings before"
    state, recorded = _finish(state, "failed" if state.failed else "undone", reason)
    return state, (*put_back, *recorded)


def _finish(state: TrialState, outcome: str, reason: str | None) -> Result:
    return _record(replace(state, stage=TrialStage.OVER, unproven=False), outcome, reason)


def _record(state: TrialState, name: str, reason: str | None = None) -> Result:
    """The trial as people see it is in this state now."""
    state = replace(state, trial=replace(state.trial, state=name, reason=reason))
    text = f"trial of {state.trial.title}: {trial_word(name)}" + (f": {reason}" if reason else "")
    return state, (Record(text, {"trial": msgspec.to_builtins(state.trial), "state": msgspec.to_builtins(state)}),)


def undo_remedy(state: TrialState, run: str) -> Remedy:
    """Going back to the settings before the trial, as the remedy that is shown first."""
    return Remedy(
        id="trial_undone",
        title=state.undo.reason,
        why="The settings before the trial have trained in this run.",
        keeps_math=True,
        resumable="resumes",
        assignments={"batch": state.before.batch_text, "accumulation": str(state.before.accumulation)},
        forecast_unknown="the run has trained with it",
        command=f"memtop restart {run}",
    )
