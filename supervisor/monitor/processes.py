"""Processes: who they are (identity, owner, command), whether they live, which run they belong to, and signals to them.

A pid alone is not an identity: it is used again. A process is its pid together with its start time in clock ticks.
"""

from __future__ import annotations

import os
import pwd
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from memtop.supervisor.errors import RefusedError

PROC = Path("/proc")
RUN_VARIABLE = "MEMTOP_RUN"
"""In the environment of everything that a run starts: the absolute path of the run's folder."""
ATTEMPT_VARIABLE = "MEMTOP_ATTEMPT"
"""Beside it: the number of the attempt."""
TRUST_VARIABLE = "MEMTOP_NVML_TRUST_PIDS"
"""Set to 1 where the driver's process ids are known to be ours although no GPU device is open: a scripted driver."""

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, fixed in the kernel's sources


class ProcessId(msgspec.Struct, frozen=True, order=True):
    """A process for ever: `started_ticks` is the start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started_ticks: int


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one process. `identity` is None where the pid cannot be taken for a process that we see."""

    pid: int
    identity: ProcessId | None = None
    uid: int | None = None
    user: str | None = None
    name: str | None = None
    command: str | None = None
    started: float | None = None
    """Seconds since the epoch."""
    kernel: bool = False
    run_folder: str | None = None
    attempt: int | None = None
    unknown: dict[str, str] = {}


class RunProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One living process of a run. Bytes; `rss_bytes` counts shared pages in each process that maps them."""

    identity: ProcessId
    parent_pid: int
    name: str
    command: str
    rss_bytes: int | None
    anonymous_bytes: int | None
    """Private to the process: what its death gives back."""
    shared_bytes: int | None
    """Shared memory (data-loader batches in /dev/shm), counted in each process that maps it."""
    attempt: int | None = None


class SignalRefused(RefusedError):
    """A signal was not sent; the text says why."""


class ProcessGone(SignalRefused):
    """There is no such process any more."""


def _stat_fields(pid: int, proc_root: Path) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on (state first), or None where there is no such process."""
    try:
        text = (proc_root / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # ended, or hidden from this user (hidepid)
    # The name in brackets may itself hold spaces and brackets: cut after the last one.
    return text[text.rindex(")") + 2 :].split()


def identify(pid: int, proc_root: Path = PROC) -> ProcessId | None:
    """The identity of the process that has this pid now, or None where there is none."""
    fields = _stat_fields(pid, proc_root)
    return None if fields is None else ProcessId(pid, int(fields[19]))


def started_ticks(pid: int, proc_root: Path = PROC) -> int | None:
    """Start time in clock ticks since boot, or None where there is no such process."""
    found = identify(pid, proc_root)
    return None if found is None else found.started_ticks


def parent_of(pid: int, proc_root: Path = PROC) -> int | None:
    """The parent's pid (0 at the top), or None where there is no such process."""
    fields = _stat_fields(pid, proc_root)
    return None if fields is None else int(fields[1])


def own_family(pid: int | None = None, proc_root: Path = PROC) -> frozenset[int]:
    """This process and all its ancestors up to pid 1: what must never be ended from here."""
    family = {0, 1}
    current = os.getpid() if pid is None else pid
    while current not in family:
        family.add(current)
        current = parent_of(current, proc_root) or 1
    return frozenset(family)


def owner_of(pid: int, proc_root: Path = PROC) -> int | None:
    """The real user id, or None where there is no such process (or it is hidden from this user)."""
    try:
        status = (proc_root / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:")), None)


def is_alive(pid: int, started: int, proc_root: Path = PROC) -> bool:
    """True where this very process (pid and start ticks) still runs. A zombie has ended: it holds nothing any more."""
    fields = _stat_fields(pid, proc_root)
    return fields is not None and int(fields[19]) == started and fields[0] not in "ZXx"


def _environment(pid: int, proc_root: Path) -> dict[str, str] | None:
    """The environment the process was started with, or None where it may not be read or the process is gone."""
    try:
        raw = (proc_root / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (item.partition("=") for item in os.fsdecode(raw).split("\0"))
    return {key: value for key, sign, value in pairs if sign}


def run_marker(pid: int, proc_root: Path = PROC) -> str | None:
    """The run folder that the process was started for, or None where it carries no marker or may not be read."""
    environment = _environment(pid, proc_root)
    return None if environment is None else environment.get(RUN_VARIABLE) or None


def in_host_pid_namespace(proc_root: Path = PROC) -> bool:
    """True where our pids are the machine's pids, so that the driver and we mean the same process by a number."""
    try:
        return str((proc_root / "self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def holds_gpu(pid: int, proc_root: Path = PROC) -> bool | None:
    """Whether the process has an NVIDIA device or the CUDA driver open; None where we may not look."""
    folder = proc_root / str(pid)
    looked = False
    try:
        for entry in os.scandir(folder / "fd"):
            looked = True
            if _is_gpu_device(entry.path):
                return True
    except OSError:
        looked = False
    try:
        with (folder / "maps").open(errors="replace") as maps:
            if any("/libcuda.so" in line or "/dev/nvidia" in line for line in maps):
                return True
    except OSError:
        return None
    return False if looked else None


def _is_gpu_device(link: str) -> bool:
    try:
        return os.readlink(link).startswith(("/dev/nvidia", "/dev/dxg"))  # noqa: PTH115 - a hot loop over descriptors
    except OSError:
        return False  # the descriptor was closed while we looked


class ProcessDescriber:
    """Describes the driver's pids, remembering by identity. `holds` answers whether a process has the GPU open.

    The driver counts pids in the machine's own namespace. In a container the same number may be an unrelated program,
    so a pid is taken for a local process only where that process is seen to hold the GPU.
    """

    def __init__(
        self,
        *,
        holds: Callable[[int], bool | None] = holds_gpu,
        same_namespace: Callable[[], bool] = in_host_pid_namespace,
        proc_root: Path = PROC,
    ) -> None:
        self._holds = holds
        self._proc_root = proc_root
        self._trusted = os.environ.get(TRUST_VARIABLE) == "1" or same_namespace()
        self._known: dict[ProcessId, ProcessFacts] = {}

    def describe(self, pid: int) -> ProcessFacts:
        """Everything known of a pid that the driver reported; from memory where it is the same process as before."""
        found = identify(pid, self._proc_root)
        if found is None:
            return _nobody(pid, self._trusted)
        known = self._known.get(found)
        if known is None:
            known = self._facts(found)
            if known.identity is not None:
                self._known[found] = known
        return known

    def keep(self, pids: set[int]) -> None:
        """Forget everything but these."""
        self._known = {identity: facts for identity, facts in self._known.items() if identity.pid in pids}

    def _facts(self, identity: ProcessId) -> ProcessFacts:
        if not self._trusted and not self._holds(identity.pid):
            reason = (
                f"the driver's process {identity.pid} is not visible from this container: "
                "the local process of that number does not hold the GPU"
            )
            return ProcessFacts(pid=identity.pid, unknown=dict.fromkeys(("user", "name", "command"), reason))
        return describe_process(identity, self._proc_root)


def _nobody(pid: int, trusted: bool) -> ProcessFacts:
    reason = (
        f"process {pid} is not to be seen: it has just ended, or this machine hides other users' processes"
        if trusted
        else f"process {pid} is not visible from this container"
    )
    return ProcessFacts(pid=pid, unknown=dict.fromkeys(("user", "name", "command"), reason))


def describe_process(identity: ProcessId, proc_root: Path = PROC) -> ProcessFacts:
    """Owner, name, command, start and run of a living process; what may not be read is None with the reason."""
    unknown: dict[str, str] = {}
    try:
        process = psutil.Process(identity.pid)
        with process.oneshot():
            uid = process.uids().real
            name = process.name()
            started = process.create_time()
            kernel = identity.pid == 2 or process.ppid() == 2
        words = process.cmdline()
    except psutil.AccessDenied:
        unknown = dict.fromkeys(("user", "name", "command"), "this user may not look at the process")
        return ProcessFacts(pid=identity.pid, identity=identity, unknown=unknown)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return _nobody(identity.pid, trusted=True)
    if not words:
        unknown["command"] = "a kernel thread" if kernel else "the process shows no command line"
    environment = _environment(identity.pid, proc_root)
    if environment is None:
        unknown["run"] = "the environment of the process may not be read"
    marks = environment or {}
    return ProcessFacts(
        pid=identity.pid,
        identity=identity,
        uid=uid,
        user=user_name(uid),
        name=name,
        command=" ".join(words) or None,
        started=started,
        kernel=kernel,
        run_folder=marks.get(RUN_VARIABLE) or None,
        attempt=_number(marks.get(ATTEMPT_VARIABLE)),
        unknown=unknown,
    )


def user_name(uid: int) -> str:
    """The user's name, or the number in words where the machine has no name for it (common in containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def open_process(identity: ProcessId) -> int:
    """A pidfd of this very process; the caller closes it. Raises SignalRefused where that is not possible."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        raise ProcessGone(f"process {identity.pid} has already ended") from None
    except OSError as error:
        raise SignalRefused(f"process {identity.pid}: the kernel gives no safe handle ({error.strerror})") from error
    # From here on the pid cannot be given away unnoticed: the descriptor stays with the process we opened.
    now = started_ticks(identity.pid)
    if now == identity.started_ticks:
        return descriptor
    os.close(descriptor)
    if now is None:
        raise ProcessGone(f"process {identity.pid} has already ended")
    raise SignalRefused(f"process {identity.pid} is not the one that was chosen: the number has been used again")


def send_signal(descriptor: int, pid: int, number: signal.Signals) -> None:
    """Send through a pidfd; the kernel's refusal becomes words."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        raise ProcessGone(f"process {pid} has already ended") from None
    except OSError as error:
        raise SignalRefused(f"process {pid}: the kernel refused {number.name}: {error.strerror}") from error


def signal_process(identity: ProcessId, number: signal.Signals) -> None:
    """Send a signal to this very process and no other. Raises ProcessGone or SignalRefused with the reason."""
    descriptor = open_process(identity)
    try:
        send_signal(descriptor, identity.pid, number)
    finally:
        os.close(descriptor)


def run_processes(run_folder: str, proc_root: Path = PROC) -> list[RunProcess]:
    """All living processes, in order of pid, that were started for this run (and that we may look at)."""
    found = []
    for entry in os.scandir(proc_root):
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        environment = _environment(pid, proc_root)
        if environment is not None and environment.get(RUN_VARIABLE) == run_folder:
            process = _run_process(pid, environment, proc_root)
            if process is not None:
                found.append(process)
    return sorted(found, key=lambda process: process.identity)


def _run_process(pid: int, environment: dict[str, str], proc_root: Path) -> RunProcess | None:
    fields = _stat_fields(pid, proc_root)
    if fields is None or fields[0] in "ZXx":
        return None
    try:
        status = (proc_root / str(pid) / "status").read_text(errors="replace")
        words = (proc_root / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None  # it ended while we looked
    rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return RunProcess(
        identity=ProcessId(pid, int(fields[19])),
        parent_pid=int(fields[1]),
        name=rows.get("Name", ""),
        command=os.fsdecode(words).replace("\0", " ").strip(),
        rss_bytes=_kilobytes(rows.get("VmRSS")),
        anonymous_bytes=_kilobytes(rows.get("RssAnon")),
        shared_bytes=_kilobytes(rows.get("RssShmem")),
        attempt=_number(environment.get(ATTEMPT_VARIABLE)),
    )


def _kilobytes(text: str | None) -> int | None:
    return None if text is None else int(text.split()[0]) * 1024


def tree_rss_bytes(run_folder: str, proc_root: Path = PROC) -> int | None:
    """Resident bytes of a run: private pages of every process plus the largest shared part once, so that data-loader
    batches in shared memory are not counted once per worker. None where no process of it is to be seen."""
    processes = run_processes(run_folder, proc_root)
    if not processes:
        return None
    private = sum((process.rss_bytes or 0) - (process.shared_bytes or 0) for process in processes)
    return private + max(process.shared_bytes or 0 for process in processes)
