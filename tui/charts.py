"""Charts on fixed scales: memory over time and the loss curve, both in braille dots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from memtop.supervisor import units
from memtop.supervisor.monitor.values import DANGER_ABOVE, EDGE_FROM, Band, band_of, mark
from memtop.tui.line import MUTED, Line, fit, line

_HISTORY_ROLES = {Band.SAFE: "hist", Band.EDGE: "histedge", Band.DANGER: "histdanger", Band.UNKNOWN: "unknown"}
_LABEL_WIDTH = 8
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The dots of a braille cell: rows from the top, columns from the left."""


def history(width: int, height: int, values: Sequence[float | None]) -> list[Line]:
    """Memory shares over time, newest at the right, 0 to 100 % over the height, with labelled band
    lines.

    Two values per cell and four levels per row, as filled braille columns.
    """
    if height <= 0 or width <= _LABEL_WIDTH + 4:
        return []
    room = (width - _LABEL_WIDTH) * 2
    known = values[-room:]
    shown: list[float | None] = [*([None] * (room - len(known))), *known]
    lines: list[Line] = []
    for row in range(height):
        floor = 1 - (row + 1) / height
        limits = [m for m in (EDGE_FROM, DANGER_ABOVE) if floor <= m < floor + 1 / height]
        pairs = zip(shown[::2], shown[1::2], strict=True)
        cells = [_history_cell(pair, height, height - 1 - row, bool(limits)) for pair in pairs]
        lines.append((*merged(cells), *_history_label(row, height, limits)))
    return lines


def _history_cell(pair: tuple[float | None, float | None], height: int, row: int, on_limit: bool) -> tuple[str, str]:
    """One cell of two columns; `row` counts from the bottom."""
    bits = _filled(pair, height, row)
    if not bits:
        return ("┄", "limit") if on_limit else (" ", MUTED)
    highest = max(value for value in pair if value is not None)
    return (chr(0x2800 + bits), _HISTORY_ROLES[band_of(highest)])


def _history_label(row: int, height: int, limits: Sequence[float]) -> Line:
    if limits:
        text = "-".join(f"{m * 100:.0f}" for m in limits) + " %"
    elif row == height - 1:
        text = "0 %"
    else:
        text = ""
    return line((f" {text:<{_LABEL_WIDTH - 1}}", MUTED))


class Point(NamedTuple):
    """One value of a curve; each attempt has its own `group`."""

    x: int
    y: float
    group: int = 0


def curve(width: int, height: int, points: Sequence[Point], *, x_end: int | None = None) -> list[Line]:
    """A braille curve with labelled axes.

    The scale covers all points and is rounded outwards, so it rarely changes.
    """
    finite = [p for p in points if math.isfinite(p.y)]
    plot_height = height - 1
    if plot_height < 2 or width < 24:
        return []
    if not finite:
        return [line(("no loss reported yet", MUTED))]
    low, high = nice_bounds(min(p.y for p in finite), max(p.y for p in finite))
    digits = 2 if high < 100 else 0
    labels = [f"{high:.{digits}f}", f"{(low + high) / 2:.{digits}f}", f"{low:.{digits}f}"]
    margin = max(len(label) for label in labels) + 1
    plot_width = width - margin - 1
    first = finite[0].x
    last = max(finite[-1].x, x_end or 0, first + 1)
    dots = _dots(finite, plot_width, plot_height, first, last, low, high)
    breaks = _breaks(finite, plot_width, first, last)
    lines = []
    for row in range(plot_height):
        label = {0: labels[0], plot_height // 2: labels[1], plot_height - 1: labels[2]}.get(row, "")
        cells = [_braille_cell(dots[row][column], column in breaks) for column in range(plot_width)]
        lines.append(line((f"{label:>{margin - 1}} ", MUTED), ("┤" if label else "│", "limit"), *merged(cells)))
    return [*lines, _x_axis(margin, plot_width, first, last, len(breaks))]


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


def _dots(points: Sequence[Point], width: int, height: int, first: int, last: int, low: float, high: float) -> list[list[int]]:
    """Bit patterns of the braille cells: one mean per dot column, neighbours joined by a vertical
    stroke.
    """
    sums: dict[int, tuple[float, int]] = {}
    for point in points:
        column = min(width * 2 - 1, round((point.x - first) / (last - first) * (width * 2 - 1)))
        total, count = sums.get(column, (0.0, 0))
        sums[column] = (total + point.y, count + 1)
    cells = [[0] * width for _ in range(height)]
    top = height * 4 - 1
    before: tuple[int, int] | None = None
    for column in sorted(sums):
        total, count = sums[column]
        level = round((high - total / count) / (high - low) * top)
        level = min(top, max(0, level))
        for x, y in stroke(before, (column, level)):
            cells[y // 4][x // 2] |= BITS[y % 4][x % 2]
        before = (column, level)
    return cells


def stroke(start: tuple[int, int] | None, end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots (column, row) from `start`, which is left out, to `end`."""
    if start is None:
        return [end]
    (x0, y0), (x1, y1) = start, end
    steps = max(x1 - x0, abs(y1 - y0), 1)
    return [(x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps)) for i in range(1, steps + 1)]


def _breaks(points: Sequence[Point], width: int, first: int, last: int) -> set[int]:
    """Columns in which an attempt begins, except the first attempt."""
    starts = (after.x for before, after in pairwise(points) if after.group != before.group)
    return {min(width - 1, (x - first) * (width - 1) // (last - first)) for x in starts}


def _braille_cell(bits: int, attempt_starts: bool) -> tuple[str, str]:
    if bits:
        return (chr(0x2800 + bits), "curve")
    return ("┊", "attempt") if attempt_starts else (" ", MUTED)


def _x_axis(margin: int, width: int, first: int, last: int, attempts: int) -> Line:
    left, right = f"update {first}", f"{last}"
    middle = "┊ a new attempt" if attempts else ""
    room = width - len(left) - len(right)
    text = f"{left}{middle:^{room}}{right}" if room > len(middle) + 2 else left
    return fit(line(" " * (margin + 1), (text, MUTED)), margin + 1 + width)


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


class Share(NamedTuple):
    """One part of a bar: its share of the whole (0 to 1), its glyph and its role."""

    fraction: float
    glyph: str
    role: str


def memory_bar(
    width: int,
    shares: Sequence[Share],
    *,
    peak: float | None = None,
    limits: bool = True,
    after: Share | None = None,
    predicted: float | None = None,
) -> Line:
    """A stacked bar with the 85 % and 90 % lines (`┊`) and the highest value so far (`┆`) in its
    free part.

    `after` follows the shares and does not hide those lines: memory that counts as free.
    `predicted` is marked by `▴`.
    """
    if width <= 0:
        return ()
    cells: list[tuple[str, str]] = [(" ", "track")] * width
    if after is not None:
        filled = sum(max(0.0, share.fraction) for share in shares)
        first, last = (round(min(1.0, value) * width) for value in (filled, filled + max(0.0, after.fraction)))
        cells[first:last] = [(after.glyph, after.role)] * (last - first)
    if limits:
        for mark in (EDGE_FROM, DANGER_ABOVE):
            cells[_cell(mark, width)] = ("┊", "barlimit")
    if peak is not None:
        cells[_cell(peak, width)] = ("┆", "peak")
    done = 0.0
    start = 0
    for share in shares:
        done = min(1.0, done + max(0.0, share.fraction))
        # Rounding the running total, not each share, keeps the end of the bar at the percentage.
        end = round(done * width)
        cells[start:end] = [(share.glyph, share.role)] * (end - start)
        start = max(start, end)
    if predicted is not None:
        # In the last cell of the prediction.
        cells[max(0, min(width, round(predicted * width)) - 1)] = ("▴", "predictedbar")
    return merged(cells[:width])


def progress_bar(width: int, fraction: float | None) -> Line:
    """`━━━━╸━━━` in steps of half a cell: the finished part is bright."""
    if width <= 0:
        return ()
    halves = 0 if fraction is None else round(min(1.0, max(0.0, fraction)) * width * 2)
    full, half = divmod(halves, 2)
    done = "━" * full + ("╸" if half else "")
    return tuple(s for s in ((done, "accent"), ("─" * (width - len(done)), "limit")) if s[0])


def _cell(fraction: float, width: int) -> int:
    return min(width - 1, max(0, int(fraction * width)))


def merged(cells: Sequence[tuple[str, str]]) -> Line:
    out: list[tuple[str, str]] = []
    for glyph, role in cells:
        if out and out[-1][1] == role:
            out[-1] = (out[-1][0] + glyph, role)
        else:
            out.append((glyph, role))
    return tuple(out)


ROLES = {Band.SAFE: "safe", Band.EDGE: "edge", Band.DANGER: "danger", Band.UNKNOWN: "unknown"}
_WIDEST = max(len(f"{mark(b)} {b.value}") for b in (Band.SAFE, Band.EDGE, Band.DANGER))


def padded_tag(band: Band) -> Line:
    """The band's tag in a field of fixed width, so that later columns do not move when the band
    changes.
    """
    text = f"{mark(band)} {band.value}"
    return line((text, ROLES[band]), " " * max(0, _WIDEST - len(text)))


def banded(fraction: float | None, band: Band) -> Line:
    """`84.7 %   · safe` with a right-aligned number."""
    text = units.percent(fraction)
    return line(" " * max(0, 7 - len(text)), (f"{text}   {mark(band)} {band.value}", ROLES[band]))
