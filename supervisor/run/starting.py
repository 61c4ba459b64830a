"""Starts the supervisor of a run, and the next one if it is killed; lets the supervisor of an ended
run exit."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from memtop.supervisor import language
from memtop.supervisor.errors import MemtopError, NotRunningError, RefusedError, RunFolderError, UsageError
from memtop.supervisor.run.client import LOOK_SECONDS, STATUS, ask, socket_path
from memtop.supervisor.run.grip import why_not_continued
from memtop.supervisor.run.notices import Target, keep_targets
from memtop.supervisor.run.processes.environment import keep_environment, kept_by, kept_environment, outside_any_run
from memtop.supervisor.run.processes.members import programs_at, refuse_used_path
from memtop.supervisor.run.record.folder import LATEST, RunFolder, RunLock, RunSpec, create_run
from memtop.supervisor.run.record.ownership import require_own, why_not_own
from memtop.supervisor.run.server import peer_of
from memtop.supervisor.run.view import needs_supervisor, read_state, trainer_alive
from memtop.supervisor.wire import Change, Leave, Phase

_LITTLE_SPACE = 1 << 20
"""If a supervisor ends at its start without an error in its log, and less disk space is free, the
disk is full."""
_START_SECONDS = 30.0
_STATE_SECONDS = 2.0
"""A supervisor that has no state.json after this time is asked whether it runs: it may not be able
to write the file, for example on a full disk."""
# Python 3.10 has no such option: the folder that it starts in, "/", is searched for modules.
_NO_PRESENT_FOLDER = ("-P",) if sys.version_info >= (3, 11) else ()
_LEAVE_SECONDS = 10.0
AFTER_KILL = "--after-kill"
"""Of `python -m memtop.supervisor`: the supervisor before it was killed."""
_OVER = "over"
_LOOK_EVERY_SECONDS = 1.0
_LOOKS = 5
"""A run that was in use at so many looks in a row has another supervisor. The lock of one that was
killed may last for a moment."""


def start_supervisor(folder: RunFolder, change: Change | None = None, *, environment: Mapping[str, str] | None = None) -> int:
    """Start a detached supervisor for the run and wait until it listens. Returns its pid.

    `change` restarts an ended run. `environment`: of the run's program, in place of the one that
    the run keeps. If the supervisor does not start, its error is raised.
    """
    require_own(folder.path)
    variables = kept_environment(folder, os.environ) if environment is None else outside_any_run(environment)
    argv = _command(folder)
    if change is not None:
        argv += ["--restart", msgspec.json.encode(change).decode()]
    try:
        log = folder.open_supervisor_log()
    except OSError as error:
        raise RunFolderError(f"{folder.supervisor_log}: cannot be written: {error.strerror}") from None
    with log:
        begins = log.tell()
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=_in_this_language(variables),
        )
    deadline, asked = time.monotonic() + _START_SECONDS, time.monotonic() + _STATE_SECONDS
    while time.monotonic() < deadline:
        if (status := process.poll()) is not None:
            raise _start_error(folder, status, begins)
        file = folder.state()
        if file is not None and file.run.supervisor_pid == process.pid and Path(file.socket).exists():
            return process.pid
        if time.monotonic() > asked:
            if _answers(folder, process.pid):
                return process.pid
            asked = time.monotonic() + _STATE_SECONDS
        time.sleep(0.02)
    raise RunFolderError(f"the supervisor did not start within {_START_SECONDS:.0f} s: see {folder.supervisor_log}")


def _command(folder: RunFolder) -> list[str]:
    # Nothing of the run's folder or of the present folder may stand in for a library.
    return [sys.executable, *_NO_PRESENT_FOLDER, "-m", "memtop.supervisor", str(folder.path)]


class Standby:
    """A shell that outlives the supervisor and becomes the next one if it is killed. It holds next
    to no memory: memtop's modules are loaded only then."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._pipe: int | None = None

    def start(self) -> str | None:
        """None, or why it cannot be started."""
        # The kernel closes the pipe of a supervisor that is killed: `read` then gets no word.
        successor = shlex.join([*_command(self._folder), AFTER_KILL])
        script = f'read -r word; [ "$word" = {_OVER} ] || exec {successor} </dev/null'
        reads, self._pipe = os.pipe()
        try:
            with self._folder.open_supervisor_log() as log:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", script], stdin=reads, stdout=log, stderr=log, start_new_session=True, cwd="/"
                )
        except OSError as error:
            return f"if this supervisor is killed, none follows it by itself: {error.strerror}"
        finally:
            os.close(reads)
        # The supervisor reaps all its children, so Popen must not do it in its finaliser.
        process.returncode = 0
        return None

    def dismiss(self) -> None:
        """The supervisor ends by itself: none follows it."""
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the shell has ended, too
                os.write(self._pipe, f"{_OVER}\n".encode())
            os.close(self._pipe)
            self._pipe = None


def wait_for_end(folder: RunFolder) -> bool:
    """After the run's supervisor was killed: wait until its program has ended. False if the run has
    another supervisor by then."""
    in_use = 0
    while in_use < _LOOKS:
        if RunLock(folder).is_held():
            in_use += 1
        else:
            in_use, file = 0, folder.state()
            if not trainer_alive(folder, max(folder.newest_attempt(), file.run.attempt if file is not None else 0)):
                return True
        time.sleep(_LOOK_EVERY_SECONDS)
    return False


def start_run(
    runs_dir: Path, spec: RunSpec, *, fresh: bool = False, notify: Sequence[Target] = (), like: RunFolder | None = None
) -> RunFolder:
    """Create a run and start its supervisor. `fresh` moves an ended run with that name aside.
    `notify`: whom it tells, in addition to those of the configuration. `like`: the run whose
    environment it gets; None: it gets that of the caller."""
    path = runs_dir / spec.name
    if fresh or not os.path.lexists(path):
        refuse_used_path(path)
    elif RunFolder(path).spec_path.exists() and why_not_own(path) is None:
        raise RunFolderError(_exists(RunFolder(path)))
    kept = None if like is None else kept_by(like)
    folder = create_run(runs_dir, spec, fresh=fresh)
    keep_environment(folder, kept or os.environ)
    if notify:
        keep_targets(folder, notify)
    start_supervisor(folder)
    return folder


def _exists(folder: RunFolder) -> str:
    """That a run has this name already, and what can be done with it."""
    state, file, name, where = read_state(folder), folder.state(), folder.name, folder.path.parent
    if state.state is Phase.CREATED and not RunLock(folder).is_held():
        return (
            f"run {name!r} exists in {where}, and its program was never started: if another command starts it just now, "
            f"`memtop watch {name}` shows it; if none does, --fresh moves it aside; --name chooses another name"
        )
    if state.state is Phase.FINISHED:
        return (
            f"run {name!r} exists in {where} and is {state.word}: --fresh moves it aside and starts a new run, "
            "--name chooses another name"
        )
    if not state.state.final:
        return (
            f"run {name!r} exists in {where} and is {state.word}: `memtop watch {name}` shows it, --name chooses another name"
        )
    if state.resumes or (file is not None and file.grip is not None and why_not_continued(file.grip) is None):
        return (
            f"run {name!r} exists in {where}: `memtop restart {name}` continues it, "
            "--fresh moves it aside and starts a new run, --name chooses another name"
        )
    return (
        f"run {name!r} exists in {where}: `memtop restart {name}` starts it again from the beginning, unless it resumes by "
        "itself; --fresh moves it aside and starts a new run, --name chooses another name"
    )


def revive(path: Path) -> bool:
    """Start a new supervisor if the old one died while the trainer runs.

    True if one was started. RunFolderError if it needs one and is not the caller's own.
    """
    folder = RunFolder(path)
    if not needs_supervisor(folder):
        return False
    require_own(folder.path)
    if RunLock(folder).is_held():
        return False
    try:
        start_supervisor(folder)
    except RunFolderError:
        # Another process was faster. It holds the lock, so the run has a supervisor.
        if RunLock(folder).is_held():
            return False
        raise
    return True


def _in_this_language(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with the language of this command: notifications and the report that is
    written by itself have it, too."""
    here = language.current()
    return environment if language.language_of(environment) == here else {**environment, "MEMTOP_LANG": here}


def _answers(folder: RunFolder, pid: int) -> bool:
    """Whether the process `pid` listens on the run's socket and answers: then it has begun."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(LOOK_SECONDS)
        try:
            connection.connect(str(socket_path(folder.path)))
            connection.sendall(STATUS)
            return peer_of(connection).pid == pid and bool(connection.recv(1))
        except OSError:  # it does not listen yet, or says nothing yet
            return False


def _start_error(folder: RunFolder, status: int, begins: int) -> MemtopError:
    """Why the supervisor did not start. Its words begin at byte `begins` of supervisor.log."""
    with folder.supervisor_log.open("rb") as log:
        log.seek(begins)
        lines = log.read().decode(errors="replace").strip().splitlines()
    try:
        message = str(json.loads(lines[-1])["error"])
    except (IndexError, ValueError, KeyError, TypeError):
        # A full disk has no space for the reason either. Some file systems report 0 bytes always.
        free = shutil.disk_usage(folder.path).free
        message = f"the supervisor ended with status {status} while starting: see {folder.supervisor_log}"
        if free < _LITTLE_SPACE and status != UsageError.exit_status:
            message = f"{folder.path}: the disk is full: {free >> 10} KiB free; free some space, or set --runs-dir"
    return UsageError(message) if status == UsageError.exit_status else RunFolderError(message)


def let_leave(folder: RunFolder) -> None:
    """Let the supervisor of a run that is over end now, so that the run can be moved aside.

    After the end it stays for a moment, or as long as a dashboard shows the run.
    """
    require_own(folder.path)
    if not folder.lock_path.exists() or not RunLock(folder).is_held():
        return
    with contextlib.suppress(NotRunningError, RefusedError):  # it is in use, or just leaves
        ask(folder, lambda number: Leave(id=number))
        deadline = time.monotonic() + _LEAVE_SECONDS
        while RunLock(folder).is_held() and time.monotonic() < deadline:
            time.sleep(0.01)


def free_name(runs_dir: Path, stem: str) -> str:
    """A name that no run has, and no program uses: `first-run`, `first-run-2`, ..."""
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem)[:80].strip("-._") or "run"
    number, name = 1, stem
    try:
        while name == LATEST or os.path.lexists(runs_dir / name) or programs_at(runs_dir / name):
            number += 1
            name = f"{stem}-{number}"
    except OSError as error:
        raise RunFolderError(f"{runs_dir}: cannot be read: {error.strerror}; give another --runs-dir") from None
    return name
