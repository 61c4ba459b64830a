"""A leak in the built-in trainer that would fill the memory before the next save: it saves and
restarts automatically.

`tests/run/test_step.py` tests the runs that memtop does not restart."""

from __future__ import annotations

from tests.conftest import Runs
from tests.groups import MemoryGroup
from tests.recovery.injected import LEAK, TINY, inject

SELDOM = ("--save-every", "1000000", "--max-updates", "2000000")


def start(runs: Runs, group: MemoryGroup) -> None:
    """Start supervisor and trainer in a memory group that the leak fills in about 250 updates."""
    runs.environment["OMP_NUM_THREADS"] = "1"
    inject(runs, LEAK)
    group.limit(5 << 29)
    arguments = ("train", "--detach", "--name", "a", "--seq-len", "32", *SELDOM, *TINY)
    runs.memtop(*arguments, prepare=group.enter)


def leaks(runs: Runs) -> list[str]:
    return [event.message for event in runs.events("a", "leak")]


def test_it_saves_and_restarts_with_the_same_settings(runs: Runs, group: MemoryGroup) -> None:
    start(runs, group)
    document = runs.wait("a", lambda d: len(d["attempts"]) == 2 and d["state"] == "training", seconds=200)
    first, second = document["attempts"]
    assert second["settings"] == first["settings"]
    # Saved after the last update: nothing was lost.
    assert second["start_updates"] == first["updates"] >= 100
    assert "leak: anonymous memory of rank 0 grows by" in second["reason"]
    assert first["outcome"] == "restarted"
    (line,) = leaks(runs)
    assert line.endswith("saving and restarting with the same settings before that")
    # The restart keeps the configuration and does not count as its failure.
    assert [row["outcome"] for row in document["configurations"]] == [None]
    runs.memtop("stop", "a")
