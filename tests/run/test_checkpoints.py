"""Saved states as the supervisor reads them: complete, broken, the one before."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from memtop.supervisor.run.record.checkpoints import newest_checkpoint, read_checkpoint


def saved(folder: Path, updates: int, size: int = 4) -> Path:
    folder.mkdir()
    (folder / "weights").write_bytes(b"1234")
    manifest = {
        "format": 1,
        "updates": updates,
        "samples_seen": updates * 8,
        "saved_at": 5.0,
        "files": [{"name": "weights", "size_bytes": size, "sha256": "0"}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_complete_and_broken_checkpoints_are_distinguished(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path / "train_latest_state") is None
    good = read_checkpoint(saved(tmp_path / "good", 7))
    assert good is not None
    assert good.complete
    assert (good.updates, good.samples_seen, good.size_bytes) == (7, 56, 4)
    cut = read_checkpoint(saved(tmp_path / "cut", 7, size=5))
    assert cut is not None
    assert cut.problem == f"{tmp_path}/cut/weights: 4 bytes, but the manifest lists 5"
    (tmp_path / "half").mkdir()
    half = read_checkpoint(tmp_path / "half")
    assert half is not None
    assert half.problem is not None
    assert "manifest.json is missing" in half.problem


@pytest.mark.parametrize(
    "change",
    [
        '"updates": 1' + "0" * 40,
        '"updates": -1',
        '"saved_at": 1e300',
        '"samples_seen": "8"',
        '"files": [{"name": "a\\u0000b", "size_bytes": 4}]',
        '"files": [{"name": "' + "x" * 2000 + '", "size_bytes": 4}]',
        '"files": [{"name": "weights", "size_bytes": 99999999999999999999}]',
        '"more": ' + "[" * 3000 + "]" * 3000,
    ],
)
def test_a_manifest_with_impossible_values_is_an_incomplete_state(tmp_path: Path, change: str) -> None:
    path = saved(tmp_path / "train_latest_state", 7) / "manifest.json"
    path.write_text(path.read_text()[:-1] + f", {change}}}")
    found = read_checkpoint(path.parent)
    assert found is not None
    assert not found.complete
    assert found.problem is not None
    assert "\n" not in found.problem
    # It can be shown and written.
    msgspec.json.encode(found)
    assert newest_checkpoint(path.parent) == found


def test_the_state_before_is_offered_when_the_newest_is_broken(tmp_path: Path) -> None:
    latest = saved(tmp_path / "train_latest_state", 9, size=99)
    saved(tmp_path / "train_latest_state.previous", 8)
    found = newest_checkpoint(latest)
    assert found is not None
    assert (found.complete, found.updates) == (True, 8)
    # A kill before the rename has left a newer one, on which the next attempt goes on.
    (tmp_path / "train_latest_state.tmp-7").mkdir()
    saved(tmp_path / "train_latest_state.tmp-8", 10)
    found = newest_checkpoint(latest)
    assert found is not None
    assert (found.complete, found.updates) == (True, 10)
