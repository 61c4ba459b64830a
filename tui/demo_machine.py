"""The machine of the demo: GPUs, their processes and the host's memory. Every number is invented."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import NamedTuple

from memtop.supervisor import units
from memtop.supervisor.monitor.bands import band_of
from memtop.supervisor.monitor.values import (
    GpuDetails,
    GpuProcess,
    GpuSample,
    GpuTrouble,
    HostSample,
    Job,
    MachineSnapshot,
)

GIB = units.GIB
MIB = 1024**2
CARD = int(19.6 * GIB)
HOST = int(31.2 * GIB)
CONTEXT_BYTES = int(0.32 * GIB)
_IN_PROCESS_BYTES = int(0.1 * GIB)
_RESERVED = int(0.3 * GIB)
RUN_SHM_BYTES = int(0.4 * GIB)
LEAK_BYTES_PER_TICK = int(5.2 * MIB)
LEAK_ENDS_TICK = 600
TRAINER_PID = 41_205
RANK_PID = 41_210
_ELSEWHERE = "the driver of this card does not tell it"


class Holding(NamedTuple):
    """GiB that a rank's allocator has on its card: in tensors, and reserved but free."""

    allocated: float
    cached: float


class Moment(NamedTuple):
    """All that the picture of one tick depends on."""

    tick: int
    start: float
    training: bool
    over: bool
    holdings: Sequence[Holding]
    ended_pids: Set[int]


def invent(now: Moment) -> MachineSnapshot:
    """The whole machine at one tick."""
    gpus = tuple(_gpu(now, index) for index in range(len(now.holdings)))
    return MachineSnapshot(
        time=now.start + now.tick,
        gpus=gpus,
        gpu_note=None if gpus else "no NVIDIA GPU: libnvidia-ml not found",
        driver_version="570.86" if gpus else None,
        cuda_version="12.8" if gpus else None,
        jobs=_jobs(now, gpus),
        host=_host(now),
    )


def demo_uuid(index: int) -> str:
    return f"GPU-{(0x5F1C + index * 0x3B17) & 0xFFFF:04x}{index:04x}-0000-0000-0000-000000000000"


def wave(tick: float, period: float) -> float:
    """A wiggle between -1 and 1 that does not repeat visibly."""
    return (math.sin(tick / period * 2 * math.pi) + math.sin(tick / period * 3.7)) / 2


def host_own_bytes(tick: int) -> int:
    """What the demo's run takes of the host's memory: its loader workers leak for a while."""
    return int((8.4 + 0.3 * wave(tick, 30)) * GIB) + LEAK_BYTES_PER_TICK * min(tick, LEAK_ENDS_TICK)


def _gpu(now: Moment, index: int) -> GpuSample:
    processes = [p for p in _processes(now, index) if p.pid not in now.ended_pids]
    used = sum(p.used_bytes or 0 for p in processes)
    fraction = (used + _RESERVED) / CARD
    power = 211 + 6 * wave(now.tick + index, 6) if now.training else 28
    return GpuSample(
        index=index,
        uuid=demo_uuid(index),
        name="NVIDIA RTX A4500",
        pci_bus_id=f"00000000:{0x17 + 0x2E * index & 0xFF:02X}:00.0",
        total_bytes=CARD,
        used_bytes=used,
        free_bytes=CARD - used - _RESERVED,
        reserved_bytes=_RESERVED,
        used_fraction=fraction,
        band=band_of(fraction),
        utilization_fraction=0.94 + 0.04 * wave(now.tick + index, 4) if now.training else 0.0,
        memory_utilization_fraction=0.61 + 0.05 * wave(now.tick + index, 5) if now.training else 0.0,
        temperature_celsius=62 + 3 * index % 9 if now.training else 44,
        power_watts=power,
        power_limit_watts=230,
        processes=tuple(processes),
        troubles=_troubles(now, index),
        details=_details(now, index),
    )


def _troubles(now: Moment, index: int) -> tuple[GpuTrouble, ...]:
    if index != 1:
        return ()
    message = "a program touched memory that it does not own; the program ends, the card is sound"
    return (GpuTrouble(time=now.start - 700, kind="xid", code=31, message=message, fault_of_program=True),)


def _details(now: Moment, index: int) -> GpuDetails:
    lively = now.training
    return GpuDetails(
        slowdown_temperature_celsius=98,
        fan_fraction=0.48 if lively else 0.3,
        sm_clock_megahertz=1650 + round(15 * wave(now.tick, 8)) if lively else 210,
        sm_clock_limit_megahertz=2100,
        memory_clock_megahertz=8001 if lively else 405,
        memory_clock_limit_megahertz=8001,
        performance_state="P2" if lively else "P8",
        throttle_reasons=("power limit reached",) if lively and index == 0 else (),
        ecc_mode="on",
        ecc_corrected_errors=0,
        ecc_uncorrected_errors=0,
        remapped_rows_correctable=0,
        remapped_rows_uncorrectable=0,
        remapping_pending=False,
        remapping_failed=False,
        pcie_generation=4,
        pcie_generation_limit=4,
        pcie_width=16,
        pcie_width_limit=16,
        pcie_sent_bytes_per_second=(240 + 60 * wave(now.tick, 3)) * MIB if lively else 0.0,
        pcie_received_bytes_per_second=(310 + 80 * wave(now.tick, 4)) * MIB if lively else 0.0,
        bar1_total_bytes=256 * MIB,
        bar1_used_bytes=5 * MIB,
        encoder_fraction=0.0,
        decoder_fraction=0.0,
        energy_joules=7.2e6 + now.tick * 211,
        persistence_mode=True,
        compute_mode="default",
        display_active=index == 0,
        display_connected=index == 0,
        mig_mode=False,
        compute_capability="8.6",
        unknown={
            "memory_temperature_celsius": "not supported by this card",
            "retired_pages": "this card remaps rows instead",
            "recovery_action": _ELSEWHERE,
            "nvlink_links": "this card has none",
            "sm_active_fraction": "needs a Hopper card or newer",
            "tensor_active_fraction": "needs a Hopper card or newer",
        },
    )


def _processes(now: Moment, index: int) -> list[GpuProcess]:
    found = [] if now.over else [_rank(now, index)]
    if index == 0:
        found += [_xorg(now), _notebook(now)]
    if index == 1:
        found.append(_stray(now))
    return found


def _rank(now: Moment, index: int) -> GpuProcess:
    holding = now.holdings[index]
    return GpuProcess(
        pid=RANK_PID + index,
        user="ada",
        name="python",
        command="python train.py --config qwen-sft",
        used_bytes=int((holding.allocated + holding.cached) * GIB) + CONTEXT_BYTES + _IN_PROCESS_BYTES,
        run="qwen-sft",
        reason="belongs to run qwen-sft, which is alive",
        started=now.start - 1320,
        started_ticks=RANK_PID + index,
        parent_pid=TRAINER_PID,
        sm_fraction=0.93 + 0.04 * wave(now.tick + index, 4) if now.training else 0.0,
        memory_bandwidth_fraction=0.60 + 0.05 * wave(now.tick + index, 5) if now.training else 0.0,
        encoder_fraction=0.0,
        decoder_fraction=0.0,
        host_rss_bytes=int((4.1 + 0.1 * wave(now.tick + index, 30)) * GIB),
        host_cpu_fraction=1.02 + 0.05 * wave(now.tick + index, 7),
        job="run qwen-sft",
        role=f"rank {index}",
    )


def _xorg(now: Moment) -> GpuProcess:
    return GpuProcess(
        pid=2_214,
        user="root",
        name="Xorg",
        command="/usr/lib/xorg/Xorg :0",
        used_bytes=int(0.2 * GIB),
        kind="graphics",
        reason="belongs to root",
        started=now.start - 900_000,
        started_ticks=2_214,
        parent_pid=2_200,
        host_rss_bytes=int(0.1 * GIB),
        host_cpu_fraction=0.01,
        job="pid 2214@2214",
        role="process",
        unknown={
            "sm_fraction": "the driver has no sample of it",
            "memory_bandwidth_fraction": "the driver has no sample of it",
        },
    )


def _notebook(now: Moment) -> GpuProcess:
    return GpuProcess(
        pid=38_112,
        user="grace",
        name="python3",
        command="python3 -m ipykernel_launcher -f kernel-5f.json",
        used_bytes=int(0.35 * GIB),
        reason="belongs to grace",
        started=now.start - 26_000,
        started_ticks=38_112,
        parent_pid=38_040,
        sm_fraction=0.0,
        memory_bandwidth_fraction=0.0,
        host_rss_bytes=int(1.2 * GIB),
        host_cpu_fraction=0.02,
        container="docker 3f2a9c1b7d10",
        job="pid 38112@38112",
        role="process",
    )


def _stray(now: Moment) -> GpuProcess:
    return GpuProcess(
        pid=39_874,
        user="ada",
        name="python",
        command="python train.py --config qwen-old",
        used_bytes=int(0.9 * GIB),
        run="qwen-old",
        stray=True,
        choosable=True,
        reason="left over from run qwen-old, which ended",
        started=now.start - 9_400,
        started_ticks=39_874,
        parent_pid=1,
        sm_fraction=0.0,
        memory_bandwidth_fraction=0.0,
        host_rss_bytes=int(2.2 * GIB),
        host_cpu_fraction=0.0,
        job="run qwen-old",
        role="rank 1",
    )


def _jobs(now: Moment, gpus: Sequence[GpuSample]) -> tuple[Job, ...]:
    by_job: dict[str, list[tuple[int, GpuProcess]]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            by_job.setdefault(process.job or "", []).append((gpu.index, process))
    jobs = [_job(now, key, members) for key, members in by_job.items()]
    return tuple(sorted(jobs, key=lambda job: -(job.used_bytes or 0)))


def _job(now: Moment, key: str, members: Sequence[tuple[int, GpuProcess]]) -> Job:
    first = members[0][1]
    pids = tuple(process.pid for _, process in members)
    roles = {"process": len(members)}
    leader, rss, cpu = (
        first.pid,
        sum(p.host_rss_bytes or 0 for _, p in members),
        sum(p.host_cpu_fraction or 0 for _, p in members),
    )
    if key == "run qwen-sft":
        workers = tuple(range(41_300, 41_300 + 4 * len(members)))
        leader, pids = TRAINER_PID, (TRAINER_PID, *pids, *workers)
        roles = {"launcher": 1, "rank": len(members), "loader worker": len(workers)}
        rss, cpu = int(host_own_bytes(now.tick) * 1.1), cpu + 0.6 * len(workers)
    elif key.startswith("run "):
        roles = {"rank": len(members)}
    return Job(
        key=key,
        name=first.run or (first.name or "?"),
        run=first.run,
        user=first.user,
        leader_pid=leader,
        pids=pids,
        roles=roles,
        gpu_indices=tuple(sorted({index for index, _ in members})),
        used_bytes=sum(p.used_bytes or 0 for _, p in members),
        host_rss_bytes=rss,
        host_cpu_fraction=cpu,
        started=first.started,
    )


def _host(now: Moment) -> HostSample:
    used = int(host_own_bytes(now.tick) + 12.4 * GIB + min(3.0, now.tick * 0.012) * GIB)
    fraction = used / HOST
    shm = RUN_SHM_BYTES + int(0.2 * GIB)
    return HostSample(
        total_bytes=HOST,
        used_bytes=used,
        available_bytes=HOST - used,
        used_fraction=fraction,
        band=band_of(fraction),
        swap_total_bytes=4 * GIB,
        swap_used_bytes=GIB // 2,
        swap_fraction=0.125,
        swap_band=band_of(0.125),
        swap_in_bytes_per_second=0.0,
        swap_out_bytes_per_second=0.0,
        pressure_fraction=0.002,
        pressure_full_fraction=0.0,
        cached_bytes=min(int(4.2 * GIB), HOST - used),
        dirty_bytes=12 * MIB,
        shared_bytes=shm,
        locked_bytes=16 * MIB,
        huge_pages_total_bytes=0,
        huge_pages_free_bytes=0,
        shm_total_bytes=HOST // 2,
        shm_used_bytes=shm,
        shm_fraction=shm / (HOST // 2),
        cpu_fraction=0.43 + 0.05 * wave(now.tick, 11),
        cpu_count=16,
        load_average=(7.1, 6.8, 6.2),
        uptime_seconds=900_200.0 + now.tick,
        unknown={"oom_kills": "memtop is in no cgroup with a memory limit"},
    )
