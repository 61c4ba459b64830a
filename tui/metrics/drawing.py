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
from memtop.tui.line import MUTED, STRONG, Line, between, fit, foreign, join, join_fitting, line, spread, width_of
from memtop.tui.metrics.curves import Range, RunCurves, Track

RUN_ROLES = ("curve", "run2", "run3", "run4", "run5", "run6")
"""The colours of the runs. The first is the run of the dashboard."""
SMOOTHINGS = (0, 8, 32, 128)
"""Dots over which a curve is smoothed."""
_LABEL = 10
"""Cells of the labels of the y axis, and the axis."""
_MARGIN = 2
"""Cells behind a curve, for the number of its run."""
_NUMBER_EVERY = 30
"""Cells between two numbers of a run on its curve, where there are several."""
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
    """A value of an axis as text: of the update there, or the one before it."""
    return units.duration(value) if axis == "time" else units.count(math.floor(value))


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
    hidden = len(kinds) - len(shown)
    below = line((f"{hidden} more below (down)", MUTED)) if hidden else ()
    words = _event_words(runs[0], view, width - width_of(below) - 2 if hidden else width)
    return [*lines, axes, spread(words, below, width)], len(shown)


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
    title = _title(kind, runs, view, width)
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
    drawn = [smoothed(values, view.smoothing) if view.smoothing else values for values in raw]
    for number, values in enumerate(raw):
        if view.smoothing:
            paint(cells, values, bounds, [MUTED] * count)
        paint(cells, drawn[number], bounds, [RUN_ROLES[number]] * count)
    ends = _number_curves(cells, drawn, bounds) if len(runs) > 1 else {}
    place = None if view.cursor is None else _column(view.cursor, view, count)
    if place is not None:
        for row in cells:
            row[place] = (row[place][0] if row[place][0] != " " else "│", "match")
    lines = [_row(kind, view, cells[n], n, rows, bounds, ends.get(n)) for n in range(rows)]
    return [title, *lines, *[()] * (height - 1 - rows)]


def _number_curves(
    cells: Cells, curves: Sequence[Sequence[Range | None]], bounds: tuple[float, float]
) -> dict[int, tuple[str, str]]:
    """Write the number of each run on its curve again and again, for eyes and terminals without
    colours, and behind its end. Returns the numbers behind the last column, by row."""
    rows, count = len(cells), len(cells[0])
    ends: list[tuple[float, int, tuple[str, str]]] = []
    for number, values in enumerate(curves):
        sign = (str(number + 1), RUN_ROLES[number])
        # Two dots are a cell. Where curves cover each other, their numbers stand side by side.
        for place in range(_NUMBER_EVERY // len(RUN_ROLES) * (number + 1), count, _NUMBER_EVERY):
            near = next((dot for dot in range(2 * place, min(2 * (place + _NUMBER_EVERY), len(values))) if values[dot]), None)
            if near is not None and (value := values[near]) is not None:
                cells[level(value.mean, bounds, rows) // 4][near // 2] = sign
        dot = next((dot for dot in range(len(values) - 1, -1, -1) if values[dot] is not None), None)
        if dot is None or (last := values[dot]) is None:
            continue
        height = level(last.mean, bounds, rows)
        if (behind := dot // 2 + 2) < count:
            cells[height // 4][behind] = sign
        else:
            ends.append((-last.mean, height, sign))
    return _in_own_rows(sorted(ends), rows)


def _in_own_rows(ends: Sequence[tuple[float, int, tuple[str, str]]], rows: int) -> dict[int, tuple[str, str]]:
    """Each number in a row of its own, near the height of its curve (in dots), in the same order;
    those at the top are left out where there are too many."""
    places: list[int] = []
    for _, height, _ in ends:
        places.append(max(height // 4, places[-1] + 1 if places else 0))
    lowest = rows - 1
    for number in range(len(places) - 1, -1, -1):
        places[number] = min(places[number], lowest)
        lowest = places[number] - 1
    return {place: sign for place, (*_, sign) in zip(places, ends, strict=True) if place >= 0}


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


def _title(kind: MetricKind, runs: Sequence[RunCurves], view: MetricsView, width: int) -> Line:
    """The metric, and the value of each run at the cursor, or its newest in sight. Without room its
    name is shortened first, then the last runs are left out."""
    readings = [_reading(kind, number, run, view, several=len(runs) > 1) for number, run in enumerate(runs)]
    for words in (kind.words, kind.short):
        name = line((words, STRONG))
        if width_of(name) + 2 + width_of(join(readings)) <= width:
            return spread(name, join(readings), width)
    room = width - width_of(name) - 5
    return spread(name, join((join_fitting(readings, room), line(("…", MUTED)))), width)


def _reading(kind: MetricKind, number: int, run: RunCurves, view: MetricsView, *, several: bool) -> Line:
    at = view.end if view.cursor is None else view.cursor
    track, extent = run.track(kind.name), run.extent(view.axis)
    over = view.cursor is not None and extent is not None and extent[1] < at
    value = None if track is None or over else track.at(view.axis, at)
    text = units.UNKNOWN if value is None else kind.show(value)
    return line((f"{number + 1} " if several else "", RUN_ROLES[number]), (text, STRONG))


def _legend(runs: Sequence[RunCurves], width: int) -> Line:
    """The numbers and names of all runs. Without room the names lose what they begin with alike,
    then their middle."""
    words, each = [run.name for run in runs], width
    if sum(cell_len(name) + 5 for name in words) - 3 > width:
        alike = next((n for n, signs in enumerate(zip(*words, strict=False)) if len(set(signs)) > 1), 0)
        words = [f"…{name[alike:]}" if alike > 1 else name for name in words]
        each = (width + 3) // len(runs) - 5
    names = [foreign((f"{n + 1} {shortened(name, each)}", RUN_ROLES[n])) for n, name in enumerate(words)]
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
    said = event.message.startswith(event.word)
    return fit(line(*(() if said else ((event.word, MUTED), (separator(": "), MUTED))), event.message), width)
