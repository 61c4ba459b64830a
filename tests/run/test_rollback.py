"""Return to an earlier kept state: it is the right one, nothing is deleted, and later saves of the
stopping program do not remove it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.run.record.checkpoints import (
    discard_before_spike,
    discard_held,
    hold,
    newest_checkpoint,
    rolled_back,
    state_at,
)


def state(folder: Path, updates: int) -> Path:
    folder.mkdir()
    (folder / "weights").write_text(f"weights after {updates}")
    manifest = {"updates": updates, "samples_seen": updates * 32, "saved_at": 1.0}
    size = len(f"weights after {updates}")
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": [{"name": "weights", "size_bytes": size}]}))
    return folder


@pytest.fixture
def latest(tmp_path: Path) -> Path:
    """States after 40, 30, 20 and 10 updates, as the trainer keeps them."""
    state(tmp_path / "train_latest_state.1000", 10)
    state(tmp_path / "train_latest_state.2000", 20)
    state(tmp_path / "train_latest_state.previous", 30)
    return state(tmp_path / "train_latest_state", 40)


def go_back(latest: Path, update: int) -> Path | None:
    with rolled_back(latest, update) as aside:
        return aside


def everything(folder: Path) -> list[str]:
    return sorted(path.read_text() for path in folder.glob("**/weights"))


def test_the_newest_state_at_or_before_the_update_becomes_the_newest(latest: Path) -> None:
    before = everything(latest.parent)
    aside = go_back(latest, 25)
    assert (latest / "weights").read_text() == "weights after 20"
    found = newest_checkpoint(latest)
    assert found is not None
    assert (found.updates, found.complete) == (20, True)
    assert aside is not None
    assert sorted(path.name for path in aside.iterdir()) == ["train_latest_state", "train_latest_state.previous"]
    assert everything(latest.parent) == before


def test_rollbacks_within_one_second_have_folders_of_their_own(latest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20270102-030405")
    before = everything(latest.parent)
    asides = []
    for _ in range(3):
        asides.append(go_back(latest, 10))
        latest.rename(latest.with_name("train_latest_state.1000"))
        state(latest, 40)
        before.append("weights after 40")
    names = [aside.name for aside in asides if aside is not None]
    assert names == [f"set-aside.20270102-030405{end}" for end in ("", "-2", "-3")]
    assert sorted([*names, "set-aside.20270102-030406"]) == [*names, "set-aside.20270102-030406"], "in order of time"
    assert everything(latest.parent) == sorted(before), "nothing is lost or replaced"


def test_nothing_moves_where_nothing_came_after(latest: Path) -> None:
    assert go_back(latest, 40) is None
    assert (latest / "weights").read_text() == "weights after 40"


def test_a_state_before_all_kept_ones_is_refused_with_what_there_is(latest: Path) -> None:
    with pytest.raises(UsageError, match=r"at or before update 9 \(kept: 40, 30, 20, 10\)"):
        state_at(latest, 9)


def test_a_damaged_state_is_not_restored(latest: Path) -> None:
    (latest.parent / "train_latest_state.2000" / "weights").write_text("short")
    assert state_at(latest, 25).updates == 10


def test_an_older_whole_state_counts_where_the_newer_ones_are_damaged(latest: Path) -> None:
    for damaged in (latest, latest.with_name("train_latest_state.previous")):
        (damaged / "weights").write_text("short")
    found = newest_checkpoint(latest)
    assert found is not None
    assert (found.updates, found.complete) == (20, True)


def test_the_best_state_of_the_future_is_set_aside_too(latest: Path) -> None:
    state(latest.parent / "best_state", 35)
    aside = go_back(latest, 30)
    assert aside is not None
    assert (aside / "best_state" / "weights").read_text() == "weights after 35"


def test_a_state_is_held_although_the_stopping_program_gives_it_up(latest: Path) -> None:
    for old in ("train_latest_state.1000", "train_latest_state.2000"):
        shutil.rmtree(latest.parent / old)
    hold(latest, 30)
    # The trainer saves once more and keeps two states: it deletes the older one.
    shutil.rmtree(latest.with_name("train_latest_state.previous"))
    latest.rename(latest.with_name("train_latest_state.previous"))
    state(latest, 41)
    aside = go_back(latest, 30)
    assert (latest / "weights").read_text() == "weights after 30"
    assert aside is not None
    assert everything(aside) == ["weights after 40", "weights after 41"]
    assert not latest.with_name("train_latest_state.held").exists()


def test_holding_twice_keeps_the_newer_choice(latest: Path) -> None:
    hold(latest, 20)
    hold(latest, 30)
    go_back(latest, 30)
    assert (latest / "weights").read_text() == "weights after 30"


# --- what does not come about leaves everything where it was --------------------------------------


def tree(folder: Path) -> dict[str, str]:
    """The states in the folder and below, by their files."""
    files = [path for name in ("weights", "manifest.json") for path in folder.glob(f"**/{name}")]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_everything_is_moved_back_where_the_start_fails(latest: Path) -> None:
    state(latest.parent / "best_state", 35)
    before, folders = tree(latest.parent), sorted(latest.parent.iterdir())

    def start() -> None:
        assert (latest / "weights").read_text() == "weights after 20"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), rolled_back(latest, 25):
        start()
    assert tree(latest.parent) == before
    assert sorted(latest.parent.iterdir()) == folders


def test_a_failed_rename_changes_nothing(latest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename = tree(latest.parent), Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "train_latest_state.2000":
            raise OSError(errno.EACCES, "Permission denied", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RunFolderError, match="2000: cannot be moved: Permission denied"), rolled_back(latest, 25):
        pytest.fail("nothing may start")
    assert tree(latest.parent) == before


def test_a_discarded_state_takes_no_space(latest: Path) -> None:
    before = tree(latest.parent)
    hold(latest, 20)
    assert latest.with_name("train_latest_state.held").exists()
    discard_held(latest)
    assert tree(latest.parent) == before
    discard_held(latest)


@pytest.mark.parametrize(("kept", "left"), [("train_latest_state.previous", 1), ("train_latest_state.2000", 2)])
def test_the_state_from_before_a_spike_goes_when_the_run_has_gone_back_to_it(latest: Path, kept: str, left: int) -> None:
    source = latest.with_name(kept)
    text = (source / "weights").read_text()
    shutil.copytree(source, latest.with_name("train_latest_state.before_spike"))
    go_back(latest, 30)
    assert (latest / "weights").read_text() == "weights after 30"
    assert everything(latest.parent).count(text) == left, "another state than the one that it goes back to stays"


def test_only_the_state_from_before_a_spike_is_discarded(latest: Path) -> None:
    before = latest.with_name("train_latest_state.before_spike")
    former = latest.with_name(f"{before.name}.tmp-7.former")
    # A running trainer writes the second one just now, and a killed one has left the others.
    for name in (before.name, f"{before.name}.tmp-9", "best_state.tmp-7.former", former.name):
        shutil.copytree(latest, latest.with_name(name))
    others = sorted(path.name for path in latest.parent.iterdir() if path not in (before, former))
    for _ in range(2):
        discard_before_spike(latest, alive=True)
        assert sorted(path.name for path in latest.parent.iterdir()) == others
    # Without a trainer, nothing of it is left that the next one would put back.
    discard_before_spike(latest, alive=False)
    assert sorted(path.name for path in latest.parent.iterdir()) == [one for one in others if one != f"{before.name}.tmp-9"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP])
def test_where_there_are_no_hard_links_a_state_is_held_by_a_copy(
    latest: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(number, os.strerror(number), source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    hold(latest, 20)
    shutil.rmtree(latest.with_name("train_latest_state.2000"))
    go_back(latest, 25)
    assert (latest / "weights").read_text() == "weights after 20"


def test_a_state_that_cannot_be_held_gives_one_line_and_leaves_nothing(latest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", source, None, target)

    before = tree(latest.parent)
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(RunFolderError) as refusal:
        hold(latest, 20)
    assert "cannot be kept: [Errno 28] No space left on device" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert tree(latest.parent) == before
