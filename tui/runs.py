"""The screen with all runs: of the folder, and all that live on the machine; to sort, filter, open,
resume, compare, report, export and queue."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from memtop.supervisor import wire
from memtop.supervisor.clean import clean
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.run.notices import targets_of
from memtop.supervisor.run.queue import REVIVE_SECONDS, begin_next, revive_queued, spec_like
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ownership import why_not_own
from memtop.supervisor.run.runs import (
    COLUMNS,
    Placed,
    RunRow,
    living_elsewhere,
    placed,
    row_of,
    run_folders,
    stamp_of,
    with_turns,
)
from memtop.supervisor.run.starting import free_name, start_run
from memtop.supervisor.wire import Change, Phase
from memtop.tui.choices import order_of, order_text
from memtop.tui.line import MUTED, STRONG, TEXT, Heading, Line, Span, fact, fit, join, join_fitting, line
from memtop.tui.line_list import Entry, LineList, ListContent
from memtop.tui.panel import LinePanel
from memtop.tui.queue import QueueDialog
from memtop.tui.restart_own import where_own_resumes, why_complete
from memtop.tui.restart_plan import nothing_left, where_it_resumes
from memtop.tui.screen import ConfirmDialog, Dashboard, FullScreen, KeyLine
from memtop.tui.store import Store

_READ_SECONDS = 2.0
_AT_ONCE = 20
"""Runs that are read before the list is drawn again."""
_MARK = 3
"""Cells for the cursor and the tick."""
_BEHIND = 2
"""Cells behind every column."""
_STATES = {
    Phase.FINISHED: "good",
    Phase.FAILED: "bad",
    Phase.TRAINING: "accent",
    Phase.RESTARTING: "edge",
    Phase.QUEUED: "edge",
}


class RunsScreen(FullScreen):
    """Reads the runs in a thread: the living ones again and again, the others once."""

    AUTO_FOCUS = "LineList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,a", "close", "Back", show=False),
        Binding("enter", "open", "Open", key_display="Enter", tooltip="Show this run; a run that is over shows how it ended"),
        Binding("r", "resume", "Resume…", tooltip="Go on with a run that is over, or begin one that waits; asks first"),
        Binding("u", "queue", "Queue…", tooltip="A new run like this one, after a run or when the GPUs are free"),
        Binding("n", "next", "Next", tooltip="The waiting run begins before the other waiting runs"),
        Binding("space", "tick", "Tick", key_display="space", tooltip="Choose a run to compare"),
        Binding("v", "compare", "Compare", tooltip="Lay the curves of the ticked runs over each other"),
        Binding("w", "report", "Report", tooltip="Write the ticked runs, or this one, as HTML pages into the present folder"),
        Binding("x", "export", "Export…", tooltip="Write the trained model in Hugging Face's format; asks first"),
        Binding("slash,f", "filter", "Filter", key_display="/", tooltip="Words that the name, state or program must have"),
        Binding("left", "sort(-1)", "Sort", key_display="←→", tooltip="Sort by the next column; or click its name"),
        Binding("right", "sort(1)", "Sort by the column to the right", show=False),
        Binding("i", "reverse", "Reverse", tooltip="Reverse the order"),
    ]

    def __init__(self, dashboard: Dashboard, runs_dir: Path, *, is_first: bool = False) -> None:
        super().__init__(dashboard, id="runs-screen")
        self._runs_dir = runs_dir
        self._is_first = is_first
        """The program was started with this screen: its key for back ends it."""
        self._rows: dict[Path, RunRow] = {}
        self._ticked: set[Path] = set()
        self._words = ""
        self._column, self._descending = order_of(dashboard.choices["runs-sort"])
        self._is_read = False
        self._reading = False
        self._placed_at: Path | None = None
        """Where the screen itself has put the cursor."""

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield Input(
            id="runs-input", compact=True, placeholder=tr("words of the name, state or program; Enter keeps, Esc clears")
        )
        yield LineList(self._draw_page, id="runs-list")
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.query_one("#runs-input").display = False
        self.set_interval(_READ_SECONDS, self._read)
        self.set_interval(REVIVE_SECONDS, self._revive)
        self._revive()
        self._read()
        self.show_panels(self.dashboard.store)

    # --- what there is ----------------------------------------------------------------------------

    @work(group="runs-revive")
    async def _revive(self) -> None:
        """Runs that wait begin although all supervisors were killed."""
        if self.dashboard.store.read_only:
            return
        if await asyncio.to_thread(revive_queued, self._runs_dir):
            self._read()

    @work(group="runs")
    async def _read(self) -> None:
        if self._reading:
            return
        self._reading = True
        try:
            folders = await asyncio.to_thread(_folders, self._runs_dir)
            gone = self._rows.keys() - {folder.path for folder in folders}
            for path in gone:
                del self._rows[path]
            # The newest first: they are at the top.
            wanted = await asyncio.to_thread(lambda: [one for one in reversed(folders) if _changes(self._rows.get(one.path))])
            for first in range(0, len(wanted), _AT_ONCE):
                part = wanted[first : first + _AT_ONCE]
                rows = await asyncio.to_thread(self._rows_of, part)
                known = self._rows | {row.folder.path: row for row in rows}
                self._rows = {row.folder.path: row for row in with_turns(known.values())}
                self._show()
                self._place_cursor()
            self._is_read = True
        except MemtopError as error:
            self.say(str(error), "bad")
        finally:
            self._reading = False
        self._show()

    def _place_cursor(self) -> None:
        """While the runs are read for the first time: on the run one came from, else on the first
        one of this folder, unless the user has moved the cursor."""
        page = self.query_one(LineList) if self.is_open else None
        if self._is_read or page is None or self._placed_at not in (None, page.cursor):
            return
        run = self.dashboard.store.run
        shown = [Path(run.folder)] if run is not None and Path(run.folder) in self._rows else []
        shown += [row.folder.path for row in self.rows if not row.elsewhere]
        if shown:
            page.move_to(shown[0])
            self._placed_at = shown[0]

    def _rows_of(self, folders: Iterable[RunFolder]) -> list[RunRow]:
        here = self._runs_dir.absolute()
        return [row_of(folder)._replace(elsewhere=folder.path.parent != here) for folder in folders]

    @property
    def rows(self) -> list[RunRow]:
        """The rows that are shown, from the top."""
        words = self._words.casefold().split()
        kept = [row for row in self._rows.values() if all(word in _searchable(row) for word in words)]
        key = next(column.key for column in COLUMNS if column.id == self._column)
        kept.sort(key=lambda row: row.name)
        known = [row for row in kept if key(row) is not None]
        # Unknown values are last in both directions.
        return [*sorted(known, key=key, reverse=self._descending), *(row for row in kept if key(row) is None)]

    @property
    def row(self) -> RunRow | None:
        """The row under the cursor."""
        path = self.query_one(LineList).cursor
        return self._rows.get(path) if isinstance(path, Path) else None

    # --- how it looks -----------------------------------------------------------------------------

    def _show(self) -> None:
        if self.is_open:
            self.query_one(LineList).redraw()
            self.query_one(".title", LinePanel).show(self.dashboard.store)
            self.show_message()

    def headline(self, store: Store) -> Line:
        shown, every = len(self.rows), len(self._rows)
        left = fact("Runs", str(every) if shown == every else f"{shown} of {every}")
        if self._words:
            left = join((left, fact("filter", Verbatim(self._words), "edge")))
        if not every:
            words = f"no runs in {self._runs_dir}: memtop train starts one" if self._is_read else "reading the runs"
            left = join((left, line((words, MUTED))))
        return left

    def headline_right(self, store: Store) -> Line:
        return fact("ticked", str(len(self._ticked))) if self._ticked else ()

    def hint(self, store: Store, width: int) -> Line:
        row = self.row
        if row is None:
            return ()
        why = row.error or (row.run.reason if row.run is not None else None) or ""
        parts = [line((words, MUTED)) for words in (why, Verbatim(_short(row.folder.path))) if words]
        return join_fitting(parts, width) or fit(parts[0], width)

    def _draw_page(self, width: int) -> ListContent:
        rows, now = self.rows, time.time()
        columns = placed(rows, now, width - _MARK - _BEHIND)
        head, places = self._heading(columns)
        entries = [
            Entry(row.folder.path, [_line_of(row, columns, now, ticked=row.folder.path in self._ticked)]) for row in rows
        ]
        return ListContent(entries, head, places)

    def _heading(self, columns: Sequence[Placed]) -> tuple[Line, list[Heading]]:
        spans: list[Span] = [(" " * _MARK, TEXT)]
        places, at = [], _MARK
        for column, width in columns:
            sorted_by = column.id == self._column
            name = column.title + (("▾" if self._descending else "▴") if sorted_by else "")
            # The arrow takes the blank before the next column.
            padded = Placed(column, width + sorted_by).aligned(name)
            spans.append((padded + " " * (2 - sorted_by), "heading" if sorted_by else MUTED))
            places.append(Heading(column.id, at, at + width + 2))
            at += width + 2
        return tuple(spans), places

    # --- order and filter -------------------------------------------------------------------------

    def action_sort(self, step: int) -> None:
        shown = [column.id for column, _ in placed(self.rows, time.time(), self.size.width - _MARK - _BEHIND)]
        place = shown.index(self._column) if self._column in shown else 0
        self._sort_by(shown[(place + step) % len(shown)])

    @on(LineList.HeadingClicked)
    def _clicked(self, message: LineList.HeadingClicked) -> None:
        if message.column == self._column:
            self.action_reverse()
        else:
            self._sort_by(message.column)

    def _sort_by(self, column: str) -> None:
        self._put_in_order(column, column not in ("name", "state", "program"))

    def action_reverse(self) -> None:
        self._put_in_order(self._column, not self._descending)

    def _put_in_order(self, column: str, descending: bool) -> None:
        self._column, self._descending = column, descending
        self.choose("runs-sort", order_text(column, descending=descending))
        self._show()

    def action_filter(self) -> None:
        box = self.query_one("#runs-input", Input)
        box.display = True
        box.value = self._words
        box.focus()

    @on(Input.Changed, "#runs-input")
    def _typed(self, message: Input.Changed) -> None:
        self._words = message.value.strip()
        self._show()

    @on(Input.Submitted, "#runs-input")
    def _typed_all(self) -> None:
        self.query_one("#runs-input").display = False
        self.query_one(LineList).focus()

    def action_leave(self) -> None:
        if self.query_one("#runs-input").display or self._words:
            self._words = ""
            self._typed_all()
            self._show()
        elif self._ticked:
            self._ticked.clear()
            self._show()
        else:
            self.dismiss(None)

    def action_close(self) -> None:
        if self._is_first:
            self.dashboard.leave()
        else:
            self.dismiss(None)

    @on(LineList.Moved)
    def _moved(self) -> None:
        self.clear_message()

    # --- what can be done -------------------------------------------------------------------------

    @on(LineList.Chosen)
    def action_open(self) -> None:
        row = self.row
        if row is None:
            return
        if row.run is None:
            self.say(f"{row.name}: {row.error}", "bad")
        elif self.dashboard.store.read_only or not self._refused(row):
            self.dashboard.open_run(row.folder.path)

    def _refused(self, row: RunRow) -> bool:
        """Say why nothing can be done with another user's run; False for an own one."""
        why = why_not_own(row.folder.path)
        if why is not None:
            self.say(why, "bad")
        return why is not None

    def _changeable(self) -> RunRow | None:
        """The row under the cursor if its run may be changed from here; otherwise say why not."""
        row = self.row
        if row is None or row.run is None or self._refused(row):
            return None
        if self.dashboard.store.read_only:
            self.say("read-only: nothing can be changed from here")
            return None
        return row

    def action_tick(self) -> None:
        row = self.row
        if row is not None:
            self._ticked ^= {row.folder.path}
            self._show()
            self.query_one(LineList).action_move(1)

    def action_compare(self) -> None:
        from memtop.tui.metrics.screen import MetricsScreen

        row = self.row
        chosen = [one.folder.path for one in self.rows if one.folder.path in self._ticked]
        if not chosen and row is not None:
            chosen = [row.folder.path]
        if chosen:
            self.app.push_screen(MetricsScreen(self.dashboard, chosen))

    @work(group="runs-action")
    async def action_resume(self) -> None:
        row = self._changeable()
        if row is None or row.run is None:
            return
        waits = row.run.state is Phase.QUEUED
        if row.run.alive or not (row.run.state.final or waits):
            self.say(f"{row.name} is {row.run.word}: there is nothing to resume")
            return
        own = row.run.settings is None
        if (complete := why_complete(row.run) if own else nothing_left(row.run, row.run.checkpoint)) is not None:
            self.say(complete)
            return
        where = where_own_resumes(row.run) if own else where_it_resumes(row.run)
        lines = [f"{clean(row.name)}, with its last settings: {where}."]
        title, word = ("Begin a waiting run", "Begin now") if waits else ("Resume a run", "Resume")
        if waits:
            lines = [f"{clean(row.name)} waits no longer and begins at once, whatever else runs."]
        if not await self.app.push_screen_wait(ConfirmDialog(title, lines, confirm=word)):
            return
        if waits:
            await self._memtop(row, "restart", row.folder.path, "--detach")
            self._read()
        else:
            await self._resume(row)

    async def _resume(self, row: RunRow) -> None:
        from memtop.tui.run_feed import resume

        async for answer in resume(row.folder.path, wire.Restart(id=1, change=Change())):
            kinds = {wire.Outcome.ACCEPTED: "busy", wire.Outcome.DONE: "good"}
            self.say(f"{row.name}: {answer.message}", kinds.get(answer.outcome, "failed"))
        self._rows.pop(row.folder.path, None)
        self._read()

    @work(group="runs-action")
    async def action_queue(self) -> None:
        row = self._changeable()
        if row is None or row.run is None:
            return
        living = [one.run for one in self.rows if one.run is not None and not one.run.state.final]
        # A run that goes on is the one to wait for; then the newest.
        living.sort(key=lambda run: (run.folder != str(row.folder.path), -run.created))
        runs_dir = row.folder.path.parent
        name = await asyncio.to_thread(free_name, runs_dir, _stem(row.folder.path))
        try:
            then, told = row.folder.spec().then, targets_of(row.folder)
        except MemtopError as error:
            self.say(str(error), "bad")
            return
        wanted = await self.app.push_screen_wait(QueueDialog(row.run, name, living, then=then, told=len(told)))
        if wanted is None:
            return
        try:
            spec = spec_like(row.folder, wanted.name, wanted.settings, wanted.after)
            await asyncio.to_thread(start_run, runs_dir, spec, notify=told, like=row.folder)
        except MemtopError as error:
            self.say(f"{wanted.name}: {error}", "bad")
            return
        self.say(f"{wanted.name}: it waits; memtop stop {wanted.name} takes it back", "good")
        self._read()

    @work(group="runs-action")
    async def action_next(self) -> None:
        row = self._changeable()
        if row is None:
            return
        try:
            self.say(await asyncio.to_thread(begin_next, row.folder), "good")
        except MemtopError as error:
            self.say(str(error), "bad")

    @work(group="runs-action")
    async def action_report(self) -> None:
        ticked = [row for row in self.rows if row.folder.path in self._ticked]
        chosen = ticked or ([] if self.row is None else [self.row])
        pages = {f"{row.name}.html": row for row in chosen if row.run is not None}
        if not pages or self._writes_nothing():
            return
        if len(pages) < len(chosen):
            self.say("two of the ticked runs have the same name, or one is not readable: report them one by one", "bad")
            return
        for page, row in pages.items():
            if not await self._memtop(row, "report", row.folder.path, "--html", Path(page)):
                return
        if len(pages) > 1:
            self.say(f"{len(pages)} reports written: {', '.join(pages)}", "good")

    @work(group="runs-action")
    async def action_export(self) -> None:
        row = self.row
        if row is None or row.run is None or self._refused(row) or self._writes_nothing():
            return
        place = Path.cwd() / f"{row.name}-model"
        lines = [f"The model of {clean(row.name)} is written to", Verbatim(clean(str(place)))]
        if await self.app.push_screen_wait(ConfirmDialog("Export a model", lines, confirm="Export")):
            await self._memtop(row, "export", row.folder.path, place, into=_short(place))

    def _writes_nothing(self) -> bool:
        """Say why no file is written; False if files may be written."""
        if self.dashboard.only_shown:
            self.say("read-only: a browser writes no files here")
        return self.dashboard.only_shown

    async def _memtop(self, row: RunRow, *arguments: str | Path, into: str | None = None) -> bool:
        """Run a command of memtop and show its last line, and first the folder `into` which it has
        written; return success."""
        self.say(f"{row.name}: {arguments[0]} is running", "busy")
        command = [sys.executable, "-m", "memtop", *map(str, arguments)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        words = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
        last = words[-1].removeprefix("memtop: ")
        if into is not None and not done.returncode:
            last = f"written to {into}: {last}"
        self.say(last, "failed" if done.returncode else "good")
        return not done.returncode


def _stem(path: Path) -> str:
    """The name without the number that makes it another one: `first-run` of `first-run-2`."""
    stem = re.sub(r"-\d+$", "", path.name)
    return stem if path.with_name(stem).exists() else path.name


def _short(path: Path) -> str:
    """The path from the present folder, if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _folders(runs_dir: Path) -> list[RunFolder]:
    return [*living_elsewhere(runs_dir), *run_folders(runs_dir)]


def _changes(row: RunRow | None) -> bool:
    """Whether a run must be read again. One that is over may have been restarted since."""
    return row is None or row.run is None or row.run.alive or not row.run.state.final or row.stamp != stamp_of(row.folder)


def _searchable(row: RunRow) -> str:
    state = "unreadable" if row.run is None else row.run.word
    return f"{row.name} {state} {tr(state)} {row.program or ''}".casefold()


def _line_of(row: RunRow, columns: Iterable[Placed], now: float, *, ticked: bool) -> Line:
    spans: list[Span] = [(" ✓ " if ticked else "   ", "accent")]
    for one in columns:
        role = TEXT
        if one.column.id == "name":
            role = STRONG
        elif one.column.id == "state":
            role = "bad" if row.run is None else _STATES.get(row.run.state, TEXT)
        spans.append((f"{one.cell(row, now)}  ", role))
    return tuple(spans)
