"""The dashboard's screen: keeps the store, passes each new one to the panels, and turns keys and
buttons into actions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical
from textual.events import Resize
from textual.getters import query_one
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input

from memtop.presets import Preset, PresetFileError, load_presets
from memtop.presets.files import usable
from memtop.supervisor import wire
from memtop.supervisor.language import separator, tr
from memtop.supervisor.monitor.history import History
from memtop.supervisor.monitor.processes.proc import sees_all_pids
from memtop.supervisor.monitor.values import Band, MachineSnapshot
from memtop.supervisor.run_memory import together
from memtop.tui.compositor import ChangesCompositor
from memtop.tui.dashboard import overview as machine_drawing
from memtop.tui.dashboard import training as training_drawing
from memtop.tui.dashboard.events import draw_events
from memtop.tui.dashboard.footer import ActionBar, ActionButton, FlashPanel
from memtop.tui.dashboard.header import draw_header
from memtop.tui.dashboard.layout import GPU_PANELS, DashboardLayout, plan
from memtop.tui.dashboard.log import LogPanel
from memtop.tui.dashboard.notice import draw_notice, notice
from memtop.tui.dashboard.panels import ProcessPanel, gpu_panel
from memtop.tui.dashboard.result import DashboardResult, result_of
from memtop.tui.feed import Controlled, DetailedFeed, Feed, FeedMessage, LocalFeed, ReplayPosition
from memtop.tui.keymap import ACTIONS, BY_ID, obstacle, offered, why_read_only
from memtop.tui.machine import gpu as gpu_drawing
from memtop.tui.machine.host import draw_host
from memtop.tui.pace import Pace
from memtop.tui.panel import LinePanel
from memtop.tui.processes.actions import ProcessActions
from memtop.tui.processes.trails import Trails
from memtop.tui.run_feed import RunFeed
from memtop.tui.screen import Dashboard
from memtop.tui.store import Store, fold, machine_in

_QUIET_INTERVALS = 6
_OF_THE_LOG = ("follow", "search", "next_match", "previous_match", "log_up", "log_down")


def _bindings() -> list[BindingType]:
    rows: list[BindingType] = []
    for action in ACTIONS:
        for key in action.keys:
            argument = f"'{action.id}', '{key}'"
            rows.append(Binding(key, f"do({argument})", action.label, show=False, tooltip=action.description))
    return rows


def first_store(feed: Feed, label: str | None) -> Store:
    """The store before the first message."""
    here = isinstance(feed, LocalFeed | RunFeed)
    return Store(
        read_only=feed.read_only,
        label=label,
        run=feed.first_state() if isinstance(feed, RunFeed) else None,
        all_pids_visible=here and sees_all_pids(),
    )


class DashboardScreen(Dashboard):
    """One store, one direction: feed worker -> message -> store -> panels."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = _bindings()

    log_panel = query_one("#log", LogPanel)
    action_bar = query_one(ActionBar)
    flash = query_one(FlashPanel)

    class FeedReceived(Message):
        """The feed has sent a message."""

        def __init__(self, content: FeedMessage) -> None:
            super().__init__()
            self.content = content

    def __init__(self, feed: Feed, *, label: str | None, interval: float, process_actions: ProcessActions, pace: Pace) -> None:
        super().__init__()
        self._compositor = ChangesCompositor()
        self.feed = feed
        self.process_actions = process_actions
        # Not part of the store, because it grows in place.
        self.trails = Trails()
        self.set_reactive(DashboardScreen.store, first_store(feed, label))
        self.history = History()
        self._interval = interval
        self._heard = time.monotonic()
        self._log_shown = 0
        self._hand_down_due = False
        self.pace = pace
        self._showing_later = False
        self._panels: tuple[LinePanel, ...] = ()
        self._bands: dict[str, Band] = {}
        self._plan: DashboardLayout | None = None
        self._card_shown: tuple[str, int, int | None] | None = None
        """The run and the attempt whose recovery card has opened by itself."""
        self._dialog_open = False
        self._chosen: tuple[str, str] | None = None
        """An action and its key, which wait until the run is read and no other screen is open."""
        self._presets: dict[str, Preset] | None = None
        """None until there is a run."""

    # --- what is on it ----------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        g, m, t = gpu_drawing, machine_drawing, training_drawing
        yield LinePanel(draw_header, id="header")
        yield LinePanel(draw_notice, id="notice")
        with Horizontal(id="wide"):
            with Vertical(id="left"):
                yield LinePanel(g.draw_gpu_note, title="GPU", id="gpu-note", classes="panel")
                with Grid(id="gpus"):
                    for position in range(GPU_PANELS):
                        yield gpu_panel(position)
                yield LinePanel(g.draw_gpu_table, title="GPUs", opens="gpu", id="gpu-table", classes="panel")
                yield LinePanel(draw_host, title="Host memory", opens="host", id="host-big", classes="panel host")
                yield LinePanel(t.draw_loss, title="Loss", id="loss", classes="panel")
            with Vertical(id="right"):
                yield LinePanel(draw_host, title="Host memory", opens="host", id="host", classes="panel host")
                yield LinePanel(t.draw_training, title="Training", id="training", classes="panel")
                yield LinePanel(draw_events, title="Events", id="events", classes="panel")
        with Vertical(id="compact"):
            yield LinePanel(m.draw_compact_machine, id="compact-machine")
            yield LinePanel(t.draw_compact_training, id="compact-training")
        yield ProcessPanel(m.draw_processes, title="GPU processes", opens="processes", id="processes", classes="panel")
        yield LinePanel(draw_events, title="Events  (e: log)", id="compact-events", classes="panel")
        yield LogPanel(self.pace, id="log", classes="panel")
        yield Input(placeholder=tr("find in the log, Enter searches, Esc leaves"), id="search", compact=True)
        yield FlashPanel()
        yield ActionBar()

    def on_mount(self) -> None:
        self._panels = tuple(self.query(LinePanel))
        self._listen()
        self.set_interval(1.0, self._check_quiet)
        self._hand_down()

    @work(group="feed")
    async def _listen(self) -> None:
        async for content in self.feed.messages():
            self.post_message(self.FeedReceived(content))

    @on(FeedReceived)
    def _take(self, message: FeedReceived) -> None:
        self._heard = time.monotonic()
        machine = machine_in(message.content)
        if machine is not None:
            self.trails.take(machine)
        self._record(message.content)
        if isinstance(message.content, ReplayPosition) and not self.flash.has_message:
            self.say("replay: Space pauses or continues, < > speed, ← → a minute, Home End start and end")
        # What arrives before the terminal takes the next frame shares that frame.
        self.set_reactive(DashboardScreen.store, fold(self.store, message.content))
        self._show_when_possible()

    def _show_when_possible(self) -> None:
        if self._showing_later:
            return
        wait = self.pace.wait()
        if wait:
            self._showing_later = True
            # Textual's own timer never fires if its time is over before it has begun.
            asyncio.get_running_loop().call_later(wait, self.call_later, self._show_later)
        else:
            self.mutate_reactive(DashboardScreen.store)

    def _show_later(self) -> None:
        self._showing_later = False
        self._show_when_possible()

    def _record(self, content: FeedMessage) -> None:
        if isinstance(content, wire.HistoryRows):
            self.history.load(content.key, content.gpu_index, content.times, content.columns)
        elif isinstance(content, wire.StateUpdate) and content.machine is not None:
            self.history.append(content.machine, content.run.run_rss_bytes, together(content.run.run_memory))
        elif isinstance(content, MachineSnapshot):
            self.history.append(content)
        elif isinstance(content, ReplayPosition) and content.rewound:
            self.history = History()

    def watch_store(self) -> None:
        # Once for all messages of a tick, because drawing costs far more than folding.
        if self.is_mounted and not self._hand_down_due:
            self._hand_down_due = True
            self.call_later(self._hand_down)

    def on_resize(self, event: Resize) -> None:
        self._plan = None
        self.flash.fold()
        self._hand_down()

    def _check_quiet(self) -> None:
        quiet = time.monotonic() - self._heard
        shown = quiet if quiet > max(5.0, self._interval * _QUIET_INTERVALS) else 0.0
        if shown or self.store.quiet_seconds:
            self.store = replace(self.store, quiet_seconds=shown)

    def _preset_keys(self, store: Store) -> tuple[int, ...]:
        if store.run is None:
            return ()
        if self._presets is None:
            self._presets = {}
            try:
                self._presets = load_presets()
            except PresetFileError as error:
                self.say(str(error), "failed")
        recipe = store.run.settings.recipe if store.run.settings is not None else ""
        return tuple(preset.key for preset in usable(self._presets, recipe).values() if preset.key is not None)

    # --- store -> panels --------------------------------------------------------------------------

    def _hand_down(self) -> None:
        self._hand_down_due = False
        self._open_card(self.store)
        self._do_chosen()
        if self._is_covered():
            return
        store = self.store
        with self.app.batch_update():
            self._arrange(store)
            for panel in self._panels:
                panel.show(store)
            self._colour_borders(store)
            self.action_bar.show(store, width=self.size.width, preset_keys=self._preset_keys(store))
            self._feed_log(store)

    def _open_card(self, store: Store) -> None:
        """Open the recovery card of a run that has run out of memory, once for each attempt, or the
        question about a spike, once for each spike."""
        run = store.run
        # Textual also calls the screen below the topmost one current.
        covered = self.app.screen is not self
        if run is None or store.replaying or self._dialog_open or covered:
            return
        if store.proposal is None and (run.spike is None or store.read_only):
            return
        failed = (run.folder, run.attempt, None if store.proposal is not None or run.spike is None else run.spike.update)
        if failed != self._card_shown:
            self._card_shown = failed
            self._dialog_open = True
            self._carry_out("recovery", "")

    def _is_covered(self) -> bool:
        """Whether a full screen hides the dashboard. Dialogs do not."""
        above = self.app.screen_stack[1:]
        return any(not isinstance(screen, ModalScreen) for screen in above)

    @property
    def is_current(self) -> bool:
        # Textual would paint the screen above again for each change of this one.
        return super().is_current and not self._is_covered()

    def _compositor_refresh(self) -> None:
        super()._compositor_refresh()
        if self.app.screen is not self:
            # Below a dialog: Textual has told the dialog what to paint, and would ask for the same
            # again without end.
            self._repaint_required = False

    def on_screen_resume(self) -> None:
        self._hand_down()

    def _arrange(self, store: Store) -> None:
        """Lay out the panels for the store, only if the layout has changed."""
        wanted = plan(store, self.size.width, self.size.height, notice=bool(notice(store)))
        if wanted == self._plan:
            return
        self._plan = wanted
        for selector, height in wanted.heights.items():
            widget = self.query_one(selector)
            widget.display = height > 0
            if height > 0:
                widget.styles.height = height
        self.query_one("#gpus").styles.grid_size_columns = wanted.gpu_columns
        for selector, shown in wanted.shown.items():
            self.query_one(selector).display = shown

    def _colour_borders(self, store: Store) -> None:
        bands = {f"#gpu-{i}": gpu.band for i, gpu in enumerate(store.gpus[:GPU_PANELS])}
        bands |= {"#host": store.host.band, "#host-big": store.host.band}
        if bands == self._bands:
            return
        self._bands = bands
        for selector, band in bands.items():
            panel = self.query_one(selector)
            panel.set_class(band.value == "edge", "-edge")
            panel.set_class(band.value == "danger", "-danger")

    def _feed_log(self, store: Store) -> None:
        if store.run is not None and store.run.log_path:
            self.log_panel.follow_file(Path(store.run.log_path))
        elif store.log_count > self._log_shown:
            fresh = store.log_count - self._log_shown
            self._log_shown = store.log_count
            self.log_panel.append(store.log[-fresh:])

    # --- the lines above the buttons --------------------------------------------------------------

    def say(self, text: str, kind: str = "note") -> None:
        """Show a message above the buttons; if another screen is open, also as a toast."""
        if not self.display:
            return  # an answer that comes while the dashboard closes
        self.flash.show_message(text, kind, self.store, self.size.height)
        # A toast would cover these lines, so there is none while they are visible.
        if kind in ("good", "bad", "failed") and self.app.screen is not self:
            self.notify(tr(text), severity="information" if kind == "good" else "error", markup=False)

    def leave(self) -> None:
        self.app.exit(self.result())

    def open_run(self, folder: Path) -> None:
        run = self.store.run
        if run is not None and not self.store.replaying and Path(run.folder) == folder:
            while self.app.screen is not self:
                self.app.pop_screen()
        else:
            self.app.exit(DashboardResult("open", opens=folder))

    def hint_quit(self) -> None:
        run = self.store.run
        goes_on = run is not None and not run.observed and not self.store.replaying
        self.say("d closes the dashboard, the run continues; s stops the run" if goes_on else "q quits")

    def result(self) -> DashboardResult:
        """The result with which the dashboard closes."""
        return result_of(self.store)

    # --- actions ----------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "do" and parameters:
            wanted = BY_ID[str(parameters[0])]
            return offered(wanted, self.store) or why_read_only(wanted, self.store) is not None
        return True

    @on(ActionButton.Pressed)
    def _button(self, message: ActionButton.Pressed) -> None:
        action = BY_ID[message.action_id]
        # The one button of all presets opens the table at the current preset.
        self.action_do(action.id, "" if action.id == "preset" else action.keys[0])

    @on(LinePanel.Opened)
    def _open(self, message: LinePanel.Opened) -> None:
        panel = message.panel
        if panel.id == "gpu-table" and 0 <= message.row < len(self.store.gpus):
            self.store = replace(self.store, selected_gpu=message.row)
        elif panel.opens == "gpu" and panel.id != "gpu-table":
            self.store = replace(self.store, selected_gpu=int(str(panel.id).removeprefix("gpu-")))
        self.action_do(panel.opens, "")

    def action_do(self, action_id: str, key: str) -> None:
        """Do the action of a key or a button, or show why it cannot be done now."""
        action = BY_ID[action_id]
        problem = why_read_only(action, self.store) or obstacle(action, self.store)
        if problem is not None and self.store.is_being_read:
            self._chosen = (action_id, key)
        elif problem is not None:
            self.say(f"{tr(action.label).rstrip('…')}{separator(': ')}{tr(problem)}")
        elif action_id == "detach":
            self.leave()
        elif action.group == "view":
            self._view(action_id)
        elif action.group == "replay":
            if isinstance(self.feed, Controlled):
                self.feed.control(action_id.removeprefix("replay_"))
        elif not self._dialog_open:
            # Set before the dialog appears, so that two quick key presses do not open two dialogs.
            self._dialog_open = action_id not in ("free", "checkpoint")
            self._carry_out(action_id, key)

    def do_above_all(self, action_id: str, key: str) -> None:
        """As `action_do`, after all screens above have closed."""
        above = self.app.screen_stack[1:]
        if not above:
            self.action_do(action_id, key)
            return
        self._chosen = (action_id, key)
        for screen in reversed(above):
            screen.dismiss()

    def _do_chosen(self) -> None:
        possible = self.app.screen is self and not self._dialog_open and not self.store.is_being_read
        if self._chosen is not None and possible:
            chosen, self._chosen = self._chosen, None
            self.action_do(*chosen)

    @work(group="actions")
    async def _carry_out(self, action_id: str, key: str) -> None:
        from memtop.tui.dashboard import actions as flows

        try:
            await flows.FLOWS[action_id](self, key)
        finally:
            self._dialog_open = False
            self._do_chosen()
            # The run may have run out of memory while another dialog was open.
            self._open_card(self.store)

    async def ask_supervisor(self, make: Callable[[int], wire.Request]) -> None:
        """Send a request and show each answer."""
        kinds = {wire.Outcome.ACCEPTED: "busy", wire.Outcome.DONE: "good"}
        answers: AsyncIterator[wire.Answer] = self.feed.request(make)
        async for answer in answers:
            self.say(answer.message, kinds.get(answer.outcome, "failed"))

    @work(group="actions")
    async def call_off(self) -> None:
        """Cancel the announced restart.

        Without a question, which would take longer than the countdown; a restart by hand is still
        possible.
        """
        await self.ask_supervisor(lambda number: wire.Stop(id=number))

    def dialog_closed(self) -> None:
        self._dialog_open = False

    def look_closely(self) -> None:
        if isinstance(self.feed, DetailedFeed):
            self.feed.look_closely()

    # --- looking around ---------------------------------------------------------------------------

    def _view(self, action_id: str) -> None:
        log = self.log_panel
        if action_id in _OF_THE_LOG:
            # Low terminals show events in its place.
            self.store = replace(self.store, events_wanted=False)
        if action_id == "palette":
            self.app.action_command_palette()
        elif action_id == "follow":
            log.toggle_follow()
        elif action_id == "search":
            self._open_search()
        elif action_id in ("next_match", "previous_match"):
            log.go_to_match(-1 if action_id == "next_match" else 1)
        elif action_id in ("log_up", "log_down"):
            log.page(-1 if action_id == "log_up" else 1)
        elif action_id == "events":
            self.store = replace(self.store, events_wanted=not self.store.events_wanted)
        else:
            step = -1 if action_id == "gpu_up" else 1
            last = max(0, len(self.store.gpus) - 1)
            self.store = replace(self.store, selected_gpu=min(last, max(0, self.store.selected_gpu + step)))

    def _open_search(self) -> None:
        search = self.query_one("#search", Input)
        search.display = True
        search.focus()

    @on(Input.Submitted, "#search")
    def _search(self, message: Input.Submitted) -> None:
        found = self.log_panel.search(message.value)
        self._close_search()
        if message.value:
            self.say(f"{found} lines with {message.value!r}; n and N go through them" if found else "not found in the log")

    def key_escape(self) -> None:
        if self.query_one("#search", Input).display:
            self.log_panel.search("")
            self._close_search()

    def _close_search(self) -> None:
        search = self.query_one("#search", Input)
        search.value = ""
        search.display = False
        self.set_focus(None)
