"""How the metrics screen looks. Pure: curves in, lines out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len

from memtop.supervisor import units
from memtop.supervisor.language import separator
from memtop.supervisor.names import shortened
from memtop.supervisor.wire import Event
from memtop.tui.charts import MARKED, Cells, blank, level, merged, nice_bounds, paint
from memtop.tui.line import MUTED, SHORTEST_NAME, STRONG, Line, between, fit, foreign, join, join_fitting, line, spread
from memtop.tui.metrics.curves import Range, RunCurves, Track

RUN_ROLES = ("curve", "run2", "run3", "run4", "run5", "run6")
"""The colours of the runs. The first is the run of the dashboard."""
SMOOTHINGS = (0, 8, 32, 128)
"""Dots over which a curve is smoothed."""
_LABEL = 10
"""Cells of the labels of the y axis, and the axis."""
_MARGIN = 2
"""Cells behind a curve, for the number of its run."""
_LOWEST = 6
"""Rows of one chart, with its title."""
_TWO_COLUMNS_FROM = 110
_BETWEEN = 2
"""Cells between two charts."""


class MetricKind(NamedTuple):
    """A metric that can be drawn."""

    key: str
    name: str
    words: str
    short: str
    """The words where there is little room."""
    show: Callable[[float], str]


def _plain(value: float) -> str:
    return f"{value:.4g}"


METRICS = (
    MetricKind("l", "loss", "loss", "loss", _plain),
    MetricKind("e", "evaluation_loss", "evaluation loss", "eval loss", _plain),
    MetricKind("r", "learning_rate", "learning rate", "lr", lambda value: f"{value:.3g}"),
    MetricKind("g", "gradient_norm", "gradient norm", "grad", _plain),
    MetricKind("s", "samples_per_second", "samples/s", "samples/s", units.rate),
    MetricKind("t", "tokens_per_second", "tokens/s", "tok/s", units.rate),
    MetricKind("p", "peak_bytes", "peak memory", "peak", units.size),
    MetricKind("m", "run_bytes", "RAM", "RAM", units.size),
)


@dataclass(frozen=True)
class MetricsView:
    """What is shown of the curves."""

    axis: str
    start: float
    end: float
    cursor: float | None = None
    """A value of the axis; None: the newest values."""
    smoothing: int = 0
    """Dots; 0 for none."""
    log_scale: bool = False
    events: Sequence[Event] = ()
    """Of the first run."""


def x_words(axis: str, value: float) -> str:
    """A value of an axis as text."""
    return units.duration(value) if axis == "time" else units.count(round(value))


def with_values(kinds: Sequence[MetricKind], runs: Sequence[RunCurves]) -> list[MetricKind]:
    """Those of which a run has reported a value: on the CPU there is no peak memory, for example.
    All of them where that leaves none."""
    known = [kind for kind in kinds if any((track := run.track(kind.name)) is not None and track.is_known for run in runs)]
    return known or list(kinds)


def draw(
    kinds: Sequence[MetricKind], runs: Sequence[RunCurves], view: MetricsView, width: int, height: int
) -> tuple[list[Line], int]:
    """As many charts as fit, and how many those are.

    Wide screens have two columns. A line with the marks of the events is above the charts. The last
    two lines are the axis and the event next to the cursor.
    """
    room = height - 3 - (len(runs) > 1)
    columns, across = _columns(width, len(kinds)), _across(width, len(kinds))
    rows = min(math.ceil(len(kinds) / columns), max(1, room // _LOWEST))
    if not kinds or room < _LOWEST or width < 40:
        return [line(("no curve is chosen, or there is no room for one", MUTED))], 0
    shown = kinds[: rows * columns]
    each = room // rows
    lines: list[Line] = [_legend(runs, width)] if len(runs) > 1 else []
    lines.append(join([_marks(runs[0], view, across)] * columns))
    for first in range(0, len(shown), columns):
        charts = [chart(kind, runs, view, across, each) for kind in shown[first : first + columns]]
        for parts in zip(*charts, strict=True):
            lines.append(join([fit(part, across) for part in parts]))
    lines += [()] * (height - 2 - len(lines))
    axes = join([_axis(view, across)] * columns)
    return [*lines, axes, _event_words(runs[0], view, width)], len(shown)


def chart_width(width: int, count: int) -> int:
    """The cells of the curves in each of `count` charts on a screen of this width."""
    return max(1, _across(width, count) - _LABEL - _MARGIN)


def cell_at(x: int, width: int, count: int) -> int | None:
    """Which cell of a chart's curves is at a place of the screen; None beside them."""
    place = x % (_across(width, count) + _BETWEEN) - _LABEL
    return place if 0 <= place < chart_width(width, count) else None


def _columns(width: int, count: int) -> int:
    # Three side by side would leave a quarter of the screen empty.
    return 2 if width >= _TWO_COLUMNS_FROM and count not in (1, 3) else 1


def _across(width: int, count: int) -> int:
    columns = _columns(width, count)
    return (width - _BETWEEN * (columns - 1)) // columns


def chart(kind: MetricKind, runs: Sequence[RunCurves], view: MetricsView, width: int, height: int) -> list[Line]:
    """One metric of all runs: a title with the values at the cursor, and the curves."""
    tracks = [run.track(kind.name) for run in runs]
    title = spread(line((kind.words, STRONG)), _readings(kind, tracks, view, len(runs) > 1), width)
    # An odd number of rows has one in the middle.
    count, rows = max(1, width - _LABEL - _MARGIN), height - 1 - height % 2
    # The ranges of several runs would hide each other.
    raw = [() if track is None else _values(track, view, count * 2, ranges=len(runs) == 1) for track in tracks]
    known = [one for values in raw for one in values if one is not None]
    if not known:
        empty = _unknown(tracks, view)
        return [title, line(" " * _LABEL, (empty, MUTED)), *[()] * (height - 2)]
    bounds = nice_bounds(min(one.low for one in known), max(one.high for one in known), least=1e-12)
    cells = blank(rows, count)
    _mark_attempts(cells, runs, view, count)
    ends: dict[int, tuple[str, str]] = {}
    for number, values in enumerate(raw):
        role = RUN_ROLES[number]
        paint(cells, values, bounds, [MUTED if view.smoothing else role] * count)
        if view.smoothing:
            paint(cells, smoothed(values, view.smoothing), bounds, [role] * count)
        last = next((one for one in reversed(values) if one is not None), None)
        if last is not None and len(runs) > 1:
            ends[level(last.mean, bounds, rows) // 4] = (str(number + 1), role)
    place = None if view.cursor is None else _column(view.cursor, view, count)
    if place is not None:
        for row in cells:
            row[place] = (row[place][0] if row[place][0] != " " else "│", "match")
    drawn = [_row(kind, view, cells[n], n, rows, bounds, ends.get(n)) for n in range(rows)]
    return [title, *drawn, *[()] * (height - 1 - rows)]


def _row(
    kind: MetricKind,
    view: MetricsView,
    cells: Sequence[tuple[str, str]],
    number: int,
    rows: int,
    bounds: tuple[float, float],
    end: tuple[str, str] | None,
) -> Line:
    """One row of a chart: its label, the curves, and the number of a run that ends there."""
    low, high = bounds
    at = {0: high, rows // 2: (low + high) / 2, rows - 1: low}.get(number)
    text = "" if at is None else kind.show(_unscaled(at, view))
    axis = ("┤" if text else "│", "limit")
    return ((f"{text[: _LABEL - 2]:>{_LABEL - 2}} ", MUTED), axis, *merged(cells), (" ", MUTED), *([end] if end else []))


def smoothed(values: Sequence[Range | None], dots: int) -> list[Range | None]:
    """The means, averaged exponentially over about so many dots; what is unknown stays unknown."""
    stays = 1.0 - 2.0 / (dots + 1)
    before, gap = None, 0
    found: list[Range | None] = []
    for value in values:
        gap += 1
        if value is None:
            found.append(None)
            continue
        before = value.mean if before is None else value.mean + stays**gap * (before - value.mean)
        gap = 0
        found.append(Range(before, before, before))
    return found


def _values(track: Track, view: MetricsView, count: int, *, ranges: bool) -> Sequence[Range | None]:
    found = track.columns(view.axis, view.start, view.end, count, ranges=ranges)
    if not view.log_scale:
        return found
    # There is no logarithm of 0 and below: a part of a range that has one begins at its mean.
    return [
        None if one is None or one.mean <= 0 else Range(*(math.log10(v if v > 0 else one.mean) for v in one)) for one in found
    ]


def _unscaled(value: float, view: MetricsView) -> float:
    return 10.0**value if view.log_scale else value


def _unknown(tracks: Sequence[Track | None], view: MetricsView) -> str:
    there = [track for track in tracks if track is not None and track.is_known]
    if not there:
        return "not reported"
    if view.log_scale:
        return "nothing above 0 in this range"
    return "no value in this range"


def _mark_attempts(cells: Cells, runs: Sequence[RunCurves], view: MetricsView, count: int) -> None:
    for begin in runs[0].beginnings(view.axis):
        if view.start <= begin < view.end:
            for row in cells:
                row[_column(begin, view, count)] = ("┊", "attempt")


def _marks(run: RunCurves, view: MetricsView, width: int) -> Line:
    """▾ where events happened. The beginnings of attempts are lines in the charts."""
    count = width - _LABEL - _MARGIN
    signs = [" "] * count
    for x, event in _placed_events(run, view):
        if event.kind != "attempt":
            signs[_column(x, view, count)] = "▾"
    return fit(line(" " * _LABEL, ("".join(signs), "attempt")), width)


def _placed_events(run: RunCurves, view: MetricsView) -> list[tuple[float, Event]]:
    """The marked events in sight, and where each of them is on the axis."""
    placed = [(run.x_of(view.axis, event.time), event) for event in view.events if event.kind in MARKED]
    return [(x, event) for x, event in placed if x is not None and view.start <= x <= view.end]


def _column(x: float, view: MetricsView, count: int) -> int:
    """The cell of a value of the axis."""
    return min(count - 1, max(0, int((x - view.start) / (view.end - view.start) * count)))


def _readings(kind: MetricKind, tracks: Sequence[Track | None], view: MetricsView, several: bool) -> Line:
    """The value of each run at the cursor, or its newest in sight."""
    at = view.end if view.cursor is None else view.cursor
    parts = []
    for number, track in enumerate(tracks):
        value = None if track is None else track.at(view.axis, at)
        text = units.UNKNOWN if value is None else kind.show(value)
        label = f"{number + 1} " if several else ""
        parts.append(line((label, RUN_ROLES[number]), (text, STRONG)))
    return join(parts)


def _legend(runs: Sequence[RunCurves], width: int) -> Line:
    each = width
    if sum(cell_len(run.name) + 5 for run in runs) > width:
        each = max(SHORTEST_NAME, width // max(1, len(runs)) - 5)
    names = [foreign((f"{n + 1} {shortened(run.name, each)}", RUN_ROLES[n])) for n, run in enumerate(runs)]
    return join_fitting(names, width, "   ")


def _axis(view: MetricsView, width: int) -> Line:
    left, right = (x_words(view.axis, value) for value in (view.start, view.end))
    middle = "" if view.cursor is None else f"cursor {x_words(view.axis, view.cursor)}"
    text = between(f"{view.axis} {left}", middle, right, width - _LABEL - _MARGIN)
    return fit(line(" " * _LABEL, (text, MUTED)), width)


def _event_words(run: RunCurves, view: MetricsView, width: int) -> Line:
    """The event next to the cursor."""
    at = view.end if view.cursor is None else view.cursor
    near = min(_placed_events(run, view), key=lambda one: abs(one[0] - at), default=None)
    if near is None:
        return ()
    event = near[1]
    return fit(line((event.word, MUTED), (separator(": "), MUTED), event.message), width)
