"""Which of a program's processes this one is: torch.distributed knows it best, else the launcher's variables tell.

Appends reports to a file from a thread of its own. A step pays for one deque append.

A journal has one writer: it holds a lock on its file as long as it lives, and another process that believes to be the same rank
takes the next free number.
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
import sys
import threading
import time
from typing import Any, Iterator, Mapping, NamedTuple

# Rank, rank on this machine, number of processes. mpirun inside a Slurm job leaves Slurm's own variables, which are then the
# same in all of its processes: they come last.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("PMIX_RANK", "", ""),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)


class Place(NamedTuple):
    """The rank, the rank on this machine (None where nothing tells it), and how many processes there are at least."""

    rank: int
    local_rank: int | None
    world_size: int


def launcher_variables() -> dict[str, str]:
    """What the environment says at this moment of the place of this process."""
    names = {name for row in _LAUNCHERS for name in row if name}
    return {name: os.environ[name] for name in names if name in os.environ}


def find_place(at_start: Mapping[str, str]) -> Place:
    """The place of this process, as far as it is known now. `at_start`: what the launcher had said when the process began; the
    program may have set or cleared these variables since."""
    said = dict(at_start, **launcher_variables())
    place = next((place for row in _LAUNCHERS for place in _of_row(said, *row)), None)
    group = _group()
    if group is not None and (place is None or place.rank != group[0]):
        # Started by the program itself (torch.multiprocessing): the launcher speaks of its parent.
        local = _number(said, "LOCAL_RANK") if place is None else None
        place = Place(group[0], 0 if group[1] == 1 else local, group[1])
    return place or Place(0, 0, 1)


def _of_row(said: Mapping[str, str], *names: str) -> list[Place]:
    """The place that one launcher's variables tell; none where they are not there."""
    rank, local, size = (_number(said, name) for name in names)
    # What is started within a job of one Slurm task inherits that it is the first.
    if rank is None or (names[0] == "SLURM_PROCID" and (size or 1) < 2):
        return []
    size = max(size or 1, rank + 1)
    return [Place(rank, 0 if local is None and size == 1 else local, size)]


def _group() -> tuple[int, int] | None:
    """Rank and size by torch's default process group, if this process is in one."""
    distributed: Any = sys.modules.get("torch.distributed")
    # A group that breaks just now must not take the report along: the launcher's word is good, too.
    with contextlib.suppress(Exception):
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
    return None


def _number(said: Mapping[str, str], name: str) -> int | None:
    text = said.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


CAPACITY = 4096
"""Reports kept while the file cannot be written; beyond that the oldest are dropped and counted."""
PERIOD_SECONDS = 0.05
MOST_GUESTS = 1000
"""Processes beyond the ranks whose reports are written: a program that starts more of them is no training."""


class Journal:
    """A bounded queue in front of an append-only file of JSON lines."""

    def __init__(self, folder: str, rank: int = 0, world_size: int = 1, capacity: int = CAPACITY) -> None:
        """For `rank-R.jsonl` in `folder`, or the first free number from `world_size` on if a living process writes that one."""
        self.number = rank
        """The number in the file's name."""
        self.dropped = 0
        self._folder = folder
        self._numbers = (rank, world_size)
        self._queue: collections.deque[dict[str, Any]] = collections.deque()
        self._capacity = capacity
        self._sequence = 0
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._running = False
        atexit.register(self.flush)

    def claim(self) -> bool:
        """Open the file and lock it, which settles the number. False where it cannot be opened now: writing tries it again."""
        rank, world_size = self._numbers
        try:
            for number in itertools.chain((rank,), range(world_size, world_size + MOST_GUESTS)):
                path = os.path.join(self._folder, "rank-%d.jsonl" % number)
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                if _locked(descriptor):
                    self.number, self._descriptor = number, descriptor
                    return True
                os.close(descriptor)
        except OSError:
            return False
        return False

    def start(self) -> None:
        """Begin to write. Where no thread can be had now, the queue waits for the next call, or for the end."""
        if not self._running:
            try:
                threading.Thread(target=self._run, name="memtop-journal", daemon=True).start()
            except RuntimeError:
                return
            self._running = True

    def put(self, report: dict[str, Any]) -> None:
        """Queue one report; stamped with time (seconds since the epoch) and a sequence number."""
        self._sequence += 1
        report["time"] = time.time()
        report["seq"] = self._sequence
        self._queue.append(report)
        if len(self._queue) > self._capacity:
            self._queue.popleft()
            self.dropped += 1

    def flush(self) -> None:
        """Write all that is queued now. What cannot be written stays queued."""
        if os.getpid() != self._pid:
            # A forked child: the queue is its parent's, and the lock may have been held at that moment, for ever.
            return
        with self._lock:
            while self._queue:
                report = self._queue.popleft()
                line = _encode(report)
                if line is None:
                    # Nothing that JSON could hold; the reports after it must not wait for ever.
                    self.dropped += 1
                elif not self._write(line):
                    self._queue.appendleft(report)
                    return

    def _write(self, line: bytes) -> bool:
        try:
            if self._descriptor is None and not self.claim():
                return False
            assert self._descriptor is not None
            written = os.write(self._descriptor, line)
            if written == len(line):
                return True
            # A full disk cut the line: end it, so that the reader passes it over, and write it again later.
            os.write(self._descriptor, b"\n")
        except OSError:
            return False
        return False

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_SECONDS)
            if self._queue:
                self.flush()


def _locked(descriptor: int) -> bool:
    """Whether this process alone may write the file. The lock ends with the process, and forked children do not inherit it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: then nothing better is known than the rank.
        return True
    return True


def _encode(report: dict[str, Any]) -> bytes | None:
    """One line of JSON, or None where that cannot be. JSON knows no NaN: such numbers are null and named in `not_finite`."""
    try:
        try:
            text = json.dumps(report, allow_nan=False, default=str)
        except ValueError:
            names = [name for key, value in report.items() for name in _not_finite(value, str(key))]
            text = json.dumps(dict(_finite(report), not_finite=names), allow_nan=False, default=str)
        return (text + "\n").encode()
    except Exception:  # noqa: BLE001 - values of a program of any kind: what their str() raises is not for us to know
        return None


def _not_finite(value: Any, name: str) -> Iterator[str]:
    """The names of all numbers in `value` that JSON does not know, e.g. "loss", "parts.head", "scales.2"."""
    if isinstance(value, float) and not math.isfinite(value):
        yield name
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_finite(inner, "%s.%s" % (name, key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _not_finite(inner, "%s.%d" % (name, number))


def _finite(value: Any) -> Any:
    """The same value with None for each of them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
