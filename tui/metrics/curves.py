"""The numbers behind the curves of a run: its updates in columns, and their least, greatest and
mean values over any range. Pure.

A run has up to a few hundred thousand updates, and a chart a few hundred dots. So each metric is
also summed up over blocks of 8, 64, 512 ... updates: a dot needs a few blocks, not all updates.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from memtop.supervisor.monitor.history import Bucket
from memtop.supervisor.wire import Event, Metric

AXES = ("update", "samples", "tokens", "time")
"""What the curves can be drawn over. Time is in seconds since the run's first update."""
_BLOCK = 8


class Range(NamedTuple):
    """The least, mean and greatest known value of a range."""

    low: float
    mean: float
    high: float


class _Level:
    """Sums over blocks of the level below."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Points in a block."""
        self.is_full = True
        """No value is unknown."""
        self.low, self.high = array("d"), array("d")
        self.sum, self.count = array("d"), array("q")

    def over(self, first: int, last: int, *, ranges: bool) -> Range | None:
        """What these blocks say."""
        count = (last - first) * self.size if self.is_full else sum(self.count[first:last])
        if not count:
            return None
        mean = sum(self.sum[first:last]) / count
        return Range(min(self.low[first:last]), mean, max(self.high[first:last])) if ranges else Range(mean, mean, mean)

    def cut(self, blocks: int) -> None:
        for values in (self.low, self.high, self.sum, self.count):
            del values[blocks:]


class Track:
    """One metric of one run; unknown values are NaN.

    `xs` has a value for each point and axis, which never goes down. Several tracks may share it.
    """

    def __init__(self, xs: Mapping[str, array[float]], ys: array[float]) -> None:
        self.xs, self.ys = xs, ys
        self._levels: list[_Level] = []
        self._answered: tuple[tuple[object, ...], int, Sequence[Range | None]] | None = None
        """The newest question, the number of points then, and the answer: a cursor that moves
        changes nothing else."""

    def cut(self, points: int) -> None:
        """Keep only so many points: the program has gone back. The caller cuts `xs`."""
        self._answered = None
        del self.ys[points:]
        for level in self._levels:
            points //= _BLOCK
            level.cut(points)

    def columns(self, axis: str, start: float, end: float, count: int, *, ranges: bool = True) -> Sequence[Range | None]:
        """What the points in each of `count` equal parts of [start, end) say; None if nothing.
        Without `ranges` the least and the greatest value are the mean.

        If the parts have many points, they begin and end with a block. So their borders may be off
        by an eighth of a part.
        """
        xs = self.xs.get(axis)
        if xs is None or not self.ys or end <= start:
            return [None] * count
        asked = (axis, start, end, count, ranges)
        if self._answered is not None and self._answered[0] == asked and self._answered[1] == len(self.ys):
            return self._answered[2]
        found = self._columns(xs, start, (end - start) / count, count, ranges=ranges)
        self._answered = (asked, len(self.ys), found)
        return found

    def _columns(self, xs: array[float], start: float, width: float, count: int, *, ranges: bool) -> list[Range | None]:
        self._grow()
        borders = [bisect_left(xs, start)]
        for number in range(1, count + 1):
            borders.append(bisect_left(xs, start + number * width, borders[-1]))
        level = self._blocks_for((borders[-1] - borders[0]) // count)
        if level is None:
            return [self._over(first, last, ranges=ranges) for first, last in pairwise(borders)]
        blocks = [border // level.size for border in borders]
        return [level.over(first, last, ranges=ranges) for first, last in pairwise(blocks)]

    def at(self, axis: str, x: float) -> float | None:
        """The newest known value at `x` or before it."""
        xs = self.xs.get(axis)
        if xs is None:
            return None
        for place in range(bisect_right(xs, x) - 1, -1, -1):
            if not math.isnan(self.ys[place]):
                return self.ys[place]
        return None

    @property
    def is_known(self) -> bool:
        """Whether any value is known."""
        return any(value == value for value in self.ys)

    def _blocks_for(self, points: int) -> _Level | None:
        """The largest blocks of which a part with so many points has eight."""
        found = None
        for level in self._levels:
            found = level if level.size * _BLOCK <= points else found
        return found

    def _over(self, first: int, last: int, *, ranges: bool) -> Range | None:
        known: Sequence[float] = self.ys[first:last]
        total = sum(known)
        if total != total:  # something is unknown
            known = [value for value in known if value == value]
            total = sum(known)
        if not known:
            return None
        mean = total / len(known)
        return Range(min(known), mean, max(known)) if ranges else Range(mean, mean, mean)

    def _grow(self) -> None:
        """Sum up the blocks that are complete since the last call."""
        length = len(self.ys)
        for depth in range(64):
            length //= _BLOCK
            if not length:
                return
            if depth == len(self._levels):
                self._levels.append(_Level(_BLOCK ** (depth + 1)))
            level = self._levels[depth]
            for place in range(len(level.low), length):
                self._sum_up(level, depth, place * _BLOCK)

    def _sum_up(self, level: _Level, depth: int, start: int) -> None:
        part = slice(start, start + _BLOCK)
        if depth == 0:
            known = [value for value in self.ys[part] if value == value]
            lows, highs, sums, count = known, known, known, len(known)
        else:
            below = self._levels[depth - 1]
            lows, highs, sums = below.low[part].tolist(), below.high[part].tolist(), below.sum[part].tolist()
            count = sum(below.count[part])
        level.low.append(min(lows, default=math.inf))
        level.high.append(max(highs, default=-math.inf))
        level.sum.append(math.fsum(sums))
        level.count.append(count)
        level.is_full = level.is_full and count == level.size


def _per_second(metric: Metric, amount: float | None) -> float | None:
    return amount / metric.step_seconds if amount is not None and metric.step_seconds else None


_OF_UPDATES: dict[str, Callable[[Metric], float | None]] = {
    "loss": lambda metric: metric.loss,
    "learning_rate": lambda metric: metric.learning_rate,
    "gradient_norm": lambda metric: metric.gradient_norm,
    "tokens_per_second": lambda metric: _per_second(metric, metric.tokens),
    "peak_bytes": lambda metric: metric.peak_bytes,
}


class RunCurves:
    """All metrics of one run. It grows with the run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.xs: dict[str, array[float]] = {axis: array("d") for axis in AXES}
        self.updates = array("q")
        self._begins: list[int] = []
        """The places at which an attempt after the first begins."""
        self._attempt: int | None = None
        self.times = array("d")
        """When each update was done, seconds since the epoch; the time before where it is not
        known."""
        self.newest: Metric | None = None
        self._tracks = {name: Track(self.xs, array("d")) for name in (*_OF_UPDATES, "samples_per_second")}

    def track(self, name: str) -> Track | None:
        return self._tracks.get(name)

    def take(self, rows: Iterable[Metric]) -> None:
        """Add the run's next updates. What they repeat, and what is behind it, is replaced."""
        for row in rows:
            if self.updates and row.update <= self.updates[-1]:
                self._cut(bisect_left(self.updates, row.update))
            self._add(row)

    def _cut(self, points: int) -> None:
        del self.updates[points:], self.times[points:]
        for xs in self.xs.values():
            del xs[points:]
        self._begins = [place for place in self._begins if place < points]
        for name in (*_OF_UPDATES, "samples_per_second"):
            self._tracks[name].cut(points)

    def _add(self, row: Metric) -> None:
        before = {axis: xs[-1] if xs else 0.0 for axis, xs in self.xs.items()}
        last_time = self.times[-1] if self.times else 0.0
        now = max(last_time, row.time or 0.0)
        x = {
            "update": float(row.update),
            "samples": float(row.samples_seen or 0),
            "tokens": before["tokens"] + (row.tokens or 0) * row.updates,
            "time": now - self.times[0] if self.times and self.times[0] else 0.0,
        }
        samples = (row.samples_seen or 0) - before["samples"]
        # Of a merged row the samples seen are those of its first update.
        done = row.update - self.updates[-1] if self.updates else 0
        each = samples / done if samples > 0 and done else None
        for axis, values in self.xs.items():
            values.append(max(before[axis], x[axis]))
        self.updates.append(row.update)
        self.times.append(now)
        if self._attempt not in (None, row.attempt):
            self._begins.append(len(self.times) - 1)
        self._attempt = row.attempt
        for name, value in _OF_UPDATES.items():
            self._tracks[name].ys.append(_finite(value(row)))
        self._tracks["samples_per_second"].ys.append(_finite(_per_second(row, each)))
        self.newest = row

    def take_evaluations(self, events: Iterable[Event]) -> None:
        """The evaluations among the run's events, without those that were taken back."""
        kept: list[tuple[int, float]] = []
        for event in events:
            update, loss = event.data.get("update"), event.data.get("loss")
            if event.kind == "evaluation" and isinstance(update, int) and isinstance(loss, int | float):
                while kept and kept[-1][0] >= update:
                    kept.pop()
                kept.append((update, float(loss)))
        places = [(bisect_left(self.updates, update), loss) for update, loss in kept]
        self._tracks["evaluation_loss"] = self._at([(n, loss) for n, loss in places if n < len(self.updates)])

    def take_memory(self, buckets: Iterable[Bucket]) -> None:
        """The memory of the run's processes over time, bytes."""
        places = [(bisect_left(self.times, bucket.time), bucket.high) for bucket in buckets]
        self._tracks["run_bytes"] = self._at([(n, value) for n, value in places if n < len(self.times)])

    def _at(self, points: Sequence[tuple[int, float]]) -> Track:
        """A track of values that were measured at these places."""
        xs = {axis: array("d", (own[n] for n, _ in points)) for axis, own in self.xs.items()}
        return Track(xs, array("d", (value for _, value in points)))

    def extent(self, axis: str) -> tuple[float, float] | None:
        """The first and last value of an axis; None if it is not known."""
        xs = self.xs[axis]
        return None if not xs or (xs[-1] <= xs[0] and len(xs) > 1) else (xs[0], xs[-1])

    def x_of(self, axis: str, moment: float) -> float | None:
        """Where a moment is on an axis: at the next update, or else at the newest. None before the
        first update."""
        if not self.times or moment < self.times[0]:
            return None
        return self.xs[axis][min(bisect_left(self.times, moment), len(self.times) - 1)]

    def beginnings(self, axis: str) -> list[float]:
        """Where an attempt after the first begins."""
        return [self.xs[axis][place] for place in self._begins]


def _finite(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else float(value)
