"""The parts of a GPU's memory, which always add up to its total."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MigInstance
from memtop.supervisor.monitor.vram import JobVram, RankMemory, VramParts, placed, ranks_on, step_peak_bytes, vram_parts
from tests.monitor.conftest import GIB

BYTES = (
    *("free_bytes", "allocated_bytes", "cached_bytes", "context_bytes", "other_own_bytes", "driver_reserved_bytes"),
    *("gone_bytes", "unlisted_bytes", "unaccounted_bytes", "rest_of_machine_bytes"),
)


def gpu(used: int, *rows: GpuProcess, total: int = 24 * GIB, reserved: int | None = GIB, **more: Any) -> GpuSample:
    free = total - used - (reserved or 0)
    values: dict[str, Any] = {"uuid": "GPU-a", "total_bytes": total, "used_bytes": used, "free_bytes": free}
    return GpuSample(index=0, **(values | {"reserved_bytes": reserved, "processes": rows} | more))


def row(pid: int, used: int | None, **more: Any) -> GpuProcess:
    return GpuProcess(pid=pid, used_bytes=used, **({"started_ticks": 1, "name": f"prog{pid}"} | more))


def rank(pid: int, allocated: int | None, reserved: int | None, **more: Any) -> RankMemory:
    return RankMemory(rank=0, pid=pid, allocated_bytes=allocated, reserved_bytes=reserved, **({"device_uuid": "GPU-a"} | more))


def added_up(parts: VramParts) -> int:
    return sum(getattr(parts, name) or 0 for name in BYTES) + sum(job.used_bytes or 0 for job in parts.jobs)


def checked(parts: VramParts) -> VramParts:
    """The parts, proven to add up, with a reason for each that is not known."""
    assert added_up(parts) == parts.total_bytes
    for name in BYTES:
        value = getattr(parts, name)
        assert parts.unknown[name] if value is None else value >= 0
    return parts


def test_a_run_and_another_job() -> None:
    sample = gpu(16 * GIB, row(1, 10 * GIB), row(7, 3 * GIB, job="pid 7@1"), row(8, 2 * GIB, job="pid 7@1"))
    parts = checked(vram_parts(sample, [rank(1, 6 * GIB, 8 * GIB)], base_bytes=GIB // 2, job_names={"pid 7@1": "serve.py"}))
    assert (parts.allocated_bytes, parts.cached_bytes) == (6 * GIB, 2 * GIB)
    assert (parts.context_bytes, parts.other_own_bytes) == (GIB // 2, GIB + GIB // 2)
    assert parts.jobs == (JobVram(name="serve.py", used_bytes=5 * GIB),)
    assert (parts.driver_reserved_bytes, parts.gone_bytes, parts.unlisted_bytes) == (GIB, 0, GIB)


def test_two_ranks_and_a_helper_of_the_run_on_one_gpu() -> None:
    sample = gpu(12 * GIB, row(1, 5 * GIB), row(2, 5 * GIB), row(3, GIB, run="qwen"))
    parts = checked(vram_parts(sample, [rank(1, GIB, 4 * GIB), rank(2, 2 * GIB, 4 * GIB)], run="qwen", base_bytes=2 * GIB))
    assert (parts.allocated_bytes, parts.cached_bytes) == (3 * GIB, 5 * GIB)
    assert (parts.context_bytes, parts.other_own_bytes) == (2 * GIB, GIB)
    assert parts.jobs == ()


def test_a_base_that_is_not_measured_yet_is_unknown() -> None:
    parts = checked(vram_parts(gpu(10 * GIB, row(1, 10 * GIB)), [rank(1, 6 * GIB, 8 * GIB)]))
    assert parts.context_bytes is None
    assert parts.other_own_bytes == 2 * GIB


def test_a_program_without_the_agent() -> None:
    parts = checked(vram_parts(gpu(10 * GIB, row(1, 10 * GIB)), own_pids=[1]))
    assert parts.allocated_bytes is parts.cached_bytes is parts.context_bytes is None
    assert parts.other_own_bytes == 10 * GIB


def test_memory_of_processes_that_have_ended() -> None:
    parts = checked(vram_parts(gpu(10 * GIB, row(9, 4 * GIB, gone=True, started_ticks=None)), all_pids_visible=True))
    assert (parts.gone_bytes, parts.unlisted_bytes) == (4 * GIB, 6 * GIB)
    # A list with an ended process is unreliable, so the rest may have an owner.
    assert not parts.unlisted_has_no_owner


@pytest.mark.parametrize("visible", [True, False])
def test_memory_without_a_listed_process(visible: bool) -> None:
    parts = checked(vram_parts(gpu(10 * GIB, row(7, 4 * GIB)), all_pids_visible=visible))
    assert parts.unlisted_bytes == 6 * GIB
    assert parts.unlisted_has_no_owner is visible


def test_a_report_older_than_the_drivers_values() -> None:
    parts = checked(vram_parts(gpu(3 * GIB, row(1, 3 * GIB)), [rank(1, 6 * GIB, 8 * GIB)], base_bytes=GIB))
    assert (parts.allocated_bytes, parts.cached_bytes, parts.context_bytes) == (3 * GIB, 0, 0)


def test_a_process_list_that_is_older_than_the_totals() -> None:
    parts = checked(vram_parts(gpu(3 * GIB, row(7, 10 * GIB))))
    assert parts.jobs[0].used_bytes == 3 * GIB


def test_wsl_reports_no_memory_per_process() -> None:
    parts = checked(vram_parts(gpu(10 * GIB, row(1, None), row(7, None)), [rank(1, 6 * GIB, 8 * GIB)], base_bytes=GIB))
    assert (parts.allocated_bytes, parts.cached_bytes) == (6 * GIB, 2 * GIB)
    assert parts.other_own_bytes is parts.unlisted_bytes is None
    assert parts.jobs == (JobVram(name="prog7", used_bytes=None),)
    assert parts.unaccounted_bytes == 2 * GIB


def test_in_a_container_the_drivers_pids_are_not_ours() -> None:
    hidden = [row(40001, 9 * GIB, started_ticks=None), row(40002, 3 * GIB, started_ticks=None)]
    parts = checked(vram_parts(gpu(13 * GIB, *hidden), [rank(1, 6 * GIB, 8 * GIB)]))
    # One of the two is our rank. Its 8 GiB count once; the other 4 GiB have no known owner.
    assert (parts.allocated_bytes, parts.cached_bytes, parts.unaccounted_bytes) == (6 * GIB, 2 * GIB, 4 * GIB)
    assert parts.unlisted_bytes == GIB
    assert parts.jobs == ()
    assert "container" in parts.unknown["jobs"]


def test_in_a_container_the_driver_may_list_no_process() -> None:
    parts = checked(vram_parts(gpu(13 * GIB), [rank(1, 6 * GIB, 8 * GIB)], all_pids_visible=True))
    assert parts.unlisted_bytes == 5 * GIB
    assert not parts.unlisted_has_no_owner
    assert "does not list" in parts.unknown["context_bytes"]


def test_an_old_driver_that_counts_its_own_reserve_as_used() -> None:
    parts = checked(vram_parts(gpu(10 * GIB, row(7, 9 * GIB), reserved=None)))
    assert parts.driver_reserved_bytes is parts.unlisted_bytes is None
    assert parts.unaccounted_bytes == GIB


def test_unified_memory() -> None:
    sample = gpu(14 * GIB, row(1, 8 * GIB), reserved=None, unified=True, other_pool_bytes=6 * GIB)
    parts = checked(vram_parts(sample, [rank(1, 5 * GIB, 7 * GIB)], base_bytes=GIB))
    assert (parts.allocated_bytes, parts.context_bytes, parts.rest_of_machine_bytes) == (5 * GIB, GIB, 6 * GIB)
    assert parts.unaccounted_bytes == 0


def test_a_mig_instance_has_separate_parts() -> None:
    mig = MigInstance(position=3, uuid="MIG-b", total_bytes=10 * GIB, used_bytes=6 * GIB, free_bytes=4 * GIB, reserved_bytes=0)
    sample = gpu(20 * GIB, row(1, 6 * GIB, mig_instance=3), row(2, 9 * GIB, mig_instance=4), mig=(mig,))
    ranks = [rank(1, 4 * GIB, 5 * GIB, device_uuid="GPU-b"), rank(2, GIB, GIB, device_uuid="MIG-c")]
    parts = checked(vram_parts(sample, ranks, mig=mig, base_bytes=GIB))
    assert parts.total_bytes == 10 * GIB
    assert (parts.allocated_bytes, parts.cached_bytes, parts.context_bytes) == (4 * GIB, GIB, GIB)
    assert parts.jobs == ()


def test_a_gpu_that_cannot_be_read() -> None:
    parts = vram_parts(GpuSample(index=0, error="the GPU is lost; reboot the machine"))
    assert all(getattr(parts, name) is None for name in (*BYTES, "total_bytes"))
    assert set(parts.unknown.values()) == {"the GPU is lost; reboot the machine"}


def test_a_rank_that_has_not_named_its_device_is_where_it_holds_the_most() -> None:
    first, second = gpu(GIB, row(1, GIB // 2)), gpu(9 * GIB, row(1, 9 * GIB), uuid="GPU-z")
    ranks = placed([rank(1, 1, 2, device_uuid=None), rank(5, 1, 2, device_uuid=None)], [first, second])
    assert [one.device_uuid for one in ranks] == ["GPU-z", None]
    assert ranks_on(second, ranks) == ranks[:1]
    assert ranks_on(first, ranks) == []


def test_the_peak_of_a_step() -> None:
    ranks = [rank(1, 6 * GIB, 8 * GIB, peak_reserved_bytes=11 * GIB)]
    parts = vram_parts(gpu(13 * GIB, row(1, 10 * GIB), row(7, 2 * GIB)), ranks, base_bytes=GIB)
    # 14 GiB are in use with the driver's reserve; torch had 3 GiB more at its peak.
    assert step_peak_bytes(parts, ranks) == 17 * GIB
    assert step_peak_bytes(parts, [*ranks, rank(2, 0, 0)]) is None
    assert step_peak_bytes(parts, []) is None
    assert step_peak_bytes(parts, [rank(1, 0, 0, peak_reserved_bytes=60 * GIB)]) == 24 * GIB


some = st.integers(0, 64)
maybe = st.none() | some
rows = st.builds(
    GpuProcess,
    pid=st.integers(1, 6),
    used_bytes=maybe,
    gone=st.booleans(),
    started_ticks=st.none() | st.just(1),
    run=st.none() | st.just("mine"),
    job=st.none() | st.sampled_from(["a", "b"]),
    mig_instance=st.none() | st.just(0),
)
ranks = st.builds(
    RankMemory,
    rank=st.just(0),
    pid=st.integers(1, 6),
    device_uuid=st.sampled_from([None, "GPU-a", "GPU-b"]),
    allocated_bytes=maybe,
    reserved_bytes=maybe,
    peak_reserved_bytes=maybe,
)
gpus = st.builds(
    GpuSample,
    index=st.just(0),
    uuid=st.just("GPU-a"),
    total_bytes=st.integers(1, 64),
    free_bytes=some,
    reserved_bytes=maybe,
    unified=st.booleans(),
    other_pool_bytes=maybe,
    processes=st.lists(rows, max_size=6, unique_by=lambda one: one.pid).map(tuple),
)


@given(sample=gpus, here=st.lists(ranks, max_size=3), base=maybe, run=st.sampled_from([None, "mine"]), seen=st.booleans())
def test_the_parts_always_add_up(
    sample: GpuSample, here: list[RankMemory], base: int | None, run: str | None, seen: bool
) -> None:
    known = placed(here, [sample])
    parts = checked(vram_parts(sample, known, run=run, own_pids=[2], base_bytes=base, all_pids_visible=seen))
    peak = step_peak_bytes(parts, ranks_on(sample, known))
    assert peak is None or (parts.total_bytes or 0) >= peak >= (parts.total_bytes or 0) - (parts.free_bytes or 0)
