"""GPU memory that a run holds outside torch's allocator, from samples and reports of different
moments."""

from __future__ import annotations

from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot, MigInstance
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.run.machine_watch import GpuBase
from memtop.supervisor.run.progress import Progress
from tests.run.reported import heard, reported

GIB = 1024**3


def machine(time: float, *held: tuple[int, int | None], mig: tuple[MigInstance, ...] = ()) -> MachineSnapshot:
    rows = tuple(GpuProcess(pid=pid, used_bytes=used, mig_instance=mig[0].position if mig else None) for pid, used in held)
    return MachineSnapshot(time=time, gpus=(GpuSample(index=0, uuid="GPU-a", processes=rows, mig=mig),))


def report(pid: int, reserved: int | None, time: float, uuid: str | None = "GPU-a") -> RankMemory:
    return RankMemory(rank=0, pid=pid, device_uuid=uuid, reserved_bytes=reserved, time=time)


def steady(base: GpuBase, held: int, *, start: float = 0.0, seconds: int = 8, attempt: int = 1, reserved: int = 8) -> None:
    """So many seconds with a report and a sample each."""
    for second in range(seconds):
        now = start + second
        base.update(attempt, machine(now, (1, held)), [report(1, reserved, now - 0.1)], {1})


def test_the_minimum_outside_a_steady_allocator_is_kept() -> None:
    base = GpuBase()
    steady(base, 10)
    assert base.bytes == {"GPU-a": 2}
    steady(base, 9, start=20)
    assert base.bytes == {"GPU-a": 1}
    steady(base, 12, start=40)
    assert base.bytes == {"GPU-a": 1}


def test_a_list_that_may_be_older_than_the_report_is_not_believed() -> None:
    base = GpuBase()
    steady(base, 10, seconds=3)
    # The allocator has just grown; the driver's list is still the one before.
    for second in range(3):
        base.update(1, machine(10.0 + second, (1, 10)), [report(1, 9, 9.9 + second)], {1})
    assert base.bytes == {}


def test_without_a_report_after_it_a_sample_does_not_count() -> None:
    base = GpuBase()
    for second in range(20):
        base.update(1, machine(float(second), (1, 9)), [report(1, 8, 0.0)], {1})
    assert base.bytes == {}
    base.update(1, machine(20.0, (1, 9)), [report(1, 7, 19.5)], {1})
    assert base.bytes == {}


def test_a_report_that_counts_more_than_the_driver_is_stale() -> None:
    base = GpuBase()
    steady(base, 10, seconds=3)
    steady(base, 5, start=3)
    assert base.bytes == {}


def test_another_attempt_begins_anew() -> None:
    base = GpuBase()
    steady(base, 9)
    base.update(2, machine(50.0, (1, 12)), [report(1, 8, 50.0)], {1})
    assert base.bytes == {}


def test_two_ranks_and_a_helper_share_a_gpu() -> None:
    base = GpuBase()
    for second in range(8):
        now = float(second)
        ranks = [report(1, 8, now - 0.1), report(2, 8, now - 0.2, uuid=None)]
        base.update(1, machine(now, (1, 10), (2, 11), (3, 1), (99, 50)), ranks, {1, 2, 3})
    assert base.bytes == {"GPU-a": 6}


def test_values_that_neither_driver_nor_rank_reports_stay_unknown() -> None:
    base = GpuBase()
    for second in range(8):
        now = float(second)
        base.update(1, machine(now, (1, None)), [report(1, 8, now - 0.1)], {1})
        base.update(1, machine(now, (1, 10)), [report(1, None, now - 0.1)], {1})
        base.update(1, machine(now, (2, 10)), [report(1, 8, now - 0.1)], {1})
    assert base.bytes == {}


def test_an_instance_of_a_divided_gpu() -> None:
    base, mig = GpuBase(), (MigInstance(position=2, uuid="MIG-b"),)
    for second in range(8):
        base.update(1, machine(float(second), (1, 10), mig=mig), [report(1, 8, second - 0.1, uuid="GPU-b")], {1})
    assert base.bytes == {"MIG-b": 2}


def test_rank_memory_is_read_from_the_reports() -> None:
    progress = Progress()
    progress = heard(progress, {"type": "hello", "pid": 11})
    assert progress.rank_memory() == (RankMemory(rank=0, pid=11),)
    progress = heard(progress, {"type": "plan", "device_uuid": "GPU-a", "time": 1.0})
    progress = progress.after(
        0, reported({"type": "step", "update": 1, "reserved_bytes": 5, "peak_reserved_bytes": 7, "time": 2.0})
    )
    memory = RankMemory(rank=0, pid=11, device_uuid="GPU-a", reserved_bytes=5, peak_reserved_bytes=7, time=2.0)
    assert progress.rank_memory() == (memory,)
