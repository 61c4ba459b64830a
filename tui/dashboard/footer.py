"""The bottom of the dashboard: the message lines and the buttons of all actions."""

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

from memtop.supervisor.language import tr
from memtop.supervisor.wire import Phase
from memtop.tui.keymap import BAR, Action, has_button, is_idle, key_of, label_of, obstacle
from memtop.tui.line import MUTED, Line, fit
from memtop.tui.panel import LinePanel, RoleStyles
from memtop.tui.store import Store
from memtop.tui.words import message_seconds, report_lines

_WORDS_FROM = 110
"""With this many columns the full labels fit."""
_TWO_LINES_BELOW = 80
_IN_TWO_LINES = 8
_PADDING = 2


class ActionButton(RoleStyles, can_focus=True):
    """One action: its key and its label; dimmed while it cannot be done."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "press", "Press", show=False)]

    class Pressed(Message):
        """The button was clicked or pressed with the keyboard."""

        def __init__(self, action_id: str) -> None:
            super().__init__()
            self.action_id = action_id

    def __init__(self, action: Action) -> None:
        super().__init__(id=f"action-{action.id}")
        self.action = action
        self.key = action.shown_key
        self.label = tr(action.label)
        self.tooltip = tr(action.description)

    def say(self, key: str, label: str) -> None:
        """Change key and label; the layout is computed again only if they differ."""
        if (key, label) != (self.key, self.label):
            self.key, self.label = key, label
            self.refresh(layout=True)

    @property
    def wanted_width(self) -> int:
        """Cells for the key and the label."""
        return cell_len(self.key) + 1 + cell_len(self.label) + _PADDING

    def render(self) -> Text:
        role = "cursor" if self.has_focus else MUTED if self.has_class("-unavailable") else "accent"
        return Text.assemble((self.key, self.role_style(role)), f" {self.label}", no_wrap=True)

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
        """Hide actions that do not exist here, dim those that cannot be done now, and update the
        labels.
        """
        narrow = width < _WORDS_FROM
        buttons = [child for child in self.children if isinstance(child, ActionButton)]
        for button in buttons:
            unavailable = is_idle(button.action, store)
            if unavailable != button.has_class("-unavailable"):
                button.set_class(unavailable, "-unavailable")
            button.say(key_of(button.action, preset_keys), tr(label_of(button.action, store, narrow=narrow)))
        # Buttons of screens are dropped first; their keys still work.
        grid = width < _TWO_LINES_BELOW
        room = _IN_TWO_LINES if grid else width
        for button in sorted(buttons, key=lambda one: _rank(one.action)):
            takes = 1 if grid else button.wanted_width
            shown = has_button(button.action, store)
            if _optional(button.action):
                shown = shown and obstacle(button.action, store) is None
                if shown and room < takes:
                    # No later button takes the place of a more important one.
                    room, shown = 0, False
            if shown != button.display:
                button.display = shown
            room -= takes if shown else 0


def _optional(action: Action) -> bool:
    return action.group == "screen" or action.gives_way


def _rank(action: Action) -> int:
    """The order in which buttons get room. Recovery comes before all other screens."""
    if not _optional(action):
        return 0
    return 1 if action.id == "recovery" else 3 if action.gives_way else 2


_LINES, _LINES_LOW = 3, 2
"""A message may take this many lines for a while, fewer on low terminals. The log gets smaller
meanwhile."""
_TALL = 20
_SECONDS = 20.0


class FlashPanel(LinePanel):
    """The newest message on as many lines as it needs; after a while on one line, and at last gone.

    A failure stays until the run is in another state, but at least as long as any message: the
    state may change right after it.
    """

    def __init__(self) -> None:
        super().__init__(self._message, id="flash")
        self._text: tuple[str, str] | None = None
        """The text and its kind."""
        self._state: tuple[Phase, int] | None = None
        """The run's state and its attempt at the time of the message."""
        self._was_shown = False
        """Whether the message has been there for its time."""
        self._folding: Timer | None = None
        self._going: Timer | None = None

    @property
    def has_message(self) -> bool:
        return self._text is not None

    def show_message(self, text: str, kind: str, store: Store, terminal_lines: int) -> None:
        """`store`: the dashboard's, which may be newer than the one that is drawn here."""
        self._text, self._state, self._was_shown = (text, kind), _state_of(store), False
        if self._going is not None:
            self._going.stop()
        self._going = None if kind == "busy" else self.set_timer(message_seconds(kind), self._end_its_time)
        self._unfold(_LINES if terminal_lines >= _TALL else _LINES_LOW)

    def clear_message(self) -> None:
        self._text, self._was_shown = None, False
        self.fold()

    def show(self, store: Store) -> None:
        super().show(store)
        if self._was_shown and _state_of(store) != self._state:
            self.clear_message()

    def _end_its_time(self) -> None:
        self._was_shown = True
        if self._text is not None and (self._text[1] != "failed" or _state_of(self._store) != self._state):
            self.clear_message()

    def fold(self) -> None:
        """Shorten the message to one line."""
        self._unfold(1)

    def _unfold(self, most: int) -> None:
        if self._folding is not None:
            self._folding.stop()
            self._folding = None
        wanted = 1 if self._text is None else len(report_lines(*self._text, self.app.size.width - 2))
        self.styles.height = min(most, max(1, wanted))
        self.show(self._store)
        if min(most, wanted) > 1:
            self._folding = self.set_timer(_SECONDS, self.fold)

    def _message(self, store: Store, width: int, height: int) -> list[Line]:
        if self._text is None:
            return []
        lines = report_lines(*self._text, width)
        if len(lines) <= height:
            return lines
        return [*lines[: height - 1], fit((*lines[height - 1], (" …", MUTED)), width)]


def _state_of(store: Store) -> tuple[Phase, int] | None:
    return None if store.run is None else (store.run.state, store.run.attempt)
