"""What follows from a report of a rank."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import DropRows, ReadStates, UpdateAttempt
from memtop.supervisor.run.events import Reported
from memtop.supervisor.run.model import Model, emit, move, note
from memtop.supervisor.run.reports import (
    Evaluated,
    MemoryRecord,
    Plan,
    Pressure,
    Report,
    Saved,
    SaveFailed,
    Step,
    Warned,
    values,
)
from memtop.supervisor.run.rules import configurations, prevention, trials
from memtop.supervisor.wire import Phase


def reported(model: Model, event: Reported) -> Model:
    """Count the report in, and act on it. One that an earlier supervisor had read is only counted
    in where it may not have concluded anything from it yet.
    """
    rank, report = event.rank, event.report
    model = replace(model, progress=model.progress.after(rank, report))
    if event.replayed:
        return model if isinstance(report, Step) else configurations.after_report(model, rank, report)
    if isinstance(report, Step) and model.proposal is not None and rank == 0:
        model = replace(model, proposal=None)
    model = configurations.after_report(model, rank, report)
    if isinstance(report, Pressure):
        model = prevention.under_pressure(model, rank, report)
    model = trials.after_report(model, rank, report)
    return _of_first_rank(model, report) if rank == 0 else model


def _of_first_rank(model: Model, report: Report) -> Model:
    match report:
        case Step():
            return move(model, Phase.TRAINING) if model.phase is Phase.STARTING else model
        case Plan(updates=start, resumed=resumed, total_updates=total):
            model = emit(model, UpdateAttempt(number=model.number, values={"start_updates": start}), DropRows(start + 1))
            where = f"resumes at update {start}" if resumed else "starts at update 0"
            return note(model, "plan", f"attempt {model.number} {where} of {total}")
        case Saved(updates=updates, size_bytes=size, seconds=seconds):
            took = "" if seconds is None else f" in {seconds:.1f} s"
            text = f"checkpoint at update {updates}: {units.size(size)}{took}"
            return note(emit(model, ReadStates()), "checkpoint", text)
        case Warned(message=message) | SaveFailed(message=message):
            return note(model, "warning", str(message))
        case MemoryRecord():
            return note(model, "memory", explain.report_text(report), values(report))
        case Evaluated():
            return note(model, "evaluation", explain.report_text(report), values(report))
    return model
