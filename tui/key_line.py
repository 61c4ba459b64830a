"""The keys of a full screen on one line, taken from its bindings; a click does what the key does."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.events import Click
from textual.screen import Screen
from textual.widget import Widget

from memtop.tui.full import keys_of

_ALWAYS = (("question_mark", "?", "Help"), ("escape", "Esc", "Back"))


def _words(shown: str, words: str) -> str:
    return f" {shown} {words} "


class KeyLine(Widget):
    """`k End…  t View  f Filter … ? Help  Esc Back`; what does not fit is left to the help."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"action--key", "action--label"}

    def __init__(self, of: Screen[None]) -> None:
        super().__init__()
        self._of = of
        self._places: list[tuple[int, int, str]] = []

    def render(self) -> Text:
        key_style = self.get_component_rich_style("action--key", partial=True)
        line = Text(no_wrap=True)
        self._places = []
        room = self.size.width - sum(len(_words(shown, words)) for _, shown, words in _ALWAYS)
        for key, shown, words in (*keys_of(self._of), *_ALWAYS):
            text = _words(shown, words)
            if (key, shown, words) not in _ALWAYS and line.cell_len + len(text) > room:
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
