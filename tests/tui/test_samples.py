"""The screen about samples: by update and by prompt, at every size; what it says without any."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memtop.presets.schema import Sampling
from memtop.supervisor import wire
from memtop.tui.samples import SamplesScreen, lines_by_prompt, lines_by_update, samplings
from tests.tui.support import NOW, SETTINGS, RecordingFeed, gpu, opened, press, resize, running, screen_text, settle, text_of

SIZES = ((80, 24), (120, 35), (160, 50))


def sampled(update: int, *texts: str, **values: Any) -> wire.Event:
    known: dict[str, Any] = {
        "update": update,
        "prompts": ["def main(", "Ärger"],
        "texts": list(texts),
        "tokens": 12,
        "seconds": 1.25,
        "peak_bytes": None,
        "problem": None,
    }
    return wire.Event(id=update, time=NOW, attempt=1, kind="sample", message="samples", data={**known, **values})


EVENTS = (
    sampled(10, "x):\n    return x\n", "a"),
    wire.Event(id=11, time=NOW, attempt=1, kind="plan", message="plan"),
    sampled(20, "y):\n    return y\n", "b", peak_bytes=3 << 30),
    sampled(30, problem="memory ran out while samples were written; no samples any more"),
)


def test_the_newest_update_comes_first_with_its_cost_and_the_lines_of_the_text() -> None:
    text = text_of(lines_by_update(samplings(EVENTS), 80))
    assert text.index("update 30") < text.index("update 20") < text.index("update 10")
    assert "update 20   12 tokens, 1.2 s, peak 3.0 GiB, apart from that of the updates" in text
    assert "\n      return y\n" in text
    assert "memory ran out while samples were written; no samples any more" in text


@pytest.mark.parametrize("text", ["", "\n\n", "  \n"])
def test_an_empty_answer_is_named(text: str) -> None:
    for draw in (lines_by_update, lines_by_prompt):
        assert "  (empty answer)" in text_of(draw([sampled(10, text, "a")], 80))


def test_each_prompt_has_its_texts_over_the_updates() -> None:
    text = text_of(lines_by_prompt(samplings(EVENTS), 80))
    assert text.count("def main(") == text.count("Ärger") == 1
    assert text.index("return y") < text.index("return x") < text.index("Ärger") < text.index("  b") < text.index("  a")


@pytest.mark.parametrize("mode", ["colour", "NO_COLOR", "MEMTOP_ASCII"])
async def test_the_screen_opens_scrolls_and_changes_its_order(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    if mode != "colour":
        monkeypatch.setenv(mode, "1")
    feed = RecordingFeed(running(gpu()), wire.EventRows(rows=EVENTS))
    async with opened(feed, "t", size=(80, 24)) as (app, pilot):
        for size in SIZES:
            await resize(pilot, *size)
            assert isinstance(app.screen, SamplesScreen)
            text = screen_text(app)
            assert text.index("update 30") < text.index("update 20")
            assert "the newest update first" in text
            await press(pilot, "p")
            text = screen_text(app)
            assert text.index("update 20") < text.index("update 10")
            assert "each prompt, its newest text first" in text
            await press(pilot, "p")
        feed.send(wire.EventRows(rows=(sampled(40, "new", "newer"),)))
        await settle(pilot)
        assert "update 40" in screen_text(app)
        await press(pilot, "escape")
        assert app.screen is app.dashboard


async def test_without_samples_it_says_how_to_get_them() -> None:
    feed = RecordingFeed(running(gpu()))
    async with opened(feed, "t", size=(160, 50)) as (app, pilot):
        assert app.screen is app.dashboard
        assert "no samples are written: restart with --set sample.prompts=FILE --set sample.every=N" in screen_text(app)
        every = replace(SETTINGS, sample=Sampling(prompts="p", every=50))
        feed.send(running(gpu(), settings=every))
        await settle(pilot)
        await press(pilot, "t")
        assert "no samples are written yet: they come every 50 updates" in screen_text(app)
