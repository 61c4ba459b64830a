"""The help dialog: all keys and marks, from the table of actions."""

from __future__ import annotations

from memtop.supervisor.language import tr
from memtop.tui.keymap import ACTIONS, offered
from memtop.tui.line import Line, cell, line
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
    "Bars": (
        "█ allocated   ▓ cached by the allocator   ▒ CUDA context and libraries",
        "░ others and driver   · page cache, freed when needed",
        "┆ highest so far   ┊┊ 85 % and 90 %",
        "╍╍▴ and ~ predicted, never measured",
    ),
    "Bands": ("· safe below 85 %   ^ edge 85 to 90 %   !! danger above 90 %",),
    "Curves": ("┄ 85 % and 90 %   ┊ an attempt begins;  – and ? stand for what is not known",),
    "Events": ("✗ failed   ✓ survived   ↻ remedy   ▸ settings   ◌ trial   ^ grows   ! warning",),
    "Lists": ("✓ ticked   = the same process on another GPU   ▸ ▾ a job, folded and not",),
}
"""What stands for what, by where it is seen; a line each."""
_MARK_LABEL = 9
"""Cells of the labels of the marks."""


def _marks() -> list[Line]:
    """The marks and their meaning in the reader's language."""
    rows = ((title if number == 0 else "", row) for title, lines in _MARKS.items() for number, row in enumerate(lines))
    return [line(cell(title, _MARK_LABEL), row) for title, row in rows]


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
        return [*lines, *_marks()]
