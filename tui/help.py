"""The help dialog: all keys and marks, from the table of actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.cells import cell_len

from memtop.supervisor.language import tr
from memtop.tui.keymap import ACTIONS, offered
from memtop.tui.line import Line, cell, line, plain, wrap
from memtop.tui.screen import KeysPage, key_rows
from memtop.tui.store import Store

_GROUPS = (
    ("run", "The run"),
    ("machine", "The machine"),
    ("screen", "Screens"),
    ("session", "This dashboard"),
    ("view", "Looking around"),
    ("replay", "The replay"),
)
_MARKS: dict[str, tuple[str, ...]] = {
    "Numbers": (
        "B x A x W = effective batch: samples in a micro-batch x accumulation x processes",
        "T: tokens of a sample",
        "att: attempt",
    ),
    "Bars": (
        "█ allocated",
        "▓ cached by the allocator",
        "▒ CUDA context and libraries",
        "░ others, unlisted, driver",
        "· page cache, freed when needed",
        "┆ highest so far",
        "┊┊ 85 % and 90 %",
        "╍╍▴ and ~ predicted, never measured",
    ),
    "Bands": ("· safe below 85 %", "^ edge 85 to 90 %", "!! danger above 90 %"),
    "Curves": ("┄ 85 % and 90 %", "┊ an attempt begins", "▾ another event", "– and ? stand for what is not known"),
    "Events": ("✗ failed", "✓ survived", "↻ remedy", "▸ settings", "◌ trial", "^ grows", "! warning"),
    "Lists": ("✓ ticked", "= the same process on another GPU", "▸ ▾ a job, folded and not"),
}
"""What stands for what, by where it is seen."""
_MARK_LABEL = 9
"""Cells of the labels of the marks."""
_BETWEEN_MARKS = "   "


def _marks(width: int) -> list[Line]:
    """The marks and their meaning in the reader's language: as many on a line as fit."""
    return [
        line(cell(title if number == 0 else "", _MARK_LABEL), row)
        for title, marks in _MARKS.items()
        for number, row in enumerate(_rows(marks, width - _MARK_LABEL))
    ]


def _rows(marks: Iterable[str], width: int) -> Iterator[str]:
    row = ""
    for mark in map(tr, marks):
        longer = f"{row}{_BETWEEN_MARKS}{mark}" if row else mark
        if row and cell_len(longer) > width:
            yield from map(plain, wrap(row, width)) if cell_len(row) > width else [row]
            longer = mark
        row = longer
    yield from map(plain, wrap(row, width)) if cell_len(row) > width else [row]


class HelpDialog(KeysPage):
    """All keys that work in this dashboard, and the marks; read and close."""

    TITLE = "Keys and marks"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def draw(self, width: int) -> list[Line]:
        """The whole page."""
        shown = [action for action in ACTIONS if offered(action, self._store)]
        rows = [(tr(one.shown_key), tr(one.label).rstrip("…"), one.description) for one in shown]
        drawn = dict(zip(shown, key_rows(rows, width), strict=True))
        lines: list[Line] = []
        for group, title in _GROUPS:
            own = [one for one in shown if one.group == group]
            if own:
                lines += [line((title, "heading")), *(row for one in own for row in drawn[one]), ()]
        if self._store.read_only:
            lines += [line(("Read-only: nothing can be changed from here.", "strong")), ()]
        return [*lines, *_marks(width)]
