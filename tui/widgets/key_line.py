"""The keys of a full screen on one line, taken from its bindings; a click does what the key does."""

from __future__ import annotations

from rich.text import Text
from textual.binding import Binding
from textual.events import Click
from textual.screen import Screen
from textual.widget import Widget

_BACK = ("escape", "Esc", "Back")


def _words(shown: str, words: str) -> str:
    return f" {shown} {words} "


class KeyLine(Widget):
    """`t Job/tree/flat  f Filter …  Esc Back`; what does not fit is left to the help."""

    COMPONENT_CLASSES = {"action--key", "action--label"}  # noqa: RUF012

    def __init__(self, of: Screen[None]) -> None:
        super().__init__()
        self._of = of
        self._places: list[tuple[int, int, str]] = []

    def _keys(self) -> list[tuple[str, str, str]]:
        found = []
        for binding in type(self._of).BINDINGS:
            if isinstance(binding, Binding) and binding.show and self._of.check_action(binding.action.partition("(")[0], ()):
                found.append((binding.key, binding.key_display or binding.key, binding.description))
        return [*found, _BACK]

    def render(self) -> Text:
        key_style = self.get_component_rich_style("action--key", partial=True)
        line = Text(no_wrap=True)
        self._places = []
        keys = self._keys()
        room = self.size.width - len(_words(*_BACK[1:]))
        for key, shown, words in keys:
            text = _words(shown, words)
            if key != _BACK[0] and line.cell_len + len(text) > room:
                continue
            self._places.append((line.cell_len, line.cell_len + len(text), key))
            line.append_text(Text.assemble(" ", (shown, key_style), f" {words} "))
        return line

    def on_click(self, event: Click) -> None:
        event.stop()
        for start, end, key in self._places:
            if start <= event.x < end:
                self.app.simulate_key(key)
                return
