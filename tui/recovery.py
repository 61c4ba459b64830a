"""The card that opens when a run has died of memory: what happened, where the memory went, and what can be done.

Enter applies the marked remedy (the first at the beginning), Esc closes, s calls an announced restart off. It follows the
store while it is open: the countdown of an automatic restart runs in it, and it leaves by itself once the run goes on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Button

from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Proposal
from memtop.tui.block_list import Block, BlockList, chosen_width
from memtop.tui.dialog import Dialog
from memtop.tui.keymap import no_changes
from memtop.tui.line import MUTED, Line, line, wrap
from memtop.tui.panel import LinePanel
from memtop.tui.recovery_drawing import card_title, evidence_lines, happened_lines, memory_lines, outlook
from memtop.tui.remedies import is_applicable, remedy_lines
from memtop.tui.store import Store

if TYPE_CHECKING:
    from memtop.tui.dashboard.screen import DashboardScreen

DELIBERATE_SECONDS = 0.6
"""A card that opened by itself takes no Enter for so long: it was meant for what the card covers."""
# The frame, the two panels below the page, and the buttons.
_AROUND = 2 + 2 + 1 + 1
_SIDES = 4
_WIDEST = 124
_AIRY_FROM = 90


def _key(remedy: Remedy) -> tuple[str, str]:
    """There may be several of one kind."""
    return remedy.id, remedy.title


class OomCard(Dialog[Remedy]):
    """Dismissed with the remedy to apply, or None."""

    AUTO_FOCUS = "BlockList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w,q", "cancel", "Close", show=False),
        Binding("s", "stay", "Stay stopped", show=False),
    ]

    def __init__(self, dashboard: DashboardScreen, *, by_itself: bool = False) -> None:
        super().__init__()
        self._dashboard = dashboard
        self._not_before = time.monotonic() + (DELIBERATE_SECONDS if by_itself else 0.0)
        self._said: Line = ()

    @property
    def _proposal(self) -> Proposal | None:
        return self._dashboard.store.proposal

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -dangerous oom", id="oom-box") as box:
            # Filled from its first picture on: a countdown may be running.
            self._frame(box, BlockList(self._draw))
            yield BlockList(self._draw, id="oom-page")
            yield LinePanel(self._draw_why, id="oom-why")
            yield LinePanel(self._draw_status, id="oom-status")
            with Horizontal(classes="buttons"):
                yield Button("Close (Esc)", id="cancel", compact=True)
                yield Button("Stay stopped (s)", id="stay", compact=True)
                yield Button("Apply (Enter)", id="confirm", variant="primary", compact=True)

    def on_mount(self) -> None:
        self.follow(self._dashboard, self._take)

    def on_resize(self, event: Resize) -> None:
        self._take(self._dashboard.store)

    def _take(self, store: Store) -> None:
        if self._proposal is None:
            self.dismiss(None)
            return
        page = self.query_one(BlockList)
        self._frame(self.query_one("#oom-box", Vertical), page)
        page.redraw()
        self._show_buttons()
        for panel in self.query(LinePanel):
            panel.show(store)

    def _frame(self, box: Vertical, page: BlockList) -> None:
        """Title and height, from what there is to tell."""
        if self._proposal is not None:
            box.border_title = card_title(self._proposal.diagnosis)
        width = min(_WIDEST, self.app.size.width * 96 // 100)
        box.styles.height = min(page.lines_wanted(width - _SIDES) + _AROUND, self.app.size.height - 1)

    def _show_buttons(self) -> None:
        remedy, may = self._remedy(), no_changes(self._dashboard.store) is None
        self.query_one("#confirm", Button).display = may and remedy is not None and is_applicable(remedy)
        self.query_one("#stay", Button).display = may and self._announced

    @property
    def _announced(self) -> bool:
        """A restart begins by itself unless somebody acts."""
        return self._proposal is not None and self._proposal.begins is not None

    # --- what it shows ----------------------------------------------------------------------------------------------

    def _draw(self, width: int) -> list[Block]:
        proposal, store = self._proposal, self._dashboard.store
        if proposal is None:
            return []
        diagnosis = proposal.diagnosis
        blocks = [
            Block(None, happened_lines(diagnosis, width)),
            Block(None, memory_lines(diagnosis, store, width)),
            Block(None, evidence_lines(diagnosis, width)),
        ]
        for cause in proposal.causes:
            blocks.append(Block(None, wrap(f"! {cause}", width, "edge")))
        alive = store.run is not None and store.run.alive
        if proposal.remedies:
            head = line(("What can be done", "heading"), ("   dashed bars are predicted, solid ones were measured", MUTED))
            blocks.append(Block(None, [(), head] if width >= _AIRY_FROM else [head]))
        elif not proposal.last_advice and not proposal.causes:
            blocks.append(Block(None, [line(("No remedy is known for this.", MUTED))]))
        if proposal.waiting:
            blocks.append(Block(None, wrap(f"Nothing is done by itself: {proposal.waiting}", width, "edge")))
        room = chosen_width(width)
        for number, remedy in enumerate(proposal.remedies, 1):
            blocks.append(Block(_key(remedy), remedy_lines(number, remedy, room, alive=alive)))
        if proposal.last_advice:
            title = "Nothing that memtop may do by itself is left" if not proposal.remedies else "Beyond that"
            advice = [part for number, text in enumerate(proposal.last_advice, 1) for part in wrap(f"{number}. {text}", width)]
            blocks.append(Block(None, [line((title, "heading")), *advice]))
        return blocks

    def _draw_why(self, store: Store, width: int, height: int) -> list[Line]:
        remedy = self._remedy()
        if remedy is None:
            return []
        basis = f" Predicted from: {remedy.forecast.basis}." if remedy.forecast is not None else ""
        lines = wrap(f"{remedy.why}{basis}", width, MUTED)
        if remedy.command and not is_applicable(remedy):
            lines = [line(("type: ", MUTED), (remedy.command, "strong")), *lines]
        return lines[:height]

    def _draw_status(self, store: Store, width: int, height: int) -> list[Line]:
        proposal = self._proposal
        if self._said or proposal is None:
            return [self._said]
        now = store.now if store.now is not None else time.time()
        return [outlook(proposal, self._remedy(), now, can_act=no_changes(store) is None)]

    def _remedy(self) -> Remedy | None:
        """The one under the cursor."""
        proposal, key = self._proposal, self.query_one(BlockList).cursor
        return next((remedy for remedy in (proposal.remedies if proposal else ()) if _key(remedy) == key), None)

    def _say(self, text: str, role: str) -> None:
        self._said = line((text, role))
        self.query_one("#oom-status", LinePanel).show(self._dashboard.store)

    # --- keys -------------------------------------------------------------------------------------------------------

    @on(BlockList.Moved)
    def _moved(self) -> None:
        self._said = ()
        self._show_buttons()
        for panel in self.query(LinePanel):
            panel.show(self._dashboard.store)

    @on(Button.Pressed, "#stay")
    def action_stay(self) -> None:
        """Call an announced restart off: closing the card alone does not."""
        problem = no_changes(self._dashboard.store)
        if not self._announced:
            return
        if problem is not None:
            self._say(f"✗ {problem}", "bad")
        else:
            self.dismiss(None)
            self._dashboard.call_off()

    @on(BlockList.Chosen)
    @on(Button.Pressed, "#confirm")
    def _apply(self) -> None:
        remedy, problem = self._remedy(), no_changes(self._dashboard.store)
        if remedy is None or time.monotonic() < self._not_before:
            return
        if problem is not None:
            self._say(f"✗ {problem}", "bad")
        elif is_applicable(remedy):
            self.dismiss(remedy)
        elif remedy.command:
            self.app.copy_to_clipboard(remedy.command)
            self._say(f"memtop does not run this; copied, as far as the terminal allows: {remedy.command}", "edge")
        else:
            self._say("this one is for you to do: there is nothing that memtop could apply", "edge")
