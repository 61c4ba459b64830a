"""A panel drawn line by line from the store: the widget of most panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.segment import Segment
from rich.style import Style
from textual.events import Click
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from memtop.supervisor.language import tr
from memtop.tui.line import Line, fit
from memtop.tui.store import Store

Draw = Callable[[Store, int, int], Sequence[Line]]
"""(store, width, height) -> the lines to show."""


class RoleStyles(Widget):
    """Maps the roles of drawn text to styles.

    The app holds the component class of each role. Textual styles every component class of every
    widget, so roles on the widgets would take most of the time to open a screen.
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._roles: dict[str, Style] = {}

    def notify_style_update(self) -> None:
        self._roles.clear()
        super().notify_style_update()

    def role_style(self, role: str) -> Style:
        """The style of one role on this widget's background."""
        if role not in self._roles:
            # Blanks need the background too: Textual's line API paints nothing behind unstyled
            # cells.
            self._roles[role] = self.rich_style + self.app.get_component_styles(f"draw--{role}").partial_rich_style
        return self._roles[role]


class LinePanel(RoleStyles):
    """Shows what a pure drawing function returns, and repaints only the lines that changed."""

    def __init__(
        self,
        draw: Draw,
        *,
        title: Callable[[Store], str] | str = "",
        opens: str = "",
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._draw = draw
        self._title = title
        self.opens = opens
        """The action that a click starts; empty for none."""
        self._store = Store()
        self._drawn_for: tuple[int, int] = (-1, -1)
        self._drawn: list[Line] = []
        self._lines: tuple[Line, ...] = ()
        """What was drawn, fitted to the width."""

    class Opened(Message):
        """A panel with an action was clicked; `row` counts from its first line."""

        def __init__(self, panel: LinePanel, row: int) -> None:
            super().__init__()
            self.panel = panel
            self.row = row

    def on_click(self, event: Click) -> None:
        inside = event.get_content_offset(self)
        if self.opens:
            event.stop()
            self.post_message(self.Opened(self, -1 if inside is None else inside.y))

    def show(self, store: Store) -> None:
        """Draw the store. Unchanged lines are not painted again."""
        self._store = store
        if not self.display:
            self._draw_when_shown()
            return
        title = tr(self._title if isinstance(self._title, str) else self._title(store))
        if title and self.border_title != title:
            self.border_title = title
        width, height = self._drawn_for
        if (width, height) != self.size:
            # Not laid out yet.
            self._draw_when_shown()
            return
        changed = self._redraw(width, height)
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def _draw_when_shown(self) -> None:
        """Let render_line draw. Textual would show the lines that it has kept."""
        if self._drawn_for != (-1, -1):
            self._drawn_for = (-1, -1)
            self.refresh()

    @property
    def lines(self) -> tuple[Line, ...]:
        """The visible lines with their roles."""
        if self._drawn_for != self.size:
            self._redraw(*self.size)
        return self._lines

    def render_line(self, y: int) -> Strip:
        lines = self.lines
        if y >= len(lines):
            return Strip.blank(self.size.width, self.rich_style)
        return Strip([Segment(text, self.role_style(role)) for text, role in lines[y]], self.size.width)

    def _redraw(self, width: int, height: int) -> list[int]:
        """Draw again; the numbers of the lines that have changed."""
        drawn = list(self._draw(self._store, width, height))[:height]
        drawn += [()] * (height - len(drawn))
        if self._drawn_for == (width, height):
            pairs = zip(self._drawn, drawn, strict=True)
            changed = [y for y, (old, new) in enumerate(pairs) if old != new]
        else:
            changed = list(range(height))
        lines: list[Line] = list(self._lines) if len(self._lines) == height else [()] * height
        for y in changed:
            lines[y] = fit(drawn[y], width)
        self._drawn, self._lines, self._drawn_for = drawn, tuple(lines), (width, height)
        return changed
