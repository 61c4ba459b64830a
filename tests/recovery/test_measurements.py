"""From updates and samples to the medians that the advice uses."""

from __future__ import annotations

from typing import Any

from memtop.supervisor.monitor.values import GpuDetails, GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.recovery.bottleneck import Measured
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.sensors import MeasurementWindow
from memtop.supervisor.run_memory import RoleMemory

GIB = 1 << 30


def update(seconds: float = 1.0, **more: Any) -> Step:
    return Step(update=1, step_seconds=seconds, data_wait_seconds=seconds / 4, forward_seconds=seconds / 4, **more)


def measured(measurements: MeasurementWindow, *gpus: GpuSample, limit: int | None = None) -> Measured:
    host = HostSample(total_bytes=64 * GIB, limit_bytes=limit, used_bytes=GIB, available_bytes=3 * GIB, cpu_count=4)
    machine = MachineSnapshot(time=1.0, gpus=gpus, host=host)
    # The first sample after the warm-up began within it.
    measurements.sample(machine, gpus, 3.0, 0.9)
    measurements.sample(machine, gpus, 0.7, 0.3)
    measurements.sample(machine, gpus, 0.7, 0.3)
    workers = RoleMemory(role="loader worker", processes=4, uss_bytes=4 * GIB)
    return measurements.medians(machine, gpus, samples_per_second=None, swap_in=None, roles=[workers])


def test_the_first_updates_and_the_odd_one_do_not_count() -> None:
    measurements = MeasurementWindow()
    for seconds in (60.0, 30.0, 1.0, 1.0, 1.0, 25.0, 1.0):
        measurements.step(update(seconds))
    found = measured(measurements)
    assert (found.updates, found.step_seconds, found.wait_fraction) == (5, 1.0, 0.25)


def test_the_cpu_time_is_that_of_the_updates_that_count() -> None:
    measurements = MeasurementWindow()
    for _ in range(9):
        measurements.sample(MachineSnapshot(time=1.0), (), 1.0, 0.5)  # the program imports torch
    measurements.step(update(9.0))
    for _ in range(9):
        measurements.sample(MachineSnapshot(time=1.0), (), 0.9, 0.4)
    for _ in range(9):
        measurements.step(update())
    measurements.sample(MachineSnapshot(time=1.0), (), 0.5, 0.3)
    measurements.sample(MachineSnapshot(time=1.0), (), 0.1, 0.2)
    found = measurements.medians(MachineSnapshot(time=1.0), (), samples_per_second=None, swap_in=None)
    assert (found.updates, found.rank_cores, found.other_cpu_fraction) == (8, 0.1, 0.2)


def test_after_a_change_it_starts_again() -> None:
    measurements = MeasurementWindow()
    for _ in range(15):
        measurements.step(update())
    measurements.changed()
    assert measured(measurements).updates == 0
    assert measured(measurements).wait_fraction is None


def test_a_missing_value_is_not_zero() -> None:
    measurements = MeasurementWindow()
    for _ in range(15):
        measurements.step(Step(update=1, step_seconds=1.0))
    found = measured(measurements)
    assert (found.step_seconds, found.data_wait_seconds, found.wait_fraction) == (1.0, None, None)
    assert (found.rank_cores, found.other_cpu_fraction) == (0.7, 0.3)
    assert (found.on_gpu, found.utilization_fraction, found.power_fraction) == (False, None, None)


def test_the_least_busy_and_the_fullest_gpu_count() -> None:
    cards = [
        GpuSample(
            index=index,
            utilization_fraction=busy,
            used_fraction=taken,
            free_bytes=int((1 - taken) * 20 * GIB),
            power_watts=watts,
            power_limit_watts=300.0,
            details=GpuDetails(sm_active_fraction=busy / 2),
        )
        for index, (busy, taken, watts) in enumerate([(1.0, 0.46, 270.0), (0.6, 0.57, 90.0)])
    ]
    found = measured(MeasurementWindow(), *cards)
    assert (found.utilization_fraction, found.sm_active_fraction, found.power_fraction) == (0.6, 0.3, 0.3)
    assert (found.gpu_fraction, found.gpu_free_bytes) == (0.57, int(0.43 * 20 * GIB))


def test_a_memory_groups_limit_counts_in_place_of_the_machines() -> None:
    found = measured(MeasurementWindow(), limit=4 * GIB)
    assert (found.host_total_bytes, found.available_at_start_bytes) == (4 * GIB, 3 * GIB)
    assert (found.workers, found.worker_bytes) == (4, GIB)
