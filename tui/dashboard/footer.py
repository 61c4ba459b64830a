"""The row of buttons at the bottom: every action with its key, from the one table."""

from __future__ import annotations

from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Click
from textual.message import Message
from textual.timer import Timer
from textual.widget import Widget

from memtop.tui.keymap import BAR, Action, foreign, key_of, label_of, obstacle, offered
from memtop.tui.line import MUTED, Line, fit
from memtop.tui.panel import LinePanel
from memtop.tui.store import Store
from memtop.tui.words import report_lines

_WORDS_FROM = 110
"""Columns from which the full words fit."""
_TWO_LINES_BELOW = 80
_IN_TWO_LINES = 8
_PADDING = 2


class ActionButton(Widget, can_focus=True):
    """One action: its key, its words; quiet where it cannot be done now."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"action--key", "action--label"}
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "press", "Press", show=False)]

    class Pressed(Message):
        """The button was clicked, or pressed with the keyboard."""

        def __init__(self, action_id: str) -> None:
            super().__init__()
            self.action_id = action_id

    def __init__(self, action: Action) -> None:
        super().__init__(id=f"action-{action.id}")
        self.action = action
        self.key = action.shown_key
        self.label = action.label
        self.tooltip = action.description

    def say(self, key: str, label: str) -> None:
        """Change the words; lays out again only if they changed."""
        if (key, label) != (self.key, self.label):
            self.key, self.label = key, label
            self.refresh(layout=True)

    @property
    def wanted_width(self) -> int:
        """Cells for the key and the words."""
        return cell_len(self.key) + 1 + cell_len(self.label) + _PADDING

    def render(self) -> Text:
        key = self.get_component_rich_style("action--key", partial=True)
        return Text.assemble((self.key, key), f" {self.label}", no_wrap=True)

    def on_click(self, event: Click) -> None:
        event.stop()
        self.action_press()

    def action_press(self) -> None:
        self.post_message(self.Pressed(self.action.id))


class ActionBar(Container):
    """All buttons of the dashboard."""

    def compose(self) -> ComposeResult:
        for action in BAR:
            yield ActionButton(action)

    def show(self, store: Store, *, width: int, preset_keys: tuple[int, ...]) -> None:
        """Hide what does not exist here, quieten what cannot be done now, and keep the words up to date."""
        narrow = width < _WORDS_FROM
        buttons = list(self.query(ActionButton))
        for button in buttons:
            button.set_class(obstacle(button.action, store) is not None, "-unavailable")
            button.say(key_of(button.action, preset_keys), label_of(button.action, store, narrow=narrow))
        # Ways to look deeper give way to what can be done: their keys work all the same.
        grid = width < _TWO_LINES_BELOW
        room = _IN_TWO_LINES if grid else width
        for button in sorted(buttons, key=lambda one: _rank(one.action)):
            takes = 1 if grid else button.wanted_width
            fits = not _optional(button.action) or (room >= takes and obstacle(button.action, store) is None)
            never = store.run is not None and foreign(button.action, store.run) is not None
            button.display = offered(button.action, store) and fits and not never
            room -= takes if button.display else 0


def _optional(action: Action) -> bool:
    return action.group == "screen" or action.gives_way


def _rank(action: Action) -> int:
    """Who gets room first. The way out of a death of memory comes before all other looks."""
    if not _optional(action):
        return 0
    return 1 if action.id == "way_out" else 3 if action.gives_way else 2


_LINES, _LINES_LOW = 3, 2
"""What is told may take so many lines for a while, fewer on low terminals; the log gives them."""
_TALL = 20
_SECONDS = 20.0


class FlashPanel(LinePanel):
    """As many lines as the newest message takes; after a while one."""

    def __init__(self) -> None:
        super().__init__(self._message, id="flash")
        self._told: tuple[str, str] | None = None
        """The text, and of which kind it is."""
        self._folding: Timer | None = None

    @property
    def has_told(self) -> bool:
        return self._told is not None

    def tell(self, text: str, kind: str, terminal_lines: int) -> None:
        self._told = (text, kind)
        self._unfold(_LINES if terminal_lines >= _TALL else _LINES_LOW)

    def fold(self) -> None:
        """Onto one line."""
        self._unfold(1)

    def _unfold(self, most: int) -> None:
        if self._folding is not None:
            self._folding.stop()
            self._folding = None
        wanted = 1 if self._told is None else len(report_lines(*self._told, self.app.size.width - 2))
        self.styles.height = min(most, max(1, wanted))
        self.show(self._store)
        if min(most, wanted) > 1:
            self._folding = self.set_timer(_SECONDS, self.fold)

    def _message(self, store: Store, width: int, height: int) -> list[Line]:
        if self._told is None:
            return []
        lines = report_lines(*self._told, width)
        if len(lines) <= height:
            return lines
        return [*lines[: height - 1], fit((*lines[height - 1], (" …", MUTED)), width)]
