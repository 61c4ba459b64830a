"""The folder of a run whose trainer or supervisor has ended, and leftover ranks without a
marker."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from memtop.supervisor.monitor.processes.facts import describe_process
from memtop.supervisor.monitor.processes.proc import ProcessId, identify
from memtop.supervisor.monitor.strays import judge
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.program import Program
from memtop.supervisor.run.processes import members
from memtop.supervisor.run.processes.attempt import ProcessFile
from memtop.supervisor.run.processes.members import RANKS_FILE, RanksFile, record_rank
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, StateFile, create_run, find_run, write_json
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.view import known_runs, read_state, show
from memtop.supervisor.run_memory import RoleMemory
from memtop.supervisor.wire import Phase, RunState
from tests.conftest import Runs


@pytest.fixture
def program() -> subprocess.Popen[bytes]:
    with subprocess.Popen(["sleep", "120"], env={}) as started:
        yield started  # type: ignore[misc]
        started.kill()


def ended() -> ProcessId:
    gone = subprocess.Popen(["true"])
    gone.wait()
    return ProcessId(gone.pid, 1)


def folder_of(path: Path, trainer: ProcessId, supervisor: ProcessId, phase: Phase = Phase.TRAINING) -> RunFolder:
    spec = RunSpec(name="a", created=1.0, settings=None, command=("x",), cwd="/", memtop_version="0")
    folder = create_run(path, spec, fresh=False)
    folder.attempt(1).mkdir(parents=True)
    write_json(folder.attempt(1) / "process.json", ProcessFile(trainer.pid, trainer.started_ticks, trainer.pid, 0))
    state = RunState(
        name="a",
        folder=str(folder.path),
        state=phase,
        created=1.0,
        attempt=1,
        trainer_pid=trainer.pid,
        supervisor_pid=supervisor.pid,
        ranks=(RankMemory(rank=0, pid=77, connected=True, allocated_bytes=5, reserved_bytes=6, peak_bytes=7, rss_bytes=8),),
        run_rss_bytes=9,
        run_memory=(RoleMemory(role="rank", processes=1, pss_bytes=9, uss_bytes=9),),
    )
    write_json(folder.state_path, StateFile(run=state, socket="", supervisor_started_ticks=supervisor.started_ticks))
    return folder


@pytest.mark.parametrize(("trains", "supervised"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.FINISHED])
def test_memory_is_reported_only_while_processes_hold_it_and_a_supervisor_measures_it(
    tmp_path: Path, program: subprocess.Popen[bytes], trains: bool, supervised: bool, phase: Phase
) -> None:
    living = identify(program.pid)
    assert living is not None
    state = read_state(folder_of(tmp_path, living if trains else ended(), living if supervised else ended(), phase))
    (rank,) = state.ranks
    known = trains and supervised
    assert (rank.connected, rank.allocated_bytes, rank.reserved_bytes, rank.rss_bytes) == (
        (True, 5, 6, 8) if known else (False, None, None, None)
    )
    assert rank.peak_bytes == 7, "that has been"
    assert (state.run_rss_bytes, len(state.run_memory)) == ((9, 1) if known else (None, 0))
    assert state.supervisor_pid == (program.pid if supervised else None)


Judge = Callable[[Path, int], tuple[bool, str]]


def verdict(runs: Path, pid: int) -> tuple[bool, bool, str]:
    identity = identify(pid)
    assert identity is not None
    facts = describe_process(identity)
    found = judge(facts, "compute", known_runs(runs), own_uid=facts.uid or 0, protected=frozenset())
    return found.stray, found.choosable, found.reason


def test_a_rank_that_is_left_over_is_proven_by_the_record(tmp_path: Path, program: subprocess.Popen[bytes]) -> None:
    """It carries no marker and leads no session of the run: torchrun's ranks that write their own
    title."""
    dead = subprocess.Popen(["sleep", "120"])
    leader = identify(dead.pid)
    assert leader is not None
    folder = folder_of(tmp_path, leader, ended())
    assert verdict(tmp_path, program.pid) == (False, True, "your own process, not started by a memtop run")
    record_rank(folder.attempt(1), program.pid)
    assert verdict(tmp_path, program.pid)[:2] == (False, False), "needed while the program lives"
    dead.kill()
    dead.wait()
    stray, choosable, reason = verdict(tmp_path, program.pid)
    assert (stray, choosable) == (True, True)
    assert reason == "left over from attempt 1 of run a, which is over: recorded by the run"


def test_each_rank_is_written_down_once(
    tmp_path: Path, program: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    write = members.write_json
    monkeypatch.setattr(members, "write_json", lambda path, value: (written.append(path), write(path, value)))
    for pid in (program.pid, program.pid, 0, 1, ended().pid):
        record_rank(tmp_path, pid)
    assert written == [tmp_path / RANKS_FILE]
    stored = msgspec.json.decode((tmp_path / RANKS_FILE).read_bytes(), type=RanksFile)
    assert stored.processes == (identify(program.pid),)


def test_a_damaged_record_and_a_full_disk_end_nothing(
    tmp_path: Path, program: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, ended(), ended())
    (folder.attempt(1) / RANKS_FILE).write_text("{")
    assert not known_runs(tmp_path)[0].alive
    record_rank(folder.attempt(1) / "no such folder", program.pid)
    record_rank(folder.attempt(1), program.pid)
    stored = msgspec.json.decode((folder.attempt(1) / RANKS_FILE).read_bytes(), type=RanksFile)
    assert stored.processes == (identify(program.pid),)


PROGRAM = """
import os, time, memtop_agent
memtop_agent.report("step", update=1, samples_seen=1)
time.sleep(120)
"""


def test_a_real_rank_is_recorded_with_its_start(runs: Runs) -> None:
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", PROGRAM)
    folder = find_run("a", runs.path)
    document = runs.wait("a", lambda d: d["trainer_pid"] is not None and (folder.attempt(1) / RANKS_FILE).exists())
    stored = msgspec.json.decode((folder.attempt(1) / RANKS_FILE).read_bytes(), type=RanksFile)
    assert stored.processes == (identify(document["trainer_pid"]),)


@pytest.mark.parametrize(
    ("grip", "recorded", "shown"),
    [
        # memtop counts from 0, and the first line of the second attempt is that of step 200.
        ("optimizer", 0, None),
        ("output", 199, None),
        (None, 0, None),
        # A report of the program, its framework or its profile says it.
        ("optimizer", 194, 194),
        ("hooks", 0, 0),
        ("profile", 20, 20),
    ],
)
def test_where_an_own_program_began_again_is_shown_only_if_it_is_known(
    tmp_path: Path, grip: str | None, recorded: int, shown: int | None
) -> None:
    folder = folder_of(tmp_path, ended(), ended())
    file = folder.state()
    assert file is not None
    folder.state_path.write_bytes(msgspec.json.encode(replace(file, run=replace(file.run, program=Program(grip=grip)))))
    ledger = Ledger(folder.ledger_path)
    for number, start in ((1, 0), (2, recorded)):
        ledger.add_attempt(number, "start", None, 1.0, start_updates=start)
    ledger.close()
    assert [one["start_updates"] for one in show(folder)["attempts"]] == [0, shown]


def test_a_ledger_without_tables_is_none_yet_and_gets_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, ended(), ended())
    folder.ledger_path.touch()
    assert show(folder)["attempts"] == []
    statements: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*arguments, **options)
        db.set_trace_callback(lambda text: statements.append(text.strip()))
        return db

    monkeypatch.setattr(sqlite3, "connect", traced)
    Ledger(folder.ledger_path).close()
    made = [number for number, text in enumerate(statements) if "CREATE TABLE" in text]
    begun, done = (next(n for n, text in enumerate(statements) if text.startswith(word)) for word in ("BEGIN", "COMMIT"))
    assert begun < made[0] <= made[-1] < done
    assert sum(text.startswith(("BEGIN", "COMMIT")) for text in statements) == 2
