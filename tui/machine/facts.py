"""Groups of facts for the details screens: each with its value, or with a dash and the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memtop.supervisor import units
from memtop.tui.line import MUTED, STRONG, Line, cell, fit, line, width_of, wrap

LABEL = 21
"""Cells of the label before a value."""
_TWO_COLUMNS_FROM = 110


class Group(NamedTuple):
    """A heading and the lines below it."""

    title: str
    lines: list[Line]


class FactGroup:
    """Lines of one group. `unknown` holds the sample's reasons for missing values."""

    def __init__(self, title: str, width: int, *unknown: Mapping[str, str]) -> None:
        self._title = title
        self._width = width
        self._unknown = unknown
        self._lines: list[Line] = []

    def add(self, label: str, value: str | None, field: str = "", *, role: str = STRONG) -> None:
        """Add a fact. If `value` is None, the reason is shown."""
        head = line((cell(label, LABEL), MUTED))
        if value is not None:
            room = max(10, self._width - LABEL)
            shown = line((value, role))
            first, *more = [shown] if width_of(shown) <= room else wrap(value, room, role)
            self._lines.append(fit((*head, *first), self._width))
            self._lines += [(*line(" " * LABEL), *row) for row in more]
            return
        reason = next((reasons[field] for reasons in self._unknown if field in reasons), "")
        rows = wrap(reason, max(10, self._width - LABEL - 3), MUTED) or [()]
        self._lines.append(fit((*head, (f"{units.UNKNOWN}  ", "unknown"), *rows[0]), self._width))
        self._lines += [(*line(" " * (LABEL + 3)), *row) for row in rows[1:]]

    def add_line(self, content: Line) -> None:
        self._lines.append(fit(content, self._width))

    def add_text(self, text: str, role: str = STRONG) -> None:
        """Add a sentence, on as many lines as needed."""
        self._lines += wrap(text, self._width, role)

    def group(self) -> Group:
        return Group(self._title, self._lines)


def number(value: float | None, unit: str, digits: int = 0) -> str | None:
    return None if value is None else f"{value:.{digits}f} {unit}".rstrip()


def share(value: float | None, digits: int = 0) -> str | None:
    return None if value is None else units.percent(value, digits)


def size(value: float | None) -> str | None:
    return None if value is None else units.size(value)


def flow(value: float | None) -> str | None:
    return None if value is None else f"{units.size(value)}/s"


def yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def column_width(width: int) -> int:
    """The width of a group's lines."""
    return (width - 3) // 2 if width >= _TWO_COLUMNS_FROM else width


def laid_out(groups: Sequence[Group], width: int) -> list[Line]:
    """The groups below each other; on a wide terminal in two columns of similar height."""
    blocks = [_block(group) for group in groups if group.lines]
    if width < _TWO_COLUMNS_FROM:
        return [one for block in blocks for one in block]
    each = column_width(width)
    half = sum(len(block) for block in blocks) / 2
    left: list[Line] = []
    right: list[Line] = []
    for block in blocks:
        # In order: a group goes to the left column if its middle belongs there.
        (left if not right and len(left) + len(block) / 2 <= half else right).extend(block)
    rows = max(len(left), len(right))
    left += [()] * (rows - len(left))
    right += [()] * (rows - len(right))
    return [(*fit(a, each), ("   ", MUTED), *fit(b, each)) for a, b in zip(left, right, strict=True)]


def _block(group: Group) -> list[Line]:
    return [line((group.title, "heading")), *group.lines, ()]
