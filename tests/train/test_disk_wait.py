"""A full disk at the end: the state waits in memory, on all ranks, until there is space or a
stop."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memtop.presets import Settings
from memtop.supervisor.run.processes.attempt import launcher
from memtop.train import checkpoint, state_files
from memtop.train.state_files import newest_update, read_manifest
from memtop.train.state_saver import DiskWait
from tests.forking import Program
from tests.train.support import Recorder, Training, edited, held_out
from tests.train.test_processes import environment, reports
from tests.train.test_processes import listener as listener

KIB = 1 << 10


def fill(disk: Path, *, leave: int) -> Path:
    """A file that fills the disk except for this many bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 64 * KIB)
        except OSError as full:
            print(f"filled: {full}")
        file.truncate(file.tell() - leave)
    return filler


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Answering(Recorder):
    """Acts when the trainer reports that it waits for disk space."""

    def __init__(self, act: Callable[[Answering], None]) -> None:
        super().__init__()
        self._act = act
        self.queued: list[tuple[int, str, dict[str, Any]]] = []

    def report(self, kind: str, **values: Any) -> None:
        super().report(kind, **values)
        if kind == "save_failed" and values["waiting"]:
            self._act(self)

    def take_commands(self) -> list[tuple[int, str, dict[str, Any]]]:
        taken, self.queued = self.queued, []
        return taken


def test_a_finished_training_waits_for_disk_space(tmp_path: Path, small_disk: Path) -> None:
    undisturbed = Training(tmp_path / "state")
    undisturbed.run()
    filler = fill(small_disk, leave=512 * KIB)
    channel = Answering(lambda _: filler.unlink())
    training = Training(small_disk / "state", channel=channel, wait_for_disk=True)
    assert training.run() == "finished"
    assert training.trainer.unsaved is None
    assert training.digests == undisturbed.digests
    manifest = read_manifest(small_disk / "state")
    assert (manifest.updates, manifest.samples_seen) == (10, 80)
    failed = [(report["update"], report["waiting"]) for report in channel.of("save_failed")]
    assert failed == [(3, False), (6, False), (9, False), (10, True)]
    words = [report["message"] for report in channel.of("save_failed")]
    assert words[0].endswith(f"2 MiB needed, 0 MiB free in {small_disk}; nothing saved yet; free some space"), words[0]
    assert words[-1] == (
        f"finished update 10, waiting for disk space: 2 MiB needed, 0 MiB free in {small_disk}; free some space or stop the run"
    )


def test_a_stop_ends_the_wait_and_names_the_unsaved_update(small_disk: Path) -> None:
    fill(small_disk, leave=512 * KIB)
    channel = Answering(
        lambda answering: answering.queued.extend([(1, "change", {"batch": 2}), (2, "checkpoint", {}), (3, "stop", {})])
    )
    training = Training(small_disk / "state", channel=channel, wait_for_disk=True)
    assert training.run() == "stopped"
    assert training.trainer.unsaved == (
        f"finished update 10, not saved: 2 MiB needed, 0 MiB free in {small_disk}; nothing saved yet"
    )
    answers = {number: (ok, message) for number, ok, message in channel.answers}
    assert answers[1] == (False, "training has finished; it waits for disk space to save its state")
    assert not answers[2][0]
    assert "waiting for disk space" in answers[2][1]
    assert answers[3][0]
    assert not (small_disk / "state").exists()


def test_a_stop_requested_once_there_is_space_saves(small_disk: Path) -> None:
    filler = fill(small_disk, leave=512 * KIB)

    def both(answering: Answering) -> None:
        answering.queued.append((1, "stop", {}))
        filler.unlink()

    training = Training(small_disk / "state", channel=Answering(both), wait_for_disk=True)
    assert training.run() == "finished"
    assert training.trainer.unsaved is None
    assert newest_update(small_disk / "state") == 10


def test_a_stop_in_the_middle_does_not_wait(small_disk: Path) -> None:
    fill(small_disk, leave=512 * KIB)
    channel = Recorder()
    channel.commands[4] = [(1, "stop", {})]
    training = Training(small_disk / "state", channel=channel, wait_for_disk=True)
    assert training.run() == "stopped"
    assert training.trainer.unsaved is not None
    assert training.trainer.unsaved.startswith("stopped at update 4, not saved: 2 MiB needed")
    assert [(report["update"], report["waiting"]) for report in channel.of("save_failed")] == [(3, False), (4, False)]


def test_a_training_that_is_to_stop_only_once_it_is_saved_goes_on(small_disk: Path) -> None:
    """A full disk loses no update: the request is refused until there is space."""
    filler = fill(small_disk, leave=512 * KIB)

    class Freed(Recorder):
        def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None:
            super().answer(number, ok, message, result)
            filler.unlink(missing_ok=True)

    channel = Freed()
    channel.commands = {4: [(1, "stop", {"only_saved": True})], 8: [(2, "stop", {"only_saved": True})]}
    training = Training(small_disk / "state", edited(save_every=100), channel=channel)
    assert training.run() == "stopped"
    why = f"update 4 not saved: 2 MiB needed, 0 MiB free in {small_disk}; nothing saved yet"
    assert channel.answers == [(1, False, why), (2, True, "stopping after this update")]
    assert channel.results == [{"unsaved": True}, {}]
    assert len(training.losses) == newest_update(small_disk / "state") == 8


def test_a_finished_training_refuses_to_stop_before_it_is_saved(small_disk: Path) -> None:
    filler = fill(small_disk, leave=512 * KIB)

    class Freed(Answering):
        def answer(self, number: int, ok: bool, message: str, result: dict[str, Any] | None = None) -> None:
            super().answer(number, ok, message, result)
            filler.unlink()

    channel = Freed(lambda answering: answering.queued.append((1, "stop", {"only_saved": True})))
    training = Training(small_disk / "state", channel=channel, wait_for_disk=True)
    assert training.run() == "finished"
    why = f"update 10 not saved: 2 MiB needed, 0 MiB free in {small_disk}; nothing saved yet"
    assert (channel.answers, newest_update(small_disk / "state")) == ([(1, False, why)], 10)


def test_without_waiting_an_unsaved_end_is_reported_at_once(small_disk: Path) -> None:
    fill(small_disk, leave=512 * KIB)
    training = Training(small_disk / "state", edited(save_every=100))
    assert training.run() == "finished"
    assert training.trainer.unsaved is not None
    assert "finished update 10, not saved: 2 MiB needed" in training.trainer.unsaved
    assert [report["waiting"] for report in training.channel.of("save_failed")] == [False]


def test_the_leftovers_of_a_killed_save_do_not_block_the_next(small_disk: Path) -> None:
    left = small_disk / "state.tmp-1"
    left.mkdir()
    fill(left, leave=512 * KIB)
    training = Training(small_disk / "state", edited(save_every=100))
    assert training.run() == "finished"
    assert training.trainer.unsaved is None


def test_a_save_stopped_by_a_quota_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk reports free space, but writes fail. No quota can be set up here, so the write is
    replaced.
    """
    clock, tries, write = Clock(), list[float](), state_files.write_safetensors

    def refused(*arguments: Any) -> Any:
        tries.append(clock.now)
        if len(tries) <= 2:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return write(*arguments)

    monkeypatch.setattr(state_files, "write_safetensors", refused)
    monkeypatch.setattr("memtop.train.trainer.time.sleep", lambda seconds: setattr(clock, "now", clock.now + seconds))
    channel = Recorder()
    training = Training(tmp_path / "state", edited(save_every=100), channel, wait_for_disk=True, disk_wait=DiskWait(clock))
    assert training.run() == "finished"
    assert training.trainer.unsaved is None
    assert [tried - tries[0] for tried in tries[:3]] == [0, 30, 60]
    assert "(the quota is used up)" in channel.of("save_failed")[0]["message"]


def test_a_wait_repeats_news_at_most_once_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    disk_wait = DiskWait(clock)
    assert disk_wait.is_news("3 MiB free")
    clock.now += 59
    assert not disk_wait.is_news("2 MiB free")
    clock.now += 2
    assert not disk_wait.is_news("3 MiB free")
    assert disk_wait.is_news("2 MiB free")
    assert not disk_wait.due(), "only the first rank writes"
    disk_wait.failed(checkpoint.NoSpaceError(tmp_path, 1 << 62))
    clock.now += 1000
    assert not disk_wait.due()
    assert not disk_wait.due(at_once=True)
    disk_wait.failed(checkpoint.NoSpaceError(tmp_path, 1))
    assert not disk_wait.due()
    assert disk_wait.due(at_once=True)
    clock.now += 3
    assert disk_wait.due()
    disk_wait.failed(checkpoint.NoSpaceError(tmp_path, 1, "the quota is used up"))
    clock.now += 29
    assert not disk_wait.due()
    assert disk_wait.due(at_once=True), "the quota may have free space now"
    clock.now += 1
    assert disk_wait.due()


def test_without_space_for_the_best_state_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "link", full)
    channel = Recorder()
    training = Training(tmp_path / "state", edited(eval_every=5), channel, evaluation=held_out())
    assert training.run() == "finished"
    assert training.trainer.unsaved is None
    assert read_manifest(tmp_path / "state").updates == 10
    assert "the state with the lowest evaluation loss is not kept: 1 MiB needed" in channel.of("warning")[0]["message"]
    assert not checkpoint.best_state(tmp_path / "state").exists()
    assert list(tmp_path.glob("*.tmp-*")) == []


def test_without_hard_links_the_space_for_a_copy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "weights").write_bytes(bytes(3 << 20))

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def fill(source: Path, target: Path) -> None:
        target.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(checkpoint.NoSpaceError, match="4 MiB needed"):
        checkpoint.keep_best(state)
    assert list(tmp_path.iterdir()) == [state]


# --- real processes
# --------------------------------------------------------------------------------------------------


def start(folder: Path, state: Path, settings: Settings, log: Path, **extra: str) -> subprocess.Popen[bytes]:
    """The trainer as memtop starts it; its journals go to `folder`."""
    (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
    module = ("-m", "memtop.train", "--settings", str(folder / "settings.json"), "--state-dir", str(state))
    surroundings = environment(folder, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **extra)
    with log.open("ab") as output:
        return Program([sys.executable, *launcher(settings), *module], env=surroundings, stdout=output, stderr=output)


def wait_for_the_wait(folder: Path, process: subprocess.Popen[bytes]) -> None:
    journal = folder / "rank-0.jsonl"
    while process.poll() is None:
        if journal.exists() and any(report["type"] == "save_failed" and report["waiting"] for report in whole(journal)):
            return
        time.sleep(0.05)
    raise AssertionError(f"it did not wait: status {process.returncode}: {journal.read_text()[-2000:]}")


def whole(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.mark.parametrize("room", [True, False])
def test_two_ranks_wait_together(tmp_path: Path, small_disk: Path, room: bool) -> None:
    filler = fill(small_disk, leave=512 * KIB)
    settings = edited(world_size=2, batch=4, accumulation=1)
    process = start(tmp_path, small_disk / "state", settings, tmp_path / "log")
    wait_for_the_wait(tmp_path, process)
    if room:
        filler.unlink()
    else:
        process.send_signal(signal.SIGTERM)
    status = process.wait(timeout=120)
    log = (tmp_path / "log").read_text()
    ends = [reports(tmp_path, rank)[-1] for rank in (0, 1)]
    assert [end["type"] for end in ends] == ["end", "end"], log[-3000:]
    assert [end["saved"] for end in ends] == [room, room]
    assert [end["outcome"] for end in ends] == ["finished" if room else "stopped"] * 2
    assert (status == 0) is room, log[-3000:]
    if room:
        assert read_manifest(small_disk / "state").samples_seen == 80
    else:
        assert ends[0]["message"].startswith("finished update 10, not saved: 2 MiB needed")
        assert "memtop: finished update 10, not saved:" in log


def test_two_ranks_go_on_together_until_they_can_save(tmp_path: Path, small_disk: Path, listener: socket.socket) -> None:
    filler = fill(small_disk, leave=512 * KIB)
    settings = edited(world_size=2, batch=4, accumulation=1, target_samples=8 * 100_000, save_every=100_000)
    process = start(tmp_path, small_disk / "state", settings, tmp_path / "log", MEMTOP_SOCKET=listener.getsockname())
    try:
        streams = [listener.accept()[0].makefile("rwb") for _ in range(2)]
        first = {json.loads(stream.readline())["rank"]: stream for stream in streams}[0]
        # The agent greets before the trainer offers commands.
        while not (
            (tmp_path / "rank-0.jsonl").exists() and any(one["type"] == "step" for one in whole(tmp_path / "rank-0.jsonl"))
        ):
            assert process.poll() is None
            time.sleep(0.05)

        def ask() -> dict[str, Any]:
            first.write(b'{"type": "command", "id": 1, "name": "stop", "values": {"only_saved": true}}\n')
            first.flush()
            return dict(json.loads(first.readline()))

        refused = ask()
        assert (refused["ok"], refused["result"]) == (False, {"unsaved": True})
        assert "not saved: 2 MiB needed" in refused["message"]
        assert process.poll() is None
        filler.unlink()
        assert ask()["ok"]
        assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    ends = [reports(tmp_path, rank)[-1] for rank in (0, 1)]
    assert [(end["outcome"], end["saved"]) for end in ends] == [("stopped", True)] * 2
    steps = [[one["update"] for one in reports(tmp_path, rank) if one["type"] == "step"] for rank in (0, 1)]
    assert steps[0] == steps[1]
    assert newest_update(small_disk / "state") == steps[0][-1]


def test_a_process_that_is_interrupted_while_it_waits_ends_with_status_1(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk, leave=512 * KIB)
    process = start(tmp_path, small_disk / "state", edited(), tmp_path / "log")
    wait_for_the_wait(tmp_path, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 1
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last.startswith("memtop: finished update 10, not saved: 2 MiB needed, 0 MiB free in ")


def test_on_oom_stop_does_not_wait(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk, leave=512 * KIB)
    process = start(tmp_path, small_disk / "state", edited(), tmp_path / "log", MEMTOP_ON_OOM="stop")
    assert process.wait(timeout=120) == 1
    end = reports(tmp_path)[-1]
    assert (end["type"], end["outcome"], end["saved"]) == ("end", "finished", False)


def test_training_continues_when_the_log_cannot_be_written(tmp_path: Path, small_disk: Path) -> None:
    """The disk is full, and the trainer's output goes there, too."""
    log = small_disk / "log"
    # Six bytes are left in the file's only page.
    log.write_bytes(b"x" * (os.sysconf("SC_PAGE_SIZE") - 6))
    filler = fill(small_disk, leave=0)
    assert os.statvfs(small_disk).f_bavail == 0
    process = start(tmp_path, small_disk / "state", edited(), log)
    wait_for_the_wait(tmp_path, process)
    assert log.stat().st_size == os.sysconf("SC_PAGE_SIZE")
    filler.unlink()
    assert process.wait(timeout=120) == 0
    assert read_manifest(small_disk / "state").updates == 10
    assert log.read_text().splitlines()[-1] == "memtop: finished"
