"""Screens end once, whatever closes them at the same time and whatever lies over them."""

from __future__ import annotations

from memtop.supervisor import wire
from memtop.tui.app import DashboardApp, TooSmallScreen
from memtop.tui.dashboard.screen import DashboardScreen
from memtop.tui.recovery import OomCard
from memtop.tui.screen import ClosingScreen
from tests.tui.failed_runs import CONFIGURATIONS, dead
from tests.tui.support import RecordingFeed, gpu, opened, press, resize, running, settle

ADVICE = wire.Advice(bottleneck="compute", summary="the processor works")


def at_once(app: DashboardApp, *updates: wire.StateUpdate) -> None:
    """As when the terminal, or the machine, was slow: all are there before the first is drawn."""
    for update in updates:
        app.dashboard.post_message(DashboardScreen.FeedReceived(update))


async def test_a_card_whose_run_goes_on_closes_once_however_many_updates_say_so() -> None:
    async with opened(RecordingFeed(running(gpu()), dead()), size=(160, 50)) as (app, pilot):
        for attempt, count in enumerate((1, 2, 3, 5), 3):
            assert isinstance(app.screen, OomCard)
            at_once(app, *(running(gpu(), attempt=attempt, updates=30 + number) for number in range(count)))
            await settle(pilot)
            assert app.screen is app.dashboard, count
            at_once(app, dead(attempt=attempt))
            await settle(pilot)
        at_once(app, running(gpu(), attempt=8), dead(attempt=9), running(gpu(), attempt=10), dead(attempt=11))
        await settle(pilot)
        assert isinstance(app.screen, OomCard)


async def test_a_card_under_another_screen_leaves_that_one_alone() -> None:
    async with opened(RecordingFeed(running(gpu()), dead()), size=(80, 24)) as (app, pilot):
        card = app.screen
        assert isinstance(card, OomCard)
        await resize(pilot, 20, 5)
        assert isinstance(app.screen, TooSmallScreen)
        at_once(app, running(gpu(), updates=30), running(gpu(), updates=31))
        await settle(pilot)
        assert isinstance(app.screen, TooSmallScreen)
        await resize(pilot, 80, 24)
        assert app.screen is app.dashboard
        assert card not in app.screen_stack


async def test_a_card_waits_for_a_terminal_that_can_show_it() -> None:
    async with opened(RecordingFeed(running(gpu())), size=(80, 24)) as (app, pilot):
        await resize(pilot, 20, 5)
        at_once(app, dead(), dead())
        await settle(pilot)
        assert isinstance(app.screen, TooSmallScreen)
        await resize(pilot, 80, 24)
        assert isinstance(app.screen, OomCard)
        await press(pilot, "escape")
        assert app.screen is app.dashboard


async def test_every_screen_can_be_closed_twice_while_the_run_goes_on() -> None:
    feed = RecordingFeed(running(gpu()), CONFIGURATIONS, running(gpu(), advice=ADVICE))
    async with opened(feed) as (app, pilot):
        for key in ("u", "b", "o", "g", "m", "h", "r", "s", "k", "1", "U", "question_mark", "w"):
            if key == "w":
                feed.send(dead())
                await settle(pilot)
                await pilot.press("escape")
            await press(pilot, key)
            screen = app.screen
            assert isinstance(screen, ClosingScreen), key
            screen.dismiss(None)
            at_once(app, running(gpu(), updates=30, advice=ADVICE), running(gpu(), updates=31, advice=ADVICE))
            screen.dismiss(None)
            await settle(pilot)
            assert app.screen is app.dashboard, key
        await press(pilot, "o")
        assert app.screen is not app.dashboard
