"""Programs that report nothing: why that may be, in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from memtop.supervisor.monitor.processes.proc import ProcessId, identify
from memtop.supervisor.run import explain
from memtop.supervisor.run.events import Absence, NamedProcess, NotHeard
from memtop.supervisor.run.model import CurrentAttempt, Model
from memtop.supervisor.run.processes.agent import AGENT_SITE, SILENT_SECONDS, not_heard
from memtop.supervisor.run.processes.attempt import ProcessFile, RunningAttempt
from memtop.supervisor.run.processes.members import named
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record.folder import RunFolder, RunSpec, create_run, write_json
from memtop.supervisor.run.sensors import Sensors
from tests.run.brain import RUN, training

OURS = {"MEMTOP_ATTEMPT_DIR": "/nowhere", "PYTHONPATH": f"{AGENT_SITE}{os.pathsep}/x"}
READY = "import time; print(flush=True); time.sleep(600)"


@contextmanager
def running(*command: str, environment: dict[str, str]) -> Iterator[ProcessId]:
    """The process, once its program runs."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            found = identify(process.pid)
            assert found is not None
            yield found
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ((sys.executable, "-u", "-c", READY), OURS, None),
        ((sys.executable, "-X", "utf8", "-c", READY, "-I"), OURS, None),
        ((sys.executable, "-c", READY), {}, Absence.ENVIRONMENT),
        ((sys.executable, "-c", READY), {**OURS, "PYTHONPATH": "."}, Absence.PYTHONPATH),
        ((sys.executable, "-I", "-c", READY), OURS, Absence.ISOLATED),
        ((sys.executable, "-uE", "-c", READY), OURS, Absence.ISOLATED),
        (("sh", "-c", "echo; exec sleep 600"), OURS, Absence.NO_PYTHON),
    ],
)
def test_why_a_program_cannot_report(command: tuple[str, ...], environment: dict[str, str], expected: Absence | None) -> None:
    with running(*command, environment={"PATH": os.environ["PATH"], **environment}) as process:
        found = not_heard([process], 60.0)
        later = not_heard([process], SILENT_SECONDS)
    assert (found and found.absence) == expected
    assert later is not None
    assert later.absence is (expected or Absence.NO_UPDATE)
    if found is not None and found.process is not None:
        assert found.process.pid == process.pid


def test_a_process_of_root_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program under sudo, and sudo itself before it: a user may not read what they execute."""

    def refuse(path: str) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(os, "readlink", refuse)
    with running(sys.executable, "-c", READY, environment={}) as process:
        found = not_heard([ProcessId(1, 1), process], 60.0)
        assert found is not None
        assert (found.absence, found.process) == (Absence.OTHER_USER, named(process))
    assert ") runs as root or another user (sudo)" in explain.not_heard(found)
    assert explain.not_heard(NotHeard(Absence.NO_UPDATE)).startswith("memtop runs in the program but has seen no update yet.")


def test_the_warning_comes_once_for_each_reason_and_goes_with_the_first_report() -> None:
    brain = training(settings=None, progress=Progress())
    brain.tick()
    lost = NotHeard(Absence.ENVIRONMENT, NamedProcess(5, "python"))
    for found in (lost, lost, NotHeard(Absence.NO_PYTHON)):
        brain.tick(not_heard=found)
    assert brain.messages("warning") == [explain.not_heard(lost), explain.not_heard(NotHeard(Absence.NO_PYTHON))]
    assert "pid 5 (python) was started with another environment (env -i)" in brain.messages("warning")[0]
    assert list(brain.model.warnings.values()) == brain.messages("warning")[1:]
    brain.tick()
    assert brain.model.warnings == {}


def test_it_is_looked_for_once_a_minute_and_only_in_silent_programs_of_users(tmp_path: Path) -> None:
    spec = RunSpec(name="a", created=1.0, settings=None, command=("x",), cwd="/", memtop_version="0")
    folder: RunFolder = create_run(tmp_path, spec, fresh=False)
    folder.attempt(1).mkdir(parents=True)
    now, silent = [1000.0], Model(run=replace(RUN, settings=None), attempt=CurrentAttempt(number=1, started=1.0, since=1000.0))
    model = [silent]
    sensors = Sensors(folder, lambda: model[0], lambda: now[0])

    def look(at: float) -> Absence | None:
        now[0] = 1000.0 + at
        found = sensors.tick(watched=False, alive=True, queue=None).not_heard
        return found and found.absence

    with running(sys.executable, "-c", READY, environment={}) as process:
        write_json(folder.attempt(1) / "process.json", ProcessFile(process.pid, process.started_ticks, 1, 0))
        sensors.follow(RunningAttempt(folder, 1, None), 1.0, new=False)
        assert [look(0.0), look(59.0), look(60.0)] == [None, None, Absence.ENVIRONMENT]
        assert not sensors.tick(watched=False, alive=True, queue=None).stopped
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert sensors.tick(watched=False, alive=True, queue=None).stopped
    # The process is gone, which is seen a minute later.
    assert [look(119.0), look(120.0)] == [Absence.ENVIRONMENT, Absence.NO_PYTHON]
    model[0] = replace(silent, progress=replace(silent.progress, heard=1))
    assert look(180.0) is None
    model[0] = replace(silent, settings=training().model.settings)
    assert look(240.0) is None
