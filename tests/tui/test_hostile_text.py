"""Text of programs, of other users and of run folders cannot control the terminal through the
dashboard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.segment import Segment
from textual.color import Color

from memtop.supervisor import wire
from memtop.tui.feed import LogLines
from memtop.tui.filters import CleanFilter
from memtop.tui.line import cropped, line, plain
from tests.test_clean import HOSTILE, OUTSIDE, RAW
from tests.tui.support import (
    CONFIGURATIONS,
    DIAGNOSIS,
    PROPOSAL,
    SMALLER,
    RecordingFeed,
    dead,
    gpu,
    opened,
    press,
    process,
    screen_text,
)

ENDING = ("o", "k")
SCREENS = (
    ENDING,
    ("g",),
    ("m",),
    ("o",),
    ("o", "enter"),
    ("o", "enter", "e"),
    ("k",),
    ("r",),
    ("1",),
    ("u",),
    ("U",),
    ("h",),
    ("question_mark",),
)
"""The keys that open each screen or dialog."""


@given(st.lists(OUTSIDE, min_size=1, max_size=4))
def test_no_drawn_line_lets_it_through(texts: list[str]) -> None:
    segments = CleanFilter().apply([Segment(text) for text in texts], Color(0, 0, 0))
    for shown in (*(segment.text for segment in segments), *(plain(line((text, "text"))) for text in texts)):
        assert not RAW.search(shown)
        assert "\n" not in shown
    for number, text in enumerate(texts):
        assert "\n" not in cropped(text, 5 * number)


async def test_no_screen_lets_it_through() -> None:
    state = dead(
        replace(
            PROPOSAL,
            diagnosis=replace(DIAGNOSIS, summary=HOSTILE, evidence=(HOSTILE,)),
            remedies=(
                replace(SMALLER, title=HOSTILE, why=HOSTILE),
                replace(SMALLER, id="x", resumable="none", command=HOSTILE),
            ),
            last_advice=(HOSTILE,),
        ),
        reason=HOSTILE,
        warnings=(HOSTILE,),
        name=HOSTILE,
    )
    mine = process(7, user=HOSTILE, command=HOSTILE, name=HOSTILE, reason=HOSTILE, stray=True)
    other = process(8, user=HOSTILE, command=HOSTILE, name=HOSTILE, reason=HOSTILE, choosable=False)
    assert state.machine is not None
    machine = replace(state.machine, gpus=(gpu(name=HOSTILE, processes=(mine, other), error=None),))
    event = wire.Event(id=1, time=0.0, attempt=1, kind=HOSTILE, message=HOSTILE)
    rows = replace(CONFIGURATIONS, rows=tuple(replace(row, reason=HOSTILE) for row in CONFIGURATIONS.rows))
    feed = RecordingFeed(replace(state, machine=machine), wire.EventRows(rows=(event,)), rows, LogLines((HOSTILE,)))
    async with opened(feed, size=(160, 50)) as (app, pilot):
        if app.screen is not app.dashboard:
            await press(pilot, "escape")
        for keys in ((), *SCREENS):
            await press(pilot, *keys)
            assert bool(keys) is (app.screen is not app.dashboard), keys
            shown = screen_text(app)
            assert not RAW.search(shown), (keys, RAW.findall(shown))
            assert all(len(row) == 160 for row in shown.splitlines()), keys
            if keys == ENDING:
                assert "End this process?" in shown
                forged = [row for row in shown.splitlines() if "forged row" in row]
                assert forged
                assert all("right" in row for row in forged), "a line of its own"
            for _ in range(4):
                if app.screen is not app.dashboard:
                    await press(pilot, "escape")
