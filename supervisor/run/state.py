"""What a model shows: the `RunState` for dashboards, and what state.json keeps for the next
supervisor.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.program import Program, ProgramCheckpoint, first_known
from memtop.supervisor.run.grip import Grip, of_program, why_not_continued
from memtop.supervisor.run.model import Model
from memtop.supervisor.run.output.shown import with_output
from memtop.supervisor.run.record.folder import StateFile
from memtop.supervisor.run.rules import spikes
from memtop.supervisor.wire import Phase, Proposal, RunState, Stage

_OF_ATTEMPT = ("started", "ended", "exit_status", "ended_by", "earlier_seconds")
_OF_STEP = ("epoch", "learning_rate", "padding_fraction")
_OF_SAMPLE = ("run_rss_bytes", "run_memory", "gpu_base_bytes")


def run_state(model: Model) -> RunState:
    """The run at this moment."""
    state, progress = _reported(model), model.progress
    counted, by_hooks = progress.step is not None, progress.plan is not None
    return with_output(state, model.output, model.now.time, counted=counted, pace=progress.pace, by_hooks=by_hooks)


def _reported(model: Model) -> RunState:
    """The run as the ranks report it."""
    progress, settings, attempt, run = model.progress, model.settings, model.attempt, model.run
    return RunState(
        name=run.name,
        folder=run.folder,
        state=model.phase,
        reason=model.reason,
        stage=_stage(model) if model.phase is Phase.STARTING else None,
        doing=_DOING.get(progress.phase or "") if model.phase is Phase.TRAINING and model.alive else None,
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
        program=None if settings else _program(model),
        effective_batch=_effective_batch(model),
        total_updates=_total_updates(model),
        loss=progress.loss,
        best_loss=progress.best_loss,
        gradient_norm=progress.gradient_norm,
        step_seconds=progress.step_seconds,
        split=progress.split(),
        ranks=_ranks(model),
        **_position(model),
        **(_while_alive(model) if model.alive else {}),
        offers=None if progress.offers is None else tuple(sorted(progress.offers)),
        checkpoint=model.checkpoint or model.saved_by_program,
        log_path=f"{run.folder}/attempts/{attempt.number:04d}/output.log" if attempt else None,
        # Once the program has ended, the reason names what is not saved.
        warnings=(*model.warnings.values(), *([progress.unsaved] if model.alive and progress.unsaved else [])),
        on_oom=run.on_oom,
        proposal=_proposal(model),
        spike=spikes.proposed(model),
        trial=model.trial.trial if model.trial else None,
    )


def _total_updates(model: Model) -> int | None:
    """What the program has reported. Before that, what follows from the saved state and the
    settings."""
    progress, settings, saved = model.progress, model.settings, model.checkpoint
    if progress.total_updates is not None or settings is None or not settings.target_samples or settings.leave_out:
        return progress.total_updates
    if settings.effective_batch < 1:
        return None  # as a damaged report says
    done, seen = 0, 0
    if saved is not None and saved.complete:
        if saved.updates is None or saved.samples_seen is None:
            return None
        done, seen = saved.updates, saved.samples_seen
    return done + math.ceil(max(0, settings.target_samples - seen) / settings.effective_batch)


def _ranks(model: Model) -> tuple[RankMemory, ...]:
    held = model.sample.pss_bytes if model.sample is not None and model.alive else {}
    return tuple(replace(rank, pss_bytes=held.get(rank.pid)) for rank in model.progress.rank_memory(model.agents))


_STAGES = {
    "loading": Stage.LOADING_MODEL,
    "compiling": Stage.COMPILING,
    "data": Stage.READING_DATA,
    "training": Stage.FIRST_UPDATE,
}

_DOING = {"evaluation": "evaluating", "sampling": "sampling", "save": "saving"}


def _stage(model: Model) -> Stage:
    """What the program does before its first update."""
    if model.progress.phase in _STAGES:
        return _STAGES[model.progress.phase]
    if model.progress.plan is not None:
        return Stage.FIRST_UPDATE
    if not model.torch_loaded:
        return Stage.STARTING
    # memtop's own trainer reports as soon as it has imported torch.
    return Stage.IMPORTING if model.settings is not None else Stage.LOADING


def _effective_batch(model: Model) -> int | None:
    if model.settings is not None:
        return model.settings.effective_batch
    found = model.progress.plan or model.progress.loop
    if found is not None and found.effective_batch is not None:
        return found.effective_batch
    return model.grip.effective_batch if model.grip is not None else None


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
    seen = _of_whole_updates(model) if at is None or at.samples_seen is None else at.samples_seen
    target = (plan.target_samples if plan else None) or (settings.target_samples if settings else None)
    left = None if seen is None or target is None else max(0, target - seen)
    speed = progress.speed(_effective_batch(model))
    return {
        "updates": step.update if step is not None else None if start is None else start.updates,
        "samples_seen": seen,
        "target_samples": target,
        **speed._asdict(),
        "eta_seconds": _seconds_left(model, left, speed.samples_per_second),
        **{name: getattr(step, name) for name in _OF_STEP if step is not None},
    }


def _of_whole_updates(model: Model) -> int | None:
    """The samples of a loop that does not count them itself. None unless memtop has counted its
    updates from the first, and all of them have one size as far as it knows."""
    step, loop = model.progress.step, model.progress.loop
    if step is None or loop is None or loop.effective_batch is None or loop.resumed or model.by_output:
        return None
    return step.update * loop.effective_batch if model.number == 1 and not model.progress.restarts else None


def _seconds_left(model: Model, samples: int | None, rate: float | None) -> float | None:
    if not model.alive:
        return None
    return samples / rate if samples is not None and rate else model.progress.seconds_left()


def _program(model: Model) -> Program:
    """What is known about an external command."""
    plan, saved = model.progress.plan, model.saved_by_program
    found = None if saved is None else of_program(saved)
    if plan is not None and plan.framework is not None:
        why = f"{plan.framework} calls memtop's callback"
        if model.grip is not None and model.grip.profile is not None:
            known = _with_profile(model.grip, model.grip.profile.name, found)
            return replace(known, grip="hooks", why=f"{why}; {model.grip.why}", knobs=first_known(plan.knobs, known.knobs))
        # Of a program that has resumed it is known that it does.
        resumes = plan.resumed or (model.grip.resumes if model.grip is not None else None)
        return Program(grip="hooks", why=why, knobs=plan.knobs, resumes=resumes, checkpoint=found)
    if model.grip is not None and model.grip.profile is not None:
        known, seen = _with_profile(model.grip, model.grip.profile.name, found), model.progress.loop
        return known if seen is None else replace(known, knobs=first_known(known.knobs, seen.knobs))
    if model.progress.step is None:
        return Program(checkpoint=found)
    why, loop = "memtop counts the steps of a torch optimizer", model.progress.loop
    if loop is None:
        return Program(grip="optimizer", why=why, checkpoint=found)
    why = f"{why}; {loop.framework} knows the settings"
    return Program(grip="optimizer", why=why, knobs=loop.knobs, resumes=loop.resumed or None, checkpoint=found)


def _with_profile(grip: Grip, name: str, found: ProgramCheckpoint | None) -> Program:
    resumes = why_not_continued(grip) is None
    return Program(grip="profile", profile=name, why=grip.why, knobs=grip.knobs, resumes=resumes, checkpoint=found)


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
        grip=model.grip,
        asked=model.asked,
    )
