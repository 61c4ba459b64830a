"""Notifications by the terminal: which bytes it gets, and when."""

from __future__ import annotations

import time

import pytest

from memtop.cli import run
from memtop.supervisor import wire
from memtop.supervisor.run.notices import TOPICS
from memtop.tui.app import DashboardApp
from memtop.tui.feed import ReplayPosition
from memtop.tui.notices import TerminalNotices
from memtop.tui.store import Store, fold
from tests.tui.support import RecordingFeed, gpu, running, settle


def happened(kind: str, message: str = "m", *, ago: float = 0.0, number: int = 1) -> wire.EventRows:
    event = wire.Event(id=number, time=time.time() - ago, attempt=1, kind=kind, message=message)
    return wire.EventRows(rows=(event,))


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("bell", "\x07"),
        ("osc9", "\x1b]9;tiny has failed: no memory, see the log\x1b\\"),
        ("osc777", "\x1b]777;notify;tiny has failed;no memory, see the log\x1b\\"),
    ],
)
def test_the_terminal_is_told_once(way: str, text: str) -> None:
    told = TerminalNotices(way, TOPICS)
    store = fold(Store(), running(gpu()))
    assert told.of(store) == ""
    store = fold(store, happened("failed", "no\x1b[2J memory; see the log"))
    assert told.of(store) == text
    assert told.of(fold(store, running(gpu()))) == ""
    assert told.of(fold(store, happened("checkpoint", number=2))) == ""


def test_what_was_before_the_dashboard_or_is_replayed_is_not_told() -> None:
    told = TerminalNotices("bell", TOPICS)
    store = fold(Store(), running(gpu()))
    assert told.of(fold(store, happened("failed", ago=60))) == ""
    replayed = fold(fold(store, ReplayPosition("replay", "replay", rewound=False)), happened("failed"))
    assert told.of(replayed) == ""
    assert TerminalNotices("bell", {"stall"}).of(fold(store, happened("failed"))) == ""


async def test_the_dashboard_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = RecordingFeed(running(gpu()))
    app = DashboardApp(feed, notices=TerminalNotices("bell", TOPICS))
    async with app.run_test(size=(80, 24)) as pilot:
        written: list[str] = []
        assert app._driver is not None
        monkeypatch.setattr(app._driver, "write", written.append)
        feed.send(happened("finished"))
        await settle(pilot)
        assert written.count("\x07") == 1


def test_a_wrong_way_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MEMTOP_NOTIFY_DESKTOP", "loud")
    monkeypatch.setattr("memtop.cli.dashboard.need_terminal", lambda: None)
    assert run(["watch"]) == 2
    assert capsys.readouterr().err == "memtop: MEMTOP_NOTIFY_DESKTOP: notify-desktop 'loud': there are bell, osc9, osc777\n"
