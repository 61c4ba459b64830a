"""Layouts, states and how screens close: every size, any number of GPUs, no GPU, no run, no
supervisor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from memtop.supervisor import wire
from memtop.supervisor.recovery.values import Advice
from memtop.tui.app import DashboardApp, TooSmallScreen
from memtop.tui.dashboard.log import LogPanel
from memtop.tui.dashboard.screen import DashboardScreen
from memtop.tui.feed import Connected, Disconnected, LogLines
from memtop.tui.panel import LinePanel
from memtop.tui.recovery import OomCard
from memtop.tui.screen import ClosingScreen
from tests.tui.support import (
    CONFIGURATIONS,
    RecordingFeed,
    dashboard,
    dead,
    gpu,
    machine,
    opened,
    press,
    process,
    resize,
    run_state,
    running,
    screen_text,
    settle,
    text_of,
)

TITLES = ("GPU 0 ", "GPU 1 ", "GPU 2 ", "GPU 3 ", "Host memory")


async def test_any_number_of_gpus_fits_on_any_terminal_also_when_they_come_and_go() -> None:
    feed = RecordingFeed()
    async with opened(feed) as (app, pilot):
        for columns, rows in ((80, 24), (160, 50), (120, 40), (60, 15), (200, 20), (70, 60)):
            await resize(pilot, columns, rows)
            for count in (1, 2, 8, 16, 0):
                note = None if count else "no NVIDIA GPU: no NVIDIA driver found"
                shown = machine(*(gpu(n, 0.4 + n / 40) for n in range(count)), note=note)
                feed.send(wire.StateUpdate(run=run_state(), machine=shown))
                await settle(pilot)
                text, where = screen_text(app), (columns, rows, count)
                assert "tiny" in text, where
                assert "Help" in text, where
                why = "no NVIDIA GPU: no NVIDIA driver found - training" + " on CPU" * (columns >= 80)
                assert (why in text) is (count == 0), where
                # The lowest terminals may not have a line for each of 16.
                seen = range(count) if rows > 20 else range(min(count, 1))
                assert all(f"{40 + 2.5 * n:.1f}" in text for n in seen), where
                if rows > 20:
                    assert "24 / 60" in text, where
                    assert count or "24.0 / 32.0 GiB" in text, where


async def test_every_key_has_its_button_at_80x24_and_wide_terminals_have_every_panel() -> None:
    async with opened(RecordingFeed(running(gpu(0), gpu(1))), size=(80, 24)) as (app, pilot):
        bottom = screen_text(app).splitlines()[-1]
        for words in ("f Free", "k Kill  ", "r Restart", "1-7 Preset", "c Save", "s Stop", "d Detach", "? Help"):
            assert words in bottom
        await resize(pilot, 160, 50)
        text = screen_text(app)
        for title in ("GPU 0  RTX A4500", "GPU 1  RTX A4500", "Host memory", "Training", "Loss", "Events", "Log"):
            assert title in text


async def test_without_a_run_the_gpus_stand_in_two_columns_and_the_host_below() -> None:
    async with opened(RecordingFeed(machine(*(gpu(n) for n in range(4)))), size=(160, 50)) as (app, pilot):
        rows = screen_text(app).splitlines()
        for size in ((160, 50), (120, 35)):
            await resize(pilot, *size)
            rows = screen_text(app).splitlines()
            at = {words: (n, row.index(words)) for n, row in enumerate(rows) for words in TITLES if words in row}
            assert at["GPU 0 "][0] == at["GPU 1 "][0] < at["GPU 2 "][0] == at["GPU 3 "][0] < at["Host memory"][0]
            assert at["GPU 1 "][1] == at["GPU 3 "][1] > size[0] // 2 > at["GPU 2 "][1]
            assert sum(row.count("util ") for row in rows) == 4, "every panel shows its numbers"
        await resize(pilot, 80, 24)
        assert "Host memory" not in screen_text(app)


async def test_one_key_gives_a_panel_the_whole_screen() -> None:
    metrics = wire.MetricRows(rows=tuple(wire.Metric(update=n, attempt=1, loss=4 - n / 40) for n in range(1, 70)))
    async with opened(RecordingFeed(running(gpu()), metrics), size=(80, 24)) as (app, pilot):
        assert "▇▆" in screen_text(app), "the loss as a sparkline"
        titles = []
        for key in "zzzzzz":
            await press(pilot, key)
            titles.append(screen_text(app).splitlines()[0].split("panel")[0].removeprefix(" memtop").strip())
        assert titles == ["Loss", "Training", "Events", "GPU 0  RTX A4500  GPU-0000", "Host memory", "GPU processes"]
        await press(pilot, "z")
        text = screen_text(app)
        assert "update 1" in text
        assert text.count("│") > 15, "the curve has the whole screen"
        await press(pilot, "left")
        assert "GPU processes" in screen_text(app)
        await press(pilot, "escape")
        assert app.screen is app.dashboard


async def test_many_gpus_share_a_panel_and_the_selected_one_has_details() -> None:
    async with opened(RecordingFeed(running(*(gpu(n, 0.1 + n / 20) for n in range(8)))), size=(160, 50)) as (app, pilot):
        assert "▸ 0" in screen_text(app)
        await press(pilot, "down", "down")
        text = screen_text(app)
        assert "▸ 2" in text
        assert "GPU 2  RTX A4500" in text


async def test_without_a_run_the_machine_and_its_processes() -> None:
    async with opened(RecordingFeed(machine(gpu(processes=(process(77),)))), size=(80, 24)) as (app, pilot):
        for size in ((80, 24), (160, 50)):
            await resize(pilot, *size)
            text = screen_text(app)
            for words in ("this machine", "job-77", "Kill"):
                assert words in text
            for words in ("Restart", "Loss"):
                assert words not in text
            await press(pilot, "r")
            assert app.screen is app.dashboard


async def test_too_small_says_so_and_recovers() -> None:
    async with opened(RecordingFeed(running(gpu())), size=(58, 12)) as (app, pilot):
        assert "terminal too small: 58x12" in screen_text(app)
        assert "memtop needs 60x15" in screen_text(app)
        await resize(pilot, 80, 24)
        assert "too small" not in screen_text(app)
        assert "tiny" in screen_text(app)
        await resize(pilot, 40, 10)
        assert "40x10" in screen_text(app)
        await pilot.press("q")
    assert app.return_value is not None


async def test_a_lost_supervisor_is_a_worded_state() -> None:
    feed = RecordingFeed(running(gpu()))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        feed.send(Disconnected("supervisor is gone - reconnecting"))
        await settle(pilot)
        for size in ((80, 24), (160, 50)):
            await resize(pilot, *size)
            assert "! supervisor is gone - reconnecting" in screen_text(app)
            assert "loss 1.842" in screen_text(app)
            await press(pilot, "f")
            assert feed.requests == []
        feed.send(Connected(), running(gpu()))
        await settle(pilot)
        assert "! supervisor is gone" not in screen_text(app)


async def test_old_values_are_marked_as_old(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("memtop.tui.dashboard.screen.time", SimpleNamespace(monotonic=lambda: clock.now))
    async with opened(RecordingFeed(running(gpu())), size=(80, 24)) as (app, pilot):
        clock.now += 30.0
        while "no data" not in screen_text(app):
            await pilot.pause(0.05)
        assert "! no data for 30 s" in screen_text(app)


async def test_the_whole_reason_of_a_failure_is_shown_on_the_wide_panel() -> None:
    why = "runs/tiny/train_latest_state: not saved: 16 MiB needed, 3 MiB free; the state before is kept, free some space"
    feed = RecordingFeed(running(gpu(), state=wire.Phase.FAILED, alive=False, reason=why))
    async with opened(feed, size=(160, 50)) as (app, _):
        assert "✗ failed" in screen_text(app)
        text = " ".join(text_of(app.dashboard.query_one("#training", LinePanel).lines).split())
        assert why in text
        assert "checkpoint update 20" in text


async def test_the_log_follows_holds_still_and_is_searched() -> None:
    feed = RecordingFeed(running(gpu()), LogLines(tuple(f"[rank 0] line {n}" for n in range(200))))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        assert "line 199" in screen_text(app)
        await pilot.press("l")
        feed.send(LogLines(("[rank 0] the newest line",)))
        await settle(pilot)
        assert "not following" in screen_text(app)
        assert "newest" not in screen_text(app)
        await press(pilot, "l")
        assert "newest" in screen_text(app)
        await press(pilot, "slash", *"line 42", "enter")
        assert "1 lines with 'line 42'" in screen_text(app)
        assert "[rank 0] line 42" in screen_text(app)
        await press(pilot, "pageup")
        assert "[rank 0] line 42" not in screen_text(app)
        # The words of the search are no markup.
        await press(pilot, "slash", *"[/INST]", "enter")
        assert "0 lines" in screen_text(app)


async def test_a_search_on_a_small_terminal_brings_the_log_back_in_place_of_the_events() -> None:
    feed = RecordingFeed(running(gpu()), LogLines(tuple(f"[rank 0] line {n}" for n in range(200))))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        await press(pilot, "e")
        assert "line 199" not in screen_text(app)
        await press(pilot, "slash", *"line 42", "enter")
        assert "[rank 0] line 42" in screen_text(app)


async def test_events_take_the_logs_place_on_a_small_terminal() -> None:
    event = wire.Event(id=1, time=0.0, attempt=1, kind="attempt", message="attempt 1 started")
    feed = RecordingFeed(running(gpu()), wire.EventRows(rows=(event,)))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        assert "attempt 1 started" not in screen_text(app)
        await press(pilot, "e")
        assert "attempt 1 started" in screen_text(app)
        assert not app.dashboard.query_one("#log", LogPanel).display
        # The same values again paint no line anew, another loss only its own.
        painted: list[object] = []
        panel = app.dashboard.query_one("#compact-training", LinePanel)
        panel.refresh = lambda *regions, **kwargs: painted.extend(regions or ("all of it",))  # type: ignore[method-assign, assignment]
        feed.send(running(gpu()))
        await settle(pilot)
        assert painted == []
        feed.send(running(gpu(), loss=1.7))
        await settle(pilot)
        assert len(painted) == 1


async def test_a_progress_bar_is_one_line_of_the_log_that_moves(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_bytes(b"begin\n\r 10%|#")
    app = dashboard(RecordingFeed(running(gpu(), log_path=str(log))))
    async with app.run_test(size=(120, 40)) as pilot:
        rows = app.dashboard.query_one(LogPanel)

        async def until(*expected: str) -> None:
            while tuple(rows.rows) != expected:
                await pilot.pause(0.02)

        await until("begin", " 10%|#")
        await settle(pilot)
        assert "10%|#" in screen_text(app)
        with log.open("ab") as file:
            file.write(b"\r 20%|##")
        await until("begin", " 20%|##")
        with log.open("ab") as file:
            file.write(b"\r 99%|####\nend\n")
        await until("begin", " 99%|####", "end")


ADVICE = Advice(bottleneck="compute", summary="the processor works")


def at_once(app: DashboardApp, *updates: wire.StateUpdate) -> None:
    """All of them arrive before the first is drawn, as on a slow terminal or machine."""
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


async def test_a_panel_that_was_hidden_goes_on_when_the_terminal_changes_its_size() -> None:
    feed = RecordingFeed(running(gpu(), updates=5, total_updates=60))
    async with opened(feed, size=(80, 24)) as (app, pilot):
        for columns, rows, update in ((160, 50, 11), (80, 24, 22), (160, 50, 33), (80, 24, 44)):
            await resize(pilot, columns, rows)
            for later in (update, update + 1):
                feed.send(running(gpu(), updates=later, total_updates=60))
                await settle(pilot)
            assert f"{update + 1} / 60" in screen_text(app)
