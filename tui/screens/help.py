"""All keys and all marks, from the same table that the keys come from."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Button, Static

from memtop.tui.keymap import ACTIONS, offered
from memtop.tui.screens.dialog import Dialog
from memtop.tui.store import Store

_GROUPS = (("run", "The run"), ("machine", "The machine"), ("session", "This dashboard"), ("view", "Looking around"))
_MARKS = """\
Bars     █ allocated   ▓ cached by the allocator   ▒ CUDA context   ░ other processes and the driver
         ┆ highest so far   ┊┊ the 85 % and 90 % lines
Bands    · safe: below 85 %    ^ edge: 85 to 90 %    !! danger: above 90 %
Curves   ┊ an attempt begins;  – stands for what is not known"""


def help_text(store: Store) -> str:
    """The whole page as text: only the keys that work in this dashboard."""
    lines: list[str] = []
    for group, title in _GROUPS:
        rows = [action for action in ACTIONS if action.group == group and offered(action, store)]
        if rows:
            lines += [title, *(f"  {row.shown_key:<5} {row.label.rstrip('…'):<21} {row.description}" for row in rows), ""]
    if store.read_only:
        lines += ["Read-only: nothing can be changed from here.", ""]
    return "\n".join([*lines, _MARKS])


class HelpDialog(Dialog[None]):
    """Read and close."""

    AUTO_FOCUS = "#cancel"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark,q", "cancel", "Close", show=False)]

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog help") as box:
            box.border_title = "Keys and marks"
            with VerticalScroll():
                yield Static(help_text(self._store), markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Close", id="cancel", compact=True)
