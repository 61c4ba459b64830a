"""What is left of a run's files after a power cut at any moment. The disk is a model: content is
certain only once the file was synced, a name only once its folder was."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from memtop.supervisor.run.processes import attempt, shim
from memtop.supervisor.run.record import folder as folder_module
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run

Write = Callable[[Path, Any], object]
WRITERS: list[Write] = [folder_module.write_json, lambda path, value: shim.write_json(str(path), value, seconds=0.0)]
LOST = b"lost"


class Disk:
    """One folder, and what the disk has of it for certain."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.content: dict[int, bytes] = {}
        self.names: dict[str, int] = {}
        self.found: list[set[bytes]] = []
        """What a power cut before each call may leave under the name."""
        self._calls = os.fsync, os.replace

    def present(self) -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(self.folder)}

    def after_a_cut(self) -> set[bytes]:
        """With the names that are certain, and with those that only the kernel knows."""
        return {self.content.get(names.get(self.name, -1), LOST) for names in (self.names, self.present())}

    def fsync(self, descriptor: int) -> None:
        self.found.append(self.after_a_cut())
        self._calls[0](descriptor)
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self.names = self.present()
        else:
            self.content[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def replace(self, old: str | Path, new: str | Path) -> None:
        self.found.append(self.after_a_cut())
        self._calls[1](old, new)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(tmp_path, "file.json")
    monkeypatch.setattr(os, "fsync", disk.fsync)
    monkeypatch.setattr(os, "replace", disk.replace)
    return disk


@pytest.mark.parametrize("write", WRITERS, ids=["supervisor", "shim"])
def test_a_power_cut_leaves_the_old_or_the_new_file_and_then_the_new_one(disk: Disk, write: Write) -> None:
    path = disk.folder / disk.name
    write(path, {"n": 1})
    assert disk.after_a_cut() == {path.read_bytes()}
    old = path.read_bytes()
    disk.found.clear()
    write(path, {"n": 2})
    new = path.read_bytes()
    assert json.loads(new) == {"n": 2}
    assert disk.after_a_cut() == {new}
    assert len(disk.found) >= 3, "the file, its name, its folder"
    assert set().union(*disk.found) <= {old, new}


@pytest.mark.parametrize("write", WRITERS, ids=["supervisor", "shim"])
@pytest.mark.parametrize(("number", "written"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_that_does_not_sync_folders_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write, number: int, written: bool
) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    problem: object = None
    try:
        done = write(tmp_path / "file.json", {"n": 1})
    except folder_module.RunFolderError as error:
        problem = error
    assert (problem is None and done is not False) is written


def test_an_attempt_is_on_the_disk_before_its_program_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(name="a", created=1.0, settings=None, command=("true",), cwd="/", memtop_version="0")
    run = RunFolder(create_run(tmp_path, spec, fresh=False).path)
    synced: list[str] = []
    before: list[str] = []

    def start(*_: object, **__: object) -> Mock:
        before.extend(synced)
        return Mock(pid=5)

    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink())))
    monkeypatch.setattr(subprocess, "Popen", start)
    attempt.launch(run, 1, spec, None, tmp_path / "socket")
    folders = [str(run.attempt(1).parent), str(run.attempt(1))]
    assert [path for path in before if path in folders] == folders
    assert any("command.json" in path for path in before)
