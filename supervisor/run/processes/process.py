"""What the supervisor needs in addition to `monitor.processes`: members of an attempt, its recorded
ranks, orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.monitor.processes.proc import ProcessId, identify, is_alive
from memtop.supervisor.monitor.processes.signals import ProcessGone, SignalRefused, signal_process
from memtop.supervisor.monitor.processes.table import run_processes
from memtop.supervisor.run.record.folder import read_json, write_json

RANKS_FILE = "ranks.json"
_PR_SET_CHILD_SUBREAPER = 36
_RANKS_KEPT = 1024


class RanksFile(msgspec.Struct, frozen=True):
    """`ranks.json` of an attempt: the processes that have reported as ranks.

    It proves that a leftover rank belongs to the run if its environment cannot. Programs that write
    a title overwrite their environment.
    """

    processes: tuple[ProcessId, ...] = ()


def alive(process: ProcessId | None) -> bool:
    """True while this process runs. A zombie has ended."""
    return process is not None and is_alive(process)


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Signal this process. False if it has ended or if its pid now belongs to another process."""
    try:
        signal_process(process, number)
    except (ProcessGone, SignalRefused):
        return False
    return True


def members(run_folder: Path, attempt: int) -> list[ProcessId]:
    """All living processes of an attempt, whatever their parent or session.

    Their environment proves it.
    """
    return run_processes(str(run_folder), attempt)


def record_rank(attempt_folder: Path, pid: int) -> None:
    """Record a rank that has just connected.

    `pid` is the peer of its socket, in our pid namespace.
    """
    process = identify(pid) if pid > 1 else None  # 0: the process is outside our pid namespace
    if process is None:
        return
    path = attempt_folder / RANKS_FILE
    try:
        known = read_json(path, RanksFile).processes if path.exists() else ()
    except RunFolderError:
        known = ()  # damaged: earlier ranks are lost
    if process in known:
        return
    with contextlib.suppress(RunFolderError):
        # A full disk loses the proof for one process, but does not affect the run. The next
        # connection of the rank tries again.
        write_json(path, RanksFile((*known, process)[-_RANKS_KEPT:]))


def resident_bytes(processes: Iterable[ProcessId]) -> int | None:
    """Resident bytes of these processes together, with shared pages counted in each.

    None if none could be read.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = None
    for process in processes:
        with contextlib.suppress(OSError, IndexError):
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            total = (total or 0) + pages * page
    return total


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
