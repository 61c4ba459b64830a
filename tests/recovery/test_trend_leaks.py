"""From growth to "full in N min / at step S", to the decision to restart, and the explanation of a gauge in danger."""

from __future__ import annotations

import pytest

from memtop.supervisor.monitor.values import Band
from memtop.supervisor.recovery.leaks import HELD_SAMPLES, DangerWatch, Leak, Pool, must_act, swap_trend, trends
from memtop.supervisor.recovery.trend import Slope
from memtop.supervisor.wire import Trend, TrendKind, TrendSubject

GIB, MIB = 1 << 30, 1 << 20
# 1 MiB per update, two updates in a second.
SLOPE = Slope(per_unit=MIB, per_second=2 * MIB, confidence=1.0, span=80, seconds=40)
POOLS = {"host": Pool(name="host RAM", left_bytes=GIB), "card": Pool(name="GPU 0", left_bytes=None)}


RANK = TrendSubject(kind=TrendKind.HOST_ANONYMOUS, rank=0, role="rank")
TENSORS = TrendSubject(kind=TrendKind.GPU_ALLOCATED, gpu_index=0, rank=0)


def leak(subject: TrendSubject = RANK, pool: str = "host", spare: int = 0, by_update: bool = True) -> Leak:
    return Leak(subject, pool, SLOPE, by_update, spare)


def test_when_it_is_full() -> None:
    (trend,) = trends([leak()], POOLS, 200)
    assert (trend.full_in_seconds, trend.full_at_update) == (512, 1224)
    assert trend.message == (
        "anonymous memory of rank 0 grows by 1.0 MiB per update (2.0 MiB/s), without a fall for 80 updates: "
        "host RAM is full in 9 min, at update 1224"
    )


def test_two_leaks_fill_one_pool_together() -> None:
    both = trends([leak(), leak(TrendSubject(kind=TrendKind.HOST_ANONYMOUS, role="loader worker"))], POOLS, 200)
    assert [trend.full_at_update for trend in both] == [712, 712]


def test_the_allocators_cache_is_used_first() -> None:
    pools = {"card": Pool(name="GPU 0", left_bytes=GIB)}
    (trend,) = trends([leak(TENSORS, "card", spare=GIB)], pools, 0)
    assert trend.full_at_update == 2048


def test_without_a_limit_there_is_no_end() -> None:
    (trend,) = trends([leak(TENSORS, "card")], POOLS, 200)
    assert (trend.full_in_seconds, trend.full_at_update) == (None, None)
    assert "full" not in trend.message


def test_followed_by_time_there_is_no_update() -> None:
    (trend,) = trends([leak(by_update=False)], POOLS, 200)
    assert (trend.bytes_per_update, trend.full_at_update, trend.full_in_seconds) == (None, None, 512)


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
    ("seconds", "at", "save_every", "acts"),
    [
        (121, 5000, 100, False),
        (120, 5000, 100, True),  # within two minutes
        (9999, 405, 100, True),  # the save at 400 and its margin
        (9999, 406, 100, False),
        (9999, 405, None, False),  # another program: its saves are not known
        (None, None, 100, False),
    ],
)
def test_it_acts_when_the_memory_does_not_last_to_the_next_save(
    seconds: float | None, at: int | None, save_every: int | None, acts: bool
) -> None:
    found = must_act([trend(seconds, at)], update=350, start_update=0, seconds=9999, save_every=save_every)
    assert (found is not None) is acts


def test_an_attempt_has_100_updates_before_a_leak_restarts_it() -> None:
    assert must_act([trend(5, 360)], update=350, start_update=251, seconds=99, save_every=100) is None
    assert must_act([trend(5, 360)], update=350, start_update=250, seconds=99, save_every=100) is not None
    assert must_act([trend(5, 360)], update=None, start_update=0, seconds=99, save_every=100) is None


def test_an_attempt_is_not_restarted_before_half_of_its_memory_is_gone() -> None:
    """However rare the saves are: a restart saves by itself, and one that comes too soon only costs time."""
    far_off = trend(5000, 9000)
    assert must_act([far_off], update=350, start_update=0, seconds=4999, save_every=1_000_000) is None
    assert must_act([far_off], update=350, start_update=0, seconds=5000, save_every=1_000_000) is far_off


def test_swap_has_no_end_and_is_never_acted_on() -> None:
    swapping = swap_trend(3.5 * MIB, 0.9)
    assert swapping.full_in_seconds is None
    assert "3.5 MiB/s are read back from swap, in 90 %" in swapping.message
    assert must_act([swapping], update=350, start_update=0, seconds=9999, save_every=10) is None


def danger(samples: list[tuple[Band, int]]) -> list[str]:
    """The cache of a 10 GiB card at each second, in MiB; tensors take 6 GiB."""
    watch, told = DangerWatch("GPU 0"), []
    for second, (band, cache) in enumerate(samples):
        parts = {"tensors": 6 * GIB, "cache": cache * MIB, "other programs": None}
        line = watch.add(1000.0 + second, band, 0.93, 10 * GIB, parts)
        if line is not None:
            told.append(line)
    return told


def test_danger_that_is_held_is_explained_by_what_grew() -> None:
    # Still for a minute, then 922 MiB more within 40 s.
    growing = [(Band.EDGE, 500)] * 60 + [(Band.DANGER, 500 + 23 * second) for second in range(1, 41)]
    (line,) = danger([*growing, *[(Band.DANGER, 1420)] * 20][: 60 + 40 + 20])[:1]
    assert line.startswith("GPU 0 stays in danger, 93.0 % of 10.0 GiB: cache grew ")
    held = [(Band.EDGE, 500)] * 60 + [(Band.EDGE, 500 + 23 * second) for second in range(1, 41)] + [(Band.DANGER, 1420)] * 12
    (line,) = danger(held)
    assert "cache grew 920 MiB in 3" in line


def test_danger_is_reported_once_until_it_ends() -> None:
    assert len(danger([(Band.DANGER, 900)] * 100)) == 1
    assert danger([(Band.DANGER, 900)] * (HELD_SAMPLES - 1)) == []
    twice = [(Band.DANGER, 900)] * 20 + [(Band.SAFE, 100)] + [(Band.DANGER, 900)] * 20
    assert len(danger(twice)) == 2
    # A moment in which nothing is known is neither.
    gap = [(Band.DANGER, 900)] * 5 + [(Band.UNKNOWN, 900)] + [(Band.DANGER, 900)] * 5
    assert len(danger(gap)) == 1


def test_a_gauge_that_was_full_from_the_start_is_not_blamed_on_anything() -> None:
    (line,) = danger([(Band.DANGER, 900)] * 20)
    assert "no part of it grew" in line
