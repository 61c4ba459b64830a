"""How the history screen looks. Pure: curves in, lines out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from memtop.supervisor import units
from memtop.supervisor.monitor.history import Bucket, resample
from memtop.supervisor.monitor.sampler import Hysteresis
from memtop.supervisor.wire import Event
from memtop.tui.charts import MARKED, Extent, blank, cell_roles, mark_limits, memory_bounds, merged, nice_bounds, paint
from memtop.tui.line import MUTED, Line, between, fact, fit, join, join_fitting, line, spread, width_of
from memtop.tui.metrics.curves import Track

LABEL_WIDTH = 9
SMALLEST = 4
"""Rows of one curve, including its title."""


@dataclass(frozen=True)
class Curve:
    """One series to be drawn."""

    title: str
    unit: str
    """fraction | memory (a fraction with the bands' lines) | bytes | watts | number | rate"""
    buckets: Sequence[Bucket] = ()
    track: Track | None = None
    """In place of the buckets: values that come with updates."""
    begins: float = 0.0
    """The time of the track's first update, seconds since the epoch."""

    def columns(self, start: float, end: float, count: int) -> Sequence[Extent | None]:
        """What is known of each of `count` equal parts of the time."""
        if self.track is None:
            return resample(self.buckets, start, end, count)
        return self.track.columns("time", start - self.begins, end - self.begins, count)


@dataclass(frozen=True)
class HistoryView:
    """The shown time, the cursor and the events."""

    start: float
    end: float
    cursor: float | None = None
    """None: at the newest value."""
    events: Sequence[Event] = ()


def cells(width: int) -> int:
    """The cells of a curve on a screen of this width."""
    return max(1, width - LABEL_WIDTH)


def draw(curves: Sequence[Curve], view: HistoryView, width: int, height: int) -> list[Line]:
    """As many curves as fit below each other, with event marks above and times below."""
    room = height - 3
    if not curves or room < SMALLEST or width < LABEL_WIDTH + 20:
        return [line(("no curve is chosen, or there is no room for one", MUTED))]
    shown = curves[: max(1, room // SMALLEST)]
    each = room // len(shown)
    lines = [_marks(view, width)]
    for curve in shown:
        lines += _curve(curve, view, width, each)
    hidden = len(curves) - len(shown)
    # Spare lines are left empty above the axis, so that the last lines keep their places.
    lines += [()] * (height - 2 - len(lines))
    return [*lines, _axis(view, width), _words(view, width, hidden)]


def value_words(unit: str, value: float) -> str:
    """One value as text."""
    if unit in ("fraction", "memory"):
        return units.percent(value)
    if unit in ("number", "rate"):
        return f"{value:.4g}" if unit == "number" else units.rate(value)
    return f"{value:.0f} W" if unit == "watts" else units.size(value)


def reading(curve: Curve, view: HistoryView, width: int) -> Line:
    """The curve's value at the cursor, beside its title.

    A narrow terminal leaves out the words for the cursor's place, which the axis shows; then the
    least value, then the most.
    """
    count = cells(width)
    each = (view.end - view.start) / count
    start = view.start + _column(view, count) * each
    (bucket,) = curve.columns(start, start + each, 1)
    if bucket is None:
        # An update may take longer than a cell.
        value = curve.track.at("time", start + each - curve.begins) if curve.track is not None else None
        return line(("not known", MUTED)) if value is None else line((value_words(curve.unit, value), "strong"))
    mean, high = value_words(curve.unit, bucket.mean), value_words(curve.unit, bucket.high)
    if mean == high:
        return line((mean, "strong"))
    where = line(("newest" if view.cursor is None else "at the cursor", MUTED))
    least, most = fact("least", value_words(curve.unit, bucket.low)), fact("most", high)
    facts = (where, fact("mean", mean), least, most), (fact("mean", mean), least, most), (fact("mean", mean), most)
    room = width - width_of(line(curve.title)) - 2
    return next((found for found in map(join, facts) if width_of(found) <= room), fact("mean", mean))


def _column(view: HistoryView, count: int) -> int:
    if view.cursor is None:
        return count - 1
    return min(count - 1, max(0, int((view.cursor - view.start) / (view.end - view.start) * count)))


def _curve(curve: Curve, view: HistoryView, width: int, height: int) -> list[Line]:
    count, rows = cells(width), height - 1
    title = spread(line((curve.title, "strong")), reading(curve, view, width), width)
    values = curve.columns(view.start, view.end, count * 2)
    known = [one for one in values if one is not None]
    if not known:
        return [title, line(("no value in this time", MUTED)), *[()] * (rows - 1)]
    bounds = _bounds(curve.unit, min(one.low for one in known), max(one.high for one in known))
    drawn, roles = blank(rows, count), ["curve"] * count
    if curve.unit == "memory":
        labels = mark_limits(drawn, bounds)
        band = Hysteresis()
        roles = cell_roles([band.update(None if one is None else one.high) for one in values])
    else:
        labels = [value_words(curve.unit, bounds[1]), *[""] * (rows - 2), value_words(curve.unit, bounds[0])]
    paint(drawn, values, bounds, roles, across_gaps=curve.track is not None)
    if view.cursor is not None:
        place = _column(view, count)
        for row in drawn:
            row[place] = (row[place][0] if row[place][0] not in " ┄" else "│", "match")
    return [title, *((*merged(row), (f" {labels[n]:<{LABEL_WIDTH - 1}}", MUTED)) for n, row in enumerate(drawn))]


def _bounds(unit: str, low: float, high: float) -> tuple[float, float]:
    """The part of the scale that is drawn."""
    if unit == "memory":
        return memory_bounds(low, high)
    return (0.0, 1.0) if unit == "fraction" else nice_bounds(low, high)


def _marks(view: HistoryView, width: int) -> Line:
    """Where events happened: ┊ an attempt begins, ▾ anything else."""
    count = cells(width)
    signs = [" "] * count
    for event in view.events:
        if event.kind in MARKED and view.start <= event.time < view.end:
            place = int((event.time - view.start) / (view.end - view.start) * count)
            signs[place] = "┊" if event.kind == "attempt" or signs[place] == "┊" else "▾"
    return fit(line(("".join(signs), "attempt")), width)


def _axis(view: HistoryView, width: int) -> Line:
    days = view.end - view.start > 86_400
    left, right = (_clock(moment, days=days) for moment in (view.start, view.end))
    middle = f"cursor {_clock(view.cursor, days=days)}" if view.cursor is not None else ""
    return line((between(left, middle, right, cells(width)), MUTED))


def _clock(moment: float, *, days: bool) -> str:
    return time.strftime("%m-%d %H:%M" if days else "%H:%M:%S", time.localtime(moment))


def _words(view: HistoryView, width: int, hidden: int) -> Line:
    """The event nearest to the cursor, and the number of hidden curves."""
    parts: list[Line] = []
    if hidden:
        parts.append(line((f"{hidden} more below (down)", "accent")))
    near = [event for event in view.events if event.kind in MARKED and view.start <= event.time < view.end]
    if near:
        at = view.end if view.cursor is None else view.cursor
        event = min(near, key=lambda one: abs(one.time - at))
        parts.append(line((f"{_clock(event.time, days=False)} ", MUTED), event.message))
    return join_fitting(parts, width) or fit(join(parts), width)
