"""When growing memory is full, whether to restart the run before that, and why a gauge is in
danger."""

from __future__ import annotations

from typing import Any

import pytest

from memtop.supervisor.monitor.values import Band
from memtop.supervisor.recovery.leaks import HELD_SAMPLES, DangerWatch, Leak, Pool, must_act, swap_trend, trends
from memtop.supervisor.recovery.trend import Slope
from memtop.supervisor.recovery.values import Trend, TrendKind, TrendSubject

GIB, MIB = 1 << 30, 1 << 20
# 1 MiB per update, two updates in a second.
SLOPE = Slope(per_unit=MIB, per_second=2 * MIB, confidence=1.0, span=80, seconds=40)
POOLS = {"host": Pool(name="host RAM", left_bytes=GIB)}
RANK = TrendSubject(kind=TrendKind.HOST_ANONYMOUS, rank=0, role="rank")
TENSORS = TrendSubject(kind=TrendKind.GPU_ALLOCATED, gpu_index=0, rank=0)


def leak(subject: TrendSubject = RANK, pool: str = "host", spare: int = 0, by_update: bool = True) -> Leak:
    return Leak(subject, pool, SLOPE, by_update, spare)


def test_when_the_pool_is_full() -> None:
    (found,) = trends([leak()], POOLS, 200)
    assert found.message == (
        "anonymous memory of rank 0 grows by 1.0 MiB per update (2.0 MiB/s), without a fall for 80 updates: "
        "host RAM is full in 9 min, at update 1224"
    )


@pytest.mark.parametrize(
    ("leaking", "left_bytes", "seconds", "update"),
    [
        pytest.param(leak(), GIB, 512, 1224, id="by update"),
        pytest.param(leak(by_update=False), GIB, 512, None, id="by time"),
        pytest.param(leak(TENSORS, "card", spare=GIB), GIB, 1024, 2248, id="the allocator's cache is used first"),
        pytest.param(leak(TENSORS, "card"), None, None, None, id="without a limit"),
    ],
)
def test_the_time_and_the_update_at_which_the_pool_is_full(
    leaking: Leak, left_bytes: int | None, seconds: float | None, update: int | None
) -> None:
    (found,) = trends([leaking], {leaking.pool: Pool(name="GPU 0", left_bytes=left_bytes)}, 200)
    assert (found.full_in_seconds, found.full_at_update) == (seconds, update)
    assert (found.bytes_per_update is None) is not leaking.by_update
    assert ("full" in found.message) is (seconds is not None)


def test_two_leaks_fill_one_pool_together() -> None:
    both = trends([leak(), leak(TrendSubject(kind=TrendKind.HOST_ANONYMOUS, role="loader worker"))], POOLS, 200)
    assert [found.full_at_update for found in both] == [712, 712]


def trend(seconds: float | None, at: int | None) -> Trend:
    return Trend(
        subject=RANK,
        what="x",
        bytes_per_second=1,
        confidence=1,
        full_in_seconds=seconds,
        full_at_update=at,
        message="x grows",
    )


@pytest.mark.parametrize(
    ("seconds", "at", "more", "acts"),
    [
        (121, 5000, {}, False),
        (120, 5000, {}, True),  # full within two minutes
        (9999, 405, {}, True),  # before the save at update 400 and its margin
        (9999, 406, {}, False),
        (9999, 405, {"save_every": None}, False),  # an external command: its saves are not known
        (None, None, {}, False),
        # An attempt does at least 100 updates before a leak restarts it.
        (5, 360, {"start_update": 251, "seconds": 99}, False),
        (5, 360, {"start_update": 250, "seconds": 99}, True),
        (5, 360, {"update": None, "seconds": 99}, False),
        # A restart saves by itself, so the attempt goes on until half of the memory is used,
        # however rare the saves are.
        (5000, 9000, {"save_every": 1_000_000, "seconds": 4999}, False),
        (5000, 9000, {"save_every": 1_000_000, "seconds": 5000}, True),
    ],
)
def test_it_acts_when_the_memory_does_not_last_to_the_next_save(
    seconds: float | None, at: int | None, more: dict[str, Any], acts: bool
) -> None:
    growing = trend(seconds, at)
    found = must_act([growing], **{"update": 350, "start_update": 0, "seconds": 9999, "save_every": 100, **more})
    assert found is (growing if acts else None)


def test_swap_has_no_end_and_is_never_acted_on() -> None:
    swapping = swap_trend(3.5 * MIB, 0.9)
    assert swapping.full_in_seconds is None
    assert "3.5 MiB/s are read back from swap, in 90 %" in swapping.message
    assert must_act([swapping], update=350, start_update=0, seconds=9999, save_every=10) is None


def danger(samples: list[tuple[Band, int]]) -> list[str]:
    """The lines for a 10 GiB card, from its band and its cache in MiB at each second. Tensors take
    6 GiB."""
    watch, lines = DangerWatch("GPU 0"), []
    for second, (band, cache) in enumerate(samples):
        parts = {"tensors": 6 * GIB, "cache": cache * MIB, "other programs": None}
        line = watch.add(1000.0 + second, band, 0.93, 10 * GIB, parts)
        if line is not None:
            lines.append(line)
    return lines


def test_danger_that_is_held_is_explained_by_what_grew() -> None:
    # No growth for a minute, then 920 MiB within 40 s.
    growing = [(Band.EDGE, 500)] * 60 + [(Band.DANGER, 500 + 23 * second) for second in range(1, 41)]
    (line,) = danger([*growing, *[(Band.DANGER, 1420)] * 20])
    assert line.startswith("GPU 0 stays in danger, 93.0 % of 10.0 GiB: cache grew ")
    held = [(Band.EDGE, 500)] * 60 + [(Band.EDGE, 500 + 23 * second) for second in range(1, 41)] + [(Band.DANGER, 1420)] * 12
    (line,) = danger(held)
    assert "cache grew 920 MiB in 3" in line


def test_danger_is_reported_once_until_it_ends() -> None:
    assert len(danger([(Band.DANGER, 900)] * 100)) == 1
    assert danger([(Band.DANGER, 900)] * (HELD_SAMPLES - 1)) == []
    twice = [(Band.DANGER, 900)] * 20 + [(Band.SAFE, 100)] + [(Band.DANGER, 900)] * 20
    assert len(danger(twice)) == 2
    # An unknown value neither continues nor ends the danger.
    gap = [(Band.DANGER, 900)] * 5 + [(Band.UNKNOWN, 900)] + [(Band.DANGER, 900)] * 5
    assert len(danger(gap)) == 1


def test_a_gauge_that_was_full_from_the_start_names_no_part() -> None:
    (line,) = danger([(Band.DANGER, 900)] * 20)
    assert "no part of it grew" in line
