"""What ended a program, as a value: the public JSON of `memtop diagnose --json`, of the ledger and
of the dashboard.

Bytes are as the evidence prints them. What it does not print is None; sums that are only inferred
have fields of their own. At the end, a diagnosis as one sentence for a person.
"""

from __future__ import annotations

import re
import shlex
from enum import Enum

import msgspec

from memtop.supervisor import units
from memtop.supervisor.diagnosis.environment import Place


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


PROVEN = 0.95
_CERTAINTY = ((PROVEN, "proven"), (0.75, "very likely"), (0.5, "likely"))


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One failure. `evidence` holds the lines (or the counters, as sentences) that prove it, the
    strongest first."""

    kind: Kind
    reason: str | None = None
    """For NOT_MEMORY, a short name of what it was instead: nccl_timeout, killed_by_something,
    python_error, ... For HOST_OOM_ALLOC, the program whose own limit it was, if it was one:
    java_heap, node_heap. For GPU_OOM and HOST_OOM_ALLOC, memory_budget: an inference engine or a
    loader refused to start, because the memory that it may use is too small. Else None."""
    confidence: float
    """0-1. From PROVEN on it is proven: by a counter, a rank's own record, its error file, or the
    exit status; never by the words of a log alone. Below 0.5 memtop does not act on it."""
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
    """The strongest evidence: record | error_file | kernel | samples | snapshot | words |
    exit_status."""
    evidence: tuple[str, ...] = ()
    snapshot_file: str | None = None
    """The snapshot of the GPU's memory that the rank's agent has kept; `memtop diagnose` reads
    it."""
    environment: tuple[Place, ...] = ()
    """Where it ran, as far as that is known; remedies depend on it."""

    @property
    def of_memory(self) -> bool:
        return self.kind is not Kind.NOT_MEMORY

    @property
    def by_words(self) -> bool:
        """Whether nothing but the program's own words shows a lack of memory."""
        return self.of_memory and self.source == "words"

    def name_at(self, update: int | None) -> str:
        """The kind of failure and the update that failed, for the history of a run: `gpu_oom at
        update 812`. `in_words` makes it a text for people."""
        return f"{self.kind.value}{'' if update is None else f' at update {update}'}{SAID if self.by_words else ''}"

    @property
    def certainty(self) -> str:
        """The confidence in words."""
        return next((words for least, words in _CERTAINTY if self.confidence >= least), "a guess")


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
    killed_in_own_group: bool = False
    """Whether it did so in a group that only the program uses. In a shared one the victim can be
    another program."""
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
    has_gpu: bool | None = None
    """Whether memtop has seen a GPU where the program ran. None: the log may be of another
    machine."""
    gpu_run_bytes: dict[str, int] = {}
    """By GPU uuid, the most that the run's processes together held shortly before the end, if the
    driver reports it."""
    batch: int | None = None
    """B, T and V of the program, if known: a request of B x T x V x 2 or 4 bytes is for the
    logits."""
    seq_len: int | None = None
    vocabulary: int | None = None


PHASES = {
    "load": "while loading the model",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "evaluation": "during evaluation",
    "save": "while saving",
    "data": "while loading data",
}

OUTCOMES = {
    "gpu_oom": "ran out of GPU memory",
    "gpu_oom_fragmented": "ran out of GPU memory (fragmented)",
    "gpu_oom_other_process": "ran out of GPU memory that other processes held",
    "host_oom_alloc": "ran out of host memory",
    "host_oom_killed": "was killed for lack of host memory",
    "pinned_host_oom": "ran out of page-locked memory",
    "shm_exhausted": "ran out of shared memory",
    "disk_full": "found the disk full",
}
"""How an attempt ended, by the value of its `Kind`."""
SAID = " (only its words say so)"
"""After how something ended, if nothing but the program's own words shows it."""


def outcome_of(kind: str | None, *, by_words: bool) -> str | None:
    """How an attempt ended, in words; None if not for lack of memory."""
    words = OUTCOMES.get(kind or "")
    return None if words is None else f"{words}{SAID if by_words else ''}"


KINDS = {
    Kind.GPU_OOM: "out of GPU memory",
    Kind.GPU_OOM_FRAGMENTED: "GPU memory fragmented",
    Kind.GPU_OOM_OTHER_PROCESS: "GPU memory held by others",
    Kind.HOST_OOM_ALLOC: "out of host memory",
    Kind.HOST_OOM_KILLED: "killed for lack of host memory",
    Kind.PINNED_HOST_OOM: "out of page-locked memory",
    Kind.SHM_EXHAUSTED: "shared memory full",
    Kind.DISK_FULL: "disk full",
    Kind.NOT_MEMORY: "failed, memory was not the cause",
}
"""A failure as a clause of a sentence: `out of GPU memory at update 812`."""
_KIND = re.compile(rf"\b({'|'.join(sorted((kind.value for kind in Kind), key=len, reverse=True))})\b")


def in_words(text: str) -> str:
    """The text with kinds of failure (`gpu_oom`) written out: `out of GPU memory at update 812`."""
    return _KIND.sub(lambda found: KINDS[Kind(found[1])], text)


REASONS = {
    "aborted": "the program aborted itself (SIGABRT)",
    "allocator_warning": "an allocator warned that more memory would help; its message says that this is no failure",
    "asked_to_stop": "the program was stopped as requested",
    "bus_error": "the program crashed (bus error): a memory-mapped file was truncated, or /dev/shm was full",
    "cancelled": "the job was cancelled",
    "config_error": "the program rejected its configuration",
    "connection_lost": "the connection to another process was lost",
    "cuda_error": "CUDA reported an error that is not about memory",
    "data_error": "the data could not be read",
    "device_mismatch": "an operation used tensors on different devices",
    "device_side_assert": "an assertion failed on the GPU; mostly an index or a label is out of range",
    "driver_mismatch": "the GPU driver and its library have different versions; reboot or reload the driver",
    "dtype_mismatch": "an operation used tensors of different types",
    "extension_build": "an extension could not be built",
    "fd_limit": "too many files were open: the limit of file descriptors (ulimit -n) was reached, not one of memory",
    "finished": "the program ended successfully",
    "gpu_lost": "the GPU failed or was lost",
    "grpc_limit": "a message or a quota exceeded its limit; that is no limit of memory",
    "illegal_instruction": "the program used an instruction that this processor does not have",
    "illegal_memory_access": "a GPU kernel accessed memory outside its allocation: this is a bug, not a lack of memory",
    "import_error": "a module could not be imported",
    "internal_pool": "a memory pool of fixed size inside the program was too small; neither a GPU nor the host ran out",
    "inotify_limit": "the limit of watched files was reached; the disk is not full",
    "interrupted": "the program was interrupted",
    "invalid_device": "the program requested a GPU that does not exist",
    "java_heap": "Java's heap was full",
    "keyboard_interrupt": "the program was interrupted with Ctrl-C",
    "killed_by_something": "the program was killed",
    "loss_nan": "the loss became NaN or infinite",
    "memlock_limit": "the limit of locked memory (ulimit -l) was reached: the network card needs locked memory",
    "memory_budget": "the share of the GPU's memory that the program was given is too small for its model and cache",
    "nccl_error": "the communication between ranks failed",
    "nccl_timeout": "a rank waited for another rank until the timeout",
    "network": "a download or a network request failed",
    "no_evidence": "no sign of a lack of memory was found; why the program ended is unknown",
    "no_kernel_image": "this build contains no code for this GPU",
    "no_input": "the program asked for input, and its standard input had ended: under memtop it is empty",
    "node_failure": "the node failed",
    "node_heap": "the heap of JavaScript (node) was full",
    "oom_handled": "the program ran out of memory, handled that and went on",
    "oom_kill_of_other_process": "the kernel killed another program for lack of memory, not this one",
    "oom_retried": "the program ran out of memory, retried or skipped the work, and went on",
    "permission": "the user has no permission to use a file or a device",
    "port_in_use": "a network port is already in use",
    "preempted": "the scheduler preempted the job",
    "python_error": "the program raised an exception",
    "recursion": "the program exceeded Python's recursion limit",
    "segfault": "the program crashed (segmentation fault)",
    "shape_mismatch": "an operation used tensors whose shapes do not match",
    "sigterm": "the program was terminated (SIGTERM)",
    "state_mismatch": "a checkpoint does not match the model",
    "teardown_noise": "workers were killed after the run had completed",
    "thread_limit": "no more threads or processes can be started: the limit (ulimit -u) was reached, not one of memory",
    "time_limit": "the job reached its time limit",
    "worker_died": "a data-loader worker ended, and the log does not show why",
    "triton_shared_memory": (
        "a kernel needs more on-chip memory than the GPU has: use smaller blocks; smaller batches do not help"
    ),
}
_WITH_DETAIL = frozenset({"python_error", "data_error", "config_error", "import_error", "cuda_error"})


def summary(diagnosis: Diagnosis, detail: str | None = None, caveat: str | None = None, *, without_gpu: bool = False) -> str:
    """The sentence. `detail` is what the program printed, for failures with no sentence of their
    own; `caveat` is a sentence to close with; `without_gpu`: it speaks of a GPU, but none is
    known."""
    sentence = _sentence(diagnosis, detail)
    if without_gpu:
        # It comes first, so that it stays where the end of a sentence has no room.
        sentence = f"The program says that {sentence.replace('The GPU', 'the GPU', 1)}"
    return sentence if caveat is None else f"{sentence} {caveat}"


def _sentence(diagnosis: Diagnosis, detail: str | None) -> str:
    if diagnosis.kind is Kind.NOT_MEMORY:
        sentence = REASONS.get(diagnosis.reason or "", "the program failed, not for lack of memory")
        if detail and diagnosis.reason in _WITH_DETAIL:
            sentence += f": {detail}"
        return sentence[:1].upper() + sentence[1:] + ("" if sentence.endswith(".") else ".")
    phase = PHASES.get(diagnosis.phase)
    return {
        Kind.HOST_OOM_ALLOC: _host_alloc,
        Kind.HOST_OOM_KILLED: _host_killed,
        Kind.PINNED_HOST_OOM: _pinned,
        Kind.SHM_EXHAUSTED: _shm,
        Kind.DISK_FULL: _disk,
    }.get(diagnosis.kind, _gpu)(diagnosis, f" {phase}" if phase else "")


def _gpu(diagnosis: Diagnosis, phase: str) -> str:
    if diagnosis.reason is not None:
        return _refused(diagnosis, REASONS[diagnosis.reason])
    name = "The GPU" if diagnosis.device_index is None else f"GPU {diagnosis.device_index}"
    request = []
    if diagnosis.requested_bytes is not None:
        purpose = f" for {diagnosis.requested_for}" if diagnosis.requested_for else ""
        request.append(f"it requested {size(diagnosis.requested_bytes)}{purpose}")
    total = diagnosis.total_bytes
    if diagnosis.free_bytes is not None:
        request.append(f"{size(diagnosis.free_bytes)} was free" + (f" of {size(total)}" if total else ""))
    parts = [", ".join(request)] if request else []
    held, tensors = diagnosis.process_bytes, diagnosis.allocated_bytes
    if held is not None:
        parts.append(f"the process held {size(held)}{_share(held, total)}")
    elif tensors is not None:
        parts.append(f"the program's tensors held {size(tensors)}{_share(tensors, total)}")
    if diagnosis.kind is Kind.GPU_OOM_FRAGMENTED:
        spare = diagnosis.reserved_unallocated_bytes
        amount = size(spare) if spare is not None else "more than that"
        parts.append(f"{amount} was reserved but unallocated (fragmentation)")
    elif diagnosis.kind is Kind.GPU_OOM_OTHER_PROCESS:
        pids = ", ".join(map(str, diagnosis.other_process_pids))
        amount = size(diagnosis.other_process_bytes)
        parts.append(
            f"other processes held {amount}{_share(diagnosis.other_process_bytes, total)}" + (f", pid {pids}" if pids else "")
        )
    elif _refused_with_room(diagnosis):
        allowed = diagnosis.allowed_bytes
        why = (
            f"the program is limited to {size(allowed)}"
            if allowed is not None
            else "the driver refused it although that much was free"
        )
        parts.append(why)
    return f"{name} ran out of memory{phase}" + (f": {'; '.join(parts)}." if parts else ".")


def _refused(diagnosis: Diagnosis, why: str) -> str:
    needs = "" if diagnosis.requested_bytes is None else f"; {size(diagnosis.requested_bytes)} was needed"
    free = "" if diagnosis.free_bytes is None else f", {size(diagnosis.free_bytes)} was free"
    return f"{why[:1].upper()}{why[1:]}{needs}{free}."


def _refused_with_room(diagnosis: Diagnosis) -> bool:
    requested, free = diagnosis.requested_bytes, diagnosis.free_bytes
    return requested is not None and free is not None and free > requested


def _host_alloc(diagnosis: Diagnosis, phase: str) -> str:
    if diagnosis.reason == "memory_budget":
        return _refused(diagnosis, "the program refused to start: its model needs more memory than the host has free")
    if diagnosis.reason is not None:
        return f"{REASONS[diagnosis.reason]}{phase}: it has its own limit, which can be far below the host's memory."
    amount = "An allocation" if diagnosis.requested_bytes is None else f"An allocation of {size(diagnosis.requested_bytes)}"
    limit = diagnosis.address_space_bytes
    why = "" if limit is None else f": the program's address space is limited to {size(limit)} (ulimit -v)"
    return f"{amount} of host memory failed{phase}{why}."


def _host_killed(diagnosis: Diagnosis, phase: str) -> str:
    if diagnosis.confidence < 0.5:
        return (
            "The program, or a process that it started, was killed (SIGKILL), probably by the kernel for lack of host memory; "
            "a kill by hand looks the same."
        )
    certain = diagnosis.confidence >= 0.9
    who = "A data-loader worker" if diagnosis.phase == "data" else "The program"
    return f"{who} was {'killed' if certain else 'most likely killed'} for lack of host memory."


def _pinned(diagnosis: Diagnosis, phase: str) -> str:
    what = "page-locked host memory"
    if diagnosis.requested_bytes is not None:
        what = f"{size(diagnosis.requested_bytes)} of page-locked host memory"
    return f"Allocating {what} failed{phase}: this is the host's memory, not the GPU's."


def _shm(diagnosis: Diagnosis, phase: str) -> str:
    return f"/dev/shm, through which data-loader workers and ranks pass data, was full{phase}."


def _disk(diagnosis: Diagnosis, phase: str) -> str:
    if diagnosis.confidence < 0.8:
        return f"A file could not be written{phase}: the disk is probably full; a network file system can fail alike."
    return f"The disk was full{phase}."


def layers_command(snapshot_file: str | None) -> str | None:
    """How a person finds out which layers held the memory; None without a snapshot."""
    return None if snapshot_file is None else f"Which layers held the memory: memtop diagnose {shlex.quote(snapshot_file)}"


def size(size_bytes: int | None) -> str:
    """As exact as the allocator prints it: two decimals of a GiB."""
    if size_bytes is not None and units.GIB <= size_bytes < 1024 * units.GIB:
        return f"{units.gib(size_bytes, 2)} GiB"
    return units.size(size_bytes)


def _share(part: int | None, total: int | None) -> str:
    """The share in percent, if it can be one: NVML may not see the process, and Windows spills into
    host memory."""
    return f" ({units.percent(part / total)})" if part is not None and total and part <= total else ""
