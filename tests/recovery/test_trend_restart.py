"""A leak in the built-in trainer that would fill the memory before the next save: it saves and restarts by itself."""

from __future__ import annotations

import sys

from tests.conftest import Runs
from tests.groups import MemoryGroup
from tests.recovery.injected import LEAK, TINY, inject

SELDOM = ("--save-every", "1000000", "--max-updates", "2000000")


def start(runs: Runs, group: MemoryGroup, *more: str) -> None:
    """Supervisor and trainer in a group whose memory the leak fills in about 250 updates."""
    runs.environment["OMP_NUM_THREADS"] = "1"
    inject(runs, LEAK)
    group.limit(5 << 29)
    arguments = ("train", "--detach", "--name", "a", "--seq-len", "32", *SELDOM, *TINY, *more)
    runs.memtop(*arguments, prepare=group.enter)


def leaks(runs: Runs) -> list[str]:
    return [event.message for event in runs.events("a", "leak")]


def test_it_saves_and_restarts_with_the_same_settings(runs: Runs, group: MemoryGroup) -> None:
    start(runs, group)
    document = runs.wait("a", lambda d: len(d["attempts"]) == 2 and d["state"] == "training", seconds=200)
    first, second = document["attempts"]
    assert second["settings"] == first["settings"]
    assert second["start_updates"] == first["updates"] >= 100  # saved at the boundary: nothing was lost
    assert "leak: anonymous memory of rank 0 grows by" in second["reason"]
    assert first["outcome"] == "restarted"
    (told,) = leaks(runs)
    assert told.endswith("saving and restarting with the same settings before that")
    # A configuration that leaks is the same one after it: nothing is counted as a failure.
    assert [row["outcome"] for row in document["configurations"]] == [None]
    runs.memtop("stop", "a")


def test_where_nothing_is_done_by_itself_it_is_only_told(runs: Runs, group: MemoryGroup) -> None:
    start(runs, group, "--on-oom", "ask")
    runs.wait("a", lambda _: bool(leaks(runs)), seconds=200)
    assert leaks(runs)[0].endswith("nothing is done about it: --on-oom ask")
    # It grows on: a stop in time saves what it has.
    runs.memtop("stop", "a")
    assert len(runs.show("a")["attempts"]) == 1


# It says that it takes 400 MiB more with each update, which no machine of today has for two minutes.
GREEDY = """
import time, memtop_agent
for update in range(1, 141):
    memtop_agent.report("step", update=update, step_seconds=0.05, anonymous_bytes=update * 400 << 20)
    time.sleep(0.05)
"""


def test_another_program_is_never_restarted_for_it(runs: Runs) -> None:
    runs.memtop("train", "--headless", "--name", "a", "--", sys.executable, "-c", GREEDY)
    (told,) = leaks(runs)
    assert "grows by 400.0 MiB per update" in told
    assert told.endswith("nothing is done about it: it is your own program")
    document = runs.show("a")
    assert (document["state"], len(document["attempts"])) == ("finished", 1)
