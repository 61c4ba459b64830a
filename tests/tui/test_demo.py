"""The demo: what its recording holds, and that the dashboard plays it."""

from __future__ import annotations

import gzip
import re

import pytest

from memtop.supervisor import wire
from memtop.tui.app import DashboardApp
from memtop.tui.demo import RECORDING, demo_feed
from memtop.tui.recovery import OomCard
from memtop.tui.replay import Clock, ReplayFeed, StreamRecording
from tests.tui.support import press, resize, screen_text, settle


@pytest.fixture(scope="module")
def recording() -> StreamRecording:
    return StreamRecording(RECORDING)


def states(recording: StreamRecording) -> list[tuple[float, wire.StateUpdate]]:
    return [(row.time, row.message) for row in recording.rows if isinstance(row.message, wire.StateUpdate)]


def failure(recording: StreamRecording) -> float:
    return next(moment for moment, state in states(recording) if state.run.proposal is not None)


def test_the_recording_is_small_enough_for_a_package() -> None:
    assert RECORDING.stat().st_size < 300 * 1024


def test_the_recording_has_two_gpus_a_failure_its_remedies_and_the_run_that_goes_on(recording: StreamRecording) -> None:
    known = states(recording)
    assert all(len(state.machine.gpus) == 2 for _, state in known if state.machine is not None)
    assert any(process.stray for _, s in known if s.machine is not None for gpu in s.machine.gpus for process in gpu.processes)
    proposal = next(state.run.proposal for _, state in known if state.run.proposal is not None)
    assert proposal.diagnosis.of_memory
    assert len(proposal.remedies) > 2
    last = known[-1][1].run
    assert (last.state, last.attempt) == (wire.Phase.FINISHED, 3)
    assert last.trial is not None
    rows = [row.message.rows for row in recording.rows if isinstance(row.message, wire.ConfigurationRows)]
    assert len(rows[-1]) >= 4


def test_the_recording_names_neither_the_user_nor_the_paths_of_the_machine_that_made_it() -> None:
    text = gzip.decompress(RECORDING.read_bytes())
    assert set(re.findall(rb'"user":"(.*?)"', text)) == {b"ada"}
    assert not re.search(rb"/tmp/|/usr/|/root\b|\.venv", text)


async def test_the_demo_opens_on_a_training_run_and_says_what_it_is() -> None:
    app = DashboardApp(demo_feed())
    async with app.run_test(size=(160, 50)) as pilot:
        while app.dashboard.store.machine is None:
            await pilot.pause(0.05)
        await settle(pilot)
        text = screen_text(app)
        assert "demo: a recorded run with scripted GPUs, 00:" in text
        assert "tiny-llama" in text
        assert "GPU 1  RTX A4500" in text
        assert "Restart…" not in text, "a replay is read-only"
        for size in ((80, 24), (160, 50)):
            await resize(pilot, *size)
            for key, name in (("r", "Restart"), ("5", "Preset"), ("c", "Checkpoint"), ("k", "Kill strays")):
                await press(pilot, key)
                assert f"{name}: a replay is read-only" in screen_text(app)
                assert app.screen is app.dashboard


async def test_the_failure_in_the_demo_has_its_recovery_card_and_its_configurations(recording: StreamRecording) -> None:
    at = failure(recording) + 5
    feed = ReplayFeed(lambda: recording, clock=lambda one: Clock(at, one.end))
    app = DashboardApp(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        while app.dashboard.store.proposal is None:
            await pilot.pause(0.05)
        await press(pilot, "space", "w")
        assert isinstance(app.screen, OomCard)
        assert "What can be done" in screen_text(app)
        await press(pilot, "escape", "u")
        assert "Configurations of tiny-llama" in screen_text(app)
