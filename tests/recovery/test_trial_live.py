"""Trials of the built-in trainer. A trial that runs out of memory is undone and not repeated. When
the supervisor or the program ends, stops or restarts, the settings before the trial return.
`tests/run/test_trial.py` has all other cases."""

from __future__ import annotations

from typing import Any

import pytest

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.run.client import ask
from memtop.supervisor.run.record.folder import find_run
from memtop.supervisor.run.view import read_state
from memtop.supervisor.wire import Change, Outcome, Trial, Try
from tests.conftest import Runs
from tests.recovery.injected import FATAL, SLOW, TINY, TOO_LARGE, inject


def start(runs: Runs) -> None:
    runs.environment["OMP_NUM_THREADS"] = "1"
    split = ("--batch", "8", "--accum", "5", "--seq-len", "32", "--save-every", "1000", "--max-updates", "100000")
    runs.memtop("train", "--detach", "--name", "a", *split, *TINY)
    # Without a measured peak it is unknown whether the step fits.
    runs.wait("a", lambda d: (d["updates"] or 0) >= 10 and d["configurations"][-1]["peak"] is not None)


def trial_that_is(runs: Runs, state: str) -> Trial:
    """The newest trial, once it is in that state."""
    folder = find_run("a", runs.path)

    def there(_: object) -> bool:
        trial = read_state(folder).trial
        return trial is not None and trial.state == state

    runs.wait("a", there)
    trial = read_state(folder).trial
    assert trial is not None
    return trial


GROW = Change(assignments={"batch": "10", "accumulation": "4"})


def test_memory_that_runs_out_in_a_trial_undoes_it_for_good(runs: Runs) -> None:
    inject(runs, TOO_LARGE)
    start(runs)
    folder = find_run("a", runs.path)
    answer = ask(folder, lambda number: Try(id=number, change=GROW))
    assert answer.data["state"] == "undone"
    assert "memory ran out at update" in answer.data["reason"]
    document = runs.wait("a", lambda d: (d["settings"]["batch"], d["settings"]["accumulation"]) == (8, 5))
    assert document["effective_batch"] == 40
    with pytest.raises(RefusedError, match="B 10 ran out of memory in this run"):
        ask(folder, lambda number: Try(id=number, change=GROW))
    trial_that_is(runs, "refused")
    runs.memtop("stop", "a")


def split(document: dict[str, Any]) -> tuple[int, int]:
    return document["settings"]["batch"], document["settings"]["accumulation"]


def try_until_changed(runs: Runs) -> None:
    """Begin a trial, and wait until the program uses its settings."""
    ask(find_run("a", runs.path), lambda number: Try(id=number, change=GROW), until=Outcome.ACCEPTED)
    runs.wait("a", lambda d: split(d) == (10, 4))


def test_settings_on_trial_outlive_neither_a_supervisor_nor_a_stop(runs: Runs) -> None:
    inject(runs, SLOW)
    start(runs)
    try_until_changed(runs)
    runs.kill(read_state(find_run("a", runs.path)).supervisor_pid or 0)
    runs.memtop("watch", "--once", "--json")  # starts a new supervisor
    assert trial_that_is(runs, "undone").reason == "its supervisor ended in the middle of it"
    assert runs.wait("a", lambda d: split(d) == (8, 5))["adopted"]

    try_until_changed(runs)
    runs.memtop("stop", "a")
    reason = trial_that_is(runs, "undone").reason or ""
    assert reason.startswith("the run is ")
    assert reason.endswith("whatever starts next starts from the settings before")
    document = runs.wait("a", lambda d: split(d) == (8, 5))
    rows = [(row["settings"]["batch"], row["outcome"]) for row in document["configurations"]]
    assert rows == [(8, "replaced"), (10, "replaced"), (8, "replaced"), (10, "replaced"), (8, "stopped")]
    runs.memtop("restart", "a", "--detach")
    document = runs.wait("a", lambda d: len(d["attempts"]) == 2 and d["state"] == "training")
    assert document["attempts"][1]["settings"]["batch"] == 8
    runs.memtop("stop", "a")


@pytest.mark.long
def test_a_program_that_dies_in_a_trial_goes_on_with_the_settings_before(runs: Runs) -> None:
    inject(runs, FATAL)
    start(runs)
    answer = ask(find_run("a", runs.path), lambda number: Try(id=number, change=GROW))
    assert answer.data["state"] == "undone"
    document = runs.wait("a", lambda d: len(d["attempts"]) == 2 and d["state"] == "training")
    assert (document["settings"]["batch"], document["settings"]["accumulation"]) == (8, 5)
    assert "trial undone" in document["attempts"][1]["reason"]
    # The state was saved before the change, so that no training is lost.
    assert document["attempts"][1]["start_updates"] >= 20
    with pytest.raises(RefusedError, match="B 10 ran out of memory in this run"):
        ask(find_run("a", runs.path), lambda number: Try(id=number, change=GROW))
    runs.memtop("stop", "a")
