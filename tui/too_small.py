"""What is shown where nothing useful fits; goes away by itself when the terminal grows."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import Static


class TooSmallScreen(Screen[None]):
    """One sentence. The screens below keep their state."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,d", "app.detach", "Detach", show=False)]

    def __init__(self, smallest: tuple[int, int]) -> None:
        super().__init__(id="too-small")
        self._smallest = smallest

    def compose(self) -> ComposeResult:
        yield Static(id="sentence")

    def on_resize(self, event: Resize) -> None:
        width, height = self._smallest
        size = f"{event.size.width}x{event.size.height}"
        self.query_one("#sentence", Static).update(f"terminal too small: {size},\nmemtop needs {width}x{height}")
