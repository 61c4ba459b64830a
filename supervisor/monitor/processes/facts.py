"""Who the processes on the GPUs are: owner, command, run, container; what may not be known, with the reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from memtop.supervisor.monitor.processes.containers import VARIABLES as CONTAINER_VARIABLES
from memtop.supervisor.monitor.processes.containers import container_of
from memtop.supervisor.monitor.processes.members import number
from memtop.supervisor.monitor.processes.proc import (
    ATTEMPT_VARIABLE,
    PROC,
    RUN_VARIABLE,
    TICKS_PER_SECOND,
    TRUST_VARIABLE,
    ProcessId,
    Row,
    boot_time,
    command_words,
    environment,
    holds_gpu,
    in_host_pid_namespace,
    owners_of,
    read_row,
    readable,
    sees_all_pids,
)
from memtop.supervisor.monitor.processes.signals import (
    user_name,
)

JOB_VARIABLES = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_PTY_PORT")
_WANTED = frozenset((RUN_VARIABLE, ATTEMPT_VARIABLE, *JOB_VARIABLES, *CONTAINER_VARIABLES))
_WHO = ("user", "name", "command")
_COMM_LETTERS = 15


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one process. `identity` is None where the pid cannot be taken for a living process that we see."""

    pid: int
    identity: ProcessId | None = None
    uid: int | None = None
    """The real user: who started it."""
    effective_uid: int | None = None
    """Whose rights it acts with; None: the same."""
    user: str | None = None
    name: str | None = None
    command: str | None = None
    words: tuple[str, ...] = ()
    """The command line, word by word."""
    started: float | None = None
    """Seconds since the epoch."""
    parent_pid: int | None = None
    session: int | None = None
    session_led: bool = False
    """The leader of its session lives, or whoever has its number: then it is no orphan."""
    kernel: bool = False
    run_folder: str | None = None
    attempt: int | None = None
    run_elsewhere: bool = False
    """The run's folder lies in another file system than ours of that name: the run is a container's, not one of ours."""
    marks: dict[str, str] = {}
    """What tells jobs, ranks and containers of its environment."""
    container: str | None = None
    zombie: bool = False
    gone: bool = False
    """Proven: no such process lives on this machine, at two looks in a row. A zombie does not live."""
    unknown: dict[str, str] = {}


class ProcessDescriber:
    """Describes the driver's pids, remembering by identity. `holds` answers whether a process has these GPUs open.

    The driver counts pids in the machine's own namespace. In a container the same number may be an unrelated program,
    so a pid is taken for a local process only where that process is seen to hold the very GPUs that it is listed on.
    """

    def __init__(
        self,
        *,
        holds: Callable[[int, frozenset[int]], bool | None] = holds_gpu,
        same_namespace: Callable[[], bool] = in_host_pid_namespace,
        sees_all: Callable[[], bool] = sees_all_pids,
        proc_root: Path = PROC,
    ) -> None:
        self._holds = holds
        self._proc_root = proc_root
        self._trusted = os.environ.get(TRUST_VARIABLE) == "1" or same_namespace()
        self._sees_all = sees_all()
        self._known: dict[int, tuple[object, ProcessFacts]] = {}
        self._missing: set[int] = set()

    def describe(self, pid: int, row: Row | None = None, minors: frozenset[int] = frozenset()) -> ProcessFacts:
        """Everything known of a pid that the driver reported; from memory where it is the same process as before, with
        the same program and owner. `row` saves reading it again; `minors` are the numbers N of the /dev/nvidiaN that the
        driver lists it on, as far as they are known."""
        row = row or read_row(pid, self._proc_root)
        if row is None:
            return self._nobody(pid)
        if not row.is_dead:
            self._missing.discard(pid)
        stamp = row.guise, row.is_dead, row.parent_pid, minors
        known = self._known.get(pid)
        if known is not None and known[0] == stamp:
            return known[1]
        facts = self._facts(row, minors)
        if facts.identity is not None:
            self._known[pid] = stamp, facts
        return facts

    def keep(self, pids: set[int]) -> None:
        """Forget everything but these."""
        self._known = {pid: known for pid, known in self._known.items() if pid in pids}
        self._missing &= pids

    def _facts(self, row: Row, minors: frozenset[int]) -> ProcessFacts:
        pid = row.identity.pid
        if not self._trusted and not self._holds(pid, minors):
            reason = (
                f"the driver's process {pid} is not visible from this container: "
                "the local process of that number does not hold the GPU"
            )
            return ProcessFacts(pid=pid, unknown=dict.fromkeys(_WHO, reason))
        if not row.is_dead:
            return describe_process(row.identity, self._proc_root)
        ended = row.threads <= 1
        gone = ended and pid in self._missing
        if ended:
            self._missing.add(pid)
        return _zombie(row, self._proc_root, gone)

    def _nobody(self, pid: int) -> ProcessFacts:
        """No such process is to be seen. That it is gone is said at the second look: the driver takes a moment to notice."""
        proven = self._trusted and self._sees_all
        gone = proven and pid in self._missing
        self._missing.add(pid)
        self._known.pop(pid, None)
        return _nobody(pid, self._trusted, proven, gone)


def _nobody(pid: int, trusted: bool, proven: bool, gone: bool) -> ProcessFacts:
    if not trusted:
        reason = f"process {pid} is not visible from this container"
    elif gone:
        reason = f"process {pid} has ended"
    elif proven:
        reason = f"process {pid} has just ended"
    else:
        reason = f"process {pid} is not to be seen: it has just ended, or this machine hides other users' processes"
    return ProcessFacts(pid=pid, gone=gone, unknown=dict.fromkeys(_WHO, reason))


def _zombie(row: Row, proc_root: Path, gone: bool) -> ProcessFacts:
    """An ended process that is still in the table: without command line, environment or a use for signals."""
    pid = row.identity.pid
    if row.threads > 1:
        reason = f"the main thread of process {pid} has ended, {row.threads - 1} of its threads are still ending"
    else:
        parent = read_row(row.parent_pid, proc_root)
        who = f"{row.parent_pid} ({parent.comm})" if parent is not None else str(row.parent_pid)
        reason = f"process {pid} has ended (zombie), but its parent {who} has not collected it: end or restart the parent"
    uid = (owners_of(pid, proc_root) or (row.file_uid,))[0]
    return ProcessFacts(
        pid=pid,
        uid=uid,
        user=user_name(uid),
        name=row.comm,
        parent_pid=row.parent_pid,
        session=row.session,
        started=boot_time() + row.identity.started_ticks / TICKS_PER_SECOND,
        zombie=True,
        gone=gone,
        unknown={"command": reason, "started_ticks": reason},
    )


def describe_process(identity: ProcessId, proc_root: Path = PROC) -> ProcessFacts:
    """Owner, name, command, start and run of a living process; what may not be read is None with the reason."""
    pid = identity.pid
    owners, words, marks = owners_of(pid, proc_root), command_words(pid, proc_root), environment(pid, proc_root)
    row = read_row(pid, proc_root)
    if row is None or row.identity != identity or row.is_dead:
        return _nobody(pid, trusted=True, proven=False, gone=False)
    if owners is None:
        unknown = dict.fromkeys(_WHO, "this user may not look at the process")
        return ProcessFacts(pid=pid, identity=identity, parent_pid=row.parent_pid, session=row.session, unknown=unknown)
    unknown = {}
    kernel = pid == 2 or row.parent_pid == 2
    if not words:
        unknown["command"] = "a kernel thread" if kernel else "the process shows no command line"
    if marks is None:
        unknown["run"] = "the environment of the process may not be read"
    kept = {name: readable(value) for name, value in (marks or {}).items() if name in _WANTED and value}
    folder = (marks or {}).get(RUN_VARIABLE) or None
    return ProcessFacts(
        pid=pid,
        identity=identity,
        uid=owners.real,
        effective_uid=owners.effective,
        user=user_name(owners.real),
        name=full_name(row.comm, words or ()),
        command=" ".join(words or ()) or None,
        words=words or (),
        started=boot_time() + identity.started_ticks / TICKS_PER_SECOND,
        parent_pid=row.parent_pid,
        session=row.session,
        kernel=kernel,
        run_folder=folder,
        attempt=number(kept.get(ATTEMPT_VARIABLE)),
        run_elsewhere=folder is not None and _is_elsewhere(pid, folder, proc_root),
        marks=kept,
        container=_container(pid, kept, proc_root, unknown),
        unknown=unknown,
    )


def full_name(comm: str, words: tuple[str, ...]) -> str:
    """The program's name; the kernel keeps 15 letters of it, the command line has the rest."""
    first = words[0].rpartition("/")[2] if words else ""
    return first if len(comm) == _COMM_LETTERS and first.startswith(comm) else comm


def _is_elsewhere(pid: int, folder: str, proc_root: Path) -> bool:
    """Whether the process means another folder by this path than we do. True also where that cannot be told."""
    try:
        if (proc_root / f"{pid}/ns/mnt").readlink() == (proc_root / "self/ns/mnt").readlink():
            return False
        theirs, ours = os.stat(f"{proc_root}/{pid}/root{folder}"), os.stat(folder)  # noqa: PTH116
    except OSError:
        return True
    return (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino)


def _container(pid: int, marks: Mapping[str, str], proc_root: Path, unknown: dict[str, str]) -> str | None:
    try:
        text = (proc_root / str(pid) / "cgroup").read_text(errors="replace")
    except OSError as error:
        unknown["container"] = f"its control group cannot be read: {error.strerror}"
        return None
    return container_of(text, marks, os.uname().nodename)
