"""Does a quantity grow for good? A slope with a confidence, in bounded memory, at a constant cost
per sample.

Memory moves for many reasons. A cache fills and is emptied, the garbage collector runs now and
then, the first evaluation takes its buffers once, an epoch ends: none of these is a leak, and each
has a line through it that rises. So what is judged is the lower envelope (the least value of each
stretch: what was not given back), and its growth must be spread evenly over all stretches looked
at. A step grows in one of them, a warm-up less and less, a sawtooth falls in one.

A tooth that is longer than everything seen so far cannot be told from a leak before it falls. When
it falls, growth is believed again only over three times that length.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations, pairwise
from statistics import fmean, median, median_low, stdev
from typing import NamedTuple

CONFIDENT = 0.9995
"""From here on growth is called a leak: one in two thousand if its increments were drawn by chance
around zero."""
_PLAIN = 1 - 1e-6
"""From here on one look is enough."""
WARM_UP = 12
"""Units of x (updates, or seconds) at the beginning that are not looked at: allocators and
optimizers make their buffers."""
LEAST_GROWTH = 8 << 20
"""Bytes that must have been gained over all stretches looked at, in bytes: what is less is nobody's
trouble yet."""

# Stretches are looked at in pairs: each pair's least value is one point of the envelope.
_BLOCKS, _PAIR = 20, 2
# The width of a block in units of x: fast leaks show in the first, slow ones and those beneath a
# sawtooth in the others.
BY_UPDATE = (4, 32, 256, 2048)
BY_SECOND = (16, 128, 1024, 8192)
"""By the clock an update or an evaluation is a tooth of its own, and may be a long one."""
# A fall by this share of the rise before it makes the rise a tooth ...
_FALL = 0.5
# ... and growth must outlast so many of the longest one.
_TEETH = 3
# A rise is over when the level is within this share of its top, and has begun when it is so far
# above its bottom.
_NEAR = 0.1
# The second half of the stretch gains at least so much of the first, and the other way round, or
# the growth is not steady.
_STEADY = 0.85


class Slope(NamedTuple):
    """Growth of the lower envelope."""

    per_unit: float
    """Bytes per unit of x: per update, or per second."""
    per_second: float
    confidence: float
    """0-1: that it grows at all, and evenly."""
    span: float
    """Units of x over which this was seen."""
    seconds: float
    """The same in seconds."""


class _Point(NamedTuple):
    x: float
    time: float
    low: float


class Growth:
    """One series of values. `slope` is None until there is enough of it, or while nothing can be
    said."""

    def __init__(self, widths: tuple[int, ...] = BY_UPDATE) -> None:
        self._widths = widths
        self._begin(0.0)
        self._start: float | None = None

    def _begin(self, x: float) -> None:
        self._start = self._newest = x
        self._tiers = [_Tier(width) for width in self._widths]
        self._teeth = _Teeth()

    def add(self, x: float, time: float, value: float) -> None:
        """Take the value at x and at that moment, seconds. Where x falls something else has begun:
        a process that was started anew, a clock that was set back."""
        if self._start is None or x < self._newest:
            self._begin(x)
        assert self._start is not None
        self._newest = x
        x -= self._start + WARM_UP
        if x < 0:
            return
        closed = self._tiers[0].add(x, time, value)
        if closed is not None:
            self._teeth.look(closed)
        for tier in self._tiers[1:]:
            tier.add(x, time, value)

    @property
    def slope(self) -> Slope | None:
        """The most confident of what the tiers see that cover enough teeth; the finest of those
        that are confident."""
        found = [tier.slope for tier in self._tiers if tier.width * _BLOCKS >= _TEETH * self._teeth.longest]
        known = [slope for slope in found if slope is not None]
        sure = [slope for slope in known if slope.confidence >= CONFIDENT]
        return sure[0] if sure else max(known, key=lambda slope: slope.confidence, default=None)

    @property
    def leaking(self) -> Slope | None:
        """The slope, if it is one to act on."""
        slope = self.slope
        return slope if slope is not None and slope.confidence >= CONFIDENT else None


class _Tier:
    """The newest blocks of one width."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.slope: Slope | None = None
        self._blocks: deque[_Point] = deque(maxlen=_BLOCKS)
        self._open: _Point | None = None
        self._number = -1
        self._confidence = 0.0

    def add(self, x: float, time: float, value: float) -> _Point | None:
        """The block that this value has closed, if any."""
        number, closed = int(x // self.width), None
        if self._open is not None and number != self._number:
            closed = self._open
            self._blocks.append(closed)
            self.slope = self._looked_at_twice(_slope(list(self._blocks))) if len(self._blocks) == _BLOCKS else None
            self._open = None
        if self._open is None:
            self._open, self._number = _Point(x, time, value), number
        elif value < self._open.low:
            self._open = self._open._replace(low=value)
        return closed

    def _looked_at_twice(self, slope: Slope | None) -> Slope | None:
        """As confident as the less confident of two looks running: there are many, and noise may be
        even in one."""
        before, self._confidence = self._confidence, slope.confidence if slope is not None else 0.0
        if slope is None or slope.confidence >= _PLAIN:
            return slope
        return slope._replace(confidence=min(slope.confidence, before))


def _slope(blocks: list[_Point]) -> Slope | None:
    envelope = [
        blocks[at]._replace(low=min(block.low for block in blocks[at : at + _PAIR])) for at in range(0, len(blocks), _PAIR)
    ]
    first, last = envelope[0], envelope[-1]
    span, seconds = last.x - first.x, last.time - first.time
    if span <= 0 or seconds <= 0:
        return None
    rates = [(after.low - before.low) / (after.x - before.x) for before, after in pairwise(envelope)]
    # Of all pairs of points, the one in the middle: a few odd points do not move it.
    per_unit = median((after.low - before.low) / (after.x - before.x) for before, after in combinations(envelope, 2))
    confidence = 0.0
    if per_unit > 0 and last.low - first.low >= LEAST_GROWTH:
        half = len(rates) // 2
        early, late = fmean(rates[:half]), fmean(rates[-half:])
        steady = max(0.0, min(early, late)) / max(early, late) if max(early, late) > 0 else 0.0
        confidence = _chance_is_ruled_out(rates) * min(1.0, steady / _STEADY)
    return Slope(per_unit, per_unit * span / seconds, confidence, span, seconds)


def _chance_is_ruled_out(rates: list[float]) -> float:
    """Student's t of the mean against zero, as a probability; in closed form for the eight degrees
    of freedom here."""
    spread = stdev(rates)
    if spread == 0:
        return 1.0
    freedom = len(rates) - 1
    assert freedom == 8
    angle = math.atan(fmean(rates) / (spread / math.sqrt(len(rates))) / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    return 0.5 + 0.5 * math.sin(angle) * (1 + square / 2 + 3 * square**2 / 8 + 5 * square**3 / 16)


class _Teeth:
    """How long the longest rise was that ended in a fall."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._bottom: _Point | None = None
        """Where the present rise began."""
        self._bottom_low = self._top = self._near_top = 0.0
        self._near_top_at = 0.0

    def look(self, block: _Point) -> None:
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
    """A rate that counts only while it is there more often than not: the median of the newest
    values."""

    def __init__(self, length: int = 30) -> None:
        self._values: deque[float] = deque(maxlen=length)
        self._length = length

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """None before half of the stretch is known."""
        return median_low(self._values) if 2 * len(self._values) >= self._length else None

    @property
    def share(self) -> float:
        """Of the newest values, those above zero; 0-1."""
        return sum(value > 0 for value in self._values) / len(self._values) if self._values else 0.0
