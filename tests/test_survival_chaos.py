"""The short version of `bench/chaos.py`: random SIGKILLs do not change the training."""

from __future__ import annotations

import pytest

from bench.chaos import Workload, torment
from tests.conftest import Runs


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [3, pytest.param(6, marks=pytest.mark.long)])
def test_random_kills_change_nothing_of_the_training(runs: Runs, kills: int) -> None:
    found = torment(Workload(runs), kills=kills, seed=5, within=2.0)
    assert found["wrong"] == []
    assert found["kills"] == kills
    assert sum(found["killed"].values()) == kills
