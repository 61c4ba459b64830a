"""Where the settings of a failed run are changed, its failure and the cause are shown."""

from __future__ import annotations

from msgspec.structs import replace
from textual.widgets import DataTable, Input

from memtop.presets.schema import Zero
from memtop.supervisor import wire
from memtop.supervisor.wire import Change, Configuration, Restart
from tests.tui.failed_runs import PROPOSAL
from tests.tui.support import NOW, SETTINGS, RecordingFeed, gpu, opened, press, running, screen_text, settle

SHARDED = replace(SETTINGS, zero=Zero(stage=2), preset="mine")
HALF = replace(SETTINGS, batch=4, accumulation=8, gradient_checkpointing=True, preset="low")
SIZE = (160, 50)


def died_at(settings: object, present: object) -> wire.ConfigurationRows:
    first = Configuration(number=1, attempt=1, started=NOW, reason="start", settings=settings, outcome="gpu_oom")  # type: ignore[arg-type]
    second = Configuration(number=2, attempt=2, started=NOW, reason="gpu_oom", settings=present)  # type: ignore[arg-type]
    return wire.ConfigurationRows(rows=(first, second))


async def test_presets_and_form_warn_of_settings_that_have_failed() -> None:
    feed = RecordingFeed(running(gpu(), settings=SHARDED), died_at(SETTINGS, SHARDED))
    async with opened(feed, "5", size=SIZE) as (app, pilot):
        assert "! the run has died of memory with batch 8: this is the same, and saves nothing more" in screen_text(app)
        await press(pilot, "7")
        assert "has died" not in screen_text(app)
        await press(pilot, "escape")
        plain = replace(HALF, gradient_checkpointing=False)
        feed.send(running(gpu(), settings=plain), died_at(SETTINGS, plain))
        await settle(pilot)
        await press(pilot, "r")
        assert "has died of memory" not in screen_text(app)
        app.screen.query_one("#batch", Input).value = "9"
        await settle(pilot)
        assert "! the run has died of memory with batch 8: this is more than that (9)" in screen_text(app)


async def test_a_preset_is_shown_as_it_will_be_applied_after_a_failure() -> None:
    feed = RecordingFeed(running(gpu(), settings=HALF), died_at(SETTINGS, HALF))
    async with opened(feed, "5", size=SIZE) as (app, pilot):
        cells = [str(cell) for cell in app.screen.query_one(DataTable).get_row("standard")]
        assert "4 x 8 x 1" in cells
        assert "checkpointing" not in cells[-1]
        await press(pilot, "enter")
        assert feed.requests == [Restart(id=1, change=Change(preset="standard"))]


async def test_the_card_shows_the_cause_before_what_can_be_done() -> None:
    cause = "anonymous memory of rank 0 grew by 5.0 MiB per update until the end: a leak"
    proposal = replace(PROPOSAL, causes=(cause,))
    feed = RecordingFeed(running(gpu(), state=wire.Phase.FAILED, alive=False, proposal=proposal))
    async with opened(feed, size=SIZE) as (app, _):
        text = " ".join(screen_text(app).replace("│", " ").split())
        assert f"! {cause}" in text
        assert text.index(cause) < text.index("What can be done")
