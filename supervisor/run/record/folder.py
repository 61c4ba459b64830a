"""A run's folder: its paths, its creation, the search for runs, the lock, and files that are
replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import os
import re
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec.structs import replace

from memtop.presets.checks import did_you_mean
from memtop.presets.decoding import decoder_of
from memtop.presets.program_profiles import ProgramProfile
from memtop.presets.schema import Settings
from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.run.grip import Asked, Grip
from memtop.supervisor.run.pending_restart import Waiting
from memtop.supervisor.run.record.ownership import is_foreign_link, is_own_file, require_own, why_unreadable
from memtop.supervisor.wire import Change, RunState

T = TypeVar("T")
# A process that checks whether a run is in use holds the lock for a moment.
_LOCK_SECONDS = 0.5
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ATTEMPT = re.compile(r"[0-9]{4,9}")
LATEST = "latest"
"""In place of a run's name: the newest run."""
# The largest file has some hundred kilobytes. Another user's may have any size.
_LARGEST_JSON = 64 << 20


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: how the run was created. It never changes afterwards."""

    format: int = 1
    name: str
    id: str = ""
    """Of this run alone. `create_run` sets it: another run may get the path of this one later."""
    created: float
    settings: Settings | None
    """None for external commands."""
    command: tuple[str, ...] = ()
    """The external command. Empty for the built-in trainer."""
    cwd: str
    gpus: str | None = None
    """What an external command gets as CUDA_VISIBLE_DEVICES. None leaves the environment
    unchanged."""
    choice: str | None = None
    """Which preset and GPU memtop chose at first, and why. None if it chose neither."""
    on_oom: str = "stop"
    grip: Grip | None = None
    """Of an external command that `memtop adopt` has taken over: what its first attempt resumes
    from."""
    after: str | None = None
    """The folder of the run that ends before this one begins."""
    queue: bool = False
    """Whether it begins only when no other run and no other program uses its GPUs."""
    then: str | None = None
    """A shell command for the very end."""
    step_pattern: str | None = None
    """MEMTOP_STEP: a regular expression for the lines of an external command that have its step."""
    profile: ProgramProfile | None = None
    """Of an external command: what memtop knows about such programs."""
    profile_why: str = ""
    """Why this profile was chosen."""
    memtop_version: str


class StateFile(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json`: the state of the run, and its supervisor."""

    format: int = 1
    run: RunState
    socket: str
    supervisor_started_ticks: int | None = None
    """Together with run.supervisor_pid, it identifies the supervisor."""
    pending: Change | None = None
    """A restart that was requested but has not happened yet."""
    waiting: Waiting | None = None
    """A restart after a failure, which waits for its conditions."""
    waited_at: int | None = None
    """The newest saved update when a restart last stopped waiting for disk space. None if none has
    waited for it."""
    stalled: str | None = None
    """The last message of a program that hung, if it is being ended for that."""
    grip: Grip | None = None
    """Of the user's own program: how memtop holds it."""
    asked: Asked | None = None
    """What the first update of the present attempt must show."""

    @property
    def restarts(self) -> bool:
        """The run is to continue, whether or not its program runs now."""
        return self.pending is not None or self.waiting is not None


class RunFolder:
    """The folder `<runs-dir>/<name>/` of one run."""

    def __init__(self, path: Path) -> None:
        # Path.resolve raises RuntimeError for a link that loops (Python 3.12 and older).
        self.path = Path(os.path.realpath(path))
        self.name = self.path.name
        self.spec_path = self.path / "run.json"
        self.state_path = self.path / "state.json"
        self.ledger_path = self.path / "ledger.sqlite"
        self.lock_path = self.path / "lock"
        self.supervisor_log = self.path / "supervisor.log"
        self.latest_state = self.path / "train_latest_state"

    @functools.cached_property
    def id(self) -> str:
        """Together with the path it identifies the run, as in the environment of its processes.

        Empty if the folder contains no run. RunFolderError if this user may not read it.
        """
        spec = read_derived(self.spec_path, RunSpec)
        return "" if spec is None else spec.id

    def open_supervisor_log(self) -> BinaryIO:
        """supervisor.log, for appending. Raises OSError."""
        # No umask makes it writable for other users.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        return os.fdopen(os.open(self.supervisor_log, flags, 0o644), "ab")

    def attempt(self, number: int) -> Path:
        return self.path / "attempts" / f"{number:04d}"

    def newest_attempt(self) -> int:
        """The newest attempt whose program was started. 0 if there is none.

        state.json does not know it yet if the supervisor died right after the start.
        """
        numbers = self.attempt_numbers()
        return next((number for number in numbers if (self.attempt(number) / "process.json").exists()), 0)

    def attempt_numbers(self) -> list[int]:
        """The attempts that have a folder, the newest first."""
        try:
            names = os.listdir(self.path / "attempts")  # noqa: PTH208 - names alone, a hot path
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((int(name) for name in names if _ATTEMPT.fullmatch(name)), reverse=True)

    def spec(self, *, own: bool = False) -> RunSpec:
        """The contents of run.json. `own`: RunFolderError if it is not the caller's alone."""
        return read_json(self.spec_path, RunSpec, own=own)

    def state(self) -> StateFile | None:
        """The contents of state.json. None if there is no such file, or if it is damaged."""
        return read_derived(self.state_path, StateFile)


def create_run(runs_dir: Path, spec: RunSpec, *, fresh: bool) -> RunFolder:
    """Create the folder of a new run, closed to other users.

    `fresh` moves an existing run with that name aside. Nothing is ever deleted. UnicodeEncodeError
    for a path, a command or a setting with bytes that are not UTF-8.
    """
    if not _NAME.fullmatch(spec.name):
        raise UsageError(
            f"--name {spec.name!r}: begin with a letter or a digit; then letters, digits, '.', '_' and '-', at most 100 in all"
        )
    if spec.name == LATEST:
        raise UsageError(f"--name {LATEST}: this word means the newest run; choose another name")
    spec = replace(spec, id=os.urandom(8).hex())
    path = runs_dir / spec.name
    # Everything is stored as UTF-8. Refuse other bytes before anything is created.
    str(path.absolute()).encode()
    msgspec.json.encode(spec)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise RunFolderError(f"{path}: is a link, and memtop creates no run there: --name chooses another name")
        if fresh and path.exists():
            move_aside(RunFolder(path))
        # It does not follow a link that another user has put there in the meantime.
        path.mkdir(mode=0o700)
        (path / "attempts").mkdir(mode=0o700)
    except FileExistsError:
        if not runs_dir.is_dir():
            raise RunFolderError(f"{path}: cannot be created: Not a directory; choose another --runs-dir") from None
        raise RunFolderError(
            f"run {spec.name!r} exists in {runs_dir}: another command has just created it, or it is not whole: then --fresh "
            "moves it aside; --name chooses another name"
        ) from None
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be created: {error.strerror}; choose another --runs-dir") from None
    folder = RunFolder(path)
    try:
        write_json(folder.spec_path, spec)
        _refuse_without_owners(folder)
    except RunFolderError:
        # Nothing else is in it: its name stays free.
        folder.spec_path.unlink(missing_ok=True)
        (folder.path / "attempts").rmdir()
        folder.path.rmdir()
        raise
    return folder


def _refuse_without_owners(folder: RunFolder) -> None:
    """RunFolderError if the file system of a new run does not store owners and permissions."""
    try:
        require_own(folder.path)
    except RunFolderError as error:
        raise RunFolderError(
            f"{error}; memtop has just created it, so this file system does not store owners or permissions: "
            "use a Linux file system, `--runs-dir ~/memtop-runs` or `export MEMTOP_RUNS_DIR=~/memtop-runs`"
        ) from None


def move_aside(folder: RunFolder) -> Path:
    """Rename a run that is not in use to `<name>.<timestamp>`."""
    require_own(folder.path)
    lock = RunLock(folder)
    if not lock.acquire():
        raise RunFolderError(f"run {folder.name!r} is in use: `memtop stop {folder.name}` first")
    aside = name_aside(folder.path)
    try:
        folder.path.rename(aside)
    finally:
        lock.release()
    return aside


def name_aside(path: Path) -> Path:
    """A free name for what is moved aside: `<name>.<timestamp>`, then with `-2` and so on."""
    stamp = f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stamp], (f"{stamp}-{number}" for number in itertools.count(2)))
    return next(other for name in names if not os.path.lexists(other := path.with_name(name)))


def list_runs(runs_dir: Path) -> list[RunFolder]:
    """All runs, oldest first."""
    found = []
    for spec_path in runs_dir.glob("*/run.json"):
        if is_foreign_link(spec_path.parent):
            continue
        folder = RunFolder(spec_path.parent)
        try:
            found.append((folder.spec().created, folder))
        except RunFolderError:
            # A folder with an unreadable run.json must not hide the others. It is reported when it
            # is used by name.
            continue
    return [folder for _, folder in sorted(found, key=lambda item: item[0])]


def find_run(reference: str, runs_dir: Path) -> RunFolder:
    """The run with that name or at that path.

    `latest` is the caller's newest run, or the newest of all if the caller has none. Raises
    UsageError or RunFolderError.
    """
    if reference == LATEST:
        runs = list_runs(runs_dir)
        if not runs:
            raise RunFolderError(f"no runs in {runs_dir}: start one with `memtop train`, or set --runs-dir")
        own = [run for run in runs if run.path.stat().st_uid == os.geteuid()]
        return (own or runs)[-1]
    for path in (runs_dir / reference, Path(reference)):
        if (path / "run.json").is_file():
            if is_foreign_link(path):
                require_own(path)
            return RunFolder(path)
    names = [folder.name for folder in list_runs(runs_dir)]
    if not names:
        raise UsageError(f"run {reference!r}: not found in {runs_dir}, where no run is; set --runs-dir or MEMTOP_RUNS_DIR")
    listed = f"`memtop runs` lists all, the newest are {', '.join(names[:-6:-1])}"
    raise UsageError(f"run {reference!r}: not found in {runs_dir}; {listed}{did_you_mean(reference, names)}")


class RunLock:
    """The supervisor holds it while it runs. The kernel releases it when the process ends."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.lock_path
        self._folder = folder.path
        self._descriptor: int | None = None
        self._held_folder: int | None = None

    def acquire(self) -> bool:
        """True if the lock is ours now. False if another process keeps holding it."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunFolderError(f"{self._path}: cannot be written: {error.strerror}") from None
        deadline = time.monotonic() + _LOCK_SECONDS
        try:
            while not _try_lock(self._path, descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    return False
                time.sleep(0.02)
        except RunFolderError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._held_folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return True

    def release(self) -> None:
        for descriptor in (self._descriptor, self._held_folder):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptor = self._held_folder = None

    def is_displaced(self) -> bool:
        """Whether another folder has the path of the run that we have locked: the run was renamed
        or deleted, and a new one was created. Nothing may be written there."""
        if self._held_folder is None:
            return False
        try:
            there = self._folder.stat()
        except FileNotFoundError:
            return False  # nothing is there that could be damaged
        return not os.path.samestat(there, os.fstat(self._held_folder))

    def is_held(self) -> bool:
        """True while a process holds the lock.

        Raises RunFolderError if this user may not open it.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RunFolderError(f"{self._path}: cannot be read: {error.strerror}") from None
        try:
            # A shared lock, so that two processes that check do not take each other for the holder.
            return not _try_lock(self._path, descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)


def _try_lock(path: Path, descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems have no locks.
        raise RunFolderError(f"{path}: cannot be locked: {error.strerror}; choose a local --runs-dir") from None
    return True


# A file that does not exist, a folder in its place, a link that leads nowhere.
_ABSENT = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}


def read_json(path: Path, shape: type[T], *, own: bool = False) -> T:
    """Read a file of a run. `own`: RunFolderError if it is not the caller's alone."""
    try:
        return _read(path, shape, own=own)
    except OSError as error:
        raise RunFolderError(why_unreadable(path, error)) from None
    except _Damaged as error:
        raise RunFolderError(f"{path}: cannot be decoded: {error}") from None


def read_derived(path: Path, shape: type[T]) -> T | None:
    """The contents of a file that memtop can do without.

    None if there is no such file, or if it is damaged (empty or cut after a crash of the machine).
    Raises RunFolderError if this user may not read it.
    """
    try:
        return _read(path, shape)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise RunFolderError(why_unreadable(path, error)) from None
    except _Damaged:
        return None


class _Damaged(Exception):
    """The file does not have the shape that memtop writes."""


def _read(path: Path, shape: type[T], *, own: bool = False) -> T:
    try:
        return decoder_of(shape).decode(_content(path, own=own))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Damaged(str(error)) from None


def _content(path: Path, *, own: bool) -> bytes:
    # Another user's file may be a pipe. To open it must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _Damaged("it is not a file")
        if found.st_size > _LARGEST_JSON:
            raise _Damaged(f"it has {found.st_size >> 20} MiB, too much for a file of a run")
        if own and not is_own_file(descriptor):
            raise RunFolderError(
                f"{path}: is not yours alone: another user owns it, or may write it: `ls -l {path}` shows its owner; "
                f"if that is you, `chmod go-w {path}`"
            )
        return file.read()


def open_to_read(path: Path) -> BinaryIO:
    """Open a file that a program may have written. OSError if it has put anything else in its
    place: a pipe would make the reader wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def write_json(path: Path, value: Any, *, sync: bool = True, mode: int = 0o644) -> None:
    """Replace the file in one step: readers see the old or the new content, never a part of it.

    `sync`: wait until the content, and then its name, are on the disk (fsync). After a power cut
    the file has the new content. On a busy disk that takes seconds. A folder in its place is
    renamed.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # No umask makes it writable for other users.
        # What a program has put in its place is refused, then removed below.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, mode), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
            file.flush()
            if sync:
                os.fsync(file.fileno())
        if path.is_dir() and not path.is_symlink():
            path.rename(name_aside(path))
        new.replace(path)
        if sync:
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        hint = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the folder's permissions"
        raise RunFolderError(f"{path}: cannot be written: {error.strerror}; {hint}") from None


def sync_folder(path: Path) -> None:
    """Wait until the names in this folder are on the disk. Some network file systems do not do that
    for a folder, and say EINVAL."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
