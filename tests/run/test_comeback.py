"""When a restart that waits may begin: the clock is the test's, the machine is what it says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.pending_restart import (
    DISK_SECONDS,
    NOTICE_SECONDS,
    VRAM_SECONDS,
    WATCHED_NOTICE_SECONDS,
    Comeback,
    Waiting,
)
from memtop.supervisor.wire import Change

GIB = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def card(used: int, *processes: GpuProcess) -> MachineSnapshot:
    gpu = GpuSample(
        index=0, uuid="GPU-0", used_bytes=used, total_bytes=20 * GIB, free_bytes=20 * GIB - used, processes=processes
    )
    other = GpuSample(index=1, uuid="GPU-1", used_bytes=19 * GIB, total_bytes=20 * GIB, free_bytes=GIB)
    return MachineSnapshot(time=1.0, gpus=(gpu, other))


def comeback(clock: Clock, forecast: Forecast | None = None) -> Comeback:
    waiting = Waiting(change=Change(assignments={"batch": "4"}), gpus_before={"GPU-0": GIB}, forecast=forecast)
    return Comeback(waiting, Path("/"), clock)


def test_where_somebody_looks_there_is_time_to_read() -> None:
    clock = Clock()
    waiting = Comeback(Waiting(change=Change()), Path("/"), clock, WATCHED_NOTICE_SECONDS)
    clock.now += NOTICE_SECONDS
    assert waiting.look(None) == "wait"
    clock.now += WATCHED_NOTICE_SECONDS
    assert waiting.look(None) == "go"


def test_it_goes_once_it_could_be_called_off_and_the_memory_is_back() -> None:
    clock = Clock()
    waiting = comeback(clock)
    assert waiting.look(card(GIB)) == "wait"
    clock.now += NOTICE_SECONDS
    assert waiting.look(card(15 * GIB)) == "wait"
    assert waiting.look(card(GIB + 1000)) == "go"
    assert waiting.problem is None


def test_who_holds_the_memory_is_named_and_it_goes_on_all_the_same() -> None:
    clock = Clock()
    waiting = comeback(clock)
    clock.now += VRAM_SECONDS
    holder = GpuProcess(pid=4242, name="python", used_bytes=3 * GIB)
    gone = GpuProcess(pid=1, name="ghost", used_bytes=GIB, gone=True)
    assert waiting.look(card(5 * GIB, holder, gone)) == "go"
    assert waiting.problem == "GPU 0 has 4.0 GiB more taken than before the run, held by python (pid 4242, 3.0 GiB)"


def test_a_card_that_somebody_else_fills_ends_in_a_question() -> None:
    clock = Clock()
    waiting = comeback(clock, Forecast(peak_bytes=12 * GIB, basis="line"))
    clock.now += VRAM_SECONDS
    assert waiting.look(card(10 * GIB)) == "ask"
    assert waiting.problem is not None
    assert "expected to need 12.0 GiB" in waiting.problem


def test_without_a_gpu_it_waits_for_nothing_but_a_veto() -> None:
    clock = Clock()
    waiting = Comeback(Waiting(change=Change()), Path("/"), clock)
    clock.now += NOTICE_SECONDS
    assert waiting.look(None) == "go"


def test_room_on_the_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    waiting = Comeback(Waiting(change=Change(), disk_bytes=10 * GIB), tmp_path, clock)
    clock.now += NOTICE_SECONDS
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=GIB))
    assert waiting.look(None) == "wait"
    assert waiting.problem == f"{tmp_path}: 1.0 GiB free, 10.0 GiB needed; free some space"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=11 * GIB))
    assert waiting.look(None) == "go"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=GIB))
    clock.now += DISK_SECONDS
    assert waiting.look(None) == "ask"
