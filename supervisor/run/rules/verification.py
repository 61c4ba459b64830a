"""Whether the changes of a restart had an effect on the user's own program: its first update shows
it, or that there is none.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memtop.supervisor.run.grip import Grip, values_of
from memtop.supervisor.run.model import Model, note
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.rules import stopping
from memtop.supervisor.wire import Change


def after_step(model: Model, step: Step) -> Model:
    """Compare the first update of an attempt with what was asked for."""
    asked, grip = model.asked, model.grip
    if asked is None or grip is None:
        return model
    model = replace(model, asked=None)
    for line in _without_effect(model.knobs, grip, step):
        model = note(model, "knob", line)
    if asked.resumed is None:
        return model
    plan = model.progress.plan
    if plan is None:
        return note(model, "warning", "whether the program resumed is not known: it does not report where it began")
    if plan.updates >= asked.resumed:
        return replace(model, grip=replace(grip, resumes=True))
    model = replace(model, grip=replace(grip, resumes=False))
    text = (
        f"the program did not resume: it began after update {plan.updates} instead of {asked.resumed}. It is stopped "
        f"before it overwrites its checkpoints; the one of update {asked.resumed} is kept in {model.run.folder}"
    )
    return stopping.stop_unsaved(note(model, "warning", text))


def after_end(model: Model) -> Model:
    """The attempt is over. If it ended before its first update: note what it had begun with."""
    asked, grip, plan = model.asked, model.grip, model.progress.plan
    if asked is None or asked.resumed is None or grip is None or plan is None or plan.updates >= asked.resumed:
        return model
    # Its agent has ended it.
    text = f"the checkpoint of update {asked.resumed} is kept in {model.run.folder}"
    return note(replace(model, asked=None, grip=replace(grip, resumes=False)), "warning", text)


def without_training(model: Model) -> str | None:
    """Why an attempt that was to resume has failed although its exit status says otherwise."""
    progress = model.progress
    if model.asked is None or model.asked.resumed is None or progress.plan is not None or progress.step is not None:
        return None
    return f"the program ended without training; it was to resume after update {model.asked.resumed}"


def going_back(model: Model) -> Change | None:
    """If the program ended before its first update with other settings: the change that returns to
    those before. None if those have not worked or ran out of memory, or if the program would begin
    from zero."""
    asked = model.asked
    if asked is None or asked.resumed is None or asked.before == model.knobs:
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


def _without_effect(knobs: dict[str, str], grip: Grip, step: Step) -> list[str]:
    uses: dict[str, Any] = {"batch": step.batch, "accumulation": step.accumulation, "seq_len": grip.seq_len}
    wanted = values_of(knobs, grip)
    return [
        f"this knob had no effect: {name} {wanted[name]} was asked for, the program uses {used}"
        for name, used in uses.items()
        if name in wanted and used is not None and used != wanted[name]
    ]
