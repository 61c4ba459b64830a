"""What each GPU process did since the dashboard started: memory, utilisation, host CPU and resident
bytes.

The values are in arrays because there may be a hundred processes. A process that has ended is
forgotten.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot

KEPT = 300
"""Samples per series: at one per second, the last five minutes."""
SERIES = ("used_bytes", "sm_fraction", "host_cpu_fraction", "host_rss_bytes")
TrailKey = tuple[int, object, object]


def trail_key(process: GpuProcess, gpu: object) -> TrailKey:
    """The process (pid and start time) and its GPU (uuid, or index if it has no uuid)."""
    return (process.pid, process.started_ticks or process.started, gpu)


class Trails:
    """The history of all GPU processes that are alive."""

    def __init__(self) -> None:
        self._of: dict[TrailKey, list[array[float]]] = {}

    def take(self, machine: MachineSnapshot) -> None:
        """Add one sample and forget processes that are not in it."""
        before, self._of = self._of, {}
        for gpu in machine.gpus:
            for process in gpu.processes:
                key = trail_key(process, gpu.uuid or gpu.index)
                series = before.get(key) or [array("f") for _ in SERIES]
                for values, name in zip(series, SERIES, strict=True):
                    value = getattr(process, name)
                    values.append(math.nan if value is None else value)
                    if len(values) > KEPT + 60:
                        # Not at every sample, because deleting from the front moves the rest.
                        del values[:-KEPT]
                self._of[key] = series

    def values(self, key: TrailKey, name: str) -> Sequence[float | None]:
        """One series, oldest first; None for unknown values."""
        series = self._of.get(key)
        if series is None:
            return ()
        return [None if math.isnan(value) else value for value in series[SERIES.index(name)][-KEPT:]]
