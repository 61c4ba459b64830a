"""The restart form's second way: a change that the trainer takes up while it runs; and the peak that is to be expected."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from textual.widgets import Button, Input

from memtop.presets.schema import Settings, Zero
from memtop.supervisor import wire
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.wire import Change, Edit, Restart
from memtop.tui.line import plain
from memtop.tui.remedies import MeasuredMemory, outlook_of
from memtop.tui.restart_plan import can_be_live
from memtop.tui.store import Store, fold
from tests.tui.failed_runs import CONFIGURATIONS
from tests.tui.support import (
    GIB,
    SETTINGS,
    RecordingFeed,
    click,
    gpu,
    opened,
    run_state,
    running,
    screen_text,
    settle,
)

SIZES = [(80, 24), (160, 50)]
HALF = replace(SETTINGS, batch=4, accumulation=8)


@pytest.mark.parametrize("size", SIZES)
async def test_another_split_can_be_applied_now_and_the_answer_is_told(size: tuple[int, int]) -> None:
    feed = RecordingFeed(running(gpu()))
    feed.answers = ((wire.Outcome.ACCEPTED, "at the next update"), (wire.Outcome.DONE, "changed from update 26 on"))
    async with opened(feed, "r", size=size) as (app, pilot):
        live = app.screen.query_one("#live", Button)
        assert not live.display
        assert "Apply now" not in screen_text(app)
        app.screen.query_one("#batch", Input).value = "4"
        app.screen.query_one("#accumulation", Input).value = "8"
        await settle(pilot)
        assert live.display
        text = " ".join(screen_text(app).replace("│", " ").split())
        assert "Apply now: from the next update on, without a stop." in text
        await click(pilot, "#live")
        assert feed.requests == [Edit(id=1, change=Change(assignments={"batch": "4", "accumulation": "8"}))]
        assert "✓ changed from update 26 on" in screen_text(app)


async def test_a_run_that_begins_to_train_while_the_form_is_open_can_be_changed_live() -> None:
    feed = RecordingFeed(running(gpu(), state=wire.Phase.STARTING))
    async with opened(feed, "r") as (app, pilot):
        app.screen.query_one("#batch", Input).value = "4"
        await settle(pilot)
        assert not app.screen.query_one("#live").display
        feed.say(running(gpu()))
        await settle(pilot)
        assert app.screen.query_one("#live").display
        assert app.screen.query_one("#batch", Input).value == "4"


async def test_restart_stays_possible_beside_it() -> None:
    feed = RecordingFeed(running(gpu()))
    async with opened(feed, "r") as (app, pilot):
        app.screen.query_one("#batch", Input).value = "4"
        await settle(pilot)
        await click(pilot, "#confirm")
        assert feed.requests == [Restart(id=1, change=Change(assignments={"batch": "4"}))]


@pytest.mark.parametrize(
    ("before", "after", "fields", "live"),
    [
        (SETTINGS, HALF, {}, True),
        (SETTINGS, SETTINGS, {}, False),
        (SETTINGS, replace(HALF, seq_len=64), {}, False),
        (SETTINGS, replace(HALF, preset="low"), {}, False),
        (replace(SETTINGS, zero=Zero(stage=2)), replace(HALF, zero=Zero(stage=2)), {}, False),
        (SETTINGS, HALF, {"state": wire.Phase.STOPPED, "alive": False}, False),
        (SETTINGS, HALF, {"state": wire.Phase.STARTING}, False),
    ],
)
def test_what_can_be_live(before: Settings, after: Settings, fields: dict[str, object], live: bool) -> None:
    assert can_be_live(before, after, run_state(**fields)) is live


@pytest.mark.parametrize("size", SIZES)
async def test_the_form_says_which_peak_is_to_be_expected(size: tuple[int, int]) -> None:
    async with opened(RecordingFeed(running(gpu()), CONFIGURATIONS), "r", size=size) as (app, pilot):
        app.screen.query_one("#batch", Input).value = "2"
        await settle(pilot)
        text = screen_text(app)
        # Peaks of 6, 10 and 18 GiB at 4, 8 and 16: 2 GiB and 1 for each sample.
        assert "VRAM peak 10.0 GiB measured -> ~4.0 GiB predicted 20.0 % · safe" in text
        assert "from: line through peaks at B 4 and B 8" in text
        app.screen.query_one("#batch", Input).value = "16"
        await settle(pilot)
        text = screen_text(app)
        # A look ahead is a prediction, whatever it is made from.
        assert "-> ~18.0 GiB predicted 90.0 % ^ edge" in text
        assert "from: measured at B 16" in text


async def test_where_no_forecast_is_possible_the_reason_is_given() -> None:
    async with opened(RecordingFeed(running(gpu())), "r") as (app, _):
        assert "? VRAM peak cannot be predicted: nothing was measured with these settings yet" in screen_text(app)


def test_of_several_cards_the_smallest_that_the_run_uses_counts() -> None:
    cards = (gpu(0), gpu(1, total_bytes=12 * GIB), gpu(2, total_bytes=8 * GIB))
    ranks = tuple(RankMemory(rank=n, pid=n, connected=True, device_uuid=cards[n].uuid) for n in (0, 1))
    store = fold(Store(), running(*cards, ranks=ranks))
    outlook = outlook_of(store)
    assert (outlook.on_gpu, outlook.total_bytes) == (True, 12 * GIB)


def test_on_the_cpu_it_is_host_memory_within_its_limit() -> None:
    settings = replace(SETTINGS, device="cpu")
    outlook = outlook_of(fold(Store(), running(settings=settings)))
    assert (outlook.on_gpu, outlook.total_bytes) == (False, 32 * GIB)
    peaks = (Peak(batch=4, bytes=GIB, updates=9, settings_key="another"),)
    (line,) = MeasuredMemory(peaks, None, 32 * GIB, on_gpu=False).lines(settings, 200)
    assert plain(line) == "? RAM peak cannot be predicted: nothing was measured with these settings yet"
