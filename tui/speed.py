"""What would make the run faster: what it spends its time on, proposals with their predicted peaks, and what a trial showed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Phase
from memtop.tui.advice import advice_lines, refused_lines, trial_lines
from memtop.tui.block_list import Block, BlockList, chosen_width
from memtop.tui.full import FullScreen
from memtop.tui.key_line import KeyLine
from memtop.tui.keymap import no_changes
from memtop.tui.line import MUTED, STRONG, Line, join, line, spread, wrap
from memtop.tui.panel import LinePanel
from memtop.tui.remedies import is_applicable, remedy_lines
from memtop.tui.store import Store

if TYPE_CHECKING:
    from memtop.tui.dashboard.screen import DashboardScreen


class FasterScreen(FullScreen):
    """Enter tries the marked proposal: measured before and after, kept only if it helps."""

    AUTO_FOCUS = "BlockList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,b", "leave", "Back", show=False),
        Binding("t", "try", "Try", key_display="Enter", tooltip="Measure, change, measure again; undone unless it is faster"),
        Binding("pagedown", "page(1)", "Scroll", key_display="PgUp PgDn", tooltip="A page forward or back"),
        Binding("pageup", "page(-1)", "Back", show=False),
    ]

    def __init__(self, dashboard: DashboardScreen) -> None:
        super().__init__(id="faster-screen")
        self.dashboard = dashboard
        self.chosen: Remedy | None = None
        """The proposal that was to be tried when the screen closed."""
        self._flash: Line = ()

    def compose(self) -> ComposeResult:
        yield LinePanel(self._draw_title, id="faster-title")
        yield BlockList(self._draw, id="faster-list")
        yield LinePanel(self._draw_flash, id="faster-flash")
        yield KeyLine(self)

    def on_mount(self) -> None:
        self.follow(self.dashboard, self._take)

    def _take(self, store: Store) -> None:
        self.query_one(BlockList).redraw()
        for panel in self.query(LinePanel):
            panel.show(store)

    def _draw_title(self, store: Store, width: int, height: int) -> list[Line]:
        name = store.run.name if store.run is not None else ""
        left = join((line((" memtop ", "accent")), line((f"What would make {name} faster", STRONG))))
        return [spread(left, line((f"{store.label or ''} ", "edge")), width)]

    def _draw(self, width: int) -> list[Block]:
        run = self.dashboard.store.run
        if run is None:
            return []
        blocks = [Block(None, [*advice_lines(run, width), ()])]
        advice = run.advice
        if advice is not None and advice.proposals:
            words = line(("Proposals", "heading"), ("   dashed bars are predicted, not measured", MUTED))
            blocks.append(Block(None, [words]))
            room = chosen_width(width)
            for number, remedy in enumerate(advice.proposals, 1):
                basis = f" Predicted from: {remedy.forecast.basis}." if remedy.forecast is not None else ""
                why = [line("   ", *part) for part in wrap(f"{remedy.why}{basis}", room - 3, MUTED)]
                blocks.append(Block((remedy.id, remedy.title), [*remedy_lines(number, remedy, room, alive=run.alive), *why]))
            blocks.append(Block(None, [()]))
        elif advice is not None:
            blocks.append(Block(None, [line(("Nothing is proposed.", MUTED)), ()]))
        if advice is not None and advice.refused:
            blocks.append(Block(None, [*refused_lines(advice, width), ()]))
        if run.trial is not None:
            blocks.append(Block(None, trial_lines(run.trial, width)))
        return blocks

    def _draw_flash(self, store: Store, width: int, height: int) -> list[Line]:
        return [self._flash or line(("a change is kept only if samples/s rose beyond the spread", MUTED))]

    def _say(self, text: str, role: str = "bad") -> None:
        self._flash = line((text, role))
        self.query_one("#faster-flash", LinePanel).show(self.dashboard.store)

    @on(BlockList.Moved)
    def _moved(self) -> None:
        self._flash = ()
        self.query_one("#faster-flash", LinePanel).show(self.dashboard.store)

    @on(BlockList.Chosen)
    def _entered(self) -> None:
        self.action_try()

    def action_try(self) -> None:
        store = self.dashboard.store
        advice = store.run.advice if store.run is not None else None
        key = self.query_one(BlockList).cursor
        remedy = next((one for one in (advice.proposals if advice else ()) if (one.id, one.title) == key), None)
        if remedy is None or store.run is None:
            self._say("✗ there is no proposal to try")
        elif (problem := no_changes(store)) is not None:
            self._say(f"✗ {problem}")
        elif store.run.state is not Phase.TRAINING:
            self._say(f"✗ a trial measures a run that trains: this one is {store.run.state.value}")
        elif not is_applicable(remedy):
            self._say(
                f"memtop does not do this by itself; type: {remedy.command}" if remedy.command else "this is for you", "edge"
            )
        else:
            self.chosen = remedy
            self.dismiss(None)

    def action_page(self, direction: int) -> None:
        self.query_one(BlockList).action_page(direction)

    def action_leave(self) -> None:
        self.dismiss(None)
