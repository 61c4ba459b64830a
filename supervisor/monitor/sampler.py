"""One sample of the whole machine: GPUs, their processes and the host, under one timestamp."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from memtop.supervisor.monitor.bands import Hysteresis
from memtop.supervisor.monitor.host import HostReader
from memtop.supervisor.monitor.nvml import NvmlReader
from memtop.supervisor.monitor.processes import ProcessDescriber, ProcessFacts
from memtop.supervisor.monitor.strays import KnownRun, judge, own_family
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, HostSample, MachineSnapshot


def no_runs() -> Sequence[KnownRun]:
    """For a sampler that knows of no runs: nothing is stray then."""
    return ()


class Sampler:
    """Samples the machine. One per supervisor or dashboard, called about once a second.

    `runs` is asked only when a process on a GPU carries a run's marker, at most as often as the process lists are read.
    """

    def __init__(
        self,
        runs: Callable[[], Sequence[KnownRun]] = no_runs,
        *,
        nvml: NvmlReader | None = None,
        host: HostReader | None = None,
        describer: ProcessDescriber | None = None,
        clock: Callable[[], float] = time.time,
        own_uid: int | None = None,
    ) -> None:
        self._runs = runs
        self._nvml = nvml or NvmlReader()
        self._host = host or HostReader()
        self._describer = describer or ProcessDescriber()
        self._clock = clock
        self._own_uid = os.getuid() if own_uid is None else own_uid
        self._gauges: dict[str, Hysteresis] = {}
        self._described: dict[int, tuple[tuple[GpuProcess, ...], tuple[GpuProcess, ...]]] = {}

    def sample(self) -> MachineSnapshot:
        """One snapshot; never raises for what the machine says."""
        moment = self._clock()
        reading = self._nvml.read()
        host = self._host.read()
        gpus = self._with_processes(reading.gpus)
        self._forget(gpus)
        return MachineSnapshot(
            time=moment,
            gpus=tuple(self._with_band(gpu) for gpu in gpus),
            gpu_note=reading.note,
            driver_version=reading.driver_version,
            host=self._host_bands(host),
        )

    def close(self) -> None:
        """Let go of the driver."""
        self._nvml.close()

    @property
    def nvml(self) -> NvmlReader:
        """The reader behind the GPUs, for measuring what came back after ending processes."""
        return self._nvml

    def _with_processes(self, gpus: tuple[GpuSample, ...]) -> tuple[GpuSample, ...]:
        """Fill in who the processes are. The reader hands out the same tuple until it has read the lists again."""
        runs: Sequence[KnownRun] | None = None
        protected: frozenset[int] | None = None
        done = []
        for gpu in gpus:
            source, described = self._described.get(gpu.index, ((), ()))
            if source is not gpu.processes:
                facts = [self._describer.describe(row.pid) for row in gpu.processes]
                if runs is None and any(fact.run_folder is not None for fact in facts):
                    runs = self._runs()
                protected = protected or own_family()
                described = tuple(
                    self._process(row, fact, runs or (), protected) for row, fact in zip(gpu.processes, facts, strict=True)
                )
                self._described[gpu.index] = (gpu.processes, described)
            done.append(msgspec.structs.replace(gpu, processes=described))
        return tuple(done)

    def _process(self, row: GpuProcess, facts: ProcessFacts, runs: Sequence[KnownRun], protected: frozenset[int]) -> GpuProcess:
        verdict = judge(facts, row.kind, runs, own_uid=self._own_uid, protected=protected)
        return GpuProcess(
            pid=row.pid,
            user=facts.user,
            name=facts.name,
            command=facts.command,
            used_bytes=row.used_bytes,
            kind=row.kind,
            run=verdict.run,
            stray=verdict.stray,
            reason=verdict.reason,
            choosable=verdict.choosable,
            started=facts.started,
            started_ticks=None if facts.identity is None else facts.identity.started_ticks,
            unknown=row.unknown | facts.unknown,
        )

    def _with_band(self, gpu: GpuSample) -> GpuSample:
        gauge = self._gauges.setdefault(gpu.uuid or f"gpu {gpu.index}", Hysteresis())
        return msgspec.structs.replace(gpu, band=gauge.update(gpu.used_fraction))

    def _host_bands(self, host: HostSample) -> HostSample:
        memory = self._gauges.setdefault("host", Hysteresis())
        swap = self._gauges.setdefault("swap", Hysteresis())
        return msgspec.structs.replace(host, band=memory.update(host.used_fraction), swap_band=swap.update(host.swap_fraction))

    def _forget(self, gpus: tuple[GpuSample, ...]) -> None:
        """Drop what is remembered of processes and GPUs that are gone."""
        self._describer.keep({process.pid for gpu in gpus for process in gpu.processes})
        indices = {gpu.index for gpu in gpus}
        self._described = {index: known for index, known in self._described.items() if index in indices}


def snapshot_json(snapshot: MachineSnapshot) -> dict[str, Any]:
    """The snapshot as plain JSON values: the document of `memtop watch --once --json` without its `runs`."""
    document = msgspec.to_builtins(snapshot)
    assert isinstance(document, dict)
    return document
