"""Samples the machine once a second during a run, for dashboards, the ledger, and the events about
bands. From the samples it measures the GPU memory that the run holds outside torch's allocator."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from memtop.supervisor.monitor.processes.proc import ProcessId, read_stat
from memtop.supervisor.monitor.processes.table import CpuMeter
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.values import Band, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory, placed, ranks_on
from memtop.supervisor.run import explain
from memtop.supervisor.run.processes.host_memory import HostReading, RunMemory, read_host_memory, roles
from memtop.supervisor.run.view import known_runs
from memtop.supervisor.run_memory import RoleMemory

SAMPLE_SECONDS = 1.0
"""How often the machine is sampled."""
# Pause after a failure.
_AGAIN_SECONDS = 5.0
# The run's processes are searched in /proc, and the ledger is written, at every fifth sample.
_RARELY = 5
# Processes of an attempt appear during this time, so they are searched at every sample.
_YOUNG_SECONDS = 60.0


class MachineWatch:
    """The newest snapshot, and the resources of the run's processes."""

    def __init__(
        self,
        runs_dir: Path,
        members: Callable[[], list[ProcessId]],
        attempt_and_ranks: Callable[[], tuple[int, tuple[RankMemory, ...]]],
    ) -> None:
        """`attempt_and_ranks` returns the number of the attempt and its ranks.

        It is called on the event loop only.
        """
        self.machine: MachineSnapshot | None = None
        self.rss_bytes: dict[int, int] = {}
        """By pid, resident bytes of each process of the run; empty if there are none."""
        self.rank_cores: float | None = None
        """How many CPU cores a rank keeps busy, on average. None if not known yet."""
        self.other_cpu_fraction: float | None = None
        """The share of the machine's CPU (0-1) that other programs use. None if not known yet."""
        self.reading = HostReading()
        """What /proc showed about the run's processes at the newest sample."""
        self.roles: dict[int, str] = {}
        """By pid, the role of each process of the run. See `host_memory.ROLES`."""
        self.energy_counters: dict[str, float | None] = {}
        """See `energy_counters`, for the run."""
        self._runs_dir = runs_dir
        self._find_members = members
        self._attempt_and_ranks = attempt_and_ranks
        self._run_memory = RunMemory()
        self._gpu_base = GpuBase()
        self._cpu_meter = CpuMeter()
        self._members: list[ProcessId] = []
        self._bands: dict[str, Band] = {}
        self._attempt = 0
        self._attempt_since = time.monotonic()
        self._sampler: Sampler | None = None
        self._task: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None

    def start(self, on_sample: Callable[[bool], None], on_failure: Callable[[BaseException | None], None]) -> None:
        """Sample in a task until `stop`. After a failure call `on_failure` and start again."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                on_failure(task.exception())
                self._again = loop.call_later(_AGAIN_SECONDS, self.start, on_sample, on_failure)

        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self.run(on_sample))
        self._task.add_done_callback(ended)

    @property
    def run_memory(self) -> tuple[RoleMemory, ...]:
        """Host memory of the run's processes by role. Empty if there are none."""
        return self._run_memory.newest.roles

    @property
    def pss_bytes(self) -> Mapping[int, int]:
        """By pid, the part of each process in `run_memory`."""
        return self._run_memory.newest.pss_bytes

    @property
    def gpu_base_bytes(self) -> dict[str, int]:
        """By GPU uuid: the least memory that the run held outside torch's allocator in this
        attempt."""
        return self._gpu_base.bytes

    @property
    def member_pids(self) -> frozenset[int]:
        """The run's processes when they were last searched."""
        return frozenset(member.pid for member in self._members)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._again is not None:
            self._again.cancel()

    def look_closely(self) -> None:
        """Also read values that are expensive for the driver, for the next 10 s."""
        if self._sampler is not None:
            self._sampler.nvml.want_pcie()

    async def run(self, on_sample: Callable[[bool], None]) -> None:
        """Sample forever.

        `on_sample(keep)` is called after each sample. `keep`: write this one to the ledger.
        """
        sampler = self._sampler = Sampler(lambda: known_runs(self._runs_dir))
        count = 0
        while True:
            started = time.monotonic()
            rarely = count % _RARELY == 0
            # A slow driver must not delay reports or commands.
            await asyncio.to_thread(self._sample, sampler, rarely, *self._attempt_and_ranks())
            on_sample(rarely)
            count += 1
            await asyncio.sleep(max(0.1, SAMPLE_SECONDS - (time.monotonic() - started)))

    def _sample(self, sampler: Sampler, rarely: bool, attempt: int, ranks: tuple[RankMemory, ...]) -> None:
        now = time.monotonic()
        if attempt != self._attempt:
            self._attempt, self._attempt_since = attempt, now
        if rarely or now - self._attempt_since < _YOUNG_SECONDS:
            self._members = self._find_members()
            self.roles = roles([member.pid for member in self._members], {rank.pid for rank in ranks})
        self.machine = sampler.sample()
        rows = [row for member in self._members if (row := read_stat(member.pid)) is not None and row.identity == member]
        living = [row.identity for row in rows if not row.is_dead]
        self.rss_bytes = {row.identity.pid: row.rss_bytes for row in rows} if living else {}
        rank_pids = {rank.pid for rank in ranks}
        of_ranks = rank_pids | {pid for pid, role in self.roles.items() if role == "rank"}
        cores = self._cpu_meter.update(rows, time.monotonic())
        by_rank = [busy for member, busy in cores.items() if member.pid in of_ranks]
        self.rank_cores = sum(by_rank) / len(by_rank) if by_rank else None
        self.other_cpu_fraction = None
        if cores and (used := self.machine.host.cpu_fraction) is not None and (count := os.cpu_count()) is not None:
            self.other_cpu_fraction = max(0.0, used - sum(cores.values()) / count)
        self.reading = read_host_memory(of_ranks.union(self.roles), of_ranks)
        self._gpu_base.update(attempt, self.machine, ranks, {member.pid for member in living})
        self._run_memory.update(living, rank_pids)
        self.energy_counters = energy_counters(self.machine, ranks if living else (), {member.pid for member in living})

    def crossings(self) -> list[str]:
        """One line for each gauge whose band has changed since the last call.

        An unknown band is no change: the next known band is compared with the last known one."""
        if self.machine is None:
            return []
        lines = []
        for gauge, band, text in explain.bands(self.machine):
            if band is Band.UNKNOWN:
                continue
            before = self._bands.get(gauge)
            self._bands[gauge] = band
            if before is not None and before != band:
                lines.append(f"{gauge}: {before.value} -> {band.value}, {text}")
        return lines


def energy_counters(machine: MachineSnapshot, ranks: Iterable[RankMemory], pids: Collection[int]) -> dict[str, float | None]:
    """Joules that each GPU with a rank or with one of these processes has counted, by uuid; None if
    the GPU has no counter."""
    ranks = placed(ranks, machine.gpus)
    return {
        gpu.uuid: gpu.details.energy_joules
        for gpu in machine.gpus
        if gpu.uuid is not None and (ranks_on(gpu, ranks) or any(row.pid in pids and not row.gone for row in gpu.processes))
    }


# How much older than the snapshot the driver's process list may be, in seconds, with a margin for
# clock differences.
_LIST_AGE = 3.0


class _Steady(msgspec.Struct):
    """A GPU whose ranks have reported the same number of reserved bytes repeatedly."""

    reserved: int
    since: float
    """When they first reported it, in seconds since the epoch."""
    candidate: int | None = None
    """Memory outside the allocators at the time `seen`. It counts once the ranks have reported the
    same number later."""
    seen: float = 0.0


class GpuBase:
    """The least value in one attempt, by uuid of the GPU or MIG instance.

    The driver's list and the ranks' reports are from different moments, and a wrong minimum would
    never be corrected. So a list counts only if every rank on the GPU reported the same number of
    reserved bytes before and after it.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._attempt: int | None = None
        self._steady: dict[str, _Steady] = {}

    def update(self, attempt: int, machine: MachineSnapshot, ranks: Iterable[RankMemory], pids: Collection[int]) -> None:
        """Add a sample. `pids` are the run's processes. A new attempt starts over."""
        if attempt != self._attempt:
            self._attempt, self._steady, self.bytes = attempt, {}, {}
        ranks = placed(ranks, machine.gpus)
        mine = {*pids, *(rank.pid for rank in ranks)}
        for gpu in machine.gpus:
            for mig in gpu.mig or (None,):
                uuid = gpu.uuid if mig is None else mig.uuid
                here = ranks_on(gpu, ranks, mig=mig)
                rows = [
                    row
                    for row in gpu.processes
                    if row.pid in mine and not row.gone and (mig is None or row.mig_instance == mig.position)
                ]
                if uuid is None or not here or not {rank.pid for rank in here} <= {row.pid for row in rows}:
                    continue
                held, times = [row.used_bytes for row in rows], [rank.time for rank in here]
                reserved = [rank.reserved_bytes for rank in here]
                if None in held or None in times or None in reserved:
                    continue
                self._look(
                    uuid,
                    sum(number for number in held if number is not None),
                    sum(number for number in reserved if number is not None),
                    [time for time in times if time is not None],
                    machine.time,
                    machine.gpu_age_seconds or 0.0,
                )

    def _look(self, uuid: str, held: int, reserved: int, times: list[float], now: float, age: float) -> None:
        steady = self._steady.get(uuid)
        if steady is None or steady.reserved != reserved or held < reserved:
            # The allocator has freed memory since the report.
            self._steady[uuid] = _Steady(reserved, max(now, *times))
            return
        if steady.candidate is not None and min(times) > steady.seen:
            self.bytes = self.bytes | {uuid: min(steady.candidate, self.bytes.get(uuid, steady.candidate))}
            steady.candidate = None
        if now - age - _LIST_AGE >= steady.since:
            outside = held - reserved
            steady.candidate = outside if steady.candidate is None else min(outside, steady.candidate)
            steady.seen = now
