"""All configurations of the run: what each needed and gave; Enter goes back to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize

from memtop.supervisor.wire import Change, Configuration
from memtop.tui import configuration_rows as drawing
from memtop.tui.dialog import ConfirmDialog
from memtop.tui.full import FullScreen
from memtop.tui.key_line import KeyLine
from memtop.tui.keymap import BY_ID, no_changes, obstacle
from memtop.tui.line import MUTED, STRONG, Line, join, line, spread
from memtop.tui.line_table import LineTable
from memtop.tui.panel import LinePanel
from memtop.tui.rollback import consequences, present_of, rollback, undone
from memtop.tui.store import Store

if TYPE_CHECKING:
    from memtop.tui.dashboard.screen import DashboardScreen


class ConfigurationsScreen(FullScreen):
    """Opens on the configuration before the present one. `chosen` is what was confirmed when it closed, if anything."""

    AUTO_FOCUS = "LineTable"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "Back", show=False),
        Binding(
            "e", "back(False)", "Go back", key_display="Enter", tooltip="Restart with these settings, where the run is now"
        ),
        Binding("c", "back(True)", "with its checkpoint", tooltip="The same, from the newest kept state of that time"),
        Binding("u", "undo", "Undo", tooltip="Restart with the settings before the present ones"),
    ]

    def __init__(self, dashboard: DashboardScreen) -> None:
        super().__init__(id="configurations-screen")
        self.dashboard = dashboard
        self.chosen: Change | None = None
        self._flash: Line = ()

    def compose(self) -> ComposeResult:
        yield LinePanel(self._draw_title, id="configurations-title")
        yield LineTable(id="configurations-table")
        yield LinePanel(self._draw_facts, id="configurations-facts")
        yield LinePanel(self._draw_flash, id="configurations-flash")
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)
        before = undone(self._rows)
        if before is not None:
            self.query_one(LineTable).move_to(before.number)

    def on_resize(self, event: Resize) -> None:
        self._take(self.dashboard.store)

    @property
    def _rows(self) -> tuple[Configuration, ...]:
        return self.dashboard.store.configurations

    def _take(self, store: Store) -> None:
        width = self.app.size.width
        heading, columns = drawing.heading(width)
        now = present_of(self._rows)
        # The newest is what one looks for: it comes first.
        rows = tuple(reversed(self._rows))
        lines = [drawing.row(one, width, present=one is now) for one in rows]
        self.query_one(LineTable).show(heading, columns, [one.number for one in rows], lines)
        for panel in self.query(LinePanel):
            panel.show(store)

    # --- what it shows ----------------------------------------------------------------------------------------------

    def _draw_title(self, store: Store, width: int, height: int) -> list[Line]:
        name = store.run.name if store.run is not None else ""
        left = join((line((" memtop ", "accent")), line((f"Configurations of {name}", STRONG))))
        return [spread(left, line((f"{store.label or ''} ", "edge")), width)]

    def _draw_facts(self, store: Store, width: int, height: int) -> list[Line]:
        row = self._row()
        return [] if row is None else drawing.facts(row, present_of(self._rows), width)[:height]

    def _draw_flash(self, store: Store, width: int, height: int) -> list[Line]:
        return [self._flash or line(("peaks and speeds are measured; ● is the present one", MUTED))]

    def _row(self) -> Configuration | None:
        key = self.query_one(LineTable).cursor
        return next((one for one in self._rows if one.number == key), None)

    def say(self, text: str) -> None:
        """Tell the user why something is not done."""
        self._flash = line((f"✗ {text}", "bad"))
        self.query_one("#configurations-flash", LinePanel).show(self.dashboard.store)

    @on(LineTable.Moved)
    def _moved(self) -> None:
        self._flash = ()
        for panel in self.query(LinePanel):
            panel.show(self.dashboard.store)

    # --- keys -------------------------------------------------------------------------------------------------------

    @on(LineTable.Chosen)
    def _entered(self) -> None:
        self.action_back(False)

    def action_back(self, with_state: bool) -> None:
        row = self._row()
        if row is not None:
            self._go_back(row, with_state)

    def action_undo(self) -> None:
        row = undone(self._rows)
        if row is None:
            self.say("there is no configuration before the present one")
        else:
            self._go_back(row, False)

    @work(group="actions", exclusive=True)
    async def _go_back(self, row: Configuration, with_state: bool) -> None:
        store = self.dashboard.store
        problem = no_changes(store) or obstacle(BY_ID["restart"], store)
        change = rollback(row, self._rows, with_state=with_state) if problem is None else problem
        if isinstance(change, str):
            self.say(change)
            return
        lines = consequences(row, store, with_state=with_state)
        if await self.app.push_screen_wait(ConfirmDialog("Roll back", lines, confirm="Roll back")):
            self.chosen = change
            self.dismiss(None)

    def action_leave(self) -> None:
        self.dismiss(None)
