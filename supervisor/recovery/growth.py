"""Growing the micro-batch: which step may be tried, and whether a trial was worth it. Pure functions.

A growth step is at most a quarter, holds the effective batch exactly, and is forecast below 85 % of the card. It is kept only
if samples per second rose beyond what chance explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median

import msgspec

from memtop.presets.arithmetic import exact_splits
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.monitor.bands import EDGE_FROM
from memtop.supervisor.recovery.forecast import foreseen
from memtop.supervisor.recovery.values import Forecast

LARGEST_STEP = 1.25
"""The most that the micro-batch grows by at once, as a factor."""
LEAST_GAIN = 0.01
"""A gain in samples/s below this share is not worth a change."""
STANDARD_ERRORS = 2.0
"""How far the medians must be apart, in standard errors of their difference."""

ForecastOf = Callable[[int], Forecast | None]
"""The peak to be expected with a micro-batch; None: nothing measured allows one."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    batch: int
    accumulation: int


def larger_splits(settings: Settings) -> list[Split]:
    """The exact splits with a larger micro-batch, the nearest first."""
    pairs = exact_splits(settings.effective_batch, settings.world_size)
    return [Split(batch=b, accumulation=a) for b, a in reversed(pairs) if b > settings.batch]


def upper_bound(peak_bytes: int, peak_batch: int, batch: int, total_bytes: int | None, others_bytes: int = 0) -> Forecast:
    """A forecast from one peak alone, too large rather than too small: as if all of it grew with the micro-batch."""
    most = math.ceil(peak_bytes * batch / peak_batch)
    basis = f"at most: the one peak at B {peak_batch}, as if all of it grew with the batch"
    return foreseen(most, total_bytes, basis, others_bytes)


def why_not(settings: Settings, split: Split, forecast: Forecast | None, failed: Collection[int] = ()) -> str | None:
    """Why this split must not be tried for speed, in one line; None if it may. `failed`: micro-batches that ran out here."""
    title = f"batch {settings.batch} -> {split.batch}"
    effective = split.batch * split.accumulation * settings.world_size
    if effective != settings.effective_batch:
        change = (effective - settings.effective_batch) / settings.effective_batch
        batches = f"{settings.effective_batch} -> {effective} ({change * 100:+.1f} %)"
        return f"{title}, accumulation {split.accumulation}: the effective batch would change, {batches}"
    tried = [batch for batch in failed if batch <= split.batch]
    if tried:
        return f"{title}: B {min(tried)} ran out of memory in this run"
    if forecast is not None and forecast.fraction is not None and forecast.fraction >= EDGE_FROM:
        size = f"{units.size(forecast.peak_bytes)} of {units.size(forecast.total_bytes)}"
        return f"{title}: predicted {units.percent(forecast.fraction)} ({size}; {forecast.basis}), the limit is 85 %"
    if split.batch > settings.batch * LARGEST_STEP:
        return f"{title}: a step of {split.batch / settings.batch - 1:+.0%}; at most +25 % is tried at once"
    if forecast is None or forecast.fraction is None:
        return f"{title}: its peak cannot be predicted yet; grows only what is known to stay below 85 %"
    return None


def growth_step(settings: Settings, forecast: ForecastOf, failed: Collection[int] = ()) -> tuple[Split | None, list[str]]:
    """The largest step that may be tried, and the reasons against the others, the nearest first."""
    allowed: Split | None = None
    refused: list[str] = []
    for split in larger_splits(settings):
        reason = why_not(settings, split, forecast(split.batch), failed)
        if reason is None:
            allowed = split
        elif len(refused) < 2:
            refused.append(reason)
    if not larger_splits(settings):
        refused.append(f"batch {settings.batch}: it is the whole effective batch of each process already")
    return allowed, refused


def samples_per_second(updates: int, seconds: float, batch: int, accumulation: int, world_size: int) -> float:
    """The speed that can be compared across splits: updates or micro-steps of different sizes cannot."""
    return updates * batch * accumulation * world_size / seconds


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One update of a trial's stretch. None: not known."""

    number: int
    samples: int
    seconds: float
    tokens: int | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None
    swap_bytes: int | None = None


def measured(updates: Sequence[Update]) -> dict[str, float]:
    """Medians and spreads of a stretch, by the names of `wire.Trial`; what is not known is left out."""
    found = {"updates": float(len(updates))}
    speeds = [update.samples / update.seconds for update in updates]
    found["samples_per_second"], found["samples_per_second_spread"] = median(speeds), spread(speeds)
    tokens = [update.tokens / update.seconds for update in updates if update.tokens is not None]
    if tokens:
        found["tokens_per_second"], found["tokens_per_second_spread"] = median(tokens), spread(tokens)
    for name in ("peak_bytes", "host_bytes", "swap_bytes"):
        values = [value for update in updates if (value := getattr(update, name)) is not None]
        if values:
            # Of memory the most counts, of the rest what is usual.
            found[name] = float(max(values) if name == "peak_bytes" else median(values))
    return found


def spread(values: Iterable[float]) -> float:
    """A standard deviation that a few odd values (a save, an evaluation) do not move: 1.4826 median absolute deviations."""
    values = list(values)
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def verdict(before: dict[str, float], after: dict[str, float]) -> tuple[bool, str]:
    """Whether the change is kept, and why.

    The rule: the median samples/s of the updates after must lie above that of as many updates before by more than two standard
    errors of the difference (from the spreads; 1.2533 is a median's error against a mean's), and by at least 1 %.
    """
    old, new = before["samples_per_second"], after["samples_per_second"]
    error = 1.2533 * math.sqrt(
        before["samples_per_second_spread"] ** 2 / before["updates"]
        + after["samples_per_second_spread"] ** 2 / after["updates"]
    )
    needed = max(STANDARD_ERRORS * error, LEAST_GAIN * old)
    gain = new - old
    words = f"samples/s {old:.1f} -> {new:.1f} ({gain / old * 100:+.1f} %)"
    if gain > needed:
        return True, f"{words}, more than the {needed / old:.1%} that chance explains"
    return False, f"{words}, not more than the {needed / old:.1%} that chance explains"
