"""A thread makes the micro-batches of the next update: the same ones, at most one update ahead."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import pytest
import torch

from memtop.presets import Settings
from memtop.presets.host_memory import HostPlan, host_plan
from memtop.train.batches import Batches, MicroBatches
from memtop.train.data.tokens import PAD
from memtop.train.order import Key, Position, SampleOrder
from memtop.train.state_files import Cut
from tests.train.support import TINY, samples

HOST = host_plan(TINY, None, on_gpu=False)
AT_START = Position(cuts=(Cut(0, TINY.seq_len),))


class Watched:
    """The samples, and who asks for them: `asked` is called before a sample is read."""

    recut = True

    def __init__(self, asked: Callable[[int], None] = lambda number: None) -> None:
        self._samples = samples()
        self._asked = asked
        self.count = 0
        self.table, self.cut_again, self.shuffled = self._samples.table, self._samples.cut_again, self._samples.shuffled
        self.lengths = self._samples.lengths

    def __getitem__(self, key: Key) -> Any:
        self.count += 1
        self._asked(self.count)
        return self._samples[key]


def batches_of(data: Watched, *, ahead: bool, settings: Settings = TINY, host: HostPlan = HOST) -> Batches:
    batches = Batches(data, SampleOrder(data, settings.seed, AT_START.cuts), PAD, 0, ahead=ahead)
    batches.start(settings, host, AT_START, settings.target_samples)
    return batches


def all_of(batches: Batches, settings: Settings) -> list[MicroBatches]:
    """All updates; in the middle the split changes."""
    found = []
    while (plan := batches.next_update()) is not None:
        found.append(batches.fetch())
        if plan.number == 4:
            position = Position(updates=4, samples_seen=plan.position + len(plan.keys), cuts=AT_START.cuts)
            batches.start(msgspec.structs.replace(settings, batch=2, accumulation=4), HOST, position, settings.target_samples)
    batches.close()
    return found


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("task", ["causal", "sft"])
def test_a_thread_makes_the_same_batches(workers: int, task: str) -> None:
    settings = msgspec.structs.replace(TINY, task=task, target_samples=83)
    host = msgspec.structs.replace(HOST, workers=workers)
    expected, found = (
        all_of(batches_of(Watched(), ahead=ahead, settings=settings, host=host), settings) for ahead in (False, True)
    )
    assert len(expected) == 11
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert len(one.batches) == len(other.batches)
        for left, right in zip(one.batches, other.batches, strict=True):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)
    assert threads() == []


@pytest.mark.parametrize("ahead", [False, True])
def test_the_workers_of_a_loader_end_before_the_next_ones_start(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Although the loader is in the middle of its data, and Python collects no cycles meanwhile."""
    workers: list[set[int | None]] = []
    before = {process.pid for process in active_children()}
    started = BaseProcess.start

    def start(process: BaseProcess) -> None:
        started(process)
        workers.append({process.pid for process in active_children()} - before)

    monkeypatch.setattr(BaseProcess, "start", start)
    gc.disable()
    try:
        batches = batches_of(Watched(), ahead=ahead, host=msgspec.structs.replace(HOST, workers=2))
        batches.fetch()
        batches.start(TINY, msgspec.structs.replace(HOST, workers=2), AT_START, TINY.target_samples)
        batches.fetch()
        batches.close()
        assert [len(running) for running in workers] == [1, 2, 1, 2]
        assert {process.pid for process in active_children()} <= before
    finally:
        gc.enable()


def test_the_next_update_is_made_while_this_one_runs_and_no_further_one() -> None:
    second = threading.Event()
    data = Watched(lambda number: second.set() if number == 2 * TINY.effective_batch else None)
    batches = batches_of(data, ahead=True)
    batches.fetch()
    assert second.wait(60), "the second update was not begun before it was asked for"
    batches.fetch()
    batches.close()
    assert data.count <= 3 * TINY.effective_batch
    assert threads() == []


def test_an_error_in_the_data_is_raised_at_the_update_that_needs_it() -> None:
    failed = threading.Event()

    def fail(number: int) -> None:
        if number == TINY.effective_batch + 3:
            failed.set()
            raise OSError("the file is gone")

    batches = batches_of(Watched(fail), ahead=True)
    assert len(batches.fetch().batches) == TINY.accumulation
    assert failed.wait(60)
    with pytest.raises(OSError, match="the file is gone"):
        batches.fetch()
    batches.close()
    assert threads() == []


def test_what_is_sent_to_the_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    settings = msgspec.structs.replace(TINY, task="sft")
    batches = batches_of(Watched(), ahead=False, settings=settings, host=msgspec.structs.replace(HOST, pin_memory=True))
    found = batches.fetch().batches
    assert found[0].keys() == {"input_ids", "labels", "counted"}
    assert all(any(tensor is one for one in pinned) for batch in found for tensor in batch.values())
    pinned.clear()
    batches_of(Watched(), ahead=False, settings=settings).fetch()
    assert pinned == []
