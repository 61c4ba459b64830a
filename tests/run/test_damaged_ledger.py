"""A ledger that is damaged, locked or full: what was damaged is found, and nothing else ends."""

from __future__ import annotations

import shutil
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from memtop.cli import run as memtop
from memtop.supervisor.monitor.values import HostSample, MachineSnapshot
from memtop.supervisor.run.rebuild import open_ledger
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, write_json
from memtop.supervisor.run.record.ledger import Ledger, damage_mark
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.server import Publisher
from memtop.supervisor.wire import Event, Phase, RunState, StateUpdate
from tests.conftest import UNTIL_GO, Runs


def test_a_ledger_that_is_damaged_while_it_is_open_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger(path)) as ledger:
        ledger.add_attempt(1, "start", None, 1.0)
        ledger.add_reports(1, 0, [Step(update=n, time=1.0, sample_digest="d" * 64) for n in range(500)], 1)
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(range(256)) * ((len(content) - 4096) // 256))
    ledger = Ledger(path)
    outbox = Outbox(ledger)
    assert outbox.add_event(Event(time=1.0, attempt=1, kind="plan", message="starts")).id < 0
    assert not outbox.add_reports(1, 0, [Step(update=501)], 2)
    outbox.update_attempt(1, {"updates": 501})
    outbox.retry()
    assert outbox.problem is not None
    assert outbox.problem.startswith(f"{path}: damaged: database disk image is malformed; the next supervisor")
    peer = Mock()
    state = RunState(name="a", folder="a", state=Phase.TRAINING, created=1.0)
    problem = Publisher(ledger, Mock()).greet(peer, 0, state, None)
    assert problem is not None
    assert "dashboards show no earlier updates" in problem
    assert (outbox.damaged, outbox.due) == (True, False)
    assert isinstance(peer.send.call_args_list[0].args[0], StateUpdate)
    assert peer.subscribed
    outbox.write(ledger.close)
    # The next supervisor.
    folder = RunFolder(tmp_path)
    folder.attempt(1).mkdir(parents=True)
    create = RunSpec(name="a", created=1.0, settings=None, command=("x",), cwd="/", memtop_version="0")
    write_json(folder.spec_path, create)
    ledger, words = open_ledger(folder)
    with closing(ledger):
        assert words is not None
        assert [row.number for row in ledger.attempts()] == [1]


@pytest.fixture
def long_run(tmp_path: Path) -> RunFolder:
    """Its ledger was closed, and then a page of old updates was damaged."""
    folder = RunFolder(tmp_path / "long")
    folder.attempt(1).mkdir(parents=True)
    spec = RunSpec(name="a", created=1.0, settings=None, command=("x",), cwd="/", memtop_version="0")
    write_json(folder.spec_path, spec)
    with closing(Ledger(folder.ledger_path)) as ledger:
        ledger.add_attempt(1, "start", None, 1.0)
        ledger.add_reports(1, 0, [Step(update=n, time=1.0, loss=1.0, sample_digest=f"{n:064}") for n in range(500)], 1)
    content = folder.ledger_path.read_bytes()
    page = content.index(f"{250:064}".encode()) // 4096 * 4096
    folder.ledger_path.write_bytes(content[:page] + b"\xff" * 4096 + content[page + 4096 :])
    return folder


def test_damage_in_old_updates_is_found_when_it_is_met(long_run: RunFolder) -> None:
    """Reading all updates at every start would take seconds after a long run."""
    ledger, words = open_ledger(long_run)
    assert words is None
    outbox = Outbox(ledger)
    assert outbox.add_reports(1, 0, [Step(update=501)], 2)
    assert not outbox.add_reports(1, 0, [Step(update=250)], 3)
    assert outbox.damaged
    outbox.write(ledger.close)
    ledger, words = open_ledger(long_run)
    assert words is not None
    assert f"{long_run.ledger_path} was damaged (" in words
    ledger.close()
    ledger, words = open_ledger(long_run)
    ledger.close()
    assert words is None


def test_damage_that_a_reader_meets_is_mended_by_the_restart_that_it_advises(
    long_run: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    assert memtop(["show", "long", "--json", "--metrics", "--runs-dir", str(long_run.path.parent)]) == 1
    said = capfd.readouterr().err
    assert "database disk image is malformed; `memtop restart long` rebuilds it" in said
    ledger, words = open_ledger(long_run)
    ledger.close()
    assert words is not None
    assert "was damaged (" in words


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("numbers", [b"xyz", "text"])
def test_a_history_with_values_that_cannot_be_read_is_damage(tmp_path: Path, numbers: object, killed: bool) -> None:
    folder = RunFolder(tmp_path)
    folder.attempt(1).mkdir(parents=True)
    with closing(Ledger(folder.ledger_path)) as ledger:
        ledger.add_attempt(1, "start", None, 1.0)
        ledger.recorder.add(MachineSnapshot(time=time.time(), gpus=(), host=HostSample(used_fraction=0.5)), 7)
        ledger.recorder.flush()
    with closing(sqlite3.connect(folder.ledger_path, isolation_level=None)) as other:
        assert other.execute("UPDATE history SET numbers = ?", (numbers,)).rowcount > 0
    if killed:
        damage_mark(folder.ledger_path).touch()
    ledger, words = open_ledger(folder)
    ledger.close()
    assert words is not None
    assert "was damaged (wrong values: " in words


def test_after_a_supervisor_was_killed_the_whole_ledger_is_read(long_run: RunFolder, tmp_path: Path) -> None:
    with closing(Ledger(long_run.ledger_path)) as ledger:
        ledger.add_event(Event(time=1.0, attempt=1, kind="plan", message="starts"))
        killed = RunFolder(shutil.copytree(long_run.path, tmp_path / "killed"))
    ledger, words = open_ledger(killed)
    ledger.close()
    assert words is not None
    assert "was damaged (" in words


def test_a_warning_of_damage_that_is_not_there_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    outbox = Outbox(Ledger(path))

    def bug() -> None:
        raise sqlite3.IntegrityError("UNIQUE constraint failed: attempts.number")

    assert not outbox.write(bug)
    outbox.write(outbox.ledger.close)
    ledger, words = open_ledger(RunFolder(tmp_path))
    ledger.close()
    assert words is None
    assert sorted(found.name for found in tmp_path.iterdir()) == ["ledger.sqlite"]


def test_a_write_that_failed_is_tried_again_after_some_seconds(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.sqlite").close()
    now = [100.0]
    with closing(Ledger(tmp_path / "ledger.sqlite", read_only=True)) as full:
        outbox = Outbox(full, lambda: now[0])
        assert outbox.due
        assert not outbox.add_reports(1, 0, [], 1)
        assert (outbox.due, outbox.damaged) == (False, False)
        now[0] += 5
        assert outbox.due


def test_a_ledger_that_another_program_has_locked_is_written_later(tmp_path: Path) -> None:
    """A person has opened it in an editor for SQLite, and has not stored a change."""
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger(path)) as ledger, closing(sqlite3.connect(path, isolation_level=None)) as other:
        outbox = Outbox(ledger)
        other.execute("BEGIN IMMEDIATE")
        assert outbox.add_event(Event(time=1.0, attempt=1, kind="plan", message="starts")).id < 0
        why = "cannot be written: database is locked; another program uses it, `fuser"
        assert outbox.problem == f"{path}: {why} {path}` shows which: close it there"
        assert not outbox.damaged
        other.execute("ROLLBACK")
        outbox.retry()
        assert (outbox.problem, [event.message for event in ledger.events()]) == (None, ["starts"])


def test_the_end_of_a_run_is_written_once_the_ledger_is_not_locked(runs: Runs) -> None:
    program = UNTIL_GO.replace('"go"', f'"{runs.root}/go"')
    runs.memtop("train", "--name", "a", "--detach", "--", sys.executable, "-c", program)
    runs.wait("a", lambda document: document["alive"])
    with closing(sqlite3.connect(runs.path / "a/ledger.sqlite", isolation_level=None, timeout=60)) as other:
        other.execute("BEGIN IMMEDIATE")
        (runs.root / "go").touch()
        runs.wait("a", lambda document: document["state"] == "finished" and "is locked" in str(document["warnings"]))
        other.execute("ROLLBACK")
    document = runs.wait("a", lambda document: document["supervisor_pid"] is None)
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["finished"]
