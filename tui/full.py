"""What the full screens share: their keys on request, from their own bindings."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widgets import Button, Static

from memtop.tui.closing import Closing
from memtop.tui.dialog import Dialog


class FullScreen(Closing[None]):
    """A screen that covers the dashboard."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark", "keys", "Help", show=False)]

    def action_keys(self) -> None:
        self.app.push_screen(KeysDialog(self))


def keys_of(screen: Screen[None]) -> list[tuple[str, str, str]]:
    """(key, as it is written, words) of every binding of its own that works now and is worth a place."""
    found = []
    for binding in type(screen).BINDINGS:
        if isinstance(binding, Binding) and binding.show and screen.check_action(binding.action.partition("(")[0], ()):
            found.append((binding.key, binding.key_display or binding.key, binding.description))
    return found


class KeysDialog(Dialog[None]):
    """Read and close."""

    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark,q,enter", "cancel", "Close", show=False)]

    def __init__(self, of: Screen[None]) -> None:
        super().__init__()
        self._of = of

    def compose(self) -> ComposeResult:
        tips = {b.key: b.tooltip for b in type(self._of).BINDINGS if isinstance(b, Binding)}
        table = Table.grid(padding=(0, 2))
        for key, shown, words in keys_of(self._of):
            table.add_row(Text(shown, "bold"), words.rstrip("…"), tips.get(key, ""))
        table.add_row(Text("Esc", "bold"), "Back", "One step back: what is typed, found, ticked, filtered, then this screen")
        with VerticalScroll(classes="dialog help") as box:
            box.border_title = "Keys of this screen"
            yield Static(table)
            with Horizontal(classes="buttons"):
                yield Button("Close", id="cancel", compact=True)
