"""Puts what is known of a run together into one `RunState`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.wire import RunState

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor


def run_state(supervisor: Supervisor) -> RunState:
    """The run as it is now."""
    progress, settings, attempt = supervisor.progress, supervisor.settings, supervisor.attempt
    step, plan = progress.step, progress.plan
    samples_rate, tokens_rate = progress.rates()
    # Until the program has said where it stands, it stands where it will resume.
    saved = supervisor.checkpoint if supervisor.checkpoint is not None and supervisor.checkpoint.complete else None
    at = step or plan or saved
    seen = None if at is None else at.samples_seen
    start = plan or saved
    updates = step.update if step is not None else None if start is None else start.updates
    target = (plan.target_samples if plan else None) or (settings.target_samples if settings else None)
    running = attempt is not None and attempt.alive()
    left = None if seen is None or target is None else max(0, target - seen)
    return RunState(
        name=supervisor.folder.name,
        folder=str(supervisor.folder.path),
        state=supervisor.lifecycle.phase,
        reason=supervisor.lifecycle.reason,
        alive=running,
        adopted=supervisor.adopted,
        supervisor_pid=os.getpid(),
        trainer_pid=attempt.trainer.pid if running and attempt and attempt.trainer else None,
        attempt=attempt.number if attempt else 0,
        created=supervisor.spec.created,
        started=supervisor.started,
        ended=supervisor.ended,
        settings=settings,
        command=supervisor.spec.command,
        effective_batch=settings.effective_batch if settings else None,
        updates=updates,
        total_updates=progress.total_updates,
        samples_seen=seen,
        target_samples=target,
        epoch=step.epoch if step else None,
        loss=step.loss if step else None,
        best_loss=progress.best_loss,
        learning_rate=step.learning_rate if step else None,
        gradient_norm=step.gradient_norm if step else None,
        samples_per_second=samples_rate,
        tokens_per_second=tokens_rate,
        step_seconds=progress.step_seconds,
        split=progress.split(),
        eta_seconds=left / samples_rate if running and samples_rate and left is not None else None,
        ranks=progress.rank_memory(supervisor.agents.ranks),
        run_rss_bytes=supervisor.watch.run_rss_bytes if running else None,
        run_memory=supervisor.watch.run_memory if running else (),
        gpu_base_bytes=supervisor.watch.gpu_base_bytes if running else {},
        offers=None if progress.offers is None else tuple(sorted(progress.offers)),
        checkpoint=supervisor.checkpoint,
        exit_status=supervisor.exit_status,
        log_path=str(attempt.log_path) if attempt else None,
        # Of a program that has ended the reason tells what is not saved.
        warnings=(*supervisor.warnings.values(), *([progress.unsaved] if running and progress.unsaved else [])),
        unsaved=progress.unsaved if running else None,
        on_oom=supervisor.spec.on_oom,
        proposal=supervisor.survival.proposal,
        trends=supervisor.prevention.trends if running else (),
        advice=supervisor.prevention.advice if running else None,
        trial=supervisor.prevention.trials.newest,
    )


def attempt_and_ranks(supervisor: Supervisor) -> tuple[int, tuple[RankMemory, ...]]:
    """The number of the attempt (0 before the first), and the memory that its ranks last reported."""
    return supervisor.attempt.number if supervisor.attempt is not None else 0, supervisor.progress.rank_memory()
