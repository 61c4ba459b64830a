"""The rules for what the output of a program says."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.supervisor.run.effects import DropRows, UpdateAttempt
from memtop.supervisor.run.model import AttemptStage, Model, emit, move, note, warn
from memtop.supervisor.run.output.values import Seen
from memtop.supervisor.run.rules import verification
from memtop.supervisor.wire import Phase


def read(model: Model, seen: Seen) -> Model:
    """The program's output has new numbers."""
    attempt, before = model.attempt, model.output
    if attempt is None or attempt.number != seen.attempt:
        return model
    was_by_output = model.by_output
    model = replace(model, output=seen)
    if before is None and not seen.again:
        model = note(model, "output", f"values of the training are read from the output, by lines like `{seen.example}`")
    is_known = model.asked is not None and model.asked.resumed is not None
    if model.by_output and not was_by_output and not seen.again and seen.attempt > 1 and not is_known:
        # It has resumed: what the attempt before did after this step does not count.
        first = max(1, -(-seen.first // seen.steps_per_update))
        model = emit(model, UpdateAttempt(number=seen.attempt, values={"start_updates": first - 1}))
        model = emit(model, DropRows(first))
    text = f"the program prints a loss that is not finite, at step {seen.step}" if seen.not_finite else None
    model = warn(model, "loss", text)
    if attempt.stage is not AttemptStage.RUNNING:
        return model
    if model.proposal is not None:
        model = replace(model, proposal=None)
    model = move(model, Phase.TRAINING) if model.phase is Phase.STARTING else model
    return verification.after_output(model, seen)
