"""Every file of a run's folder, damaged in every way: commands work or say in one line what is
wrong. What memtop can write again counts as missing."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from memtop.cli import run as memtop
from memtop.supervisor import holes
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run import rebuild
from memtop.supervisor.run.post_mortem.log_end import error_files, read_log_end
from memtop.supervisor.run.processes import shim
from memtop.supervisor.run.rebuild import open_ledger
from memtop.supervisor.run.record.checkpoints import read_checkpoint
from memtop.supervisor.run.record.folder import RunFolder, RunLock, write_json
from memtop.supervisor.run.record.journal import Intake, JournalReader, find_journals
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.reports import Saved, SaveFailed
from memtop.supervisor.run.view import known_runs
from tests.conftest import UNTIL_GO, Runs, make_runs, wait_for_file
from tests.recovery.injected import inject

REPORTING = """
import json, os
path = os.environ["MEMTOP_ATTEMPT_DIR"] + "/rank-0.jsonl"
with open(path, "a") as file:
    for update in (1, 2):
        file.write(json.dumps({"type": "step", "time": 1.0, "update": update, "loss": 0.5}) + "\\n")
print("done")
"""


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbled(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 4)


def of_another_shape(path: Path) -> None:
    path.write_text('[{"run": 1}]\n' + "[" * 3000 + "]" * 3000 + "\n")


def deleted(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere" / "at all")


DAMAGE = (emptied, cut, garbled, of_another_shape, deleted, a_folder, a_link_to_nowhere)
DERIVED = ("state.json", "attempts/0001/process.json", "attempts/0001/exit.json", "attempts/0001/ranks.json")
FILES = (
    *DERIVED,
    *("run.json", "ledger.sqlite", "lock", "supervisor.log", "attempts/0001/command.json", "attempts/0001/baseline.json"),
    *("attempts/0001/output.log", "attempts/0001/rank-0.jsonl", "train_latest_state/manifest.json"),
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended, with all its files."""
    for runs in make_runs(tmp_path_factory.mktemp("ended")):
        runs.memtop("train", "--name", "a", "--headless", "--", sys.executable, "-c", REPORTING)
        folder = runs.path / "a"
        for name in ("attempts/0001/ranks.json", "train_latest_state/manifest.json", "attempts/0001/baseline.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            if not (folder / name).exists():
                (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_commands_that_look_work_or_say_why_in_one_line(
    name: str, damage: Callable[[Path], None], ended: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "a"
    shutil.copytree(ended, folder)
    damage(folder / name)
    where = ("--runs-dir", str(folder.parent))
    for command in (("show", "a"), ("show", "a", "--json", "--metrics"), ("runs",), ("runs", "--json")):
        status = memtop([*command, *where])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        if status:
            assert (out, err.count("\n")) == ("", 1), (command, out, err)
            assert command[0] == "show", "a damaged run hides no other run"
        if name in DERIVED:
            assert (status, err) == (0, ""), command
            assert "finished" in out, out
    known_runs(folder.parent)


def test_a_run_whose_derived_files_are_all_damaged_is_restarted(runs: Runs) -> None:
    runs.memtop("train", "--name", "a", "--headless", "--", sys.executable, "-c", REPORTING)
    folder = runs.path / "a"
    a_folder(folder / "state.json")
    for damage, name in zip((emptied, cut, garbled), DERIVED[1:], strict=True):
        (folder / name).touch()
        damage(folder / name)
    a_folder(folder / "attempts/0001/rank-0.jsonl")
    (folder / "attempts/0001/rank-of-mine.jsonl").touch()
    runs.memtop("restart", "a", "--headless")
    document = runs.show("a", metrics=True)
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["finished", "finished"]
    assert [row["update"] for row in document["metrics"]] == [1, 2]
    # Nothing is deleted.
    assert len(list(folder.glob("state.json.*"))) == 1


@pytest.mark.parametrize("damage", [emptied, a_folder], ids=lambda damage: damage.__name__)
def test_a_new_supervisor_adopts_a_program_whose_files_are_damaged(runs: Runs, damage: Callable[[Path], None]) -> None:
    program = REPORTING + UNTIL_GO.replace('"go"', f'"{runs.root}/go"')
    # Without its environment the program is known only by its ancestors.
    runs.memtop("train", "--name", "a", "--detach", "--", "env", "-u", "MEMTOP_RUN", sys.executable, "-c", program)
    folder = runs.path / "a"
    wait_for_file(folder / "attempts/0001/rank-0.jsonl")
    before = runs.wait("a", lambda document: document["updates"] == 2)
    runs.kill(before["supervisor_pid"])
    runs.wait("a", lambda document: document["supervisor_pid"] is None)
    for name in ("state.json", "attempts/0001/process.json"):
        damage(folder / name)
    shown = runs.show("a")
    assert (shown["alive"], shown["trainer_pid"], shown["updates"]) == (True, before["trainer_pid"], 2)
    runs.memtop("watch", "a", "--once")
    document = runs.wait("a", lambda document: document["supervisor_pid"] is not None)
    assert (document["alive"], document["trainer_pid"]) == (True, before["trainer_pid"])
    (runs.root / "go").touch()
    document = runs.wait("a", lambda document: document["state"] != "training")
    assert (document["state"], document["exit_status"]) == ("finished", 0)


@pytest.mark.parametrize("damage", [deleted, garbled, a_folder], ids=lambda damage: damage.__name__)
def test_a_lost_ledger_is_rebuilt_and_the_run_goes_on(ended: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """As the next supervisor does it, without a program."""
    folder = RunFolder(shutil.copytree(ended, tmp_path / "a"))
    for suffix in ("-wal", "-shm"):
        Path(f"{folder.ledger_path}{suffix}").unlink(missing_ok=True)
    with closing(open_ledger(folder)[0]) as whole:
        (before,) = whole.attempts()
    damage(folder.ledger_path)
    ledger, words = open_ledger(folder)
    with closing(ledger):
        (found,) = ledger.attempts()
        assert [row.update for row in ledger.metrics()] == [1, 2]
    names = ("number", "settings", "exit_status", "outcome", "start_updates", "updates", "launched")
    assert [getattr(found, name) for name in names] == [getattr(before, name) for name in names]
    assert (found.started, found.ended) == (pytest.approx(before.started, abs=5), pytest.approx(before.ended, abs=5))
    assert words is not None
    assert words.startswith(f"{folder.ledger_path} was ")
    assert len(list(folder.path.glob("ledger.sqlite.*"))) == (0 if damage is deleted else 1)
    # Once.
    ledger, words = open_ledger(folder)
    ledger.close()
    assert words is None


def test_attempts_that_a_ledger_lacks_are_added_all_or_none(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(shutil.copytree(ended, tmp_path / "a"))
    for number in (2, 3):
        shutil.copytree(folder.attempt(1), folder.attempt(number))

    def numbers() -> list[int]:
        with closing(Ledger(folder.ledger_path, read_only=True)) as ledger:
            return [attempt.number for attempt in ledger.attempts()]

    def full_disk(path: Path) -> list[Path]:
        if path == folder.attempt(3):
            raise sqlite3.OperationalError("database or disk is full")
        return find_journals(path)

    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "find_journals", full_disk)
        with pytest.raises(RunFolderError, match="disk is full"):
            open_ledger(folder)
    assert numbers() == [1]
    with closing(sqlite3.connect(folder.ledger_path)) as other:
        # A power cut took the end of the first attempt, too.
        other.execute("UPDATE attempts SET ended = NULL, outcome = NULL")
        other.commit()
    ledger, words = open_ledger(folder)
    with closing(ledger):
        assert [(found.number, found.outcome, found.exit_status) for found in ledger.attempts()[:2]] == [
            (1, "finished", 0),
            (2, "finished", 0),
        ]
    assert numbers() == [1, 2, 3]
    assert words is not None
    assert "lacked attempts (2, 3): added from" in words


FULL_AT_FIRST = """
    import sqlite3
    from memtop.supervisor.run.record.ledger import Ledger
    add, calls = Ledger.add_reports, []
    def add_reports(*given):
        calls.append(given)
        if len(calls) == 1:
            raise sqlite3.OperationalError("database or disk is full")
        return add(*given)
    Ledger.add_reports = add_reports
"""


def test_a_supervisor_does_not_end_before_the_ledger_has_every_update(runs: Runs) -> None:
    """The disk was full when the program reported, and it ends before the next attempt to write."""
    inject(runs, "    pass", supervisor=FULL_AT_FIRST)
    runs.memtop("train", "--name", "a", "--headless", "--", sys.executable, "-c", REPORTING)
    runs.wait("a", lambda document: not document["alive"])
    document = runs.show("a", metrics=True)
    assert [row["update"] for row in document["metrics"]] == [1, 2]


def test_a_restart_and_a_stop_work_without_the_ledger(runs: Runs) -> None:
    program = REPORTING + UNTIL_GO.replace('"go"', f'"{runs.root}/go"')
    runs.memtop("train", "--name", "a", "--detach", "--", sys.executable, "-c", program)
    folder = runs.path / "a"
    before = runs.wait("a", lambda document: document["updates"] == 2)
    runs.kill(before["supervisor_pid"])
    runs.wait("a", lambda document: document["supervisor_pid"] is None)
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    assert runs.show("a")["alive"]
    runs.memtop("stop", "a", status=None)
    document = runs.wait("a", lambda document: document["state"] == "stopped")
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["stopped"]
    assert any("ledger.sqlite was missing: it was rebuilt" in warning for warning in document["warnings"])
    # Its last write to the ledger can follow its last state.
    runs.wait("a", lambda _: not RunLock(RunFolder(folder)).is_held())
    # SQLite's log, which a reader can have kept, would hide the damage.
    for path in folder.glob("ledger.sqlite-*"):
        path.unlink()
    garbled(folder / "ledger.sqlite")
    (runs.root / "go").touch()
    runs.memtop("restart", "a", "--headless")
    document = runs.show("a")
    assert [(attempt["number"], attempt["outcome"]) for attempt in document["attempts"]] == [(1, "stopped"), (2, "finished")]
    assert any("was damaged (file is not a database; now ledger.sqlite." in warning for warning in document["warnings"])


def test_a_journal_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    journal = tmp_path / "rank-0.jsonl"
    journal.mkdir()
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        intake = Intake(tmp_path, 1, Outbox(ledger), lambda number, steps: None)
        intake.read(Mock())
        assert intake.problem == f"{journal}: cannot be read: Is a directory; what this rank reports is not seen"
        journal.rmdir()
        intake.read(Mock())
        assert intake.problem is None


def test_files_with_names_that_no_rank_and_no_attempt_has_end_nothing(tmp_path: Path) -> None:
    """A program that sets RANK to a number that SQLite cannot store."""
    folder = RunFolder(tmp_path)
    place = folder.attempt(1)
    place.mkdir(parents=True)
    for name in ("0", "1", "00", "01", "-1", "+1", "1 ", "\u0663", "9" * 20, "x", ""):
        (place / f"rank-{name}.jsonl").write_text('{"type": "step", "update": 1}\n')
    heard: list[int] = []
    with closing(Ledger(folder.ledger_path)) as ledger:
        intake = Intake(place, 1, Outbox(ledger), lambda number, steps: None)
        intake.read(lambda rank, report: heard.append(rank))
    assert heard == [0, 1]
    for name in ("9" * 25, "\u0660\u0660\u0660\u0662", "1", "-0001"):
        (folder.path / "attempts" / name).mkdir()
    assert folder.attempt_numbers() == [1]
    open_ledger(folder)[0].close()


def read_journal(path: Path) -> object:
    return JournalReader(path).read_new()


def replace_with_shim(path: Path) -> object:
    return shim.write_json(str(path.with_name(path.name.removesuffix(shim.RESERVED))), {"status": 0}, seconds=0.0)


def replace_with_supervisor(path: Path) -> object:
    with contextlib.suppress(RunFolderError):
        write_json(path.with_name("state.json"), {})
    return write_json(path.with_name("state.json"), {})


def remove_hole(path: Path) -> object:
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        holes.remove(path, 0, 1)
    return None


PIPES: list[tuple[str, Callable[[Path], object]]] = [
    ("rank-0.jsonl", read_journal),
    ("output.log", read_log_end),
    ("error.json", lambda path: error_files(path.parent)),
    ("manifest.json", lambda path: read_checkpoint(path.parent)),
    ("ledger.sqlite", lambda path: open_ledger(RunFolder(path.parent))[0].close()),
    ("rank-1.jsonl", remove_hole),
    (f"exit.json{shim.RESERVED}", replace_with_shim),
    (f".state.json.{os.getpid()}", replace_with_supervisor),
]


@pytest.mark.parametrize(("name", "use"), PIPES, ids=[name.replace(str(os.getpid()), "PID") for name, _ in PIPES])
def test_a_pipe_that_a_program_puts_in_place_of_a_file_blocks_nothing(
    tmp_path: Path, name: str, use: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / name)
    done: Future[object] = Future()

    def work() -> None:
        try:
            done.set_result(use(tmp_path / name))
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    done.result(60)


def test_kept_reports_have_the_order_in_which_they_were_reported(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        failed = SaveFailed(time=2.0, message="disk full")
        many = [Saved(time=float(number)) for number in range(10, 70)]
        ledger.add_reports(1, 0, [Saved(time=1.0), failed, Saved(time=3.0)], 1)
        assert [report.time for report in ledger.kept_reports(1, 0, 1)] == [1.0, 2.0, 3.0]
        ledger.add_reports(1, 0, many, 2)
        assert ledger.kept_reports(1, 0, 2) == [failed, *many[10:]]


def test_a_living_supervisor_needs_none_of_its_files(runs: Runs) -> None:
    program = REPORTING + UNTIL_GO.replace('"go"', f'"{runs.root}/go"')
    runs.memtop("train", "--name", "a", "--detach", "--", sys.executable, "-c", program)
    folder = runs.path / "a"
    before = runs.wait("a", lambda document: document["updates"] == 2)
    for name in ("attempts/0001/process.json", "attempts/0001/exit.json", "attempts/0001/ranks.json"):
        (folder / name).write_bytes(b"\0" * 100)
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    a_folder(folder / "attempts/0001/output.log")
    # The supervisor may write it in between: it was missing then.
    with contextlib.suppress(FileExistsError):
        a_folder(folder / "state.json")
    # It writes its state again, where the folder was.
    runs.wait("a", lambda document: (folder / "state.json").is_file())
    document = runs.show("a")
    assert (document["supervisor_pid"], document["alive"]) == (before["supervisor_pid"], True)
    (runs.root / "go").touch()
    document = runs.wait("a", lambda document: document["state"] != "training")
    assert (document["state"], document["exit_status"]) == ("finished", 0)
    assert "Traceback" not in (folder / "supervisor.log").read_text()
