"""What ended a program, as a value: the public JSON of `memtop diagnose --json`, the ledger's and the dashboard's.

Bytes are as the evidence prints them; what it does not print is None, and sums that are only inferred have names of their own.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Kind(str, Enum):
    """What ran out. Everything that is not a lack of memory or room is NOT_MEMORY, with a `reason`."""

    GPU_OOM = "gpu_oom"
    GPU_OOM_FRAGMENTED = "gpu_oom_fragmented"
    """The allocator held enough, in pieces: reserved but unallocated covers the request."""
    GPU_OOM_OTHER_PROCESS = "gpu_oom_other_process"
    """More than half of the card is held by processes that are not the program's."""
    HOST_OOM_ALLOC = "host_oom_alloc"
    """An allocation of host memory was refused: the program saw it and could say so."""
    HOST_OOM_KILLED = "host_oom_killed"
    """The kernel killed for lack of host memory."""
    PINNED_HOST_OOM = "pinned_host_oom"
    SHM_EXHAUSTED = "shm_exhausted"
    DISK_FULL = "disk_full"
    NOT_MEMORY = "not_memory"

    @property
    def of_gpu(self) -> bool:
        return self in (Kind.GPU_OOM, Kind.GPU_OOM_FRAGMENTED, Kind.GPU_OOM_OTHER_PROCESS)


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One failure. `evidence` holds the lines (or counters, in words) that prove it, the strongest first."""

    kind: Kind
    reason: str | None = None
    """For NOT_MEMORY a short name of what it was instead: nccl_timeout, killed_by_something, python_error, ... For
    HOST_OOM_ALLOC whose own limit it was, where it was one: java_heap, node_heap. Else None."""
    confidence: float
    """0-1: 0.95 and more is proven (a counter, the program's own record, a complete message); below 0.5 nothing is done by
    itself."""
    summary: str
    """One sentence for a person, sizes included."""
    phase: str = "unknown"
    """load | forward | loss | backward | optimizer | evaluation | save | data | unknown"""
    rank: int | None = None
    """The rank that failed first, where there are several."""
    device_index: int | None = None
    """The index in the program's message: of the devices that it sees, not of the machine's cards."""
    device_uuid: str | None = None
    requested_bytes: int | None = None
    requested_for: str | None = None
    """What the request was for, where its size gives it away: "the logits (B 32 x T 252 x V 40960, fp32)"."""
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    allowed_bytes: int | None = None
    """A limit set on purpose (a memory fraction, an address-space limit, a cgroup)."""
    address_space_bytes: int | None = None
    """The program's limit of address space (`ulimit -v`), where that is what refused the allocation."""
    context_bytes: int | None = None
    """Inferred: what the process held beside its allocator."""
    other_process_bytes: int | None = None
    other_process_pids: tuple[int, ...] = ()
    source: str = "words"
    """The strongest evidence: record | error_file | kernel | samples | words | exit_status."""
    evidence: tuple[str, ...] = ()

    @property
    def of_memory(self) -> bool:
        return self.kind is not Kind.NOT_MEMORY


class OomRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent inside a rank wrote when an allocation failed (report `oom`), caught or not."""

    rank: int
    time: float
    """Seconds since the epoch."""
    message: str
    """The error's own words, whole."""
    error: str
    """The error's class, e.g. `torch.OutOfMemoryError`."""
    survived: bool | None = False
    """True where the trainer redid the update in smaller pieces and went on; None where it was in a thread beside, and nobody
    knows whether the program could do without that."""
    phase: str = "unknown"
    update: int | None = None
    batch: int | None = None
    """B of the work that failed; None where the rank did not say."""
    device_uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    rss_bytes: int | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor itself knows of an attempt's end, beside its log. None: not known."""

    exit_status: int | None = None
    """Negative for a signal."""
    asked_to_stop: bool = False
    """memtop (or the person, through it) ended the program."""
    records: tuple[OomRecord, ...] = ()
    error_files: tuple[str, ...] = ()
    """torchrun's error files of the ranks, as text (JSON)."""
    cgroup_oom_kills: int | None = None
    """How many processes the kernel killed in the program's memory group during the attempt."""
    cgroup_killed_near_end: bool | None = None
    """Whether one of them was killed shortly before the end: an earlier one is not what the program died of."""
    in_own_group: bool = False
    """That group holds the program and nobody else; others may have been killed in one that is shared."""
    kernel_lines: tuple[str, ...] = ()
    """Records of the kernel's log about kills shortly before the end, where this user may read it."""
    member_pids: frozenset[int] = frozenset()
    """Pids that the run had: whether a kernel record is about it."""
    host_limit_bytes: int | None = None
    host_peak_fraction: float | None = None
    """The most of the host's (or the group's) memory that our samples saw in use shortly before the end."""
    address_space_bytes: int | None = None
    """The least limit of address space (RLIMIT_AS) that a process of the program had; None: none, or not known."""
    shm_free_bytes: int | None = None
    disk_free_bytes: int | None = None
    gpu_free_bytes: dict[str, int] = {}
    """By uuid, our last sample."""
    gpu_run_bytes: dict[str, int] = {}
    """By uuid the most that the run's processes together were seen to hold shortly before the end, where the driver tells."""
    batch: int | None = None
    """B, T and V of the program where they are known: a request of B x T x V x 2 or 4 bytes is the logits."""
    seq_len: int | None = None
    vocabulary: int | None = None
