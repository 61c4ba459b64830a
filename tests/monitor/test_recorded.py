"""The processes that runs have recorded, as evidence: real shims, sessions and run folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.processes.facts import ProcessDescriber
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.monitor.processes.signals import SignalRefused, signal_process
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.values import GpuProcess
from memtop.supervisor.run.processes import shim
from memtop.supervisor.run.record.folder import RunFolder, RunLock, RunSpec, StateFile, write_json
from memtop.supervisor.run.view import known_runs
from memtop.supervisor.wire import Phase, RunState
from tests.conftest import wait_for_file
from tests.monitor.conftest import GIB
from tests.nvml_double.double import Script

PYTHON = [sys.executable, "-S", "-E", "-c"]
# Its child has no environment, like a program that overwrites it with a title. It writes the
# child's pid.
LEAVES_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-S', '-E', '-c', 'import time; time.sleep(120)'], env={}, stdout=2)
open(sys.argv[1] + '.new', 'w').write(str(child.pid))
os.rename(sys.argv[1] + '.new', sys.argv[1])
if sys.argv[2] == 'stay': time.sleep(120)
time.sleep(0.8)
"""


class Attempt:
    """One attempt of a run under its real shim, without a supervisor."""

    def __init__(self, runs: Path, name: str, *, stay: bool) -> None:
        self.folder = RunFolder(runs / name)
        attempt = self.folder.attempt(1)
        attempt.mkdir(parents=True)
        write_json(
            self.folder.spec_path,
            RunSpec(name=name, created=0.0, settings=None, command=("x",), cwd="/", memtop_version="0"),
        )
        state = RunState(name=name, folder=str(self.folder.path), state=Phase.TRAINING, created=0.0, attempt=1)
        write_json(self.folder.state_path, StateFile(run=state, socket=""))
        argv = [*PYTHON, LEAVES_A_CHILD, str(attempt / "child"), "stay" if stay else "go"]
        (attempt / "command.json").write_text(json.dumps({"argv": argv, "cwd": "/", "environment": {}}))
        (attempt / "child").parent.mkdir(exist_ok=True)
        self.shim = subprocess.Popen([sys.executable, "-I", "-S", str(shim.__file__), str(attempt)], start_new_session=True)
        if stay:
            while not (attempt / "child").exists() or not (attempt / "process.json").exists():
                assert self.shim.poll() is None
        else:
            wait_for_file(attempt / "exit.json")
        self.process_path = attempt / "process.json"
        self.program = int(json.loads(self.process_path.read_text())["pid"])
        self.child = int((attempt / "child").read_text())

    def end(self) -> None:
        for pid in (self.child, self.program):
            found = identify(pid)
            try:
                if found is not None:
                    signal_process(found, signal.SIGKILL)
            except SignalRefused as gone:
                print(f"already gone: {gone}")
        self.shim.wait()


@pytest.fixture
def over(tmp_path: Path) -> Iterator[Attempt]:
    attempt = Attempt(tmp_path / "runs", "over", stay=False)
    yield attempt
    attempt.end()


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Attempt]:
    attempt = Attempt(tmp_path / "runs", "living", stay=True)
    yield attempt
    attempt.end()


RowOf = Callable[[int], GpuProcess]


@pytest.fixture
def row_of(tmp_path: Path, driver: Script, reader: NvmlReader) -> RowOf:
    """Samples a GPU on which this process is listed; returns its row."""

    def sample(pid: int) -> GpuProcess:
        driver.clear().gpu(0, total=24 * GIB, used=8 * GIB).process(0, pid=pid, used=4 * GIB).write()
        describer = ProcessDescriber(same_namespace=lambda: True)
        return Sampler(lambda: known_runs(tmp_path / "runs"), nvml=reader, describer=describer).sample().gpus[0].processes[0]

    return sample


def test_an_orphan_without_a_marker_is_proven_by_its_session(over: Attempt, row_of: RowOf) -> None:
    row = row_of(over.child)
    assert (row.run, row.stray, row.choosable) == ("over", True, True)
    assert row.reason == "left over from attempt 1 of run over, which is over: in the session that the run created"


def test_processes_of_a_living_session_are_needed(living: Attempt, row_of: RowOf) -> None:
    for pid in (living.child, living.program):
        row = row_of(pid)
        assert (row.run, row.stray, row.choosable) == ("living", False, False)


def test_a_recorded_program_of_a_moved_run_is_needed(living: Attempt, tmp_path: Path, row_of: RowOf) -> None:
    """Its folder was renamed while it runs without a supervisor; the record moved with the
    folder."""
    living.folder.path.rename(tmp_path / "runs" / "living.20260101-000000")
    assert row_of(living.program).run == "living.20260101-000000"
    assert not row_of(living.child).choosable


def test_records_of_another_boot_or_machine_prove_nothing(over: Attempt, row_of: RowOf) -> None:
    before = over.process_path.stat().st_mtime - 3600
    os.utime(over.process_path, (before, before))
    row = row_of(over.child)
    assert (row.run, row.stray, row.choosable) == (None, False, True)


def test_without_an_exit_file_the_session_proves_nothing(over: Attempt, row_of: RowOf) -> None:
    (over.folder.attempt(1) / "exit.json").unlink()
    assert not row_of(over.child).stray


def test_a_damaged_run_hides_no_other(over: Attempt, tmp_path: Path) -> None:
    damaged = tmp_path / "runs" / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    assert [run.name for run in known_runs(tmp_path / "runs")] == ["over"]
    # A damaged state.json counts as missing: the other files say that the run is over.
    over.folder.state_path.write_text("{")
    assert [(run.name, run.alive) for run in known_runs(tmp_path / "runs")] == [("over", False)]


def test_changed_files_are_read_again(over: Attempt, tmp_path: Path) -> None:
    (run,) = known_runs(tmp_path / "runs")
    assert (run.alive, run.attempt, [attempt.over for attempt in run.recorded]) == (False, 1, [True])
    state = over.folder.state()
    assert state is not None
    write_json(over.folder.state_path, StateFile(run=msgspec.structs.replace(state.run, attempt=2), socket=""))
    (run,) = known_runs(tmp_path / "runs")
    assert run.attempt == 2


def test_a_resumed_run_is_no_longer_over(over: Attempt, tmp_path: Path) -> None:
    """The lock is taken before anything is written or started, and makes the cached state
    invalid."""
    assert [run.alive for run in known_runs(tmp_path / "runs")] == [False]
    lock = RunLock(over.folder)
    assert lock.acquire()
    assert [run.alive for run in known_runs(tmp_path / "runs")] == [True]
    lock.release()
    assert [run.alive for run in known_runs(tmp_path / "runs")] == [False]


def test_a_damaged_record_of_an_earlier_attempt_takes_nothing_from_the_newest(living: Attempt, tmp_path: Path) -> None:
    attempts = living.folder.path / "attempts"
    (attempts / "0001").rename(attempts / "0002")
    (attempts / "0001").mkdir()
    (attempts / "0001" / "process.json").write_text("{")
    state = living.folder.state()
    assert state is not None
    write_json(living.folder.state_path, StateFile(run=msgspec.structs.replace(state.run, attempt=2), socket=""))
    (run,) = known_runs(tmp_path / "runs")
    assert (run.alive, [(attempt.number, attempt.over) for attempt in run.recorded]) == (True, [(2, False)])
