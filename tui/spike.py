"""The question after a spike of the loss: go back to the state before it, go on, or stop."""

from __future__ import annotations

import time
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Static

from memtop.supervisor.clean import clean
from memtop.supervisor.language import tr
from memtop.supervisor.names import shortened
from memtop.supervisor.wire import Phase
from memtop.tui.keymap import no_changes
from memtop.tui.recovery import DELIBERATE_SECONDS
from memtop.tui.screen import TITLE_NAME, Dashboard, Dialog
from memtop.tui.store import Store


class SpikeDialog(Dialog[str]):
    """Closes with `back`, `on`, `stop` or None: later. Nothing happens by itself."""

    AUTO_FOCUS = "#cancel"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "answer('back')", "Go back", show=False),
        Binding("g", "answer('on')", "Go on", show=False),
        Binding("s", "answer('stop')", "Stop", show=False),
        Binding("w,q", "cancel", "Later", show=False),
    ]

    def __init__(self, dashboard: Dashboard, *, by_itself: bool = False) -> None:
        super().__init__()
        self._dashboard = dashboard
        self._not_before = time.monotonic() + (DELIBERATE_SECONDS if by_itself else 0.0)

    def compose(self) -> ComposeResult:
        run = self._dashboard.store.run
        with Vertical(classes="dialog") as box:
            box.border_title = tr(f"The loss of {shortened(run.name, TITLE_NAME) if run is not None else ''} has jumped")
            yield Static(id="what", markup=False)
            yield Static(id="answers", markup=False)
            with Horizontal(classes="buttons"):
                yield Button(tr("Later (Esc)"), id="cancel", compact=True)
                yield Button(tr("Stop (s)"), id="stop", compact=True)
                yield Button(tr("Go on (g)"), id="on", compact=True)
                yield Button(tr("Go back (b)"), id="back", variant="primary", compact=True)

    def on_mount(self) -> None:
        self.follow(self._dashboard, self._take)

    def _take(self, store: Store) -> None:
        spike = store.run.spike if store.run is not None else None
        if spike is None:
            self.dismiss(None)
            return
        self.query_one("#what", Static).update(clean(tr(spike.message)))
        back = f"Go back to {spike.back_words}." if spike.back is not None else spike.back_words
        lines = {
            "back": back,
            "on": "Go on as it is. The kept state from before the spike is deleted.",
            "stop": "Stop: the update is finished and saved, and the state from before the spike stays.",
        }
        shown = [tr(words) for name, words in lines.items() if name == "back" or self._may(name, store)]
        self.query_one("#answers", Static).update("\n" + "\n".join(map(clean, shown)))
        for name in lines:
            self.query_one(f"#{name}", Button).display = self._may(name, store)

    def _may(self, answer: str, store: Store) -> bool:
        run = store.run
        if run is None or run.spike is None or no_changes(store) is not None:
            return False
        return run.spike.back is not None if answer == "back" else run.state is Phase.TRAINING

    @on(Button.Pressed, "#back, #on, #stop")
    def _pressed(self, message: Button.Pressed) -> None:
        self.action_answer(str(message.button.id))

    def action_answer(self, answer: str) -> None:
        if time.monotonic() >= self._not_before and self._may(answer, self._dashboard.store):
            self.dismiss(answer)
