"""Lines of text in which every piece has a role; the widget that shows them turns roles into styles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
"""(text, role)"""
Line = tuple[Span, ...]


class Heading(NamedTuple):
    """The name of a column in a line of them: its cells, from `start` up to `end`."""

    id: str
    start: int
    end: int


TEXT = "text"
MUTED = "muted"
STRONG = "strong"

ROLES = (
    TEXT,
    MUTED,
    STRONG,
    "accent",
    "good",
    "bad",
    "safe",
    "edge",
    "danger",
    "unknown",
    "alloc",
    "cache",
    "context",
    "other",
    "track",
    "limit",
    "barlimit",
    "peak",
    "attempt",
    "hist",
    "histedge",
    "histdanger",
    "curve",
    "match",
    "library",
    "driver",
    "gone",
    "pagecache",
    "cursor",
    "heading",
    "predicted",
    "predictedbar",
)
"""Every role a drawing may use. Widgets map each to the component class `draw--<role>`."""


def line(*parts: str | Span) -> Line:
    """A line from spans and plain strings, empty ones left out."""
    spans = ((part, TEXT) if isinstance(part, str) else part for part in parts)
    return tuple(span for span in spans if span[0])


def plain(of: Line) -> str:
    """The text alone."""
    return "".join(text for text, _ in of)


def width_of(of: Line) -> int:
    """Cells, not characters."""
    return sum(cell_len(text) for text, _ in of)


def fit(of: Line, width: int) -> Line:
    """The line cropped or padded to exactly `width` cells; a crop ends in an ellipsis."""
    have = width_of(of)
    if have == width:
        return of
    if have < width:
        return (*of, (" " * (width - have), TEXT))
    if width <= 0:
        return ()
    kept: list[Span] = []
    room = width - 1
    for text, role in of:
        size = cell_len(text)
        if size > room:
            kept.append((set_cell_size(text, room), role))
            break
        kept.append((text, role))
        room -= size
    return (*(span for span in kept if span[0]), ("…", MUTED))


def spread(left: Line, right: Line, width: int) -> Line:
    """`left` at the left edge and `right` at the right one; without room for both the right one is left out."""
    gap = width - width_of(left) - width_of(right)
    if gap < 2:
        return fit(left, width)
    return (*left, (" " * gap, TEXT), *right)


def join(lines: Iterable[Line], separator: str = "  ") -> Line:
    """Lines beside each other on one line; empty ones leave no gap."""
    out: list[Span] = []
    for part in lines:
        if part:
            if out:
                out.append((separator, TEXT))
            out.extend(part)
    return tuple(out)


def dimmed(lines: Sequence[Line]) -> list[Line]:
    """The same words in the quiet role: values that are no longer true."""
    return [tuple((text, MUTED) for text, _ in one) for one in lines]


def fact(label: str, value: str, role: str = STRONG) -> Line:
    """A quiet label and its value: `loss 1.842`."""
    return line((f"{label} ", MUTED), (value, role)) if label else line((value, role))


def join_fitting(lines: Iterable[Line], width: int, separator: str = "  ") -> Line:
    """As `join`, but what does not fit any more is left out whole instead of being cut: the first are the important ones."""
    out: Line = ()
    for part in lines:
        longer = join((out, part), separator)
        if width_of(longer) > width:
            break
        out = longer
    return out


def grid(cells: Sequence[Line], width: int) -> Line:
    """Cells in columns, the first a little wider, so that numbers stay below each other from line to line."""
    first = width * 2 // 5
    rest = (width - first) // max(1, len(cells) - 1)
    out: list[Span] = []
    for number, cell in enumerate(cells):
        each = rest if number else first
        # A cell that fills its column keeps one blank to its neighbour.
        out.extend(fit(cell, each) if width_of(cell) < each else (*fit(cell, each - 1), (" ", TEXT)))
    return fit(tuple(out), width)


def wrap(text: str, width: int, role: str = TEXT) -> list[Line]:
    """Words over as many lines as they need; a word longer than a line is broken."""
    lines: list[Line] = []
    current = ""
    for word in text.split():
        while cell_len(word) > width:
            if current:
                lines.append(line((current, role)))
                current = ""
            head = _cells_of(word, width)
            lines.append(line((head, role)))
            word = word[len(head) :]
        candidate = f"{current} {word}" if current else word
        if cell_len(candidate) > width:
            lines.append(line((current, role)))
            current = word
        else:
            current = candidate
    if current:
        lines.append(line((current, role)))
    return lines


def _cells_of(text: str, width: int) -> str:
    """As much of the text as these cells hold, one character at least: wide characters take two."""
    taken = 1
    while taken < len(text) and cell_len(text[: taken + 1]) <= width:
        taken += 1
    return text[:taken]


def cropped(text: str, width: int) -> str:
    """The text in exactly so many cells: padded, or cut with an ellipsis."""
    if cell_len(text) <= width:
        return text + " " * (width - cell_len(text))
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""
