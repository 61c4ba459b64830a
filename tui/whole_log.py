"""The log of all attempts of a run, with times: scroll, search, copy.

Only the places of the lines are in memory. The lines on the screen are read from the files when
they are drawn, and a search reads the files in a thread.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.widgets import Input

from memtop.supervisor import holes, units
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.language import tr
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import Attempt, reading_ledger
from memtop.supervisor.run.record.output_log import OutputTimes
from memtop.tui.dashboard.log import mark_log_line, shown_line
from memtop.tui.line import MUTED, Line, line, plain
from memtop.tui.panel import RoleStyles
from memtop.tui.screen import Dashboard, FullScreen, KeyLine, named
from memtop.tui.store import Store

_READ_BYTES = 4 << 20
"""How much is read at one time to find where lines begin."""
_SEARCH_BYTES = 1 << 20
"""How much is searched at one time: meanwhile the dashboard cannot draw."""
_LINE_BYTES = 64 * 1024
"""Of a longer line (a progress bar, the rest of a hole) only an end is read."""
_POLL_SECONDS = 1.0
_MOST_COPIED = 64 * 1024
"""Characters: terminals take no more from OSC 52."""


class AttemptLog:
    """The output of one attempt: where its lines begin, and the lines themselves when asked."""

    def __init__(self, folder: RunFolder, attempt: Attempt) -> None:
        self.attempt = attempt
        self.path = folder.attempt(attempt.number) / "output.log"
        self._starts = array("q")
        """Where each line begins. A line that begins in a hole stands for the whole hole."""
        self._read = 0
        self._begins_line = True
        self._times = OutputTimes(self.path)

    def __len__(self) -> int:
        return len(self._starts)

    def extend(self) -> bool:
        """Find the lines of the next part of the file; whether there may be more. OSError."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            position = holes.data_after(descriptor, self._read)
            data = os.pread(descriptor, _READ_BYTES, position)
        finally:
            os.close(descriptor)
        if not data:
            return False
        if self._begins_line or position > self._read:
            self._starts.append(position)
        self._starts.extend(position + found.end() for found in re.finditer(b"\n", data))
        self._read, self._begins_line = position + len(data), data.endswith(b"\n")
        if self._begins_line:
            self._starts.pop()  # the next line has not begun
        self._times = OutputTimes(self.path)
        return len(data) == _READ_BYTES

    def line(self, number: int) -> str:
        """One line, as a terminal would show it. OSError."""
        start, end = self._starts[number], self._end(number)
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read(min(end - start, _LINE_BYTES))
            if end - start > _LINE_BYTES and (b"\r" in data or data.endswith(b"\0")):
                # A terminal shows what follows the last carriage return.
                file.seek(end - _LINE_BYTES)
                data = file.read(_LINE_BYTES)
        return shown_line(data.strip(b"\0\n"))  # a hole is read as zeros

    def time_of(self, number: int) -> float | None:
        """When the line was written at the latest, seconds since the epoch; None if unknown."""
        return self._times.at(self._end(number)) or self.attempt.ended

    def find(self, query: str) -> list[int]:
        """The lines that contain the text; letters of ASCII in any case. OSError."""
        wanted, found = query.encode(), set[int]()
        pattern = re.compile(re.escape(wanted), re.IGNORECASE)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            position = holes.data_after(descriptor, 0)
            while position < self._read and (data := os.pread(descriptor, _SEARCH_BYTES, position)):
                found |= {bisect_right(self._starts, position + match.start()) - 1 for match in pattern.finditer(data)}
                # A match may begin in one part and end in the next.
                step = len(data) if len(data) < _SEARCH_BYTES else len(data) - len(wanted) + 1
                position = holes.data_after(descriptor, position + step)
        finally:
            os.close(descriptor)
        return sorted(number for number in found if 0 <= number < len(self._starts))

    def _end(self, number: int) -> int:
        return self._starts[number + 1] if number + 1 < len(self._starts) else self._read


class Row(NamedTuple):
    """A row of the page: a line of an attempt's output, or the heading above or below it."""

    log: AttemptLog
    number: int
    """-1: the heading; the number of lines: how the attempt ended."""


class WholeLog(RoleStyles, ScrollView, can_focus=True):
    """The page. It stays at the end while it is there."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "go(0)", "Start", show=False),
        Binding("end", "go(1)", "End", show=False),
        Binding("up", "by(-1, 0)", "Above", show=False),
        Binding("down", "by(1, 0)", "Below", show=False),
        Binding("pageup", "by(1, -1)", "Page back", show=False),
        Binding("pagedown", "by(-1, 1)", "Page forward", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="whole-log")
        self.logs: list[AttemptLog] = []
        self.query_text = ""
        self.firsts: list[int] = []
        """The row of each attempt's heading."""
        self._rows = 0

    def measure(self) -> None:
        """Lay out the rows after logs have grown."""
        at_end = self.scroll_offset.y >= self.max_scroll_y
        sizes = [len(log) + 1 + (log.attempt.ended is not None) for log in self.logs]
        self.firsts = [0, *accumulate(sizes)][: len(sizes)]
        self._rows = sum(sizes)
        self.virtual_size = Size(self.size.width, self._rows)
        if at_end:
            self.to_row(self._rows)
        self.refresh()

    def row(self, number: int) -> Row:
        place = bisect_right(self.firsts, number) - 1
        return Row(self.logs[place], number - self.firsts[place] - 1)

    def to_row(self, number: int) -> None:
        self.scroll_to(y=max(0, number), animate=False, immediate=True, force=True)

    def to_attempt(self, direction: int) -> None:
        """Scroll to the heading of the next attempt (1) or the one before (-1)."""
        top = self.scroll_offset.y
        beyond = [first for first in self.firsts if (first - top) * direction > 0]
        if beyond:
            self.to_row(beyond[0] if direction > 0 else beyond[-1])

    def action_go(self, place: int) -> None:
        self.to_row(place * self._rows)

    def action_by(self, lines: int, pages: int) -> None:
        """Scroll; a page leaves one line of the page before."""
        self.to_row(self.scroll_offset.y + lines + pages * self.scrollable_content_region.height)

    def text_of(self, number: int, *, with_time: bool = True) -> Line:
        """What a row shows."""
        log, at = self.row(number)
        if at == -1:
            return line((f"── {beginning_of(log.attempt)} ──", "attempt"))
        if at == len(log):
            return line((f"── {ending_of(log.attempt)} ──", "attempt"))
        try:
            words = log.line(at)
        except OSError as error:
            return line((f"the log cannot be read: {error.strerror}", "bad"))
        marked = mark_log_line(words, self.query_text)
        if not with_time:
            return marked
        moment = log.time_of(at)
        clock = units.UNKNOWN if moment is None else time.strftime("%H:%M:%S", time.localtime(moment))
        return ((f"{clock:<10}", MUTED), *marked)

    def render_line(self, y: int) -> Strip:
        offset = self.scroll_offset
        width, blank = self.scrollable_content_region.width, self.role_style("text")
        number = y + offset.y
        if number >= self._rows:
            return Strip.blank(width, blank)
        strip = Strip([Segment(text, self.role_style(role)) for text, role in self.text_of(number)])
        return strip.crop_extend(0, width, blank).apply_offsets(0, number)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The text that the mouse has marked."""
        first = selection.start.y if selection.start is not None else 0
        last = selection.end.y if selection.end is not None else self._rows - 1
        rows = range(max(0, first), min(last, first + _MOST_COPIED, self._rows - 1) + 1)
        text = "\n".join(plain(self.text_of(number)) for number in rows)
        moved = Selection(
            None if selection.start is None else selection.start - (0, first),
            None if selection.end is None else selection.end - (0, first),
        )
        return moved.extract(text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def visible_text(self) -> str:
        """The lines on the screen, without their times."""
        top = self.scroll_offset.y
        rows = range(top, min(self._rows, top + self.scrollable_content_region.height))
        return "\n".join(plain(self.text_of(number, with_time=False)) for number in rows)


class WholeLogScreen(FullScreen):
    """The output of all attempts."""

    AUTO_FOCUS = "WholeLog"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,L", "leave", "Back", show=False),
        Binding("slash", "search", "Search", key_display="/", tooltip="Find text in all attempts; n and N go on"),
        Binding("n", "match(-1)", "Older match", show=False),
        Binding("N", "match(1)", "Newer match", show=False),
        Binding("y", "copy", "Copy", tooltip="Copy what the mouse has marked, or else the lines on the screen"),
        Binding("left", "attempt(-1)", "Attempt", key_display="←→", tooltip="To the beginning of an attempt"),
        Binding("right", "attempt(1)", "Next attempt", show=False),
    ]

    def __init__(self, dashboard: Dashboard, folder: Path) -> None:
        super().__init__(dashboard, id="whole-log-screen")
        self._folder = RunFolder(folder)
        self._matches: list[int] = []
        self._match: int | None = None

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield WholeLog()
        yield Input(id="whole-log-search", placeholder=tr("find in all attempts"), compact=True)
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.query_one(Input).display = False
        self.follow(self.dashboard, self.show_panels)
        self._read()

    @property
    def page(self) -> WholeLog:
        return self.query_one(WholeLog)

    def headline(self, store: Store) -> Line:
        return named("Log of {name}", self._folder.name)

    def hint(self, store: Store, width: int) -> Line:
        return line(("y copies through the terminal (OSC 52); / searches all attempts", MUTED))

    @work(exclusive=True, group="whole-log")
    async def _read(self) -> None:
        while True:
            try:
                grown = await asyncio.to_thread(self._extend)
            except (OSError, MemtopError) as error:
                self.say(str(error), "bad")
                return
            if grown and self.is_open:
                self.page.measure()
            await asyncio.sleep(_POLL_SECONDS)

    def _extend(self) -> bool:
        """Find new attempts and new lines; whether there are any."""
        page = self.page
        with reading_ledger(self._folder) as ledger:
            attempts = ledger.attempts() if ledger is not None else []
        known = {log.attempt.number: log for log in page.logs}
        logs, grown = [], len(attempts) != len(known)
        for attempt in attempts:
            log = known.get(attempt.number) or AttemptLog(self._folder, attempt)
            grown, log.attempt = grown or log.attempt != attempt, attempt
            before = len(log)
            while log.extend():
                pass
            grown = grown or len(log) != before
            logs.append(log)
        page.logs = logs
        return grown

    # --- keys -------------------------------------------------------------------------------------

    def action_attempt(self, direction: int) -> None:
        self.page.to_attempt(direction)

    def action_copy(self) -> None:
        marked = self.get_selected_text()
        text = (marked or self.page.visible_text())[:_MOST_COPIED]
        self.app.copy_to_clipboard(text)
        count = text.count("\n") + 1
        lines = f"{count} marked lines" if marked else f"{count} lines"
        self.say(f"copied {lines}; the terminal must allow OSC 52", "good")

    def action_search(self) -> None:
        search = self.query_one(Input)
        search.display = True
        search.focus()

    @on(Input.Submitted)
    def _submitted(self, message: Input.Submitted) -> None:
        self._close_search()
        self._search(message.value)

    @work(exclusive=True, group="whole-log-search")
    async def _search(self, query: str) -> None:
        page = self.page
        page.query_text, self._matches, self._match = query.casefold(), [], None
        if query:
            try:
                self._matches = await asyncio.to_thread(lambda: list(self._found(query)))
            except OSError as error:
                self.say(f"the log cannot be searched: {error.strerror}", "bad")
                return
        page.refresh()
        if self._matches:
            self._show_match(len(self._matches) - 1)
        elif query:
            self.say("not found in the log")

    def _found(self, query: str) -> Iterator[int]:
        # Logs that were found just now have no rows yet.
        for log, first in list(zip(self.page.logs, self.page.firsts, strict=False)):
            for number in log.find(query):
                yield first + 1 + number

    def action_match(self, direction: int) -> None:
        if self._match is not None:
            self._show_match(max(0, min(len(self._matches) - 1, self._match + direction)))

    def _show_match(self, place: int) -> None:
        self._match = place
        self.page.to_row(self._matches[place] - self.page.size.height // 2)
        self.say(f"match {place + 1} of {len(self._matches)}; n older, N newer")

    def action_leave(self) -> None:
        if self.query_one(Input).display:
            self._close_search()
        elif self.page.query_text:
            self._search("")
            self.clear_message()
        else:
            super().action_leave()

    def _close_search(self) -> None:
        search = self.query_one(Input)
        search.value = ""
        search.display = False
        self.page.focus()


def beginning_of(attempt: Attempt) -> str:
    """`attempt 2  2026-11-25 12:03:10  3 x 6 x 2, T 1792  out of memory`."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.started))
    settings = attempt.settings
    split = "" if settings is None else f"  {settings.split_text}, T {settings.seq_len}"
    return f"attempt {attempt.number}  {began}{split}  {attempt.reason}"


def ending_of(attempt: Attempt) -> str:
    """`attempt 2 failed at 12:41:07 after 00:38:00; update 1240`."""
    ended = attempt.ended or attempt.started
    clock, took = time.strftime("%H:%M:%S", time.localtime(ended)), units.duration(ended - attempt.started)
    words = f"attempt {attempt.number} {attempt.word or 'ended'} at {clock} after {took}"
    return words if attempt.updates is None else f"{words}; update {attempt.updates}"
