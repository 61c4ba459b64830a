"""ASCII mode: when, and that everything drawn keeps its place."""

from __future__ import annotations

import math

import pytest

from memtop.supervisor import wire
from memtop.tui.ascii import to_ascii, wanted
from memtop.tui.demo import RECORDING
from memtop.tui.replay import StreamRecording
from tests.tui.support import RecordingFeed, dashboard, screen_text, settle


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


@pytest.mark.parametrize(
    "keys", [(), ("g",), ("m",), ("o",), ("o", "enter"), ("question_mark",), ("r",), ("u",), ("b",), ("U",), ("w",)]
)
async def test_every_screen_is_ascii(monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]) -> None:
    monkeypatch.setenv("MEMTOP_ASCII", "1")
    recording = StreamRecording(RECORDING)
    states = [row for row in recording.rows if isinstance(row.message, wire.StateUpdate)]
    failed = next(row.time for row in states if row.message.run.proposal is not None)  # type: ignore[union-attr]
    app = dashboard(RecordingFeed(*recording.between(-math.inf, failed if "w" in keys else failed - 1)))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        for key in keys:
            await pilot.press(key)
            await settle(pilot)
        text = screen_text(app)
        assert text.isascii(), sorted({c for c in text if not c.isascii()})
        assert all(len(row) == 120 for row in text.splitlines())
