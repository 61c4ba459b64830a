"""Detects steady growth of a series: a slope with a confidence, in bounded memory, at a constant
cost per sample.

Memory use rises for many reasons that are no leak: a cache fills and is emptied, the garbage
collector runs at intervals, the first evaluation allocates its buffers, an epoch ends. A line
through each of them rises. The detector therefore uses the lower envelope (the lowest value of each
stretch, which was never freed) and requires that its growth is spread evenly over all stretches. A
step grows in only one of them, a warm-up less and less, and a sawtooth falls in one.

A tooth of a sawtooth that is longer than all data so far looks like a leak until it falls. After
the fall, growth counts only if it lasts three times as long as that tooth.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations, pairwise
from statistics import fmean, median, median_low
from typing import NamedTuple

CONFIDENT = 0.9995
"""The confidence from which on growth is called a leak: random increments around zero reach it once
in two thousand times."""
_PLAIN = 1 - 1e-6
"""The confidence from which on one evaluation is enough instead of two."""
WARM_UP = 12
"""Units of x (updates or seconds) that are ignored at the beginning, while allocators and
optimizers create their buffers."""
LEAST_GROWTH = 8 << 20
"""The least growth over all stretches that is reported, in bytes."""

# Blocks in a stretch. The lowest value of each pair of them is one point of the envelope.
_BLOCKS = 20
# The widths of a block in units of x: the first shows fast leaks, the others slow ones and leaks
# below a sawtooth.
BY_UPDATE = (4, 32, 256, 2048)
BY_SECOND = (16, 128, 1024, 8192)
"""Measured by the clock, every update or evaluation is a tooth, which can be long."""
# A fall by this fraction of the rise before it makes the rise a tooth.
_FALL = 0.5
# Growth must last for so many times the longest tooth.
_TEETH = 3
# A rise ends within this fraction of its height below its top, and begins as far above its bottom.
_NEAR = 0.1
# Growth is steady if the slower half of the stretch grows by at least this fraction of the faster.
_STEADY = 0.85


class Slope(NamedTuple):
    """Growth of the lower envelope."""

    per_unit: float
    """Bytes per unit of x: per update, or per second."""
    per_second: float
    confidence: float
    """0-1: that the series grows, and steadily."""
    span: float
    """Units of x over which the growth was observed."""
    seconds: float
    """The same in seconds."""


class _Point(NamedTuple):
    x: float
    time: float
    low: float


class Growth:
    """One series of values, and whether it leaks."""

    def __init__(self, widths: tuple[int, ...] = BY_UPDATE) -> None:
        self._widths = widths
        self._begin(0.0)
        self._start: float | None = None

    def _begin(self, x: float) -> None:
        self._start = self._newest = x
        self._tiers = [_Tier(width) for width in self._widths]
        self._teeth = _Teeth()

    def add(self, x: float, time: float, value: float) -> None:
        """Add the value at x; `time` in seconds. If x falls (a process restarted, a clock was set
        back), the series begins again."""
        if self._start is None or x < self._newest:
            self._begin(x)
        assert self._start is not None
        self._newest = x
        x -= self._start + WARM_UP
        if x < 0:
            return
        closed = self._tiers[0].add(_Point(x, time, value))
        if closed is not None:
            self._teeth.add(closed)
            # Every width is a multiple of the first one, so whole blocks of it do for the others.
            for tier in self._tiers[1:]:
                tier.add(closed)

    @property
    def leaking(self) -> Slope | None:
        """The slope of the finest tier that is confident enough to be called a leak, if any. Tiers
        that do not cover enough teeth are ignored."""
        covered = _TEETH * self._teeth.longest
        return next((tier.slope for tier in self._tiers if tier.slope and tier.width * _BLOCKS >= covered), None)


class _Tier:
    """The newest blocks of one width."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.slope: Slope | None = None
        """None while growth is not confident."""
        self._blocks: deque[_Point] = deque(maxlen=_BLOCKS)
        self._open: _Point | None = None
        self._end = 0.0
        """The x at which the open block ends."""
        self._confidence = 0.0
        """Of the newest evaluation."""

    def add(self, point: _Point) -> _Point | None:
        """Add a point. Returns the block that it completes, if any."""
        closed = self._open
        if closed is not None and point.x < self._end:
            if point.low < closed.low:
                self._open = _Point(closed.x, closed.time, point.low)
            return None
        self._open, self._end = point, (point.x // self.width + 1) * self.width
        if closed is not None:
            self._blocks.append(closed)
            if len(self._blocks) == _BLOCKS:
                self._evaluate()
        return closed

    def _evaluate(self) -> None:
        """Take the lower confidence of two consecutive evaluations, unless growth is plain: there
        are many evaluations, and noise can look steady in one."""
        slope = _slope(list(self._blocks))
        before, self._confidence = self._confidence, slope.confidence if slope is not None else 0.0
        if slope is not None and slope.confidence < _PLAIN:
            slope = slope._replace(confidence=min(slope.confidence, before))
        self.slope = slope if slope is not None and slope.confidence >= CONFIDENT else None


def _slope(blocks: list[_Point]) -> Slope | None:
    """The slope of the lower envelope, or None where growth is not confident."""
    pairs = zip(blocks[::2], blocks[1::2], strict=True)
    envelope = [_Point(one.x, one.time, min(one.low, other.low)) for one, other in pairs]
    first, last = envelope[0], envelope[-1]
    span, seconds = last.x - first.x, last.time - first.time
    if last.low - first.low < LEAST_GROWTH or span <= 0 or seconds <= 0:
        return None
    rates = [(after.low - before.low) / (after.x - before.x) for before, after in pairwise(envelope)]
    half = len(rates) // 2
    early, late = fmean(rates[:half]), fmean(rates[-half:])
    steady = min(early, late) / max(early, late) if min(early, late) > 0 else 0.0
    confidence = _probability_of_growth(rates) * min(1.0, steady / _STEADY)
    if confidence < CONFIDENT:
        return None
    # The median slope of all pairs of points (Theil-Sen estimator): outliers do not move it.
    per_unit = median((after.low - before.low) / (after.x - before.x) for before, after in combinations(envelope, 2))
    return Slope(per_unit, per_unit * span / seconds, confidence, span, seconds) if per_unit > 0 else None


def _probability_of_growth(rates: list[float]) -> float:
    """Student's t-test of the mean against zero, in closed form for eight degrees of freedom."""
    mean, freedom = fmean(rates), len(rates) - 1
    spread = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / freedom)
    if spread == 0:
        return 1.0
    assert freedom == 8
    angle = math.atan(mean / (spread / math.sqrt(len(rates))) / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    return 0.5 + 0.5 * math.sin(angle) * (1 + square / 2 + 3 * square**2 / 8 + 5 * square**3 / 16)


class _Teeth:
    """The length of the longest rise that ended in a fall."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._bottom: _Point | None = None
        """Where the current rise began."""
        self._bottom_low = self._top = self._near_top = 0.0
        self._near_top_at = 0.0

    def add(self, block: _Point) -> None:
        if self._bottom is None:
            self._begin(block)
            return
        rise = self._top - self._bottom_low
        if self._top - block.low >= max(_FALL * rise, LEAST_GROWTH / 2):
            self.longest = max(self.longest, self._near_top_at - self._bottom.x)
            self._begin(block)
        elif block.low <= self._bottom_low + _NEAR * rise:
            self._bottom = block
            self._bottom_low = min(self._bottom_low, block.low)
        if block.low > self._top:
            self._top = block.low
            if self._top - self._near_top > _NEAR * (self._top - self._bottom_low):
                self._near_top, self._near_top_at = block.low, block.x

    def _begin(self, block: _Point) -> None:
        self._bottom = block
        self._bottom_low = self._top = self._near_top = block.low
        self._near_top_at = block.x


class Sustained:
    """The median of the newest values: a rate counts only if it lasts for more than half of
    them."""

    def __init__(self, length: int = 30) -> None:
        self._values: deque[float] = deque(maxlen=length)
        self._length = length

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """The median; None before half of the values are known."""
        return median_low(self._values) if 2 * len(self._values) >= self._length else None

    @property
    def share(self) -> float:
        """The fraction of the newest values that are above zero."""
        return sum(value > 0 for value in self._values) / len(self._values) if self._values else 0.0
