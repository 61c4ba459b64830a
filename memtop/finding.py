"""Runs as the commands see them: one that cannot be read is named with its reason, and hides no other."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from memtop.supervisor.errors import MemtopError, RunFolderError, UsageError
from memtop.supervisor.run.record import folder as folders
from memtop.supervisor.run.record import view
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.wire import RunState


class Unreadable(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose files cannot be read or understood; `error` is one line."""

    name: str
    folder: str
    error: str


def find_run(reference: str, runs_dir: Path) -> RunFolder:
    """The run of that name, at that path, or the newest for `latest`; what prevents looking is told, not passed over."""
    try:
        return folders.find_run(reference, runs_dir)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"run {reference!r}: not found in {runs_dir}: no file has so long a name") from None
        raise RunFolderError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except MemtopError:
        _entries(runs_dir)
        raise


def run_folders(runs_dir: Path) -> list[RunFolder]:
    """All runs, oldest first, those that cannot be read among them; RunFolderError if the place itself cannot be read."""
    found = []
    for path in _entries(runs_dir):
        try:
            written = (path / "run.json").stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            written = 0.0
        folder = RunFolder(path)
        try:
            found.append((folder.spec().created, folder))
        except MemtopError:
            found.append((written, folder))
    return [folder for _, folder in sorted(found, key=lambda item: (item[0], item[1].name))]


def state_of(folder: RunFolder) -> RunState | Unreadable:
    """The run's state, or why it cannot be told."""
    try:
        folder.spec()
        return view.read_state(folder)
    except MemtopError as error:
        return _unreadable(folder, str(error))
    except OSError as error:
        return _unreadable(folder, f"{error.filename or folder.path}: cannot be read: {error.strerror}")


@contextmanager
def readable_ledger(folder: RunFolder) -> Iterator[None]:
    """What SQLite says of a damaged ledger becomes one line."""
    try:
        yield
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise RunFolderError(f"{folder.ledger_path}: cannot be read: {error}") from None


def _unreadable(folder: RunFolder, error: str) -> Unreadable:
    return Unreadable(name=folder.name, folder=str(folder.path), error=" ".join(error.split()))


def _entries(runs_dir: Path) -> list[Path]:
    """All that lies there, nothing if there is no such folder; RunFolderError if it cannot be read."""
    try:
        return list(runs_dir.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"{runs_dir}: cannot be read: {error.strerror}; give another --runs-dir") from None
