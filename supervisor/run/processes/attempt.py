"""The processes of one attempt: how they are started, and how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import platform
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from memtop.presets.schema import Settings
from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.interpreters import why_gone
from memtop.supervisor.monitor.processes.proc import ProcessId, identify, is_stopped, is_working
from memtop.supervisor.monitor.processes.table import all_pids
from memtop.supervisor.run.events import LeftoversFound
from memtop.supervisor.run.processes.environment import program_environment, with_agent_in_front
from memtop.supervisor.run.processes.members import SHIM, alive, family, marked, named, recorded_ranks, send
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, read_derived, sync_folder, write_json
from memtop.supervisor.run.record.output_log import OutputLog
from memtop.supervisor.run.stop_ladder import LEFTOVER_SECONDS, WORKING_LEFTOVER_SECONDS

# The exit file may just be renamed, and the shim of an adopted attempt may not have written its
# process file yet.
_GONE_SECONDS, _NEVER_SEEN_SECONDS = 1.0, 5.0
_LAST_SIGNAL = 64


class ProcessFile(msgspec.Struct, frozen=True):
    """`process.json`, written by the shim."""

    pid: int
    started_ticks: int
    shim_pid: int
    shim_started_ticks: int


class ExitFile(msgspec.Struct, frozen=True):
    """`exit.json`, written by the shim.

    `status` is negative for a signal. `ended` is in seconds since the epoch.
    """

    status: int
    ended: float


class RunningAttempt:
    """The processes and files of one attempt that this supervisor has started or adopted."""

    def __init__(self, folder: RunFolder, number: int, shim_pid: int | None) -> None:
        self.number = number
        self.folder = folder.attempt(number)
        self.log_path = self.folder / "output.log"
        self.log = OutputLog(self.log_path)
        self._run = folder
        self._shim = None if shim_pid is None else identify(shim_pid)
        self._adopted = shim_pid is None
        """Started by another supervisor: its process file may be lost or damaged."""
        self._trainer: ProcessId | None = None
        self._known: set[ProcessId] | None = None
        """Living processes of the attempt that were found before."""
        self._lock = threading.Lock()
        """The sampler's thread and the event loop both search for processes."""
        self._reaped: dict[int, int] = {}
        self._gone_since: float | None = None

    @property
    def trainer(self) -> ProcessId | None:
        """The training program or its launcher. None until the shim has started it."""
        if self._trainer is None:
            found = read_derived(self.folder / "process.json", ProcessFile)
            # Another run's file is at this path if the run was renamed: it names another shim.
            if found is not None and self._shim in (None, ProcessId(found.shim_pid, found.shim_started_ticks)):
                with self._lock:
                    self._trainer = ProcessId(found.pid, found.started_ticks)
                    self._shim = ProcessId(found.shim_pid, found.shim_started_ticks)
            elif self._adopted and read_derived(self.folder / "exit.json", ExitFile) is None:
                # The file is lost, damaged or not written yet. A search reads all of /proc, so an
                # attempt that has ended gets none.
                self._search()
        return self._trainer

    def _search(self) -> None:
        """Find the shim and the program among all processes. The program may not have begun yet."""
        shim = self._shim or _living_shim(self._run, self.number)
        program = _oldest_leader(family(self._run, self.number, shim=shim, program=None, known=()))
        with self._lock:
            # Another thread may have read the process file meanwhile, which is more reliable.
            if self._trainer is None:
                self._shim, self._trainer = shim, program

    def alive(self) -> bool:
        return alive(self.trainer)

    def lives_elsewhere(self) -> bool:
        """Whether the shim or the program lives, as far as they are known without the attempt's
        files: another run's are at their path."""
        return alive(self._shim) or alive(self._trainer)

    def note_reaped(self, ended: dict[int, int]) -> None:
        """Note children that have ended. One may be a trainer whose shim was killed."""
        self._reaped |= ended

    def continue_shim(self) -> None:
        """A shim that a signal has stopped would not notice the end of the program."""
        if self._shim is not None and is_stopped(self._shim.pid):
            send(self._shim, signal.SIGCONT)

    def ended(self) -> ExitFile | None:
        """How the program ended.

        None while it runs. The status is unknown only if the shim was killed, too.
        """
        written = read_derived(self.folder / "exit.json", ExitFile)
        if written is not None:
            return written
        if self.alive() or alive(self._shim):
            self._gone_since = None
            return None
        # Both are gone without an exit file: wait a moment for it, then return what is known.
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        if time.monotonic() - self._gone_since < (_NEVER_SEEN_SECONDS if self._shim is None else _GONE_SECONDS):
            return None
        return ExitFile(self._collected_status(), time.time())

    def _collected_status(self) -> int:
        """The program's status if this process collected it, or the shim's, which ends with it."""
        status = self._reaped.get(self._trainer.pid) if self._trainer is not None else None
        if status is None and self._shim is not None:
            status = self._reaped.get(self._shim.pid)
            if status is not None and status < 0:
                return UNKNOWN_STATUS  # the shim itself was killed
            if status is not None and 128 < status <= 128 + _LAST_SIGNAL:
                return 128 - status  # the shim returns 128 + N for signal N
        return UNKNOWN_STATUS if status is None else status

    def processes(self) -> list[ProcessId]:
        """All living processes of this attempt: launcher, ranks, loader workers, daemons."""
        with self._lock:
            if self._known is None:
                self._known = set(recorded_ranks(self.folder))
            known = frozenset(self._known)
        program = self.trainer  # also finds the shim
        found = family(self._run, self.number, shim=self._shim, program=program, known=known)
        with self._lock:
            # Another thread may have found more meanwhile: only the end of a process removes it.
            self._known = {*found, *(one for one in self._known.difference(found) if alive(one))}
        return found

    def stopped(self) -> list[ProcessId]:
        """Those of the attempt's processes that a signal has stopped."""
        return [process for process in self.processes() if is_stopped(process.pid)]

    def type_answer(self, text: str) -> None:
        """Write a line to the program's standard input, if it was started with one that takes
        answers. It is read when the program asks."""
        with contextlib.suppress(OSError):  # it has none, or has ended
            descriptor = os.open(self.folder / ANSWERS, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    os.write(descriptor, f"{text}\n".encode())
            finally:
                os.close(descriptor)

    def group(self) -> list[ProcessId]:
        """The program and the processes in its process group: those that Ctrl-C in a terminal would
        signal."""
        if self.trainer is None:
            return []
        # The shim made the program the leader of its session and group. Each of torchrun's ranks
        # leads its own group.
        others = [p for p in self.processes() if p != self.trainer and _group_of(p.pid) == self.trainer.pid]
        return [self.trainer, *others]


def _oldest_leader(processes: list[ProcessId]) -> ProcessId | None:
    """The program that the shim started: it leads a session, and all others were started later."""
    leaders = [process for process in processes if _session_of(process.pid) == process.pid]
    return min(leaders, key=lambda process: (process.started_ticks, process.pid), default=None)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


# No process can have this exit status.
UNKNOWN_STATUS = -(1 << 16)


async def clear_leftovers(
    attempt: RunningAttempt, untouched_seconds: float, terminate_seconds: float, found: Callable[[LeftoversFound], None]
) -> None:
    """End what a program left behind (ranks of a dead launcher, loader workers, daemons), which
    would hold its memory.

    Processes of its group may still be saving, and get `untouched_seconds` without a signal; all of
    them get SIGTERM and `terminate_seconds`, then SIGKILL. On a busy machine, or for a large state,
    that is not long enough to save: while one of them works after SIGTERM, they get
    WORKING_LEFTOVER_SECONDS.
    `found` gets the processes that each signal was sent to, and at last those that are still there.
    """
    if untouched_seconds:
        # They got SIGINT together with the program and may still be running.
        await _wait(attempt, [process for process in attempt.group() if alive(process)], untouched_seconds)
    # After SIGKILL nothing is saved: only the kernel still works on such a process.
    waits = ((signal.SIGTERM, terminate_seconds, WORKING_LEFTOVER_SECONDS), (signal.SIGKILL, LEFTOVER_SECONDS, 0.0))
    for number, seconds, working_seconds in waits:
        leftovers = attempt.processes()
        if not leftovers:
            return
        found(LeftoversFound(name=number.name, processes=tuple(named(process) for process in leftovers)))
        for process in leftovers:
            send(process, number)
        if number is not signal.SIGKILL and (stopped := attempt.stopped()):
            # They handle the signal when they continue.
            found(LeftoversFound(name=signal.SIGCONT.name, processes=tuple(named(process) for process in stopped)))
            for process in stopped:
                send(process, signal.SIGCONT)
        await _wait(attempt, leftovers, seconds, working_seconds)
    if remaining := attempt.processes():
        found(LeftoversFound(name=None, processes=tuple(named(process) for process in remaining)))


async def _wait(attempt: RunningAttempt, processes: list[ProcessId], seconds: float, working_seconds: float = 0.0) -> None:
    """Wait until they have ended, at most `seconds`.

    These begin again whenever one of them works, until `working_seconds` are over.
    """
    begun = time.monotonic()
    deadline = begun + seconds
    while (now := time.monotonic()) < deadline and (living := [process for process in processes if alive(process)]):
        if now < begun + working_seconds and any(is_working(process.pid) for process in living):
            deadline = max(deadline, min(now + seconds, begun + working_seconds))
        await asyncio.sleep(0.05)
        attempt.note_reaped(reap_children())


_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make orphans among our descendants our children instead of init's, so that we can reap
    them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_children() -> dict[int, int]:
    """Reap every child that has ended: {pid: exit status, negative for a signal}."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


COMMAND = "command.json"
# As in shim.py.
ANSWERS = "answers"
"""The pipe that is the standard input of a program that asks something before it ends."""
# As in shim.py, which imports nothing of memtop. A process or exit file needs less than this.
_RESERVED, _RESERVED_BYTES = ".reserved", 512


def _system() -> str:
    """Empty if it does not name itself."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""  # a small container has no such file


class LaunchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`attempts/NNNN/command.json`: the command that was started."""

    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    """Additions to the supervisor's own environment."""
    system: str = ""
    """The operating system, as it names itself."""
    answers: bool = False
    """Whether its standard input is a pipe into which answers can be written; otherwise it is
    empty."""


class Invocation(msgspec.Struct, frozen=True, kw_only=True):
    """The user's own program, as it is started: with changes, if a restart has asked for any."""

    command: tuple[str, ...]
    files: dict[str, str] = {}
    """New files in the attempt's folder, by name."""
    environment: dict[str, str] = {}


def launch(
    folder: RunFolder,
    number: int,
    spec: RunSpec,
    settings: Settings | None,
    socket: Path,
    *,
    allocator: str = "",
    given: Invocation | None = None,
    answers: bool = False,
) -> int:
    """Start attempt `number` with its own shim, a child of this process. Returns the shim's pid.

    `allocator`: allocator options for an external command. Those of the built-in trainer are in its
    settings. `given`: what is changed in the user's own program.
    `answers`: the program asks something on its terminal before it ends.
    """
    given = given or Invocation(command=spec.command)
    if settings is not None:
        require_python(folder, settings)
    attempt = folder.attempt(number)
    try:
        attempt.mkdir(mode=0o755)
        for name in ("process.json", "exit.json"):
            _reserve(attempt / f"{name}{_RESERVED}")
        # The next supervisor finds the attempt by its folder, also after a power cut.
        sync_folder(attempt.parent)
    except OSError as error:
        hint = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise RunFolderError(f"{attempt}: cannot be created: {error.strerror}{hint}") from None
    if settings is not None:
        write_json(attempt / "settings.json", settings)
    for name, text in given.files.items():
        _write(attempt / name, text)
    write_json(
        attempt / COMMAND,
        LaunchCommand(
            argv=_argv(folder, attempt, given.command, settings),
            cwd=spec.cwd,
            environment=program_environment(folder, number, spec, settings, socket, allocator=allocator) | given.environment,
            system=_system(),
            answers=answers,
        ),
    )
    try:
        with folder.open_supervisor_log() as log:
            shim = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SHIM), str(attempt), folder.id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise RunFolderError(f"attempt {number} cannot be started: {error}") from None
    # The supervisor waits for the shim with a pidfd and os.waitpid, so Popen must not reap it in
    # its finaliser.
    shim.returncode = 0
    return shim.pid


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror}; free some space") from None


def require_python(folder: RunFolder, settings: Settings) -> None:
    """UsageError if the interpreter of this run is gone."""
    if settings.python and (why := why_gone(settings.python)) is not None:
        advice = f"`memtop restart {folder.name} --set python=PATH` trains with another"
        raise UsageError(f"the Python of this run, {settings.python}: {why}; {advice}")


def _reserve(path: Path) -> None:
    """Take the space now for a file that the shim must be able to write on a full disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            file.write(bytes(_RESERVED_BYTES))  # this file system reserves no space


def has_program(folder: RunFolder, number: int) -> bool:
    """Whether the program of this attempt was started, or is about to be: its shim has written so,
    or is alive.

    A supervisor may be killed between writing `command.json` and starting the shim.
    """
    attempt = folder.attempt(number)
    written = (attempt / "process.json", attempt / "exit.json")
    if any(path.exists() for path in written) or _living_shim(folder, number) or marked(folder, number):
        return True
    # The shim may have written it and ended since the first look.
    return any(path.exists() for path in written)


def _living_shim(folder: RunFolder, number: int) -> ProcessId | None:
    wanted = [os.fsencode(SHIM), os.fsencode(folder.attempt(number)), folder.id.encode()]
    for pid in all_pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-4:-1] == wanted:
                return identify(pid)
    return None


def _argv(folder: RunFolder, attempt: Path, command: tuple[str, ...], settings: Settings | None) -> tuple[str, ...]:
    if settings is None:
        return with_agent_in_front(command)
    trainer = (
        "-m",
        "memtop.train",
        "--settings",
        str(attempt / "settings.json"),
        "--state-dir",
        str(folder.latest_state),
    )
    return (settings.python or sys.executable, *launcher(settings), *trainer)


def launcher(settings: Settings) -> tuple[str, ...]:
    """The launcher module and its arguments, for this strategy and number of processes.

    It is torchrun also under ZeRO: `accelerate launch` reads the user's own configuration file,
    which may name other GPUs or DeepSpeed settings.
    """
    if settings.world_size == 1 and not settings.zero.stage:
        return ()
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.world_size))
