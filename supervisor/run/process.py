"""Processes as (pid, start time): looked at through /proc, signalled only through a pidfd."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36


class ProcessRef(msgspec.Struct, frozen=True):
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started_ticks: int
    """Start time in clock ticks since boot."""

    def alive(self) -> bool:
        """True while the process exists and is no zombie."""
        found = _stat(self.pid)
        return found is not None and found == (self.started_ticks, False)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process is gone. The pidfd closes the gap between the look and the signal."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def process_ref(pid: int) -> ProcessRef | None:
    """The process that has this pid now; None if there is none or it is a zombie."""
    found = _stat(pid)
    return None if found is None or found[1] else ProcessRef(pid, found[0])


def marked_processes(run_folder: Path, attempt: int | None = None) -> list[ProcessRef]:
    """All living processes that were started for this run (and attempt), whatever their parent or session.

    The proof is MEMTOP_RUN in their environment; processes whose environment we may not read are not ours.
    """
    wanted = [b"MEMTOP_RUN=" + os.fsencode(run_folder)]
    if attempt is not None:
        wanted.append(b"MEMTOP_ATTEMPT=%d" % attempt)
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            environment = (entry / "environ").read_bytes().split(b"\0")
            if all(word in environment for word in wanted) and (ref := process_ref(int(entry.name))):
                found.append(ref)
    return found


def resident_bytes(processes: Iterable[ProcessRef]) -> int | None:
    """Resident bytes of these processes together, shared pages counted in each; None if none could be read."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = None
    for process in processes:
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages = int((_PROC / str(process.pid) / "statm").read_text().split()[1])
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
            ended[pid] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return ended


def wait_for_exit(process: ProcessRef, seconds: float) -> bool:
    """Wait until the process has ended, at most so long; True if it has."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return True
    try:
        return not process.alive() or bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def _stat(pid: int) -> tuple[int, bool] | None:
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[19]), fields[0] in (b"Z", b"X")


class TreeProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a tree that `memtop watch --pid` follows."""

    pid: int
    parent_pid: int
    name: str
    command: str
    rss_bytes: int | None


def process_tree(pid: int) -> list[TreeProcess] | None:
    """The process and all its living descendants, itself first; None if there is no such process."""
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    found = []
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess), member.oneshot():
            name = member.name()
            try:
                command, rss = " ".join(member.cmdline()) or name, member.memory_info().rss
            except psutil.AccessDenied:
                command, rss = name, None
            found.append(TreeProcess(pid=member.pid, parent_pid=member.ppid(), name=name, command=command, rss_bytes=rss))
    return found or None
