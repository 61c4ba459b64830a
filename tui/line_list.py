"""A page of drawn lines with one cursor and one scroll position: tables, texts, and texts with
entries to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip

from memtop.tui.line import MUTED, Heading, Line, fit, foreign, line, plain
from memtop.tui.panel import RoleStyles

_WHEEL_LINES = 3
_INDENT = 2


class Entry(NamedTuple):
    """Lines that belong together. `key` is None for text that cannot be chosen.

    Each line of an entry with a key begins with a blank cell, in which the list draws the cursor.
    """

    key: Hashable | None
    lines: Sequence[Line]


class ListContent(NamedTuple):
    """Everything that a list shows."""

    entries: Sequence[Entry]
    heading: Line | None = None
    """The names of a table's columns; they do not scroll. With a heading, each entry is one line.
    """
    columns: Sequence[Heading] = ()


Draw = Callable[[int], ListContent]
"""width -> the page."""


def text_entry(lines: Sequence[Line]) -> Entry:
    """Lines to read only."""
    return Entry(None, lines)


def indented(key: Hashable, lines: Sequence[Line]) -> Entry:
    """An entry to choose, from lines drawn for `indented_width` cells."""
    return Entry(key, [(*line(" " * _INDENT), *one) for one in lines])


def indented_width(width: int) -> int:
    """The cells that `indented` leaves for the lines."""
    return max(1, width - _INDENT)


class LineList(RoleStyles, can_focus=True):
    """Shows a page and repaints only the lines that changed.

    Up and down move the cursor from entry to entry and scroll where there is none. The cursor stays
    on its key when entries move.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Above", show=False),
        Binding("down", "move(1)", "Below", show=False),
        Binding("pageup", "page(-1)", "Page back", show=False),
        Binding("pagedown", "page(1)", "Page forward", show=False),
        Binding("home", "go(0)", "First", show=False),
        Binding("end", "go(-1)", "Last", show=False),
        Binding("enter", "choose", "Choose", show=False),
    ]

    class Moved(Message):
        """The cursor is on another entry."""

    class Chosen(Message):
        """Enter, or a second click on the entry under the cursor."""

    class HeadingClicked(Message):
        """A column's name was clicked."""

        def __init__(self, column: str) -> None:
            super().__init__()
            self.column = column

    def __init__(self, draw: Draw, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._draw = draw
        self._page = ListContent(())
        self._keys: list[Hashable] = []
        self._rows: list[tuple[Hashable | None, Line]] = []
        """Every line with the key of its entry."""
        self._cursor: Hashable | None = None
        self._offset = 0
        self._painted: list[Line] = []
        self._painted_size = Size(0, 0)

    @property
    def cursor(self) -> Hashable | None:
        """The key of the entry under the cursor; None if no entry can be chosen."""
        return self._cursor

    @property
    def room(self) -> int:
        """How many lines fit below the heading."""
        return max(1, self.size.height - (self._page.heading is not None))

    def lines_wanted(self, width: int) -> int:
        """How many lines the whole page has at this width."""
        page = self._draw(width)
        return sum(len(entry.lines) for entry in page.entries) + (page.heading is not None)

    def redraw(self) -> None:
        """Draw the page again.

        In a table the row under the cursor keeps its place on the screen if possible.
        """
        if self.size.width <= 0:
            return
        places, before = self._keys, self._first_row()
        self._page = self._draw(self.size.width)
        self._keys = [entry.key for entry in self._page.entries if entry.key is not None]
        self._rows = [(entry.key, row) for entry in self._page.entries for row in entry.lines]
        if self._cursor not in self._keys:
            # The entry is gone: the cursor moves to the one that is now in its place.
            place = places.index(self._cursor) if self._cursor in places else 0
            self._cursor = self._keys[min(place, len(self._keys) - 1)] if self._keys else None
            self.post_message(self.Moved())
        elif self._page.heading is not None and before is not None:
            self._offset += (self._first_row() or 0) - before
        if self._page.heading is not None:
            self._into_view()
        self._repaint()

    def move_to(self, key: Hashable) -> None:
        """Move the cursor to an entry and scroll it into view."""
        if not self._rows:
            # Nothing is drawn before the first layout: the first page starts at this entry.
            self._cursor = key
        if key not in self._keys:
            return
        if key != self._cursor:
            self._cursor = key
            self.post_message(self.Moved())
        self._into_view()
        self._repaint()

    def scroll_lines(self, lines: int) -> None:
        """Scroll without moving the cursor; 0 only keeps the position within the page."""
        self._offset += lines
        self._repaint()

    def to_top(self) -> None:
        """Scroll back to the first line."""
        self._offset = 0

    # --- painting ---------------------------------------------------------------------------------

    def on_resize(self, event: Resize) -> None:
        self.redraw()
        self._into_view()
        self._repaint()

    def render_line(self, y: int) -> Strip:
        if self.size != self._painted_size:
            # Textual renders lines of the new size before it sends the resize event.
            self.redraw()
        width = self.size.width
        painted = self._painted[y] if y < len(self._painted) else fit((), width)
        return Strip([Segment(text, self.role_style(role)) for text, role in painted], width)

    def _repaint(self) -> None:
        self._offset = max(0, min(self._offset, len(self._rows) - self.room))
        width, height = self.size
        painted = [self._line(y, width, height) for y in range(height)]
        changed = [y for y, new in enumerate(painted) if y >= len(self._painted) or self._painted[y] != new]
        self._painted, self._painted_size = painted, self.size
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def _line(self, y: int, width: int, height: int) -> Line:
        if self._page.heading is not None and y == 0:
            return fit(self._page.heading, width)
        number = self._offset + y - (height - self.room)
        below = len(self._rows) - self._offset - height
        if self._page.heading is None and y == height - 1 and below > 0:
            return fit(line((f"  {below + 1} more lines: PgDn", MUTED)), width)
        if self._page.heading is None and y == 0 and self._offset > 0:
            return fit(line((f"  {self._offset + 1} lines above: PgUp", MUTED)), width)
        if number >= len(self._rows):
            return fit((), width)
        key, row = self._rows[number]
        if key is None or key != self._cursor:
            return fit(row, width)
        # The cursor is a mark as well as a colour, so that it can be seen without colours.
        if number == 0 or self._rows[number - 1][0] != key:
            return foreign((f"▸{plain(fit(row, width))[1:]}", "cursor"))
        (first, role), *rest = row
        return fit((("▎", "accent"), (first[1:], role), *rest), width)

    def _first_row(self) -> int | None:
        if self._cursor is None:
            return None
        return next((n for n, (key, _) in enumerate(self._rows) if key == self._cursor), None)

    def _into_view(self) -> None:
        """Scroll as little as needed.

        On the first entry, show as much as possible of the text above it.
        """
        first = self._first_row()
        if first is None or self.size.height <= 0:
            return
        last = max(n for n, (key, _) in enumerate(self._rows) if key == self._cursor)
        # Below and above a text, one line is needed to tell that it goes on.
        is_text = self._page.heading is None
        lowest = last - self.room + 1 + (is_text and last + 1 < len(self._rows))
        if is_text and self._cursor == self._keys[0]:
            self._offset = max(0, lowest)
        else:
            self._offset = min(max(self._offset, lowest), max(0, first - is_text))

    # --- keys and mouse ---------------------------------------------------------------------------

    def action_move(self, step: int) -> None:
        place = self._keys.index(self._cursor) + step if self._cursor in self._keys else -1
        if self._page.heading is not None and self._keys:
            place = min(len(self._keys) - 1, max(0, place))
        if 0 <= place < len(self._keys):
            self.move_to(self._keys[place])
        else:
            self.scroll_lines(step)

    def action_page(self, direction: int) -> None:
        if self._page.heading is not None:
            self.action_move(direction * self.room)
        else:
            self.scroll_lines(direction * max(1, self.room - 2))

    def action_go(self, place: int) -> None:
        if self._keys:
            self.move_to(self._keys[place])
        else:
            self.scroll_lines(-len(self._rows) if place == 0 else len(self._rows))

    def action_choose(self) -> None:
        if self._cursor is not None:
            self.post_message(self.Chosen())

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self._wheel(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self._wheel(-1)

    def _wheel(self, direction: int) -> None:
        if self._page.heading is not None:
            self.action_move(direction)
        else:
            self.scroll_lines(direction * _WHEEL_LINES)

    def on_click(self, event: Click) -> None:
        event.stop()
        if self._page.heading is not None and event.y == 0:
            found = next((column.id for column in self._page.columns if column.start <= event.x < column.end), None)
            if found is not None:
                self.post_message(self.HeadingClicked(found))
            return
        number = self._offset + event.y - (self.size.height - self.room)
        key = self._rows[number][0] if number < len(self._rows) else None
        if key is None:
            return
        if key == self._cursor:
            self.action_choose()
        else:
            self.move_to(key)
