"""How far a training is, in the counting of its own program, and what another batch makes of it.

A program that counts micro-batches, or samples, must begin at another number when its batch
changes. Pure functions.
"""

from __future__ import annotations

from typing import NamedTuple

from memtop.presets.program_profiles import CheckpointRule, Position
from memtop.supervisor.wire import Checkpoint


class Split(NamedTuple):
    """How many samples one update has."""

    batch: int
    accumulation: int
    processes: int = 1

    @property
    def effective_batch(self) -> int:
        return self.batch * self.accumulation * self.processes


def samples_of_step(position: Position, split: Split) -> int:
    """The samples of one step of the program's counter."""
    sizes = {"updates": split.effective_batch, "micro_batches": split.batch * split.processes, "samples": 1}
    return sizes[position.counts]


def updates_at(position: Position, step: int, epoch: int | None, split: Split | None) -> int | None:
    """How many updates are done at this position; None if that does not follow from it."""
    if position.per_epoch and epoch:
        return None  # the length of an epoch is not known
    if position.counts == "updates":
        return step
    if split is None:
        return None
    return step // split.accumulation if position.counts == "micro_batches" else step // split.effective_batch


def converted(position: Position, step: int, before: Split, after: Split) -> int:
    """The same position with another split. Never later, so that no sample is left out; where
    micro-batches count, at the beginning of an update."""
    new = step * samples_of_step(position, before) // samples_of_step(position, after)
    return new - new % after.accumulation if position.counts == "micro_batches" else new


def moved(
    rule: CheckpointRule, position: Position, at: Checkpoint | None, before: Split, after: Split, rate: float | None = None
) -> str:
    """What a restart with another split means for samples and learning rate, as the end of a
    sentence. `rate`: the learning rate when the checkpoint was found."""
    step = None if at is None or not at.complete else at.step if at.step is not None else at.updates
    if step is None:
        return ""
    return f"; {_samples(rule, position, step, before, after)}; {_rate(rule, position, before, after, rate)}"


def _samples(rule: CheckpointRule, position: Position, step: int, before: Split, after: Split) -> str:
    seen = step * samples_of_step(position, before)
    if position.order == "random":
        return "its samples are drawn at random; with a fixed seed the program draws those of its beginning again"
    if position.order == "reshuffled":
        return "! the program draws the order of its epoch again, so some samples come twice and others not"
    if position.order == "lost":
        which = f": {seen} samples are repeated" if position.per_epoch else ""
        return f"! the program begins its epoch again{which}"
    text, new = "", step
    if rule.convert and (new := converted(position, step, before, after)) != step:
        name = position.counts.replace("_", "-")
        text = f"its position is converted in a copy of the checkpoint ({name}: {step} -> {new}), so "
    more = new * samples_of_step(position, after) - seen
    if not more:
        return f"{text}no sample is repeated or left out"
    mark, verb = ("", "repeated") if text else ("! ", "skipped" if more > 0 else "repeated")
    return f"{mark}{text}{abs(more)} samples are {verb}"


def _rate(rule: CheckpointRule, position: Position, before: Split, after: Split, rate: float | None) -> str:
    is_held = (
        before.effective_batch == after.effective_batch
        or (position.length == "updates" and position.counts == "updates")
        or (position.length == "epochs" and (rule.convert or position.counts == "samples"))
    )
    known = "" if rate is None else f" (about {rate:.3g})"
    if position.counts == "micro_batches" and not rule.convert and before.batch != after.batch:
        return f"! the learning rate there{known} changes with the position"
    if is_held:
        return f"the learning rate there{known} is the same before and after"
    longer = before.effective_batch / after.effective_batch
    return f"! the learning rate there{known} changes: its schedule has {longer:g} times as many updates"
