"""Values that are expensive for the driver are read only while displayed: here, or through the supervisor of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import GpuDetails, MachineSnapshot
from memtop.supervisor.run.machine_watch import MachineWatch
from memtop.supervisor.units import GIB
from memtop.tui import feed as feed_module
from memtop.tui.feed import DetailedFeed, LocalFeed, RunFeed
from tests.nvml_double.double import Script, driver, nvml_library  # noqa: F401 (fixtures)
from tests.tui.support import gpu, running
from tests.tui.test_feeds import FakeClient, FakeSampler, Supervisors, take


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
    # An old supervisor does not know the request; neither its refusal nor its end disturbs anything.
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
