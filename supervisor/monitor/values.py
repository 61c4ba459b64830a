"""One sample of the machine. The field names are the public JSON of `memtop watch --once --json`.

Units: bytes, seconds, watts, degrees Celsius, megahertz, fractions 0-1. An unknown value is None,
never 0, and `unknown` maps the name of its field to the reason. The safety bands are here too, and
questions about a whole snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from memtop.supervisor import units


class Band(str, Enum):
    """How safe a memory fraction is: safe below 85 %, edge from 85 % to 90 %, danger above 90 %."""

    SAFE = "safe"
    EDGE = "edge"
    DANGER = "danger"
    UNKNOWN = "unknown"


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process on one GPU. The driver reports `pid` in the host's pid namespace."""

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
    """The process provably belongs to a memtop run that is over."""
    reason: str | None = None
    """Why memtop considers it a stray or not, or why that is unknown."""
    choosable: bool = False
    """This user may end it from memtop: same user, not graphics, no system process, not memtop
    itself."""
    started: float | None = None
    """Start time, seconds since the epoch."""
    started_ticks: int | None = None
    """The exact start time in clock ticks since boot. Together with `pid` it identifies the process
    for signals."""
    parent_pid: int | None = None
    sm_fraction: float | None = None
    """Share of the driver's last samples in which this process kept the multiprocessors busy."""
    memory_bandwidth_fraction: float | None = None
    encoder_fraction: float | None = None
    decoder_fraction: float | None = None
    host_rss_bytes: int | None = None
    host_cpu_fraction: float | None = None
    """CPU time since the last sample as a fraction of one core: 2.0 is two cores."""
    container: str | None = None
    """The container or pod in which it runs, e.g. `docker 3f2a9c1b7d10`, `pod training/qwen-0`.
    None if it is in none."""
    job: str | None = None
    """Key of its job in `MachineSnapshot.jobs`."""
    role: str | None = None
    """Its role in the job: launcher | rank N | loader worker | process."""
    mig_instance: int | None = None
    """Position of the MIG instance on which it runs. None without MIG."""
    gone: bool = False
    """The driver still lists memory under this pid, but the process has ended. This is proven,
    because we see all pids.

    A zombie, which its parent has not collected, has ended, too.
    """
    unknown: dict[str, str] = {}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that belong together: a launcher, its ranks and their loader workers, or a single
    program."""

    key: str
    """Does not change while the job runs, e.g. `run qwen-sft`, `pid 4242@183001`."""
    name: str
    """The name of the run, or of the program's script."""
    run: str | None = None
    user: str | None = None
    leader_pid: int
    """The topmost process of the job."""
    pids: tuple[int, ...] = ()
    """All its living processes that we can see, including those without a GPU. The leader is
    first."""
    roles: dict[str, int] = {}
    """Number of processes by role: {"launcher": 1, "rank": 2, "loader worker": 8}."""
    gpu_indices: tuple[int, ...] = ()
    used_bytes: int | None = None
    """GPU memory of all its processes on all GPUs. None if a part of it is not known."""
    used_at_least_bytes: int | None = None
    """The sum of the parts that are known. None if no part is known."""
    host_rss_bytes: int | None = None
    host_cpu_fraction: float | None = None
    started: float | None = None
    unknown: dict[str, str] = {}


class GpuTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the driver reported: an Xid, an ECC error, a change of the recovery action."""

    time: float
    """Seconds since the epoch."""
    kind: str
    """xid | ecc | recovery | lost | returned"""
    code: int | None = None
    """The Xid's number."""
    message: str
    """What it means and what to do."""
    fault_of_program: bool = False
    """A program caused it (Xid 13, 31, 43, 45), and the card is not damaged."""


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG instance of a GPU.

    It has its own memory and processes. The driver reports no utilisation for it.
    """

    position: int
    """The driver's index of the instance within its GPU. There may be gaps."""
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

    @property
    def taken_bytes(self) -> int | None:
        return _taken(self)


class GpuDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Values that change slowly or never. They are read every 5 s or once."""

    memory_temperature_celsius: float | None = None
    slowdown_temperature_celsius: float | None = None
    """The temperature at which the card reduces its clocks."""
    fan_fraction: float | None = None
    sm_clock_megahertz: int | None = None
    sm_clock_limit_megahertz: int | None = None
    memory_clock_megahertz: int | None = None
    memory_clock_limit_megahertz: int | None = None
    performance_state: str | None = None
    """P0 (fastest) to P15."""
    throttle_reasons: tuple[str, ...] | None = None
    """Why the clocks are reduced now. Empty if they are not; an idle card's low clocks do not
    count."""
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
    """On cards before Ampere: memory pages out of use because of double-bit errors or many
    single-bit errors."""
    recovery_action: str | None = None
    """What the driver recommends for the card. None if it needs nothing or this is unknown (see
    `unknown`)."""
    pcie_generation: int | None = None
    pcie_generation_limit: int | None = None
    pcie_width: int | None = None
    pcie_width_limit: int | None = None
    pcie_sent_bytes_per_second: float | None = None
    """Sent by the GPU. Read in a separate thread, because the driver needs 20 ms for each value."""
    pcie_received_bytes_per_second: float | None = None
    nvlink_links: int | None = None
    """Number of active links. None if the card has none or this is unknown (see `unknown`)."""
    nvlink_sent_bytes_per_second: float | None = None
    nvlink_received_bytes_per_second: float | None = None
    bar1_total_bytes: int | None = None
    bar1_used_bytes: int | None = None
    """BAR1 is the CPU's window into the card's memory, not additional memory: never add it to
    VRAM."""
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
    """N of /dev/nvidiaN, the device that a process on this GPU has open."""
    sm_active_fraction: float | None = None
    """Average share of multiprocessors that had work (Hopper and newer)."""
    tensor_active_fraction: float | None = None
    """Share of time in which the tensor cores worked (Hopper and newer). Utilisation only shows
    that a kernel ran."""
    unknown: dict[str, str] = {}


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment.

    `used_bytes` excludes the driver's reserve if that is known (NVML memory info v2).
    """

    index: int
    """The driver's index, as in nvidia-smi. CUDA's number may differ.

    A GPU that the driver no longer lists keeps its index, or gets the next free one; `error` says
    so.
    """
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    """e.g. `00000000:65:00.0`"""
    visible_index: int | None = None
    """CUDA's number (`cuda:N`) with memtop's CUDA_VISIBLE_DEVICES. None if hidden or if the
    variable is not set."""
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    used_fraction: float | None = None
    """(total - free) / total: the share that cannot be allocated any more, including the driver's
    reserve."""
    band: Band = Band.UNKNOWN
    unified: bool = False
    """The GPU shares the machine's RAM (GB10, Jetson). Then total, free and band are those of the
    RAM.

    `used_bytes` is what GPU processes hold of it, `other_pool_bytes` what the rest of the machine
    holds.
    """
    other_pool_bytes: int | None = None
    utilization_fraction: float | None = None
    memory_utilization_fraction: float | None = None
    """Share of time in which memory was read or written. It does not depend on how much memory is
    used."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    error: str | None = None
    """Why the whole GPU cannot be read (lost, reset required, ...) and what to do. None if it can
    be read."""
    processes: tuple[GpuProcess, ...] = ()
    mig: tuple[MigInstance, ...] = ()
    troubles: tuple[GpuTrouble, ...] = ()
    """The newest events since memtop started, oldest first. At most eight."""
    details: GpuDetails = GpuDetails()
    unknown: dict[str, str] = {}

    @property
    def taken_bytes(self) -> int | None:
        """The bytes behind `used_fraction`: all that is not free. So it includes the driver's
        reserve, and with unified memory what the rest of the machine holds."""
        return _taken(self)


def _taken(memory: GpuSample | MigInstance) -> int | None:
    if memory.total_bytes is None or memory.free_bytes is None:
        return memory.used_bytes
    return memory.total_bytes - memory.free_bytes


class HostSample(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory at one moment.

    With a cgroup limit below the machine's RAM, fraction and band refer to the limit.
    """

    total_bytes: int | None = None
    used_bytes: int | None = None
    """total - available. In a limited cgroup: the cgroup's usage less its inactive file cache."""
    available_bytes: int | None = None
    used_fraction: float | None = None
    band: Band = Band.UNKNOWN
    limit_bytes: int | None = None
    """The cgroup's memory limit. None if there is none below the machine's total."""
    limit_path: str | None = None
    """The cgroup that sets the limit."""
    limit_swap_bytes: int | None = None
    """How much swap the cgroup allows. None if it does not limit swap."""
    limit_throttle_bytes: int | None = None
    """memory.high. Above it the kernel slows the group down."""
    oom_kills: int | None = None
    """Number of processes that the kernel has ever OOM-killed in this cgroup and those below it."""
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    swap_fraction: float | None = None
    swap_band: Band = Band.UNKNOWN
    swap_in_bytes_per_second: float | None = None
    swap_out_bytes_per_second: float | None = None
    pressure_fraction: float | None = None
    """Share of the last 10 s in which some task waited for memory (PSI `some avg10`), 0-1.

    Counts the tasks of the limiting cgroup if it measures this, else those of the machine.
    """
    pressure_full_fraction: float | None = None
    """Share of the last 10 s in which all tasks waited for memory (PSI `full avg10`), 0-1."""
    cached_bytes: int | None = None
    """Page cache (file contents and buffers) without shared memory. The kernel frees it when memory
    is needed."""
    dirty_bytes: int | None = None
    """The part of the cache that must be written to disk first."""
    shared_bytes: int | None = None
    """tmpfs and shared memory. Only its owners can free it."""
    locked_bytes: int | None = None
    """Memory that cannot be swapped out (mlock). Not every kernel counts memory that CUDA has
    pinned."""
    huge_pages_total_bytes: int | None = None
    """Reserved by the administrator, and not available for anything else even if unused."""
    huge_pages_free_bytes: int | None = None
    shm_total_bytes: int | None = None
    """The limit of /dev/shm, which data-loader workers use to pass batches."""
    shm_used_bytes: int | None = None
    shm_fraction: float | None = None
    cpu_fraction: float | None = None
    cpu_count: int | None = None
    """Cores that this process may use."""
    load_average: tuple[float, float, float] | None = None
    """Over 1, 5 and 15 minutes."""
    uptime_seconds: float | None = None
    unknown: dict[str, str] = {}


class MachineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All values of one sample, with one time stamp (seconds since the epoch)."""

    time: float
    gpus: tuple[GpuSample, ...] = ()
    gpu_note: str | None = None
    """Why there are no GPUs, e.g. "no NVIDIA GPU: no NVIDIA driver found". None if there are
    some."""
    gpu_age_seconds: float | None = None
    """How old the GPUs' numbers are, if the driver is slow. None while they are fresh."""
    driver_version: str | None = None
    cuda_version: str | None = None
    """The newest CUDA version that the driver supports."""
    jobs: tuple[Job, ...] = ()
    """The GPU processes grouped into jobs, largest GPU memory first."""
    host: HostSample = HostSample()


EDGE_FROM = 0.85
"""Lowest fraction of the edge band (inclusive)."""
DANGER_ABOVE = 0.90
"""Highest fraction of the edge band (inclusive). Above it is danger."""

_MARKS = {Band.SAFE: "·", Band.EDGE: "^", Band.DANGER: "!!", Band.UNKNOWN: "?"}


def band_of(fraction: float | None) -> Band:
    """The band of a fraction (0-1) without hysteresis: safe < 0.85 <= edge <= 0.90 < danger."""
    if fraction is None or fraction != fraction:
        return Band.UNKNOWN
    if fraction < EDGE_FROM:
        return Band.SAFE
    return Band.DANGER if fraction > DANGER_ABOVE else Band.EDGE


def mark(band: Band) -> str:
    """The sign shown next to the colour, so that a band can be recognized without colours."""
    return _MARKS[band]


def only_gpus(snapshot: MachineSnapshot, indices: Collection[int]) -> MachineSnapshot:
    """The snapshot with only these GPUs, the processes on them, and the jobs of these processes.

    A job that also uses other GPUs keeps only the GPU memory that it holds on these. Its processes
    and its host memory stay complete, because they cannot be divided among GPUs.
    """
    gpus = tuple(gpu for gpu in snapshot.gpus if gpu.index in indices)
    if len(gpus) == len(snapshot.gpus):
        return snapshot
    held: dict[str, list[GpuProcess]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            if process.job is not None:
                held.setdefault(process.job, []).append(process)
    jobs = [_part_of(job, held[job.key], indices) for job in snapshot.jobs if job.key in held]
    jobs.sort(key=lambda job: (-(job.used_bytes or 0), job.key))
    note = snapshot.gpu_note
    if not gpus:
        listed = ", ".join(str(gpu.index) for gpu in snapshot.gpus)
        note = f"GPU {', '.join(map(str, sorted(indices)))}: the driver does not list it now, only GPU {listed}"
    return msgspec.structs.replace(snapshot, gpus=gpus, jobs=tuple(jobs), gpu_note=note)


def _part_of(job: Job, rows: list[GpuProcess], indices: Collection[int]) -> Job:
    here = tuple(index for index in job.gpu_indices if index in indices)
    if here == job.gpu_indices:
        return job
    held = held_by(rows)
    unknown = {name: reason for name, reason in job.unknown.items() if name != "used_bytes"} | held.unknown
    return msgspec.structs.replace(
        job, gpu_indices=here, used_bytes=held.used_bytes, used_at_least_bytes=held.at_least_bytes, unknown=unknown
    )


class Held(NamedTuple):
    """The GPU memory of several processes: the sum, the sum of what is known, and why that is not
    all."""

    used_bytes: int | None
    at_least_bytes: int | None
    unknown: dict[str, str]


def held_by(rows: Sequence[GpuProcess]) -> Held:
    """The GPU memory of these processes."""
    sizes = [row.used_bytes for row in rows if row.used_bytes is not None]
    known = sum(sizes)
    if len(sizes) == len(rows):
        return Held(known, known, {})
    reason = next(filter(None, (row.unknown.get("used_bytes") for row in rows)), "the driver does not report all of it")
    return Held(None, known if sizes else None, {"used_bytes": reason})


def why_incomplete(machine: MachineSnapshot) -> list[str]:
    """Why GPU processes may be missing from the snapshot, one sentence for each reason.

    Empty if all are listed.
    """
    if not machine.gpus:
        return [machine.gpu_note or "no GPU"]
    found = [f"GPU {gpu.index}: {why}" for gpu in machine.gpus if (why := why_incomplete_on(gpu))]
    if machine.gpu_age_seconds is not None:
        age = units.duration(machine.gpu_age_seconds)
        found.append(f"the driver has not answered for {age}: the list is that old")
    return found


def why_incomplete_on(gpu: GpuSample) -> str:
    """Why processes may be missing from one GPU's list. Empty if the list is complete."""
    if gpu.error:
        return f"its processes are not known: {gpu.error}"
    reason = gpu.unknown.get("processes")
    return f"not all of its processes are known: {reason}" if reason else ""
