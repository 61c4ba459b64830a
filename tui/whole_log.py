"""The log of all attempts of a run, with times and with the run's events: scroll, search, copy.

The lines on the screen are read from the files when they are drawn, and a search reads the files in
a thread.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
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

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import in_words
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.language import tr
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import Attempt, reading_ledger
from memtop.supervisor.wire import Event
from memtop.tui.attempt_log import AttemptLog, Section
from memtop.tui.dashboard.events import event_look
from memtop.tui.dashboard.log import mark_log_line, marked
from memtop.tui.line import MUTED, Line, cut, foreign, from_cell, line, plain, width_of
from memtop.tui.panel import RoleStyles
from memtop.tui.screen import Dashboard, FullScreen, KeyLine, named
from memtop.tui.store import Store

_POLL_SECONDS = 1.0
_MOST_COPIED = 64 * 1024
"""Characters: terminals take no more from OSC 52."""
_MOST_EVENTS = 10_000
"""The newest events, which are shown."""
_EVENT = "◆"


class Row(NamedTuple):
    """A row of the page."""

    log: AttemptLog
    of: int | Event
    """See `Section`."""


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
        self.events: list[Event] = []
        self.sections: list[Section] = []
        self.firsts: list[int] = []
        """The first row of each section."""
        self._rows = 0
        self._follows = True
        """The page is at its end, and stays there."""
        self._aside = 0
        """How many cells the lines are scrolled sideways."""

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._follows = self.scroll_offset.y >= self.max_scroll_y

    def on_resize(self) -> None:
        if self._follows:
            self.to_row(self._rows)

    def measure(self) -> None:
        """Lay out the rows after logs have grown."""
        self.sections = sections_of(self.logs, self.events, self.sections)
        sizes = list(map(len, self.sections))
        self.firsts = [0, *accumulate(sizes)][: len(sizes)]
        self._rows = sum(sizes)
        self.virtual_size = Size(self.size.width, self._rows)
        if self._follows:
            self.to_row(self._rows)
        self.refresh()

    def number_of(self, row: Row) -> int | None:
        """Where a row is now: events may have come above it. None if its log is no longer shown."""
        place = next((n for n, section in enumerate(self.sections) if section.log is row.log), None)
        return None if place is None else self.firsts[place] + self.sections[place].offset(row.of)

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

    def sideways(self, direction: int) -> None:
        """Scroll the lines by half the width: 1 to their ends, as far as one on the screen goes, -1
        back."""
        width = self.scrollable_content_region.width
        step = max(1, width // 2)
        longest = max((width_of(self.text_of(number)) for number in self._visible()), default=0)
        if direction < 0 or longest - self._aside > width:
            # Less than what `cut` leaves of a line.
            self._aside = max(0, self._aside + direction * step)
            self.refresh()

    def _visible(self) -> range:
        """The rows on the screen."""
        top = self.scroll_offset.y
        return range(top, min(self._rows, top + self.scrollable_content_region.height))

    def text_of(self, number: int, *, with_time: bool = True) -> Line:
        """What a row shows."""
        place = bisect_right(self.firsts, number) - 1
        section = self.sections[place]
        log, at = section.log, section.at(number - self.firsts[place])
        if isinstance(at, Event):
            return self._text_of_event(at, with_time=with_time)
        if at == -1:
            return _framed(*beginning_of(log.attempt))
        if at == section.lines:
            return _framed(ending_of(log.attempt))
        try:
            words = log.line(at)
        except OSError as error:
            return line((f"the log cannot be read: {error.strerror}", "bad"))
        found = mark_log_line(words, self.query_text)
        return (*_clock(log.time_of(at)), *found) if with_time else found

    def _text_of_event(self, event: Event, *, with_time: bool) -> Line:
        words = tr(in_words(event.message))
        found = marked(words, self.query_text) or foreign((words, event_look(event)[1]))
        return (*(_clock(event.time) if with_time else ()), (f"{_EVENT} ", "accent"), *found)

    def render_line(self, y: int) -> Strip:
        offset = self.scroll_offset
        width, blank = self.scrollable_content_region.width, self.role_style("text")
        number = y + offset.y
        if number >= self._rows:
            return Strip.blank(width, blank)
        spans = cut(from_cell(self.text_of(number), self._aside), width)
        strip = Strip([Segment(text, self.role_style(role)) for text, role in spans])
        return strip.crop_extend(0, width, blank).apply_offsets(self._aside, number)

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
        return "\n".join(plain(self.text_of(number, with_time=False)) for number in self._visible())


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
        Binding("less_than_sign", "sideways(-1)", "Sideways", key_display="<>", tooltip="Scroll lines that are too long"),
        Binding("greater_than_sign", "sideways(1)", "To the ends", show=False),
    ]

    def __init__(self, dashboard: Dashboard, folder: Path) -> None:
        super().__init__(dashboard, id="whole-log-screen")
        self.page = WholeLog()
        self._folder = RunFolder(folder)
        self._matches: list[Row] = []
        self._match: int | None = None

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield self.page
        yield Input(id="whole-log-search", placeholder=tr("find in all attempts"), compact=True)
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.query_one(Input).display = False
        self.follow(self.dashboard, self.show_panels)
        self._read()

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
            before = page.events
            if is_another := _of_another_run(known, attempts):
                known, before = {}, []
            newest = before[-1].id if before else 0
            events = ledger.events(_MOST_EVENTS, after=newest) if ledger is not None and attempts else []
            # The trainer writes these into its output, too.
            events = [event for event in events if event.kind != "memory"]
        logs, grown = [], is_another or len(attempts) != len(known) or bool(events)
        for attempt in attempts:
            log = known.get(attempt.number) or AttemptLog(self._folder, attempt)
            grown, log.attempt = grown or log.attempt != attempt, attempt
            lines = len(log)
            while log.extend():
                pass
            grown = grown or len(log) != lines
            logs.append(log)
        page.logs, page.events = logs, [*before, *events][-_MOST_EVENTS:]
        return grown

    # --- keys -------------------------------------------------------------------------------------

    def action_attempt(self, direction: int) -> None:
        self.page.to_attempt(direction)

    def action_sideways(self, direction: int) -> None:
        self.page.sideways(direction)

    def action_copy(self) -> None:
        chosen = self.get_selected_text()
        text = (chosen or self.page.visible_text())[:_MOST_COPIED]
        self.app.copy_to_clipboard(text)
        count = text.count("\n") + 1
        lines = f"{count} marked lines" if chosen else f"{count} lines"
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
        if not self.is_open:
            return
        page.refresh()
        if self._matches:
            self._show_match(len(self._matches) - 1)
        elif query:
            self.say("not found in the log")

    def _found(self, query: str) -> Iterator[Row]:
        for section in self.page.sections:
            # Lines that have come since have no rows yet.
            found: list[int | Event] = [number for number in section.log.find(query) if number < section.lines]
            found += [event for event in section.events if query.casefold() in _searchable(event)]
            yield from (Row(section.log, of) for of in sorted(found, key=section.offset))

    def action_match(self, direction: int) -> None:
        if self._match is not None:
            self._show_match(max(0, min(len(self._matches) - 1, self._match + direction)))

    def _show_match(self, place: int) -> None:
        number = self.page.number_of(self._matches[place])
        if number is None:
            self._matches, self._match = [], None
            self.say("a new run has taken the place of this one: search again")
            return
        self._match = place
        self.page.to_row(number - self.page.size.height // 2)
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


def _of_another_run(known: Mapping[int, AttemptLog], attempts: Iterable[Attempt]) -> bool:
    """Whether these are not the attempts of the known logs, and later ones."""
    began = {attempt.number: attempt.started for attempt in attempts}
    return any(began.get(number) != log.attempt.started for number, log in known.items())


def sections_of(logs: Sequence[AttemptLog], events: Iterable[Event], before: Sequence[Section] = ()) -> list[Section]:
    """The sections of the page. An event stands in that of its attempt.

    `before`: those of the last time; one that has not changed stays.
    """
    numbers = [log.attempt.number for log in logs]
    of_each: list[list[Event]] = [[] for _ in logs]
    for event in events if logs else ():
        # An event from before the first attempt has the number 0.
        of_each[max(0, bisect_right(numbers, event.attempt) - 1)].append(event)
    return [
        old if old is not None and old.is_of(log, found) else Section(log, found)
        for log, found, old in zip_longest(logs, of_each, before[: len(logs)])
    ]


def _clock(moment: float | None) -> Line:
    clock = units.UNKNOWN if moment is None else time.strftime("%H:%M:%S", time.localtime(moment))
    return ((f"{clock:<10}", MUTED),)


def _searchable(event: Event) -> str:
    words = in_words(event.message)
    return f"{_EVENT} {tr(words)}\n{words}".casefold()


def _framed(*parts: str) -> Line:
    """A line of its own for these texts, each translated by itself."""
    return line(("── ", "attempt"), *((part, "attempt") for part in parts), (" ──", "attempt"))


def beginning_of(attempt: Attempt) -> tuple[str, str, str]:
    """`attempt 2`, `  2026-11-25 12:03:10  3 x 6 x 2, T 1792  `, and why it began."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.started))
    settings = attempt.settings
    split = "" if settings is None else f"  {settings.split_text}, T {settings.seq_len}"
    return f"attempt {attempt.number}", f"  {began}{split}  ", in_words(attempt.reason)


def ending_of(attempt: Attempt) -> str:
    """`attempt 2 failed at 12:41:07 after 00:38:00; update 1240`."""
    ended = attempt.ended or attempt.started
    clock, took = time.strftime("%H:%M:%S", time.localtime(ended)), units.duration(ended - attempt.started)
    words = f"attempt {attempt.number} {attempt.word or 'ended'} at {clock} after {took}"
    return words if attempt.updates is None else f"{words}; update {attempt.updates}"
