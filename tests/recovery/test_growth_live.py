"""A trial that runs out of memory is undone and not tried again; one whose supervisor dies is undone by the next."""

from __future__ import annotations

import pytest

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.run.client import ask
from memtop.supervisor.run.folder import find_run
from memtop.supervisor.run.view import read_state
from memtop.supervisor.wire import Change, Outcome, Trial, Try
from tests.conftest import Runs
from tests.recovery.injected import FATAL, TINY, TOO_LARGE, inject


def start(runs: Runs, *more: str) -> None:
    runs.environment["OMP_NUM_THREADS"] = "1"
    split = ("--batch", "8", "--accum", "5", "--seq-len", "32", "--save-every", "1000", "--max-updates", "100000")
    runs.memtop("train", "--detach", "--name", "a", *split, *TINY, *more)
    # A peak must have been measured: without one nothing says that the step fits.
    runs.wait("a", lambda d: (d["updates"] or 0) >= 10 and d["configurations"][-1]["peak"] is not None)


def trial_that_is(runs: Runs, state: str) -> Trial:
    """The newest trial when it is in that state."""
    folder = find_run("a", runs.path)

    def there(_: object) -> bool:
        trial = read_state(folder).trial
        return trial is not None and trial.state == state

    runs.wait("a", there)
    trial = read_state(folder).trial
    assert trial is not None
    return trial


GROW = Change(batch=10, accumulation=4)


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


def test_a_trial_whose_supervisor_dies_is_undone_by_the_next(runs: Runs) -> None:
    # Updates that last long enough for the supervisor to die in the middle of the trial.
    start(runs, "--seq-len", "256", "--set", "model.config.hidden_size=128", "--set", "model.config.intermediate_size=512")
    folder = find_run("a", runs.path)
    ask(folder, lambda number: Try(id=number, change=GROW), until=Outcome.ACCEPTED)
    runs.wait("a", lambda d: d["settings"]["batch"] == 10)
    runs.kill(read_state(folder).supervisor_pid or 0)
    runs.memtop("watch", "--once", "--json")  # whoever looks has it looked after again

    assert trial_that_is(runs, "undone").reason == "its supervisor ended in the middle of it"
    document = runs.wait("a", lambda d: d["settings"]["batch"] == 8)
    assert document["adopted"]
    runs.memtop("stop", "a")


def test_a_trial_of_a_run_that_is_stopped_meanwhile_is_over(runs: Runs) -> None:
    start(runs)
    ask(find_run("a", runs.path), lambda number: Try(id=number, change=GROW), until=Outcome.ACCEPTED)
    runs.memtop("stop", "a")
    assert "the run is" in str(trial_that_is(runs, "refused").reason)


@pytest.mark.parametrize("on_oom", ["auto", "stop"])
def test_a_program_that_dies_in_a_trial_goes_on_with_the_settings_before(runs: Runs, on_oom: str) -> None:
    inject(runs, FATAL)
    start(runs, "--on-oom", on_oom)
    answer = ask(find_run("a", runs.path), lambda number: Try(id=number, change=GROW))
    assert answer.data["state"] == "undone"
    document = runs.wait("a", lambda d: len(d["attempts"]) == 2 and d["state"] == "training")
    assert (document["settings"]["batch"], document["settings"]["accumulation"]) == (8, 5)
    assert "trial undone" in document["attempts"][1]["reason"]
    # The state was saved before the change: what was learnt before it is not lost.
    assert document["attempts"][1]["start_updates"] >= 20
    with pytest.raises(RefusedError, match="B 10 ran out of memory in this run"):
        ask(find_run("a", runs.path), lambda number: Try(id=number, change=GROW))
    runs.memtop("stop", "a")
