"""What a run stores is bounded: old updates are merged, read journals and the middle of long logs
go back to the disk. Nothing that is needed is lost, and the writers notice nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from memtop.supervisor import holes
from memtop.supervisor.diagnosis.diagnose import diagnose_file
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.run.record import journal as journals
from memtop.supervisor.run.record import metrics, output_log
from memtop.supervisor.run.record.journal import Intake
from memtop.supervisor.run.record.ledger import EVENTS_STORED, Ledger
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.record.output_log import OutputLog
from memtop.supervisor.run.reports import Hello, Report, SettingsChanged, Step
from memtop.supervisor.wire import Event
from tests.conftest import UNTIL_GO, Runs


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


# --- updates --------------------------------------------------------------------------------------


def step(update: int) -> Step:
    loss = 0.25 if update == 37 else 1.0 + update % 10
    return Step(
        update=update, time=float(update), loss=loss, samples_seen=8 * update, sample_digest=f"d{update}", peak_bytes=update
    )


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        for number in (1, 2):
            ledger.add_attempt(number, "start", None, 1.0)
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    yield connection
    connection.close()


def test_old_updates_are_merged_and_new_ones_stay_exact(db: sqlite3.Connection) -> None:
    for update in range(3000):
        metrics.add(db, 1, [step(update)])
        metrics.thin(db, kept=100, at_once=10)
    rows = list(metrics.final_history(db))
    assert [row.update for row in rows[-100:]] == list(range(2900, 3000))
    assert all((row.updates, row.sample_digest) == (1, f"d{row.update}") for row in rows[-100:])
    # Every update counts once, and each tier begins where the coarser one ends.
    assert sum(row.updates for row in rows) == 3000
    assert [row.updates for row in rows] == sorted((row.updates for row in rows), reverse=True)
    assert len(rows) < 3 * 130
    merged = next(row for row in rows if row.updates == 10)
    first = merged.update
    assert (merged.samples_seen, merged.sample_digest, merged.peak_bytes) == (8 * first, None, first + 9)
    assert merged.loss == pytest.approx(sum(1.0 + n % 10 for n in range(first, first + 10)) / 10)
    assert metrics.best_loss(db) == 0.25
    assert metrics.highest_peak(db, 1) == 2999


def test_a_month_of_updates_takes_few_rows(db: sqlite3.Connection) -> None:
    """Only every 100,000th update is reported, so that the test is fast."""
    metrics.add(db, 1, (step(update) for update in range(0, 10**9, 10**5)))
    metrics.thin(db, kept=50, at_once=5)
    rows = list(metrics.final_history(db))
    assert len(rows) < 55 * 10
    assert sum(row.updates for row in rows) == 10**4


def test_a_restart_takes_back_merged_updates_too(db: sqlite3.Connection) -> None:
    metrics.add(db, 1, [step(update) for update in range(1, 501)])
    metrics.thin(db, kept=100, at_once=5)
    db.execute("UPDATE attempts SET start_updates = 204 WHERE number = 2")
    metrics.add(db, 2, [step(update) for update in range(205, 210)])
    rows = list(metrics.final_history(db))
    # The row of 200 to 209 begins with updates that count.
    assert [(row.update, row.attempt) for row in rows[-7:]] == [(190, 1), (200, 1), *((n, 2) for n in range(205, 210))]
    assert metrics.newest(db, 6) == rows[-6:]
    assert [row.updates for row in rows[-7:]] == [10, 5, *[1] * 5]
    assert sum(row.updates for row in rows) == 209


def test_updates_that_were_taken_back_are_merged_apart(db: sqlite3.Connection) -> None:
    db.execute("UPDATE attempts SET start_updates = 204 WHERE number = 2")
    metrics.add(db, 1, [replace(step(update), loss=1.0 if update <= 204 else 0.125) for update in range(1, 501)])
    metrics.add(db, 2, [replace(step(update), loss=1.0) for update in range(205, 210)])
    metrics.thin(db, kept=100, at_once=5)
    rows = list(metrics.final_history(db))
    assert [(row.update, row.attempt, row.updates) for row in rows[-7:-5]] == [(190, 1, 10), (200, 1, 5)]
    assert {row.loss for row in rows} == {1.0}
    assert rows[-6].peak_bytes == 204
    assert metrics.best_loss(db) == 1.0


def test_a_merged_row_that_a_restart_has_cut_has_no_best_loss(db: sqlite3.Connection) -> None:
    """Which of its updates had that loss is not known any more."""
    metrics.add(db, 1, [replace(step(update), loss=0.125 if update == 207 else 1.0) for update in range(1, 501)])
    metrics.thin(db, kept=100, at_once=5)
    assert metrics.best_loss(db) == 0.125
    db.execute("UPDATE attempts SET start_updates = 204 WHERE number = 2")
    assert metrics.best_loss(db) == 1.0


def test_the_best_loss_outlives_a_row_that_a_restart_has_cut(db: sqlite3.Connection) -> None:
    """The cut row is merged with those before it, which count wholly."""
    metrics.add(db, 1, [replace(step(update), loss=0.125 if update == 120 else 1.0) for update in range(1, 501)])
    metrics.thin(db, kept=100, at_once=5)
    db.execute("UPDATE attempts SET start_updates = 154 WHERE number = 2")
    metrics.thin(db, kept=10, at_once=5)
    assert [(row.update, row.updates) for row in metrics.final_history(db)][-1] == (100, 55)
    assert metrics.best_loss(db) == 0.125


def test_the_history_is_read_row_by_row(db: sqlite3.Connection) -> None:
    metrics.add(db, 1, (step(update) for update in range(1, 20_001)))
    db.commit()
    tracemalloc.start()
    try:
        assert sum(row.updates for row in metrics.final_history(db)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_oldest_events_are_deleted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_event(Event(time=1.0, attempt=1, kind="first", message=""))
    with sqlite3.connect(ledger.path) as other:
        other.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'events'", (EVENTS_STORED + 999,))
    ledger.add_event(Event(time=2.0, attempt=1, kind="last", message=""))
    assert [event.kind for event in ledger.events()] == ["last"]


# --- journals -------------------------------------------------------------------------------------


class Journal:
    """A journal with its writer, and the supervisors that read it one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "rank-0.jsonl"
        self.writer = self.path.open("a")
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.ledger.add_attempt(1, "start", None, 1.0)
        self.begin()

    def begin(self) -> list[Report]:
        """The next supervisor; what it finds."""
        self.intake = Intake(self.folder, 1, Outbox(self.ledger), lambda number, steps: None)
        found: list[Report] = []
        self.intake.replay(lambda rank, report: found.append(report))
        return found

    def write(self, *reports: dict[str, object]) -> list[Report]:
        """What is read of these reports."""
        self.writer.writelines(json.dumps(report) + "\n" for report in reports)
        self.writer.flush()
        found: list[Report] = []
        self.intake.read(lambda rank, report: found.append(report), to_the_end=True)
        return found


def updates(first: int, count: int) -> list[dict[str, object]]:
    return [{"type": "step", "update": n, "time": float(n), "device_uuid": "x" * 400} for n in range(first, first + count)]


def test_read_journals_are_forgotten_but_not_what_the_next_supervisor_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "KEPT_BYTES", 64 << 10)
    journal = Journal(tmp_path)
    journal.write({"type": "hello", "pid": 7, "offers": ["free_cache"]}, *updates(1, 50))
    journal.write(*({"type": "settings", "update": n, "changes": {"batch": n}} for n in range(1, 101)))
    for first in range(51, 3051, 100):
        assert [one.update for one in journal.write(*updates(first, 100)) if isinstance(one, Step)] == [
            *range(first, first + 100)
        ]
        assert on_disk(journal.path) < 400 << 10
    assert journal.path.stat().st_size > 1 << 20
    found = journal.begin()
    assert isinstance(found[0], Hello)
    assert [one.update for one in found if isinstance(one, SettingsChanged)] == [*range(51, 101)]
    seen = [one.update for one in found if isinstance(one, Step)]
    assert seen == list(range(seen[0], 3051))
    assert len(seen) > 100
    # It goes on where the other one stopped.
    assert [one.update for one in journal.write(*updates(3051, 5)) if isinstance(one, Step)] == [*range(3051, 3056)]
    assert len(journal.ledger.metrics()) == 3055


def test_a_forgotten_journal_can_be_read_without_its_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "KEPT_BYTES", 64 << 10)
    journal = Journal(tmp_path)
    for first in range(1, 1001, 100):
        journal.write(*updates(first, 100))
    assert on_disk(journal.path) < journal.path.stat().st_size // 2
    (tmp_path / "ledger.sqlite").unlink()
    journal.ledger = Ledger(tmp_path / "ledger.sqlite")
    journal.begin()
    found = journal.write()
    seen = [one.update for one in found if isinstance(one, Step)]
    assert (len(seen), seen) == (len(found), list(range(seen[0], 1001)))
    assert len(seen) > 100


# --- the log --------------------------------------------------------------------------------------

HEAD, TAIL, STEP = 64 << 10, 256 << 10, 64 << 10


@pytest.fixture
def small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("HEAD_BYTES", HEAD), ("TAIL_BYTES", TAIL), ("STEP_BYTES", STEP)):
        monkeypatch.setattr(output_log, name, size)


def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path, small_logs: None) -> None:
    path = tmp_path / "output.log"
    log, whole = OutputLog(path), b""
    with path.open("ab", buffering=0) as program:
        for number in range(400):
            line = b"%07d %s\n" % (number, b"x" * 8000)
            program.write(line)
            whole += line
            words = log.trim()
            assert (words is None) == (len(whole) <= HEAD + TAIL + STEP)
            assert on_disk(path) < HEAD + TAIL + 2 * STEP
    assert path.stat().st_size == len(whole)
    content = path.read_bytes()
    assert content[:HEAD] == whole[:HEAD]
    assert content[-TAIL:] == whole[-TAIL:]
    assert content[HEAD:].startswith(b"\n[memtop removed the output from here on")
    assert words == f"to save disk space, memtop removed 3 MiB from the middle of {path}; search it with grep -a"
    # The next supervisor says so again, and removes no more than it has to.
    with path.open("ab") as program:
        program.write(b"more\n")
    assert OutputLog(path).trim() is not None
    assert path.read_bytes()[-TAIL:] == (whole + b"more\n")[-TAIL:]


def test_a_log_that_cannot_be_shortened_is_named(tmp_path: Path, small_logs: None) -> None:
    mounted = subprocess.run(["mount", "-t", "ramfs", "ramfs", str(tmp_path)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system without holes can only be mounted as root: {mounted.stderr.strip()}")
    try:
        path = tmp_path / "output.log"
        path.write_bytes(b"x" * (HEAD + TAIL + STEP + 1))
        log = OutputLog(path)
        for _ in range(2):
            assert log.trim() == f"{path}: 384 KiB, and this file system cannot shorten it while the program runs"
        assert path.read_bytes() == b"x" * (HEAD + TAIL + STEP + 1)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_no_log_is_no_news(tmp_path: Path) -> None:
    assert OutputLog(tmp_path / "output.log").trim() is None


def test_a_diagnosis_does_not_read_what_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    error = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB\n"
    path.write_bytes(b"starting\n")
    # It would take minutes to read so many zeros.
    os.truncate(path, 1 << 40)
    with path.open("ab") as program:
        program.write(b"\n" + error)
    with path.open("rb") as log:
        assert diagnose_file(log).kind is Kind.GPU_OOM


def test_content_is_read_without_holes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(itertools.islice(itertools.cycle(range(1, 251)), 1 << 20)))
    before = path.read_bytes()
    assert holes.remove(path, 8192, 1 << 19, b"cut")
    with path.open("rb") as file:
        found = b"".join(holes.without_holes(file.fileno(), 10_000))
    assert found.replace(b"\0", b"") == before[:8192] + b"cut" + before[1 << 19 :]
    assert len(found) < len(before) // 2 + 8192 + 3 * 4096


def test_a_program_that_prints_very_much_is_not_disturbed(runs: Runs) -> None:
    program = (
        "import sys\nfor n in range(130):\n    sys.stdout.write(f'{n:09d}\\n' * 100_000)\nprint('the last line', flush=True)\n"
    )
    program += UNTIL_GO.replace('"go"', f'"{runs.root}/go"')
    runs.memtop("train", "--name", "a", "--detach", "--", sys.executable, "-c", program)
    warned = runs.wait("a", lambda document: any("from the middle of" in words for words in document["warnings"]))
    log = Path(warned["log_path"])
    assert any(words.startswith("to save disk space, memtop removed ") for words in warned["warnings"])
    assert "warning     to save disk space, memtop removed " in runs.memtop("show", "a").stdout
    # Neither supervisor nor shim is needed for it to go on.
    runs.kill(warned["supervisor_pid"])
    runs.kill(json.loads((log.parent / "process.json").read_text())["shim_pid"])
    (runs.root / "go").touch()
    runs.wait("a", lambda document: not document["alive"])
    with log.open("rb") as file:
        assert file.read(10) == b"000000000\n"
        assert file.seek(0, 2) == 130 * 100_000 * 10 + len("the last line\n")
        file.seek(-34, 2)
        assert file.read() == b"000000129\n" * 2 + b"the last line\n"
    assert on_disk(log) < (output_log.HEAD_BYTES + output_log.TAIL_BYTES + output_log.STEP_BYTES) * 1.5
