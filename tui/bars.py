"""Bars on a fixed scale, and the marks of the bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

from memtop.supervisor import units
from memtop.supervisor.language import tr
from memtop.supervisor.monitor.values import DANGER_ABOVE, EDGE_FROM, Band, mark
from memtop.tui.charts import merged
from memtop.tui.line import Line, line


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


ROLES = {Band.SAFE: "safe", Band.EDGE: "edge", Band.DANGER: "danger", Band.UNKNOWN: "unknown"}


def tag(band: Band) -> str:
    """The mark and the word of a band, in the reader's language."""
    return tr(f"{mark(band)} {band.value}")


def padded_tag(band: Band) -> Line:
    """The band's tag in a field of fixed width, so that later columns do not move when the band
    changes.
    """
    text, widest = tag(band), max(cell_len(tag(one)) for one in (Band.SAFE, Band.EDGE, Band.DANGER))
    return line((text, ROLES[band]), " " * max(0, widest - cell_len(text)))


def banded(fraction: float | None, band: Band) -> Line:
    """`84.7 %   · safe` with a right-aligned number."""
    text = units.percent(fraction)
    return line(" " * max(0, 7 - len(text)), (f"{text}   {mark(band)} {band.value}", ROLES[band]))
