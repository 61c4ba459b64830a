"""What a model shows: the `RunState` for dashboards, and what state.json keeps for the next
supervisor.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memtop.supervisor.run.model import Model
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.wire import Proposal, RunState

_OF_ATTEMPT = ("started", "ended", "exit_status")
_OF_STEP = ("epoch", "loss", "learning_rate", "gradient_norm", "padding_fraction")
_OF_SAMPLE = ("run_rss_bytes", "run_memory", "gpu_base_bytes")


def run_state(model: Model) -> RunState:
    """The run at this moment."""
    progress, settings, attempt, run = model.progress, model.settings, model.attempt, model.run
    return RunState(
        name=run.name,
        folder=run.folder,
        state=model.phase,
        reason=model.reason,
        alive=model.alive,
        adopted=model.adopted,
        supervisor_pid=model.supervisor_pid,
        attempt=model.number,
        created=run.created,
        **{name: getattr(attempt, name) for name in _OF_ATTEMPT if attempt is not None},
        settings=settings,
        command=run.command,
        choice=_choice(model),
        batch_search=progress.batch_search,
        effective_batch=settings.effective_batch if settings else None,
        total_updates=progress.total_updates,
        best_loss=progress.best_loss,
        step_seconds=progress.step_seconds,
        split=progress.split(),
        ranks=progress.rank_memory(model.agents),
        **_position(model),
        **(_while_alive(model) if model.alive else {}),
        offers=None if progress.offers is None else tuple(sorted(progress.offers)),
        checkpoint=model.checkpoint,
        log_path=f"{run.folder}/attempts/{attempt.number:04d}/output.log" if attempt else None,
        # Once the program has ended, the reason names what is not saved.
        warnings=(*model.warnings.values(), *([progress.unsaved] if model.alive and progress.unsaved else [])),
        on_oom=run.on_oom,
        proposal=_proposal(model),
        trial=model.trial.trial if model.trial else None,
    )


def _choice(model: Model) -> str | None:
    """What memtop chose, as long as the run has it."""
    first, now = model.run.settings, model.settings
    is_kept = first is not None and now is not None and (first.preset, first.gpus) == (now.preset, now.gpus)
    return model.run.choice if is_kept else None


def _proposal(model: Model) -> Proposal | None:
    begins = model.restart.begins if model.restart is not None else None
    return replace(model.proposal, begins=begins) if model.proposal is not None else None


def _position(model: Model) -> dict[str, Any]:
    """How far the run is: its newest update, its target and its speed."""
    progress, settings = model.progress, model.settings
    step, plan = progress.step, progress.plan
    # Until the program has reported where it stands, it stands where it will resume.
    saved = model.checkpoint if model.checkpoint is not None and model.checkpoint.complete else None
    at, start = step or plan or saved, plan or saved
    seen = None if at is None else at.samples_seen
    target = (plan.target_samples if plan else None) or (settings.target_samples if settings else None)
    left = None if seen is None or target is None else max(0, target - seen)
    samples_rate, tokens_rate = progress.rates()
    return {
        "updates": step.update if step is not None else None if start is None else start.updates,
        "samples_seen": seen,
        "target_samples": target,
        "samples_per_second": samples_rate,
        "tokens_per_second": tokens_rate,
        "eta_seconds": left / samples_rate if model.alive and samples_rate and left is not None else None,
        **{name: getattr(step, name) for name in _OF_STEP if step is not None},
    }


def _while_alive(model: Model) -> dict[str, Any]:
    """The fields that keep their defaults when no program runs."""
    sample = model.sample
    return {
        "trainer_pid": model.trainer_pid,
        "unsaved": model.progress.unsaved,
        "trends": model.trends,
        "advice": model.advice,
        **{name: getattr(sample, name) for name in _OF_SAMPLE if sample is not None},
    }


def state_file(model: Model, socket: str, started_ticks: int | None) -> StateFile:
    """What state.json keeps."""
    return StateFile(
        run=run_state(model),
        socket=socket,
        supervisor_started_ticks=started_ticks,
        pending=model.pending,
        waiting=model.restart.waiting if model.restart is not None else None,
        waited_at=model.waited_at,
        stalled=model.stalled,
    )
