"""`train --fresh` on a run whose program has just ended: it waits for the supervisor's last
seconds, and only for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from memtop.cli import train
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.proc import identify
from memtop.supervisor.run import starting
from memtop.supervisor.run.processes.attempt import ExitFile
from memtop.supervisor.run.record.folder import RunFolder, StateFile, create_run, write_json
from memtop.supervisor.run.view import is_ending
from memtop.supervisor.wire import Change, Phase, RunState
from tests.conftest import UNTIL_GO, Runs, wait_for_file
from tests.run.brain import spec


def ended_now(runs_dir: Path, phase: Phase = Phase.TRAINING, **state: object) -> RunFolder:
    """A run whose program has ended; this process stands for its supervisor."""
    folder = create_run(runs_dir, spec("a"), fresh=False)
    me = identify(os.getpid())
    assert me is not None
    run = RunState(name="a", folder=str(folder.path), state=phase, created=1.0, attempt=1, supervisor_pid=me.pid)
    file = StateFile(run=run, socket="none", supervisor_started_ticks=me.started_ticks, **state)  # type: ignore[arg-type]
    write_json(folder.state_path, file)
    folder.attempt(1).mkdir(parents=True)
    write_json(folder.attempt(1) / "exit.json", ExitFile(status=1, ended=2.0))
    return folder


def test_a_program_that_has_ended_is_about_to_be_concluded(tmp_path: Path) -> None:
    folder = ended_now(tmp_path)
    assert is_ending(folder)
    (folder.attempt(1) / "exit.json").unlink()
    assert not is_ending(folder), "it may run"


@pytest.mark.parametrize(
    ("phase", "state"), [(Phase.RESTARTING, {}), (Phase.STOPPING, {"pending": Change()}), (Phase.QUEUED, {})]
)
def test_a_run_that_goes_on_is_not_ending(tmp_path: Path, phase: Phase, state: dict[str, object]) -> None:
    folder = ended_now(tmp_path, phase, **state)
    if phase is Phase.QUEUED:
        (folder.attempt(1) / "exit.json").unlink()
    assert not is_ending(folder)


def test_fresh_waits_until_the_end_is_concluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ended_now(tmp_path)
    file = folder.state()
    assert file is not None
    over = replace(file, run=replace(file.run, state=Phase.FAILED), supervisor_started_ticks=0)
    looks = threading.Event()

    def let_leave(run: RunFolder) -> None:
        if looks.is_set():
            write_json(folder.state_path, over)
        looks.set()

    monkeypatch.setattr(starting, "let_leave", let_leave)
    train._free_name_of(folder)
    assert capsys.readouterr().err == "memtop: waiting until the supervisor of a has ended\n"


def test_fresh_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_ENDING_SECONDS", 0.5)
    monkeypatch.setattr(starting, "let_leave", lambda run: None)
    with pytest.raises(RefusedError, match="is in use"):
        train._free_name_of(ended_now(tmp_path))


def test_fresh_begins_once_the_supervisor_of_the_ended_run_has_left(runs: Runs) -> None:
    """Its supervisor is stopped in between, so that its last seconds last until the command waits
    for them."""
    runs.memtop("train", "--detach", "--name", "a", "--", sys.executable, "-c", UNTIL_GO)
    first = runs.wait("a", lambda d: d["trainer_pid"] is not None)
    os.kill(first["supervisor_pid"], signal.SIGSTOP)
    (runs.root / "go").touch()
    wait_for_file(runs.path / "a/attempts/0001/exit.json")
    again = ("train", "--fresh", "--detach", "--name", "a", "--", "sh", "-c", "echo second > second")
    with runs.start(*again, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stderr is not None
        assert command.stderr.readline() == "memtop: waiting until the supervisor of a has ended\n"
        os.kill(first["supervisor_pid"], signal.SIGCONT)
        command.communicate(timeout=120)
    assert command.returncode == 0
    wait_for_file(runs.root / "second")
    second = runs.wait("a", lambda d: d["state"] == "finished")
    assert second["command"] == list(again[-3:])
