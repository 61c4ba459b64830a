"""What a sample of the machine looks like. Frozen; field names are the public JSON of `memtop watch --once --json`.

Units: bytes, seconds, watts, degrees Celsius, megahertz, fractions 0-1. A value that is not known is None, and `unknown`
maps the field's name to the reason in words. None is never written as 0.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Band(str, Enum):
    """How safe a memory fraction is: safe below 85 %, edge 85-90 % inclusive, danger above 90 %."""

    SAFE = "safe"
    EDGE = "edge"
    DANGER = "danger"
    UNKNOWN = "unknown"


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process on one GPU. `pid` is as the driver reports it (the host's PID namespace)."""

    pid: int
    user: str | None = None
    name: str | None = None
    command: str | None = None
    used_bytes: int | None = None
    kind: str = "compute"
    """compute | graphics | compute+graphics | mps"""
    run: str | None = None
    """Name of the memtop run that the process belongs to, or None."""
    stray: bool = False
    """True only where it is proven that the process belongs to a memtop run that is over."""
    reason: str | None = None
    """Why it is (or is not) thought stray, or why nothing can be said of it; words for a person."""
    choosable: bool = False
    """True where this user may end it from memtop: same user, not graphics, not a system process, not memtop itself."""
    started: float | None = None
    """Start time, seconds since the epoch; with `pid` the identity of the process."""
    started_ticks: int | None = None
    """The same start time in clock ticks since boot, exact: what a signal is checked against."""
    parent_pid: int | None = None
    sm_fraction: float | None = None
    """Share of the driver's last samples in which this process had the multiprocessors busy."""
    memory_bandwidth_fraction: float | None = None
    encoder_fraction: float | None = None
    decoder_fraction: float | None = None
    host_rss_bytes: int | None = None
    host_cpu_fraction: float | None = None
    """Of one core, since the last look: 2.0 is two cores."""
    container: str | None = None
    """The container or pod it runs in, e.g. `docker 3f2a9c1b7d10`, `pod training/qwen-0`; None where it is in none."""
    job: str | None = None
    """Key of the job in `MachineSnapshot.jobs` that it belongs to."""
    role: str | None = None
    """launcher | rank N | loader worker | process: its part in the job."""
    mig_instance: int | None = None
    """Position of the MIG instance that it runs on, None without MIG."""
    gone: bool = False
    """The driver still lists memory under this pid, but no such process lives on this machine (proven: we see all pids); a
    process that has ended and was not collected by its parent (zombie) does not live either."""
    unknown: dict[str, str] = {}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that belong together: a launcher, its ranks and their loader workers; or one program alone."""

    key: str
    """The same as long as the job lives, e.g. `run qwen-sft`, `pid 4242@183001`."""
    name: str
    """What a person would call it: the run's name, or the script of the program."""
    run: str | None = None
    user: str | None = None
    leader_pid: int
    """The topmost process of it."""
    pids: tuple[int, ...] = ()
    """All of its living processes that are to be seen, those without a GPU included; the leader first."""
    roles: dict[str, int] = {}
    """How many processes of each role: {"launcher": 1, "rank": 2, "loader worker": 8}."""
    gpu_indices: tuple[int, ...] = ()
    used_bytes: int | None = None
    """GPU memory of all its processes on all GPUs."""
    host_rss_bytes: int | None = None
    host_cpu_fraction: float | None = None
    started: float | None = None
    unknown: dict[str, str] = {}


class GpuTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the driver announced: an Xid, an ECC error, a change of the recovery action."""

    time: float
    """Seconds since the epoch."""
    kind: str
    """xid | ecc | recovery | lost | returned"""
    code: int | None = None
    """The Xid's number."""
    message: str
    """In plain words: what it means and what to do."""
    fault_of_program: bool = False
    """True for faults that a program causes (Xid 13, 31, 43, 45) and that leave the card sound."""


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG instance of a GPU. It has memory and processes of its own; the driver tells no utilisation for it."""

    position: int
    """The driver's index of it below its GPU; there may be gaps."""
    uuid: str | None = None
    name: str | None = None
    """Its profile, e.g. `1g.10gb`."""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    used_fraction: float | None = None
    band: Band = Band.UNKNOWN
    error: str | None = None
    unknown: dict[str, str] = {}


class GpuDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What changes slowly or never: read every 5 s or once."""

    memory_temperature_celsius: float | None = None
    slowdown_temperature_celsius: float | None = None
    """Where the card begins to slow itself down."""
    fan_fraction: float | None = None
    sm_clock_megahertz: int | None = None
    sm_clock_limit_megahertz: int | None = None
    memory_clock_megahertz: int | None = None
    memory_clock_limit_megahertz: int | None = None
    performance_state: str | None = None
    """P0 (fastest) to P15."""
    throttle_reasons: tuple[str, ...] | None = None
    """Why the clocks are held down just now, in words; empty: they are not (an idle card's low clocks do not count)."""
    ecc_mode: str | None = None
    """on | off"""
    ecc_corrected_errors: int | None = None
    """Since the driver was loaded."""
    ecc_uncorrected_errors: int | None = None
    remapped_rows_correctable: int | None = None
    remapped_rows_uncorrectable: int | None = None
    remapping_pending: bool | None = None
    """A reset is needed before bad rows are replaced."""
    remapping_failed: bool | None = None
    """No spare rows are left: the card should be replaced."""
    retired_pages: int | None = None
    """On cards before Ampere: memory pages taken out of use for double-bit errors or many single-bit ones."""
    recovery_action: str | None = None
    """What the driver says the card needs, in words; None where it needs nothing or the driver cannot tell (see unknown)."""
    pcie_generation: int | None = None
    pcie_generation_limit: int | None = None
    pcie_width: int | None = None
    pcie_width_limit: int | None = None
    pcie_sent_bytes_per_second: float | None = None
    """From the GPU; read by a thread of its own, since every reading takes the driver 20 ms."""
    pcie_received_bytes_per_second: float | None = None
    nvlink_links: int | None = None
    """Links that are up; None where the card has none or the driver cannot tell (see unknown)."""
    nvlink_sent_bytes_per_second: float | None = None
    nvlink_received_bytes_per_second: float | None = None
    bar1_total_bytes: int | None = None
    bar1_used_bytes: int | None = None
    """A window of the CPU into the card's memory, not memory of its own: never add it to VRAM."""
    encoder_fraction: float | None = None
    decoder_fraction: float | None = None
    energy_joules: float | None = None
    """Since the driver was loaded."""
    persistence_mode: bool | None = None
    compute_mode: str | None = None
    """default | exclusive process | prohibited"""
    display_active: bool | None = None
    display_connected: bool | None = None
    mig_mode: bool | None = None
    compute_capability: str | None = None
    """e.g. `8.6`"""
    device_minor: int | None = None
    """N of /dev/nvidiaN, the device that a program on this GPU has open."""
    sm_active_fraction: float | None = None
    """Share of multiprocessors with work, and ..."""
    tensor_active_fraction: float | None = None
    """... of time in which the tensor cores worked (Hopper and newer); utilisation alone says only that some kernel ran."""
    unknown: dict[str, str] = {}


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment. used_bytes excludes what the driver reserves (NVML memory info v2) where that is known."""

    index: int
    """The driver's index (nvidia-smi's), which may differ from CUDA's. A GPU that the driver does not list any more has its
    old one, or the next that is free; `error` says so."""
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    """e.g. `00000000:65:00.0`"""
    visible_index: int | None = None
    """What CUDA calls it (`cuda:N`) under memtop's own CUDA_VISIBLE_DEVICES; None: hidden, or the variable is not set."""
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    used_fraction: float | None = None
    """(total - free) / total: what cannot be allocated any more, driver-reserved included."""
    band: Band = Band.UNKNOWN
    unified: bool = False
    """The GPU shares the machine's RAM (GB10, Jetson): total, free and band are those of that one pool, used_bytes is what GPU
    processes hold of it, `other_pool_bytes` what the rest of the machine holds."""
    other_pool_bytes: int | None = None
    utilization_fraction: float | None = None
    memory_utilization_fraction: float | None = None
    """Share of time in which memory was read or written; says nothing about how much is in use."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    error: str | None = None
    """Why the whole GPU cannot be read (lost, reset required, ...), in words with what to do; None if it can."""
    processes: tuple[GpuProcess, ...] = ()
    mig: tuple[MigInstance, ...] = ()
    troubles: tuple[GpuTrouble, ...] = ()
    """The newest announcements of the driver since memtop began to watch, oldest first; at most eight."""
    details: GpuDetails = GpuDetails()
    unknown: dict[str, str] = {}


class HostSample(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory at one moment. Where a cgroup limit is below the machine's RAM, used_fraction and band
    refer to the limit."""

    total_bytes: int | None = None
    used_bytes: int | None = None
    """total - available on the machine; inside a limited cgroup: the cgroup's usage less its inactive file cache."""
    available_bytes: int | None = None
    used_fraction: float | None = None
    band: Band = Band.UNKNOWN
    limit_bytes: int | None = None
    """The cgroup's memory limit if there is one below the machine's total, else None."""
    limit_path: str | None = None
    """The cgroup that sets it."""
    limit_swap_bytes: int | None = None
    """How much swap the cgroup allows; None where it does not limit swap."""
    limit_throttle_bytes: int | None = None
    """memory.high: above it the kernel slows the group down before it kills."""
    oom_kills: int | None = None
    """Processes that the kernel has killed for memory in this cgroup and those below it, ever."""
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    swap_fraction: float | None = None
    swap_band: Band = Band.UNKNOWN
    swap_in_bytes_per_second: float | None = None
    swap_out_bytes_per_second: float | None = None
    pressure_fraction: float | None = None
    """Share of the last 10 s in which some task waited for memory (PSI `some avg10`), 0-1; of the limiting cgroup's tasks
    where there is one that measures it."""
    pressure_full_fraction: float | None = None
    """Share of the last 10 s in which all tasks waited for memory (PSI `full avg10`), 0-1."""
    cached_bytes: int | None = None
    """Page cache (file contents and buffers), shared memory not included: the kernel gives it back when it is needed."""
    dirty_bytes: int | None = None
    """Of it, what must be written to disk first."""
    shared_bytes: int | None = None
    """tmpfs and shared memory: only its owners can give it back."""
    locked_bytes: int | None = None
    """Cannot be swapped out (mlock). What CUDA pins is not counted here by every kernel."""
    huge_pages_total_bytes: int | None = None
    """Set aside by the administrator; taken from the machine whether used or not."""
    huge_pages_free_bytes: int | None = None
    shm_total_bytes: int | None = None
    """/dev/shm, through which data-loader workers pass batches: its limit ..."""
    shm_used_bytes: int | None = None
    shm_fraction: float | None = None
    """... and how full it is."""
    cpu_fraction: float | None = None
    cpu_count: int | None = None
    """Cores that this process may use."""
    load_average: tuple[float, float, float] | None = None
    """Over 1, 5 and 15 minutes."""
    uptime_seconds: float | None = None
    unknown: dict[str, str] = {}


class MachineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All sources read for one tick, under one timestamp (seconds since the epoch)."""

    time: float
    gpus: tuple[GpuSample, ...] = ()
    gpu_note: str | None = None
    """Why there are no GPUs, e.g. "no NVIDIA GPU: libnvidia-ml not found"; None where there are some."""
    gpu_age_seconds: float | None = None
    """How old the GPUs' numbers are where the driver is slow to answer; None while they are fresh."""
    driver_version: str | None = None
    cuda_version: str | None = None
    """The newest CUDA version that the driver supports."""
    jobs: tuple[Job, ...] = ()
    """The GPU processes put together, largest GPU memory first."""
    host: HostSample = HostSample()
