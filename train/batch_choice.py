"""The rules of `--batch auto`: which micro-batch a rank tries next, and which split each rank gets
from what all have measured. Values go in, values come out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memtop.presets import Settings
from memtop.presets.estimate import estimate
from memtop.presets.measured import Learned
from memtop.presets.measured import Measured as Earlier
from memtop.presets.schema import Positive, Split, exact_splits
from memtop.presets.states import UnknownMemoryError
from memtop.train.batch_sizer import SAFE_FRACTION

_ALIKE = 1.1
"""Ranks whose speeds differ by less than this factor compute as many samples each."""
_WORTHWHILE = 0.95
"""The share of the even split's time that an uneven one must stay below."""
_MOST_UNITS = 1024
"""So many pieces of an update are dealt to the ranks at most. A larger update has larger pieces."""


class Tried(msgspec.Struct, frozen=True):
    """A micro-batch that a rank has tried."""

    batch: int
    fullness: float | None
    """How full the rank's memory was at the peak (0-1); None if it ran out."""

    @property
    def fits(self) -> bool:
        return self.fullness is not None and self.fullness < SAFE_FRACTION


def earlier_scale(earlier: Learned, settings: Settings, config: Mapping[str, Any], *, generation: int, capacity: int) -> float:
    """How many times its estimate the peak was in earlier runs of this model; 1 without any.
    `config`, `generation`, `capacity`: as of `estimate`."""

    def ratios(rows: Sequence[Earlier]) -> Iterator[float]:
        for row in rows:
            with suppress(UnknownMemoryError):  # then this row says nothing
                yield row.reserved_bytes / estimate(row.settings, config, generation=generation, capacity=capacity).reserved

    known = list(ratios(earlier.calibrating(settings)[0]))
    return max([statistics.median(known) if known else 1.0, *ratios(earlier.bounding(settings))])


def first_size(sizes: Sequence[int], given: int, foresee: Callable[[int], float | None]) -> int:
    """The micro-batch to begin with, from `sizes` in ascending order: the largest that is foreseen
    to be safe; the smallest if none is, and the given one if nothing is foreseen."""
    for size in reversed(sizes):
        fullness = foresee(size)
        if fullness is None:
            return given
        if fullness < SAFE_FRACTION:
            return size
    return sizes[0]


def next_size(
    sizes: Sequence[int],
    begin: int,
    tried: Sequence[Tried],
    forecast: Callable[[int], float],
    *,
    by_one: bool = False,
) -> int | None:
    """The micro-batch to try next, from `sizes` in ascending order; None if the largest is found.

    The first is `begin`. Smaller ones follow until one fits, then one about twice as large, so that
    there are two peaks. From then on the `forecast` chooses. `by_one`: it needs one peak only. Each
    size is tried once at most.
    """
    if not tried:
        return begin
    fits = max((one.batch for one in tried if one.fits), default=0)
    too_large = min((one.batch for one in tried if not one.fits), default=math.inf)
    possible = [size for size in sizes if fits < size < too_large]
    if not possible:
        return None
    peaks = sum(one.fullness is not None for one in tried)
    if not fits:
        half = max(size for size in possible if size <= max(1, too_large // 2))
        return max((size for size in possible if by_one and peaks and forecast(size) < SAFE_FRACTION), default=half)
    if peaks < 2 and not by_one:
        return next((size for size in possible if size >= 2 * fits), possible[-1])
    return max((size for size in possible if forecast(size) < SAFE_FRACTION), default=None)


class Measured(msgspec.Struct, frozen=True):
    """What a rank has measured of its micro-batches."""

    largest: Positive
    """The largest one that fits."""
    seconds: dict[Positive, Annotated[float, msgspec.Meta(gt=0)]]
    """How long a forward and backward pass takes, by micro-batch; empty if not known."""

    def pass_seconds(self, batches: NDArray[np.int64]) -> NDArray[np.float64]:
        """How long a pass takes with each of these: on the line between the two nearest sizes that
        were measured; with a smaller batch as long as with the smallest one.
        """
        sizes = sorted(self.seconds)
        return np.interp(batches, sizes, [self.seconds[size] for size in sizes])

    def update_seconds(self, split: Split) -> float:
        """How long the passes of an update take with this split."""
        return split[1] * float(self.pass_seconds(np.array(split[0])))

    @property
    def speed(self) -> float:
        """Samples per second with the largest micro-batch."""
        return self.largest / self.update_seconds((self.largest, 1))


def even_splits(effective_batch: int, ranks: Sequence[Measured]) -> tuple[Split, ...]:
    """The same split for all ranks, with the largest micro-batch that fits on each of them.

    The effective batch is a multiple of their number.
    """
    largest = min(rank.largest for rank in ranks)
    splits = exact_splits(effective_batch, len(ranks))
    return (next((split for split in splits if split[0] <= largest), splits[-1]),) * len(ranks)


def update_seconds(splits: Sequence[Split], ranks: Sequence[Measured]) -> float:
    """How long the passes of an update take on the rank that takes longest."""
    return max(rank.update_seconds(split) for split, rank in zip(splits, ranks, strict=True))


def choose_splits(effective_batch: int, ranks: Sequence[Measured]) -> tuple[Split, ...]:
    """The split of each rank, with exactly this sum of samples.

    Ranks that are alike, and ranks of unknown speed, get the same split. The others get the splits
    with which an update takes least time, if that is clearly less than with the same one. Of these
    splits it chooses those whose shares are nearest to the measured speeds.
    """
    even = even_splits(effective_batch, ranks)
    if len(ranks) == 1 or not all(rank.seconds for rank in ranks) or _alike(ranks):
        return even
    unit = next(size for size, count in reversed(exact_splits(effective_batch)) if count <= _MOST_UNITS)
    possible = [exact_splits(samples) for samples in range(0, effective_batch + 1, unit)]
    options = [_options(rank, possible) for rank in ranks]
    times = np.array([[seconds for seconds, _ in of_rank] for of_rank in options])
    _, least = _dealt(times, np.maximum)
    if least >= _WORTHWHILE * update_seconds(even, ranks):
        return even
    speeds = np.array([rank.speed for rank in ranks])
    wanted = effective_batch / unit * speeds / speeds.sum()
    apart = (np.arange(times.shape[1]) - wanted[:, None]) ** 2
    shares, _ = _dealt(np.where(times <= least, apart, np.inf), np.add)
    return tuple(of_rank[share][1] for of_rank, share in zip(options, shares, strict=True))


def _alike(ranks: Sequence[Measured]) -> bool:
    speeds = [rank.speed for rank in ranks]
    return len({rank.largest for rank in ranks}) == 1 and max(speeds) < _ALIKE * min(speeds)


def _options(rank: Measured, possible: Sequence[Sequence[Split]]) -> list[tuple[float, Split]]:
    """From the possible splits of each share, how long the rank takes for it, and the split with
    which it takes least time. A rank cannot have no samples.
    """
    seconds = rank.pass_seconds(np.arange(rank.largest + 1)).tolist()
    found = []
    for splits in possible:
        fitting = [split for split in splits if split[0] <= rank.largest]
        # Of several with the same time, the largest micro-batch, which is the first.
        taken = [accumulation * seconds[batch] for batch, accumulation in fitting]
        least = min(taken, default=math.inf)
        found.append((least, fitting[taken.index(least)] if fitting else (1, 0)))
    return found


def _dealt(costs: NDArray[np.float64], combine: Any) -> tuple[list[int], float]:
    """One share for each rank, with all units as their sum, for which the combined costs are least.

    `costs` has a row for each rank and a column for each share. `combine` is `np.add` or
    `np.maximum`.
    """
    count = costs.shape[1]
    best = np.full(count, np.inf)
    best[0] = 0
    choices = []
    for cost in costs:
        after, choice = np.full(count, np.inf), np.zeros(count, np.int64)
        for share in np.flatnonzero(np.isfinite(cost)).tolist():
            combined = combine(best[: count - share], cost[share])
            better = combined < after[share:]
            after[share:][better], choice[share:][better] = combined[better], share
        best = after
        choices.append(choice)
    left, shares = count - 1, []
    for choice in reversed(choices):
        shares.append(int(choice[left]))
        left -= shares[-1]
    return shares[::-1], float(best[-1])
