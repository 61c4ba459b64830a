"""A rank's journal: its reports in a file, written by a thread, so a step costs one deque append.

A journal has one writer, which holds a lock on the file as long as it lives. Another process with
the same rank takes the next free number. The rank is torch.distributed's if the process is in a
group, otherwise the launcher's.

Commands come over a `Link`, which reconnects forever and fails silently.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import fcntl
import itertools
import json
import math
import os
import socket
import struct
import sys
import threading
import time
from typing import Any, Callable, Iterator, Mapping, NamedTuple

# Variables with rank, local rank and world size. Slurm comes last: under mpirun inside a Slurm job,
# its variables are the same in all processes.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("PMIX_RANK", "", ""),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)


class RankPlace(NamedTuple):
    """Rank, rank on this machine (None if not known), and at least how many processes there are."""

    rank: int
    local_rank: int | None
    world_size: int


def launcher_variables() -> dict[str, str]:
    """The launchers' variables in the environment now."""
    names = {name for row in _LAUNCHERS for name in row if name}
    return {name: os.environ[name] for name in names if name in os.environ}


def find_rank(at_start: Mapping[str, str]) -> RankPlace:
    """The place of this process, as far as it is known now.

    `at_start`: the launchers' variables when the process began. The program may have set or cleared
    some since.
    """
    variables = dict(at_start, **launcher_variables())
    place = next((place for row in _LAUNCHERS for place in _of_row(variables, *row)), None)
    group = _group()
    if group is not None and (place is None or place.rank != group[0]):
        # The program started this process itself (torch.multiprocessing), so the variables are its
        # parent's.
        local = _number(variables, "LOCAL_RANK") if place is None else None
        place = RankPlace(group[0], 0 if group[1] == 1 else local, group[1])
    return place or RankPlace(0, 0, 1)


def _of_row(variables: Mapping[str, str], *names: str) -> list[RankPlace]:
    """The place by one launcher's variables; empty if they are not set."""
    rank, local, size = (_number(variables, name) for name in names)
    # Every process in a Slurm job of one task inherits rank 0, so it means nothing.
    if rank is None or (names[0] == "SLURM_PROCID" and (size or 1) < 2):
        return []
    size = max(size or 1, rank + 1)
    return [RankPlace(rank, 0 if local is None and size == 1 else local, size)]


def worker_restarts() -> dict[str, int]:
    """How often torchrun has started this worker again, and how often it may; empty without it.

    Accelerate's launcher is torchrun in this, too.
    """
    names = {"restarts": "TORCHELASTIC_RESTART_COUNT", "max_restarts": "TORCHELASTIC_MAX_RESTARTS"}
    found = {name: _number(os.environ, variable) for name, variable in names.items()}
    return {name: count for name, count in found.items() if count is not None}


def _group() -> tuple[int, int] | None:
    """Rank and size in torch's default process group; None if this process is in none."""
    distributed: Any = sys.modules.get("torch.distributed")
    # A failing group must not prevent the report; the launcher's variables are the fallback.
    with contextlib.suppress(Exception):
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
    return None


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


CAPACITY = 4096
"""Reports kept while the file cannot be written; beyond that the oldest are dropped and counted."""
PERIOD_SECONDS = 0.05
_AT_ONCE = 1 << 16
"""Bytes of lines in one write, about."""
MAX_EXTRA = 1000
"""Journals beyond the ranks; a program with more processes than that is not a training."""


class JournalWriter:
    """A bounded queue in front of an append-only file of JSON lines."""

    def __init__(self, folder: str, rank: int = 0, world_size: int = 1, capacity: int = CAPACITY) -> None:
        """For `rank-R.jsonl`, or the next free number if a living process writes that."""
        self.number = rank
        """The number in the file's name."""
        self.dropped = 0
        self._folder = folder
        self._numbers = (rank, world_size)
        self._queue: collections.deque[dict[str, Any]] = collections.deque()
        self._capacity = capacity
        self._sequence = 0
        self._descriptor: int | None = None
        self._rest = b""
        """The lines to be written next; a full disk cuts one."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._running = False
        atexit.register(self.flush)

    def claim(self) -> bool:
        """Open and lock the file, which fixes the number; False if that fails now.

        False if it cannot be opened now; a write tries again.
        """
        rank, world_size = self._numbers
        try:
            for number in itertools.chain((rank,), range(world_size, world_size + MAX_EXTRA)):
                path = os.path.join(self._folder, "rank-%d.jsonl" % number)
                descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                if _locked(descriptor):
                    self.number, self._descriptor = number, descriptor
                    self._rest = _end_of_line(descriptor) + self._rest
                    return True
                os.close(descriptor)
        except OSError:
            return False
        return False

    def start(self) -> None:
        """Begin to write.

        If no thread can be started now, the queue waits for the next call or the end of the
        process.
        """
        if not self._running:
            try:
                threading.Thread(target=self._run, name="memtop-journal", daemon=True).start()
            except RuntimeError:
                return
            self._running = True

    def put(self, report: dict[str, Any]) -> None:
        """Queue one report, with the time and a sequence number."""
        self._sequence += 1
        report["time"] = time.time()
        report["clock"] = time.monotonic()
        report["seq"] = self._sequence
        self._queue.append(report)
        if len(self._queue) > self._capacity:
            self._queue.popleft()
            self.dropped += 1

    def flush(self) -> None:
        """Write all queued reports. What cannot be written stays queued."""
        if os.getpid() != self._pid:
            # A forked child: the queue belongs to its parent, and the lock may have been held at
            # the fork.
            return
        with self._lock:
            while self._queue or self._rest:
                while self._queue and len(self._rest) < _AT_ONCE:
                    line = _encode(self._queue.popleft())
                    if line is None:
                        # JSON cannot represent it; the reports after it must not wait forever.
                        self.dropped += 1
                    else:
                        self._rest += line
                if not self._write_rest():
                    return

    def _write_rest(self) -> bool:
        """Whether all that was begun is written."""
        try:
            if self._descriptor is None and not self.claim():
                return False
            assert self._descriptor is not None
            self._rest = self._rest[os.write(self._descriptor, self._rest) :] if self._rest else b""
        except OSError:
            return False
        return not self._rest

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_SECONDS)
            if self._queue or self._rest:
                self.flush()


def _end_of_line(descriptor: int) -> bytes:
    """What ends the last line, if the process that wrote it was killed within it."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def _locked(descriptor: int) -> bool:
    """Whether this process has locked the file.

    The lock ends with the process, and forked children do not inherit it.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: trust the rank.
        return True
    return True


def _encode(report: dict[str, Any]) -> bytes | None:
    """One line of JSON; None if that fails.

    JSON has no NaN: such numbers become null and are listed in `not_finite`.
    """
    try:
        try:
            text = json.dumps(report, allow_nan=False, default=_plain)
        except (TypeError, ValueError):
            names = [name for key, value in report.items() for name in _not_finite(value, str(key))]
            text = json.dumps(dict(_finite(report), not_finite=names), allow_nan=False, default=str)
        return (text + "\n").encode()
    except Exception:  # noqa: BLE001 - values of any program may fail in their str()
        return None


def _plain(value: Any) -> Any:
    """The number in a scalar of NumPy or in a tensor of one element on the CPU; else the value as
    text.

    A tensor on a device is not read: that would wait for the device.
    """
    if hasattr(value, "item") and str(getattr(value, "device", "cpu")) == "cpu":
        with contextlib.suppress(Exception):
            found = value.item()
            if isinstance(found, (bool, int, float)):
                return found
    return str(value)


def _not_finite(value: Any, name: str) -> Iterator[str]:
    """The names of the numbers in `value` that JSON lacks: "loss", "parts.head", "scales.2"."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_finite(inner, "%s.%s" % (name, key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _not_finite(inner, "%s.%d" % (name, number))
    elif _finite(value) is None and value is not None:
        yield name


def _finite(value: Any) -> Any:
    """The value with None in place of such numbers, and with text as keys."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if value is not None and not isinstance(value, (bool, int, float, str)):
        value = _plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0
LONGEST_LINE = 1 << 20


class Link:
    """Sends a greeting at each connection; calls `receive` for every message, in its thread.

    It takes commands only from the owner of the attempt's folder: the folder of the socket may be
    removed while the program runs, and another user may make one with its name.
    """

    def __init__(
        self, path: str | None, folder: str, greeting: dict[str, Any], receive: Callable[[dict[str, Any]], None]
    ) -> None:
        self._greeting = greeting
        self._receive = receive
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._path = path
        self._folder = folder
        self._running = False

    def start(self) -> None:
        """Begin to connect. If no thread can be started now, the next call tries again."""
        if self._path and not self._running:
            try:
                threading.Thread(target=self._run, args=(self._path,), name="memtop-link", daemon=True).start()
            except RuntimeError:
                return
            self._running = True

    def send(self, message: dict[str, Any]) -> None:
        """Send if there is a connection.

        The supervisor notices a lost answer, because it sees the connection close.
        """
        with self._lock:
            if self._socket is not None:
                try:
                    self._socket.sendall(json.dumps(message).encode() + b"\n")
                except OSError:
                    self._socket.close()
                    self._socket = None

    def _run(self, path: str) -> None:
        wait = FIRST_WAIT_SECONDS
        while True:
            connection = _connected(path, self._folder)
            if connection is None:
                time.sleep(wait)
                wait = min(wait * 2, LONGEST_WAIT_SECONDS)
                continue
            wait = FIRST_WAIT_SECONDS
            with self._lock:
                self._socket = connection
            self.send(self._greeting)
            self._read(connection)
            with self._lock:
                self._socket = None
            connection.close()

    def _read(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as stream:
                while True:
                    line = stream.readline(LONGEST_LINE)
                    if not line:
                        return
                    message = json.loads(line.decode())
                    if isinstance(message, dict):
                        self._receive(message)
        except (OSError, ValueError, TypeError):
            # Lost or invalid: the next connection starts again.
            return


def _connected(path: str, folder: str) -> socket.socket | None:
    """A connection, or None if no process of the folder's owner listens now."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        connection.connect(path)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.stat(folder).st_uid:
            raise PermissionError(path)
    except OSError:
        # Attempts repeat while the supervisor is away, so an open socket would use up the program's
        # descriptors.
        connection.close()
        return None
    return connection
