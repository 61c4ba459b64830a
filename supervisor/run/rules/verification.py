"""Whether the changes of a restart had an effect on the user's own program: its first update shows
it, or that there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from memtop.supervisor.run.grip import Grip, values_of
from memtop.supervisor.run.model import Model, note
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.rules import stopping
from memtop.supervisor.wire import Change

_SLACK = 2
"""Steps: a program may count from 0, or name the one that is saved next."""


def after_step(model: Model, step: Step) -> Model:
    """Compare the first update of an attempt with what was asked for."""
    asked, grip = model.asked, model.grip
    if asked is None or grip is None:
        return model
    if grip.profile is not None and model.progress.plan is None:
        # Its output shows the rest.
        return model if asked.begun else _of_first_step(replace(model, asked=replace(asked, begun=True)), grip, step)
    model = replace(model, asked=None)
    uses = {"batch": step.batch, "accumulation": step.accumulation, "seq_len": grip.seq_len}
    for line in _without_effect(values_of(model.knobs, grip), uses):
        model = note(model, "knob", line)
    if asked.resumed is None:
        return model
    plan = model.progress.plan
    if plan is None:
        return note(model, "warning", "whether the program resumed is not known: it does not report where it began")
    if plan.updates >= asked.resumed:
        return replace(model, grip=replace(grip, resumes=True))
    model = replace(model, grip=replace(grip, resumes=False))
    return _stopped(model, f"it began after update {plan.updates} instead of {asked.resumed}", f"of update {asked.resumed}")


def _of_first_step(model: Model, grip: Grip, step: Step) -> Model:
    """What the agent has seen of a program with a profile: its data loader's batch."""
    if grip.split is None or not model.knobs:
        return model
    wanted = {"batch": grip.split.batch, "accumulation": grip.split.accumulation}
    for line in _without_effect(wanted, {"batch": step.batch, "accumulation": step.accumulation}):
        model = note(model, "knob", line)
    return model


def after_end(model: Model) -> Model:
    """The attempt is over. If it ended before its first update: note what it had begun with."""
    asked, grip, plan = model.asked, model.grip, model.progress.plan
    if asked is None or asked.resumed is None or grip is None or plan is None or plan.updates >= asked.resumed:
        return model
    # Its agent has ended it.
    text = f"the checkpoint of update {asked.resumed} is kept in {model.run.folder}"
    return note(replace(model, asked=None, grip=replace(grip, resumes=False)), "warning", text)


def going_back(model: Model) -> Change | None:
    """If the program ended before its first update with other settings: the change that returns to
    those before. None if those have not worked or ran out of memory, or if the program would begin
    from zero."""
    asked = model.asked
    if asked is None or asked.begun or asked.checkpoint is None or asked.before == model.knobs:
        return None
    worked = (
        record.configuration
        for record in reversed(model.configurations.records)
        if record.configuration.knobs == asked.before and not record.died_of_memory
    )
    row = next((one for one in worked if one.until_update is not None), None)
    if row is None:
        return None
    return Change(configuration=row.number, reason=f"attempt {model.number} did not start with its new settings")


def without_training(model: Model) -> str | None:
    """Why an attempt that was to resume has failed although its exit status says otherwise: it has
    ended without an update, though there were some to do."""
    asked, plan = model.asked, model.progress.plan
    if asked is None or asked.begun or asked.checkpoint is None or model.update is not None:
        return None
    at = asked.checkpoint.updates
    if plan is not None and plan.total_updates is not None and at is not None and at >= plan.total_updates:
        return None
    if any(row.outcome == "finished" for row in model.configurations.rows if row.knobs == asked.before):
        return None
    # Hugging Face's Trainer reports where it begins, even if nothing is left to do.
    reports = model.grip is not None and model.grip.profile is None
    if asked.before == model.knobs and (plan is not None or not reports):
        return None
    return "the program ended with exit status 0 before its first update"


def after_output(model: Model, seen: Seen) -> Model:
    """Compare the first lines of a program with a profile with what was asked for."""
    asked, grip = model.asked, model.grip
    if asked is None or grip is None or grip.profile is None or seen.again:
        return model
    model = replace(model, asked=None)
    wanted = {
        "batch": grip.batch,
        "accumulation": grip.accumulation,
        "seq_len": grip.seq_len,
        "effective": grip.effective_batch,
    }
    if grip.effective_batch is not None and grip.seq_len is not None:
        wanted["tokens"] = grip.effective_batch * grip.seq_len
    if model.knobs:
        asked_for = {name: value for name, value in wanted.items() if value is not None}
        for line in _without_effect(asked_for, seen.printed):
            model = note(model, "knob", line)
    at = asked.checkpoint
    expected = None if at is None else at.step if at.step is not None else at.updates
    if expected is None:
        return model
    first = seen.first
    if at is not None and at.epoch and grip.profile.position.per_epoch and seen.steps_of_epoch is not None:
        first -= at.epoch * seen.steps_of_epoch
    if first >= expected - _SLACK:
        model = replace(model, grip=replace(grip, resumes=True))
        return note(model, "resume", f"the program has resumed: its output begins with step {first}")
    model = replace(model, grip=replace(grip, resumes=False))
    if grip.profile.output.step is None:
        text = f"the program may not have resumed: its output begins with step {first} instead of {expected}"
        return note(model, "warning", text)
    return _stopped(model, f"its output begins with step {first} instead of {expected}", f"of step {expected}")


def _stopped(model: Model, why: str, which: str) -> Model:
    text = (
        f"the program did not resume: {why}. It is stopped before it overwrites its checkpoints; the one {which} is kept in "
        f"{model.run.folder}"
    )
    return stopping.stop_unsaved(note(model, "warning", text))


_WORDS = {"effective": "the effective batch", "tokens": "the number of tokens of an update"}


def _without_effect(wanted: Mapping[str, Any], uses: Mapping[str, Any]) -> list[str]:
    return [
        f"this setting had no effect: {_WORDS.get(name, name)} {wanted[name]} was asked for, the program uses {used}"
        for name, used in uses.items()
        if name in wanted and used is not None and used != wanted[name]
    ]
