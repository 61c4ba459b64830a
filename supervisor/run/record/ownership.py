"""Whether a run belongs to the caller. memtop acts on no other run.

`run.json` contains a command, and the other files contain pids, settings and a pending restart.
A user who can write them decides what memtop starts and which processes count as the run's. So the
folder and the files that memtop acts on must belong to the caller, and no other user may write
them. Looking at a run needs no such check. Nor do the journals of the ranks: they contain no
command, their pids are shown and never signalled, and each report is checked when it is decoded.
The journals of a program under sudo belong to root.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.monitor.processes.signals import user_name

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OF_A_RUN = (
    *("run.json", "state.json", "lock", "supervisor.log", "attempts"),
    *("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.sqlite-journal"),
)
_OF_AN_ATTEMPT = ("command.json", "process.json", "exit.json", "ranks.json", "settings.json", "baseline.json", "output.log")


def require_own(folder: Path) -> None:
    """Raise RunFolderError if the run in this folder is not the caller's alone."""
    problem = why_not_own(folder)
    if problem is not None:
        raise RunFolderError(problem)


def why_not_own(folder: Path) -> str | None:
    """Why memtop does not act on the run in this folder, and what to do. None if it may act."""
    if (link := _why_not_own_link(folder)) is not None:
        return link
    caller = os.geteuid()
    try:
        for number, path in enumerate(_acted_on(str(folder))):
            try:
                found = os.lstat(path)
                owners = [found.st_uid]
                if stat.S_ISLNK(found.st_mode):
                    found = os.stat(path)  # noqa: PTH116 - a hot path
                    owners.insert(0, found.st_uid)
            except FileNotFoundError:
                continue
            for owner in owners:
                if owner != caller:
                    return _of_another(path, owner, whole=number == 0)
            if found.st_mode & _WRITABLE_BY_OTHERS:
                return f"other users may write {path}: if you trust what the run contains, `chmod -R go-w {folder}`"
    except OSError as error:
        return f"{error.filename}: cannot be read: {error.strerror}"
    return None


def why_unreadable(path: Path, error: OSError) -> str:
    """Why a file of a run, or a folder of runs, cannot be read, and what its owner can do if that
    is another user.

    The advice opens all of the run, and nothing else. A folder above the run is only made one that
    others can pass through.
    """
    words = f"{path}: cannot be read: {error.strerror}"
    if error.errno != errno.EACCES:
        return words
    run = _run_of(path)
    for place in (path, *path.parents):
        try:
            owner = place.lstat().st_uid
        except OSError:
            continue  # inside a folder that is closed to the caller
        if owner == os.geteuid():
            return words
        command = None
        if run is not None and (place == run or run in place.parents):
            command = f"chmod -R go+rX {shlex.quote(str(run))}"
        elif place == path:
            command = f"chmod go+rx {shlex.quote(str(place))}"
        if command is not None:
            return f"{words}; {user_name(owner)} owns it and can let others read it: `{command}`"
        return f"{words}; {place} is closed: {user_name(owner)} can let others pass: `chmod go+x {shlex.quote(str(place))}`"
    return words


def _run_of(path: Path) -> Path | None:
    """The run whose file or folder this is. None if it belongs to no run."""
    for parent in path.parents:
        first, *rest = path.relative_to(parent).parts
        if first in _OF_A_RUN and (not rest or (first == "attempts" and rest[-1] in _OF_AN_ATTEMPT)):
            return parent
    return None


def is_own_file(descriptor: int) -> bool:
    """Whether an open file belongs to the caller, and no other user may write it."""
    found = os.fstat(descriptor)
    return found.st_uid == os.geteuid() and not found.st_mode & _WRITABLE_BY_OTHERS


def is_foreign_link(path: Path | str) -> bool:
    """Whether this is a symbolic link of another user. A link of the caller may lead to a run."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(found.st_mode) and found.st_uid != os.geteuid()


def _acted_on(folder: str) -> Iterator[str]:
    yield folder
    yield from (f"{folder}/{name}" for name in _OF_A_RUN)
    for attempt in _names(f"{folder}/attempts"):
        place = f"{folder}/attempts/{attempt}"
        yield place
        yield from (f"{place}/{name}" for name in _OF_AN_ATTEMPT)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, a hot path
    except (FileNotFoundError, NotADirectoryError):
        return []


def _why_not_own_link(folder: Path) -> str | None:
    if not is_foreign_link(folder):
        return None
    real = os.path.realpath(folder)
    return f"{folder} is a link of {user_name(folder.lstat().st_uid)}: give the folder that it leads to, {real}"


def _of_another(path: str, owner: int, *, whole: bool) -> str:
    if whole:
        return (
            f"{path} belongs to {user_name(owner)}, and memtop acts only on your own runs: "
            "`memtop show` and `memtop watch --read-only` show it"
        )
    return f"{path} belongs to {user_name(owner)}: if you trust what the run contains, make it yours with chown"
