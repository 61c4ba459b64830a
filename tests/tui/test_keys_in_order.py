"""Keys that arrive all at once take effect in the order in which they were typed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from textual.events import Key, Paste
from textual.widgets import Button, Input

from memtop.tui.app import DashboardApp
from memtop.tui.restart import RestartDialog
from tests.terminal import Terminal
from tests.tui.support import RecordingFeed, gpu, opened, running, settle


def type_at_once(app: DashboardApp, *keys: str) -> None:
    """Post the keys without a pause, as a terminal does that delivers many bytes in one read."""
    for key in keys:
        app.post_message(Key(key, key if len(key) == 1 else None))


def fields(app: DashboardApp) -> list[str]:
    return [box.value for box in app.screen.query(Input)]


async def test_editing_keys_and_characters_keep_their_order_in_every_field() -> None:
    async with opened(RecordingFeed(running(gpu())), "r") as (app, pilot):
        assert fields(app) == ["8", "4", "128"]
        typed = [*"1234", *["backspace"] * 3, "5", "home", "9", "end", "7", "left", "delete", "6"]
        type_at_once(app, *typed, "tab", *"16", "left", "3", "tab", "end", "ctrl+u", *"64", "ctrl+a", "1", "ctrl+k", "2")
        await settle(pilot)
        assert fields(app) == ["9156", "136", "12"]


async def test_long_bursts_of_characters_and_backspaces_leave_what_was_meant() -> None:
    async with opened(RecordingFeed(running(gpu())), "r") as (app, pilot):
        for number in range(40):
            type_at_once(app, "backspace", "backspace", *str(number))
        type_at_once(app, "tab", "1", "tab")
        while fields(app)[1] != "1":  # all keys before it have taken effect
            await pilot.pause(0.02)
        assert fields(app)[0] == "39"


async def test_what_is_typed_right_after_r_goes_into_the_form() -> None:
    async with opened(RecordingFeed(running(gpu()))) as (app, pilot):
        type_at_once(app, "r", "4", "tab", "8", "enter")
        await settle(pilot)
        assert isinstance(app.screen, RestartDialog)
        assert fields(app) == ["4", "8", "128"]
        assert app.focused is app.screen.query_one("#confirm", Button)


async def test_pasted_text_stays_between_the_keys_around_it() -> None:
    async with opened(RecordingFeed(running(gpu()))) as (app, pilot):
        type_at_once(app, "r", "1", "backspace")
        app.post_message(Paste("23"))
        type_at_once(app, "backspace", "5")
        await settle(pilot)
        assert fields(app)[0] == "25"


async def test_a_search_that_is_typed_at_once_reaches_its_input_whole() -> None:
    async with opened(RecordingFeed(running(gpu()))) as (app, pilot):
        type_at_once(app, "slash", *"lost", "backspace", "s")
        await settle(pilot)
        assert app.screen.query_one("#search", Input).value == "loss"


async def test_a_form_closed_in_a_burst_takes_the_keys_until_then() -> None:
    feed = RecordingFeed(running(gpu()))
    async with opened(feed) as (app, pilot):
        type_at_once(app, "r", "2", "escape", "r", "4", "tab", "8", "enter", "enter")
        await settle(pilot)
        assert app.screen is app.dashboard
        assert [request.change.assignments for request in feed.requests] == [{"batch": "4", "accumulation": "8"}]


_PROGRAM = """
from tests.tui.support import RecordingFeed, dashboard, gpu, running

dashboard(RecordingFeed(running(gpu()))).run()
"""


def test_bytes_that_a_terminal_sends_in_one_piece_fill_the_form_in_order() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _PROGRAM]
    screen = Terminal(command, columns=80, rows=24, cwd=str(root), environment=dict(os.environ))
    try:
        screen.wait_for("Restart")
        # Backspace, Left, Tab, Ctrl+U and Enter between the digits.
        screen.keys("r" + "1234\x7f\x7f\x7f5\x1b[D6" + "\t" + "98\x7f\x7f7" + "\t" + "1\x1564" + "\r")
        shown = screen.wait_for("Restart tiny from", " 165 ", " 64 ")
        assert re.search(r" 165 +7 +64 ", shown)
        screen.leave("Restart tiny from")
        screen.keys("\x11")
        assert screen.wait() == 0
    finally:
        screen.close()
