"""The client of the control socket, for dashboards (asyncio) and for the command line
(blocking)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from memtop.presets.decoding import decoder_of
from memtop.supervisor.errors import MemtopError, NotRunningError, RefusedError, RunFolderError, UsageError
from memtop.supervisor.monitor.processes.proc import is_stopped
from memtop.supervisor.monitor.processes.signals import user_name
from memtop.supervisor.run.processes.members import living_supervisor, original_of, refused_copy
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ownership import require_own
from memtop.supervisor.run.server import peer_of
from memtop.supervisor.run.view import read_state
from memtop.supervisor.wire import Answer, Message, Outcome, Request, Status

STATUS = msgspec.json.encode(Status(id=0)) + b"\n"
_LINE_LIMIT = 64 << 20
_ANSWER_LIMIT = 1 << 20
_TOO_LONG = "a line of more than {} MiB"
ANSWER_SECONDS = 30.0
"""A supervisor that has left questions unanswered for so long is given up."""
LOOK_SECONDS = 2.0
"""How often a command looks at a supervisor that says nothing."""
_RETRY_SECONDS = 0.05


def socket_path(run_folder: Path) -> Path:
    """The path of the run's socket, in a folder that only this user can enter.

    It is short whatever the run folder's path (the kernel allows 107 bytes). It is always the same
    for a run, so that agents find the next supervisor.
    """
    base = os.environ.get("MEMTOP_SOCKET_DIR")
    parent = Path(base) if base else Path("/tmp") / f"memtop-{os.getuid()}"
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        found = parent.lstat()
    except OSError as error:
        raise RunFolderError(f"{parent}: cannot be created: {error.strerror}; set MEMTOP_SOCKET_DIR") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        # In /tmp only its owner can remove it.
        what = f"belongs to {user_name(found.st_uid)}" if found.st_uid != os.getuid() else "is not a folder"
        raise RunFolderError(
            f"{parent}: {what}, and must be your own folder: `export MEMTOP_SOCKET_DIR=$HOME/.memtop-sockets` "
            "in each terminal that uses the run; memtop creates that folder"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise RunFolderError(f"{parent}: must be closed to others: `chmod 700 {parent}`")
    import hashlib  # loads OpenSSL: 4 MiB

    digest = hashlib.sha256(os.fsencode(run_folder.resolve()) + b"\0" + RunFolder(run_folder).id.encode()).hexdigest()[:20]
    path = parent / f"{digest}.sock"
    if len(os.fsencode(path)) > 107:
        raise RunFolderError(f"MEMTOP_SOCKET_DIR {parent}: too long for a socket, at most 80 bytes")
    return path


class AsyncRunClient:
    """One connection to a run's supervisor."""

    def __init__(self, folder: RunFolder, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._folder = folder
        self._reader = reader
        self._writer = writer
        self._pid = peer_of(writer.get_extra_info("socket")).pid

    @classmethod
    async def connect(cls, folder: Path) -> AsyncRunClient:
        """Connect. Raises NotRunningError if no supervisor listens."""
        run = RunFolder(folder)
        connection = await asyncio.to_thread(_connected, run)
        connection.setblocking(False)
        return cls(run, *await asyncio.open_unix_connection(sock=connection, limit=_LINE_LIMIT))

    async def send(self, request: Request) -> None:
        self._writer.write(msgspec.json.encode(request) + b"\n")
        await self._writer.drain()

    async def receive(self) -> Message | None:
        """The next message. None when the supervisor has closed the connection.

        RunFolderError if it cannot be read, RefusedError if the supervisor is stopped or hangs.
        """
        silence = Silence(self._folder, self._pid)
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), LOOK_SECONDS)
            except asyncio.TimeoutError:
                silence.check()
                self._writer.write(STATUS)
            except ConnectionError:
                return None
            except ValueError:
                raise _unreadable(self._folder, _TOO_LONG.format(_LINE_LIMIT >> 20)) from None
            else:
                return _decoded(self._folder, line) if line.endswith(b"\n") else None

    async def close(self) -> None:
        self._writer.close()


def ask(
    folder: RunFolder,
    make: Callable[[int], Request],
    *,
    on_accepted: Callable[[Answer], None] = lambda answer: None,
    until: Outcome = Outcome.DONE,
) -> Answer:
    """Send one request and wait for its final answer (or its acceptance).

    Raises RefusedError if it is refused or fails, UsageError if the request is wrong.
    """
    with _connected(folder) as connection:
        for line in _lines(folder, connection, msgspec.json.encode(make(1)) + b"\n"):
            message = _decoded(folder, line)
            if not isinstance(message, Answer):
                continue
            if message.outcome is Outcome.ACCEPTED:
                on_accepted(message)
            if message.outcome is until or message.outcome is Outcome.DONE:
                return message
            if message.outcome in (Outcome.REFUSED, Outcome.FAILED):
                raise UsageError(message.message) if message.usage else RefusedError(message.message)
    raise NotRunningError(f"the supervisor of run {folder.name!r} ended: memtop watch {folder.name} starts a new one")


def _lines(folder: RunFolder, connection: socket.socket, request: bytes) -> Iterator[bytes]:
    """Send the request. Yield the lines that the supervisor sends, until it closes the connection.

    RefusedError if it is stopped or hangs: it answers each `Status`, also while it carries out the
    request.
    """
    if not _sent(connection, request):
        return
    silence = Silence(folder, peer_of(connection).pid)
    rest = b""
    connection.settimeout(LOOK_SECONDS)
    while True:
        try:
            received = connection.recv(1 << 16)
        except TimeoutError:
            silence.check()
            if not _sent(connection, STATUS):
                return
            continue
        except ConnectionError:
            return  # it ended, and had not read all that was sent to it
        if not received:
            return
        silence.heard()
        *lines, rest = (rest + received).split(b"\n")
        if len(rest) > _ANSWER_LIMIT:
            raise _unreadable(folder, _TOO_LONG.format(_ANSWER_LIMIT >> 20))
        yield from lines


def _sent(connection: socket.socket, line: bytes) -> bool:
    """Send a line. False if the supervisor has closed the connection."""
    try:
        connection.sendall(line)
    except ConnectionError:
        return False
    return True


class Silence:
    """How many questions in a row a supervisor has left unanswered.

    The time since its last message proves nothing: a command that was paused (Ctrl-Z) has asked
    nothing meanwhile.
    """

    def __init__(self, folder: RunFolder, pid: int) -> None:
        self._folder = folder
        self._pid = pid
        self._unanswered = 0

    def heard(self) -> None:
        """The supervisor has sent something."""
        self._unanswered = 0

    def check(self) -> None:
        """Call this after LOOK_SECONDS without a message, then send a `Status`.

        RefusedError if the supervisor is stopped, or has left too many questions unanswered.
        """
        refuse_stopped(self._folder, self._pid)
        seconds = self._unanswered * LOOK_SECONDS
        if seconds >= ANSWER_SECONDS:
            raise RefusedError(
                f"run {self._folder.name!r}: its supervisor has not answered for {seconds:.0f} s: "
                f"see {self._folder.supervisor_log}; it may still do what you asked for"
                f"{_runs_on(self._folder)}{_to_end(self._pid)}"
            )
        self._unanswered += 1


def refuse_stopped(folder: RunFolder, pid: int) -> None:
    """RefusedError if the run's supervisor, the process `pid`, is stopped and cannot answer."""
    if pid > 0 and is_stopped(pid):
        raise RefusedError(
            f"run {folder.name!r}: its supervisor is stopped (SIGSTOP or Ctrl-Z) and cannot answer: "
            f"`kill -CONT {pid}` lets it continue{_runs_on(folder)}"
        )


def _runs_on(folder: RunFolder) -> str:
    """What a supervisor that cannot answer leaves running, for the end of a sentence."""
    program = None
    with contextlib.suppress(MemtopError):  # what the caller says is more important
        program = read_state(folder).trainer_pid
    return "" if program is None else f"; its program (pid {program}) runs on"


def _to_end(pid: int) -> str:
    """What to do with a supervisor that hangs; empty if its pid is not known."""
    return f"; if it stays silent, `kill -KILL {pid}`: the next command starts a new supervisor" if pid > 0 else ""


def _sockets(folder: RunFolder) -> Iterator[str]:
    """Where the run's supervisor may listen: the path in state.json, then the path that this
    environment gives."""
    try:
        state = folder.state()
    except RunFolderError:
        state = None
    # The state of a run that was moved aside has the socket of the run that now has its name.
    stored = state.socket if state is not None and state.run.folder == str(folder.path) else None
    if stored:
        yield stored
    computed = str(socket_path(folder.path))
    if computed != stored:
        yield computed


def _connected(folder: RunFolder) -> socket.socket:
    """A connection to the run's supervisor. Raises NotRunningError if none listens.

    RunFolderError if the run, or the process that listens, is not the caller's own. RefusedError if
    that process is stopped.
    """
    require_own(folder.path)
    failure = None
    for path in _sockets(folder):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(folder, connection, path)
            _check_peer(folder, connection, path)
        except OSError as error:
            connection.close()
            failure = failure or error
        except MemtopError:
            connection.close()
            raise
        else:
            return connection
    raise _no_supervisor(folder, failure)


def _connect(folder: RunFolder, connection: socket.socket, path: str) -> None:
    """Connect. RefusedError if a supervisor listens but does not accept connections.

    The kernel keeps about a hundred connections for it, and refuses the next one at once.
    """
    connection.settimeout(ANSWER_SECONDS)
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            connection.connect(path)
        except BlockingIOError:
            refuse_stopped(folder, living_supervisor(folder.state()))
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"run {folder.name!r}: its supervisor has accepted no connection for {ANSWER_SECONDS:.0f} s: "
                    f"see {folder.supervisor_log}{_runs_on(folder)}{_to_end(living_supervisor(folder.state()))}"
                ) from None
            time.sleep(_RETRY_SECONDS)
        else:
            return


def _check_peer(folder: RunFolder, connection: socket.socket, path: str) -> None:
    """RunFolderError if another user listens, RefusedError if that process is stopped."""
    peer = peer_of(connection)
    if peer.uid != os.geteuid():
        raise RunFolderError(
            f"{path}: {user_name(peer.uid)} listens there, not your supervisor of run {folder.name!r}: "
            f"memtop sends it nothing; `memtop show {folder.name}` shows the run"
        )
    refuse_stopped(folder, peer.pid)


def _decoded(folder: RunFolder, line: bytes) -> Message:
    try:
        message: Message = decoder_of(Message).decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(folder, " ".join(str(error).split())) from None
    return message


def _unreadable(folder: RunFolder, why: str) -> RunFolderError:
    return RunFolderError(
        f"run {folder.name!r}: what its supervisor sent cannot be read: {why}; another version of memtop may have started it"
    )


def _no_supervisor(folder: RunFolder, error: OSError | None) -> MemtopError:
    state = folder.state()
    if (copied := original_of(folder, state)) is not None:
        return refused_copy(folder, copied)
    if state is not None and state.run.folder != str(folder.path) and (pid := living_supervisor(state)):
        back = f"`mv -T {shlex.quote(str(folder.path))} {shlex.quote(state.run.folder)}`, then repeat the command"
        if Path(state.run.folder).exists():
            back = f"another run is there now: end that one and move it away; then {back}"
        return RefusedError(
            f"run {folder.name!r}: it was renamed or moved while it ran, and its supervisor (pid {pid}) listens only "
            f"for its old place: {back}{_runs_on(folder)}"
        )
    absent = error is None or isinstance(error, FileNotFoundError | ConnectionRefusedError)
    why = "" if absent else f" ({(error and error.strerror) or error})"
    return NotRunningError(
        f"run {folder.name!r}: it has no supervisor{why}; "
        f"`memtop show {folder.name}` shows how it ended, `memtop restart {folder.name}` starts it again, "
        "from what it has saved if it can"
    )
