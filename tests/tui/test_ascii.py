"""ASCII mode: when it is used, and that every character keeps its place."""

from __future__ import annotations

import math

import pytest

from memtop.supervisor import wire
from memtop.tui.demo import RECORDING
from memtop.tui.filters import to_ascii, wanted
from memtop.tui.recovery import OomCard
from memtop.tui.replay import StreamRecording
from tests.tui.support import RecordingFeed, dashboard, press, screen_text, settle


@pytest.mark.parametrize(
    ("environment", "encoding", "expected"),
    [
        ({}, "utf-8", False),
        ({}, "UTF8", False),
        ({}, "iso8859-1", True),
        ({}, "no-such-encoding", True),
        ({"MEMTOP_ASCII": "1"}, "utf-8", True),
        ({"MEMTOP_ASCII": "0"}, "ascii", False),
    ],
)
def test_when(environment: dict[str, str], encoding: str, expected: bool) -> None:
    assert wanted(environment, encoding) is expected


def test_every_sign_stays_as_wide_as_it_was() -> None:
    assert to_ascii("│ 62 °C ▸ █▓▒░┆ ⣿⠁ │") == "| 62  C > #=%:| #. |"
    assert to_ascii("日本ü") == "?????"


def test_marks_and_signs_mean_the_same_as_before() -> None:
    marks = "✓ survived  ✗ failed  ↻ remedy  ▸ settings  ! warning"
    assert to_ascii(marks) == "+ survived  X failed  @ remedy  > settings  ! warning"
    # "~" stands for a prediction, and ">" alone excludes the value itself.
    assert to_ascii("≥ 10.7 GiB  12.1 ± 0.3") == ">=10.7 GiB  12.1+/-0.3"


SCREENS = (("g",), ("m",), ("o",), ("o", "enter"), ("question_mark",), ("r",), ("u",), ("b",), ("U",))
"""The keys that open each screen."""


async def test_every_screen_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTOP_ASCII", "1")
    recording = StreamRecording(RECORDING)
    states = [row for row in recording.rows if isinstance(row.message, wire.StateUpdate)]
    failed = next(row.time for row in states if row.message.run.proposal is not None)  # type: ignore[union-attr]
    feed = RecordingFeed(*recording.between(-math.inf, failed - 1))
    app = dashboard(feed)

    def check(where: object) -> None:
        text = screen_text(app)
        assert text.isascii(), (where, sorted({c for c in text if not c.isascii()}))
        assert all(len(row) == 120 for row in text.splitlines()), where

    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        check("dashboard")
        for keys in SCREENS:
            await press(pilot, *keys)
            assert app.screen is not app.dashboard, keys
            check(keys)
            while app.screen is not app.dashboard:
                await press(pilot, "escape")
        feed.send(*recording.between(failed - 1, failed))
        await settle(pilot)
        assert isinstance(app.screen, OomCard)
        check("recovery")
