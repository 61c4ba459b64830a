"""The journal of a rank, the ledger of a run, and what waits while the disk is full; with real
files."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec.structs import replace

from memtop.supervisor.run.effects import DropRows
from memtop.supervisor.run.events import Reported
from memtop.supervisor.run.model import Model
from memtop.supervisor.run.performer import Performer
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.journal import Intake, JournalReader
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.reports import Hello, Report, Step
from memtop.supervisor.run.server import ControlServer, Publisher
from memtop.supervisor.run.state import run_state
from memtop.supervisor.wire import Change, Event
from tests.conftest import no_file_grows
from tests.run.brain import BEGUN, OOM, PLAN, SETTINGS, SPLIT, STEP, row, taken_over


def test_only_whole_lines_are_read_and_damaged_ones_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"type": "step", "update": 1}\n{"upd\n{"type": "step", "update": 2}\n{"type": "step", "update": 3')
    journal = JournalReader(path)
    reports, end = journal.read_new()
    assert reports == [Step(update=1), Step(update=2)]
    journal.offset = end
    with path.open("a") as file:
        file.write("}\n")
    assert journal.read_new()[0] == [Step(update=3)]


def test_workers_that_begin_again_are_noticed_before_what_they_report(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    hello = '{"type": "hello", "restarts": 1}\n'
    path.write_text('{"type": "step", "update": 1}\n' + hello + '{"type": "step", "update": 2}\n')
    journal = JournalReader(path)
    reports, journal.offset = journal.read_new()
    assert reports == [Step(update=1), Hello(restarts=1)]
    assert journal.read_new()[0] == [Step(update=2)]


def steps(update: int, loss: float = 1.0) -> Step:
    return Step(update=update, loss=loss, sample_digest=f"d{update}", time=1.0)


def ledger_with_two_attempts(tmp_path: Path, resumed_at: int | None) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_attempt(1, "start", SETTINGS, 1.0)
    ledger.add_reports(1, 0, [steps(n, 1.0) for n in range(1, 8)], 100)
    ledger.add_attempt(2, "restart", SETTINGS, 2.0)
    if resumed_at is not None:
        ledger.update_attempt(2, start_updates=resumed_at)
        ledger.add_reports(2, 0, [steps(n, 2.0) for n in range(resumed_at + 1, 10)], 100)
    return ledger


def test_updates_that_a_restart_took_back_do_not_count(tmp_path: Path) -> None:
    rows = ledger_with_two_attempts(tmp_path, resumed_at=5).metrics()
    assert [(row.update, row.attempt) for row in rows] == [(n, 1) for n in range(1, 6)] + [(n, 2) for n in range(6, 10)]


def test_old_rows_stay_until_a_restart_reports_where_it_resumes(tmp_path: Path) -> None:
    rows = ledger_with_two_attempts(tmp_path, resumed_at=None).metrics()
    assert [row.update for row in rows] == list(range(1, 8))


def test_rows_after_the_resumed_update_are_dropped_before_the_new_attempt_reports(tmp_path: Path) -> None:
    ledger = ledger_with_two_attempts(tmp_path, resumed_at=None)
    ledger.update_attempt(2, start_updates=3)
    assert [row.update for row in ledger.metrics()] == [1, 2, 3]


def test_reports_read_twice_count_once_and_the_offset_goes_with_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_attempt(1, "start", None, 1.0)
    for _ in range(2):
        ledger.add_reports(1, 0, [steps(1), steps(2)], 64)
    assert len(ledger.metrics()) == 2
    assert ledger.journal_offsets(1, 0) == (64, 0)


def test_a_full_disk_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_attempt(1, "start", None, 1.0)
    many = [replace(steps(n), sample_digest="x" * 500) for n in range(200)]
    with no_file_grows(), pytest.raises(sqlite3.OperationalError, match="disk"):
        ledger.add_reports(1, 0, many, 9000)
    assert ledger.journal_offsets(1, 0) == (0, 0)
    ledger.add_reports(1, 0, many, 9000)
    assert len(ledger.metrics()) == 200


def test_a_reader_sees_events_in_order(tmp_path: Path) -> None:
    writer = Ledger(tmp_path / "ledger.sqlite")
    for n in range(3):
        writer.add_event(Event(time=float(n), attempt=1, kind="k", message=f"m{n}", data={"n": n}))
    reader = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    assert [(event.message, event.data) for event in reader.events(newest=2)] == [("m1", {"n": 1}), ("m2", {"n": 2})]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.add_attempt(1, "no", None, 1.0)


class Heard:
    """The events of one attempt, and what its ledger gets."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.sqlite"
        self.reports: list[tuple[int, Report]] = []
        self.steps: list[Step] = []
        self.journal = folder / "rank-0.jsonl"
        ledger = Ledger(self.path)
        ledger.add_attempt(1, "start", SETTINGS, 9.0)
        self.outbox = Outbox(ledger)
        self.intake = Intake(folder, 1, self.outbox, lambda number, steps: self.steps.extend(steps))

    def write(self, *reports: dict[str, Any]) -> None:
        with self.journal.open("a") as file:
            file.writelines(json.dumps(report) + "\n" for report in reports)

    def read(self) -> None:
        self.intake.read(lambda rank, report: self.reports.append((rank, report)), to_the_end=True)

    def fill_the_disk(self, *, full: bool) -> None:
        self.outbox.ledger.close()
        self.outbox.ledger = Ledger(self.path, read_only=full)


def test_a_full_disk_hides_nothing_of_what_the_program_reports(tmp_path: Path) -> None:
    heard = Heard(tmp_path)
    heard.fill_the_disk(full=True)
    end = {"type": "end", "time": 15.0, "outcome": "failed", "message": "no space"}
    heard.write(PLAN, OOM, SPLIT, STEP, end)
    heard.read()
    assert [type(report).__name__ for _, report in heard.reports] == ["Plan", "Oom", "SettingsChanged", "Step", "End"]
    assert heard.outbox.add_event(Event(time=1.0, attempt=1, kind="plan", message="starts")).id < 0
    heard.outbox.update_attempt(1, {"start_updates": 0})
    assert heard.outbox.problem is not None
    assert heard.outbox.ledger.metrics() == []
    heard.fill_the_disk(full=False)
    heard.intake.store()
    heard.outbox.retry()
    ledger = heard.outbox.ledger
    assert heard.outbox.problem is None
    assert [event.kind for event in ledger.events()] == ["plan"]
    assert [one.update for one in ledger.metrics()] == [1]
    assert [attempt.start_updates for attempt in ledger.attempts()] == [0]
    assert ledger.journal_offsets(1, 0) == (heard.journal.stat().st_size, 0)
    heard.read()
    assert len(heard.reports) == 5, "nothing is acted upon twice"


def test_the_next_supervisor_repeats_what_is_stored_and_reads_the_rest(tmp_path: Path) -> None:
    heard = Heard(tmp_path)
    heard.write(PLAN, STEP)
    heard.read()
    heard.write({**STEP, "update": 2})
    again = Intake(tmp_path, 1, heard.outbox, lambda number, steps: None)
    repeated: list[Report] = []
    again.replay(lambda rank, report: repeated.append(report))
    assert [type(report).__name__ for report in repeated] == ["Plan", "Step"]
    new: list[Report] = []
    again.read(lambda rank, report: new.append(report))
    assert [report.update for report in new if isinstance(report, Step)] == [2]
    assert [one.update for one in heard.outbox.ledger.metrics()] == [1, 2]


def test_steps_that_come_with_their_plan_are_shown(tmp_path: Path) -> None:
    heard = Heard(tmp_path)
    heard.write(PLAN, STEP)
    server = ControlServer(tmp_path / "socket", on_request=AsyncMock(), on_agent=Mock(), on_gone=Mock())
    publisher = Publisher(heard.outbox.ledger, server)
    peer = Mock(subscribed=True)
    server.peers.add(peer)
    brain = taken_over(row(), records=BEGUN.records)
    intake = Intake(tmp_path, 1, heard.outbox, publisher.add_steps)

    def act(rank: int, report: Report) -> None:
        for effect in brain.tell(Reported(rank=rank, report=report)):
            if isinstance(effect, DropRows):
                publisher.take_back_from(effect.update)

    intake.read(act)
    publisher.tick(lambda: run_state(brain.model), None)
    sent = b"".join(call.args[0] for call in peer.send_encoded.call_args_list)
    (rows,) = [json.loads(line) for line in sent.splitlines() if json.loads(line)["type"] == "metrics"]
    assert (rows["reset_from"], [one["update"] for one in rows["rows"]]) == (1, [1])


def test_the_best_loss_is_that_of_the_updates_that_still_count(tmp_path: Path) -> None:
    """A start from scratch, or a return to an earlier state, takes back the losses after it."""
    heard = Heard(tmp_path)
    heard.write(PLAN, *({**STEP, "update": n, "loss": 3.0 / n} for n in (1, 2, 3)))
    heard.read()
    mocks = {name: Mock() for name in ("publisher", "agents", "sensors", "post", "read_reports")}
    performer = Performer(
        RunFolder(tmp_path), Mock(), outbox=heard.outbox, socket=tmp_path / "socket", is_displaced=lambda: False, **mocks
    )
    brain = taken_over(row(), records=BEGUN.records)
    best = []
    for resumed in (2, 0):
        (dropped,) = [one for one in brain.report({**PLAN, "updates": resumed}) if isinstance(one, DropRows)]
        answer = performer.perform(dropped, brain.model)
        assert answer is not None
        brain.tell(answer)
        best.append(run_state(brain.model).best_loss)
        brain.report({**STEP, "update": resumed + 1, "loss": 9.0 - resumed})
        best.append(run_state(brain.model).best_loss)
    assert best == [1.5, 1.5, None, 9.0]


def test_only_decisions_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    folder = RunFolder(tmp_path)
    names = ("outbox", "publisher", "agents", "sensors", "post", "read_reports")
    mocks = {name: Mock() for name in names}
    performer = Performer(folder, Mock(), socket=tmp_path / "socket", is_displaced=lambda: False, **mocks)
    model = taken_over(row(), records=BEGUN.records).model

    def save(model: Model, *, decided: bool) -> tuple[bool, int]:
        """Whether the file was written, and how often fsync was called."""
        before = folder.state_path.stat().st_ino if folder.state_path.exists() else None
        synced.clear()
        assert performer.save_state(model, decided=decided) is None
        return folder.state_path.stat().st_ino != before, len(synced)

    assert save(model, decided=False) == (True, 2), "the file of the last supervisor may contain a decision"
    assert save(model, decided=False) == (False, 0)
    later = replace(model, warnings={"log": "long"})
    assert save(later, decided=False) == (True, 0)
    assert save(later, decided=True) == (True, 2), "the file and its name"
    pending = replace(later, pending=Change(max_updates=5))
    assert save(pending, decided=True) == (True, 2)
    assert save(replace(pending, warnings={}), decided=False) == (False, 0)
    assert save(later, decided=True) == (True, 2), "the file and its name"
