"""Lines of text in which every piece has a role. Widgets turn roles into styles.

Lines are plain tuples: they are compared to find what has to be painted again, and Textual's
`Content` takes many times longer to assemble and to join. Only the wrapping is Textual's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from textual.content import Content

from memtop.supervisor.clean import clean
from memtop.supervisor.language import has_wide, tr, wrapped_anywhere
from memtop.supervisor.names import shortened

Span = tuple[str, str]
"""(text, role)"""
Line = tuple[Span, ...]


class Heading(NamedTuple):
    """The name of a table column and its cells from `start` to `end` (exclusive)."""

    id: str
    start: int
    end: int


TEXT = "text"
MUTED = "muted"
STRONG = "strong"
NAME = "name"
"""The name of a run, a program or a user: in a line without room it is shortened first."""
JOB = "job"
"""The name of a job in the list of processes, shortened as `NAME`."""
SHORTEST_NAME = 12
"""Cells that a shortened name keeps."""

ROLES = (
    TEXT,
    MUTED,
    STRONG,
    NAME,
    JOB,
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
    "run2",
    "run3",
    "run4",
    "run5",
    "run6",
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
"""Every role a drawing may use. The app has a component class `draw--<role>` for each."""


def line(*parts: str | Span) -> Line:
    """A line from spans and plain strings in the reader's language, cleaned, without empty ones.
    `Verbatim` texts and names are not translated."""
    spans = ((part, TEXT) if isinstance(part, str) else part for part in parts)
    return foreign(*((text if role in (NAME, JOB) else tr(text), role) for text, role in spans))


def foreign(*spans: Span) -> Line:
    """A line of text that is not memtop's own: cleaned, never translated."""
    cleaned = ((clean(text), role) for text, role in spans)
    return tuple(span for span in cleaned if span[0])


def plain(of: Line) -> str:
    """The text alone."""
    return "".join(text for text, _ in of)


def width_of(of: Line) -> int:
    """Cells, not characters."""
    return sum([len(text) if text.isascii() else cell_len(text) for text, _ in of])


def with_short_names(of: Line, width: int) -> Line:
    """The line with its names shortened in the middle, as far as `width` cells need it."""
    excess = width_of(of) - width
    out: list[Span] = []
    for text, role in of:
        if excess > 0 and role in (NAME, JOB):
            size = cell_len(text)
            text = shortened(text, max(min(size, SHORTEST_NAME), size - excess))
            excess -= size - cell_len(text)
        out.append((text, role))
    return tuple(out)


def fit(of: Line, width: int) -> Line:
    """The line shortened or padded to exactly `width` cells: first the names are shortened, then
    the end is cut and has an ellipsis."""
    of = with_short_names(of, width)
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
    """`left` at the left edge and `right` at the right edge; if shorter names leave no room for
    both, `right` is dropped.
    """
    if right:
        short = with_short_names(left, width - width_of(right) - 2)
        left = short if width_of(short) + 2 + width_of(right) <= width else left
    gap = width - width_of(left) - width_of(right)
    if gap < 2:
        return fit(left, width)
    return (*left, (" " * gap, TEXT), *right)


def join(lines: Iterable[Line], separator: str = "  ") -> Line:
    """Several lines joined into one; empty ones leave no gap."""
    out: list[Span] = []
    for part in lines:
        if part:
            if out:
                out.append((separator, TEXT))
            out.extend(part)
    return tuple(out)


def dimmed(lines: Sequence[Line]) -> list[Line]:
    """The same text in the quiet role, for outdated values."""
    return [tuple((text, MUTED) for text, _ in one) for one in lines]


def fact(label: str, value: str, role: str = STRONG) -> Line:
    """A quiet label and its value: `loss 1.842`."""
    return line((label, MUTED), (" ", MUTED), (value, role)) if label else line((value, role))


def join_fitting(lines: Iterable[Line], width: int, separator: str = "  ") -> Line:
    """As `join`, but parts that do not fit are dropped instead of cut.

    The first parts are the most important.
    """
    out: Line = ()
    for part in lines:
        longer = join((out, part), separator)
        if width_of(longer) > width:
            break
        out = longer
    return out


def grid(rows: Sequence[Sequence[Line]], width: int) -> list[Line] | None:
    """Rows of cells in columns, so that numbers align from row to row; None if they do not fit.

    The first column is a little wider. If that leaves another one too little room, each column is
    as wide as its cells need.
    """
    widest = [max(map(width_of, column)) for column in zip_longest(*rows, fillvalue=())]
    first = width * 2 // 5
    columns = [first, *([(width - first) // max(1, len(widest) - 1)] * (len(widest) - 1))]
    if any(have >= room for have, room in zip(widest, columns, strict=True)):
        columns = [*(have + 2 for have in widest[:-1]), widest[-1]]
        if sum(columns) > width:
            return None
    aligned = [[fit(cell, room) for cell, room in zip(row, columns, strict=False)] for row in rows]
    return [fit(join(cells, ""), width) for cells in aligned]


def wrap(text: str, width: int, role: str = TEXT) -> list[Line]:
    """The text wrapped at words; a word longer than a line is broken."""
    return [((part, role),) for part in _wrapped(tr(text), max(1, width))]


def wrap_within(text: str, width: int, most: int, role: str = TEXT) -> list[Line]:
    """As `wrap`, on so many lines at most; an ellipsis stands for the rest. No number is cut."""
    lines = wrap(text, width, role)
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], ((beginning(" ".join(map(plain, lines[most - 1 :])), width), role),)]


def beginning(text: str, width: int) -> str:
    """The first words of a text, with an ellipsis if there are more, in so many cells. No number is
    cut, and of the words only long ones, such as paths."""
    text = clean(text)
    if cell_len(text) <= width:
        return text
    end = len(set_cell_size(text, max(0, width - 2)))
    # A wide character that is cut becomes a blank.
    while end and cell_len(text[:end]) > width - 2:
        end -= 1
    if not has_wide(text):
        last = text.rfind(" ", 0, end + 1)
        word = text[last + 1 :].partition(" ")[0]
        # A path that would leave a third of the room empty is cut.
        end = last if last > 0 and len(word) <= max(_LONG_WORD, width // 3) else end
    end = next((found.start() for found in _NUMBER.finditer(text) if found.start() < end < found.end()), end)
    return f"{text[:end].rstrip()} …" if width > 1 else "…" * width


_LONG_WORD = 16
"""Cells. In a narrow room no shorter word is cut."""


def cut(of: Line, width: int) -> Line:
    """The line, or its first words as `beginning` has them."""
    if width_of(of) <= width:
        return of
    left = len(beginning(plain(of), width)) - 2
    kept: list[Span] = []
    for text, role in of:
        kept.append((text[: max(0, left)], role))
        left -= len(text)
    return (*(span for span in kept if span[0]), (" …", MUTED))


def from_cell(of: Line, start: int) -> Line:
    """The line from this cell on; its first one has an ellipsis for those before it."""
    if start <= 0:
        return of
    kept: list[Span] = []
    hidden = start + 1
    for text, role in of:
        while text and hidden > 0:
            hidden -= cell_len(text[0])
            text = text[1:]
        kept.append((text, role))
    # A wide character that is cut becomes a blank.
    return (("…", MUTED), (" " * -hidden, TEXT), *(span for span in kept if span[0])) if hidden <= 0 else ()


_NUMBER = re.compile(r"\d(?:[\d .,:/]*\d)?")


@lru_cache(maxsize=1024)
def _wrapped(text: str, width: int) -> tuple[str, ...]:
    # Cached, because the same texts are drawn again every second. After a broken word Textual keeps
    # the blank.
    words = " ".join(clean(text).split())
    if has_wide(words):
        return tuple(wrapped_anywhere(words, width))
    parts = (part.plain.strip() for part in Content(words).wrap(width)) if words else ()
    return tuple(part for part in parts if part)


def cell(text: str, width: int, *, right: bool = False) -> str:
    """The text in the reader's language, in exactly `width` cells."""
    text = tr(text)
    return " " * max(0, width - cell_len(text)) + cropped(text, min(width, cell_len(text))) if right else cropped(text, width)


def between(left: str, middle: str, right: str, width: int) -> str:
    """Texts in the reader's language: at the left, in the middle of the room, at the right."""
    left, middle, right = tr(left), tr(middle), tr(right)
    room = max(0, width - cell_len(left) - cell_len(right) - cell_len(middle))
    return f"{left}{' ' * (room // 2)}{middle}{' ' * (room - room // 2)}{right}"


def name_cell(name: str, width: int) -> str:
    """A name, cleaned, in exactly `width` cells: padded, or shortened in the middle."""
    name = shortened(clean(name), width)
    return name + " " * (width - cell_len(name))


def cropped(text: str, width: int) -> str:
    """The text, cleaned, in exactly `width` cells: padded, or cut with an ellipsis."""
    text = clean(text)
    if cell_len(text) <= width:
        return text + " " * (width - cell_len(text))
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""
