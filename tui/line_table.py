"""A list of lines with a heading, a cursor and an offset of its own; repaints only the lines that changed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from memtop.tui.line import Heading, Line, fit, line, plain
from memtop.tui.panel import RoleStyles


class LineTable(RoleStyles, can_focus=True):
    """Shows rows that its screen has drawn. The cursor stays on a row's key, wherever the row goes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Row above", show=False),
        Binding("down", "move(1)", "Row below", show=False),
        Binding("pageup", "page(-1)", "Page back", show=False),
        Binding("pagedown", "page(1)", "Page forward", show=False),
        Binding("home", "go(0)", "First row", show=False),
        Binding("end", "go(-1)", "Last row", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row."""

    class Chosen(Message):
        """Enter, or a second click on the row under the cursor."""

    class HeadingClicked(Message):
        """Somebody clicked a column's name."""

        def __init__(self, column: str) -> None:
            super().__init__()
            self.column = column

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._heading: Line = ()
        self._columns: Sequence[Heading] = ()
        self._keys: Sequence[Hashable] = ()
        self._rows: Sequence[Line] = ()
        self._cursor: Hashable = None
        self._offset = 0
        self._painted: list[Line] = []

    @property
    def cursor(self) -> Hashable:
        """The key of the row under the cursor; None while there is no row."""
        return self._cursor

    @property
    def room(self) -> int:
        """How many rows fit below the heading."""
        return max(1, self.size.height - 1)

    def show(self, heading: Line, columns: Sequence[Heading], keys: Sequence[Hashable], rows: Sequence[Line]) -> None:
        """Take the next rows. The row under the cursor keeps its place on the screen where that is possible."""
        before = self._place()
        self._heading, self._columns = heading, columns
        self._keys, self._rows = tuple(keys), tuple(rows)
        after = self._place()
        if after is None:
            # Its process has ended: the cursor takes what stands in its place now.
            place = min(before or 0, len(self._keys) - 1)
            self._cursor = self._keys[place] if self._keys else None
            self.post_message(self.Moved())
        elif before is not None:
            self._offset += after - before
        self._into_view()
        self.repaint()

    def move_to(self, key: Hashable) -> None:
        """Put the cursor on a row."""
        if key in self._keys and key != self._cursor:
            self._cursor = key
            self._into_view()
            self.repaint()
            self.post_message(self.Moved())

    def on_resize(self, event: Resize) -> None:
        self._into_view()

    def repaint(self) -> None:
        """Paint again what looks otherwise than before."""
        painted = [self._line(y) for y in range(self.size.height)]
        changed = [y for y, new in enumerate(painted) if y >= len(self._painted) or self._painted[y] != new]
        self._painted = painted
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        return Strip([Segment(text, self.role_style(role)) for text, role in self._line(y)], self.size.width)

    def _line(self, y: int) -> Line:
        width = self.size.width
        if y == 0:
            return fit(self._heading, width)
        number = self._offset + y - 1
        if number >= len(self._rows):
            return fit((), width)
        row = fit(self._rows[number], width)
        if self._keys[number] != self._cursor:
            return row
        # A mark beside the colour, in the second of the two cells that every row leaves free.
        text = plain(row)
        return line((f"{text[0]}▸{text[2:]}", "cursor"))

    def _place(self) -> int | None:
        return self._keys.index(self._cursor) if self._cursor in self._keys else None

    def _into_view(self) -> None:
        place = self._place()
        if place is not None:
            self._offset = min(max(self._offset, place - self.room + 1), place)
        self._offset = max(0, min(self._offset, len(self._keys) - self.room))

    def action_move(self, step: int) -> None:
        place = self._place()
        if place is not None:
            self.move_to(self._keys[min(len(self._keys) - 1, max(0, place + step))])

    def action_page(self, direction: int) -> None:
        self.action_move(direction * self.room)

    def action_go(self, place: int) -> None:
        if self._keys:
            self.move_to(self._keys[place])

    def action_choose(self) -> None:
        if self._cursor is not None:
            self.post_message(self.Chosen())

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self.action_move(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self.action_move(-1)

    def on_click(self, event: Click) -> None:
        event.stop()
        if event.y == 0:
            found = next((column.id for column in self._columns if column.start <= event.x < column.end), None)
            if found is not None:
                self.post_message(self.HeadingClicked(found))
            return
        number = self._offset + event.y - 1
        if number >= len(self._keys):
            return
        if self._keys[number] == self._cursor:
            self.action_choose()
        else:
            self.move_to(self._keys[number])
