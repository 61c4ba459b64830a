"""The dashboard sends a terminal no more than it can take."""

from __future__ import annotations

import os
import pty
import sys
import termios
import time
import tty

import pytest

from memtop.tui import app as app_of
from memtop.tui import pace as pace_of
from memtop.tui.pace import MOST_COUNTED, MOST_PER_SECOND, Pace, bytes_per_second, takes_more
from tests.conftest import Runs
from tests.terminal import Terminal
from tests.tui.support import RecordingFeed, dashboard, gpu, opened, press, running, screen_text, settle

VERY_SLOW = 1.0
MANY = 3600
"""Bytes for which a line that slow needs longer than any test."""


def test_a_frame_waits_until_the_line_has_carried_the_ones_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pace_of.time, "monotonic", lambda: now)
    pace = Pace(960.0)
    assert pace.wait() == 0
    pace.sent(9600)
    assert pace.wait() == pytest.approx(10)
    pace.sent(960)
    assert pace.wait() == pytest.approx(11)
    now += 11
    assert pace.wait() == 0
    now += 3600
    pace.sent(960)
    assert pace.wait() == pytest.approx(1), "time that passed without a frame is not saved up"


@pytest.mark.parametrize(("rate", "longest"), [(MOST_PER_SECOND, 1), (960, MOST_COUNTED / 960)])
def test_the_answers_to_many_keys_do_not_add_up(rate: float, longest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pace_of.time, "monotonic", lambda: now)
    pace = Pace(rate)
    for _ in range(40):
        pace.sent(77_000)
    assert pace.wait() == pytest.approx(longest)
    now += longest
    assert pace.wait() == 0


@pytest.mark.parametrize(
    ("speed", "wanted"),
    [(termios.B9600, 960.0), (termios.B300, 30.0), (termios.B38400, MOST_PER_SECOND), (termios.B0, MOST_PER_SECOND)],
)
def test_the_speed_that_a_terminal_names_counts_if_it_is_slow(speed: int, wanted: float) -> None:
    master, slave = pty.openpty()
    values = termios.tcgetattr(slave)
    values[4] = values[5] = speed
    termios.tcsetattr(slave, termios.TCSANOW, values)
    assert bytes_per_second(slave) == wanted
    os.close(master)
    os.close(slave)


def test_a_terminal_that_nobody_reads_takes_no_more() -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    os.set_blocking(slave, False)
    pace, written = Pace(1e9, lambda: takes_more(slave)), 0
    # It takes some text at first, and more while the kernel moves it to the other end. A write to a
    # full terminal raises an error here.
    while pace.wait() == 0:
        written += os.write(slave, b"x" * 4096)
    assert written > 0
    os.close(master)
    os.close(slave)


async def test_samples_that_arrive_in_the_meantime_share_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_of, "pace_of_terminal", lambda: Pace(VERY_SLOW))
    feed = RecordingFeed(running(gpu(), loss=7.125))
    app = dashboard(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert "7.125" in screen_text(app)
        app.pace.sent(MANY)
        feed.send(*(running(gpu(), loss=8.25 + number) for number in range(3)))
        await settle(pilot)
        assert app.dashboard.store.run is not None
        assert app.dashboard.store.run.loss == 10.25, "nothing is lost"
        assert "7.125" in screen_text(app)
        # A key is answered at once, with the newest values.
        await press(pilot, "e")
        assert "10.25" in screen_text(app)


async def test_a_frame_that_hardly_waits_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Pace, "wait", lambda pace: waits.pop() if waits else 0.0)
    feed = RecordingFeed()
    app = dashboard(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        waits.append(1e-9)
        deadline = time.monotonic() + 20
        while "7.125" not in screen_text(app):
            assert time.monotonic() < deadline
            feed.send(running(gpu(), loss=7.125))
            await settle(pilot)
        assert not waits


def test_what_the_driver_sends_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_of, "pace_of_terminal", lambda: Pace(VERY_SLOW))
    app, sent = dashboard(RecordingFeed()), list[str]()
    real = app.driver_class.__mro__[1]
    monkeypatch.setattr(real, "write", lambda driver, data: sent.append(data))
    driver = object.__new__(app.driver_class)
    assert app.pace.wait() == 0
    driver.write("x" * MANY)
    assert app.pace.wait() > 0
    assert [len(text) for text in sent] == [MANY]


async def test_nothing_is_painted_below_a_full_screen() -> None:
    async with opened(RecordingFeed(running(gpu())), "h") as (app, pilot):
        assert not app.dashboard.is_current
        await press(pilot, "escape", "question_mark")
        assert app.dashboard.is_current, "it is seen around a dialog"


@pytest.mark.parametrize(("key", "shown"), [("?", "Close"), ("h", "Esc")])
def test_what_changes_below_another_screen_is_not_painted_without_end(runs: Runs, key: str, shown: str) -> None:
    words = [sys.executable, "-m", "memtop", "watch", "--demo"]
    terminal = Terminal(words, columns=100, rows=30, cwd=str(runs.root), environment=runs.environment)
    try:
        terminal.wait_for("? Help")
        terminal.keys(key)
        terminal.wait_for(shown)
        before, screens = terminal.received, {terminal.text()}
        deadline = time.monotonic() + 120
        # Two samples at least: the screen changes as it opens, and then with each sample.
        while len(screens) < 4:
            screens.add(terminal.text())
            # A whole screen has about 20 kB.
            assert terminal.received - before < 100_000
            assert time.monotonic() < deadline, screens
    finally:
        terminal.close()
