"""The splits that `--batch auto` chooses for ranks of different memory and speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memtop.presets.estimate import estimate
from memtop.presets.measured import ENOUGH_UPDATES, GpuKind, Learned, model_key
from memtop.presets.measured import Measured as Earlier
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Split, exact_splits
from memtop.train.batch_choice import Measured, choose_splits, earlier_scale, even_splits, update_seconds
from tests.recovery.support import T5


def rank(largest: int, each: float, fixed: float = 0.0) -> Measured:
    """A rank whose passes take a fixed time, and this time for each sample."""
    return Measured(largest, {size: fixed + each * size for size in sorted({1, largest})})


@pytest.mark.parametrize(
    ("effective", "ranks", "expected"),
    [
        # The first rank is three times as fast.
        (32, [rank(16, 1, 0.1), rank(4, 3, 0.3)], [(12, 2), (4, 2)]),
        (4, [rank(4, 1, 0.1), rank(1, 3, 0.3)], [(3, 1), (1, 1)]),
        # Two fast ranks get the same share.
        (30, [rank(8, 1, 0.1), rank(8, 1, 0.1), rank(8, 2, 0.2)], [(6, 2), (6, 2), (6, 1)]),
        # 11 and 5 samples are nearer to the speeds, but need 11 and 5 micro-batches.
        (16, [rank(8, 1, 8), rank(4, 2, 8)], [(5, 2), (3, 2)]),
    ],
)
def test_a_faster_rank_computes_more(effective: int, ranks: list[Measured], expected: list[Split]) -> None:
    assert list(choose_splits(effective, ranks)) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(8, 1)], (8, 4)),
        # Almost as fast, with the same largest micro-batch.
        ([rank(8, 1), rank(8, 1.09)], (8, 2)),
        # The second one has more memory, but is as fast with the smaller micro-batch.
        ([rank(4, 1), rank(16, 1)], (4, 4)),
        # 17 and 15 samples would save less than 5 %, and need many micro-batches.
        ([rank(8, 1, 1), rank(8, 1.12, 1)], (8, 2)),
        # What fits is not known, or nothing does.
        ([rank(8, 1), Measured(1, {})], (1, 16)),
    ],
)
def test_an_even_split_is_kept_where_another_one_gains_little(ranks: list[Measured], expected: Split) -> None:
    assert choose_splits(32, ranks) == (expected,) * len(ranks)


ranks_of_any_kind = st.builds(rank, st.integers(1, 12), st.integers(1, 9).map(float), st.integers(0, 20).map(float))


@given(st.lists(ranks_of_any_kind, min_size=2, max_size=3), st.integers(1, 9))
def test_no_other_splits_take_less_time(ranks: list[Measured], share: int) -> None:
    effective = share * len(ranks)
    chosen, even = choose_splits(effective, ranks), even_splits(effective, ranks)
    assert sum(batch * accumulation for batch, accumulation in chosen) == effective
    assert all(batch <= one.largest and accumulation >= 1 for (batch, accumulation), one in zip(chosen, ranks, strict=True))
    speeds = [one.speed for one in ranks]
    if len({one.largest for one in ranks}) == 1 and max(speeds) < 1.1 * min(speeds):
        assert chosen == even
        return
    possible = {shares: fastest(shares, ranks) for shares in all_shares(effective, len(ranks))}
    least = min(possible.values())
    if least >= 0.95 * update_seconds(even, ranks):
        assert chosen == even
        return
    assert update_seconds(chosen, ranks) == pytest.approx(least)

    def apart(shares: Sequence[int]) -> float:
        wanted = [effective * speed / sum(speeds) for speed in speeds]
        return sum((one - other) ** 2 for one, other in zip(shares, wanted, strict=True))

    nearest = min(apart(shares) for shares, seconds in possible.items() if seconds <= least * (1 + 1e-9))
    assert apart([batch * accumulation for batch, accumulation in chosen]) == pytest.approx(nearest)


@settings(max_examples=20)
@given(st.lists(ranks_of_any_kind, min_size=2, max_size=4), st.integers(100, 3000))
def test_the_sum_is_exact_and_never_slower_for_large_updates(ranks: list[Measured], share: int) -> None:
    effective = share * len(ranks)
    chosen = choose_splits(effective, ranks)
    assert sum(batch * accumulation for batch, accumulation in chosen) == effective
    assert update_seconds(chosen, ranks) <= update_seconds(even_splits(effective, ranks), ranks)


def all_shares(total: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (total,)
        return
    for first in range(1, total - count + 2):
        for rest in all_shares(total - first, count - 1):
            yield (first, *rest)


def fastest(shares: Sequence[int], ranks: Sequence[Measured]) -> float:
    """The time of an update with these shares, each in the micro-batches that take least time."""
    return max(
        min(update_seconds([split], [one]) for split in exact_splits(samples) if split[0] <= one.largest)
        for samples, one in zip(shares, ranks, strict=True)
    )


def test_a_short_run_with_samples_of_various_lengths_raises_the_estimate_and_never_lowers_it() -> None:
    chosen, config, card = replace(T5, world_size=1), stored_config(T5) or {}, {"generation": 86, "capacity": 20 << 30}
    reserved = estimate(chosen, config, **card).reserved

    def scale(*seen: tuple[float, int]) -> float:
        known = {"run": "/a", "time": 1.0, "gpu": GpuKind("A4500", 20 << 30), "model": model_key(config), "settings": chosen}
        rows = [Earlier(**known, reserved_bytes=round(reserved * ratio), updates=updates) for ratio, updates in seen]
        return earlier_scale(Learned(rows=tuple(rows)), chosen, config, **card)

    assert scale((0.45, 3)) == 1.0
    assert scale((1.3, 3)) == pytest.approx(1.3)
    assert scale((0.7, ENOUGH_UPDATES)) == pytest.approx(0.7)
    assert scale((0.7, ENOUGH_UPDATES), (0.45, 3)) == pytest.approx(0.7)
    assert scale((0.7, ENOUGH_UPDATES), (0.9, 3)) == pytest.approx(0.9)
