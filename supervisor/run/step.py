"""The brain of a run: `step(model, event) -> (model, effects)`. It touches nothing; `performer.py`
carries the effects out.
"""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.errors import UsageError
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import CheckSaved, DropRows, Effect, GiveUp, ReadStates, UpdateAttempt
from memtop.supervisor.run.events import (
    AgentConnected,
    AgentGone,
    Answered,
    CheckpointKept,
    CommandEnded,
    Examined,
    Foreseen,
    Launched,
    LaunchRefused,
    LeftoversCleared,
    LeftoversFound,
    Now,
    Occurrence,
    OutputRead,
    ProgramEnded,
    Replayed,
    Reported,
    Requested,
    RowsDropped,
    Sampled,
    SamplingFailed,
    SavedChecked,
    Signalled,
    StateHeld,
    StatesRead,
    StoodStill,
    SupervisorStarted,
    Tick,
    WorkersStarted,
    WriteChecked,
)
from memtop.supervisor.run.model import AttemptStage, Cause, Model, Purpose, emit, move, not_by_signal, note, refused, warn
from memtop.supervisor.run.reports import (
    BatchSearched,
    Evaluated,
    MemoryRecord,
    Plan,
    Pressure,
    Report,
    Saved,
    SaveFailed,
    Spiked,
    Step,
    TrainerFound,
    Unknown,
    Warned,
    Written,
    values,
)
from memtop.supervisor.run.rules import (
    attempts,
    commands,
    configurations,
    ending,
    output,
    prevention,
    queue,
    restart,
    spikes,
    stopping,
    survival,
    taking_over,
    trainer,
    trials,
    verification,
    workers,
)
from memtop.supervisor.wire import Checkpoint, Phase


def step(model: Model, event: Occurrence, now: Now) -> tuple[Model, tuple[Effect, ...]]:
    """The run after this event, and what is to be done, in this order."""
    after = _after(replace(model, now=now), event)
    if after.waiters:
        after = commands.answer_waiters(after)
    return (replace(after, effects=()), after.effects) if after.effects else (after, ())


def _after(model: Model, event: Occurrence) -> Model:
    match event:
        case Reported():
            return _reported(model, event)
        case OutputRead(seen=seen):
            return output.read(model, seen)
        case Tick():
            return _tick(model, event)
        case Sampled():
            return _sampled(model, event)
        case SamplingFailed(why=why):
            return _sampling_failed(model, why)
        case Requested():
            return commands.requested(model, event)
        case Answered():
            return _answered(model, event)
        case AgentConnected(rank=rank):
            return commands.resume(replace(model, agents=model.agents | {rank}))
        case AgentGone(rank=rank):
            return replace(model, agents=model.agents - {rank})
        case StatesRead(states=states):
            return replace(model, states=states)
        case SavedChecked(found=found):
            return stopping.save_seen(_saved(model, found), found)
        case WriteChecked(topic="notify", problem=str(problem)) if model.warnings.get("notify") != problem:
            return note(warn(model, "notify", problem), "warning", problem)
        case WriteChecked(topic=topic, problem=problem):
            return warn(model, topic, problem)
        case CommandEnded(words=words):
            return note(model, "then", words)
        case SupervisorStarted():
            return taking_over.opened(model, event)
        case RowsDropped(best_loss=best):
            return replace(model, progress=replace(model.progress, best_before=best))
        case Replayed():
            return _check_saved(taking_over.replayed(model))
        case _:
            return _after_attempt_event(model, event)


def _saved(model: Model, found: Checkpoint) -> Model:
    """A checkpoint of the user's own program was found."""
    step, seen = model.progress.step, model.output
    rate = step.learning_rate if step is not None and step.learning_rate is not None else None
    rate = seen.learning_rate if rate is None and seen is not None else rate
    return replace(model, saved_by_program=found, rate_at_save=rate)


def _after_attempt_event(model: Model, event: Occurrence) -> Model:
    match event:
        case Launched():
            return _launched(model, event)
        case LaunchRefused():
            return _launch_refused(model, event)
        case ProgramEnded():
            return ending.program_ended(model, event)
        case LeftoversCleared():
            return ending.leftovers_cleared(model, event)
        case Examined():
            return ending.examined(model, event)
        case LeftoversFound():
            return ending.leftovers_found(model, event)
        case Foreseen(number=number, found=found):
            return configurations.foreseen(model, number, found)
        case StoodStill():
            return stopping.stood_still(model, event)
        case WorkersStarted():
            return workers.started_again(model, event)
        case Signalled():
            return stopping.signalled(model, event)
        case StateHeld(problem=problem):
            return _state_held(model, problem)
        case CheckpointKept(problem=problem):
            return _checkpoint_kept(model, problem)
    raise AssertionError(f"no rule for {type(event).__name__}")


def _tick(model: Model, event: Tick) -> Model:
    model = queue.tick(_warn_of_program(commands.resume(_observed(model, event)), event), event)
    attempt = model.attempt
    if attempt is None or model.launching is not None:
        return model
    for message, data in event.trend_news:
        model = note(model, "trend", message, data)
    if model.restart is not None:
        model = survival.tick(model)
    elif attempt.stage is AttemptStage.RUNNING and not model.phase.final:
        if model.ladder is not None:
            model = stopping.tick(model, event.saving)
        elif model.pending is not None and model.holding is None and model.phase in (Phase.STARTING, Phase.TRAINING):
            # Requested from an earlier supervisor, or by the command that started this one.
            model = restart.begin(model, model.pending, Cause.PENDING)
        else:
            model = prevention.tick(model)
    return trials.tick(model)


def _warn_of_program(model: Model, event: Tick) -> Model:
    """Warn of a program that is stopped, or that cannot report."""
    model = warn(model, "stopped", explain.program_stopped(model.stopped, model.trainer_pid) if model.stopped else None)
    text = None if event.not_heard is None else explain.not_heard(event.not_heard, by_output=model.output is not None)
    if model.warnings.get("silent") == text:
        return model
    model = warn(model, "silent", text)
    return model if text is None else note(model, "warning", text)


def _observed(model: Model, event: Tick) -> Model:
    same = (
        model.watched is event.watched
        and model.alive is event.alive
        and model.trainer_pid == event.trainer_pid
        and model.stopped == event.stopped
        and model.torch_loaded is event.torch_loaded
        and model.trends is event.trends
        and model.own_trends is event.own_trends
        and model.disk_free == event.disk_free
    )
    if same:
        return model
    return replace(
        model,
        watched=event.watched,
        alive=event.alive,
        trainer_pid=event.trainer_pid,
        stopped=event.stopped,
        torch_loaded=event.torch_loaded,
        trends=event.trends,
        own_trends=event.own_trends,
        disk_free=event.disk_free,
    )


def _sampled(model: Model, event: Sampled) -> Model:
    had_gpu = model.smallest_gpu is not None
    model = warn(replace(model, sample=event), "sampling", None)
    for crossing in event.crossings:
        model = note(model, "band", crossing)
    attempt = model.attempt
    if attempt is None or model.phase.final:
        return model
    if attempt.stage is AttemptStage.RUNNING:
        held = event.host_memory.size
        model = configurations.note_host(replace(model, host_bytes=held or model.host_bytes), held)
        # The trainer may have reported its plan before the GPUs could be read.
        model = model if had_gpu else configurations.foresee(model)
    if event.keep:
        model = configurations.keep(model)
    for line in event.dangers:
        model = note(model, "danger", line)
    return model if event.measured is None else prevention.advised(model, event.measured)


def _sampling_failed(model: Model, why: str) -> Model:
    # Reported once, however often it happens.
    if model.warnings.get("sampling") == why:
        return model
    return note(warn(model, "sampling", why), "warning", why)


def _answered(model: Model, event: Answered) -> Model:
    pending = model.asks.get(event.ask)
    if pending is None:
        return model
    model = replace(model, asks={number: other for number, other in model.asks.items() if number != event.ask})
    match pending.purpose:
        case Purpose.STOP:
            after = stopping.answered(model, pending, event)
            if model.ladder is not None and after.ladder is None:
                after = trials.launch_refused(after, refused(event.answers) or "")
            return after
        case Purpose.LEAK:
            return prevention.answered(model, pending, event)
        case Purpose.TRIAL:
            return trials.answered(model, event)
    return commands.answered(model, pending, event)


def _launched(model: Model, event: Launched) -> Model:
    launching = model.launching
    if launching is None:
        return model
    model = trials.launched(attempts.launched(warn(model, "damaged", None), event), launching.change)
    if launching.client is not None:
        model = commands.confirm(model, launching.client, launching.request)
    return model


def _launch_refused(model: Model, event: LaunchRefused) -> Model:
    launching = model.launching
    if launching is None:
        return model
    number = model.newest_number if event.recorded else launching.number - 1
    model = replace(model, launching=None, newest_number=number)
    match launching.cause:
        case Cause.START:
            return emit(model, GiveUp(why=event.why, usage=event.usage))
        case Cause.QUEUE:
            return queue.refused(model, event.why)
        case Cause.REQUEST:
            assert launching.client is not None
            return commands.withdraw(model, launching.client, launching.request, event.why, usage=event.usage)
        case Cause.PENDING:
            return ending.restart_refused(model, event.why, usage=event.usage)
        case Cause.INHERITED:
            return taking_over.inherited_refused(model, event.why)
        case Cause.DEATH:
            return survival.call_off(not_by_signal(model), event.why)
        case Cause.TRIAL:
            return trials.launch_refused(model, event.why)


def _state_held(model: Model, problem: str | None) -> Model:
    holding = model.holding
    if holding is None:
        return model
    if problem is not None:
        model = restart.not_held(model, problem)
        return model if holding.client is None else commands.withdraw(model, holding.client, holding.request, problem)
    try:
        model = restart.held(model)
    except UsageError as error:
        model = restart.not_held(model, str(error))
        return model if holding.client is None else commands.withdraw(model, holding.client, holding.request, str(error))
    # An ended run starts at once: then the answer comes with its program.
    if holding.client is None or model.launching is not None:
        return model
    return commands.confirm(model, holding.client, holding.request)


def _checkpoint_kept(model: Model, problem: str | None) -> Model:
    by_profile = model.grip is not None and model.grip.profile is not None
    model = warn(model, "checkpoint", problem)
    # The Trainer saves a further checkpoint before it stops; other programs may save over their
    # only one.
    return _state_held(model, problem if by_profile else None)


def _reported(model: Model, event: Reported) -> Model:
    """Count the report in, and act on it. One that an earlier supervisor had read is only counted
    in where it may not have concluded anything from it yet.
    """
    rank, report = event.rank, event.report
    if isinstance(report, Unknown):
        return _not_used(model, rank, report, replayed=event.replayed)
    before = model.progress
    model = replace(model, progress=before.after(rank, report))
    model = workers.after_report(model, before, rank, report, replayed=event.replayed)
    if isinstance(report, TrainerFound) and rank == 0:
        model = trainer.found(model, report, replayed=event.replayed)
    if isinstance(report, Saved) and rank == 0:
        model = trainer.saved(model, report, replayed=event.replayed)
    if isinstance(report, Spiked) and rank == 0:
        model = spikes.reported(model, report)
    if isinstance(report, Written) and rank == 0:
        model = configurations.announce(model, "sample", explain.written_text(report), report)
    if event.replayed:
        return model if isinstance(report, Step) else configurations.after_report(model, rank, report)
    if isinstance(report, Step) and model.proposal is not None and rank == 0:
        model = replace(model, proposal=None)
    model = configurations.after_report(model, rank, report)
    if isinstance(report, Pressure):
        model = prevention.under_pressure(model, rank, report)
    model = trials.after_report(model, rank, report)
    return _of_first_rank(model, report) if rank == 0 else model


def _not_used(model: Model, rank: int, report: Unknown, *, replayed: bool) -> Model:
    """Warn of the first report of an attempt that cannot be used."""
    model = replace(model, progress=replace(model.progress, heard=model.progress.heard + 1))
    if "report" in model.warnings:
        return model
    text = f"a report of rank {rank} is not used ({report.kind}: {report.problem}); later ones like it are not announced"
    model = warn(model, "report", text)
    return model if replayed else note(model, "warning", text)


def _tenths(seconds: float) -> str:
    return "< 0.1" if seconds < 0.05 else f"{seconds:.1f}"


def _of_first_rank(model: Model, report: Report) -> Model:
    match report:
        case Step():
            model = move(model, Phase.TRAINING) if model.phase is Phase.STARTING else model
            return verification.after_step(model, report)
        case Plan(updates=start, resumed=resumed, total_updates=total):
            model = trainer.begins(model, report)
            values_of = {"start_updates": model.progress.start_update}
            model = emit(model, UpdateAttempt(number=model.number, values=values_of), DropRows(start + 1))
            where = f"{'resumes' if resumed else 'starts'} at update {start}"
            return note(model, "plan", f"attempt {model.number} {where} of {total}")
        case Saved(updates=updates, size_bytes=size, seconds=seconds, pause_seconds=pause):
            took = "" if seconds is None else f" in {_tenths(seconds)} s"
            took += "" if pause is None else f", training stopped for {_tenths(pause)} s"
            where = "" if updates is None else f" at update {updates}"
            text = f"checkpoint{where}: {units.size(size)}{took}"
            model = warn(model, "stop", None) if model.ladder is None else model
            return note(emit(_check_saved(model), ReadStates()), "checkpoint", text)
        case Warned(message=str(message), topic="damaged"):
            return note(warn(model, "damaged", message), "warning", message)
        case Warned(message=message) | SaveFailed(message=message):
            return note(model, "warning", str(message))
        case BatchSearched(message=message):
            return note(model, "batch_search", str(message), values(report))
        case MemoryRecord():
            return note(model, "memory", explain.report_text(report), values(report))
        case Evaluated():
            return note(model, "evaluation", explain.report_text(report), values(report))
    return model


def _check_saved(model: Model) -> Model:
    """Read the newest checkpoint that an external command has reported."""
    saved = model.progress.reported
    return model if model.settings is not None or saved is None else emit(model, CheckSaved(saved))
