"""Curves over hours and days: filled to the mean, a dot at the most, nothing where nothing was known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from memtop.supervisor import units
from memtop.supervisor.monitor.bands import DANGER_ABOVE, EDGE_FROM, band_of
from memtop.supervisor.monitor.history import Bucket, resample
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.wire import Event
from memtop.tui.bars import merged
from memtop.tui.charts import nice_bounds
from memtop.tui.line import MUTED, Line, fact, fit, join, join_fitting, line, spread

LABEL_WIDTH = 9
SMALLEST = 4
"""Rows of one curve, its title included."""
_ROLES = {Band.SAFE: "hist", Band.EDGE: "histedge", Band.DANGER: "histdanger", Band.UNKNOWN: "unknown"}
_BITS = ((0x40, 0x80), (0x04, 0x20), (0x02, 0x10), (0x01, 0x08))
"""The dots of a braille cell: rows from the bottom, columns from the left."""
# What an event has to be for its moment to be marked.
_LIFE = ("attempt", "adopted", "checkpoint", "warning", "band", "finished", "stopped", "failed", "stop")
_MEMORY = ("oom", "survived", "remedy", "settings", "trend", "pressure", "trial")
MARKED = frozenset((*_LIFE, *_MEMORY))


@dataclass(frozen=True)
class Curve:
    """One series to be drawn."""

    title: str
    unit: str
    """fraction | memory (a fraction with the bands' lines) | bytes | watts"""
    buckets: Sequence[Bucket]


@dataclass(frozen=True)
class View:
    """Which stretch of time, where the cursor is, and what happened in it."""

    start: float
    end: float
    cursor: float | None = None
    """None: at the newest value."""
    events: Sequence[Event] = ()


def cells(width: int) -> int:
    """How many cells a curve has on so many columns."""
    return max(1, width - LABEL_WIDTH)


def draw(curves: Sequence[Curve], view: View, width: int, height: int) -> list[Line]:
    """As many curves as fit, one below the other, the marks of events above and the times below."""
    room = height - 3
    if not curves or room < SMALLEST or width < LABEL_WIDTH + 20:
        return [line(("no curve is chosen, or no room for one", MUTED))]
    shown = curves[: max(1, room // SMALLEST)]
    each = room // len(shown)
    lines = [_marks(view, width)]
    for curve in shown:
        lines += _curve(curve, view, width, each)
    hidden = len(curves) - len(shown)
    # What the division leaves over is empty above the axis, so that the last lines keep their places.
    lines += [()] * (height - 2 - len(lines))
    return [*lines, _axis(view, width), _words(view, width, hidden)]


def value_words(unit: str, value: float) -> str:
    """One value for a person."""
    if unit in ("fraction", "memory"):
        return units.percent(value)
    return f"{value:.0f} W" if unit == "watts" else units.size(value)


def reading(curve: Curve, view: View, width: int) -> Line:
    """What the curve says where the cursor is."""
    count = cells(width)
    each = (view.end - view.start) / count
    start = view.start + _column(view, count) * each
    (bucket,) = resample(curve.buckets, start, start + each, 1)
    if bucket is None:
        return line(("not known", MUTED))
    mean, high = value_words(curve.unit, bucket.mean), value_words(curve.unit, bucket.high)
    if mean == high:
        return line((mean, "strong"))
    return join((fact("mean", mean), fact("least", value_words(curve.unit, bucket.low)), fact("most", high)))


def _column(view: View, count: int) -> int:
    if view.cursor is None:
        return count - 1
    return min(count - 1, max(0, int((view.cursor - view.start) / (view.end - view.start) * count)))


def _curve(curve: Curve, view: View, width: int, height: int) -> list[Line]:
    count = cells(width)
    known = resample(curve.buckets, view.start, view.end, count * 2)
    top = 1.0
    if curve.unit not in ("fraction", "memory"):
        top = nice_bounds(0.0, max((b.high for b in known if b is not None), default=1.0))[1]
    cursor = None if view.cursor is None else _column(view, count)
    lines = [spread(line((curve.title, "strong")), reading(curve, view, width), width)]
    rows = height - 1
    for row in reversed(range(rows)):
        limits = [m for m in (EDGE_FROM, DANGER_ABOVE) if curve.unit == "memory" and row / rows <= m < (row + 1) / rows]
        parts = [
            _cell(known[2 * n : 2 * n + 2], top, rows, row, curve.unit, limit=bool(limits), cursor=n == cursor)
            for n in range(count)
        ]
        lines.append((*merged(parts), *_label(curve.unit, top, rows, row, limits)))
    return lines


def _cell(
    pair: Sequence[Bucket | None], top: float, rows: int, row: int, unit: str, *, limit: bool, cursor: bool
) -> tuple[str, str]:
    bits = 0
    for column, bucket in enumerate(pair):
        if bucket is None:
            continue
        filled = round(bucket.mean / top * rows * 4) - row * 4
        peak = max(1, round(bucket.high / top * rows * 4)) - 1 - row * 4
        for dot in range(4):
            if dot < filled or dot == peak:
                bits |= _BITS[dot][column]
    if cursor:
        return (chr(0x2800 + bits) if bits else "│", "match")
    if not bits:
        return ("┄", "limit") if limit else (" ", MUTED)
    highest = max(bucket.high for bucket in pair if bucket is not None)
    return (chr(0x2800 + bits), _ROLES[band_of(highest)] if unit == "memory" else "curve")


def _label(unit: str, top: float, rows: int, row: int, limits: Sequence[float]) -> Line:
    text = ""
    if limits:
        text = "-".join(f"{m * 100:.0f}" for m in limits) + " %"
    elif row == rows - 1:
        text = value_words(unit, top)
    elif row == 0:
        text = "0"
    return line((f" {text:<{LABEL_WIDTH - 1}}", MUTED))


def _marks(view: View, width: int) -> Line:
    """Where events happened: ┊ an attempt begins, ▾ anything else."""
    count = cells(width)
    signs = [" "] * count
    for event in view.events:
        if event.kind in MARKED and view.start <= event.time < view.end:
            place = int((event.time - view.start) / (view.end - view.start) * count)
            signs[place] = "┊" if event.kind == "attempt" or signs[place] == "┊" else "▾"
    return fit(line(("".join(signs), "attempt")), width)


def _axis(view: View, width: int) -> Line:
    days = view.end - view.start > 86_400
    left, right = (_clock(moment, days=days) for moment in (view.start, view.end))
    middle = f"cursor {_clock(view.cursor, days=days)}" if view.cursor is not None else ""
    room = cells(width) - len(left) - len(right)
    return line((f"{left}{middle:^{max(0, room)}}{right}", MUTED))


def _clock(moment: float, *, days: bool) -> str:
    return time.strftime("%m-%d %H:%M" if days else "%H:%M:%S", time.localtime(moment))


def _words(view: View, width: int, hidden: int) -> Line:
    """The event nearest to the cursor, and how much does not fit."""
    parts: list[Line] = []
    if hidden:
        parts.append(line((f"{hidden} more below (down)", "accent")))
    near = [event for event in view.events if event.kind in MARKED and view.start <= event.time < view.end]
    if near:
        at = view.end if view.cursor is None else view.cursor
        event = min(near, key=lambda one: abs(one.time - at))
        parts.append(line((f"{_clock(event.time, days=False)} ", MUTED), event.message))
    return join_fitting(parts, width) or fit(join(parts), width)
