"""The screen with all GPU processes: grouped by job, as a tree or flat; to sort, filter, search and
end them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.monitor.strays import NOT_YOURS, forbidden
from memtop.supervisor.monitor.strays import rows_of as gpu_rows
from memtop.supervisor.monitor.values import GpuProcess, why_incomplete
from memtop.tui.choices import order_of, order_text
from memtop.tui.line import MUTED, Line, fact, fit, join, join_fitting, line, spread, width_of
from memtop.tui.line_list import Entry, LineList, ListContent
from memtop.tui.panel import LinePanel
from memtop.tui.processes.details import ProcessScreen, show_environment
from memtop.tui.processes.filter import Filter, parse
from memtop.tui.processes.kill import begin_ending
from memtop.tui.processes.rows import Order, ProcessRow, ProcessView, RowKey, arranged, rows_of
from memtop.tui.processes.table import SORTABLE, columns_for, draw_row, heading, roles_in_words
from memtop.tui.screen import Dashboard, FullScreen, KeyLine
from memtop.tui.store import Holder, Store, holders
from memtop.tui.words import REPORTS, report_lines


class ProcessesScreen(FullScreen):
    """Rows from the dashboard's store.

    Their order is frozen while the user types or answers a question.
    """

    AUTO_FOCUS = "LineList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,o", "close", "Back", show=False),
        Binding("k", "end", "End…", tooltip="End the ticked processes, or the one under the cursor; asks first"),
        Binding("space", "tick", "Tick", key_display="space", tooltip="Choose a process, or all of a job"),
        Binding("t", "view", "View", tooltip="Grouped by job, as a tree, or flat"),
        Binding("f", "filter", "Filter", tooltip="user:bob gpu:1 vram>2g -job:old, or any words"),
        Binding("slash", "search", "Find", key_display="/", tooltip="Find text; n and N find more"),
        Binding("left", "sort(-1)", "Sort", key_display="←→", tooltip="Sort by the next column; or click its name"),
        Binding("right", "sort(1)", "Sort by the column to the right", show=False),
        Binding("i", "reverse", "Reverse", tooltip="Reverse the order"),
        Binding("e", "environment", "Env", tooltip="The environment variables of an own process"),
        Binding("z", "fold_all", "Fold", tooltip="Fold all jobs, or unfold them; Enter folds one"),
        Binding("n", "next(1)", "Next match", show=False),
        Binding("N", "next(-1)", "Previous match", show=False),
    ]

    def __init__(self, dashboard: Dashboard, *, filter_text: str = "") -> None:
        super().__init__(dashboard, id="processes-screen")
        self._store: Store = dashboard.store
        self._view = ProcessView(dashboard.choices["processes-view"])
        self._order = Order(*order_of(dashboard.choices["processes-sort"]))
        self._folded: set[str] = set()
        self.ticked: set[RowKey] = set()
        """The rows that were chosen to be ended."""
        self._filter = Filter()
        self._filter_text = filter_text
        self._problem = ""
        self._search = ""
        self._typing: str | None = None
        self._frozen: list[RowKey] | None = None
        self.rows: list[ProcessRow] = []
        """The rows that are shown, from the top."""
        self._total = 0
        self._applied_text = ""
        """The last text that was a valid filter: the rows match this one."""

    def compose(self) -> ComposeResult:
        yield self.title_panel()
        yield Input(id="processes-input", compact=True)
        yield LineList(self._draw_page, id="processes-table")
        yield self.message_panel()
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.query_one("#processes-input").display = False
        self._set_filter(self._filter_text)
        self.follow(self.dashboard, self._take)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("end", "tick"):
            return not self.dashboard.store.read_only
        return True

    # --- store -> rows ----------------------------------------------------------------------------

    def _take(self, store: Store) -> None:
        self._store = store
        if self.is_current or self._frozen is not None:
            self._show()

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self._show()

    def _show(self) -> None:
        if not self.is_open:
            return
        every = rows_of(self._store.machine)
        # A process on two GPUs has two rows.
        self._total = len({row.pid for row in every})
        self.ticked &= {row.key for row in every}
        kept = [row for row in every if self._filter.matches(row)]
        self.rows = arranged(kept, self._view, self._order, folded=self._folded, frozen=self._frozen)
        with self.app.batch_update():
            self.query_one(LineList).redraw()
            self.query_one(".title", LinePanel).show(self._store)
            self.show_message()

    def _draw_page(self, width: int) -> ListContent:
        columns = columns_for(width, self.rows)
        head, places = heading(columns, self._order, width)
        followed = self._store.followed.pids if self._store.followed is not None else frozenset()
        entries = [
            Entry(
                row.key,
                [draw_row(row, columns, ticked=row.key in self.ticked, followed=row.pid in followed, search=self._search)],
            )
            for row in self.rows
        ]
        return ListContent(entries, head, places)

    def headline(self, store: Store) -> Line:
        shown = len({row.pid for row in self.rows if row.process is not None})
        count = f"{shown} of {self._total}" if self._filter.terms else str(self._total)
        left = join((fact("GPU processes", count), fact("", self._view.value)))
        if self._applied_text:
            left = join((left, fact("filter", Verbatim(self._applied_text), "edge")))
        missing = why_incomplete(store.machine) if store.machine is not None else ["waiting for the first sample"]
        if missing:
            left = join((left, line((f"! {missing[0]}", "edge"))))
        elif not self._total:
            left = join((left, line(("no process uses a GPU", MUTED))))
        return left

    def headline_right(self, store: Store) -> Line:
        sums = [fact("ticked", str(len(self.ticked)))] if self.ticked else []
        sums += [line(("order frozen", "edge"))] if self._frozen is not None else []
        return join([*sums, line((store.label or "", "edge"))])

    def draw_message(self, store: Store, width: int, height: int) -> list[Line]:
        if self._problem:
            return [fit(line(("✗ ", "bad"), (self._problem, "bad")), width)]
        message = report_lines(*self._message, width) if self._message is not None else []
        if message and not self._is_report:
            return message
        row = self.row
        if row is None:
            return [*message, ()]
        where = self._where_words(row)
        return [*message, spread(self._row_words(row, width - width_of(where) - 2), where, width)]

    @property
    def _is_report(self) -> bool:
        """Whether the message is about an ending: it stays when the cursor moves."""
        return self._message is not None and self._message[1] in REPORTS

    def _where_words(self, row: ProcessRow) -> Line:
        """The cursor's position in a list that is longer than the screen."""
        if len(self.rows) <= self.query_one(LineList).room:
            return ()
        place = next((n for n, one in enumerate(self.rows, 1) if one.key == row.key), 0)
        return line((f"row {place} of {len(self.rows)}", MUTED))

    def _row_words(self, row: ProcessRow, width: int) -> Line:
        process = row.process
        if process is None:
            folds = "" if row.folded is None else "Enter unfolds it" if row.folded else "Enter folds it"
            words = (Verbatim(row.job_name), roles_in_words(row.job), folds)
            return join_fitting([line((one, MUTED)) for one in words], width)
        # The reason for every dash in the row under the cursor.
        why = [line((f"{name.replace('_', ' ')}: ", MUTED), (reason, MUTED)) for name, reason in process.unknown.items()]
        return join_fitting([line((process.reason or Verbatim(row.command), MUTED)), *why], width)

    @property
    def row(self) -> ProcessRow | None:
        """The row under the cursor."""
        key = self.query_one(LineList).cursor
        return next((row for row in self.rows if row.key == key), None)

    @on(LineList.Moved)
    def _moved(self) -> None:
        if not self._is_report:
            self._message = None
        self.show_message()

    # --- order ------------------------------------------------------------------------------------

    def action_view(self) -> None:
        views = list(ProcessView)
        self._view = views[(views.index(self._view) + 1) % len(views)]
        self.choose("processes-view", self._view.value)
        self._show()

    def action_sort(self, step: int) -> None:
        shown = [*(column.id for column in columns_for(self.size.width, self.rows)), SORTABLE[-1]]
        place = shown.index(self._order.column) if self._order.column in shown else 0
        self._sort_by(shown[(place + step) % len(shown)])

    @on(LineList.HeadingClicked)
    def _clicked(self, message: LineList.HeadingClicked) -> None:
        if message.column == self._order.column:
            self.action_reverse()
        else:
            self._sort_by(message.column)

    def _sort_by(self, column: str) -> None:
        # Numbers start with the largest, words with A.
        words = ("user", "container", "command", "pid", "gpu")
        self._put_in_order(Order(column, descending=column not in words))

    def action_reverse(self) -> None:
        self._put_in_order(Order(self._order.column, descending=not self._order.descending))

    def _put_in_order(self, order: Order) -> None:
        self._order = order
        self.choose("processes-sort", order_text(order.column, descending=order.descending))
        self._show()

    def action_fold_all(self) -> None:
        keys = {row.job.key for row in rows_of(self._store.machine) if row.job is not None}
        self._folded = set() if self._folded else keys
        self._show()

    # --- typing -----------------------------------------------------------------------------------

    def action_filter(self) -> None:
        self._open_input(
            "filter", self._filter_text, "user:bob gpu:1 kind:compute vram>2g is:stray -word   Enter keeps, Esc clears"
        )

    def action_search(self) -> None:
        self._open_input("search", "", "find in the list; Enter searches, Esc leaves")

    def _open_input(self, purpose: str, value: str, hint: str) -> None:
        self._typing = purpose
        self._freeze()
        box = self.query_one("#processes-input", Input)
        box.placeholder = tr(hint)
        box.value = value
        box.display = True
        box.focus()

    def _close_input(self) -> None:
        self._typing = None
        self.query_one("#processes-input", Input).display = False
        self.query_one(LineList).focus()
        self._thaw()

    @on(Input.Changed, "#processes-input")
    def _typed(self, message: Input.Changed) -> None:
        if self._typing == "filter":
            self._set_filter(message.value)

    @on(Input.Submitted, "#processes-input")
    def _submitted(self, message: Input.Submitted) -> None:
        purpose = self._typing
        if purpose == "filter" and self._problem:
            # Not a valid filter: the message line gives the reason, and the input stays open.
            return
        self._close_input()
        if purpose == "search":
            self._search = message.value.strip().casefold()
            self._show()
            if self._search:
                self._go_to_match(1, here=True)

    def _set_filter(self, text: str) -> None:
        found = parse(text)
        self._problem = found if isinstance(found, str) else ""
        self._filter_text = text.strip()
        if isinstance(found, Filter):
            # While the text is not a valid filter, the last valid one stays in use.
            self._filter, self._applied_text = found, text.strip()
        self._show()

    def action_next(self, step: int) -> None:
        self._go_to_match(step)

    def _go_to_match(self, step: int, *, here: bool = False) -> None:
        if not self._search:
            self.say("type / to find text first")
            return
        places = [n for n, row in enumerate(self.rows) if self._search in row.searchable]
        if not places:
            self.say(f"{self._search!r} is not in the list")
            return
        table = self.query_one(LineList)
        at = next((n for n, row in enumerate(self.rows) if row.key == table.cursor), 0)
        if here and at in places:
            return
        beyond = [n for n in places if (n - at) * step > 0]
        # After the last match comes the first one again.
        target = (beyond or places)[0 if step > 0 else -1]
        table.move_to(self.rows[target].key)

    def action_leave(self) -> None:
        if self._typing is not None:
            if self._typing == "filter":
                self._set_filter("")
            self._close_input()
        elif self._search:
            self._search = ""
            self._show()
        elif self.ticked:
            self.ticked.clear()
            self._show()
        elif self._filter_text:
            self._set_filter("")
        else:
            self.action_close()

    def action_close(self) -> None:
        self.dismiss(None)

    def _freeze(self) -> None:
        if self._is_report:
            self._message = None
        self._frozen = [row.key for row in self.rows]
        self._show()

    def _thaw(self) -> None:
        self._frozen = None
        self._show()

    # --- one row ----------------------------------------------------------------------------------

    @on(LineList.Chosen)
    def _chosen(self) -> None:
        row = self.row
        if row is None:
            return
        if row.process is None and row.job is not None:
            if row.folded is not None:
                self._folded ^= {row.job.key}
                self._show()
            return
        self.app.push_screen(ProcessScreen(self.dashboard, row))

    def action_environment(self) -> None:
        row = self.row
        if row is None or row.process is None:
            self.say("a job has no environment: choose one of its processes")
            return
        self._read_environment(row.process)

    @work(group="environment")
    async def _read_environment(self, process: GpuProcess) -> None:
        await show_environment(self.dashboard, process, self.say)

    # --- ending -----------------------------------------------------------------------------------

    def action_tick(self) -> None:
        row = self.row
        if row is None:
            return
        keys = [r.key for r in rows_of(self._store.machine) if self._belongs(r, row) and self._may_end(r)]
        if not keys:
            self.say(f"cannot be chosen: {self._why_not(row)}", "bad")
            return
        if self.ticked.issuperset(keys):
            self.ticked.difference_update(keys)
        else:
            self.ticked.update(keys)
        self._show()
        self.query_one(LineList).action_move(1)

    def _belongs(self, candidate: ProcessRow, chosen: ProcessRow) -> bool:
        """Whether both are rows of the same process (which ends on all its GPUs), or of the same
        job.
        """
        if chosen.process is None:
            return candidate.job is not None and chosen.job is not None and candidate.job.key == chosen.job.key
        return candidate.key[:3] == chosen.key[:3]

    def action_end(self) -> None:
        chosen = self._chosen_holders()
        if not chosen:
            row = self.row
            if row is not None:
                self.say(f"cannot be ended: {self._why_not(row)}", "bad")
            return
        self._end(chosen)

    def _chosen_holders(self) -> tuple[Holder, ...]:
        every = rows_of(self._store.machine)
        row = self.row
        if self.ticked:
            wanted: Iterable[ProcessRow] = (r for r in every if r.key in self.ticked)
        elif row is not None:
            wanted = (r for r in every if self._belongs(r, row))
        else:
            wanted = ()
        pids = {(r.key[1], r.key[2]) for r in wanted}
        found = holders(self._store.machine)
        mine = (h for h in found if h.process.choosable)
        return tuple(h for h in mine if (h.process.pid, h.process.started_ticks or h.process.started) in pids)

    def _end(self, chosen: tuple[Holder, ...]) -> None:
        def answered(yes: bool) -> None:
            if yes:
                self.ticked.clear()
            self._thaw()

        self._freeze()
        if not begin_ending(self.dashboard, self._store, chosen, self, answered):
            self._thaw()

    def _may_end(self, row: ProcessRow) -> bool:
        return row.pid not in self._forbidden() and row.process is not None

    def _why_not(self, row: ProcessRow) -> str:
        if row.process is None:
            return f"none of {row.job_name}'s processes is yours to end"
        return self._forbidden().get(row.pid, NOT_YOURS)

    def _forbidden(self) -> Mapping[int, str]:
        return {} if self._store.machine is None else forbidden(gpu_rows(self._store.machine))
