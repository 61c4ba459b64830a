"""What each GPU process did while the dashboard watched: memory, utilisation, host CPU and resident bytes.

Numbers in arrays and not in objects, since there may be a hundred processes; a process that has ended is forgotten.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot

KEPT = 300
"""Samples of each series; at one a second the last five minutes."""
SERIES = ("used_bytes", "sm_fraction", "host_cpu_fraction", "host_rss_bytes")
TrailKey = tuple[int, object, object]


def trail_key(process: GpuProcess, gpu: object) -> TrailKey:
    """The process for ever (pid and start time), and its GPU: its uuid, or its index where it has none."""
    return (process.pid, process.started_ticks or process.started, gpu)


class Trails:
    """The past of all living GPU processes."""

    def __init__(self) -> None:
        self._of: dict[TrailKey, list[array[float]]] = {}

    def take(self, machine: MachineSnapshot) -> None:
        """Add one sample; forget who is not in it."""
        before, self._of = self._of, {}
        for gpu in machine.gpus:
            for process in gpu.processes:
                key = trail_key(process, gpu.uuid or gpu.index)
                series = before.get(key) or [array("f") for _ in SERIES]
                for values, name in zip(series, SERIES, strict=True):
                    value = getattr(process, name)
                    values.append(math.nan if value is None else value)
                    if len(values) > KEPT + 60:
                        # Now and then, not at every sample: taking from the front moves all the rest.
                        del values[:-KEPT]
                self._of[key] = series

    def values(self, key: TrailKey, name: str) -> Sequence[float | None]:
        """One series, oldest first; None where it was not known."""
        series = self._of.get(key)
        if series is None:
            return ()
        return [None if math.isnan(value) else value for value in series[SERIES.index(name)][-KEPT:]]
