"""Real programs under `memtop train -- ...`: the one that leaks is named, with its process, and the sawtooth is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memtop.supervisor.monitor.host import HostReader
from memtop.supervisor.run.record.folder import find_run
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.view import read_state
from memtop.supervisor.wire import Event, RunState, Trend
from tests.conftest import Runs

PROGRAM = str(Path(__file__).with_name("leaking.py"))
MIB = 1 << 20


def start(runs: Runs, kind: str, updates: int, seconds: float = 0.1) -> None:
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, PROGRAM, kind, str(updates), str(seconds))


def events(runs: Runs, kind: str) -> list[Event]:
    ledger = Ledger(find_run("a", runs.path).ledger_path, read_only=True)
    try:
        return [event for event in ledger.events() if event.kind == kind]
    finally:
        ledger.close()


def named(runs: Runs, what: str) -> tuple[RunState, Trend]:
    """The state when the trend is there."""
    folder = find_run("a", runs.path)
    runs.wait("a", lambda _: any(trend.what == what for trend in read_state(folder).trends))
    state = read_state(folder)
    return state, next(trend for trend in state.trends if trend.what == what)


@pytest.mark.parametrize(("kind", "who"), [("rank", "rank 0"), ("worker", "the loader workers")])
def test_a_megabyte_per_update_is_named_within_100_updates(runs: Runs, kind: str, who: str) -> None:
    # Whose memory is looked at once a second: fewer updates pass between two looks.
    start(runs, kind, 600, 0.2 if kind == "worker" else 0.1)
    state, trend = named(runs, f"anonymous memory of {who}")
    told = events(runs, "trend")[0].data
    assert told["what"] == trend.what
    assert told["update"] <= 100
    assert state.updates is not None
    assert trend.bytes_per_update == pytest.approx(MIB, rel=0.2)
    # When it is full follows from what is left: compare with the machine's own number now.
    left = HostReader().read().available_bytes
    assert left is not None
    assert trend.full_at_update is not None
    assert trend.full_at_update - state.updates == pytest.approx(left / MIB, rel=0.2)
    assert "is full in" in trend.message
    runs.kill(state.trainer_pid or 0)


def test_a_sawtooth_is_not_named(runs: Runs) -> None:
    start(runs, "sawtooth", 400, 0.025)
    runs.wait("a", lambda document: document["state"] == "finished")
    assert events(runs, "trend") == []
    assert events(runs, "leak") == []
