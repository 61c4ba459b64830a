"""Rules for trying a larger micro-batch: which split may be tried, and whether a trial was faster.
Pure functions.

A larger split must keep the effective batch exactly. It may be tried if it raises the micro-batch
by at most a quarter and its predicted peak is below 85 % of the card. Few batches have such a
split. So the next exact one may be tried whatever its step is, if its predicted peak is below 70 %.
A trial is kept only if samples per second rose by more than chance explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from memtop.presets.comparison import changes, describe_split
from memtop.presets.schema import Settings, exact_splits
from memtop.supervisor import units
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.monitor.values import EDGE_FROM
from memtop.supervisor.recovery.configuration import change_for
from memtop.supervisor.recovery.peak_line import foreseen
from memtop.supervisor.recovery.values import Advice, Forecast
from memtop.supervisor.wire import Change

LARGEST_STEP = 1.25
"""Largest allowed ratio between the new and the present micro-batch ..."""
ROOMY_BELOW = 0.70
"""... except for the next exact split, if it is predicted below this share of the card. A forecast
is the less certain the larger the step is."""
LEAST_GAIN = 0.01
"""Smallest gain in samples/s, as a fraction, for which a change is kept."""
STANDARD_ERRORS = 2.0
"""Required distance between the two medians, in standard errors of their difference."""

ForecastOf = Callable[[int], Forecast | None]
"""Predicts the peak memory of a micro-batch; None where it cannot be predicted."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    batch: int
    accumulation: int


def larger_splits(settings: Settings) -> list[Split]:
    """The splits with a larger micro-batch and exactly the same effective batch, the smallest
    first. None if the processes have batches of their own: those are a person's choice, or the
    result of a lack of memory."""
    if settings.rank_splits:
        return []
    pairs = exact_splits(settings.effective_batch, settings.world_size)
    return [Split(batch=b, accumulation=a) for b, a in reversed(pairs) if b > settings.batch]


def upper_bound(peak_bytes: int, peak_batch: int, batch: int, total_bytes: int | None, others_bytes: int = 0) -> Forecast:
    """Predict from a single peak. The result is an upper bound: it assumes that all of the peak
    grows with the batch."""
    most = math.ceil(peak_bytes * batch / peak_batch)
    basis = f"at most: the one peak at B {peak_batch}, as if all of it grew with the batch"
    return foreseen(most, total_bytes, basis, others_bytes, source="line")


def split_refusal(settings: Settings, split: Split, forecast: Forecast | None, failed: Collection[int] = ()) -> str | None:
    """Why this split must not be tried for speed, in one line; None if it may be tried.

    `failed`: micro-batches that ran out of memory in this run.
    """
    title = f"batch {settings.batch} -> {split.batch}"
    effective = split.batch * split.accumulation * settings.world_size
    if effective != settings.effective_batch:
        change = (effective - settings.effective_batch) / settings.effective_batch
        batches = f"{settings.effective_batch} -> {effective} ({units.change(change)})"
        return f"{title}, accumulation {split.accumulation}: the effective batch would change, {batches}"
    tried = [batch for batch in failed if batch <= split.batch]
    if tried:
        return f"{title}: B {min(tried)} ran out of memory in this run"
    return forecast_refusal(title, split.batch / settings.batch, forecast, is_next=split == larger_splits(settings)[0])


def forecast_refusal(title: str, factor: float, forecast: Forecast | None, *, is_next: bool) -> str | None:
    """Why a micro-batch that is larger by this factor must not be tried, by its forecast; None if
    it may be. `is_next`: it is that of the next exact split."""
    if forecast is not None and (why := above_safe(title, forecast)) is not None:
        return why
    if forecast is None or forecast.fraction is None:
        return f"{title}: its peak cannot be predicted yet; a batch is tried only if it is known to stay below 85 %"
    if factor <= LARGEST_STEP:
        return None
    step = f"{title}: a step of {units.change(factor - 1, 0)}"
    if not is_next:
        return f"{step}; more than +25 % at once is tried only for the next exact split"
    if forecast.fraction >= ROOMY_BELOW:
        limit = units.percent(ROOMY_BELOW, 0)
        return f"{step}, predicted {units.percent(forecast.fraction)}; more than +25 % at once is tried only below {limit}"
    return None


def above_safe(title: str, forecast: Forecast) -> str | None:
    """That it is predicted above the safe band, in one line; None if it is not."""
    if forecast.fraction is None or forecast.fraction < EDGE_FROM:
        return None
    size = f"{units.size(forecast.taken_bytes)} of {units.size(forecast.total_bytes)}"
    return f"{title}: predicted {units.percent(forecast.fraction)} ({size}; {forecast.basis}), the limit is 85 %"


def next_split(settings: Settings, forecast: ForecastOf, failed: Collection[int] = ()) -> tuple[Split | None, list[str]]:
    """The largest split that may be tried, and the reasons against the others, the smallest
    first."""
    allowed: Split | None = None
    refused: list[str] = []
    for split in larger_splits(settings):
        reason = split_refusal(settings, split, forecast(split.batch), failed)
        if reason is None:
            allowed = split
        elif len(refused) < 2:
            refused.append(reason)
    if not larger_splits(settings):
        why = "it is already the whole effective batch of each process"
        if settings.rank_splits:
            why = "the processes have batches of their own; a larger one is yours to give"
        refused.append(f"batch {settings.batch_text}: {why}")
    return allowed, refused


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One measured update. None means not known."""

    number: int
    samples: int
    seconds: float
    tokens: int | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None
    swap_bytes: int | None = None


def measured(updates: Sequence[Update]) -> dict[str, float]:
    """Medians and spreads of consecutive updates, under the names that `wire.Trial` lists. Unknown
    values are left out.

    Speed is measured in samples/s because it can be compared across splits; updates/s and
    micro-steps/s cannot.
    """
    from statistics import median

    found = {"updates": float(len(updates))}
    speeds = [update.samples / update.seconds for update in updates]
    found["samples_per_second"], found["samples_per_second_spread"] = median(speeds), spread(speeds)
    tokens = [update.tokens / update.seconds for update in updates if update.tokens is not None]
    if tokens:
        found["tokens_per_second"], found["tokens_per_second_spread"] = median(tokens), spread(tokens)
    for name in ("peak_bytes", "host_bytes", "swap_bytes"):
        values = [value for update in updates if (value := getattr(update, name)) is not None]
        if values:
            # Of the peaks the largest counts; of the other values the median.
            found[name] = float(max(values) if name == "peak_bytes" else median(values))
    return found


def spread(values: Iterable[float]) -> float:
    """A standard deviation that ignores a few outliers (a save, an evaluation): 1.4826 median
    absolute deviations."""
    from statistics import median

    values = list(values)
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def verdict(before: dict[str, float], after: dict[str, float]) -> tuple[bool, str]:
    """Whether to keep the change, and why.

    The change is kept if the median samples/s has risen by more than two standard errors of the
    difference, and by at least 1 %. The error follows from the spreads; the standard error of a
    median is 1.2533 times that of a mean.
    """
    old, new = before["samples_per_second"], after["samples_per_second"]
    error = 1.2533 * math.sqrt(
        before["samples_per_second_spread"] ** 2 / before["updates"]
        + after["samples_per_second_spread"] ** 2 / after["updates"]
    )
    needed = max(STANDARD_ERRORS * error, LEAST_GAIN * old)
    gain, chance = new - old, units.percent(needed / old)
    words = f"samples/s {old:.1f} -> {new:.1f} ({units.change(gain / old)})"
    if gain > needed:
        return True, f"{words}, more than the {chance} that chance explains"
    if -gain > needed:
        return False, f"{words}: slower, by more than the {chance} that chance explains"
    if gain < 0:
        return False, f"{words}: slower, by not more than the {chance} that chance explains"
    return False, f"{words}, not more than the {chance} that chance explains"


def proposed(advice: Advice | None) -> Change:
    """The first proposal of the advice that can be tried; MemtopError if there is none."""
    if advice is None:
        raise MemtopError("nothing to try yet: the run has not been measured for long enough")
    for remedy in advice.proposals:
        if remedy.assignments and remedy.resumable in ("live", "resumes") and not remedy.needs_consent:
            return change_for(remedy, reason="trial")
    why = f"; {advice.refused[0]}" if advice.refused else ""
    raise MemtopError(f"nothing to try: {advice.summary}{why}")


def refusal(
    before: Settings, after: Settings, forecast: Callable[[int], Forecast | None], failed: Collection[int]
) -> str | None:
    """Why this change must not be tried, in one line; None if it may be. `failed`: micro-batches
    that ran out of memory."""
    if before.effective_batch != after.effective_batch:
        return f"a trial must not change training; {describe_split(before, after)}"
    if after.batch <= before.batch:
        return None
    if after.rank_splits:
        return f"batch {after.batch_text}: a trial changes the batch of all processes; restart with it"
    split = Split(batch=after.batch, accumulation=after.accumulation)
    return split_refusal(before, split, forecast(after.batch), failed)


def title_of(before: Settings, after: Settings) -> str:
    """`batch 16 -> 20, accumulation 5 -> 4`, and other changes as `presets.comparison` words them.
    Empty if nothing changes."""
    if before.rank_splits or after.rank_splits:
        return ", ".join(changes(before, after))
    split = [
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for name in ("batch", "accumulation")
        if getattr(before, name) != getattr(after, name)
    ]
    return ", ".join([*split, *changes(before, replace(after, batch=before.batch, accumulation=before.accumulation))])
