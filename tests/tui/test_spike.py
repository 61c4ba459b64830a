"""The question after a spike of the loss: when it comes, what it says, and what its keys do."""

from __future__ import annotations

import pytest

from memtop.supervisor.wire import AcceptSpike, Change, Phase, Request, Restart, Spike, Stop
from memtop.tui import spike as spike_dialog
from memtop.tui.spike import SpikeDialog
from tests.tui.support import RecordingFeed, gpu, opened, press, running, screen_text, settle

BACK = Change(assignments={"leave_out": "96-224"}, state_before=38)
SPIKE = Spike(
    update=43,
    message="update 43: the loss rose from 2 to 9 at update 41 and stayed high",
    back=BACK,
    back_words="the state of update 38, without the 32 samples of the updates 40 to 43",
)
NO_WAY_BACK = Spike(update=43, message=SPIKE.message, back_words="memtop cannot go back: no state from before is saved")


@pytest.fixture(autouse=True)
def _every_key_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spike_dialog, "DELIBERATE_SECONDS", 0.0)


@pytest.mark.parametrize("size", [(80, 24), (120, 35), (160, 50)])
async def test_it_opens_by_itself_and_says_what_each_answer_means(size: tuple[int, int]) -> None:
    async with opened(RecordingFeed(running(gpu(), spike=SPIKE)), size=size) as (app, pilot):
        assert isinstance(app.screen, SpikeDialog)
        text = " ".join(screen_text(app).split())
        for words in ("The loss of tiny has jumped", "the loss rose from 2 to 9", "Go back to the state of update 38"):
            assert words in text, words
        for button in ("Later (Esc)", "Stop (s)", "Go on (g)", "Go back (b)"):
            assert button in text, button
        await press(pilot, "enter")
        assert app.screen is app.dashboard, "Enter alone decides nothing"
        assert "(w: go back, go on or stop)" in screen_text(app)
        await press(pilot, "w")
        assert isinstance(app.screen, SpikeDialog)


@pytest.mark.parametrize(
    ("key", "request_"),
    [("b", Restart(id=1, change=BACK)), ("g", AcceptSpike(id=1)), ("s", Stop(id=1))],
)
async def test_each_key_is_an_answer(key: str, request_: Request) -> None:
    feed = RecordingFeed(running(gpu(), spike=SPIKE))
    async with opened(feed, key) as (app, pilot):
        await settle(pilot)
        assert app.screen is app.dashboard
        assert feed.requests == [request_]


async def test_without_a_state_from_before_it_only_says_so() -> None:
    feed = RecordingFeed(running(gpu(), spike=NO_WAY_BACK))
    async with opened(feed, "b") as (app, _):
        assert isinstance(app.screen, SpikeDialog)
        assert "memtop cannot go back: no state from before is saved" in screen_text(app)
        assert "Go back (b)" not in screen_text(app)
        assert feed.requests == []


async def test_a_run_that_is_over_can_only_go_back() -> None:
    feed = RecordingFeed(running(gpu(), spike=SPIKE, state=Phase.FAILED, alive=False))
    async with opened(feed, "g", "s") as (app, pilot):
        assert isinstance(app.screen, SpikeDialog)
        assert "Go on (g)" not in screen_text(app)
        await press(pilot, "b")
        assert feed.requests == [Restart(id=1, change=BACK)]


async def test_it_closes_when_somebody_else_has_answered() -> None:
    feed = RecordingFeed(running(gpu(), spike=SPIKE))
    async with opened(feed) as (app, pilot):
        assert isinstance(app.screen, SpikeDialog)
        feed.send(running(gpu()))
        await settle(pilot)
        assert app.screen is app.dashboard


async def test_a_read_only_dashboard_is_not_asked() -> None:
    feed = RecordingFeed(running(gpu(), spike=SPIKE), read_only=True)
    async with opened(feed) as (app, pilot):
        assert app.screen is app.dashboard
        await press(pilot, "w")
        assert isinstance(app.screen, SpikeDialog)
        assert "Go back (b)" not in screen_text(app)
