"""The supervisor's pieces, each by itself: values and real files, no clock but one that the test moves."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from msgspec.structs import replace

from memtop.presets import load_presets, load_recipes, resolve
from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.run import explain
from memtop.supervisor.run.clients.publish import Publisher
from memtop.supervisor.run.clients.server import ControlServer, socket_path
from memtop.supervisor.run.commands import Commands
from memtop.supervisor.run.ending import finish
from memtop.supervisor.run.lifecycle import Lifecycle
from memtop.supervisor.run.processes import shim
from memtop.supervisor.run.processes.attempt import ExitFile, RunningAttempt, StopLadder, Waits
from memtop.supervisor.run.processes.launch import allocator_environment
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
from memtop.supervisor.run.record.journal import Journal
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.record.view import known_runs, read_run, read_state, show
from memtop.supervisor.run.reports import End, Step
from memtop.supervisor.run.supervisor import Supervisor
from memtop.supervisor.run.taking_over import take_over
from memtop.supervisor.wire import Change, Checkpoint, Event, Outcome, Phase, Restart
from tests.run.reported import heard, reported

SETTINGS = resolve(load_recipes()["first-run"], preset=load_presets()["standard"])


def spec(name: str, created: float = 1.0) -> RunSpec:
    return RunSpec(name=name, created=created, settings=SETTINGS, cwd="/", memtop_version="0")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- lifecycle ----------------------------------------------------------------------------------------------------------


def test_a_run_goes_through_its_life() -> None:
    clock = Clock()
    life = Lifecycle(Phase.CREATED, clock)
    for phase in (Phase.STARTING, Phase.TRAINING, Phase.RESTARTING, Phase.STARTING, Phase.TRAINING, Phase.FINISHED):
        life.move(phase)
    clock.now += 5
    assert life.phase is Phase.FINISHED
    assert life.seconds_in_phase() == 5


@pytest.mark.parametrize(
    ("phase", "impossible"),
    [
        (Phase.CREATED, Phase.TRAINING),
        (Phase.FINISHED, Phase.TRAINING),
        (Phase.STOPPED, Phase.STOPPING),
        (Phase.RESTARTING, Phase.FINISHED),
        (Phase.TRAINING, Phase.STARTING),
    ],
)
def test_impossible_transitions_are_refused(phase: Phase, impossible: Phase) -> None:
    life = Lifecycle(phase, Clock())
    with pytest.raises(AssertionError, match=impossible.value):
        life.move(impossible)
    assert life.phase is phase


# --- folder -------------------------------------------------------------------------------------------------------------


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


def test_a_look_at_a_run_keeps_nobody_from_taking_it(tmp_path: Path) -> None:
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
    for read in (lambda: read_run(folder.path), lambda: show(folder, metrics=True)):
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


# --- journal, ledger, progress --------------------------------------------------------------------------------------------


def test_only_whole_lines_are_read_and_damaged_ones_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"type": "step", "update": 1}\n{"upd\n{"type": "step", "update": 2}\n{"type": "step", "update": 3')
    journal = Journal(path)
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


def test_until_a_restart_has_said_where_it_resumes_the_old_rows_stand(tmp_path: Path) -> None:
    rows = ledger_with_two_attempts(tmp_path, resumed_at=None).metrics()
    assert [row.update for row in rows] == list(range(1, 8))


def test_rows_taken_back_stay_away_although_the_new_attempt_is_not_there_yet(tmp_path: Path) -> None:
    ledger = ledger_with_two_attempts(tmp_path, resumed_at=None)
    ledger.update_attempt(2, start_updates=3)
    assert [row.update for row in ledger.metrics()] == [1, 2, 3]


def test_reports_read_twice_count_once_and_the_offset_goes_with_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_attempt(1, "start", None, 1.0)
    for _ in range(2):
        ledger.add_reports(1, 0, [steps(1), steps(2)], 64)
    assert len(ledger.metrics()) == 2
    assert ledger.journal_offset(1, 0) == 64


def test_a_full_disk_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_attempt(1, "start", None, 1.0)
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count={pages}")
    many = [replace(steps(n), sample_digest="x" * 500) for n in range(200)]
    with pytest.raises(sqlite3.OperationalError, match="full"):
        ledger.add_reports(1, 0, many, 9000)
    assert ledger.journal_offset(1, 0) == 0
    ledger._db.execute("PRAGMA max_page_count=100000")
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


# --- shim ---------------------------------------------------------------------------------------------------------------


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
def test_the_shim_tells_how_the_program_ended(tmp_path: Path, program: str, status: int) -> None:
    command = {"argv": [sys.executable, "-c", program], "cwd": str(tmp_path), "environment": {"MARK": "1"}}
    (tmp_path / "command.json").write_text(json.dumps(command))
    subprocess.run([sys.executable, "-I", "-S", shim.__file__, str(tmp_path)], check=True, timeout=60)
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == status
    assert json.loads((tmp_path / "process.json").read_text())["pid"] > 0


def test_a_program_that_does_not_exist_is_named_in_its_output(tmp_path: Path) -> None:
    command = {"argv": ["no-such-program"], "cwd": str(tmp_path), "environment": {}}
    (tmp_path / "command.json").write_text(json.dumps(command))
    subprocess.run([sys.executable, "-I", "-S", shim.__file__, str(tmp_path)], check=True, timeout=60)
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == 127
    assert "no-such-program: cannot be started" in (tmp_path / "output.log").read_text()


# --- stopping -----------------------------------------------------------------------------------------------------------


def test_the_ladder_climbs_only_as_time_passes(tmp_path: Path) -> None:
    clock, said = Clock(), list[str]()
    attempt = RunningAttempt(create_run(tmp_path, spec("a"), fresh=False), 1, shim_pid=None)
    ladder = StopLadder(attempt, asked=True, monotonic=clock, announce=said.append, waits=Waits(graceful=60, terminate=40))
    ladder.tick()
    assert [line.split()[0] for line in said] == ["asked"]
    clock.now += 60
    ladder.tick()
    ladder.tick()
    clock.now += 40
    ladder.tick()
    clock.now += 1000
    ladder.tick()
    assert [line.split()[0] for line in said] == ["asked", "SIGTERM", "SIGKILL"]


def test_a_stop_waits_for_a_save_as_long_as_they_have_taken() -> None:
    plain = Waits()
    assert plain.stretched(1.0, 2.0) == plain.stretched(1.0, 2.0, saves_on_sigterm=True) == plain
    assert plain.stretched(100.0).graceful == 230.0
    own = plain.stretched(1.0, 150.0)
    assert (own.graceful, own.terminate) == (330.0, plain.terminate)
    ours = plain.stretched(1.0, 150.0, saves_on_sigterm=True)
    assert (ours.graceful, ours.terminate, ours.interrupt, ours.kill) == (330.0, 330.0, plain.interrupt, plain.kill)
    assert ours.why == "a save or an evaluation has taken it 150 s"
    # One that hangs is ended some day, however long it has been silent before.
    assert plain.stretched(1.0, 1e9, saves_on_sigterm=True).terminate == 30.0 + 2 * 1800.0
    assert plain.stretched(5000.0, 1e9).graceful == 30.0 + 2 * 5000.0


@pytest.mark.parametrize("told", ["checkpoint", "evaluation"])
def test_a_trainer_that_saves_for_long_is_not_killed_in_the_middle_of_it(tmp_path: Path, told: str) -> None:
    supervisor = supervisor_at_update(tmp_path, 7)
    clock = Clock()
    supervisor._monotonic = clock
    assert supervisor.progress.step is not None
    at = supervisor.progress.step.time or 0.0
    if told == "checkpoint":
        # The supervisor may have come after the update before it.
        supervisor.progress = replace(supervisor.progress, step=None)
        supervisor.progress = supervisor.progress.after(
            0, reported({"type": "checkpoint", "updates": 7, "seconds": 150.0, "time": at + 1.0})
        )
    else:
        supervisor.progress = heard(supervisor.progress, {"type": "evaluation", "update": 7, "time": at + 150.0})
    ladder = supervisor.begin_stop(asked=True)
    for _ in range(2):
        clock.now += 329.0
        ladder.tick()
        clock.now += 1.0
        ladder.tick()
    said = [event.message for event in supervisor.ledger.events() if event.kind == "stop"]
    assert said[0].endswith("SIGTERM follows in 330 s (a save or an evaluation has taken it 150 s)")
    assert [line.split()[0] for line in said] == ["asked", "SIGTERM", "SIGKILL"]


@pytest.mark.parametrize("why", ["own program", "stands still"])
def test_who_would_not_save_on_a_signal_is_not_given_longer_for_it(tmp_path: Path, why: str) -> None:
    supervisor = supervisor_at_update(tmp_path, 7)
    clock = Clock()
    supervisor._monotonic = clock
    supervisor.progress = replace(supervisor.progress, longest_pause=150.0)
    if why == "own program":
        supervisor.settings = None
    else:
        supervisor.survival.stalled = "CUDA out of memory"
    ladder = supervisor.begin_stop(asked=False)
    for seconds in (0.0, 15.0, 40.0):
        clock.now += seconds
        ladder.tick()
    said = [event.message for event in supervisor.ledger.events() if event.kind == "stop"]
    assert [line.split()[0] for line in said] == ["SIGINT", "SIGTERM", "SIGKILL"]


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


def test_who_declines_to_stop_gets_signals_at_once_but_only_once(tmp_path: Path) -> None:
    clock, said = Clock(), list[str]()
    attempt = RunningAttempt(create_run(tmp_path, spec("a"), fresh=False), 1, shim_pid=None)
    ladder = StopLadder(attempt, asked=True, monotonic=clock, announce=said.append)
    ladder.declined()
    ladder.tick()
    ladder.declined()
    ladder.tick()
    assert [line.split()[0] for line in said] == ["asked", "SIGINT"]


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
    found, reason, diagnosis = explain.outcome(log, end, status, before, own_program=own)
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
            assert explain.outcome(tmp_path / "log", end, status, phase, own_program=False)[:2] == (Phase.FAILED, words)
    silent = End(outcome="finished", saved=False)
    finished = explain.outcome(tmp_path / "log", silent, 1, Phase.TRAINING, own_program=False)
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
def test_what_is_done_again_is_counted(reached: int | None, saved: int | None, words: str | None) -> None:
    state = None if saved is None else Checkpoint(path="", updates=saved, complete=True)
    assert explain.done_again(reached, state) == words


def test_of_a_state_that_is_not_whole_nobody_knows_what_is_done_again() -> None:
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


# --- restarting ---------------------------------------------------------------------------------------------------------


def supervisor_at_update(tmp_path: Path, update: int) -> Supervisor:
    """A supervisor whose built-in trainer stands there, with a checkpoint of update 5; without processes."""
    folder = create_run(tmp_path, spec("a"), fresh=False)
    saved(folder.latest_state, 5)
    supervisor = Supervisor(folder)
    supervisor.ledger = Ledger(folder.ledger_path)
    server = ControlServer(tmp_path / "socket", on_request=AsyncMock(), on_agent=Mock(), on_gone=Mock())
    supervisor.publisher = Publisher(supervisor.ledger, server)
    supervisor.ledger.add_attempt(1, "start", SETTINGS, 1.0)
    supervisor.attempt = RunningAttempt(folder, 1, shim_pid=None)
    supervisor.lifecycle = Lifecycle(Phase.TRAINING, Clock())
    supervisor.progress = supervisor.progress.after(
        0, reported({**step(update), "samples_seen": update * SETTINGS.effective_batch})
    )
    return supervisor


def test_what_a_live_run_is_to_become_counts_from_where_it_will_stop(tmp_path: Path) -> None:
    supervisor = supervisor_at_update(tmp_path, 7)
    for updates in (1, 6, 7):
        with pytest.raises(UsageError, match=f"max_updates {updates}: the run will have done 8 when it stops"):
            supervisor.foreseen(Change(max_updates=updates))
    settings = supervisor.foreseen(Change(max_updates=10))
    assert settings is not None
    assert settings.target_samples == 10 * SETTINGS.effective_batch
    supervisor.lifecycle.move(Phase.STOPPED)
    assert supervisor.foreseen(Change(max_updates=6)) is not None


async def test_a_change_that_turns_out_impossible_leaves_a_stopped_run(tmp_path: Path) -> None:
    supervisor = supervisor_at_update(tmp_path, 5)
    supervisor.pending = Change(max_updates=6)
    supervisor.lifecycle.move(Phase.RESTARTING)
    saved(tmp_path / "later", 9).rename(supervisor.folder.latest_state.with_name("new"))
    shutil.rmtree(supervisor.folder.latest_state)
    supervisor.folder.latest_state.with_name("new").rename(supervisor.folder.latest_state)
    await finish(supervisor, ExitFile(0, 2.0))
    assert supervisor.phase is Phase.STOPPED
    assert supervisor.lifecycle.reason == "max_updates 6: 9 updates are done already; give more"
    assert [attempt.outcome for attempt in supervisor.ledger.attempts()] == ["stopped"]


@pytest.mark.parametrize("obstacle", ["ledger", "folder"])
def test_an_attempt_that_cannot_be_started_changes_nothing(tmp_path: Path, obstacle: str) -> None:
    supervisor = supervisor_at_update(tmp_path, 7)
    supervisor.lifecycle.move(Phase.FAILED)
    supervisor.started, supervisor.ended, supervisor.exit_status = 1.0, 2.0, 3
    before = supervisor.state()
    if obstacle == "ledger":
        supervisor.ledger._db.execute("PRAGMA query_only=ON")
    else:
        shutil.rmtree(supervisor.folder.path / "attempts")
        (supervisor.folder.path / "attempts").write_text("")
    with pytest.raises(RunFolderError):
        supervisor.begin_restart(Change(assignments={"batch": "2"}))
    after = supervisor.state()
    assert msgspec.structs.replace(after, warnings=()) == before
    attempts = supervisor.ledger.attempts()
    assert [attempt.outcome for attempt in attempts] == ([None] if obstacle == "ledger" else [None, "failed"])
    assert all(attempt.ended for attempt in attempts[1:])
    supervisor.ledger.close()
    # Nor does the next supervisor take the change for made.
    follower = Supervisor(supervisor.folder)
    follower.ledger = Ledger(supervisor.folder.ledger_path)
    follower.ledger.update_attempt(1, ended=2.0, outcome="failed")
    follower.publisher = supervisor.publisher
    take_over(follower, None)
    assert follower.settings == SETTINGS


async def test_a_restart_tells_what_becomes_of_the_effective_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = supervisor_at_update(tmp_path, 7)
    supervisor.lifecycle.move(Phase.STOPPED)
    monkeypatch.setattr("memtop.supervisor.run.supervisor.start_program", lambda *_, **__: os.getpid())
    peer = Mock()
    split = f"effective batch {SETTINGS.effective_batch} -> {SETTINGS.accumulation}"
    await Commands(supervisor)._restart(peer, Restart(id=1, change=Change(assignments={"batch": "1"})))
    accepted = peer.send.call_args_list[0].args[0]
    assert accepted.outcome is Outcome.ACCEPTED
    assert split in accepted.message
    assert split in supervisor.ledger.events()[-1].message
    assert explain.split_change(SETTINGS, SETTINGS) == ""


async def test_a_change_that_cannot_be_is_refused_as_wrong_usage(tmp_path: Path) -> None:
    supervisor = supervisor_at_update(tmp_path, 7)
    peer = Mock()
    for change in (
        Change(assignments={"batch": "0"}),
        Change(preset="no-such"),
        Change(assignments={"nothing": "1"}),
        Change(max_updates=3),
    ):
        await Commands(supervisor)._restart(peer, Restart(id=1, change=change))
        assert peer.refuse.call_args.kwargs == {"usage": True}
    supervisor.lifecycle.move(Phase.STOPPING)
    await Commands(supervisor)._restart(peer, Restart(id=1))
    assert peer.refuse.call_args.kwargs == {"usage": False}
    peer.send.assert_not_called()


async def test_sampling_that_fails_is_told_once_and_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = supervisor_at_update(tmp_path, 7)
    monkeypatch.setattr("memtop.supervisor.run.machine_watch._AGAIN_SECONDS", 0.0)
    tries, often = 0, asyncio.Event()

    async def fail(on_sample: object) -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            often.set()
            await asyncio.Event().wait()
        raise OSError("no driver")

    monkeypatch.setattr(supervisor.watch, "run", fail)
    supervisor.watch.start(supervisor._on_sample, supervisor._on_sampling_failed)
    await asyncio.wait_for(often.wait(), 60)
    told = [event.message for event in supervisor.ledger.events()]
    assert told == ["the machine could not be sampled: OSError('no driver')"]
    supervisor.watch.stop()


# --- checkpoint, socket ---------------------------------------------------------------------------------------------------


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


def test_a_complete_checkpoint_is_told_from_a_broken_one(tmp_path: Path) -> None:
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


async def test_a_leak_ends_nothing_that_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = supervisor_at_update(tmp_path, 7)
    supervisor.spec = msgspec.structs.replace(supervisor.spec, on_oom="auto")
    leak = Mock(message="anonymous memory of rank 0 grows")
    monkeypatch.setattr("memtop.supervisor.run.prevention.must_act", lambda *_, **__: leak)
    restarts: list[Change] = []
    monkeypatch.setattr(supervisor, "begin_restart", restarts.append)
    asked = AsyncMock(return_value=[Mock(ok=False, message="not saved: 18 MiB needed, 3 MiB free")])
    monkeypatch.setattr(supervisor.agents, "call", asked)

    async def act(again: bool) -> None:
        supervisor.prevention._follow_attempt()
        supervisor.prevention._acted = not again
        supervisor.prevention._act()
        await asyncio.sleep(0.05)

    # While saves fail, it is not even asked for one more.
    supervisor.progress = supervisor.progress.after(
        0, reported({"type": "save_failed", "update": 7, "message": "update 7 not saved", "waiting": False})
    )
    await act(again=True)
    assert (asked.await_count, restarts) == (0, [])
    supervisor.progress = heard(supervisor.progress, {"type": "checkpoint", "updates": 7})
    await act(again=True)
    assert (asked.await_count, restarts) == (1, [])
    told = [event.message for event in supervisor.ledger.events() if event.kind == "leak"]
    assert told[-1] == "not restarted: its state could not be saved: not saved: 18 MiB needed, 3 MiB free"
    asked.return_value = [Mock(ok=True)]
    await act(again=False)
    assert restarts == [], "once an attempt"
    await act(again=True)
    assert [change.reason for change in restarts] == ["leak: anonymous memory of rank 0 grows"]


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run(tmp_path, spec("a"), fresh=False)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("memtop.supervisor.run.record.folder.fcntl.flock", refuse)
    lock = RunLock(folder)
    with pytest.raises(RunFolderError, match=r"lock: cannot be locked: No locks available; choose a local --runs-dir"):
        lock.acquire()
