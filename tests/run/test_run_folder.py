"""A run's folder, lock and socket: created, found, moved aside, damaged."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.run.client import socket_path
from memtop.supervisor.run.record.folder import RunFolder, RunLock, StateFile, create_run, find_run, list_runs, write_json
from memtop.supervisor.run.view import known_runs, read_run, read_state, show
from tests.run.brain import spec


def test_a_run_is_created_once_and_found_by_name_path_and_latest(tmp_path: Path) -> None:
    first = create_run(tmp_path, spec("a", 1.0), fresh=False)
    create_run(tmp_path, spec("b", 2.0), fresh=False)
    assert find_run("a", tmp_path).path == first.path
    assert find_run(str(first.path), tmp_path / "elsewhere").path == first.path
    assert find_run("latest", tmp_path).name == "b"
    assert [folder.name for folder in list_runs(tmp_path)] == ["a", "b"]
    with pytest.raises(RunFolderError, match="exists"):
        create_run(tmp_path, spec("a"), fresh=False)
    with pytest.raises(UsageError, match=r"'c': not found .* b, a"):
        find_run("c", tmp_path)


def test_fresh_moves_the_old_run_aside_and_deletes_nothing(tmp_path: Path) -> None:
    old = create_run(tmp_path, spec("a", 1.0), fresh=False)
    (old.path / "precious").write_text("weights")
    new = create_run(tmp_path, spec("a", 2.0), fresh=True)
    assert new.spec().created == 2.0
    aside = [folder for folder in list_runs(tmp_path) if folder.path.name != "a"]
    assert [(folder.path / "precious").read_text() for folder in aside] == ["weights"]


def test_a_run_in_use_is_not_moved(tmp_path: Path) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)
    lock = RunLock(folder)
    assert lock.acquire()
    with pytest.raises(RunFolderError, match="in use"):
        create_run(tmp_path, spec("a"), fresh=True)
    lock.release()
    assert not RunLock(folder).is_held()


def test_reading_a_run_does_not_lock_it(tmp_path: Path) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)
    folder.lock_path.touch()
    descriptor = os.open(folder.lock_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    assert not RunLock(folder).is_held()
    timer = threading.Timer(0.1, os.close, [descriptor])
    timer.start()
    assert RunLock(folder).acquire()
    timer.join()


@pytest.fixture
def common_place() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own lie below one that is closed to others."""
    with tempfile.TemporaryDirectory(prefix="memtop-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_run_of_another_user_is_not_known(common_place: Path) -> None:
    mine, other = (create_run(common_place, spec(name), fresh=False) for name in ("mine", "other"))
    for folder in (mine, other):
        write_json(folder.state_path, StateFile(run=read_state(folder), socket=""))
        folder.lock_path.touch(mode=0o600)
    if os.getuid() == 0:
        # Root may read everything: look as somebody who owns only the one.
        for path in (mine.path, *mine.path.iterdir()):
            os.chown(path, 65534, 65534)
        for path in (other.path, other.spec_path, other.state_path):
            path.chmod(0o755)
        os.seteuid(65534)
    else:
        other.lock_path.chmod(0)
    try:
        assert [run.name for run in known_runs(common_place)] == ["mine"]
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


def test_a_damaged_ledger_is_one_clear_line(tmp_path: Path) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)
    folder.ledger_path.write_bytes(b"not a database at all" * 100)
    for read in (lambda: read_run(folder.path), lambda: show(folder)):
        with pytest.raises(RunFolderError, match=r"ledger.sqlite: cannot be read: file is not a database"):
            read()


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "x" * 101])
def test_names_that_cannot_be_folders_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        create_run(tmp_path, spec(name), fresh=False)


def test_a_place_that_cannot_hold_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"file/a: cannot be created: Not a directory"):
        create_run(tmp_path / "file", spec("a"), fresh=False)


def test_a_write_that_fails_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"good": 1})
    (tmp_path / f".state.json.{os.getpid()}").mkdir()
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_json(path, {"bad": 2})
    assert json.loads(path.read_text()) == {"good": 1}


def test_a_damaged_run_json_hides_no_other_run(tmp_path: Path) -> None:
    create_run(tmp_path, spec("good"), fresh=False)
    bad = create_run(tmp_path, spec("bad"), fresh=False)
    bad.spec_path.write_text("{half")
    assert [folder.name for folder in list_runs(tmp_path)] == ["good"]
    with pytest.raises(RunFolderError, match=r"bad/run.json: cannot be decoded"):
        bad.spec()


def test_the_socket_path_is_short_for_any_run_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMTOP_SOCKET_DIR", raising=False)
    deep = tmp_path / ("d" * 200) / ("e" * 200)
    assert len(str(socket_path(deep))) < 100
    assert socket_path(deep) == socket_path(deep)
    assert socket_path(deep) != socket_path(deep / "x")
    assert socket_path(deep).parent.stat().st_mode & 0o777 == 0o700


def test_a_socket_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", str(tmp_path / "open"))
    with pytest.raises(RunFolderError, match="closed to others"):
        socket_path(RunFolder(tmp_path).path)


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("memtop.supervisor.run.record.folder.fcntl.flock", refuse)
    lock = RunLock(folder)
    with pytest.raises(RunFolderError, match=r"lock: cannot be locked: No locks available; choose a local --runs-dir"):
        lock.acquire()
