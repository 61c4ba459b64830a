"""Parts of the supervisor, each alone, with values, real files and a clock that the test sets."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from memtop.presets import load_presets, load_recipes, resolve
from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.run import explain
from memtop.supervisor.run.client import socket_path
from memtop.supervisor.run.post_mortem.log_end import LogEnd, read_log_end
from memtop.supervisor.run.processes import shim
from memtop.supervisor.run.processes.attempt import allocator_environment
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.checkpoints import newest_checkpoint, read_checkpoint
from memtop.supervisor.run.record.folder import (
    RunFolder,
    RunLock,
    RunSpec,
    StateFile,
    create_run,
    find_run,
    list_runs,
    write_json,
)
from memtop.supervisor.run.record.journal import JournalReader
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import End, Step
from memtop.supervisor.run.view import known_runs, read_run, read_state, show
from memtop.supervisor.wire import Change, Checkpoint, Event, Phase
from tests.run.reported import heard, reported

SETTINGS = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])


def spec(name: str, created: float = 1.0) -> RunSpec:
    return RunSpec(name=name, created=created, settings=SETTINGS, cwd="/", memtop_version="0")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- folder ---------------------------------------------------------------------------------------


def test_a_run_is_created_once_and_found_by_name_path_and_latest(tmp_path: Path) -> None:
    first = create_run(tmp_path, spec("a", 1.0), fresh=False)
    create_run(tmp_path, spec("b", 2.0), fresh=False)
    assert find_run("a", tmp_path).path == first.path
    assert find_run(str(first.path), tmp_path / "elsewhere").path == first.path
    assert find_run("latest", tmp_path).name == "b"
    assert [folder.name for folder in list_runs(tmp_path)] == ["a", "b"]
    with pytest.raises(RunFolderError, match="exists"):
        create_run(tmp_path, spec("a"), fresh=False)
    with pytest.raises(UsageError, match=r"'c': not found .* a, b"):
        find_run("c", tmp_path)


def test_fresh_moves_the_old_run_aside_and_deletes_nothing(tmp_path: Path) -> None:
    old = create_run(tmp_path, spec("a", 1.0), fresh=False)
    (old.path / "precious").write_text("weights")
    new = create_run(tmp_path, spec("a", 2.0), fresh=True)
    assert new.spec().created == 2.0
    aside = [folder for folder in list_runs(tmp_path) if folder.path.name != "a"]
    assert [(folder.path / "precious").read_text() for folder in aside] == ["weights"]


def test_a_run_in_use_is_not_moved(tmp_path: Path) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)
    lock = RunLock(folder)
    assert lock.acquire()
    with pytest.raises(RunFolderError, match="in use"):
        create_run(tmp_path, spec("a"), fresh=True)
    lock.release()
    assert not RunLock(folder).is_held()


def test_reading_a_run_does_not_lock_it(tmp_path: Path) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)
    folder.lock_path.touch()
    descriptor = os.open(folder.lock_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    assert not RunLock(folder).is_held()
    timer = threading.Timer(0.1, os.close, [descriptor])
    timer.start()
    assert RunLock(folder).acquire()
    timer.join()


@pytest.fixture
def common_place() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own lie below one that is closed to others."""
    with tempfile.TemporaryDirectory(prefix="memtop-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_run_of_another_user_is_not_known(common_place: Path) -> None:
    mine, other = (create_run(common_place, spec(name), fresh=False) for name in ("mine", "other"))
    for folder in (mine, other):
        write_json(folder.state_path, StateFile(run=read_state(folder), socket=""))
        folder.lock_path.touch(mode=0o600)
    if os.getuid() == 0:
        # Root may read everything: look as somebody who owns only the one.
        for path in (mine.path, *mine.path.iterdir()):
            os.chown(path, 65534, 65534)
        for path in (other.path, other.spec_path, other.state_path):
            path.chmod(0o755)
        os.seteuid(65534)
    else:
        other.lock_path.chmod(0)
    try:
        assert [run.name for run in known_runs(common_place)] == ["mine"]
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


def test_a_damaged_ledger_is_one_clear_line(tmp_path: Path) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)
    folder.ledger_path.write_bytes(b"not a database at all" * 100)
    for read in (lambda: read_run(folder.path), lambda: show(folder)):
        with pytest.raises(RunFolderError, match=r"ledger.sqlite: cannot be read: file is not a database"):
            read()


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "x" * 101])
def test_names_that_cannot_be_folders_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        create_run(tmp_path, spec(name), fresh=False)


def test_a_place_that_cannot_hold_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"file/a: cannot be created: Not a directory"):
        create_run(tmp_path / "file", spec("a"), fresh=False)


def test_a_write_that_fails_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"good": 1})
    (tmp_path / f".state.json.{os.getpid()}").mkdir()
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_json(path, {"bad": 2})
    assert json.loads(path.read_text()) == {"good": 1}


def test_a_damaged_run_json_hides_no_other_run(tmp_path: Path) -> None:
    create_run(tmp_path, spec("good"), fresh=False)
    bad = create_run(tmp_path, spec("bad"), fresh=False)
    bad.spec_path.write_text("{half")
    assert [folder.name for folder in list_runs(tmp_path)] == ["good"]
    with pytest.raises(RunFolderError, match=r"bad/run.json: cannot be decoded"):
        bad.spec()


# --- journal, ledger, progress --------------------------------------------------------------------


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


def step(update: int, loss: float = 1.0) -> dict[str, Any]:
    return {"type": "step", "update": update, "loss": loss, "sample_digest": f"d{update}", "time": 1.0}


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


@contextmanager
def no_file_grows() -> Iterator[None]:
    """Every write to a file of this process fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


def test_speed_is_that_of_the_newest_updates() -> None:
    progress = Progress()
    assert progress.rates() == (None, None)
    for n in range(1, 40):
        seconds = n if n < 19 else 18 + (n - 18) * 2
        progress = progress.after(
            0,
            reported({"type": "step", "update": n, "samples_seen": n * 8, "tokens": 80, "time": float(seconds), "loss": 1 / n}),
        )
    samples, tokens = progress.rates()
    assert samples == pytest.approx(4.0)
    assert tokens == pytest.approx(40.0)
    assert progress.best_loss == pytest.approx(1 / 39)


# --- shim -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler", 0),
        ("import os; assert os.getsid(0) == os.getpid()", 0),
    ],
)
def test_the_shim_records_how_the_program_ended(tmp_path: Path, program: str, status: int) -> None:
    command = {"argv": [sys.executable, "-c", program], "cwd": str(tmp_path), "environment": {"MARK": "1"}}
    (tmp_path / "command.json").write_text(json.dumps(command))
    done = subprocess.run([sys.executable, "-I", "-S", shim.__file__, str(tmp_path)], check=False, timeout=120)
    assert done.returncode == (status if status >= 0 else 128 - status)
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == status
    assert json.loads((tmp_path / "process.json").read_text())["pid"] > 0


def test_a_program_that_does_not_exist_is_named_in_its_output(tmp_path: Path) -> None:
    command = {"argv": ["no-such-program"], "cwd": str(tmp_path), "environment": {}}
    (tmp_path / "command.json").write_text(json.dumps(command))
    subprocess.run([sys.executable, "-I", "-S", shim.__file__, str(tmp_path)], check=False, timeout=120)
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == 127
    assert "no-such-program: cannot be started" in (tmp_path / "output.log").read_text()


@pytest.mark.parametrize(
    ("update", "total", "waits", "expected"),
    [(7, None, False, False), (7, 9, False, False), (7, 8, False, True), (8, 8, False, True), (7, None, True, True)],
)
def test_a_run_whose_last_update_has_begun_is_at_its_end(update: int, total: int | None, waits: bool, expected: bool) -> None:
    progress = Progress()
    assert not progress.at_the_end
    progress = heard(progress, {"type": "plan", "total_updates": total})
    progress = heard(progress, step(update))
    progress = heard(progress, {"type": "save_failed", "update": update, "message": "no room", "waiting": waits})
    assert progress.at_the_end is expected


@pytest.mark.parametrize(
    ("end", "status", "before", "own", "phase"),
    [
        (End(outcome="finished"), 0, Phase.TRAINING, False, Phase.FINISHED),
        (End(outcome="finished", message=""), 0, Phase.TRAINING, False, Phase.FINISHED),
        (End(outcome="finished", saved=False, message="loss is NaN"), 0, Phase.STOPPING, False, Phase.FAILED),
        (End(outcome="stopped", saved=False, message="loss is NaN"), 1, Phase.STOPPING, False, Phase.FAILED),
        (End(outcome="stopped"), 0, Phase.STOPPING, False, Phase.STOPPED),
        (End(outcome="stopped"), 0, Phase.TRAINING, False, Phase.STOPPED),
        (End(outcome="failed", message="loss is NaN"), 1, Phase.TRAINING, False, Phase.FAILED),
        (None, 0, Phase.TRAINING, False, Phase.FAILED),
        (None, 0, Phase.TRAINING, True, Phase.FINISHED),
        (None, -9, Phase.TRAINING, True, Phase.FAILED),
        (None, -15, Phase.STOPPING, True, Phase.STOPPED),
        (None, None, Phase.TRAINING, False, Phase.FAILED),
    ],
)
def test_how_an_attempt_ended(
    tmp_path: Path, end: End | None, status: int | None, before: Phase, own: bool, phase: Phase
) -> None:
    log = tmp_path / "output.log"
    log.write_text("step 1\nRuntimeError: boom\n")
    found, reason, diagnosis = explain.outcome(read_log_end(log), end, status, before, external=own)
    assert found is phase
    assert (diagnosis is not None) == (phase is Phase.FAILED)
    if end and end.message:
        assert reason is not None
        assert "loss is NaN" in reason


def test_a_state_that_could_not_be_saved_is_not_hidden(tmp_path: Path) -> None:
    words = "stopped at update 7, not saved: 16 MiB needed, 7 MiB free in /runs/a; nothing saved yet"
    end = End(outcome="stopped", saved=False, message=words)
    for phase in (Phase.STOPPING, Phase.TRAINING):
        # Whatever its exit status, which an older trainer has left at 0.
        for status in (0, 1):
            assert explain.outcome(LogEnd(), end, status, phase, external=False)[:2] == (Phase.FAILED, words)
    silent = End(outcome="finished", saved=False)
    finished = explain.outcome(LogEnd(), silent, 1, Phase.TRAINING, external=False)
    assert finished[:2] == (Phase.FAILED, "finished, not saved: no reason given")


@pytest.mark.parametrize(
    ("reached", "saved", "words"),
    [
        (12, None, "12 updates since the last saved state (none) are done again"),
        (12, 9, "3 updates since the last saved state (at update 9) are done again"),
        (10, 9, "1 update since the last saved state (at update 9) is done again"),
        (9, 9, None),
        (3, 9, None),
        (None, 9, None),
        (None, None, None),
    ],
)
def test_repeated_updates_are_counted(reached: int | None, saved: int | None, words: str | None) -> None:
    state = None if saved is None else Checkpoint(path="", updates=saved, complete=True)
    assert explain.done_again(reached, state) == words


def test_repeated_updates_are_unknown_for_an_incomplete_state() -> None:
    assert explain.done_again(12, Checkpoint(path="", updates=None, complete=False)) is None


def test_a_save_that_failed_is_known_until_one_works() -> None:
    progress = Progress()
    progress = progress.after(1, reported({"type": "save_failed", "message": "of another rank"}))
    assert progress.unsaved is None
    progress = heard(progress, {"type": "save_failed", "message": "update 3 not saved"})
    assert progress.unsaved == "update 3 not saved"
    progress = heard(progress, {"type": "checkpoint", "updates": 6})
    assert progress.unsaved is None


@pytest.mark.parametrize(
    ("wanted", "inherited", "expected"),
    [
        ("", {}, None),
        ("expandable_segments:True", {}, "expandable_segments:True"),
        (
            "expandable_segments:True",
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            "max_split_size_mb:64,expandable_segments:True",
        ),
        ("expandable_segments:True", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
    ],
)
def test_allocator_options_are_added_to_the_users_own(wanted: str, inherited: dict[str, str], expected: str | None) -> None:
    found = allocator_environment(wanted, inherited)
    assert found == ({} if expected is None else dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), expected))


def test_a_restart_says_what_it_changes() -> None:
    change = Change(assignments={"batch": "4", "accumulation": "8", "seed": "1"})
    assert explain.restart_reason(change) == "restart with batch 4, accumulation 8, seed 1"
    assert explain.restart_reason(Change()) == "restart"


# --- checkpoint, socket ---------------------------------------------------------------------------


def saved(folder: Path, updates: int, size: int = 4) -> Path:
    folder.mkdir()
    (folder / "weights").write_bytes(b"1234")
    manifest = {
        "format": 1,
        "updates": updates,
        "samples_seen": updates * 8,
        "saved_at": 5.0,
        "files": [{"name": "weights", "size_bytes": size, "sha256": "0"}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_complete_and_broken_checkpoints_are_distinguished(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path / "train_latest_state") is None
    good = read_checkpoint(saved(tmp_path / "good", 7))
    assert good is not None
    assert good.complete
    assert (good.updates, good.samples_seen, good.size_bytes) == (7, 56, 4)
    cut = read_checkpoint(saved(tmp_path / "cut", 7, size=5))
    assert cut is not None
    assert cut.problem == f"{tmp_path}/cut/weights: 4 bytes, but the manifest lists 5"
    (tmp_path / "half").mkdir()
    half = read_checkpoint(tmp_path / "half")
    assert half is not None
    assert half.problem is not None
    assert "manifest.json is missing" in half.problem


@pytest.mark.parametrize(
    "change",
    [
        '"updates": 1' + "0" * 40,
        '"updates": -1',
        '"saved_at": 1e300',
        '"samples_seen": "8"',
        '"files": [{"name": "a\\u0000b", "size_bytes": 4}]',
        '"files": [{"name": "' + "x" * 2000 + '", "size_bytes": 4}]',
        '"files": [{"name": "weights", "size_bytes": 99999999999999999999}]',
        '"more": ' + "[" * 3000 + "]" * 3000,
    ],
)
def test_a_manifest_with_impossible_values_is_an_incomplete_state(tmp_path: Path, change: str) -> None:
    path = saved(tmp_path / "train_latest_state", 7) / "manifest.json"
    path.write_text(path.read_text()[:-1] + f", {change}}}")
    found = read_checkpoint(path.parent)
    assert found is not None
    assert not found.complete
    assert found.problem is not None
    assert "\n" not in found.problem
    # It can be shown and written.
    msgspec.json.encode(found)
    assert newest_checkpoint(path.parent) == found


def test_the_state_before_is_offered_when_the_newest_is_broken(tmp_path: Path) -> None:
    latest = saved(tmp_path / "train_latest_state", 9, size=99)
    saved(tmp_path / "train_latest_state.previous", 8)
    found = newest_checkpoint(latest)
    assert found is not None
    assert (found.complete, found.updates) == (True, 8)


def test_the_socket_path_is_short_for_any_run_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMTOP_SOCKET_DIR", raising=False)
    deep = tmp_path / ("d" * 200) / ("e" * 200)
    assert len(str(socket_path(deep))) < 100
    assert socket_path(deep) == socket_path(deep)
    assert socket_path(deep) != socket_path(deep / "x")
    assert socket_path(deep).parent.stat().st_mode & 0o777 == 0o700


def test_a_socket_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    monkeypatch.setenv("MEMTOP_SOCKET_DIR", str(tmp_path / "open"))
    with pytest.raises(RunFolderError, match="closed to others"):
        socket_path(RunFolder(tmp_path).path)


def test_signals_have_names() -> None:
    assert explain.describe_status(-signal.SIGSEGV) == "killed by signal 11 (SIGSEGV)"
    assert explain.describe_status(None).startswith("exit status unknown")


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("memtop.supervisor.run.record.folder.fcntl.flock", refuse)
    lock = RunLock(folder)
    with pytest.raises(RunFolderError, match=r"lock: cannot be locked: No locks available; choose a local --runs-dir"):
        lock.acquire()


def test_a_killed_rank_is_named_although_torchrun_names_the_one_that_lost_it(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    lines = [
        "Failures:",
        "[1]:",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -9 (pid: 12)  (SIGKILL)",
        "------------------------------",
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : 1 (pid: 11)",
        "==============================",
    ]
    log.write_text("\n".join(lines))
    end = read_log_end(log)
    assert end.first_dead_rank == (1, -9)
    assert end.rank_lines == ("rank      : 1 (local_rank: 1)", "exitcode  : -9 (pid: 12)  (SIGKILL)")
    log.write_text("\n".join(lines).replace("-9", "1"))
    assert read_log_end(log).first_dead_rank == (0, 1)
