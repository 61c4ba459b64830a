"""Reads /proc for one process: identity, stat row, environment, owner.

Also reports which processes we can see.

A pid alone does not identify a process, because the kernel reuses pids. A pid together with the
start time in clock ticks does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

PROC = Path("/proc")
RUN_VARIABLE = "MEMTOP_RUN"
"""Set in every process that a run starts: the absolute path of the run's folder."""
ATTEMPT_VARIABLE = "MEMTOP_ATTEMPT"
"""Set next to it: the number of the attempt."""
RUN_ID_VARIABLE = "MEMTOP_RUN_ID"
"""Set next to them: the id of the run. A run that was renamed and a new one in its place have the
same path, and different ids."""
TRUST_VARIABLE = "MEMTOP_NVML_TRUST_PIDS"
"""If 1, the driver's pids are local pids even if no process has a GPU device open. Used with a
scripted driver."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, fixed in the kernel's sources
_STAT_BYTES = 2048
_COMM_CHARACTERS = 15
_DEAD_STATES = (b"Z", b"X", b"x")
_GPU_DEVICES = ("/dev/nvidia", "/dev/dxg")


class ProcessId(msgspec.Struct, frozen=True, order=True):
    """Identifies a process for good: no other process ever has the same pid and start time.

    `started_ticks` is the start time in clock ticks since boot (field 22 of /proc/PID/stat).
    """

    pid: int
    started_ticks: int


class ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that memtop uses."""

    identity: ProcessId
    comm: str
    """The kernel's name of the process, cut to 15 characters."""
    is_dead: bool
    """The process has ended. It is a zombie if its parent has not collected it."""
    parent_pid: int
    session: int
    threads: int
    cpu_ticks: int
    """User and system time of all its threads so far."""
    rss_bytes: int
    environment_start: int
    """Address of the environment. It changes with every exec; 0 if this user may not read it."""
    file_uid: int
    """Owner of the files in /proc/PID. It changes when the process changes its user."""

    @property
    def guise(self) -> tuple[ProcessId, str, int, int]:
        """While this value stays the same, so do the command line, the environment and the
        owner."""
        return self.identity, self.comm, self.environment_start, self.file_uid


def read_stat(pid: int, proc_root: Path | str = PROC) -> ProcessStat | None:
    """Read /proc/PID/stat, which takes about 10 µs.

    None if the process has ended or is hidden from this user (hidepid).
    """
    try:
        descriptor = os.open(f"{proc_root}/{pid}/stat", os.O_RDONLY)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    try:
        raw = os.read(descriptor, _STAT_BYTES)
        owner = os.fstat(descriptor).st_uid
    except ProcessLookupError:
        return None  # it ended between opening and reading
    finally:
        os.close(descriptor)
    # The name in brackets may itself contain spaces and brackets: cut after the last bracket.
    end = raw.rindex(b")")
    fields = raw[end + 2 :].split()
    return ProcessStat(
        ProcessId(pid, int(fields[19])),
        # shown and sent as text, so it must be valid text
        raw[raw.index(b"(") + 1 : end].decode(errors="replace"),
        fields[0] in _DEAD_STATES,
        int(fields[1]),
        int(fields[3]),
        int(fields[17]),
        int(fields[11]) + int(fields[12]),
        int(fields[21]) * PAGE_BYTES if len(fields) > 21 else 0,
        int(fields[47]) if len(fields) > 47 else 0,
        owner,
    )


def identify(pid: int, proc_root: Path | str = PROC) -> ProcessId | None:
    """The identity of the process that has this pid now. None if there is none."""
    found = read_stat(pid, proc_root)
    return None if found is None else found.identity


def started_ticks(pid: int, proc_root: Path | str = PROC) -> int | None:
    """Start time in clock ticks since boot. None if there is no such process."""
    found = read_stat(pid, proc_root)
    return None if found is None else found.identity.started_ticks


def parent_of(pid: int, proc_root: Path | str = PROC) -> int | None:
    """The parent's pid (0 for the topmost process). None if there is no such process."""
    found = read_stat(pid, proc_root)
    return None if found is None else found.parent_pid


def is_alive(process: ProcessId, proc_root: Path | str = PROC) -> bool:
    """True while this process runs. A zombie does not run: it holds no memory any more."""
    found = read_stat(process.pid, proc_root)
    return found is not None and found.identity == process and not found.is_dead


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process: SIGSTOP, Ctrl-Z."""
    return _state(pid) == b"T"


def is_working(pid: int) -> bool:
    """Whether a thread of the process runs, wants to run, or waits for a disk."""
    try:
        threads = os.listdir(f"{PROC}/{pid}/task")  # noqa: PTH208 - names alone, asked 20 times a second
    except OSError:
        return False
    return any(_state(f"{pid}/task/{thread}") in (b"R", b"D") for thread in threads)


def _state(pid: int | str) -> bytes:
    """The letter in /proc/PID/stat. Empty if there is no such process."""
    try:
        stat = _read_bytes(f"{PROC}/{pid}/stat")
    except OSError:
        return b""
    return stat[stat.rindex(b")") + 2 :][:1]


def own_family(pid: int | None = None, proc_root: Path = PROC) -> frozenset[int]:
    """The pids of this process and all its ancestors up to pid 1. memtop never ends one of
    these."""
    family = {0, 1}
    current = os.getpid() if pid is None else pid
    while current not in family:
        family.add(current)
        current = parent_of(current, proc_root) or 1
    return frozenset(family)


class Owners(NamedTuple):
    """Real and effective user id.

    They differ in setuid programs and in servers that act for other users.
    """

    real: int
    effective: int


def owners_of(pid: int, proc_root: Path = PROC) -> Owners | None:
    """The owners of a process. None if there is no such process or it is hidden from this user."""
    try:
        status = (proc_root / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("Uid:")), None)
    return None if line is None else Owners(*map(int, line.split()[1:3]))


def _read_bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a hot path
        return file.read() or b""


def environment(pid: int, proc_root: Path | str = PROC) -> dict[str, str] | None:
    """The environment that the process was started with.

    None if it cannot be read or the process has ended.
    """
    try:
        raw = _read_bytes(f"{proc_root}/{pid}/environ")
    except OSError:
        return None
    return _pairs(raw)


def _pairs(raw: bytes) -> dict[str, str]:
    pairs = (item.partition("=") for item in os.fsdecode(raw).split("\0"))
    return {key: value for key, sign, value in pairs if sign}


def whole_number(text: str | None) -> int | None:
    """The number in an environment variable.

    None if the text is no decimal number of at most nine digits.
    """
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 10 else None


def readable(text: str) -> str:
    """A path or variable as valid text: bytes that are not valid become a replacement mark."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def environment_of(identity: ProcessId, proc_root: Path = PROC) -> dict[str, str] | str:
    """The environment that this process was started with, or the reason why it is not known."""
    pid = identity.pid
    if identify(pid, proc_root) != identity:
        return f"process {pid} has ended"
    try:
        raw = (proc_root / str(pid) / "environ").read_bytes()
    except PermissionError:
        owners = owners_of(pid, proc_root)
        if owners is not None and owners.real == os.getuid():
            return f"the kernel hides the environment of process {pid}: the process has changed its rights"
        return f"the environment of process {pid} belongs to another user: only that user and root may read it"
    except (FileNotFoundError, ProcessLookupError):
        return f"process {pid} has ended"
    except OSError as error:
        return f"cannot read the environment of process {pid}: {error.strerror}"
    # The pid may have passed to another process between the first check and the read.
    if identify(pid, proc_root) != identity:
        return f"process {pid} has ended"
    return _pairs(raw) or f"process {pid} has no environment: it was started without one, or has overwritten it"


def command_words(pid: int, proc_root: Path | str = PROC) -> tuple[str, ...] | None:
    """The command line, empty for kernel threads.

    None if it cannot be read or the process has ended.
    """
    try:
        text = _read_bytes(f"{proc_root}/{pid}/cmdline").decode(errors="replace")
    except OSError:
        return None
    # Programs that write a title over their command line leave padding behind it.
    words = text.rstrip("\0").split("\0") if "\0" in text.rstrip("\0") or not text else [text.rstrip("\0")]
    return tuple(words) if words != [""] else ()


def full_name(comm: str, words: tuple[str, ...]) -> str:
    """The program's name.

    The kernel keeps 15 characters of it (`comm`); the command line has the rest.
    """
    first = words[0].rpartition("/")[2] if words else ""
    return first if len(comm) == _COMM_CHARACTERS and first.startswith(comm) else comm


def in_host_pid_namespace(proc_root: Path = PROC) -> bool:
    """True if our pids are the machine's pids, so that the driver and memtop mean the same process
    by a pid."""
    try:
        return str((proc_root / "self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def hidepid(proc_root: Path = PROC) -> str | None:
    """How this mount of /proc hides other users' processes (`invisible`, `2`, ...).

    None if it hides none.
    """
    try:
        mounts = (proc_root / "self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = None
    for line in mounts:
        words = line.split()
        # The fifth word is the mount point, the last word holds the file system's options. Later
        # mounts cover earlier ones.
        if len(words) > 6 and words[4] == str(proc_root):
            options = dict(option.partition("=")[::2] for option in words[-1].split(","))
            mode = options.get("hidepid", "0")
            found = None if mode in ("0", "off") else mode
    return found


def sees_all_pids(proc_root: Path = PROC) -> bool:
    """True if we see every process of the machine: we are in its pid namespace, and /proc hides
    none from us."""
    if not in_host_pid_namespace(proc_root):
        return False
    # Process 1 is root's. A user who sees it in spite of hidepid (root, or its group) sees every
    # process.
    first = read_stat(1, proc_root)
    return first is not None and (os.geteuid() == 0 or hidepid(proc_root) is None)


def boot_time() -> float:
    """When the machine was started, in seconds since the epoch, measured with the present clock."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def holds_gpu(pid: int, minors: frozenset[int] = frozenset(), proc_root: Path = PROC) -> bool | None:
    """Whether the process has all these GPUs open (N of /dev/nvidiaN).

    None if this user may not know.

    Without `minors`, any NVIDIA device or a loaded CUDA driver counts.
    """
    folder = proc_root / str(pid)
    devices: set[str] = set()
    looked = False
    try:
        for entry in os.scandir(folder / "fd"):
            looked = True
            devices.add(_device(entry.path))
    except OSError:
        looked = False
    wanted = {f"/dev/nvidia{minor}" for minor in minors}
    if wanted <= devices if wanted else any(device.startswith(_GPU_DEVICES) for device in devices):
        return True
    try:
        with (folder / "maps").open(errors="replace") as maps:
            if wanted:
                devices.update(line.rpartition(" ")[2].strip() for line in maps if "/dev/nvidia" in line)
            elif any("/libcuda.so" in line or "/dev/nvidia" in line for line in maps):
                return True
    except OSError:
        return None
    if wanted and wanted <= devices:
        return True
    return False if looked else None


def has_loaded_torch(pid: int, proc_root: Path = PROC) -> bool:
    """Whether torch's library is loaded. Also False if this user may not know."""
    try:
        with (proc_root / str(pid) / "maps").open("rb") as maps:
            return any(b"/libtorch" in line for line in maps)
    except OSError:
        return False


def _device(link: str) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115 - a hot loop over descriptors
    except OSError:
        return ""  # the descriptor was closed in the meantime
