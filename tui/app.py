"""The application: the screen for a terminal that is too small, and how the dashboard
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.command import CommandPalette, Provider
from textual.driver import Driver
from textual.events import Event, Key, Paste, Resize
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widgets import Static

from memtop.supervisor.clean import clean
from memtop.supervisor.language import tr
from memtop.tui import themes
from memtop.tui.choices import Choices, Saved
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.dashboard.screen import DashboardScreen
from memtop.tui.driver import WakingEvent, counting, forget_output, suspending, wait_for_hangup, waiting
from memtop.tui.feed import Feed
from memtop.tui.filters import AsciiFilter, CleanFilter
from memtop.tui.filters import wanted as ascii_wanted
from memtop.tui.keys_in_order import KeysInOrder
from memtop.tui.line import ROLES
from memtop.tui.notices import TerminalNotices
from memtop.tui.pace import Pace, pace_of_terminal
from memtop.tui.processes.actions import ProcessActions, RealProcessActions
from memtop.tui.store import Store

SMALLEST = (60, 15)
"""Columns and rows below which nothing useful fits."""

_OF_A_BROWSER = ("TEXTUAL_DRIVER", "TEXTUAL_COLOR_SYSTEM", "PYTHONIOENCODING", "COLUMNS", "ROWS")
"""Variables that tell the process of a browser's tab how to draw. Runs must not inherit them."""
_LEAVE_SECONDS = 5.0
"""How long the app may take to end when its terminal is lost."""
_IGNORED_SECONDS = 30.0
"""How long it is said that a value of the configuration cannot be used."""
_FORGET_SECONDS = 0.05
"""How often what it writes meanwhile is dropped."""


def _commands() -> type[Provider]:
    from memtop.tui.palette import Commands

    return Commands


class DashboardApp(App[DashboardResult]):
    """memtop's dashboard on one feed."""

    CSS_PATH = "memtop.tcss"
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"draw--{role}" for role in ROLES}
    COMMANDS: ClassVar = {_commands}
    # The base class declares these as instance variables, so ClassVar would not do.
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (80, "-narrow"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "hint_quit", "Detach", show=False, system=True),
        Binding("ctrl+q", "detach", "Detach", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: Feed,
        *,
        title: str | None = None,
        interval: float = 1.0,
        process_actions: ProcessActions | None = None,
        notices: TerminalNotices | None = None,
        runs_dir: Path | None = None,
        begins_with_runs: bool = False,
        choices: Choices | None = None,
    ) -> None:
        """`runs_dir`: the folder of the runs that the dashboard can show in place of this one.
        `begins_with_runs`: their list is open at the start."""
        super().__init__()
        self._notices = notices
        self.pace: Pace = pace_of_terminal()
        """How fast it may draw."""
        self._own_filters = (CleanFilter(), AsciiFilter()) if ascii_wanted() else (CleanFilter(),)
        actions = process_actions or RealProcessActions()
        self._dashboard = DashboardScreen(
            feed, label=title or feed.label, interval=interval, process_actions=actions, pace=self.pace
        )
        self._dashboard.runs_dir = runs_dir
        self._dashboard.choices = choices or Choices()
        self._begins_with_runs = begins_with_runs
        self.saved_last: list[Saved] = []
        """The choices that were saved when the dashboard ended."""
        self._watched: tuple[threading.Thread, WakingEvent] | None = None
        """What watches the terminal, and the event that tells it that the app has ended."""
        self._keys_in_order = KeysInOrder(self, super().on_event)
        # A monitor must not spend processor time on animations.
        self.animation_level = "none"
        for own in themes.OWN:
            self.register_theme(own)
        # Set before the screens are styled, so that they are styled only once.
        self.theme = self._dashboard.choices["theme"]

    def refresh_css(self, animate: bool = True) -> None:
        # Textual would read and apply the style sheet before there is a screen, and then again.
        if self.screen_stack:
            super().refresh_css(animate)
        else:
            self.stylesheet.set_variables(self.get_css_variables())

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.memory_colours(self.current_theme)

    def action_choose_theme(self, name: str) -> None:
        """Use a theme from now on, also in later dashboards."""
        self.theme = name
        self._dashboard.choose("theme", name, self._dashboard.say)

    def get_driver_class(self) -> type[Driver]:
        return counting(suspending(waiting(super().get_driver_class())), lambda count: self.pace.sent(count))

    def get_line_filters(self) -> Sequence[LineFilter]:
        return (*super().get_line_filters(), *self._own_filters)

    def on_mount(self) -> None:
        self.title = "memtop"
        if self.is_web:
            for name in _OF_A_BROWSER:
                os.environ.pop(name, None)
        if self._begins_with_runs and self._dashboard.runs_dir is not None:
            from memtop.tui.runs import RunsScreen

            self.push_screen(RunsScreen(self._dashboard, self._dashboard.runs_dir, is_first=True))
        for problem in self._dashboard.choices.take_ignored():
            # What the command says before is covered by the dashboard at once.
            self.notify(tr(problem), severity="warning", markup=False, timeout=_IGNORED_SECONDS)
        if self._notices is not None:
            self.watch(self._dashboard, "store", self._notify, init=False)
        # After a suspension the terminal is empty; Textual would draw only what changes.
        self.app_resume_signal.subscribe(self, lambda _: self.screen.refresh())
        if not self.is_headless:
            ended = WakingEvent()
            arguments = (asyncio.get_running_loop(), ended)
            thread = threading.Thread(target=self._leave_a_lost_terminal, args=arguments, daemon=True)
            thread.start()
            self._watched = thread, ended

    def _notify(self, store: Store) -> None:
        if self._notices is not None and self._driver is not None and (text := self._notices.of(store)):
            self._driver.write(text)

    def on_ready(self) -> None:
        # The first frame is shown (see `run_dashboard`). What was made for it stays.
        if not gc.isenabled():
            gc.freeze()
            gc.enable()

    async def on_unmount(self) -> None:
        self.saved_last = await asyncio.to_thread(self._dashboard.choices.save)

    def _leave_a_lost_terminal(self, loop: asyncio.AbstractEventLoop, ended: WakingEvent) -> None:
        """End when the terminal is closed.

        Without a hang-up signal (a closed multiplexer, `setsid`) the dashboard would run for ever.
        In a thread, because the app may wait for a writer that can write no more.
        """
        if not wait_for_hangup(sys.__stdin__.fileno() if sys.__stdin__ is not None else 0, ended):
            return
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(lambda: self.exit(self.dashboard.result()))
        until = time.monotonic() + _LEAVE_SECONDS
        while not ended.wait(_FORGET_SECONDS):
            forget_output(self._driver)
            if time.monotonic() >= until:
                os._exit(128 + signal.SIGHUP)

    def watch_no_more(self) -> None:
        """Stop watching the terminal: the app has ended."""
        if self._watched is not None:
            thread, ended = self._watched
            ended.set()
            thread.join()

    def get_default_screen(self) -> Screen[None]:
        return self._dashboard

    @property
    def dashboard(self) -> DashboardScreen:
        return self._dashboard

    async def on_event(self, event: Event) -> None:
        # Ctrl+Q waits for nothing: it closes the dashboard also while a screen takes no keys.
        if isinstance(event, (Key, Paste)) and not event.is_forwarded and getattr(event, "key", "") != "ctrl+q":
            await self._keys_in_order.take(event)
        else:
            await super().on_event(event)

    def on_resize(self, event: Resize) -> None:
        too_small = event.size.width < SMALLEST[0] or event.size.height < SMALLEST[1]
        showing = self.screen.id == "too-small"
        if too_small and not showing:
            self.push_screen(TooSmallScreen())
        elif showing and not too_small:
            self.pop_screen()

    def action_command_palette(self) -> None:
        if self.screen.id != "too-small" and not isinstance(self.screen, CommandPalette):
            from memtop.tui.palette import Palette

            self.push_screen(Palette(placeholder=tr("a command, a screen or a theme")))

    def action_detach(self) -> None:
        self.exit(self.dashboard.result())

    def action_hint_quit(self) -> None:
        self.dashboard.hint_quit()


class TooSmallScreen(Screen[None]):
    """One sentence on a terminal that is too small. It closes by itself when the terminal grows."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,d", "app.detach", "Detach", show=False)]

    def __init__(self) -> None:
        super().__init__(id="too-small")

    def compose(self) -> ComposeResult:
        yield Static(id="sentence")

    def on_resize(self, event: Resize) -> None:
        width, height = SMALLEST
        size = f"{event.size.width}x{event.size.height}"
        self.query_one("#sentence", Static).update(tr(f"terminal too small: {size},\nmemtop needs {width}x{height}"))


def run_dashboard(
    feed: Feed,
    *,
    interval: float = 1.0,
    notices: TerminalNotices | None = None,
    runs_dir: Path | None = None,
    begins_with_runs: bool = False,
    choices: Choices | None = None,
) -> DashboardResult:
    """Show the dashboard until the user leaves it. Leaving never stops a run."""
    if gc.get_freeze_count():
        # Of the dashboard before.
        gc.unfreeze()
        gc.collect()
    # The first frame makes many objects and no garbage.
    gc.disable()
    app = DashboardApp(
        feed,
        interval=interval,
        notices=notices,
        runs_dir=runs_dir,
        begins_with_runs=begins_with_runs,
        choices=choices,
    )
    try:
        result = app.run()
    finally:
        gc.enable()
        app.watch_no_more()
    if app.is_web:
        _leave_driver_of_browser(app)
    if app.dashboard.ending_processes:
        words = "the dashboard closed while processes were being ended: `memtop strays` lists what still holds a GPU"
        print(tr(words), file=sys.stderr)  # noqa: T201 - the words are fixed
    for saved in app.saved_last:
        if saved.kind == "bad":
            print(clean(tr(saved.text)), file=sys.stderr)  # noqa: T201 - it is cleaned
    if result is None:
        # Textual returns no result after a crash; it has printed the reason.
        return DashboardResult("detach", exit_status=app.return_code or 0)
    return result


def _leave_driver_of_browser(app: DashboardApp) -> None:
    """Let another dashboard follow in this process, at the present size."""
    os.environ |= {"COLUMNS": str(app.size.width), "ROWS": str(app.size.height)}
    for thread in threading.enumerate():
        # The driver does not wait for its reader, which would take the first keys of the next one.
        if thread.name == "textual-input":
            thread.join()
