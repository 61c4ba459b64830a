"""What memtop can change in the user's own program after it ran out of memory: a smaller batch with
more accumulation, then gradient checkpointing. The effective batch stays."""

from __future__ import annotations

import msgspec

from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.recovery.peak_line import PeakLine, line_through
from memtop.supervisor.recovery.policy import Candidate
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.run.grip import Grip, no_checkpoint, shape_key, why_not_continued
from memtop.supervisor.run.model import Model


class MemoryRoom(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the run's smallest GPU, or of the machine; None where it is not known."""

    total_bytes: int | None = None
    base_bytes: int | None = None
    """Without a batch: contexts, weights, optimizer."""
    others_bytes: int | None = None
    """Of other programs."""


def candidates(model: Model, grip: Grip, diagnosis: Diagnosis, measured: MemoryRoom) -> list[Candidate]:
    """The remedies, the one that costs least first."""
    if not (diagnosis.kind.of_gpu or diagnosis.kind.of_host):
        return []
    found = [_smaller(model, grip, diagnosis, measured), _checkpointing(model)]
    return [
        Candidate(remedy=_placed(model, grip, remedy), key=knobs_key({**model.knobs, **remedy.assignments}))
        for remedy in found
        if remedy is not None
    ]


def knobs_key(knobs: dict[str, str]) -> str:
    """Of the settings that memtop gave to the user's own program."""
    return " ".join(f"{name}={text}" for name, text in sorted(knobs.items()))


def without_checkpoint(model: Model, grip: Grip) -> str | None:
    """Why the program cannot resume; None if it can."""
    if (why := why_not_continued(grip)) is not None:
        return why
    found = model.states.program
    if found is not None and found.complete:
        return None
    return no_checkpoint(grip, found)


def _smaller(model: Model, grip: Grip, diagnosis: Diagnosis, measured: MemoryRoom) -> Remedy | None:
    """The largest part of the batch that is foreseen to fit; half of it if nothing is foreseen."""
    batch, accumulation = grip.batch, grip.accumulation
    if not batch or not accumulation or batch == 1 or {"batch", "accumulation"} & grip.fixed.keys():
        return None
    line = _line(model, grip, diagnosis, measured)
    parts = [number for number in range(2, batch + 1) if batch % number == 0]
    parts = [number for number in parts if _fits(line, batch // number, measured)] or parts[-1:]
    smaller, more = batch // parts[0], accumulation * parts[0]
    split = f"batch {batch} -> {smaller}, accumulation {accumulation} -> {more}"
    return Remedy(
        id="smaller_batch",
        title=f"{split}: effective batch stays {grip.effective_batch}",
        why="fewer samples are in memory at once",
        keeps_math=True,
        resumable="resumes",
        assignments={"batch": str(smaller), "accumulation": str(more)},
        forecast=None if isinstance(line, str) else line.forecast(smaller, measured.total_bytes, measured.others_bytes),
        forecast_unknown=line if isinstance(line, str) else None,
        command=f"memtop restart {model.run.name} --batch {smaller} --accum {more}",
    )


def _line(model: Model, grip: Grip, diagnosis: Diagnosis, measured: MemoryRoom) -> PeakLine | str:
    """The peak over the batch, from all configurations of the same shape."""
    if diagnosis.address_space_bytes is not None:
        return "a limit of the address space counts mapped memory, and what is measured is memory in use"
    key = shape_key(grip, model.knobs, model.allocator, on_gpu=model.on_gpu)
    peaks = [peak for row in model.configurations.rows if (peak := row.peak) is not None and peak.settings_key == key]
    return line_through(peaks, base_bytes=measured.base_bytes)


def _fits(line: PeakLine | str, batch: int, measured: MemoryRoom) -> bool:
    if isinstance(line, str):
        return True
    fraction = line.forecast(batch, measured.total_bytes, measured.others_bytes).fraction
    return fraction is None or fraction < 1


def _checkpointing(model: Model) -> Remedy | None:
    plan = model.progress.plan
    switch = plan.knobs.gradient_checkpointing if plan is not None else None
    if switch is None or switch.value is not False:
        return None
    return Remedy(
        id="checkpointing",
        title="gradient checkpointing",
        why="activations are computed again in the backward pass instead of kept",
        keeps_math=True,
        resumable="resumes",
        assignments={"gradient_checkpointing": "true"},
        forecast_unknown="its effect on this program was not measured",
        command=f"memtop restart {model.run.name} --set gradient_checkpointing=true",
    )


def _placed(model: Model, grip: Grip, remedy: Remedy) -> Remedy:
    """Without a checkpoint the program begins from zero, which only a person may want."""
    why = without_checkpoint(model, grip)
    if why is None:
        return remedy
    return msgspec.structs.replace(
        remedy,
        title=f"{remedy.title}, from the first update",
        why=f"{why}, so the program begins from zero",
        resumable="none",
        needs_consent=True,
    )
