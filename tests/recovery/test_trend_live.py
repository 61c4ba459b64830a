"""External commands: a leak is reported with its process, and a sawtooth is not reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memtop.supervisor.monitor.host import HostReader
from memtop.supervisor.recovery.values import TrendKind, TrendSubject
from memtop.supervisor.run.record.folder import find_run
from memtop.supervisor.run.view import read_state
from tests.conftest import Runs

PROGRAM = str(Path(__file__).with_name("leaking.py"))
MIB = 1 << 20
RANK = TrendSubject(kind=TrendKind.HOST_ANONYMOUS, rank=0, role="rank")
WORKERS = TrendSubject(kind=TrendKind.HOST_ANONYMOUS, role="loader worker")


def start(runs: Runs, kind: str, updates: int, seconds: float = 0.1) -> None:
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, PROGRAM, kind, str(updates), str(seconds))


def test_two_leaks_are_reported_within_100_updates(runs: Runs) -> None:
    """The rank and its loader worker each keep 1 MiB per update."""
    # The workers' memory is read once per second, which is every fifth of these updates.
    start(runs, "leak", 600, 0.2)
    folder = find_run("a", runs.path)
    runs.wait("a", lambda _: len({trend.subject for trend in read_state(folder).trends} & {RANK, WORKERS}) == 2)
    state = read_state(folder)
    recorded = {
        (event.data["subject"].get("rank"), event.data["subject"]["role"]): event.data
        for event in reversed(runs.events("a", "trend"))
    }  # the first event of each
    left = HostReader().read().available_bytes
    assert left is not None
    assert state.updates is not None
    for subject in (RANK, WORKERS):
        trend = next(trend for trend in state.trends if trend.subject == subject)
        assert recorded[subject.rank, subject.role]["update"] <= 100
        assert trend.bytes_per_update == pytest.approx(MIB, rel=0.2)
        # Both fill the memory together: compare with the memory that is available now.
        assert trend.full_at_update is not None
        assert trend.full_at_update - state.updates == pytest.approx(left / (2 * MIB), rel=0.2)
        assert "is full in" in trend.message
    runs.kill(state.trainer_pid or 0)


def test_a_sawtooth_is_not_reported(runs: Runs) -> None:
    start(runs, "sawtooth", 400, 0.025)
    runs.wait("a", lambda document: document["state"] == "finished")
    assert runs.events("a", "trend") == []
    assert runs.events("a", "leak") == []
