"""The exchange of gradients over two ranks, and waits between them (`exchange_worker.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memtop.train.exchange import plan_buckets
from tests.train.launching import two_ranks


def test_buckets_hold_every_element_once_and_the_last_parameters_first() -> None:
    shapes = [(5,), (300,), (4, 4), (0,), (1000,), (7,), (10, 10), (3,)]
    parameters = [torch.zeros(shape, dtype=torch.bfloat16 if 2 < at < 6 else torch.float32) for at, shape in enumerate(shapes)]
    plan = plan_buckets(parameters, 512)
    elements: dict[int, list[int]] = {number: [] for number in range(len(shapes))}
    for bucket in plan:
        assert 0 < bucket.size_bytes <= 512
        assert {parameters[number].dtype for number in bucket.numbers} == {bucket.dtype}
        if len(bucket.numbers) == 1:
            elements[bucket.numbers[0]] += range(bucket.start, bucket.start + bucket.length)
        else:
            assert bucket.length == sum(parameters[number].numel() for number in bucket.numbers)
            for number in bucket.numbers:
                elements[number] += range(parameters[number].numel())
    assert all(found == list(range(parameters[number].numel())) for number, found in elements.items())
    assert [bucket.numbers for bucket in plan] == [(6,), (4,), (4,), (4,), (4,), (1,), (1,), (1,), (5, 3), (7, 2, 0)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks("exchange_worker", tmp_path_factory.mktemp("exchange"))


def test_a_failure_at_every_place_of_an_update_blocks_no_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = (result["placed"] for result in ranks)
    places, buckets, _ = ranks[0]["counts"]
    assert places > buckets > 5
    for result, (_, _, failures) in zip((first, second), (rank["counts"] for rank in ranks), strict=True):
        assert failures == len(result["oom"]) == 2 * places
        assert all(survived for _, _, survived in result["oom"])
    # Each update with a failure ran with half the micro-batch, the others with the whole one.
    assert [batch for _, (batch, _) in first["splits"]] == [4, *[2, 4] * (3 * places), 4]
    for name in ("weights", "losses", "digests", "splits", "settings"):
        assert first[name] == second[name], name


def test_failures_at_every_place_change_nothing(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["calm"]["oom"] == []
        for name in ("weights", "losses", "digests", "splits"):
            assert result["placed"][name] == result["calm"][name], name


def test_ranks_wait_for_a_slow_rank_beyond_the_time_limit_of_the_exchange(tmp_path: Path) -> None:
    first, second = two_ranks("exchange_worker", tmp_path, "waits")
    assert first == second
    assert (first["saved"], first["updates"]) == (True, 0)
