"""Spikes of the loss and losses that are not finite, in real runs of the trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Runs
from tests.recovery.injected import BROKEN, PACED, inject
from tests.test_end_to_end import tiny

LONG = pytest.mark.long
NOT_FINITE = BROKEN.replace("parameter.add_(torch.randn_like(parameter))", "parameter.fill_(float('nan'))")


def broken(runs: Runs, fault: str, action: str, status: int | None) -> dict[str, Any]:
    """A run of 40 updates whose weights are broken by update 33 of the first attempt."""
    words = tiny(runs, "--headless", "--name", "a", "--on-spike", action, "--max-updates", "40")
    inject(runs, PACED + fault)
    runs.memtop(*words, status=status, timeout=280)
    return runs.show("a", metrics=True)


def no_broken_weights_are_saved(runs: Runs) -> None:
    """Also where a save is due, at update 40, and where nobody answers."""
    saved = [event.data["updates"] for event in runs.events("a", "checkpoint") if event.attempt == 1 and event.data]
    assert not [update for update in saved if update >= 33]
    assert weights_are_finite(runs.path / "a")


def weights_are_finite(folder: Path) -> bool:
    found = [tensor for path in folder.rglob("*.safetensors") for tensor in load_file(path).values()]
    assert found, folder
    return all(bool(torch.isfinite(tensor).all()) for tensor in found)


@pytest.mark.parametrize("fault", [pytest.param(BROKEN, id="high"), pytest.param(NOT_FINITE, id="not finite", marks=LONG)])
def test_a_run_goes_back_by_itself_and_says_which_samples_it_leaves_out(runs: Runs, fault: str) -> None:
    document = broken(runs, fault, "back", 0)
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["failed", "finished"]
    (spike,) = runs.events("a", "spike")
    begin, end = spike.data["begin"], spike.data["end"]
    assert end - begin == spike.data["samples"] == len(spike.data["sample_ids"])
    assert f"without the {end - begin} samples of the updates {spike.data['first_update']} to" in spike.message
    second = document["attempts"][1]
    assert second["settings"]["leave_out"] == [[begin, end]]
    assert second["start_updates"] == spike.data["state_update"] <= 32
    assert [row["update"] for row in document["metrics"]] == list(range(1, document["updates"] + 1))
    assert all(math.isfinite(row["loss"]) for row in document["metrics"])
    no_broken_weights_are_saved(runs)


@pytest.mark.parametrize("fault", [pytest.param(BROKEN, id="high", marks=LONG), pytest.param(NOT_FINITE, id="not finite")])
def test_a_run_stops_and_keeps_the_state_from_before(runs: Runs, fault: str) -> None:
    document = broken(runs, fault, "stop", 1)
    (attempt,) = document["attempts"]
    assert attempt["outcome"] == "failed"
    (spike,) = runs.events("a", "spike")
    assert "`memtop rollback a --before-spike` goes back to the state of update 30" in spike.message
    assert document["checkpoint"]["updates"] == 30
    no_broken_weights_are_saved(runs)


def test_weights_that_are_not_finite_reach_no_saved_state_while_nobody_answers(runs: Runs) -> None:
    document = broken(runs, NOT_FINITE, "ask", None)
    no_broken_weights_are_saved(runs)
    assert document["checkpoint"]["complete"]
