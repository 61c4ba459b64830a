"""A save that does not stop the training: a copy in host memory, which a thread writes."""

from __future__ import annotations

import errno
import mmap
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from memtop.train import TrainingError, host_copy, state_saver
from memtop.train.checkpoint import NoSpaceError, SavedProgress, write_state
from memtop.train.exchange import Ranks
from memtop.train.state_files import (
    BrokenStateError,
    Cut,
    Manifest,
    ShardReader,
    ShardWriter,
    at_once,
    in_thread,
    newest_complete,
    newest_update,
    previous_of,
    read_manifest,
    stored,
)
from memtop.train.state_saver import DiskWait, StateSaver
from tests.train.support import Recorder, Training, edited

MOST_SECONDS = 60
"""A test waits so long for an event at most. It waits that long only if the test fails."""


class Writing:
    """The writing of states: what is called before and instead of it, and in which thread it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.before: Callable[[], None] = lambda: None
        monkeypatch.setattr(state_saver, "write_state", self._write)

    def _write(self, *arguments: Any, **options: Any) -> Manifest:
        self.threads.append(threading.current_thread().name)
        self.before()
        return write_state(*arguments, **options)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Writing:
    return Writing(monkeypatch)


class Watching(Recorder):
    """Sets an event when the training has done an update."""

    def __init__(self, update: int) -> None:
        super().__init__()
        self.reached = threading.Event()
        self._update = update

    def report(self, kind: str, **values: Any) -> None:
        super().report(kind, **values)
        if kind == "step" and values["update"] == self._update:
            self.reached.set()

    def wait(self) -> None:
        """Wait for the update."""
        assert self.reached.wait(MOST_SECONDS), "the training did not go on while the state was written"


def saved_tensors(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    read = ShardReader(folder, read_manifest(folder).files)
    return {name: read(name) for name in read.names}


def test_training_goes_on_while_the_state_of_its_update_is_written(tmp_path: Path, writing: Writing) -> None:
    """And a stop waits for it, and saves the newest state."""
    short = Training(tmp_path / "short", edited(target_samples=80, save_every=100))
    short.channel.commands[3] = [(1, "stop", {})]
    assert short.run() == "stopped"
    channel = Watching(4)
    writing.before = lambda: channel.wait() if len(writing.threads) == 1 else None
    training = Training(tmp_path / "state", edited(save_every=3), channel)
    channel.commands[4] = [(2, "stop", {})]
    assert training.run() == "stopped"
    assert [report["updates"] for report in channel.of("checkpoint")] == [3, 4]
    assert training.trainer.unsaved is None
    expected, found = saved_tensors(tmp_path / "short"), saved_tensors(previous_of(tmp_path / "state"))
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for kind, tensor in tensors.items():
            assert torch.equal(found[name][kind], tensor), (name, kind)


def test_the_pause_ends_before_the_save(tmp_path: Path, writing: Writing) -> None:
    channel = Watching(5)
    writing.before = lambda: channel.wait() if len(writing.threads) == 1 else None
    assert Training(tmp_path / "state", channel=channel).run() == "finished"
    order = [(report["type"], report.get("update", report.get("updates"))) for report in channel.reports]
    assert order.index(("step", 5)) < order.index(("checkpoint", 3)) < order.index(("step", 7))
    # A save that is due while another one is written waits for it.
    assert [report["updates"] for report in channel.of("checkpoint")] == [3, 6, 9, 10]
    assert writing.threads == [*["memtop-save"] * 3, "MainThread"]
    first, last = channel.of("checkpoint")[0], channel.of("checkpoint")[-1]
    assert first["pause_seconds"] < first["seconds"]
    # The last one is written inside the pause.
    assert last["pause_seconds"] >= last["seconds"]


def test_memory_for_the_copy_is_allocated_during_the_update_before_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, begun = Recorder(), list[tuple[int, str]]()

    def noted(work: Callable[[], Any], name: str) -> Any:
        begun.append((len(channel.of("step")), name))
        return in_thread(work, name)

    monkeypatch.setattr(state_saver, "in_thread", noted)
    assert Training(tmp_path / "state", channel=channel).run() == "finished"
    assert begun == [(2, "memtop-save-memory"), *((update, "memtop-save") for update in (3, 6, 9))]


def test_a_command_to_save_is_answered_when_the_state_is_on_the_disk(tmp_path: Path, writing: Writing) -> None:
    on_disk: list[int | None] = []

    class Answered(Watching):
        def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None:
            super().answer(number, ok, message, result)
            on_disk.append(newest_update(tmp_path / "state"))

    channel = Answered(4)
    writing.before = lambda: channel.wait() if len(writing.threads) == 1 else None
    channel.commands[2] = [(7, "checkpoint", {})]
    assert Training(tmp_path / "state", edited(save_every=100), channel).run() == "finished"
    number, ok, message = channel.answers[0]
    assert (number, ok, on_disk) == (7, True, [2])
    assert message.startswith("checkpoint at update 2: ")


def test_ranks_do_not_meet_more_often_for_a_save_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each write has ended at the next boundary, so none is waited for.
    monkeypatch.setattr(state_saver, "in_thread", lambda work, name: at_once(work))
    meetings: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        own = getattr(Ranks, name)

        def call(*arguments: Any) -> Any:
            meetings.append(name)
            return own(*arguments)

        return call

    for name in ("sums", "most", "from_first", "wait", "add_up"):
        monkeypatch.setattr(Ranks, name, counted(name))
    counts = []
    for save_every, saved in ((3, [3, 6, 9, 10]), (100, [10])):
        meetings.clear()
        training = Training(tmp_path / str(save_every), edited(save_every=save_every))
        assert training.run() == "finished"
        assert [report["updates"] for report in training.channel.of("checkpoint")] == saved
        counts.append(len(meetings))
    assert counts[0] == counts[1] > 10


@pytest.mark.parametrize("free", [100 << 20, None])
def test_without_host_memory_for_the_copy_training_stops_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writing: Writing, free: int | None
) -> None:
    monkeypatch.setattr(host_copy, "addressable_bytes", lambda: free)
    training = Training(tmp_path / "state")
    assert training.run() == "finished"
    assert writing.threads == ["MainThread"] * 4
    assert [report["updates"] for report in training.channel.of("checkpoint")] == [3, 6, 9, 10]
    words = "needs 1 MiB of host memory and leaves 512 MiB free, but 100 MiB are free" if free else "free is not known"
    warnings = [report["message"] for report in training.channel.of("warning")]
    assert len(warnings) == 1, "it is said once"
    assert warnings[0].startswith("training stops while a state is saved: ")
    assert words in warnings[0]


def test_the_copy_takes_no_addresses_that_a_limited_training_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writing: Writing
) -> None:
    taken = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (taken + (64 << 20), resource.RLIM_INFINITY))
    training = Training(tmp_path / "state")
    assert training.run() == "finished"
    assert writing.threads == ["MainThread"] * 4
    assert "leaves 512 MiB free, but " in training.channel.of("warning")[0]["message"]


def test_memory_that_the_system_refuses_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writing: Writing
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refused)
    training = Training(tmp_path / "state")
    assert training.run() == "finished"
    assert writing.threads == ["MainThread"] * 4
    assert training.channel.of("warning")[0]["message"].endswith("which the system refuses")


@pytest.mark.parametrize("how", ["broken disk", "folder gone"])
def test_an_error_of_the_thread_ends_the_training(tmp_path: Path, writing: Writing, how: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def fail() -> None:
        if how == "folder gone":
            shutil.rmtree(folder)
        else:
            raise OSError(errno.EIO, "Input/output error")

    writing.before = fail
    training = Training(folder / "state")
    with pytest.raises(OSError, match="Input/output error" if how == "broken disk" else "No such file") as raised:
        training.run()
    assert raised.value.errno == (errno.EIO if how == "broken disk" else errno.ENOENT)
    assert writing.threads == ["memtop-save"]
    assert training.channel.of("checkpoint") == []


@pytest.mark.parametrize("written", [True, False])
def test_a_failed_training_waits_for_the_save_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], writing: Writing, written: bool
) -> None:
    failing = threading.Event()

    def before() -> None:
        assert failing.wait(MOST_SECONDS)
        if not written:
            raise OSError(errno.EIO, "Input/output error")

    writing.before = before
    training = Training(tmp_path / "state")
    step = training.trainer.train_step

    def fail(plan: Any) -> None:
        if plan.number == 4:
            failing.set()
            raise TrainingError("loss is nan at update 4")
        step(plan)

    monkeypatch.setattr(training.trainer, "train_step", fail)
    with pytest.raises(TrainingError, match="loss is nan"):
        training.run()
    assert [report["updates"] for report in training.channel.of("checkpoint")] == ([3] if written else [])
    assert newest_update(tmp_path / "state") == (3 if written else None)
    assert ("update 3 not saved: [Errno 5] Input/output error" in capsys.readouterr().out) is not written


def test_a_state_that_is_being_saved_as_the_best_is_the_one_to_beat(tmp_path: Path, writing: Writing) -> None:
    training = Training(tmp_path / "unused", edited(save_every=100))
    ranks = Ranks(training.engine.accelerator)
    channel = Recorder()
    saver = StateSaver(tmp_path / "state", training.engine, channel, ranks, DiskWait(), 0, pin_memory=False)
    full = NoSpaceError(tmp_path, 1 << 60)
    go_on = threading.Event()

    def begin(update: int, loss: float) -> None:
        progress = SavedProgress(
            updates=update, samples_seen=8, epoch=0.1, cuts=(Cut(0, 16),), target_samples=80, evaluation_loss=loss
        )
        saver.begin(progress, training.settings, background=True, best=True)

    def wait() -> None:
        assert go_on.wait(MOST_SECONDS)

    writing.before = wait
    assert saver.best_loss is None
    begin(1, 2.0)
    assert (saver.best_loss, saver.saved_update, saver.ended()) == (2.0, 0, (False, False))
    go_on.set()
    saver.finish()
    assert (saver.best_loss, saver.saved_update) == (2.0, 1)

    def no_space() -> None:
        raise full

    writing.before = no_space
    begin(2, 1.0)
    assert saver.best_loss == 1.0
    saver.finish()
    assert (saver.best_loss, saver.saved_update) == (2.0, 1), "the save failed"
    assert channel.of("save_failed")[0]["update"] == 2
    assert newest_update(tmp_path / "best_state") == 1


@pytest.mark.parametrize("first", [True, False])
def test_ranks_gather_a_sharded_tensor_only_when_all_are_ready_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """While the first rank writes, the others wait on the CPU: NCCL has a time limit."""
    training = Training(tmp_path / "unused")
    engine = training.engine
    events: list[str] = []

    def gathered() -> Any:
        for name, tensors in own():
            events.append("gather")
            yield name, tensors

    own, engine.saved_tensors, engine.sharded = engine.saved_tensors, gathered, True
    monkeypatch.setattr(type(engine.accelerator), "is_main_process", first)
    monkeypatch.setattr(Ranks, "wait", lambda ranks: events.append("meet"))
    ranks = Ranks(engine.accelerator)
    saver = StateSaver(tmp_path / "state", engine, Recorder(), ranks, DiskWait(), 0, pin_memory=False)
    progress = SavedProgress(updates=1, samples_seen=8, epoch=0.1, cuts=(Cut(0, 16),), target_samples=80, evaluation_loss=None)
    saver.begin(progress, training.settings, background=False)
    saver.finish()
    assert newest_update(tmp_path / "state") == (1 if first else None)
    assert events == ["gather", "meet"] * len(list(engine.model.parameters()))


def test_damage_is_found_in_any_of_several_files(tmp_path: Path) -> None:
    Training(tmp_path / "state", edited(target_samples=24)).run()
    folder, manifest, _ = newest_complete(tmp_path / "state") or pytest.fail("no state")
    several = tmp_path / "several"
    several.mkdir()
    writer = ShardWriter(several, 10_000)
    for name, tensors in sorted(saved_tensors(folder).items()):
        writer.add(name, {kind: stored(tensor) for kind, tensor in tensors.items()})
    files = writer.close()
    assert len(files) > 4
    (several / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, files=files)))
    assert read_manifest(several).files == files
    for file in files:
        path = several / file.name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(BrokenStateError, match=f"{file.name}: size or checksum differs"):
            read_manifest(several)
        path.write_bytes(whole)
    assert read_manifest(several).files == files
