"""Medians over the newest updates and samples of a run, from which `recovery.bottleneck` derives
its advice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.recovery.bottleneck import Measured
from memtop.supervisor.run.reports import Step
from memtop.supervisor.wire import RoleMemory

_UPDATES, _SAMPLES = 20, 30
# Updates at the start of an attempt, and after a change, that are not measured: compilation,
# autotuning, new buffers.
_WARM_UP = 2
_PARTS = ("step_seconds", "data_wait_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")


class _Sample(NamedTuple):
    utilization: float | None
    sm_active: float | None
    power: float | None
    taken: float | None
    pressure: float | None


class Measurements:
    """The newest updates and samples under one configuration of one attempt; `changed` starts
    again."""

    def __init__(self) -> None:
        self._updates: deque[Step] = deque(maxlen=_UPDATES)
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._skip = _WARM_UP
        self._at_start: int | None = None

    def changed(self) -> None:
        """The settings have changed: discard the updates measured before."""
        self._updates.clear()
        self._skip = _WARM_UP

    def step(self, report: Step) -> None:
        """Rank 0 has finished an update."""
        if self._skip > 0:
            self._skip -= 1
        elif report.step_seconds:
            self._updates.append(report)

    def sample(self, machine: MachineSnapshot, gpus: Iterable[GpuSample]) -> None:
        """Take a sample of the machine; `gpus` are those that the run trains on."""
        gpus = list(gpus)
        if self._at_start is None:
            self._at_start = machine.host.available_bytes
        self._samples.append(
            _Sample(
                utilization=_least(gpu.utilization_fraction for gpu in gpus),
                sm_active=_least(gpu.details.sm_active_fraction for gpu in gpus),
                power=_least(_power(gpu) for gpu in gpus),
                taken=max((gpu.used_fraction for gpu in gpus if gpu.used_fraction is not None), default=None),
                pressure=machine.host.pressure_fraction,
            )
        )

    def medians(
        self,
        machine: MachineSnapshot,
        gpus: Iterable[GpuSample],
        *,
        samples_per_second: float | None,
        swap_in: float | None,
        roles: Iterable[RoleMemory] = (),
    ) -> Measured:
        """The medians. `swap_in`: the sustained rate in bytes per second, None if not known."""
        gpus, host = list(gpus), machine.host
        workers = next((role for role in roles if role.role == "loader worker"), None)
        each = None if workers is None or workers.uss_bytes is None else workers.uss_bytes // workers.processes
        free = [gpu.free_bytes for gpu in gpus if gpu.free_bytes is not None]
        return Measured(
            updates=len(self._updates),
            on_gpu=bool(gpus),
            **{name: _median(getattr(update, name) for update in self._updates) for name in _PARTS},
            samples_per_second=samples_per_second,
            utilization_fraction=self._of(lambda sample: sample.utilization),
            sm_active_fraction=self._of(lambda sample: sample.sm_active),
            power_fraction=self._of(lambda sample: sample.power),
            gpu_fraction=self._of(lambda sample: sample.taken),
            gpu_free_bytes=min(free) if free else None,
            host_fraction=host.used_fraction,
            host_total_bytes=host.total_bytes if host.limit_bytes is None else host.limit_bytes,
            host_used_bytes=host.used_bytes,
            available_at_start_bytes=self._at_start,
            swap_fraction=host.swap_fraction,
            swap_in_bytes_per_second=swap_in,
            pressure_fraction=self._of(lambda sample: sample.pressure),
            workers=0 if workers is None else workers.processes,
            worker_bytes=each,
            cores=host.cpu_count,
        )

    def _of(self, value: Callable[[_Sample], float | None]) -> float | None:
        return _median(value(sample) for sample in self._samples)


def _power(gpu: GpuSample) -> float | None:
    if gpu.power_watts is None or not gpu.power_limit_watts:
        return None
    return gpu.power_watts / gpu.power_limit_watts


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
