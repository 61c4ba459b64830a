"""One hour of samples in memory: gaps and peaks stay, and memory does not grow after the first
hour."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtop.supervisor.monitor.history import HOST, KEPT_SECONDS, Bucket, History, resample
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot
from tests.forking import LONG

START = 1_760_000_000.0


def snapshot(time: float, *used: int | None, host: float | None = 0.5) -> MachineSnapshot:
    gpus = tuple(
        GpuSample(index=n, uuid=f"GPU-{n}", used_bytes=value, used_fraction=None if value is None else value / 1000)
        for n, value in enumerate(used)
    )
    return MachineSnapshot(time=time, gpus=gpus, host=HostSample(used_fraction=host, swap_used_bytes=0))


def test_values_come_back_and_unknown_ones_stay_unknown() -> None:
    history = History()
    history.append(snapshot(START, 100, None), run_rss_bytes=7)
    history.append(snapshot(START + 1, 200, 5, host=None))
    assert history.series("GPU-0", "used_bytes") == [(START, 100), (START + 1, 200)]
    assert history.series("GPU-1", "used_bytes") == [(START, None), (START + 1, 5)]
    assert history.series(HOST, "used_fraction") == [(START, 0.5), (START + 1, None)]
    assert history.series(HOST, "run_rss_bytes", since=START + 1) == [(START + 1, None)]
    assert history.series("GPU-0", "power_watts") == [(START, None), (START + 1, None)]
    # Zero is a value.
    assert history.series(HOST, "swap_used_bytes") == [(START, 0), (START + 1, 0)]
    assert (history.start, history.end, history.gpu_index("GPU-1")) == (START, START + 1, 1)


def test_the_same_sample_counts_once_and_quick_ones_keep_their_peak() -> None:
    history = History()
    for moment, used in ((0.0, 100), (0.0, 100), (0.2, 900), (0.4, 50), (0.6, None), (1.0, 70)):
        history.append(snapshot(START + moment, used))
    assert history.series("GPU-0", "used_bytes") == [(START, 900), (START + 1, 70)]


def test_gpus_come_and_go_and_are_forgotten_after_an_hour() -> None:
    history = History()
    history.append(snapshot(START, 1, 2))
    history.append(snapshot(START + 1, 3))
    assert history.keys == ("GPU-0", "GPU-1", HOST)
    assert history.series("GPU-1", "used_bytes") == [(START, 2)]
    history.append(snapshot(START + KEPT_SECONDS + 2, 3))
    assert history.keys == ("GPU-0", HOST)


def test_a_clock_that_is_set_back_leaves_times_in_order() -> None:
    history = History()
    for moment in (0, 1, 2, 3, 1.5, 2.5):
        history.append(snapshot(START + moment, 1))
    times = [time - START for time, _ in history.series("GPU-0", "used_bytes")]
    assert times == [0, 1, 2.5]


def test_four_hours_take_no_more_memory_than_one() -> None:
    history, sizes = History(), []
    machines = [snapshot(0, *range(16))]
    for second in range(86_400 if LONG else 14_400):
        # Making a snapshot costs more than adding it: only its time changes. Most GPUs are left out
        # after two hours.
        gpus = machines[0].gpus if second < 7200 else machines[0].gpus[:1]
        history.append(MachineSnapshot(time=START + second, gpus=gpus, host=machines[0].host), run_rss_bytes=second)
        if second in (4000, 7000):
            sizes.append(sum(len(times) + sum(map(len, columns.values())) for _, _, times, columns in history.dump()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.07)
    assert sizes[1] < 2.2e6
    assert history.keys == ("GPU-0", HOST)
    rows = history.series(HOST, "run_rss_bytes")
    assert KEPT_SECONDS <= len(rows) <= KEPT_SECONDS + 250
    assert rows[-1] == (START + 14_399, 14_399)


def test_a_dump_is_taken_over_whole_and_what_was_not_sent_is_unknown() -> None:
    here, there = History(), History()
    for second in range(5):
        here.append(snapshot(START + second, second, None))
    there.append(snapshot(START - 100, 77))
    for key, gpu_index, times, columns in here.dump():
        columns.pop("power_watts", None)
        there.load(key, gpu_index, times, columns)
    for key, name in (("GPU-0", "used_bytes"), ("GPU-1", "used_bytes"), (HOST, "used_fraction"), ("GPU-0", "power_watts")):
        assert there.series(key, name) == here.series(key, name)
    with pytest.raises(ValueError, match="different lengths"):
        there.load("GPU-0", 0, b"\0" * 16, {"used_bytes": b"\0" * 4})


def test_a_gap_in_time_is_no_value_in_the_chart() -> None:
    history = History()
    for second in (*range(10), *range(60, 70)):
        history.append(snapshot(START + second, 100))
    shown = resample(history.buckets("GPU-0", "used_bytes"), START, START + 70, 70)
    known = [n for n, bucket in enumerate(shown) if bucket is not None]
    # The last value before the gap is shown for as long as a late sample may take.
    assert set(known) == {*range(12), *range(60, 70)}
    slow = History()
    for second in range(0, 60, 5):
        slow.append(snapshot(START + second, 100))
    assert None not in resample(slow.buckets("GPU-0", "used_bytes"), START, START + 57, 57)


def test_a_peak_of_one_second_survives_an_hour_on_ten_columns() -> None:
    history = History()
    for second in range(3600):
        history.append(snapshot(START + second, 990 if second == 1234 else 10, host=None if second < 1800 else 0.25))
    shown = resample(history.buckets("GPU-0", "used_bytes"), START, START + 3600, 10)
    bucket = shown[3]
    assert bucket is not None
    assert (bucket.low, bucket.high) == (10, 990)
    assert bucket.mean == pytest.approx((359 * 10 + 990) / 360)
    host = resample(history.buckets(HOST, "used_fraction"), START, START + 3600, 10)
    assert host[:5] == [None] * 5
    assert None not in host[5:]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 20), st.floats(-1e6, 1e6)), min_size=1, max_size=30),
    st.integers(1, 50),
)
def test_thinning_out_never_loses_the_least_or_the_most(rows: list[tuple[float, float, float]], count: int) -> None:
    buckets = [Bucket(time, seconds, value, value, value) for time, seconds, value in rows]
    shown = [bucket for bucket in resample(buckets, 0, 120, count) if bucket is not None]
    assert min(b.low for b in shown) == min(b.low for b in buckets)
    assert max(b.high for b in shown) == max(b.high for b in buckets)
    for bucket in shown:
        assert bucket.low - 1e-6 <= bucket.mean <= bucket.high + 1e-6 or math.isclose(bucket.low, bucket.high, rel_tol=1e-9)
