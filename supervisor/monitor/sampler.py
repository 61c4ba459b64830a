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
from memtop.supervisor.monitor.values import DANGER_ABOVE, EDGE_FROM, Band, GpuSample, HostSample, MachineSnapshot, band_of

_MARGIN = 0.01
"""How far a value must be past a border for the band to change at once, as a fraction."""
_STAY_SAMPLES = 3
"""After this many samples in a row past a border, the band changes even within the margin."""

_ORDER = (Band.SAFE, Band.EDGE, Band.DANGER)
_BORDERS = (EDGE_FROM, DANGER_ABOVE)
# 0.91 - 0.90 is 0.010000000000000009 and 0.90 - 0.89 is 0.0099999...: both must count as one
# percentage point.
_ROUNDING = 1e-9


def no_runs() -> Sequence[KnownRun]:
    """For a sampler without runs. No process is a stray then."""
    return ()


class Sampler:
    """Samples the machine, about once a second. Each supervisor and each dashboard has one.

    `runs` is called at most as often as process lists are read, and only while a GPU process may
    belong to a run: it is this user's, or has a run's marker. `patience`: seconds that a sample
    waits for the driver; a single sample should wait longer than one of many. `wake`: wake sleeping
    GPUs, for callers that are about to use them.
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


class Hysteresis:
    """The band of one gauge over time.

    The band changes if the value is at least one percentage point past a border, or if it stays on
    the other side for three samples. For a missing value it is unknown; the band before it is
    remembered.
    """

    def __init__(self) -> None:
        self._band = Band.UNKNOWN
        self._beyond = 0

    def update(self, fraction: float | None) -> Band:
        """Add a sample (0-1, None if unknown). Returns the band to show."""
        raw = band_of(fraction)
        if fraction is None or raw is Band.UNKNOWN:
            return Band.UNKNOWN
        if self._band is Band.UNKNOWN or raw is self._band:
            return self._settle(raw)
        reached = _well_past(self._band, raw, fraction)
        if reached is not self._band:
            # A jump may be well past one border but only just past the next, which then needs more
            # samples.
            self._beyond = 0 if reached is raw else 1
            self._band = reached
            return reached
        self._beyond += 1
        return self._settle(raw) if self._beyond >= _STAY_SAMPLES else self._band

    def _settle(self, band: Band) -> Band:
        self._band = band
        self._beyond = 0
        return band


def _well_past(current: Band, raw: Band, fraction: float) -> Band:
    """The furthest band from `current` towards `raw` whose border the value has passed by at least
    the margin."""
    here, goal = _ORDER.index(current), _ORDER.index(raw)
    while here < goal and fraction - _BORDERS[here] >= _MARGIN - _ROUNDING:
        here += 1
    while here > goal and _BORDERS[here - 1] - fraction >= _MARGIN - _ROUNDING:
        here -= 1
    return _ORDER[here]
