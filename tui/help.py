"""The help dialog: all keys and marks, from the table of actions."""

from __future__ import annotations

from typing import ClassVar

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Button, Static

from memtop.supervisor.language import tr
from memtop.tui.keymap import ACTIONS, offered
from memtop.tui.line import cell
from memtop.tui.screen import Dialog, prose
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


def marks() -> str:
    """The marks and their meaning in the reader's language."""
    rows = ((title if number == 0 else "", row) for title, lines in _MARKS.items() for number, row in enumerate(lines))
    return "\n".join(f"{cell(title, _MARK_LABEL)}{tr(row)}" for title, row in rows)


def help_page(store: Store) -> Group:
    """The whole page: only the keys that work in this dashboard."""
    parts: list[RenderableType] = []
    widest = max(cell_len(tr(action.label)) for action in ACTIONS)
    for group, title in _GROUPS:
        rows = [action for action in ACTIONS if action.group == group and offered(action, store)]
        if not rows:
            continue
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=5)
        table.add_column(min_width=widest, no_wrap=True)
        table.add_column()
        for row in rows:
            table.add_row(Text(f"  {tr(row.shown_key)}", "bold"), tr(row.label).rstrip("…"), prose(tr(row.description)))
        parts += [Text(tr(title), "bold underline"), table, Text()]
    if store.read_only:
        parts += [Text(tr("Read-only: nothing can be changed from here."), "bold"), Text()]
    return Group(*parts, Text(marks()))


class HelpDialog(Dialog[None]):
    """Read and close."""

    # The page itself has the focus: it opens at its top, and the arrow keys scroll it.
    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark,q,enter", "cancel", "Close", show=False)]

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help") as box:
            box.border_title = tr("Keys and marks")
            yield Static(help_page(self._store))
            with Horizontal(classes="buttons"):
                yield Button(tr("Close"), id="cancel", compact=True)
