"""All GPU processes on a screen of their own: grouped by job, as a tree or flat; sorted, filtered, searched, ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.widgets import Input

from memtop.supervisor.monitor.snapshots import why_incomplete
from memtop.supervisor.monitor.strays import NOT_YOURS, forbidden
from memtop.supervisor.monitor.strays import rows_of as gpu_rows
from memtop.supervisor.monitor.values import GpuProcess
from memtop.tui.full import FullScreen
from memtop.tui.key_line import KeyLine
from memtop.tui.line import MUTED, Line, fact, fit, join, join_fitting, line, spread, width_of
from memtop.tui.line_table import LineTable
from memtop.tui.panel import LinePanel
from memtop.tui.processes.filter import Filter, parse
from memtop.tui.processes.rows import Order, Row, RowKey, View, arranged, rows_of
from memtop.tui.processes.table import SORTABLE, columns_for, draw_row, heading, roles_in_words
from memtop.tui.report import REPORTS, report_lines
from memtop.tui.store import Holder, Store, holders

if TYPE_CHECKING:
    from memtop.tui.dashboard.screen import DashboardScreen

_VIEWS = (View.JOBS, View.TREE, View.FLAT)


class ProcessesScreen(FullScreen):
    """Rows from the dashboard's store. Its order stands still while somebody types or answers."""

    AUTO_FOCUS = "LineTable"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Back", show=False),
        Binding("q,o", "close", "Back", show=False),
        Binding("k", "end", "End…", tooltip="End the ticked processes, or the one under the cursor; asks first"),
        Binding("space", "tick", "Tick", key_display="space", tooltip="Choose a process, or all of a job"),
        Binding("t", "view", "View", tooltip="Grouped by job, as a tree, or flat"),
        Binding("f", "filter", "Filter", tooltip="user:bob gpu:1 vram>2g -job:old, or any words"),
        Binding("slash", "search", "Find", key_display="/", tooltip="Find text; n and N go on"),
        Binding("left", "sort(-1)", "Sort", key_display="←→", tooltip="Sort by the next column; or click its name"),
        Binding("right", "sort(1)", "Sort by the column to the right", show=False),
        Binding("i", "reverse", "Reverse", tooltip="Reverse the order"),
        Binding("e", "environment", "Env", tooltip="The environment variables of an own process"),
        Binding("z", "fold_all", "Fold", tooltip="Fold all jobs, or unfold them; Enter folds one"),
        Binding("n", "next(1)", "Next match", show=False),
        Binding("N", "next(-1)", "Previous match", show=False),
    ]

    def __init__(self, dashboard: DashboardScreen, *, filter_text: str = "") -> None:
        super().__init__(id="processes-screen")
        self.dashboard = dashboard
        self._store: Store = dashboard.store
        self._view = View.JOBS
        self._order = Order()
        self._folded: set[str] = set()
        self._ticked: set[RowKey] = set()
        self._filter = Filter()
        self._filter_text = filter_text
        self._problem = ""
        self._search = ""
        self._typing: str | None = None
        self._frozen: list[RowKey] | None = None
        self._rows: list[Row] = []
        self._total = 0
        self._applied_text = ""
        """The filter as it was last understood: what the rows were chosen by."""
        self._flash: Line = ()
        self._report: tuple[str, str] | None = None

    def compose(self) -> ComposeResult:
        yield LinePanel(self._draw_title, id="processes-title")
        yield Input(id="processes-input", compact=True)
        yield LineTable(id="processes-table")
        yield LinePanel(self._draw_flash, id="processes-flash")
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.query_one("#processes-input").display = False
        self._set_filter(self._filter_text)
        self.follow(self.dashboard, self._take)

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._show)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("end", "tick"):
            return not self.dashboard.store.read_only
        return True

    # --- store -> rows ----------------------------------------------------------------------------------------------

    def _take(self, store: Store) -> None:
        self._store = store
        if self.is_current or self._frozen is not None:
            self._show()

    def on_screen_resume(self) -> None:
        self._show()

    def _show(self) -> None:
        if not self.is_open:
            return
        table = self.query_one(LineTable)
        every = rows_of(self._store.machine)
        self._total = len(every)
        living = {row.key for row in every}
        self._ticked &= living
        kept = [row for row in every if self._filter.matches(row)]
        self._rows = arranged(kept, self._view, self._order, folded=self._folded, frozen=self._frozen)
        width = table.size.width
        columns = columns_for(width, self._rows)
        head, places = heading(columns, self._order, width)
        followed = self._store.followed.pids if self._store.followed is not None else frozenset()
        lines = [
            draw_row(row, columns, ticked=self._is_ticked(row), followed=row.pid in followed, search=self._search)
            for row in self._rows
        ]
        with self.app.batch_update():
            table.show(head, places, [row.key for row in self._rows], lines)
            self.query_one("#processes-title", LinePanel).show(self._store)
            self._show_flash()

    def _draw_title(self, store: Store, width: int, height: int) -> list[Line]:
        shown = sum(row.process is not None for row in self._rows)
        count = f"{shown} of {self._total}" if self._filter.terms else str(self._total)
        left = join((line((" memtop ", "accent")), fact("GPU processes", count), fact("", self._view.value)))
        if self._applied_text:
            left = join((left, fact("filter", self._applied_text, "edge")))
        missing = why_incomplete(store.machine) if store.machine is not None else ["waiting for the first sample"]
        if missing:
            left = join((left, line((f"! {missing[0]}", "edge"))))
        elif not self._total:
            left = join((left, line(("no process uses a GPU", MUTED))))
        sums = [fact("ticked", str(len(self._ticked)))] if self._ticked else []
        sums += [line(("order held still", "edge"))] if self._frozen is not None else []
        right = join([*sums, line((store.label or "", "edge"), " ")])
        return [spread(left, right, width)]

    def _draw_flash(self, store: Store, width: int, height: int) -> list[Line]:
        if self._problem:
            return [fit(line(("✗ ", "bad"), (self._problem, "bad")), width)]
        if self._flash:
            return [fit(self._flash, width)]
        report = [] if self._report is None else report_lines(*self._report, width)
        row = self.row
        if row is None:
            return [*report, ()]
        where = self._where_words(row)
        return [*report, spread(self._row_words(row, width - width_of(where) - 2), where, width)]

    def _show_flash(self) -> None:
        panel = self.query_one("#processes-flash", LinePanel)
        width = self.size.width - 2
        panel.styles.height = max(1, len(self._draw_flash(self._store, width, 1)))
        panel.show(self._store)

    def _where_words(self, row: Row) -> Line:
        """Where the cursor is in a list that goes beyond the screen."""
        if len(self._rows) <= self.query_one(LineTable).room:
            return ()
        place = next((n for n, one in enumerate(self._rows, 1) if one.key == row.key), 0)
        return line((f"row {place} of {len(self._rows)}", MUTED))

    def _row_words(self, row: Row, width: int) -> Line:
        process = row.process
        if process is None:
            folds = "" if row.folded is None else "Enter unfolds it" if row.folded else "Enter folds it"
            words = (row.job_name, roles_in_words(row.job), folds)
            return join_fitting([line((one, MUTED)) for one in words], width)
        # Why a dash is a dash, of the row under the cursor.
        why = [line((f"{name.replace('_', ' ')}: ", MUTED), (reason, MUTED)) for name, reason in process.unknown.items()]
        return join_fitting([line((process.reason or row.command, MUTED)), *why], width)

    def say(self, text: str, kind: str = "note") -> None:
        """Tell the user something on the line above the keys."""
        self._report = (text, kind) if kind in REPORTS else None
        self._flash = () if self._report else report_lines(text, kind, 2 * len(text) + 2)[0]
        if self.is_open:
            self._show_flash()

    @property
    def row(self) -> Row | None:
        """The row under the cursor."""
        key = self.query_one(LineTable).cursor
        return next((row for row in self._rows if row.key == key), None)

    @on(LineTable.Moved)
    def _moved(self) -> None:
        self._flash = ()
        self._show_flash()

    # --- order ------------------------------------------------------------------------------------------------------

    def action_view(self) -> None:
        self._view = _VIEWS[(_VIEWS.index(self._view) + 1) % len(_VIEWS)]
        self._show()

    def action_sort(self, step: int) -> None:
        shown = [*(column.id for column in columns_for(self.size.width, self._rows)), SORTABLE[-1]]
        place = shown.index(self._order.column) if self._order.column in shown else 0
        self._sort_by(shown[(place + step) % len(shown)])

    @on(LineTable.HeadingClicked)
    def _clicked(self, message: LineTable.HeadingClicked) -> None:
        if message.column == self._order.column:
            self.action_reverse()
        else:
            self._sort_by(message.column)

    def _sort_by(self, column: str) -> None:
        # Numbers begin with the largest, words with A.
        words = ("user", "container", "command", "pid", "gpu")
        self._order = Order(column, descending=column not in words)
        self._show()

    def action_reverse(self) -> None:
        self._order = Order(self._order.column, descending=not self._order.descending)
        self._show()

    def action_fold_all(self) -> None:
        keys = {row.job.key for row in rows_of(self._store.machine) if row.job is not None}
        self._folded = set() if self._folded else keys
        self._show()

    # --- typing -----------------------------------------------------------------------------------------------------

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
        box.placeholder = hint
        box.value = value
        box.display = True
        box.focus()

    def _close_input(self) -> None:
        self._typing = None
        self.query_one("#processes-input", Input).display = False
        self.query_one(LineTable).focus()
        self._thaw()

    @on(Input.Changed, "#processes-input")
    def _typed(self, message: Input.Changed) -> None:
        if self._typing == "filter":
            self._set_filter(message.value)

    @on(Input.Submitted, "#processes-input")
    def _submitted(self, message: Input.Submitted) -> None:
        purpose = self._typing
        if purpose == "filter" and self._problem:
            # Not taken: the reason stands below, and the line stays open to be mended or given up.
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
            # While a word is half typed and not understood, the last one that was goes on.
            self._filter, self._applied_text = found, text.strip()
        self._show()

    def action_next(self, step: int) -> None:
        self._go_to_match(step)

    def _go_to_match(self, step: int, *, here: bool = False) -> None:
        if not self._search:
            self.say("/ finds text first")
            return
        places = [n for n, row in enumerate(self._rows) if self._search in row.searchable]
        if not places:
            self.say(f"{self._search!r} is not in the list", "bad")
            return
        table = self.query_one(LineTable)
        at = next((n for n, row in enumerate(self._rows) if row.key == table.cursor), 0)
        if here and at in places:
            return
        beyond = [n for n in places if (n - at) * step > 0]
        # Beyond the last match comes the first one again.
        target = (beyond or places)[0 if step > 0 else -1]
        table.move_to(self._rows[target].key)

    def action_leave(self) -> None:
        if self._typing is not None:
            if self._typing == "filter":
                self._set_filter("")
            self._close_input()
        elif self._search:
            self._search = ""
            self._show()
        elif self._ticked:
            self._ticked.clear()
            self._show()
        elif self._filter_text:
            self._set_filter("")
        else:
            self.action_close()

    def action_close(self) -> None:
        self.dismiss(None)

    def _freeze(self) -> None:
        self._report = None
        self._frozen = [row.key for row in self._rows]
        self._show()

    def _thaw(self) -> None:
        self._frozen = None
        self._show()

    # --- one row ----------------------------------------------------------------------------------------------------

    @on(LineTable.Chosen)
    def _chosen(self) -> None:
        row = self.row
        if row is None:
            return
        if row.process is None and row.job is not None:
            if row.folded is not None:
                self._folded ^= {row.job.key}
                self._show()
            return
        from memtop.tui.processes.details import ProcessScreen

        self.app.push_screen(ProcessScreen(self.dashboard, row))

    def action_environment(self) -> None:
        row = self.row
        if row is None or row.process is None:
            self.say("a job has no environment of its own: choose one of its processes", "bad")
            return
        self._read_environment(row.process)

    @work(group="environment")
    async def _read_environment(self, process: GpuProcess) -> None:
        from memtop.tui.processes.environment import show_environment

        await show_environment(self.dashboard.dashboard_app, process, self.say)

    # --- ending -----------------------------------------------------------------------------------------------------

    def _is_ticked(self, row: Row) -> bool:
        return row.key in self._ticked

    def action_tick(self) -> None:
        row = self.row
        if row is None:
            return
        keys = [r.key for r in rows_of(self._store.machine) if self._belongs(r, row) and self._may_end(r)]
        if not keys:
            self.say(f"not to be chosen: {self._why_not(row)}", "bad")
            return
        if (row.process is not None and self._ticked.issuperset(keys)) or self._ticked.issuperset(keys):
            self._ticked.difference_update(keys)
        else:
            self._ticked.update(keys)
        self._show()
        self.query_one(LineTable).action_move(1)

    def _belongs(self, candidate: Row, chosen: Row) -> bool:
        """All rows of the same process (it is ended on all its GPUs), or of the job."""
        if chosen.process is None:
            return candidate.job is not None and chosen.job is not None and candidate.job.key == chosen.job.key
        return candidate.key[:3] == chosen.key[:3]

    def action_end(self) -> None:
        chosen = self._chosen_holders()
        if not chosen:
            row = self.row
            if row is not None:
                self.say(f"not to be ended: {self._why_not(row)}", "bad")
            return
        self._end(chosen)

    def _chosen_holders(self) -> tuple[Holder, ...]:
        every = rows_of(self._store.machine)
        row = self.row
        if self._ticked:
            wanted: Iterable[Row] = (r for r in every if r.key in self._ticked)
        elif row is not None:
            wanted = (r for r in every if self._belongs(r, row))
        else:
            wanted = ()
        pids = {(r.key[1], r.key[2]) for r in wanted}
        found = holders(self._store.machine)
        mine = (h for h in found if h.process.choosable)
        return tuple(h for h in mine if (h.process.pid, h.process.started_ticks or h.process.started) in pids)

    def _end(self, chosen: tuple[Holder, ...]) -> None:
        from memtop.tui.dashboard.actions import begin_ending

        def answered(yes: bool) -> None:
            if yes:
                self._ticked.clear()
            self._thaw()

        self._freeze()
        if not begin_ending(self.dashboard.dashboard_app, self._store, chosen, self, answered):
            self._thaw()

    def _may_end(self, row: Row) -> bool:
        return row.pid not in self._forbidden() and row.process is not None

    def _why_not(self, row: Row) -> str:
        if row.process is None:
            return f"none of {row.job_name}'s processes is yours to end"
        return self._forbidden().get(row.pid, NOT_YOURS)

    def _forbidden(self) -> Mapping[int, str]:
        return {} if self._store.machine is None else forbidden(gpu_rows(self._store.machine))
