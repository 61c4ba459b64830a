"""What all dialogs share: a titled box in the middle, Esc cancels, and the question before anything dangerous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from memtop.tui.closing import Closing

T = TypeVar("T")


class Dialog(Closing[T | None], ModalScreen[T | None]):
    """A question; dismissed with None where the user turns away."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "Cancel", show=False),
        Binding("left", "app.focus_previous", "Previous", show=False),
        Binding("right", "app.focus_next", "Next", show=False),
    ]

    def action_cancel(self) -> None:
        self.dismiss(None)

    @on(Button.Pressed, "#cancel")
    def _cancelled(self) -> None:
        self.action_cancel()


class ConfirmDialog(Dialog[bool]):
    """Says what is about to happen. The focus is on Cancel: Enter alone never does anything dangerous."""

    AUTO_FOCUS = "#cancel"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "confirm", "Yes", show=False),
        Binding("n", "cancel", "No", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[str], *, confirm: str, cancel: str = "Cancel") -> None:
        super().__init__()
        self._title = title
        self._lines = lines
        self._confirm = confirm
        self._cancel = cancel

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -dangerous") as box:
            box.border_title = self._title
            yield Static("\n".join(self._lines), markup=False, id="what")
            with Horizontal(classes="buttons"):
                yield Button(f"{self._cancel} (n)", id="cancel", compact=True)
                yield Button(f"{self._confirm} (y)", id="confirm", variant="error", compact=True)

    @on(Button.Pressed, "#confirm")
    def action_confirm(self) -> None:
        self.dismiss(True)
