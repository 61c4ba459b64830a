"""The screen about speed: the bottleneck, proposals and refusals, the comparison of a trial, and
requesting one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memtop.supervisor import wire
from memtop.supervisor.recovery.batch_trial import Split, split_refusal
from memtop.supervisor.recovery.peak_line import foreseen
from memtop.supervisor.recovery.values import Advice
from memtop.supervisor.wire import Change, Try
from memtop.tui.dashboard.training import draw_compact_training, draw_training
from memtop.tui.keymap import BY_ID, obstacle
from memtop.tui.line import plain
from memtop.tui.remedies import predicted_line
from memtop.tui.speed import SpeedScreen, advice_lines, trial_lines
from memtop.tui.store import Store, fold
from tests.tui.support import (
    BY_HAND,
    GIB,
    NOW,
    SETTINGS,
    SMALLER,
    RecordingFeed,
    gpu,
    opened,
    press,
    resize,
    run_state,
    running,
    screen_text,
    settle,
    store_of,
)

SIZES = [(80, 24), (160, 50)]
GROW = replace(SMALLER, id="grow", title="batch 8 -> 10, accumulation 5 -> 4", assignments={"batch": "10", "accumulation": "4"})
ADVICE = Advice(
    bottleneck="data",
    summary="The GPU waits for data in 62 % of the time.",
    evidence=("data wait 0.71 s of 1.15 s (median of 50 updates)", "host memory 75 %: safe"),
    proposals=(GROW, BY_HAND),
    refused=("batch 16 -> 32: predicted at 100.8 % of the card",),
)
TRIAL = wire.Trial(
    title="workers 2 -> 4",
    started=NOW,
    state="kept",
    reason="samples/s rose by 12.0 %, the spread is 2.1 %",
    before={"samples_per_second": 30.0, "samples_per_second_spread": 0.6, "peak_bytes": 16.0 * GIB, "swap_bytes": 0.0},
    after={"samples_per_second": 33.6, "samples_per_second_spread": 0.5, "peak_bytes": 16.5 * GIB},
)


async def test_the_screen_shows_what_limits_the_speed_what_would_help_and_what_would_not() -> None:
    async with opened(RecordingFeed(running(gpu(), advice=ADVICE, trial=TRIAL)), "b", size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            assert isinstance(app.screen, SpeedScreen)
            text = screen_text(app)
            await press(pilot, "pagedown")
            text += screen_text(app)
            await press(pilot, "pageup")
            for expected in (
                "The run is data-bound",
                ADVICE.summary,
                ADVICE.evidence[0],
                f"▸ 1  {GROW.title}",
                "~12.0 of 20.0 GiB",
                "✗ batch 16 -> 32: predicted at 100.8 % of the card",
                "✓ kept",
                "30.0 ± 0.6",
                "33.6 ± 0.5",
                "+12.0 %",
                "16.5 GiB",
            ):
                assert expected in text, (size, expected)
        await press(pilot, "escape")
        assert app.screen is app.dashboard


def test_a_forecast_in_bytes_and_in_percent_is_the_same_where_others_hold_memory() -> None:
    found = foreseen(1 * GIB, 20 * GIB, "line", others_bytes=3 * GIB, source="line")
    assert "~4.0 of 20.0 GiB  20.0 %" in plain(predicted_line(found, 80))
    refused = split_refusal(
        SETTINGS, Split(batch=32, accumulation=1), foreseen(8 * GIB, 20 * GIB, "line", 10 * GIB, source="line")
    )
    assert refused is not None
    assert "predicted 90.0 % (18.0 GiB of 20.0 GiB" in refused


async def test_enter_tries_the_marked_proposal_and_shows_the_answer() -> None:
    feed = RecordingFeed(running(gpu()))
    feed.answers = ((wire.Outcome.ACCEPTED, "measuring before"), (wire.Outcome.DONE, "kept: samples/s rose by 12.0 %"))
    async with opened(feed, "b", size=(80, 24)) as (app, pilot):
        assert app.screen is app.dashboard
        assert "· Speed: what limits the speed is not known yet" in screen_text(app)
        feed.send(running(gpu(), advice=ADVICE))
        await settle(pilot)
        for number, size in enumerate(SIZES, 1):
            await resize(pilot, *size)
            app.dashboard.say("")
            await press(pilot, "b", "down", "enter")
            assert "memtop does not do this itself; type: sudo fallocate" in screen_text(app)
            assert len(feed.requests) == number - 1
            await press(pilot, "up", "enter")
            change = Change(assignments={"batch": "10", "accumulation": "4"})
            assert feed.requests[number - 1 :] == [Try(id=number, change=change)]
            assert app.screen is app.dashboard
            assert "✓ kept: samples/s rose by 12.0 %" in screen_text(app)


async def test_where_nothing_can_be_tried_the_reason_is_given() -> None:
    feed = RecordingFeed(running(gpu(), advice=ADVICE, state=wire.Phase.STOPPED, alive=False))
    async with opened(feed, "b", "t", size=(80, 24)) as (app, pilot):
        assert "· a trial measures a run that trains: this one is stopped" in screen_text(app)
        assert "Enter Try" in screen_text(app)
        feed.send(running(gpu(), advice=replace(ADVICE, proposals=())))
        await settle(pilot)
        await press(pilot, "enter", "t")
        assert "There is no proposal." in screen_text(app)
        assert "Enter Try" not in screen_text(app)
        assert "a change is kept" not in screen_text(app)
    assert feed.requests == []


async def test_read_only_shows_the_advice_and_tries_nothing() -> None:
    feed = RecordingFeed(running(gpu(), advice=ADVICE), read_only=True)
    async with opened(feed, "b", "enter", size=(80, 24)) as (app, _):
        assert "· read-only: nothing can be changed from here" in screen_text(app)
        assert feed.requests == []


@pytest.mark.parametrize(
    ("bottleneck", "word"),
    [("data", "data-bound"), ("compute", "compute-bound"), ("launch", "launch-bound"), ("swap", "swapping")],
)
def test_the_training_panel_has_the_word(bottleneck: str, word: str) -> None:
    split = wire.StepSplit(data_wait_seconds=0.1, forward_seconds=0.4, backward_seconds=0.4, optimizer_seconds=0.1)
    store = fold(Store(), running(gpu(), advice=replace(ADVICE, bottleneck=bottleneck), split=split, step_seconds=1.0))
    for width in (54, 70):
        (line,) = [plain(one) for one in draw_training(store, width, 12) if word in plain(one)]
        assert "40 %" in line
        assert "10 %" in line
    assert word in "".join(plain(one) for one in draw_compact_training(store, 80, 3))
    unknown = fold(Store(), running(gpu(), advice=replace(ADVICE, bottleneck="unknown"), split=split))
    assert "bound" not in "".join(plain(one) for one in draw_training(unknown, 54, 12))


def test_unknown_values_of_a_trial_are_dashes_without_a_change() -> None:
    lines = [plain(one) for one in trial_lines(TRIAL, 80)]
    (swap,) = [one for one in lines if one.startswith("swap")]
    assert swap.split() == ["swap", "0", "B", "–"]
    (peak,) = [one for one in lines if one.startswith("peak")]
    assert peak.split() == ["peak", "16.0", "GiB", "16.5", "GiB", "+3.1", "%"]
    assert not any(one.startswith("tokens/s") for one in lines)


def test_a_trial_that_still_measures_has_one_side() -> None:
    half = replace(TRIAL, state="measuring after", reason=None, after={})
    text = "\n".join(plain(one) for one in trial_lines(half, 80))
    assert "measuring after the change" in text
    assert "–" in text
    assert "?" in plain(advice_lines(run_state(), 80)[0])


@pytest.mark.parametrize(
    ("bottleneck", "summary", "shown"),
    [
        (
            "compute",
            "compute-bound: only 1 % of each update waits for data",
            "The run is compute-bound Only 1 % of each update",
        ),
        ("data", "waiting for data: 40 % of each update", "The run is data-bound Waiting for data: 40 % of each update"),
        ("unknown", "not known yet: 3 updates measured, 16 are needed", "Not known yet: 3 updates measured"),
    ],
)
def test_the_judgement_is_shown_once(bottleneck: str, summary: str, shown: str) -> None:
    run = running(gpu(), advice=replace(ADVICE, bottleneck=bottleneck, summary=summary, evidence=())).run
    assert " ".join(" ".join(plain(one) for one in advice_lines(run, 80)).split()).startswith(shown)


def test_of_a_run_that_is_over_nothing_is_promised() -> None:
    over = running(gpu(), state=wire.Phase.STOPPED, alive=False)
    early = replace(ADVICE, bottleneck="unknown", summary="not known yet: 3 updates measured, 10 are needed", evidence=())
    for advice in (None, early):
        text = plain(advice_lines(replace(over.run, advice=advice), 100)[0])
        assert text == "? what limited the speed is not known: the run ended before it was computed"
    assert obstacle(BY_ID["speed"], store_of(over)) == text.removeprefix("? ")
