"""The smaller exact split: less of the batch at a time, the same samples in every update. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from memtop.presets.schema import Settings, exact_splits
from memtop.supervisor import units
from memtop.supervisor.monitor.bands import EDGE_FROM
from memtop.supervisor.recovery.forecast import Line
from memtop.supervisor.recovery.situation import Situation
from memtop.supervisor.recovery.values import Remedy


def smaller_split(situation: Situation) -> Remedy | str:
    """The largest exact divisor that is forecast below 85 %, or where there is no forecast the largest up to half of B."""
    settings = situation.settings
    if settings.batch == 1:
        return "the micro-batch is 1 already"
    below = [split for split in exact_splits(settings.effective_batch, settings.world_size) if split[0] < settings.batch]
    untried = [split for split in below if not situation.tried(_with(settings, split))]
    if not untried:
        return "every smaller exact split has failed"
    found = _first_that_fits(situation, untried)
    if isinstance(found, str):
        return found
    batch, accumulation = found
    effective = settings.effective_batch
    return situation.rung(
        "smaller_batch",
        _why(situation, batch),
        {"batch": str(batch), "accumulation": str(accumulation)},
        title=f"batch {settings.batch} -> {batch}, accumulation {settings.accumulation} -> {accumulation}: "
        f"effective batch stays {effective}",
        speed=0.9,
    )


def _with(settings: Settings, split: tuple[int, int]) -> Settings:
    return replace(settings, batch=split[0], accumulation=split[1])


def _first_that_fits(situation: Situation, splits: list[tuple[int, int]]) -> tuple[int, int] | str:
    """`splits` with the largest B first."""
    line, total = situation.line(), situation.total_bytes
    half = next((split for split in splits if split[0] <= situation.settings.batch // 2), splits[-1])
    if isinstance(line, str) or total is None:
        return half
    # A failure alone is a lower bound: it may not say that more than half of what failed would fit.
    candidates = [split for split in splits if split[0] <= half[0]] if line.at_least and not line.measured else splits
    fits = next((s for s in candidates if _fraction(situation, line, s[0]) < EDGE_FROM), None)
    smallest = splits[-1]
    if fits is None and _fraction(situation, line, smallest[0]) >= 1:
        return f"even B {smallest[0]} is forecast at {units.percent(_fraction(situation, line, smallest[0]))}"
    return fits or smallest


def _fraction(situation: Situation, line: Line, batch: int) -> float:
    total = situation.total_bytes
    assert total is not None
    return (line.at(batch) + (situation.others_bytes or 0)) / total


def _why(situation: Situation, batch: int) -> str:
    words = "the same samples in smaller pieces; the guides: 5 to 15 % slower"
    of = situation.diagnosis
    if of.requested_for and of.requested_bytes and of.requested_for.startswith("the logits"):
        asked = round(of.requested_bytes * batch / situation.settings.batch)
        words += f"; the logits that could not be had need {units.size(asked)} at B {batch}"
    if of.phase == "optimizer":
        words += "; it failed in the optimizer's step, where activations are gone: this may not help"
    return words
