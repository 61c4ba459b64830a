"""What ended a program, as a value: the public JSON of `memtop diagnose --json`, of the ledger and
of the dashboard.

Bytes are as the evidence prints them. What it does not print is None; sums that are only inferred
have fields of their own.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Kind(str, Enum):
    """What ran out. Everything that is no lack of memory or disk space is NOT_MEMORY, with a
    `reason`."""

    GPU_OOM = "gpu_oom"
    GPU_OOM_FRAGMENTED = "gpu_oom_fragmented"
    """The allocator held enough memory in pieces: what it reserved without using it covers the
    request."""
    GPU_OOM_OTHER_PROCESS = "gpu_oom_other_process"
    """More than half of the GPU is held by processes that are not the program's."""
    HOST_OOM_ALLOC = "host_oom_alloc"
    """An allocation of host memory was refused. The program saw that and could report it."""
    HOST_OOM_KILLED = "host_oom_killed"
    """The kernel killed the program for lack of host memory."""
    PINNED_HOST_OOM = "pinned_host_oom"
    SHM_EXHAUSTED = "shm_exhausted"
    DISK_FULL = "disk_full"
    NOT_MEMORY = "not_memory"

    @property
    def of_gpu(self) -> bool:
        return self in (Kind.GPU_OOM, Kind.GPU_OOM_FRAGMENTED, Kind.GPU_OOM_OTHER_PROCESS)

    @property
    def of_host(self) -> bool:
        return self in (Kind.HOST_OOM_ALLOC, Kind.HOST_OOM_KILLED)


class Logits(msgspec.Struct, frozen=True):
    """The logits of one micro-batch: B x T x V numbers."""

    batch: int
    seq_len: int
    vocabulary: int
    width_bytes: int
    """4 or 2, of one number."""

    def __str__(self) -> str:
        width = "fp32" if self.width_bytes == 4 else "16 bit"
        return f"the logits (B {self.batch} x T {self.seq_len} x V {self.vocabulary}, {width})"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One failure. `evidence` holds the lines (or the counters, as sentences) that prove it, the
    strongest first."""

    kind: Kind
    reason: str | None = None
    """For NOT_MEMORY, a short name of what it was instead: nccl_timeout, killed_by_something,
    python_error, ... For HOST_OOM_ALLOC, the program whose own limit it was, if it was one:
    java_heap, node_heap. Else None."""
    confidence: float
    """0-1. From 0.95 on it is proven: by a counter, a rank's own record, or a complete message.
    Below 0.5 memtop does not act on it."""
    summary: str
    """One sentence for a person, with sizes."""
    phase: str = "unknown"
    """load | forward | loss | backward | optimizer | evaluation | save | data | unknown"""
    rank: int | None = None
    """With several ranks, the one that failed first."""
    device_index: int | None = None
    """The index in the program's message. It counts the devices that the program sees, not the
    machine's."""
    device_uuid: str | None = None
    requested_bytes: int | None = None
    requested_for: str | None = None
    """What the request was for, if its size shows that: "the logits (B 32 x T 252 x V 40960,
    fp32)"."""
    requested_logits: Logits | None = None
    """The same as a value, if it was the logits."""
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    allowed_bytes: int | None = None
    """A limit that somebody set (a memory fraction, a cgroup)."""
    address_space_bytes: int | None = None
    """The program's limit of address space (`ulimit -v`), if that refused the allocation."""
    context_bytes: int | None = None
    """Inferred: held by the process outside its allocator."""
    other_process_bytes: int | None = None
    other_process_pids: tuple[int, ...] = ()
    source: str = "words"
    """The strongest evidence: record | error_file | kernel | samples | words | exit_status."""
    evidence: tuple[str, ...] = ()

    @property
    def of_memory(self) -> bool:
        return self.kind is not Kind.NOT_MEMORY


class OomRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent inside a rank wrote when an allocation failed (report `oom`), caught or
    not."""

    rank: int
    time: float
    """Seconds since the epoch."""
    message: str
    """The whole message of the error."""
    error: str
    """The error's class, e.g. `torch.OutOfMemoryError`."""
    survived: bool | None = False
    """True if the trainer repeated the update in smaller pieces and went on; None if it was in
    another thread, and it is unknown whether the program can do without that thread."""
    phase: str = "unknown"
    batch: int | None = None
    """The micro-batch of the work that failed; None if the rank did not report it."""
    device_uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor knows about an attempt's end, in addition to its log. None: not known."""

    exit_status: int | None = None
    """Negative for a signal."""
    asked_to_stop: bool = False
    """memtop ended the program, by itself or because a person requested it."""
    records: tuple[OomRecord, ...] = ()
    error_files: tuple[str, ...] = ()
    """The text (JSON) of torchrun's error files, one for each rank that has one."""
    cgroup_oom_kills: int | None = None
    """How many processes the kernel killed in the program's memory group during the attempt."""
    cgroup_killed_near_end: bool | None = None
    """Whether it killed one of them shortly before the end. An earlier kill is not the cause of the
    end."""
    in_own_group: bool = False
    """Whether only the program is in that group. In a shared one the victim can be another
    program."""
    kernel_lines: tuple[str, ...] = ()
    """The kernel log's records of kills shortly before the end, if this user can read them."""
    member_pids: frozenset[int] = frozenset()
    """The pids of the run's processes: a kernel record is about the run if it names one of them."""
    host_peak_fraction: float | None = None
    """The largest share of the host's (or the group's) memory that the samples show in use shortly
    before the end."""
    address_space_bytes: int | None = None
    """The lowest limit of address space (RLIMIT_AS) of the program's processes; None: no limit, or
    not known."""
    shm_free_bytes: int | None = None
    disk_free_bytes: int | None = None
    gpu_run_bytes: dict[str, int] = {}
    """By GPU uuid, the most that the run's processes together held shortly before the end, if the
    driver reports it."""
    batch: int | None = None
    """B, T and V of the program, if known: a request of B x T x V x 2 or 4 bytes is for the
    logits."""
    seq_len: int | None = None
    vocabulary: int | None = None
