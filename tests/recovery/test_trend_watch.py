"""From reports and samples to the leaks of a run: each is reported once, with its process."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import pytest

from memtop.supervisor.monitor.values import Band, GpuProcess, GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.recovery.values import TrendKind, TrendSubject
from memtop.supervisor.run.processes.host_memory import HostReading, anonymous_bytes
from memtop.supervisor.run.trends import Member, TrendWatch
from tests.conftest import Runs
from tests.run.reported import reported

GIB, MIB = 1 << 30, 1 << 20
ME = os.getpid()
RANK = Member(ME, "rank", 0)
NOTHING = HostReading()


def card(used: int, *, band: Band = Band.SAFE) -> GpuSample:
    return GpuSample(
        index=0,
        uuid="GPU-a",
        total_bytes=10 * GIB,
        used_bytes=used,
        free_bytes=10 * GIB - used,
        used_fraction=used / (10 * GIB),
        band=band,
        processes=(GpuProcess(pid=ME, used_bytes=used, started_ticks=1),),
    )


def machine(time: float, *gpus: GpuSample, swap: float | None = None) -> MachineSnapshot:
    host = HostSample(total_bytes=16 * GIB, available_bytes=8 * GIB, used_bytes=8 * GIB, swap_in_bytes_per_second=swap)
    return MachineSnapshot(time=time, gpus=gpus, host=host)


def step(watch: TrendWatch, update: int, time: float | None = None, **sizes: int) -> None:
    """Rank 0 reports an update, one second after the one before."""
    watch.step(0, reported({"type": "step", "update": update, "time": time or 1000.0 + update, **sizes}))


def train(watch: TrendWatch, updates: int, **grows: int) -> list[tuple[str, dict[str, Any]]]:
    """Do this many updates, in each of which these sizes grow by these bytes. Returns the
    events."""
    events = []
    for update in range(1, updates + 1):
        sizes = {name: GIB + growth * update for name, growth in grows.items()}
        step(watch, update, **sizes)
        used = sizes.get("reserved_bytes")
        gpus = () if used is None else (card(used + GIB),)
        ranks = [RankMemory(rank=0, pid=ME, device_uuid="GPU-a", reserved_bytes=used)]
        watch.sample(machine(1000.0 + update, *gpus), [RANK], ranks, {}, NOTHING)
        watch.read(1000.0 + update, [RANK], {})
        events += watch.news()
    return events


def test_a_leak_of_a_card_is_reported_once_with_the_rank_that_allocates() -> None:
    watch = TrendWatch()
    events = train(watch, 1000, allocated_bytes=MIB, reserved_bytes=MIB, anonymous_bytes=0)
    assert [trend.what for trend in watch.trends] == ["GPU 0 allocated by rank 0"]
    assert [data["what"] for _, data in events] == ["GPU 0 allocated by rank 0"]
    (trend,) = watch.trends
    # The card has 10 GiB, of which about 3 are in use.
    assert trend.full_at_update is not None
    assert abs(trend.full_at_update - (1000 + 8 * 1024 - 1000)) < 100


def test_a_growing_cache_is_reported_as_reserved_memory() -> None:
    watch = TrendWatch()
    train(watch, 150, allocated_bytes=0, reserved_bytes=MIB)
    assert [trend.what for trend in watch.trends] == ["GPU 0 reserved by rank 0"]
    assert watch.own == (), "the allocator frees it before an allocation fails"


def test_host_memory_of_a_rank() -> None:
    watch = TrendWatch()
    train(watch, 150, anonymous_bytes=3 * MIB)
    (trend,) = watch.trends
    assert (trend.what, trend.bytes_per_update) == ("anonymous memory of rank 0", 3 * MIB)
    assert trend.full_in_seconds is not None
    assert abs(trend.full_in_seconds - 8 * 1024 / 3) < 1
    assert watch.own == watch.trends


def test_growth_of_another_process_is_reported_but_not_as_the_runs() -> None:
    watch = TrendWatch()
    for second in range(1, 700):
        ranks = [RankMemory(rank=0, pid=ME, device_uuid="GPU-a", reserved_bytes=GIB)]
        watch.sample(machine(1000.0 + second, card(GIB + 4 * MIB * second)), [RANK], ranks, {}, NOTHING)
    assert [trend.what for trend in watch.trends] == ["GPU 0"]
    assert watch.own == ()


def test_growth_while_the_program_loads_is_no_leak() -> None:
    watch = TrendWatch()
    for second in range(1, 700):
        watch.sample(machine(1000.0 + second, card(GIB + 4 * MIB * second)), [RANK], [], {}, NOTHING, loading=True)
    assert watch.trends == ()


def test_swapping_is_reported_while_it_lasts() -> None:
    watch, messages = TrendWatch(), []
    for second in range(120):
        swap = 5.0 * MIB if 20 <= second < 70 else 0.0
        watch.sample(machine(1000.0 + second, swap=swap), [RANK], [], {}, NOTHING)
        messages += [message for message, _ in watch.news()]
    assert [message[:40] for message in messages] == ["5.0 MiB/s are read back from swap, in 53", "swapping in has ended"]


def test_a_leak_that_ends_is_withdrawn_once() -> None:
    watch, messages = TrendWatch(), []
    for update in range(1, 800):
        step(watch, update, anonymous_bytes=GIB + MIB * min(update, 150))
        watch.read(1000.0 + update, [RANK], {})
        messages += [message for message, _ in watch.news()]
    assert len(messages) == 2
    assert messages[1] == "anonymous memory of rank 0 has stopped growing: it was not a leak, or the leak has ended"
    assert watch.trends == ()


def test_a_rank_that_does_not_report_its_memory_is_read() -> None:
    watch = TrendWatch()
    for update in range(1, 101):
        step(watch, update)
        assert watch.wants_reading
        watch.read(1000.0 + update, [RANK], {ME: GIB + update * MIB})
        assert not watch.wants_reading
    (trend,) = watch.trends
    assert trend.subject == TrendSubject(kind=TrendKind.HOST_ANONYMOUS, rank=0, role="rank")


def test_loader_workers_are_read_together() -> None:
    watch, workers = TrendWatch(), [Member(5, "loader worker"), Member(6, "loader worker")]
    for update in range(1, 101):
        step(watch, update, anonymous_bytes=GIB)
        watch.read(1000.0 + update, [RANK, *workers], {5: GIB + update * MIB, 6: GIB + update * MIB, ME: update * GIB})
    (trend,) = watch.trends
    assert (trend.what, trend.bytes_per_update) == ("anonymous memory of the loader workers", 2 * MIB)


def test_a_series_begins_again_when_the_program_counts_from_one_again() -> None:
    """torchrun starts its processes again within an attempt."""
    watch = TrendWatch()
    for start in (0, 60):
        for update in range(1, 61):
            step(watch, update, 1000.0 + start + update, anonymous_bytes=GIB + MIB * (start + update))
            watch.read(1000.0 + start + update, [RANK], {})
    assert watch.trends == ()


def test_danger_of_a_gpu_is_explained() -> None:
    watch, lines = TrendWatch(), []
    for second in range(60):
        reserved = 5 * GIB + min(second, 40) * 100 * MIB
        ranks = [RankMemory(rank=0, pid=ME, device_uuid="GPU-a", allocated_bytes=5 * GIB, reserved_bytes=reserved)]
        band = Band.DANGER if second >= 40 else Band.SAFE
        lines += watch.sample(machine(1000.0 + second, card(reserved + 256 * MIB, band=band)), [RANK], ranks, {}, NOTHING)
    (line,) = lines
    assert line.startswith("GPU 0 stays in danger")
    assert "cache grew 3.9 GiB in 3" in line


def test_anonymous_memory_is_read_from_the_kernel() -> None:
    """Fresh pages of one mapping, so that leftovers in the heap do not hide them."""
    before = anonymous_bytes([ME, 1 << 22])
    pages = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(b"x" * 64 * MIB)
    after = anonymous_bytes([ME])
    assert list(before) == [ME]  # a process that does not exist is left out
    assert after[ME] - before[ME] == pytest.approx(64 * MIB, rel=0.2)


def test_allocator_retries_are_an_event(runs: Runs) -> None:
    code = "import memtop_agent as a; a.report('pressure', update=7, allocation_retries=3)"
    runs.memtop("train", "--headless", "--name", "a", "--", sys.executable, "-c", code)
    (event,) = runs.events("a", "pressure")
    assert "update 7" in event.message
    assert event.data == {"rank": 0, "retries": 3}
