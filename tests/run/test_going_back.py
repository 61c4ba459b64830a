"""Back to an earlier kept state: the right one, nothing deleted, and safe from what the stopping program still saves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from memtop.supervisor.errors import UsageError
from memtop.supervisor.run.going_back import gone_back, hold, let_go, state_at
from memtop.supervisor.run.manifest import newest_checkpoint


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


def test_nothing_moves_where_nothing_came_after(latest: Path) -> None:
    assert go_back(latest, 40) is None
    assert (latest / "weights").read_text() == "weights after 40"


def test_a_state_before_all_kept_ones_is_refused_with_what_there_is(latest: Path) -> None:
    with pytest.raises(UsageError, match=r"at or before update 9 \(kept: 40, 30, 20, 10\)"):
        state_at(latest, 9)


def test_a_damaged_state_is_not_gone_back_to(latest: Path) -> None:
    (latest.parent / "train_latest_state.2000" / "weights").write_text("short")
    assert state_at(latest, 25).updates == 10


def test_the_best_state_of_the_future_is_set_aside_too(latest: Path) -> None:
    state(latest.parent / "best_state", 35)
    aside = go_back(latest, 30)
    assert aside is not None
    assert (aside / "best_state" / "weights").read_text() == "weights after 35"


def test_a_state_is_held_although_the_stopping_program_gives_it_up(latest: Path) -> None:
    for old in ("train_latest_state.1000", "train_latest_state.2000"):
        shutil.rmtree(latest.parent / old)
    hold(latest, 30)
    # What the trainer does when it saves once more and keeps two: the one before goes.
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
