"""The short version of `bench/chaos.py`: random SIGKILLs do not change the training."""

from __future__ import annotations

import pytest

from bench.chaos import Workload, torment
from tests.conftest import Runs


@pytest.mark.timeout(600)
def test_random_kills_change_nothing_of_the_training(runs: Runs) -> None:
    found = torment(Workload(runs), kills=6, seed=5, within=2.0)
    assert found["wrong"] == []
    assert found["kills"] == 6
    assert sum(found["killed"].values()) == 6
