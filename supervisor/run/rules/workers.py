"""The rules for workers that their launcher (torchrun) starts again, within one attempt."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor.run import explain
from memtop.supervisor.run.effects import DropRows, FollowWorkers
from memtop.supervisor.run.events import WorkersStarted
from memtop.supervisor.run.model import AttemptStage, Model, emit, note
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.reports import Hello, Report, Step


def started_again(model: Model, event: WorkersStarted) -> Model:
    """The launcher has done what memtop would do: nothing is left to recover."""
    attempt, before = model.attempt, model.progress
    if attempt is None or attempt.stage is not AttemptStage.RUNNING or event.restarts <= before.restarts:
        return model
    model = _begun_again(replace(model, progress=before.started_again(event.restarts)))
    if event.known:
        return model
    return note(model, "workers", explain.workers_started_again(event.restarts, before, event.dead))


def after_report(model: Model, before: Progress, rank: int, report: Report, *, replayed: bool) -> Model:
    """Notice by a report what no folder has shown, and where the workers go on."""
    if replayed:
        return model
    if isinstance(report, Hello) and report.restarts > before.restarts:
        return note(_begun_again(model), "workers", explain.workers_started_again(report.restarts, before, None))
    if isinstance(report, Step) and rank == 0 and before.restarts and before.step is None:
        return emit(model, DropRows(report.update))
    return model


def _begun_again(model: Model) -> Model:
    return emit(replace(model, agents=frozenset(), stalled=None), FollowWorkers())


def are_loading(model: Model) -> bool:
    """Whether workers that were started again have not been heard of yet."""
    return model.progress.restarts > 0 and not model.progress.ranks
