"""A replay: a real ledger and journal rows played in their order, with a clock that the test
moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from memtop.supervisor import wire
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.run.record.configurations import ConfigurationRecord, ConfigurationStart
from memtop.supervisor.run.record.folder import RunFolder, StateFile, create_run, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.wire import Event, Phase
from memtop.tui.app import DashboardApp
from memtop.tui.feed import Disconnected, FeedMessage, ReplayPosition
from memtop.tui.replay import Clock, FolderRecording, ReplayFeed
from memtop.tui.store import Store, fold
from tests.run.brain import SETTINGS, spec
from tests.tui.support import press, screen_text, settle

START = 1_760_000_400.0


class Seconds:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def step(update: int, moment: float, loss: float) -> Step:
    return Step(update=update, time=START + moment, loss=loss, samples_seen=32 * update, tokens=640)


@pytest.fixture
def over(tmp_path: Path) -> RunFolder:
    """Two attempts: updates 1-5, then from 3 on again to 6; two hours of the machine, of which one
    in full."""
    folder = create_run(tmp_path / "runs", spec("tiny", START), fresh=False)
    ledger = Ledger(folder.ledger_path)
    ledger.add_attempt(1, "start", SETTINGS, START + 10, 0)
    ledger.add_reports(1, 0, [step(n, 10 * n + 100, 9.0 - n) for n in range(1, 6)], 0)
    ledger.update_attempt(1, ended=START + 200, outcome="restarted")
    ledger.add_attempt(2, "restart with batch 4", SETTINGS, START + 210, 3)
    ledger.add_reports(2, 0, [step(n, 100 * n + 7000 - 400, 20.0) for n in (4, 5, 6)], 0)
    ledger.update_attempt(2, ended=START + 7300, outcome="finished", exit_status=0)
    for moment, kind in ((10, "attempt"), (205, "stop"), (210, "attempt"), (7300, "finished")):
        ledger.add_event(Event(time=START + moment, attempt=1 if moment < 210 else 2, kind=kind, message=f"{kind} at {moment}"))
    for second in range(0, 7300, 5):
        gpu = GpuSample(index=0, uuid="GPU-a", used_bytes=second, used_fraction=0.5, power_watts=None)
        sample = MachineSnapshot(time=START + second, gpus=(gpu,), host=HostSample(used_fraction=0.25))
        ledger.recorder.add(sample, None)
        ledger.recorder.write(sample, 1)
    ledger.close()
    state = wire.RunState(name="tiny", folder=str(folder.path), state=Phase.FINISHED, created=START, attempt=2, total_updates=6)
    write_json(folder.state_path, StateFile(run=state, socket="none", supervisor_started_ticks=None))
    return folder


def test_the_clock_pauses_hurries_jumps_and_stays_within_the_run() -> None:
    seconds = Seconds()
    clock = Clock(1000.0, 4600.0, monotonic=seconds)
    seconds.now += 10
    assert clock.now == 1010
    clock.change_speed(2)
    seconds.now += 10
    assert clock.now == 1030
    clock.pause()
    seconds.now += 99
    assert clock.now == 1030
    assert clock.position() == "00:00:30 of 01:00:00, paused"
    clock.jump(-60)
    assert clock.now == 1000
    clock.pause()
    for _ in range(20):
        clock.change_speed(2)
    assert clock.speed == 3600
    clock.jump(60)
    assert clock.position() == "00:01:00 of 01:00:00, 3600x"
    for _ in range(20):
        clock.change_speed(0.5)
    assert clock.speed == 1
    clock.jump_to(clock.end)
    seconds.now += 5
    assert (clock.now, clock.position()) == (4600, "01:00:00 of 01:00:00, at its end")


def test_the_run_is_as_it_was_at_every_moment(over: RunFolder) -> None:
    recording = FolderRecording(over.path)
    assert (recording.start, recording.end) == (START, START + 7300)
    states = [recording.state(START + moment) for moment in (5, 50, 131, 201, 220, 7100, 7300)]
    assert [state.state.value for state in states] == [
        *("created", "starting", "training", "restarting", "starting", "training", "finished"),
    ]
    assert [state.updates for state in states] == [None, 0, 3, 5, 3, 5, 6]
    assert [state.loss for state in states] == [None, None, 6, 4, None, 20, 20]
    # The least so far of the updates that count: the second attempt takes back 4 and 5.
    assert [state.best_loss for state in states] == [None, None, 6, 4, None, 6, 6]
    assert [state.attempt for state in states] == [0, 1, 1, 1, 2, 2, 2]
    assert states[2].samples_per_second == pytest.approx(3.2)
    assert states[2].tokens_per_second == pytest.approx(64)
    assert states[2].pace_seconds == pytest.approx(10)
    assert (states[-2].exit_status, states[-1].exit_status) == (None, 0)


def test_the_machine_is_replayed_in_full_for_the_last_hour_and_thinned_out_before(over: RunFolder) -> None:
    recording = FolderRecording(over.path)
    late = recording.machine(START + 7001)
    assert (late.time, late.gpus[0].used_bytes) == (START + 7000, 7000)
    early = recording.machine(START + 1003)
    assert early.time == START + 1003
    # The mean of the samples at 1000 and 1005 s.
    assert early.gpus[0].used_bytes == pytest.approx(1002, abs=1)
    assert early.gpus[0].power_watts is None
    assert early.host.used_fraction == 0.25
    assert recording.machine(START - 100).gpus == ()


async def play(feed: ReplayFeed, until: Callable[[Store], bool], *actions: str) -> tuple[Store, list[FeedMessage]]:
    """Fold the messages of the feed, doing one action after each state, until the condition
    holds."""
    store, heard, left = Store(), [], list(actions)
    async for message in feed.messages():
        heard.append(message)
        store = fold(store, message)
        if until(store) and not left:
            break
        if isinstance(message, wire.StateUpdate) and left:
            feed.control(left.pop(0))
    return store, heard


def replay(folder: RunFolder) -> ReplayFeed:
    seconds = Seconds()
    return ReplayFeed(
        lambda: FolderRecording(folder.path),
        clock=lambda recording: Clock(recording.start, recording.end, monotonic=seconds),
    )


async def test_to_the_end_and_back_everything_comes_in_its_order_and_goes_again(over: RunFolder) -> None:
    feed = replay(over)
    assert feed.read_only
    assert not feed.control("pause")
    at_end, heard = await play(feed, lambda s: s.run is not None and s.run.state is Phase.FINISHED, "end")
    assert [row.update for row in at_end.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row.attempt for row in at_end.metrics] == [1, 1, 1, 2, 2, 2]
    assert [event.kind for event in at_end.events] == ["warning", "attempt", "stop", "attempt", "finished"]
    assert "lines have no times" in at_end.events[0].message
    assert at_end.label == "replay, 02:01:40 of 02:01:40, at its end"
    assert at_end.replaying
    assert next(message for message in heard if isinstance(message, ReplayPosition)).rewound
    back, _ = await play(replay(over), lambda s: s.run is not None and s.run.state is Phase.CREATED, "end", "start")
    assert back.metrics == ()
    assert [event.kind for event in back.events] == ["warning"]


async def test_a_replay_refuses_every_request(over: RunFolder) -> None:
    answers = [answer async for answer in replay(over).request(lambda number: wire.Stop(id=number))]
    assert [answer.outcome for answer in answers] == [wire.Outcome.REFUSED]


async def test_a_run_without_a_past_says_so(tmp_path: Path) -> None:
    folder = create_run(tmp_path, spec("new"), fresh=False)
    with pytest.raises(RunFolderError, match="never started"):
        FolderRecording(folder.path)
    messages = [message async for message in ReplayFeed(lambda: FolderRecording(folder.path)).messages()]
    assert isinstance(messages[0], Disconnected)
    assert "nothing to replay" in messages[0].reason


async def test_the_dashboard_plays_it_with_its_keys(over: RunFolder) -> None:
    feed = replay(over)
    app = DashboardApp(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        while app.dashboard.store.run is None:
            await settle(pilot)
        assert feed.clock is not None
        await pilot.press("greater_than_sign", "greater_than_sign", "space")
        assert (feed.clock.speed, feed.clock.paused) == (4, True)
        await pilot.press("right", "right", "left")
        assert feed.clock.now == START + 60
        await pilot.press("end")
        while app.dashboard.store.run.state is not Phase.FINISHED:
            await asyncio.sleep(0.01)
            await settle(pilot)
        text = screen_text(app)
        assert "replay, 02:01:40 of 02:01:40, at its end" in text
        assert "Stop" not in text
        assert app.dashboard.history.end == START + 7295


DIED = {"kind": "gpu_oom", "confidence": 0.99, "summary": "GPU 0 ran out of memory.", "evidence": ["CUDA out of memory"]}


async def test_a_death_of_memory_and_the_configurations_are_replayed_and_change_nothing(over: RunFolder) -> None:
    ledger = Ledger(over.path / "ledger.sqlite")
    ledger.update_attempt(2, outcome="failed", diagnosis=DIED)
    for number, began in ((1, 10), (2, 210)):
        row = wire.Configuration(
            number=number, attempt=number, started=START + began, reason="why", outcome="replaced", until_update=5
        )
        ledger.save_configuration(ConfigurationRecord(configuration=row, starts=(ConfigurationStart(attempt=row.attempt),)))
    ledger.close()
    recording = FolderRecording(over.path)
    assert [len(recording.configurations(START + moment)) for moment in (5, 50, 220)] == [0, 1, 2]
    # What was to come of the newest one was not known then.
    assert [row.outcome for row in recording.configurations(START + 220)] == ["replaced", None]
    assert recording.configurations(START + 7300)[-1].outcome == "replaced"
    assert recording.state(START + 201).proposal is None
    proposal = recording.state(START + 7300).proposal
    assert proposal is not None
    assert proposal.diagnosis.summary == DIED["summary"]
    feed = replay(over)
    app = DashboardApp(feed)
    async with app.run_test(size=(80, 24)) as pilot:
        while app.dashboard.store.run is None:
            await settle(pilot)
        await pilot.press("end")
        while app.dashboard.store.proposal is None:
            await asyncio.sleep(0.01)
            await settle(pilot)
        assert app.screen is app.dashboard, "a replay opens no card by itself"
        await press(pilot, "w")
        text = screen_text(app)
        assert "GPU 0 ran out of memory." in text
        assert "a replay is read-only" in text
        await press(pilot, "enter", "escape", "u", "enter")
        assert "read-only: nothing can be changed from here" in screen_text(app)
        # Back before it, the card's key has nothing to show.
        await pilot.press("escape", "home")
        while app.dashboard.store.proposal is not None:
            await asyncio.sleep(0.01)
            await settle(pilot)
        assert app.dashboard.store.configurations == ()


def test_an_attempt_that_never_started_is_no_death_of_memory(over: RunFolder) -> None:
    ledger = Ledger(over.path / "ledger.sqlite")
    diagnosis = {"summary": "no such program"}
    ended = {"ended": START + 7200, "outcome": "failed", "start_updates": None, "diagnosis": diagnosis, "launched": False}
    ledger.update_attempt(2, **ended)
    ledger.close()
    assert FolderRecording(over.path).state(START + 7300).proposal is None
