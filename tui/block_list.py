"""A page of blocks, some of which can be chosen: text, bars and a list in one, with one cursor and one place to scroll."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp, Resize
from textual.message import Message
from textual.strip import Strip

from memtop.tui.line import MUTED, Line, fit, line, plain
from memtop.tui.panel import RoleStyles

_WHEEL_LINES = 2
_MARGIN = 2
"""Cells before a block that can be chosen, for the cursor."""


class Block(NamedTuple):
    """Lines that belong together; `key` is None where there is only something to read."""

    key: Hashable | None
    lines: Sequence[Line]


Draw = Callable[[int], Sequence[Block]]
"""width -> all blocks. Those that can be chosen are drawn on `chosen_width(width)` cells."""


def chosen_width(width: int) -> int:
    """What a block that can be chosen has of the width: the cursor stands before it."""
    return max(1, width - _MARGIN)


class BlockList(RoleStyles, can_focus=True):
    """Up and down go from one block that can be chosen to the next; where there is none they scroll."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Above", show=False),
        Binding("down", "move(1)", "Below", show=False),
        Binding("pageup", "page(-1)", "Page back", show=False),
        Binding("pagedown", "page(1)", "Page forward", show=False),
        Binding("enter", "choose", "Choose", show=False),
    ]

    class Moved(Message):
        """The cursor is on another block."""

    class Chosen(Message):
        """Enter, or a second click on the block under the cursor."""

    def __init__(self, draw: Draw, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._draw = draw
        self._blocks: Sequence[Block] = ()
        self._rows: list[tuple[Hashable | None, Line]] = []
        self._cursor: Hashable | None = None
        self._offset = 0

    @property
    def cursor(self) -> Hashable | None:
        """The key of the block under the cursor; None where none can be chosen."""
        return self._cursor

    def lines_wanted(self, width: int) -> int:
        """How many lines it has at this width."""
        return sum(len(block.lines) for block in self._draw(width))

    def redraw(self) -> None:
        """Draw anew what may have changed; the cursor stays on its block."""
        width = self.size.width
        if width <= 0:
            return
        self._blocks = self._draw(width)
        keys = self._keys()
        if self._cursor not in keys:
            self._cursor = keys[0] if keys else None
            self.post_message(self.Moved())
        rows = [(block.key, row) for block in self._blocks for row in self._shown(block, width)]
        if rows != self._rows:
            self._rows = rows
            self._offset = max(0, min(self._offset, len(rows) - self.size.height))
            self.refresh()

    def on_resize(self, event: Resize) -> None:
        self.redraw()
        self._into_view()

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        if not self._rows:
            # The first picture may come before the word of the size.
            self.redraw()
        number = self._offset + y
        row = self._rows[number][1] if number < len(self._rows) else ()
        below = len(self._rows) - self._offset - height
        if y == height - 1 and below > 0:
            row = line((f"  {below + 1} more lines: PgDn", MUTED))
        return Strip([Segment(text, self.role_style(role)) for text, role in fit(row, width)], width)

    def _keys(self) -> list[Hashable]:
        return [block.key for block in self._blocks if block.key is not None]

    def _shown(self, block: Block, width: int) -> list[Line]:
        if block.key is None:
            return list(block.lines)
        if block.key != self._cursor:
            return [(*line(" " * _MARGIN), *row) for row in block.lines]
        # A mark beside the colour, so that the cursor is seen without colours too.
        first = fit(line((f"▸ {plain(block.lines[0])}", "cursor")), width)
        return [first, *((*line(("▎ ", "accent")), *row) for row in block.lines[1:])]

    def _into_view(self) -> None:
        """Scroll as little as needed; on the first block that can be chosen, back to where what is above it can be read."""
        height = self.size.height
        places = [n for n, (key, _) in enumerate(self._rows) if key is not None and key == self._cursor]
        if not places or height <= 0:
            return
        first, last = places[0], places[-1]
        # One line is kept for the words about what is below.
        lowest = last - height + 1 + (last + 1 < len(self._rows))
        if self._cursor == self._keys()[0]:
            self._offset = max(0, lowest)
        else:
            self._offset = min(max(self._offset, lowest), first)
        self._offset = max(0, min(self._offset, len(self._rows) - height))
        self.refresh()

    def _go_to(self, key: Hashable) -> None:
        if key != self._cursor:
            self._cursor = key
            self.post_message(self.Moved())
            self.redraw()
        self._into_view()

    def action_move(self, step: int) -> None:
        keys = self._keys()
        if self._cursor not in keys:
            self._scroll(step)
            return
        place = keys.index(self._cursor) + step
        if 0 <= place < len(keys):
            self._go_to(keys[place])
        else:
            self._scroll(step)

    def action_page(self, direction: int) -> None:
        self._scroll(direction * max(1, self.size.height - 2))

    def _scroll(self, lines: int) -> None:
        self._offset = max(0, min(self._offset + lines, len(self._rows) - self.size.height))
        self.refresh()

    def action_choose(self) -> None:
        if self._cursor is not None:
            self.post_message(self.Chosen())

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self._scroll(_WHEEL_LINES)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self._scroll(-_WHEEL_LINES)

    def on_click(self, event: Click) -> None:
        event.stop()
        number = self._offset + event.y
        key = self._rows[number][0] if number < len(self._rows) else None
        if key is None:
            return
        if key == self._cursor:
            self.action_choose()
        else:
            self._go_to(key)
