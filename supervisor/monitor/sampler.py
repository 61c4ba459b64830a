"""Takes samples of the whole machine: GPUs, their processes and the host, with one time stamp."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from memtop.supervisor.monitor.host import HostReader
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.nvml.thread import PATIENCE_SECONDS, DriverThread
from memtop.supervisor.monitor.process_watch import ProcessWatch
from memtop.supervisor.monitor.processes.facts import ProcessDescriber
from memtop.supervisor.monitor.strays import KnownRun
from memtop.supervisor.monitor.values import Band, GpuSample, HostSample, Hysteresis, MachineSnapshot


def no_runs() -> Sequence[KnownRun]:
    """For a sampler without runs. No process is a stray then."""
    return ()


class Sampler:
    """Samples the machine, about once a second. Each supervisor and each dashboard has one.

    `runs` is called only while a GPU process may belong to a run, because it is this user's or has
    a run's marker, and at most as often as process lists are read. `patience`: seconds that a
    sample waits for the driver; a single sample should wait longer than one of many. `wake`: wake
    sleeping GPUs, for callers that are about to use them.
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
        monotonic: Callable[[], float] = time.monotonic,
        patience: float = PATIENCE_SECONDS,
        wake: bool = False,
    ) -> None:
        self._nvml = nvml or NvmlReader(wake=wake)
        self._driver = DriverThread(self._nvml, patience=patience)
        self._host = host or HostReader()
        self._clock = clock
        self._watch = ProcessWatch(
            runs,
            describer or ProcessDescriber(),
            own_uid=os.getuid() if own_uid is None else own_uid,
            monotonic=monotonic,
        )
        self._gauges: dict[str, Hysteresis] = {}
        self._memory_gauge, self._swap_gauge = Hysteresis(), Hysteresis()

    def sample(self) -> MachineSnapshot:
        """One snapshot.

        Never raises for errors of the machine, and waits for the driver at most `patience` seconds.
        """
        moment = self._clock()
        reading, age = self._driver.read()
        host = self._host.read()
        gpus, jobs = self._watch.fill(reading.gpus)
        return MachineSnapshot(
            time=moment,
            gpus=self._with_bands(gpus),
            gpu_note=reading.note,
            gpu_age_seconds=age,
            driver_version=reading.driver_version,
            cuda_version=reading.cuda_version,
            jobs=jobs,
            host=self._host_bands(host),
        )

    def close(self) -> None:
        """Close the driver."""
        self._driver.close()

    @property
    def nvml(self) -> NvmlReader:
        """The reader of the GPUs."""
        return self._nvml

    def _with_bands(self, gpus: tuple[GpuSample, ...]) -> tuple[GpuSample, ...]:
        """The GPUs and their MIG instances with their bands."""
        before, self._gauges = self._gauges, {}  # forget MIG instances that no longer exist

        def band(key: str, fraction: float | None) -> Band:
            gauge = self._gauges[key] = before.get(key) or Hysteresis()
            return gauge.update(fraction)

        done = []
        for gpu in gpus:
            key = gpu.uuid or f"gpu {gpu.index}"
            mig = tuple(
                msgspec.structs.replace(one, band=band(one.uuid or f"{key} mig {one.position}", one.used_fraction))
                for one in gpu.mig
            )
            done.append(msgspec.structs.replace(gpu, band=band(key, gpu.used_fraction), mig=mig))
        return tuple(done)

    def _host_bands(self, host: HostSample) -> HostSample:
        memory, swap = self._memory_gauge, self._swap_gauge
        return msgspec.structs.replace(host, band=memory.update(host.used_fraction), swap_band=swap.update(host.swap_fraction))


def snapshot_json(snapshot: MachineSnapshot) -> dict[str, Any]:
    """The snapshot as plain JSON values: the document of `memtop watch --once --json` without its
    `runs`."""
    document = msgspec.to_builtins(snapshot)
    assert isinstance(document, dict)
    return document
