"""How the program is stopped: first a request, then signals if it does not stop."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from memtop.supervisor.run import explain, stop_ladder
from memtop.supervisor.run.effects import ReleaseState, Reply, SaveState, Signal, SignalTarget, TypeAnswer
from memtop.supervisor.run.events import Answered, Signalled, StoodStill
from memtop.supervisor.run.grip import lost_by_stop
from memtop.supervisor.run.model import (
    Ask,
    AttemptStage,
    Model,
    Purpose,
    Waiter,
    ask,
    emit,
    is_connected,
    move,
    note,
    refused,
    warn,
)
from memtop.supervisor.run.rules import survival, workers
from memtop.supervisor.wire import Answer, Checkpoint, Outcome, Phase


def stop_run(model: Model) -> Model:
    """Stop the run for good. A pending restart is cancelled. If the state cannot be saved, the run
    goes on, and only a second request ends it.
    """
    if model.restart is not None:
        return survival.call_off(model, "called off: it stays as it died")
    model = emit(replace(model, pending=None, holding=None), ReleaseState())
    model = move(model, Phase.STOPPING) if model.phase is not Phase.STOPPING else emit(model, SaveState())
    told = "stop" in model.warnings or model.progress.waits_for_space
    return ask_to_stop(warn(model, "stop", None), only_saved=not told)


def ask_to_stop(model: Model, *, only_saved: bool = True) -> Model:
    """Ask rank 0 to finish its update, save and exit. If it does not offer `stop`, or
    does not answer, signals follow. `only_saved`: memtop's own trainer goes on if it cannot save.
    """
    if model.ladder is not None or model.attempt is None or model.attempt.stage is not AttemptStage.RUNNING:
        return model
    asked = is_connected(model, "stop")
    model = begin(model, asked=asked)
    values = {"only_saved": True} if only_saved and model.settings is not None else None
    return ask(model, "stop", frozenset({0}), Purpose.STOP, values) if asked else model


def stop_unsaved(model: Model) -> Model:
    """Stop the run with signals: the program is not asked to save."""
    model = begin(replace(model, pending=None), asked=False, unsaved=True)
    return move(model, Phase.STOPPING) if model.phase is not Phase.STOPPING else model


def begin(model: Model, *, asked: bool, unsaved: bool = False) -> Model:
    """Begin the ladder; without `asked` its first signal is due at the next tick. `unsaved`: the
    program must not save."""
    # The built-in trainer also saves on SIGTERM, unless it hangs; so do some of the user's own.
    own = model.grip is not None and model.grip.saves_on_sigterm is True
    saves = (model.settings is not None or own) and model.stalled is None
    progress = model.progress
    waits = model.waits
    # While it loads, it has no update in progress and nothing to save, however long it is silent.
    if progress.has_loaded:
        waits = waits.stretched(
            progress.step_seconds or 0.0,
            progress.save_seconds or 0.0,
            _silent_seconds(model) if progress.step is None else progress.longest_pause,
            forecast_seconds=_forecast_seconds(model),
            saves_on_sigterm=saves,
        )
    profile = model.grip.profile if model.grip is not None else None
    # A program that hangs does not save either.
    manner = None if asked or profile is None or model.stalled is not None else profile.stop
    ladder = stop_ladder.begin(
        waits, model.now.monotonic, asked=asked, manner=manner, on_sigterm=saves and own, unsaved=unsaved
    )
    model = replace(model, ladder=ladder)
    if not asked:
        return model
    text = f"asked to finish the update, save and exit; SIGTERM follows in {waits.graceful:.0f} s"
    if waits.why:
        text = f"asked to finish the update, save and exit; SIGTERM follows in {waits.graceful:.0f} s ({waits.why})"
    return note(model, "stop", text)


def _silent_seconds(model: Model) -> float:
    """How long the attempt has reported nothing before its first update: for so long that has
    taken."""
    assert model.attempt is not None
    progress, now = model.progress, model.now
    if progress.last_heard is None and progress.last_time is not None:
        return max(0.0, now.time - progress.last_time)
    heard = model.attempt.since if progress.last_heard is None else progress.last_heard
    return max(0.0, now.monotonic - heard)


def _forecast_seconds(model: Model) -> float:
    """How long an update of the present settings takes at the newest known speed of the run; 0 if
    none is known, or if this attempt has measured it. Longer samples take longer in proportion;
    shorter ones are not counted on."""
    settings, rows = model.settings, model.configurations.rows
    measured = model.progress.step is not None and bool(rows) and rows[-1].samples_per_second is not None
    if settings is None or measured:
        return 0.0
    for row in reversed(rows):
        if row.settings is not None and row.samples_per_second:
            longer = max(1.0, settings.seq_len / row.settings.seq_len)
            return settings.effective_batch * longer / row.samples_per_second
    return 0.0


def answered(model: Model, pending: Ask, event: Answered) -> Model:
    """Rank 0 has answered the request to stop; begin the signals if it refused."""
    problem = refused(event.answers)
    if model.ladder is None or pending.attempt != model.number or problem is None:
        return model
    if model.ladder.asking and any(answer.result.get("unsaved") for answer in event.answers):
        return _goes_on(model, problem)
    return replace(model, ladder=model.ladder.declined(model.now.monotonic))


def _goes_on(model: Model, problem: str) -> Model:
    """The trainer could not save, so it has not stopped. Tell those who wait for that."""
    if model.phase is Phase.STOPPING:
        words = f"not stopped: {problem}; free some space, or stop it again: it ends without saving then"
        model = warn(model, "stop", words)
    else:
        words = f"not restarted: {problem}; free some space"
    model = emit(_tell(model, model.waiters, Outcome.FAILED, words), ReleaseState())
    model = replace(model, ladder=None, pending=None, waiters=())
    return note(move(model, Phase.TRAINING), "warning", words)


def tick(model: Model, saving: str | None = None) -> Model:
    """Send the signal that is due; the first one not while the program saves, by its report or by
    this file (empty: that is being looked up). Continue what SIGSTOP or Ctrl-Z has stopped: at the
    beginning, with each signal but SIGKILL, and when the program or a rank is stopped between two
    signals.

    A process that is stopped handles neither a request nor a signal until it continues.
    """
    ladder = model.ladder
    assert ladder is not None
    if ladder.waits_for_save(model.now.monotonic) and (saving is not None or _says_that_it_saves(model)):
        return _wait_for_save(model, ladder, saving)
    stopped, before = frozenset(model.stopped), ladder.continued
    ladder, rung = ladder.next(model.now.monotonic)
    known = stopped if before is None or rung is not None else before | stopped
    model = replace(model, ladder=replace(ladder, continued=known))
    if rung is not None:
        model = emit(model, Signal(name=rung.name, target=rung.target))
        continues = rung.name != "SIGKILL"  # which also ends a process that is stopped
    else:
        continues = before is None or not stopped <= before
    if continues:
        model = emit(model, Signal(name="SIGCONT", target=SignalTarget.STOPPED))
    assert model.ladder is not None
    ladder, text = model.ladder.typing(model.now.monotonic)
    return model if text is None else emit(replace(model, ladder=ladder), TypeAnswer(text))


def _says_that_it_saves(model: Model) -> bool:
    """Whether the program has reported that it begins to save, and not that it has done so. It may
    hang then: it is not waited for much longer than its newest save took."""
    progress = model.progress
    if progress.phase != "save" or progress.last_heard is None:
        return False
    return model.now.monotonic - progress.last_heard < model.waits.saving + 2 * (progress.save_seconds or 0.0)


def _wait_for_save(model: Model, ladder: stop_ladder.StopLadder, saving: str | None) -> Model:
    """Say once what the stop waits for."""
    if ladder.told or saving == "":
        return model
    name = ladder.rungs[0].name
    words = f"the program is saving: {name} follows when it has saved"
    if saving is not None:
        words = f"the program is saving {saving}: {name} follows when it has saved"
    stops = [waiter for waiter in model.waiters if waiter.purpose == "stop"]
    model = replace(model, ladder=replace(ladder, told=True))
    return note(_tell(model, stops, Outcome.ACCEPTED, words), "stop", words)


def manner_of(model: Model) -> str:
    """How a program that cannot be asked to save is stopped, in words."""
    manner = model.grip.profile.stop if model.grip is not None and model.grip.profile is not None else None
    if manner is None and model.grip is not None and model.grip.saves_on_sigterm:
        return "memtop sends SIGTERM to the program, and waits while it saves"
    if manner is None:
        lost = None if model.grip is None else lost_by_stop(model.grip, model.states.program, model.update)
        if model.progress.is_trained:
            lost = "its training is complete, and what it still saves is up to it"
        return f"memtop sends SIGINT to the program; {lost or 'what it saves is up to the program'}"
    answers = "" if manner.answer is None else f", answers its question with {manner.answer!r}"
    if manner.saves:
        return f"memtop sends {manner.signal} to the program{answers}, and waits while it saves"
    return f"memtop sends {manner.signal} to the program{answers}, which does not save then"


def save_seen(model: Model, found: Checkpoint) -> Model:
    """A checkpoint has changed while the program is being stopped."""
    if model.ladder is None:
        return model
    return replace(model, ladder=model.ladder.saw_save(model.now.monotonic, complete=found.complete))


def signalled(model: Model, event: Signalled) -> Model:
    """Report the signal, also to the clients that wait for the end."""
    ladder = model.ladder
    stops = [waiter for waiter in model.waiters if waiter.purpose == "stop"]
    if event.name == "SIGCONT":
        if not (event.processes or event.refused):
            return model  # nothing was stopped
        words = f"stopped by a signal (SIGSTOP or Ctrl-Z): {_sent(event)}"
        return note(_tell(model, stops, Outcome.ACCEPTED, words), "stop", words)
    if ladder is not None and ladder.again:
        return _survived(model, event)
    following = ""
    if ladder is not None and ladder.rungs:
        seconds = ladder.deadline - model.now.monotonic
        following = f"; {ladder.rungs[0].name} follows in {seconds:.0f} s"
    model = replace(model, signalled=_sent(event))
    words = f"{model.signalled}{following}"
    return note(_tell(model, stops, Outcome.ACCEPTED, words), "stop", words)


def _sent(event: Signalled) -> str:
    refused = f"; not sent: {'; '.join(event.refused)}" if event.refused else ""
    return f"{event.name} sent to {explain.names(event.processes)}{refused}"


def _survived(model: Model, event: Signalled) -> Model:
    """The program is still there after SIGKILL: answer the clients that wait for its end."""
    if not model.waiters and "stop" in model.warnings:
        return model
    words = (
        f"the program has not ended after SIGKILL, which is sent again: {_sent(event)}; a process in state D "
        "(ps -o stat,pid,cmd) ends when its device or disk answers, one of another user must be ended by that user"
    )
    model = replace(_tell(model, model.waiters, Outcome.FAILED, words), waiters=())
    return model if "stop" in model.warnings else note(warn(model, "stop", words), "warning", words)


def _tell(model: Model, waiters: Iterable[Waiter], outcome: Outcome, message: str) -> Model:
    """Tell these clients, who wait for the end, how it goes."""
    answers = (Reply(client=one.client, answer=Answer(id=one.request, outcome=outcome, message=message)) for one in waiters)
    return emit(model, *answers)


def may_stand_still(model: Model) -> bool:
    """Whether a program that reports nothing may be hanging."""
    return (
        model.attempt is not None
        and model.attempt.stage is AttemptStage.RUNNING
        and model.ladder is None
        and not model.phase.final
        and not model.progress.waits_for_space
        and not workers.are_loading(model)
    )


def stood_still(model: Model, event: StoodStill) -> Model:
    """The program ran out of memory and hangs: end it."""
    if not may_stand_still(model):
        return model
    model = replace(model, stalled=event.words)
    model = note(model, "stalled", f"nothing has come from the program since: {event.words}; it is ended")
    # The next supervisor must know that the signal came from memtop.
    return begin(emit(model, SaveState()), asked=False)
