"""The feeds: the machine alone, and a run whose supervisor starts, answers and ends; requests for
expensive details."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from memtop.supervisor import wire
from memtop.supervisor.errors import NotRunningError, RunFolderError
from memtop.supervisor.monitor.values import GpuDetails, MachineSnapshot
from memtop.supervisor.observed.observer import Observers, observer_of
from memtop.supervisor.program import Program
from memtop.supervisor.run import client as client_module
from memtop.supervisor.run import starting
from memtop.supervisor.run import view as view_module
from memtop.supervisor.run.machine_watch import MachineWatch
from memtop.supervisor.run.record.folder import create_run
from memtop.supervisor.units import GIB
from memtop.tui import run_feed as feed_module
from memtop.tui.app import DashboardApp
from memtop.tui.feed import Connected, DetailedFeed, Disconnected, FeedMessage, Followed, LocalFeed, Others
from memtop.tui.observed import AllPrograms, OneProgram
from memtop.tui.run_feed import RunFeed
from tests.conftest import Runs
from tests.nvml_double.double import Script, driver, nvml_library  # noqa: F401 (fixtures)
from tests.run.brain import spec
from tests.tui.support import gpu, machine, run_state, running, screen_text


class FakeSampler:
    def __init__(self) -> None:
        self.wishes = 0

    @property
    def nvml(self) -> FakeSampler:
        return self

    def want_pcie(self) -> None:
        self.wishes += 1

    def sample(self) -> MachineSnapshot:
        return machine(gpu())


class FakeClient:
    """A scripted connection to a supervisor: receives the given messages and keeps what was
    sent."""

    def __init__(self, *messages: wire.Message | None) -> None:
        self.sent: list[wire.Request] = []
        self.closed = False
        self.inbox: asyncio.Queue[wire.Message | None] = asyncio.Queue()
        for message in messages:
            self.inbox.put_nowait(message)

    async def send(self, request: wire.Request) -> None:
        self.sent.append(request)

    async def receive(self) -> wire.Message | None:
        return await self.inbox.get()

    async def close(self) -> None:
        self.closed = True


class Supervisors:
    """The clients that the feed connects to, one after the other; None where no supervisor
    listens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *clients: FakeClient | None, revives: bool = False) -> None:
        self.revived = 0
        self.run = run_state(state=wire.Phase.STOPPED, alive=False)
        self._clients = list(clients)
        self._revives = revives
        monkeypatch.setattr(client_module.AsyncRunClient, "connect", self.connect)
        monkeypatch.setattr(starting, "revive", self.revive)
        monkeypatch.setattr(view_module, "read_run", self.read_run)
        monkeypatch.setattr(view_module, "read_configurations", self.read_configurations)

    async def connect(self, folder: Path) -> FakeClient:
        found = self._clients.pop(0) if self._clients else None
        if found is None:
            raise NotRunningError("no supervisor listens")
        return found

    def revive(self, folder: Path) -> bool:
        self.revived += 1
        return self._revives

    def read_configurations(self, folder: Path) -> tuple[wire.Configuration, ...]:
        return (wire.Configuration(number=1, attempt=1, started=0.0, reason="start"),)

    def read_run(self, folder: Path) -> tuple[wire.RunState, list[wire.Metric], list[wire.Event]]:
        return self.run, [wire.Metric(update=1, attempt=1, loss=2.0)], []


def run_feed(**options: bool) -> RunFeed:
    return RunFeed(Path("runs/tiny"), sampler_factory=FakeSampler, retry_seconds=0.0, interval=0.0, **options)


async def take(stream: AsyncIterator[FeedMessage], count: int) -> list[FeedMessage]:
    return [await anext(stream) for _ in range(count)]


async def test_the_machine_alone() -> None:
    feed = LocalFeed(FakeSampler, 0.0)
    first, second = await take(feed.messages(), 2)
    assert isinstance(first, Connected)
    assert isinstance(second, MachineSnapshot)
    (answer,) = [a async for a in feed.request(lambda number: wire.Stop(id=number))]
    assert answer.outcome is wire.Outcome.REFUSED


async def test_a_process_tree_is_followed() -> None:
    _, tree, _ = await take(LocalFeed(FakeSampler, 0.0, pid=os.getpid()).messages(), 3)
    assert isinstance(tree, Followed)
    assert os.getpid() in tree.pids


async def test_training_programs_are_looked_for_beside_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def looked(self: Observers, now: float, snapshot: MachineSnapshot) -> list[object]:
        looks.append(now)
        return []

    monkeypatch.setattr(Observers, "look", looked)
    found = await take(LocalFeed(FakeSampler, 0.0, beside=AllPrograms()).messages(), 5)
    # The second sample is no later than the first.
    assert [type(message) for message in found] == [Connected, MachineSnapshot, Others, MachineSnapshot, MachineSnapshot]
    assert len(looks) == 1


async def test_a_program_that_memtop_did_not_start_has_state_and_losses(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_text("step 1/9 loss 2.0\nstep 2/9 loss 1.5\n")
    with log.open("a") as output:
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        observer = observer_of(program.pid)
        assert observer is not None
        feed = LocalFeed(FakeSampler, 0.0, beside=OneProgram(observer))
        messages = [
            message for message in await take(feed.messages(), 6) if not isinstance(message, Connected | MachineSnapshot)
        ]
    finally:
        program.communicate()
    state, losses, again = messages
    assert isinstance(losses, wire.MetricRows)
    assert [(row.update, row.loss) for row in losses.rows] == [(1, 2.0), (2, 1.5)]
    assert isinstance(state, wire.StateUpdate)
    assert (state.run.updates, state.run.total_updates, state.run.observed, state.run.alive) == (2, 9, True, True)
    assert isinstance(again, wire.StateUpdate)
    assert (again.run.updates, again.run.loss) == (2, 1.5)


async def test_the_stream_and_the_answers_share_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(running(gpu()))
    Supervisors(monkeypatch, client)
    feed = run_feed()
    stream = feed.messages()
    first, second = await take(stream, 2)
    assert isinstance(first, Connected)
    assert isinstance(second, wire.StateUpdate)
    assert isinstance(client.sent[0], wire.Subscribe)
    answers = feed.request(lambda number: wire.FreeCache(id=number))
    waiting = asyncio.ensure_future(anext(answers))
    following = asyncio.ensure_future(anext(stream))
    while len(client.sent) < 2:
        await asyncio.sleep(0)
    number = client.sent[1].id
    client.inbox.put_nowait(wire.Answer(id=999, outcome=wire.Outcome.DONE, message="somebody else's"))
    client.inbox.put_nowait(wire.Answer(id=number, outcome=wire.Outcome.ACCEPTED, message="begun"))
    client.inbox.put_nowait(wire.Answer(id=number, outcome=wire.Outcome.DONE, message="freed"))
    client.inbox.put_nowait(running(gpu()))
    assert (await waiting).message == "begun"
    assert [a.message async for a in answers] == ["freed"]
    assert isinstance(await following, wire.StateUpdate)


async def test_the_first_frame_is_that_of_the_run_while_its_supervisor_has_not_answered(here: Runs) -> None:
    folder = create_run(here.path, spec("named-run"), fresh=False)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(client_module.socket_path(folder.path)))
        silent.listen()
        app = DashboardApp(RunFeed(folder.path))
        async with app.run_test(size=(120, 35)) as pilot:
            await pilot.pause()
            shown = screen_text(app)
            assert all(words in shown for words in ("named-run", "Training", "Log", "preset standard")), shown


async def test_a_supervisor_that_dies_is_replaced_while_the_trainer_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    dying, heir = FakeClient(running(gpu()), None), FakeClient(running(gpu()))
    supervisors = Supervisors(monkeypatch, dying, None, heir, revives=True)
    messages = await take(run_feed().messages(), 5)
    assert messages[2] == Disconnected("supervisor is gone - reconnecting")
    assert isinstance(messages[3], Connected)
    assert isinstance(messages[4], wire.StateUpdate)
    assert dying.closed
    assert supervisors.revived == 1


async def test_a_waiting_request_fails_when_the_supervisor_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(running(gpu()))
    Supervisors(monkeypatch, client)
    feed = run_feed()
    stream = feed.messages()
    await take(stream, 2)
    waiting = asyncio.ensure_future(anext(feed.request(lambda number: wire.Stop(id=number))))
    while len(client.sent) < 2:
        await asyncio.sleep(0)
    client.inbox.put_nowait(None)
    assert isinstance(await anext(stream), Disconnected)
    answer = await waiting
    assert answer.outcome is wire.Outcome.FAILED
    assert "ended before it answered" in answer.message


async def test_a_run_that_is_over_shows_its_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    Supervisors(monkeypatch, None)
    feed = run_feed()
    messages = await take(feed.messages(), 6)
    assert [type(m) for m in messages] == [
        wire.MetricRows,
        wire.EventRows,
        wire.ConfigurationRows,
        wire.StateUpdate,
        Disconnected,
        MachineSnapshot,
    ]
    ended = messages[4]
    assert isinstance(ended, Disconnected)
    assert ended.ended
    assert "memtop restart tiny resumes it" in ended.reason
    (answer,) = [a async for a in feed.request(lambda number: wire.Stop(id=number))]
    assert answer.outcome is wire.Outcome.REFUSED


def test_a_finished_program_with_a_trainer_is_not_offered_again() -> None:
    saved = wire.Checkpoint(path="/out/checkpoint-5", updates=5, complete=True)
    over: dict[str, Any] = {"settings": None, "state": wire.Phase.FINISHED, "alive": False, "updates": 10, "total_updates": 10}
    run = running(gpu(), **over, checkpoint=saved, program=Program(grip="hooks")).run
    assert "restart" not in feed_module._unsupervised(run).reason
    assert "restart" in feed_module._unsupervised(replace(run, total_updates=12)).reason


async def test_the_history_of_a_run_that_is_over_is_read_again_only_if_it_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    supervisors = Supervisors(monkeypatch, None)
    monkeypatch.setattr(view_module, "read_state", lambda folder: supervisors.run)
    state = tmp_path / "state.json"
    state.write_text("{}")
    feed = RunFeed(tmp_path, sampler_factory=FakeSampler, retry_seconds=0.0, interval=0.0)
    stream = feed.messages()
    whole = [wire.MetricRows, wire.EventRows, wire.ConfigurationRows, wire.StateUpdate, Disconnected, MachineSnapshot]
    assert [type(m) for m in await take(stream, 6)] == whole
    supervisors.run = run_state(state=wire.Phase.FAILED, alive=False)
    again = await take(stream, 6)
    assert [type(m) for m in again] == [wire.StateUpdate, Disconnected, MachineSnapshot] * 2
    assert isinstance(again[0], wire.StateUpdate)
    assert again[0].run is supervisors.run, "what is alive now is looked at each time"
    state.write_text('{"changed": 1}')
    assert [type(m) for m in await take(stream, 6)] == whole
    (tmp_path / "ledger.sqlite").write_text("a last event")
    assert [type(m) for m in await take(stream, 6)] == whole
    assert [type(m) for m in await take(stream, 3)] == whole[3:]


async def test_a_supervisor_that_cannot_be_understood_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Garbled(FakeClient):
        async def receive(self) -> wire.Message | None:
            raise RunFolderError("what its supervisor sent cannot be read")

    Supervisors(monkeypatch, Garbled(), FakeClient(running(gpu())))
    messages = await take(run_feed().messages(), 4)
    assert messages[:3] == [Connected(), Disconnected("what its supervisor sent cannot be read"), Connected()]


async def test_read_only_never_starts_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisors = Supervisors(monkeypatch, None, revives=True)
    supervisors.run = run_state()
    messages = await take(run_feed(read_only=True).messages(), 5)
    assert supervisors.revived == 0
    assert messages[4] == Disconnected("supervisor is gone, training continues - reconnecting")


async def test_a_run_that_is_over_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[wire.Change | None] = []

    def start(folder: object, change: wire.Change | None = None) -> int:
        started.append(change)
        return 1

    Supervisors(monkeypatch, None)
    monkeypatch.setattr(starting, "start_supervisor", start)
    feed = run_feed()
    await take(feed.messages(), 5)
    change = wire.Change(assignments={"batch": "2"})
    answers = [a async for a in feed.request(lambda number: wire.Restart(id=number, change=change))]
    assert [a.outcome for a in answers] == [wire.Outcome.ACCEPTED, wire.Outcome.DONE]
    assert started == [change]


async def test_the_reason_why_a_run_cannot_be_taken_over_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(folder: object, change: wire.Change | None = None) -> int:
        raise NotRunningError("the disk is full")

    Supervisors(monkeypatch, None)
    monkeypatch.setattr(starting, "start_supervisor", start)
    feed = run_feed()
    await take(feed.messages(), 5)
    answers = [a async for a in feed.request(lambda number: wire.Restart(id=number))]
    assert (answers[-1].outcome, answers[-1].message) == (wire.Outcome.FAILED, "the disk is full")


async def until_read(newest: Callable[[], Any]) -> GpuDetails:
    """The details of the first GPU once PCIe throughput is among them."""
    while True:
        snapshot = await newest()
        if isinstance(snapshot, MachineSnapshot) and snapshot.gpus[0].details.pcie_sent_bytes_per_second is not None:
            return snapshot.gpus[0].details
        await asyncio.sleep(0.02)


async def test_details_of_this_machine_are_read_only_on_request(driver: Script) -> None:  # noqa: F811
    driver.gpu(0, total=24 * GIB, used=GIB, pcie_tx=3, pcie_rx=5).write()
    feed = LocalFeed(interval=0.01)
    assert isinstance(feed, DetailedFeed)
    feed.look_closely()  # before there is anything to look with
    stream = feed.messages()
    *_, before = await take(stream, 5)
    assert isinstance(before, MachineSnapshot)
    assert before.gpus[0].details.pcie_sent_bytes_per_second is None
    assert "pcie_sent_bytes_per_second" in before.gpus[0].details.unknown
    feed.look_closely()
    details = await until_read(lambda: anext(stream))
    assert details.pcie_sent_bytes_per_second == 3 * 1024
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_supervisor_reads_details_on_request(driver: Script, tmp_path: Path) -> None:  # noqa: F811
    driver.gpu(0, total=24 * GIB, used=GIB, pcie_tx=3, pcie_rx=5).write()
    watch = MachineWatch(tmp_path, list, lambda: (1, ()))
    watch.look_closely()  # before its first sample
    watch.start(lambda keep: None, lambda error: pytest.fail(f"the watch ended: {error}"))

    async def newest() -> MachineSnapshot | None:
        return watch.machine

    while watch.machine is None:
        await asyncio.sleep(0.02)
    assert watch.machine.gpus[0].details.pcie_sent_bytes_per_second is None
    watch.look_closely()
    assert (await until_read(newest)).pcie_received_bytes_per_second == 5 * 1024
    watch.stop()


async def test_details_of_a_run_are_not_requested_at_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(running(gpu()))
    Supervisors(monkeypatch, client)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    feed = RunFeed(Path("runs/tiny"), sampler_factory=FakeSampler, retry_seconds=0.0, interval=0.0)
    assert isinstance(feed, DetailedFeed)
    feed.look_closely()  # before the connection
    stream = feed.messages()
    await take(stream, 2)
    before = {task.get_name() for task in asyncio.all_tasks()}
    for clock.now in (100.0, 101.0, 102.0, 106.0, 107.0):
        feed.look_closely()
        for _ in range(10):
            await asyncio.sleep(0)  # let the request be sent
    asked = [request for request in client.sent if isinstance(request, wire.Look)]
    assert len(asked) == 2
    # An old supervisor does not know the request; neither its refusal nor its end disturbs
    # anything.
    client.inbox.put_nowait(wire.Answer(id=asked[0].id, outcome=wire.Outcome.REFUSED, message="not understood"))
    client.inbox.put_nowait(running(gpu()))
    assert isinstance(await anext(stream), wire.StateUpdate)
    client.inbox.put_nowait(None)
    await anext(stream)
    while {task.get_name() for task in asyncio.all_tasks()} != before:
        await asyncio.sleep(0.01)  # the request that has had no answer ends with the connection


async def test_after_the_runs_end_this_machine_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    Supervisors(monkeypatch)
    sampler = FakeSampler()
    feed = RunFeed(Path("runs/tiny"), sampler_factory=lambda: sampler, retry_seconds=0.0, interval=0.0)
    await take(feed.messages(), 6)
    feed.look_closely()
    assert sampler.wishes == 1
