"""The log of the run: a panel that follows the end, scrolls and searches, and the reader of the
growing file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.segment import Segment
from textual import work
from textual.content import Content
from textual.events import MouseScrollDown, MouseScrollUp
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from memtop.supervisor import units
from memtop.supervisor.clean import clean
from memtop.supervisor.language import tr
from memtop.tui.line import MUTED, TEXT, Line, cut, foreign, from_cell
from memtop.tui.pace import Pace
from memtop.tui.panel import RoleStyles

LINES_KEPT = 5_000
_POLL_SECONDS = 0.5
_WHEEL_LINES = 3
_ALARMING = ("error", "out of memory", "outofmemory", "traceback", "killed")


class LogPanel(RoleStyles, ScrollView, can_focus=True):
    """Lines of text in a scrollable view."""

    def __init__(self, pace: Pace, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._pace = pace
        self._rows: list[str] = []
        self._unfinished = False
        self._widest = 0
        self._path: Path | None = None
        self.following = True
        self.query_text = ""

    def on_mount(self) -> None:
        self._retitle()

    def on_resize(self) -> None:
        if self.following:
            self._to_end()

    @property
    def rows(self) -> Sequence[str]:
        """All lines that are kept, oldest first."""
        return self._rows

    def follow_file(self, path: Path) -> None:
        """Show this file from now on. A restart of the run brings another file."""
        if path != self._path:
            self._path = path
            self._unfinished = False
            self._tail(LogTail(path))

    @work(exclusive=True, group="tail")
    async def _tail(self, tail: LogTail) -> None:
        failed = shown = ""
        while True:
            try:
                # Reading may take long on a network file system.
                rows = await asyncio.to_thread(tail.read)
            except OSError as error:
                rows = [] if str(error) == failed else [f"[memtop] {tr(f'the log cannot be read: {error}')}"]
                failed = str(error)
            if rows or tail.partial != shown:
                shown = tail.partial
                self.append(rows, shown)
            await asyncio.sleep(max(_POLL_SECONDS, self._pace.wait()))

    def append(self, rows: Sequence[str], unfinished: str = "") -> None:
        """Add lines at the end and drop the oldest beyond the limit.

        The next call replaces an unfinished line.
        """
        if self._unfinished:
            self._rows.pop()
        self._unfinished = bool(unfinished)
        self._rows += [*rows, unfinished] if unfinished else rows
        surplus = len(self._rows) - LINES_KEPT
        if surplus > 0:
            del self._rows[:surplus]
        self._widest = max(self._widest, cell_len(unfinished), *map(cell_len, rows))
        self.virtual_size = Size(self._widest, len(self._rows))
        if self.following:
            self._to_end()
        elif surplus > 0:
            # Keep the visible lines in place although lines above them were dropped.
            self._to_row(self.scroll_offset.y - surplus)
        self.refresh()

    def toggle_follow(self) -> bool:
        """Follow the end or stop following; returns whether it follows now."""
        self._set_following(not self.following)
        return self.following

    def page(self, direction: int) -> None:
        """Scroll by a page: -1 back, 1 forward. At the end, the log follows again."""
        target = self.scroll_offset.y + direction * max(1, self.scrollable_content_region.height - 1)
        self._to_row(target)
        self._set_following(direction > 0 and target >= self.max_scroll_y)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self._wheel(event, -1)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self._wheel(event, 1)

    def _wheel(self, event: MouseScrollUp | MouseScrollDown, direction: int) -> None:
        """Scroll, and stay there: the log follows again when the wheel reaches its end."""
        event.stop()
        event.prevent_default()
        target = self.scroll_offset.y + direction * _WHEEL_LINES
        self._to_row(target)
        self._set_following(direction > 0 and target >= self.max_scroll_y)

    def search(self, text: str) -> int:
        """Find text (ignoring case): show the newest match and return the number of matching
        lines.
        """
        self.query_text = text.casefold()
        found = self._matches()
        if found:
            self._show_row(found[-1])
        self._retitle()
        self.refresh()
        return len(found)

    def go_to_match(self, direction: int) -> None:
        """Go to the next match above (-1) or below (1) the middle of the view."""
        middle = self.scroll_offset.y + self.scrollable_content_region.height // 2
        found = self._matches()
        beyond = [m for m in found if (m - middle) * direction > 0]
        if beyond:
            self._show_row(beyond[0] if direction > 0 else beyond[-1])

    def render_line(self, y: int) -> Strip:
        offset = self.scroll_offset
        width = self.scrollable_content_region.width
        number = y + offset.y
        blank = self.role_style("text")
        if number >= len(self._rows):
            return Strip.blank(width, blank)
        spans = cut(from_cell(mark_log_line(self._rows[number], self.query_text), offset.x), width)
        strip = Strip([Segment(text, self.role_style(role)) for text, role in spans])
        return strip.crop_extend(0, width, blank)

    def _matches(self) -> list[int]:
        if not self.query_text:
            return []
        return [i for i, row in enumerate(self._rows) if self.query_text in row.casefold()]

    def _show_row(self, number: int) -> None:
        self._set_following(False)
        self._to_row(number - self.scrollable_content_region.height // 2)

    def _set_following(self, following: bool) -> None:
        self.following = following
        if following:
            self._to_end()
        self._retitle()

    def _to_end(self) -> None:
        self._to_row(len(self._rows))

    def _to_row(self, number: int) -> None:
        # force: right after the log has grown, there is no scroll bar yet that would allow
        # scrolling.
        self.scroll_to(y=max(0, number), animate=False, immediate=True, force=True)

    def _retitle(self) -> None:
        state = "▸ following" if self.following else "■ not following (l follows)"
        found = tr(f"{len(self._matches())} lines")
        searching = f"  /{self.query_text}: {found}" if self.query_text else ""
        # As content, because a string would be read as markup.
        self.border_title = Content(f"{tr('Log')}  {tr(state)}{searching}")


def marked(text: str, query: str) -> Line:
    """The text with the first place of the search text marked; nothing if it is not there."""
    if not query or query not in text.casefold():
        return ()
    start = text.casefold().index(query)
    end = start + len(query)
    return foreign((text[:start], TEXT), (text[start:end], "match"), (text[end:], TEXT))


def mark_log_line(text: str, query: str) -> Line:
    """A log line with a dimmed rank prefix, highlighted errors and the marked search text."""
    found = marked(text, query)
    if found:
        return found
    role = "bad" if any(word in text.casefold() for word in _ALARMING) else "text"
    if text.startswith("[") and "]" in text:
        cut = text.index("]") + 1
        return foreign((text[:cut], MUTED), (text[cut:], role))
    return foreign((text, role))


FIRST_BYTES = 256 * 1024
"""How much of an existing file's end is read first."""
_MOST_BYTES = 1024 * 1024
_MOST_BEHIND = 16 * 1024 * 1024
"""If more is unread, only its end is read: memtop removes the middle of a long log."""
LONGEST_LINE = 8 * 1024
"""Bytes kept of one line; a cut is marked with an ellipsis."""


class LogTail:
    """Returns the new lines of a file since the last `read`, and the unfinished line.

    A missing file has no lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._inode: int | None = None
        self._partial = b""

    def read(self) -> list[str]:
        """New complete lines, oldest first, free of control sequences.

        OSError if the file cannot be read.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            first = self._inode is None
            if found.st_ino != self._inode or found.st_size < self._position:
                # Another file of the same name, or the file was truncated.
                self._inode, self._partial = found.st_ino, b""
                self._position = max(0, found.st_size - FIRST_BYTES) if first else 0
            cut, left_out = first and self._position > 0, 0
            if found.st_size - self._position > _MOST_BEHIND:
                left_out = found.st_size - FIRST_BYTES - self._position
                cut, self._partial, self._position = True, b"", self._position + left_out
            file.seek(self._position)
            data = file.read(_MOST_BYTES)
        self._position += len(data)
        lines = (self._partial + data).split(b"\n")
        self._partial = _newest(lines.pop())
        if cut and lines:
            # Reading began in the middle of a line.
            del lines[0]
        notice = [f"[{tr(f'{units.size(left_out)} of output are not shown')}]"] if left_out else []
        return notice + [shown_line(raw) for raw in lines]

    @property
    def partial(self) -> str:
        """The unfinished last line: half a line, or a progress bar that is redrawn."""
        return shown_line(self._partial)


def _newest(line: bytes) -> bytes:
    """The part of an unfinished line to keep: after its last carriage return, with a limited
    length.
    """
    # A carriage return at the end draws nothing yet: more of this line or its end may follow.
    text = line.rstrip(b"\r")
    kept = text[text.rfind(b"\r") + 1 :][: LONGEST_LINE + 1]
    return kept + b"\r" if len(text) < len(line) else kept


def shown_line(line: bytes) -> str:
    """What a terminal would show of a line: the part after the last carriage return, cleaned."""
    text = line.rstrip(b"\r")
    text = text[text.rfind(b"\r") + 1 :]
    return clean(text[:LONGEST_LINE].decode("utf-8", "replace")) + ("…" if len(text) > LONGEST_LINE else "")
