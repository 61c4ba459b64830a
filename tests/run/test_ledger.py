"""The journal of a rank and the ledger of a run, with real files."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from memtop.supervisor.run.record.journal import JournalReader
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.wire import Event
from tests.conftest import no_file_grows
from tests.run.brain import SETTINGS


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
