"""Horizontal bars on a fixed scale: a full bar is the whole card, or all of the machine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memtop.supervisor.monitor.bands import DANGER_ABOVE, EDGE_FROM
from memtop.tui.line import Line


class Share(NamedTuple):
    """One part of a bar: its share of the whole (0-1), and how it looks."""

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
    """A stacked bar with the 85 % and 90 % lines (`┊`) and the highest value so far (`┆`) in its free part.

    `after` follows the shares without hiding those lines: memory that counts as free. `predicted` is marked by `▴` on all.
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
        # Rounding the running total, not each share, keeps the end of the bar where the percentage says.
        end = round(done * width)
        cells[start:end] = [(share.glyph, share.role)] * (end - start)
        start = max(start, end)
    if predicted is not None:
        # In the last cell that belongs to it, so that the mark stands at the end of what is predicted.
        cells[max(0, min(width, round(predicted * width)) - 1)] = ("▴", "predictedbar")
    return merged(cells[:width])


def progress_bar(width: int, fraction: float | None) -> Line:
    """`━━━━╸━━━`: what is done is bright, the rest is track; half a cell counts."""
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
