"""Checkpoints of programs with a profile: complete or not, kept, put back, converted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from memtop.presets.program_profiles import CheckpointRule, Counter, Detect, Position, ProgramProfile, Resume
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.checkpoint_watch import CheckpointWatch
from memtop.supervisor.run.grip import Grip
from memtop.supervisor.run.positions import Split
from memtop.supervisor.run.record import copies
from memtop.supervisor.run.record.profile_checkpoints import (
    Place,
    being_saved,
    keep,
    newest_for,
    newest_of,
    prepared,
    try_conversion,
)
from memtop.supervisor.run.record.program_checkpoints import KEPT
from memtop.supervisor.wire import Checkpoint
from tests.run.interrupted import interrupt_save

MICRO = Position(counts="micro_batches", per_epoch=True, order="skipped", length="epochs")
FULL, HALF = Split(8, 4), Split(4, 8)


def one_file(folder: Path, **values: Any) -> Place:
    rule = {"paths": ("x",), "step": Counter(read="torch", key="step", epoch_key="epoch"), "convert": True}
    return Place(paths=(f"{folder}/ckpt.pt",), rule=CheckpointRule(**{**rule, **values}), position=MICRO)


def folders(folder: Path, **values: Any) -> Place:
    rule = {"paths": ("x",), "needs": ("model*", "optimizer.bin|optimizer.pt", "state_*.pkl")}
    counter = Counter(read="name", key=r"step_(?P<step>\d+)")
    position = Position(counts="updates", order="skipped")
    return Place(
        paths=(f"{folder}/step_*",), rule=CheckpointRule(**rule, step=counter, **values), position=position, given=True
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "out").mkdir()
    return tmp_path / "run"


def save(path: Path, step: int, epoch: int = 0) -> None:
    model = torch.nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "epoch": epoch}, path)


def save_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for at, name in enumerate(names or ("model.bin", "optimizer.bin", "state_0.pkl")):
        torch.save({"name": name}, path / name)
        os.utime(path / name, (1000 + at, 1000 + at))
    return path


def cut(path: Path) -> None:
    """As a program leaves it that is killed while it saves."""
    os.truncate(path, path.stat().st_size // 2)


def found(run: Path, place: Place, split: Split | None = FULL, since: float | None = None) -> Checkpoint:
    newest = newest_for(run, place, since, split)
    assert newest is not None
    return newest


def test_the_copy_is_used_where_the_program_was_killed_while_it_saved(run: Path) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    assert newest_for(run, place) is None
    save(path, 120)
    first = found(run, place)
    assert (first.updates, first.step, first.epoch, first.complete, first.path) == (30, 120, 0, True, str(path))
    kept = keep(first, run, place, FULL)
    assert kept.path == str(run / KEPT / "ckpt.pt")
    # It saves over its only checkpoint: the same file, which a hard link would be, too.
    inode = path.stat().st_ino
    save(path, 140)
    assert path.stat().st_ino == inode
    cut(path)
    broken = newest_of(place, None, FULL)
    assert broken is not None
    assert not broken.complete
    assert "its end is missing" in str(broken.problem)
    assert found(run, place) == kept
    back = prepared(kept, run, place, before=FULL, after=FULL)
    assert (back.path, back.step, back.complete) == (str(path), 120, True)
    assert [one.name for one in sorted(path.parent.iterdir())] == ["ckpt.pt", "ckpt.pt.incomplete"]


def test_an_interrupted_save_does_not_replace_the_copy(run: Path) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    save(path, 120)
    kept = keep(found(run, place), run, place, FULL)
    assert being_saved(place) is None
    for record in (1, 6):
        assert interrupt_save({"step": 140, "epoch": 0, "model": torch.ones(9), "more": torch.ones(9)}, path, record)
        os.utime(path)
        assert being_saved(place) == str(path)
        with pytest.raises(RunFolderError, match=r"cannot be kept: .* the save was interrupted"):
            keep(Checkpoint(path=str(path), complete=True), run, place, FULL)
        assert found(run, place) == kept
    os.utime(path, (1000, 1000))
    assert being_saved(place) is None
    assert torch.load(kept.path)["step"] == 120


def test_a_folder_without_a_file_is_a_save_that_has_just_begun(run: Path) -> None:
    place, path = folders(run.parent / "out"), run.parent / "out/step_10"
    path.mkdir(parents=True)
    assert being_saved(place) == str(path)
    os.utime(path, (1000, 1000))
    assert being_saved(place) is None


def test_a_checkpoint_without_a_position_does_not_replace_one_that_has_it(run: Path) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    torch.save({"weights": torch.ones(9)}, path)
    unknown = keep(found(run, place), run, place, FULL)
    assert "its position cannot be read" in str(unknown.problem)
    save(path, 120)
    kept = keep(found(run, place), run, place, FULL)
    assert kept.step == 120
    torch.save({"weights": torch.ones(9)}, path)
    for told in (newest_of(place, None, FULL), Checkpoint(path=str(path), complete=True)):
        assert told is not None
        with pytest.raises(RunFolderError, match=r"it has no whole number step; the copy .* stays: to resume"):
            keep(told, run, place, FULL)
    assert torch.load(kept.path)["step"] == 120
    assert [one.name for one in sorted((run / KEPT).iterdir())] == ["ckpt.pt", "kept.json"]


def test_what_memtop_has_no_copy_of_only_gets_another_name(run: Path) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    save(path, 120)
    kept = keep(found(run, place), run, place, FULL)
    path.with_name("ckpt.pt.incomplete").write_text("the user's own")
    cut(path)
    prepared(kept, run, place, before=FULL, after=FULL)
    save(path.with_name("older"), 60)
    os.utime(path.with_name("older"), (1000, 1000))
    path.with_name("older").replace(path)  # a person has put it there
    prepared(kept, run, place, before=FULL, after=FULL)
    names = sorted(one.name for one in path.parent.iterdir())
    assert names == ["ckpt.pt", "ckpt.pt.incomplete", "ckpt.pt.incomplete.2", "ckpt.pt.replaced"]
    assert path.with_name("ckpt.pt.incomplete").read_text() == "the user's own"
    assert torch.load(path.with_name("ckpt.pt.replaced"))["step"] == 60
    assert torch.load(path)["step"] == 120


def test_a_whole_checkpoint_stays_where_it_is(run: Path) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    save(path, 120)
    before = path.stat()
    assert prepared(found(run, place), run, place, before=FULL, after=FULL).path == str(path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_micro_batches_are_converted_in_a_copy(run: Path) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    save(path, 120, epoch=1)
    weights = torch.load(path)["model"]
    given = prepared(found(run, place), run, place, before=FULL, after=HALF, python=sys.executable)
    assert (given.path, given.step, given.epoch) == (str(path), 240, 1)
    changed, kept = torch.load(path), torch.load(run / KEPT / "ckpt.pt")
    assert (changed["step"], kept["step"]) == (240, 120)
    assert all(torch.equal(weights[name], changed["model"][name]) for name in weights)
    assert [one.name for one in path.parent.iterdir()] == ["ckpt.pt"]
    # It ends before it has saved: the original counts, in its own split.
    again = found(run, place, HALF)
    assert (again.path, again.step) == (str(run / KEPT / "ckpt.pt"), 120)
    third = prepared(again, run, place, before=HALF, after=Split(16, 2), python=sys.executable)
    assert third.step == 60
    back = prepared(found(run, place, Split(16, 2)), run, place, before=Split(16, 2), after=FULL, python=sys.executable)
    assert (back.step, torch.load(path)["step"]) == (120, 120)
    # What the program saves itself counts in the split that it has then.
    save(path, 130, epoch=1)
    assert prepared(found(run, place), run, place, before=FULL, after=HALF, python=sys.executable).step == 256


def test_what_cannot_be_converted_is_refused_and_nothing_is_changed(run: Path) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    torch.save({"step": 120, "epoch": 0, "other": Path("/")}, path)
    content = path.read_bytes()
    refused = "Unsupported|weights_only|WeightsUnpickler"
    for python, words in ((sys.executable, refused), (None, "which Python of yours"), ("/none", "start")):
        with pytest.raises(RunFolderError, match=words):
            prepared(found(run, place), run, place, before=FULL, after=HALF, python=python)
        assert path.read_bytes() == content


def test_what_cannot_be_converted_is_known_before_the_stop(run: Path) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    save(path, 120)
    keep(found(run, place), run, place, FULL)
    try_conversion(run, place, FULL, HALF, sys.executable)
    try_conversion(run, place, FULL, FULL, None)
    with pytest.raises(RunFolderError, match="which Python of yours"):
        try_conversion(run, place, FULL, HALF, None)
    assert sorted(one.name for one in (run / KEPT).iterdir()) == ["ckpt.pt", "kept.json"]
    shutil.rmtree(run / KEPT)  # which has a position
    torch.save({"step": torch.tensor(120), "epoch": 0}, path)
    keep(found(run, place), run, place, FULL)
    with pytest.raises(RunFolderError, match="it has no whole number step"):
        try_conversion(run, place, FULL, HALF, sys.executable)
    with pytest.raises(RunFolderError, match="its position cannot be converted"):
        prepared(found(run, place), run, place, before=FULL, after=HALF, python=sys.executable)


def test_a_position_in_json_needs_no_torch(run: Path) -> None:
    out = run.parent / "out"
    counter = Counter(read="json", file="progress.json", key="at.step")
    needs = ("model.bin", "progress.json")
    place = one_file(out, step=counter, needs=needs)
    save_folder(out / "ckpt.pt", "model.bin")
    (out / "ckpt.pt/progress.json").write_text(json.dumps({"at": {"step": 120}, "lr": 0.1}))
    given = prepared(found(run, place), run, place, before=FULL, after=HALF)
    assert (given.step, json.loads((out / "ckpt.pt/progress.json").read_text())) == (240, {"at": {"step": 240}, "lr": 0.1})


def test_a_folder_is_complete_when_its_last_file_is_the_newest(run: Path) -> None:
    out = run.parent / "out"
    place = folders(out)
    save_folder(out / "step_5")
    save_folder(out / "step_7", "model.bin", "optimizer.bin")
    newest = found(run, place)
    assert (newest.updates, newest.complete) == (5, True)
    shutil.rmtree(out / "step_5")
    assert "it has no state_*.pkl: the save was interrupted" in str(found(run, place).problem)
    save_folder(out / "step_6")
    # It begins to save over it.
    os.utime(out / "step_6/model.bin", (2000, 2000))
    assert "state_*.pkl is older than the rest" in str(found(run, place).problem)
    os.utime(out / "step_6/state_0.pkl", (2001, 2001))
    cut(out / "step_6/optimizer.bin")
    assert "optimizer.bin: its end is missing" in str(found(run, place).problem)


@pytest.mark.parametrize("key", [r"step_(?P<step>\d+)?", r"step_"])
def test_a_name_without_a_number_says_no_position(run: Path, key: str) -> None:
    save_folder(run.parent / "out/step_last")
    place = folders(run.parent / "out")
    place = replace(place, rule=replace(place.rule, step=Counter(read="name", key=key)))
    newest = found(run, place)
    assert (newest.complete, newest.step, newest.updates) == (True, None, None)


def test_a_marker_may_be_beside_the_folder(run: Path) -> None:
    out = run.parent / "out"
    place = Place(
        paths=(f"{out}/global_step*",),
        rule=CheckpointRule(paths=("x",), needs=("*model_states.pt", "../latest")),
        position=Position(),
        given=True,
    )
    save_folder(out / "global_step5", "mp_rank_00_model_states.pt")
    assert "it has no ../latest" in str(found(run, place).problem)
    (out / "latest").write_text("global_step5")
    os.utime(out / "latest", (1001, 1001))
    assert found(run, place).complete


def test_a_program_that_is_given_the_path_gets_the_copy(run: Path) -> None:
    out = run.parent / "out"
    place = folders(out)
    save_folder(out / "step_5")
    given = prepared(found(run, place), run, place, before=FULL, after=HALF)
    assert given.path == str(run / KEPT / "step_5")
    shutil.rmtree(out)
    assert found(run, place).updates == 5
    # The name has the position: the converted copy has another one.
    smaller = prepared(found(run, folders(out, convert=True)), run, folders(out, convert=True), before=FULL, after=Split(4, 4))
    assert (Path(smaller.path).name, smaller.updates) == ("step_10", 10)
    assert (run / KEPT / "step_5").is_dir()


def test_checkpoints_of_an_earlier_training_do_not_count(run: Path) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    save(path, 120)
    os.utime(path, (1000, 1000))
    assert newest_for(run, place, 2000.0, FULL) is None
    assert newest_for(run, place, 900.0, FULL) is not None


def test_a_full_disk_refuses_the_copy_in_words(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    save(path, 120)
    usage = shutil.disk_usage(run)
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(copies.fcntl, "ioctl", refuse)
    with pytest.raises(RunFolderError, match=r"are needed and 1000 B are free there; free some space"):
        keep(found(run, place), run, place)
    assert list((run / KEPT).iterdir()) == []


def refuse(*_: Any) -> None:
    raise OSError(95, "not supported")


def test_two_threads_copy_one_after_the_other(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    save(path, 120)
    newest, real, begun, busy = found(run, place), shutil.copy2, threading.Barrier(2), []

    def slow(source: str, target: str) -> None:
        busy.append(target)
        assert len(busy) == 1
        # The other one would come meanwhile.
        time.sleep(0.1)
        real(source, target)
        busy.pop()

    def keeps(_: int) -> Checkpoint:
        begun.wait()
        return keep(newest, run, place, FULL)

    monkeypatch.setattr(copies.fcntl, "ioctl", refuse)
    monkeypatch.setattr(copies.shutil, "copy2", slow)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(keeps, range(2))
    assert one == other
    assert one.complete


def test_a_file_that_changes_while_it_is_copied_is_copied_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, place = run.parent / "out/ckpt.pt", one_file(run.parent / "out")
    save(path, 120)
    real, times = shutil.copy2, []

    def changes(source: str, target: str) -> None:
        real(source, target)
        times.append(target)
        if len(times) < 3:
            save(path, 120 + len(times))

    monkeypatch.setattr(copies.fcntl, "ioctl", refuse)
    monkeypatch.setattr(copies.shutil, "copy2", changes)
    assert keep(found(run, place), run, place).step == 122
    times.clear()
    monkeypatch.setattr(copies, "_TRIES", 1)
    save(path, 130)
    with pytest.raises(RunFolderError, match="it changes while it is copied"):
        keep(found(run, place), run, place)
    assert found(run, place).step is not None
    assert sorted(one.name for one in (run / KEPT).iterdir()) == ["ckpt.pt", "kept.json"]


async def test_what_is_overwritten_is_copied_as_it_appears(run: Path) -> None:
    path = run.parent / "out/ckpt.pt"
    place = one_file(path.parent)
    resume = Resume(how="flag", words=("--resume",))
    rule = CheckpointRule(paths=(str(path),), step=place.rule.step)
    profile = ProgramProfile(name="p", title="p", detect=Detect(scripts=("p",)), resume=resume, checkpoint=rule, position=MICRO)
    grip = Grip(profile=profile, batch=8, accumulation=4)
    told: list[Any] = []
    watch = CheckpointWatch(run, told.append)
    assert watch.newest(grip) == (None, None)
    save(path, 120)
    watch.tick(grip, stopping=False)
    while not told:
        await asyncio.sleep(0)
    shown, kept = told
    assert (shown.found.path, shown.found.updates, kept.problem) == (str(path), 30, None)
    cut(path)
    assert found(run, place).path == str(run / KEPT / "ckpt.pt")
    shown, _ = CheckpointWatch(run, told.append).newest(grip)
    assert shown is not None
    assert not shown.complete
