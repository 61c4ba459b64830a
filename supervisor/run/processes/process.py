"""What the supervisor needs of processes beyond `monitor.processes`: members of an attempt, orphans, trees."""

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
    """`ranks.json` of an attempt: who has spoken as a rank, so that one that is left over can be proven to be of this run
    although it shows no environment (programs that write their own title write over it)."""

    processes: tuple[ProcessId, ...] = ()


def alive(process: ProcessId | None) -> bool:
    """True while this very process runs; a zombie has ended."""
    return process is not None and is_alive(process)


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Signal this very process; False if it is gone or the pid belongs to another one now."""
    try:
        signal_process(process, number)
    except (ProcessGone, SignalRefused):
        return False
    return True


def members(run_folder: Path, attempt: int) -> list[ProcessId]:
    """All living processes of an attempt, whatever their parent or session: proven by the marks in their environment."""
    return run_processes(str(run_folder), attempt)


def record_rank(attempt_folder: Path, pid: int) -> None:
    """Write down a rank that has just spoken; `pid` as the kernel told it of the other end, in our own numbers."""
    process = identify(pid) if pid > 1 else None  # 0: it lies outside of what we see
    if process is None:
        return
    path = attempt_folder / RANKS_FILE
    try:
        known = read_json(path, RanksFile).processes if path.exists() else ()
    except RunFolderError:
        known = ()  # damaged: what it said is lost, what is said now is not
    if process in known:
        return
    with contextlib.suppress(RunFolderError):
        # A full disk costs the proof for one process, not the run; it is tried again when the rank comes back.
        write_json(path, RanksFile((*known, process)[-_RANKS_KEPT:]))


def resident_bytes(processes: Iterable[ProcessId]) -> int | None:
    """Resident bytes of these processes together, shared pages counted in each; None if none could be read."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = None
    for process in processes:
        with contextlib.suppress(OSError, IndexError):
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            total = (total or 0) + pages * page
    return total


def become_subreaper() -> None:
    """Orphans among our descendants become our children instead of init's, so that we see and reap them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_children() -> dict[int, int]:
    """Collect every child that has ended: {pid: exit status, negative for a signal}."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended
