"""What a trial may change, what it is called, and how a run that has ended gets the settings before it back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memtop.presets.comparison import changes
from memtop.presets.schema import Settings
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.recovery import batch_trial
from memtop.supervisor.recovery.applying import change_for
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.run import explain
from memtop.supervisor.run.record.configurations import same
from memtop.supervisor.wire import Change

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor


def proposed(supervisor: Supervisor) -> Change:
    """What the advice proposes first; MemtopError if it proposes nothing that can be tried."""
    advice = supervisor.prevention.advice
    if advice is None:
        raise MemtopError("nothing to try yet: the run has not been measured for long enough")
    for remedy in advice.proposals:
        if remedy.assignments and remedy.resumable in ("live", "resumes") and not remedy.needs_consent:
            return change_for(remedy, reason="trial")
    why = f"; {advice.refused[0]}" if advice.refused else ""
    raise MemtopError(f"nothing to try: {advice.summary}{why}")


def why_not(supervisor: Supervisor, before: Settings, after: Settings) -> str | None:
    """Why this must not be tried, in one line; None if it may."""
    if before.effective_batch != after.effective_batch:
        return f"a trial changes nothing of what is learnt{explain.split_change(before, after)}"
    if after.batch > before.batch:
        split = batch_trial.Split(batch=after.batch, accumulation=after.accumulation)
        prevention = supervisor.prevention
        return batch_trial.refusal(before, split, prevention.forecast(after.batch), prevention.failed_batches())
    return None


def title_of(before: Settings, after: Settings) -> str:
    """`batch 16 -> 20, accumulation 5 -> 4`; other changes as they are told everywhere. Empty where nothing changes."""
    numbers = ("batch", "accumulation")
    split = [
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for name in numbers
        if getattr(before, name) != getattr(after, name)
    ]
    rest = changes(before, replace(after, batch=before.batch, accumulation=before.accumulation))
    return ", ".join([*split, *rest])


def come_back_with(supervisor: Supervisor, undo: Change) -> None:
    """The program has died in a trial and a restart waits its turn: it begins with the settings before the trial instead."""
    survival, before = supervisor.survival, supervisor.foreseen(undo)
    assert survival.comeback is not None
    assert before is not None, "only settings that are memtop's are tried"
    known = survival.comeback.change == undo
    survival.comeback.begin_with(undo)
    if known:
        return  # an earlier supervisor has told it
    if survival.proposal is not None:
        remedy = Remedy(
            id="trial_undone",
            title=undo.reason,
            why="The settings before the trial have trained in this run.",
            keeps_math=True,
            resumable="resumes",
            assignments={"batch": str(before.batch), "accumulation": str(before.accumulation)},
            forecast_unknown="the run has trained with it",
            command=f"memtop restart {supervisor.folder.name}",
        )
        survival.proposal = replace(survival.proposal, remedies=(remedy, *survival.proposal.remedies))
    supervisor.event("remedy", f"instead: {explain.restart_reason(undo)}")
    # Whoever takes over now is to begin with it too.
    supervisor.save_state()
    supervisor.publisher.changed()


def put_back(supervisor: Supervisor, before: Settings, reason: str) -> None:
    """The run has ended with other settings: from now on those before are its own, as a configuration without an update."""
    now = supervisor.settings
    if now is None or same(now, before):
        return
    settings = replace(before, target_samples=now.target_samples, epochs=now.epochs)
    configurations = supervisor.survival.configurations
    last = configurations.present
    assert last is not None, "a trial began with a configuration"
    done = last.configuration.until_update or supervisor.state().updates or 0
    died = last.configuration.outcome if last.died_of_memory else None
    saved = last.starts[-1].saved_after
    said = (last.newest_attempt, time.time())
    configurations.change(done + 1, reason, settings, died=died, saved=saved, changed_by=said)
    configurations.end(supervisor.phase.value, None, saved)
    supervisor.settings = settings
    supervisor.publisher.changed()
