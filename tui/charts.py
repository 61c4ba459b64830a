"""Curves in braille dots, and sparklines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from rich.cells import cell_len

from memtop.supervisor.monitor.values import DANGER_ABOVE, EDGE_FROM, Band
from memtop.tui.line import MUTED, Line, between, fit, line

HISTORY_ROLES = {Band.SAFE: "hist", Band.EDGE: "histedge", Band.DANGER: "histdanger", Band.UNKNOWN: "unknown"}
_WORST_FIRST = (Band.DANGER, Band.EDGE, Band.SAFE, Band.UNKNOWN)
_LABEL_WIDTH = 9
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The dots of a braille cell: rows from the top, columns from the left."""
_SPANS = [
    [[sum(BITS[y][side] for y in range(first, last + 1)) for last in range(4)] for first in range(4)] for side in range(2)
]
"""The dots of one side of a cell from one row to another."""
_GLYPHS = [chr(0x2800 + dots) for dots in range(256)]
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_LEAST = 4


MARKED = frozenset(
    (
        *("attempt", "adopted", "checkpoint", "warning", "band", "finished", "stopped", "failed", "stop"),
        *("oom", "survived", "remedy", "settings", "batch_search", "trend", "pressure", "trial"),
    )
)
"""The kinds of events that are marked on curves."""


class Extent(Protocol):
    """The least, mean and greatest value of a part of a curve."""

    @property
    def low(self) -> float: ...
    @property
    def mean(self) -> float: ...
    @property
    def high(self) -> float: ...


class _Exact(NamedTuple):
    """One value."""

    low: float
    mean: float
    high: float


Cells = list[list[tuple[str, str]]]
"""Rows of (glyph, role), the top row first."""


def blank(rows: int, count: int) -> Cells:
    """Empty cells, to paint on."""
    return [[(" ", MUTED)] * count for _ in range(rows)]


def paint(
    cells: Cells,
    values: Sequence[Extent | None],
    bounds: tuple[float, float],
    roles: Sequence[str],
    *,
    across_gaps: bool = True,
) -> None:
    """Draw a curve over the cells: from the least to the greatest value of each dot column (two a
    cell), and the means joined.

    `roles` has the role of each column of cells. Without `across_gaps` an unknown value (None)
    interrupts the curve.
    """
    low, high = bounds
    rows, count = len(cells), len(cells[0])
    bits = [0] * (rows * count)
    scale, bottom = (rows * 4 - 1) / (high - low), rows * 4 - 1
    column_before, mean_before = -2, 0
    for column, value in enumerate(values):
        if value is None:
            continue
        # This loop is most of what a redraw costs: it calls no function.
        below, middle, above = value.low, value.mean, value.high
        at = (high - middle) * scale + 0.5
        least = mean = most = 0 if at < 0 else bottom if at > bottom else int(at)
        if below != above:
            at = (high - below) * scale + 0.5
            least = 0 if at < 0 else bottom if at > bottom else int(at)
            at = (high - above) * scale + 0.5
            most = 0 if at < 0 else bottom if at > bottom else int(at)
        if column_before == column - 1:
            if mean_before < most:
                most = mean_before
            elif mean_before > least:
                least = mean_before
        elif column_before >= 0 and across_gaps:
            for x, y in _stroke((column_before, mean_before), (column, mean)):
                bits[y // 4 * count + x // 2] |= BITS[y % 4][x % 2]
        column_before, mean_before = column, mean
        spans, place = _SPANS[column & 1], column >> 1
        first, last = most >> 2, least >> 2
        if first == last:
            bits[first * count + place] |= spans[most & 3][least & 3]
            continue
        bits[first * count + place] |= spans[most & 3][3]
        bits[last * count + place] |= spans[0][least & 3]
        if last > first + 1:
            whole = spans[0][3]
            for inside in range((first + 1) * count + place, last * count + place, count):
                bits[inside] |= whole
    for row, drawn in enumerate(cells):
        part = bits[row * count : (row + 1) * count]
        if any(part):
            for place, dots in enumerate(part):
                if dots:
                    drawn[place] = (_GLYPHS[dots], roles[place])


def level(value: float, bounds: tuple[float, float], rows: int) -> int:
    """The row of dots in which a value is drawn, from the top."""
    low, high = bounds
    bottom = rows * 4 - 1
    return min(bottom, max(0, int((high - value) / (high - low) * bottom + 0.5)))


def _stroke(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots (column, row) from `start`, which is left out, to `end`."""
    (x0, y0), (x1, y1) = start, end
    steps = max(x1 - x0, abs(y1 - y0), 1)
    return [(x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps)) for i in range(1, steps + 1)]


def memory_bounds(low: float, high: float) -> tuple[float, float]:
    """The part of the scale that shows these memory shares: whole steps of 5 %, at least 10 %, and
    up to 100 % if the limits of the bands are near."""
    below, above = math.floor(low * 20 + 1e-9), math.ceil(high * 20 - 1e-9)
    above = 20 if above >= 16 else above
    below = min(below, above - 2)
    return (max(0, below) / 20, max(2, above) / 20)


def history(width: int, height: int, values: Sequence[tuple[float | None, Band]]) -> list[Line]:
    """Memory shares over time, newest at the right, on the part of the scale that they need.

    Two values per cell and four levels per row. The colour is the band that was in force. The lines
    of the bands are dashed and labelled, and so are the ends of the scale.
    """
    count = width - _LABEL_WIDTH
    shown = values[-2 * count :] if count > 0 else ()
    known = [value for value, _ in shown if value is not None]
    if height <= 0 or count <= 4 or not known:
        return []
    bounds = memory_bounds(min(known), max(known))
    cells = blank(height, count)
    labels = mark_limits(cells, bounds)
    missing = 2 * count - len(shown)
    found = [*([None] * missing), *(None if value is None else _Exact(value, value, value) for value, _ in shown)]
    bands = [*([Band.UNKNOWN] * missing), *(band for _, band in shown)]
    paint(cells, found, bounds, cell_roles(bands), across_gaps=False)
    return [(*merged(row), (f" {labels[number]:<{_LABEL_WIDTH - 1}}", MUTED)) for number, row in enumerate(cells)]


def cell_roles(bands: Sequence[Band]) -> list[str]:
    """The role of each cell from the bands of its two values: the worse one counts."""
    pairs = zip(bands[::2], bands[1::2], strict=True)
    return [HISTORY_ROLES[min(pair, key=_WORST_FIRST.index)] for pair in pairs]


def mark_limits(cells: Cells, bounds: tuple[float, float]) -> list[str]:
    """Draw the lines of the bands that are within the bounds. Returns the label of each row."""
    rows = len(cells)
    at: dict[int, list[float]] = {0: [bounds[1]]}
    at.setdefault(rows - 1, []).append(bounds[0])
    for limit in (EDGE_FROM, DANGER_ABOVE):
        if bounds[0] < limit < bounds[1]:
            row = level(limit, bounds, rows) // 4
            cells[row] = [("┄", "limit")] * len(cells[row])
            at.setdefault(row, []).append(limit)
    return [_percentages(sorted({*at.get(number, ())})) for number in range(rows)]


def _percentages(shares: Sequence[float]) -> str:
    """`85 %`, or `85-90 %` for several that share a row."""
    if not shares:
        return ""
    first, last = (f"{share * 100:.0f}" for share in (shares[0], shares[-1]))
    return f"{first} %" if first == last else f"{first}-{last} %"


def spark(values: Sequence[float | None], width: int, bounds: tuple[float, float]) -> str:
    """The newest `width` values on one row, `▁` to `█`; blank where a value is not known. Empty
    without room."""
    if width < _SPARK_LEAST:
        return ""
    low, high = bounds
    top = len(_SPARKS) - 1
    glyphs = [" " if v is None else _SPARKS[min(top, max(0, round((v - low) / (high - low) * top)))] for v in values[-width:]]
    return "".join(glyphs)


class Point(NamedTuple):
    """One value of a curve; each attempt has its own `group`."""

    x: int
    y: float
    group: int = 0


def curve(width: int, height: int, points: Sequence[Point], empty: str = "no loss reported yet") -> list[Line]:
    """A braille curve with labelled axes.

    The scale covers all points and is rounded outwards, so it rarely changes. `empty` is said if
    there are none.
    """
    finite = [p for p in points if math.isfinite(p.y)]
    plot_height = height - 1
    if plot_height < 2 or width < 24:
        return []
    if not finite:
        return [line((empty, MUTED))]
    low, high = nice_bounds(min(p.y for p in finite), max(p.y for p in finite))
    digits = 2 if high < 100 else 0
    labels = [f"{high:.{digits}f}", f"{(low + high) / 2:.{digits}f}", f"{low:.{digits}f}"]
    margin = max(len(label) for label in labels) + 1
    plot_width = width - margin - 1
    first = finite[0].x
    last = max(finite[-1].x, first + 1)
    cells = blank(plot_height, plot_width)
    breaks = _breaks(finite, plot_width, first, last)
    for row in cells:
        for column in breaks:
            row[column] = ("┊", "attempt")
    paint(cells, _means(finite, plot_width * 2, first, last), (low, high), ["curve"] * plot_width)
    lines = []
    for number, row in enumerate(cells):
        label = {0: labels[0], plot_height // 2: labels[1], plot_height - 1: labels[2]}.get(number, "")
        lines.append(line((f"{label:>{margin - 1}} ", MUTED), ("┤" if label else "│", "limit"), *merged(row)))
    return [*lines, _x_axis(margin, plot_width, first, last, len(breaks))]


def curve_spark(points: Sequence[Point], width: int) -> str:
    """The whole curve on one row, as a sparkline of `width` cells or less."""
    finite = [p for p in points if math.isfinite(p.y)]
    cells = min(width, len(finite))
    if cells < _SPARK_LEAST:
        return ""
    means = [None if one is None else one.mean for one in _means(finite, cells, finite[0].x, finite[-1].x)]
    known = [value for value in means if value is not None]
    return spark(means, cells, nice_bounds(min(known), max(known)))


def nice_bounds(low: float, high: float, least: float = 1e-3) -> tuple[float, float]:
    """The range rounded outwards to steps of 1, 2 or 5 times a power of ten; it spans `least` or
    more.
    """
    span = max(high - low, abs(high) * 0.05, least)
    raw = span / 4
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    below = math.floor(low / step) * step
    above = math.ceil(high / step) * step
    return (below, above if above > below else below + step)


def _means(points: Sequence[Point], count: int, first: int, last: int) -> list[Extent | None]:
    """The mean of each of `count` dot columns; None without a point."""
    sums = [(0.0, 0)] * count
    for point in points:
        column = min(count - 1, round((point.x - first) / (last - first) * (count - 1)))
        total, known = sums[column]
        sums[column] = (total + point.y, known + 1)
    return [_Exact(total / n, total / n, total / n) if n else None for total, n in sums]


def _breaks(points: Sequence[Point], width: int, first: int, last: int) -> set[int]:
    """Columns in which an attempt begins, except the first attempt."""
    starts = (after.x for before, after in pairwise(points) if after.group != before.group)
    return {min(width - 1, (x - first) * (width - 1) // (last - first)) for x in starts}


def _x_axis(margin: int, width: int, first: int, last: int, attempts: int) -> Line:
    left, right = f"update {first}", f"{last}"
    text = between(left, "┊ a new attempt" if attempts else "", right, width)
    return fit(line(" " * (margin + 1), (text if cell_len(text) <= width else left, MUTED)), margin + 1 + width)


def merged(cells: Sequence[tuple[str, str]]) -> Line:
    """The cells as a line: neighbours of one role are one piece."""
    out: list[tuple[str, str]] = []
    glyphs: list[str] = []
    before = ""
    for glyph, role in cells:
        if role != before:
            if glyphs:
                out.append(("".join(glyphs), before))
            glyphs, before = [], role
        glyphs.append(glyph)
    if glyphs:
        out.append(("".join(glyphs), before))
    return tuple(out)


def trail(
    width: int, height: int, values: Sequence[float | None], words: Callable[[float], str], *, top: float | None = None
) -> list[Line]:
    """One value over time from zero up to `top` (or to its own highest), newest at the right, gaps
    left empty.
    """
    label_width = 10
    if height <= 0 or width <= label_width + 4:
        return []
    room = (width - label_width) * 2
    known = values[-room:]
    highest = max((v for v in known if v is not None), default=None)
    if highest is None:
        return [line(("not known", "unknown"))]
    scale = top or highest or 1.0
    shares = [None if v is None else min(1.0, v / scale) for v in [*([None] * (room - len(known))), *known]]
    lines: list[Line] = []
    for row in range(height):
        pairs = zip(shares[::2], shares[1::2], strict=True)
        bits = [_filled(pair, height, height - 1 - row) for pair in pairs]
        label = words(scale) if row == 0 else "0" if row == height - 1 else ""
        cells = "".join(chr(0x2800 + b) if b else " " for b in bits)
        lines.append(line((cells, "hist"), (f" {label:<{label_width - 1}}", MUTED)))
    return lines


def _filled(pair: tuple[float | None, float | None], height: int, row: int) -> int:
    """The dots of one cell of two filled columns; `row` counts from the bottom."""
    bits = 0
    for column, value in enumerate(pair):
        level = 0 if value is None else round(value * height * 4) - row * 4
        for dot in range(min(4, max(0, level))):
            bits |= BITS[3 - dot][column]
    return bits
