"""Reads /proc: identities, stat rows, environments, owners, and how much of the machine is to be seen from here.

A pid alone is not an identity: it is used again. A process is its pid together with its start time in clock ticks.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

PROC = Path("/proc")
RUN_VARIABLE = "MEMTOP_RUN"
"""In the environment of everything that a run starts: the absolute path of the run's folder."""
ATTEMPT_VARIABLE = "MEMTOP_ATTEMPT"
"""Beside it: the number of the attempt."""
TRUST_VARIABLE = "MEMTOP_NVML_TRUST_PIDS"
"""Set to 1 where the driver's process ids are known to be ours although no GPU device is open: a scripted driver."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, fixed in the kernel's sources
_STAT_BYTES = 2048
_DEAD_STATES = frozenset("ZXx")
_GPU_DEVICES = ("/dev/nvidia", "/dev/dxg")


class ProcessId(msgspec.Struct, frozen=True, order=True):
    """A process for ever: `started_ticks` is the start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started_ticks: int


class Row(NamedTuple):
    """What one reading of /proc/PID/stat says. `is_dead`: a zombie, which waits for its parent to collect it."""

    identity: ProcessId
    comm: str
    """The kernel's name of it, cut to 15 letters."""
    is_dead: bool
    parent_pid: int
    session: int
    threads: int
    cpu_ticks: int
    """User and system time of all its threads so far."""
    rss_bytes: int
    environment_start: int
    """Where its environment lies: another address after every exec. 0 where this user may not know."""
    file_uid: int
    """Owner of its files in /proc: changes when the process changes its user."""

    @property
    def guise(self) -> tuple[ProcessId, str, int, int]:
        """As long as this is the same, so are command line, environment and owner."""
        return self.identity, self.comm, self.environment_start, self.file_uid


def read_row(pid: int, proc_root: Path | str = PROC) -> Row | None:
    """One look at a process, about 10 µs; None where there is none or it is hidden from this user (hidepid)."""
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
    # The name in brackets may itself hold spaces and brackets: cut after the last one.
    end = raw.rindex(b")")
    fields = raw[end + 2 :].split()
    return Row(
        ProcessId(pid, int(fields[19])),
        raw[raw.index(b"(") + 1 : end].decode(errors="replace"),  # to be shown and sent: letters only, whatever the bytes are
        fields[0] in (b"Z", b"X", b"x"),
        int(fields[1]),
        int(fields[3]),
        int(fields[17]),
        int(fields[11]) + int(fields[12]),
        int(fields[21]) * PAGE_BYTES if len(fields) > 21 else 0,
        int(fields[47]) if len(fields) > 47 else 0,
        owner,
    )


def stat_fields(pid: int, proc_root: Path = PROC) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on (state first), or None where there is no such process."""
    try:
        text = (proc_root / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # ended, or hidden from this user (hidepid)
    return text[text.rindex(")") + 2 :].split()


def identify(pid: int, proc_root: Path = PROC) -> ProcessId | None:
    """The identity of the process that has this pid now, or None where there is none."""
    fields = stat_fields(pid, proc_root)
    return None if fields is None else ProcessId(pid, int(fields[19]))


def started_ticks(pid: int, proc_root: Path = PROC) -> int | None:
    """Start time in clock ticks since boot, or None where there is no such process."""
    found = identify(pid, proc_root)
    return None if found is None else found.started_ticks


def parent_of(pid: int, proc_root: Path = PROC) -> int | None:
    """The parent's pid (0 at the top), or None where there is no such process."""
    row = read_row(pid, proc_root)
    return None if row is None else row.parent_pid


def own_family(pid: int | None = None, proc_root: Path = PROC) -> frozenset[int]:
    """This process and all its ancestors up to pid 1: what must never be ended from here."""
    family = {0, 1}
    current = os.getpid() if pid is None else pid
    while current not in family:
        family.add(current)
        current = parent_of(current, proc_root) or 1
    return frozenset(family)


class Owners(NamedTuple):
    """Whose process it is, and whose rights it acts with; they differ in setuid programs and in servers that act for others."""

    real: int
    effective: int


def owners_of(pid: int, proc_root: Path = PROC) -> Owners | None:
    """Real and effective user id, or None where there is no such process (or it is hidden from this user)."""
    try:
        status = (proc_root / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("Uid:")), None)
    return None if line is None else Owners(*map(int, line.split()[1:3]))


def is_alive(pid: int, started: int, proc_root: Path = PROC) -> bool:
    """True where this very process (pid and start ticks) still runs. A zombie has ended: it holds nothing any more."""
    fields = stat_fields(pid, proc_root)
    return fields is not None and int(fields[19]) == started and fields[0] not in _DEAD_STATES


def _read_bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a hot path
        return file.read() or b""


def environment(pid: int, proc_root: Path | str = PROC) -> dict[str, str] | None:
    """The environment the process was started with, or None where it may not be read or the process is gone."""
    try:
        raw = _read_bytes(f"{proc_root}/{pid}/environ")
    except OSError:
        return None
    return _pairs(raw)


def _pairs(raw: bytes) -> dict[str, str]:
    pairs = (item.partition("=") for item in os.fsdecode(raw).split("\0"))
    return {key: value for key, sign, value in pairs if sign}


def readable(text: str) -> str:
    """A path or variable as it can be shown and sent: bytes that are no letters become a mark."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def environment_of(identity: ProcessId, proc_root: Path = PROC) -> dict[str, str] | str:
    """The environment that this very process was started with, or the reason in words why it is not known."""
    pid = identity.pid
    if identify(pid, proc_root) != identity:
        return f"process {pid} has ended"
    try:
        raw = (proc_root / str(pid) / "environ").read_bytes()
    except PermissionError:
        owners = owners_of(pid, proc_root)
        if owners is not None and owners.real == os.getuid():
            return f"the kernel does not show the environment of process {pid}: it has changed its rights"
        return f"the environment of process {pid} is another user's: only that user and root may read it"
    except (FileNotFoundError, ProcessLookupError):
        return f"process {pid} has ended"
    except OSError as error:
        return f"the environment of process {pid} cannot be read: {error.strerror}"
    # The number may have gone to another process between the first look and the reading.
    if identify(pid, proc_root) != identity:
        return f"process {pid} has ended"
    return _pairs(raw) or f"process {pid} shows no environment: it was started without one, or has written over it"


def command_words(pid: int, proc_root: Path | str = PROC) -> tuple[str, ...] | None:
    """The command line, or None where it may not be read or the process is gone. Empty for kernel threads."""
    try:
        text = _read_bytes(f"{proc_root}/{pid}/cmdline").decode(errors="replace")
    except OSError:
        return None
    # Programs that write their own title leave padding behind it.
    words = text.rstrip("\0").split("\0") if "\0" in text.rstrip("\0") or not text else [text.rstrip("\0")]
    return tuple(words) if words != [""] else ()


def in_host_pid_namespace(proc_root: Path = PROC) -> bool:
    """True where our pids are the machine's pids, so that the driver and we mean the same process by a number."""
    try:
        return str((proc_root / "self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def hidepid(proc_root: Path = PROC) -> str | None:
    """How this mount of /proc hides other users' processes (`invisible`, `2`, ...), or None where it does not."""
    try:
        mounts = (proc_root / "self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = None
    for line in mounts:
        words = line.split()
        # Mount point is the fifth word; the options of the file system are the last. Later mounts cover earlier ones.
        if len(words) > 6 and words[4] == str(proc_root):
            options = dict(option.partition("=")[::2] for option in words[-1].split(","))
            mode = options.get("hidepid", "0")
            found = None if mode in ("0", "off") else mode
    return found


def sees_all_pids(proc_root: Path = PROC) -> bool:
    """True only where a process that is not to be seen does not exist: the machine's own pids, none of them hidden."""
    if not in_host_pid_namespace(proc_root):
        return False
    # The first process is root's. Whoever is shown it, in spite of hidepid, is shown everything (root, or its group).
    first = read_row(1, proc_root)
    return first is not None and (os.geteuid() == 0 or hidepid(proc_root) is None)


def boot_time() -> float:
    """When the machine was started, seconds since the epoch, by the clock as it stands now."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def holds_gpu(pid: int, minors: frozenset[int] = frozenset(), proc_root: Path = PROC) -> bool | None:
    """Whether the process has these GPUs open (N of /dev/nvidiaN); with no number given, any NVIDIA device or the CUDA
    driver. None where we may not look."""
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


def _device(link: str) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115 - a hot loop over descriptors
    except OSError:
        return ""  # the descriptor was closed while we looked
