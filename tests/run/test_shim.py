"""The shim between supervisor and program: how the program ended, and its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtop.supervisor.run.processes import environment, shim
from memtop.supervisor.run.processes.attempt import RunningAttempt
from memtop.supervisor.run.record.folder import RunFolder


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
    found = environment.allocator_environment(wanted, inherited)
    assert found == ({} if expected is None else dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), expected))


@pytest.mark.parametrize(
    ("processes", "inherited", "threads"),
    [
        (1, {}, 6),
        (2, {}, 3),
        (4, {}, 1),
        (8, {}, 1),
        (2, {"OMP_NUM_THREADS": "7"}, None),
        (2, {"MKL_NUM_THREADS": "7"}, None),
    ],
)
def test_training_processes_share_the_cores_unless_the_user_has_chosen(
    processes: int, inherited: dict[str, str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 6)
    wanted = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    assert environment.threads_environment(processes, inherited) == wanted


@pytest.mark.parametrize(("quota", "cores"), [(8.0, 3), (2.0, 2), (1.5, 2), (0.5, 1)])
def test_cores_are_those_of_the_affinity_that_the_cgroup_allows(
    quota: float, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CPUs 1 and 5 are two threads of one core; nothing is known of CPU 9.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 5, 9})
    for number, siblings in {1: "1,5", 2: "2,6", 5: "1,5"}.items():
        (tmp_path / f"cpu{number}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    assert environment.usable_cores(tmp_path, quota) == cores


def test_the_cores_of_this_machine() -> None:
    assert 1 <= environment.usable_cores() <= len(os.sched_getaffinity(0))


ASKS = """
import signal, time
def ask(number, frame):
    raise SystemExit(7 if input("save? ") == "y" else 3)
signal.signal(signal.SIGINT, ask)
signal.raise_signal(signal.SIGINT)
"""


def test_a_program_that_asks_reads_its_answers_from_a_pipe(tmp_path: Path) -> None:
    command = {"argv": [sys.executable, "-c", ASKS], "cwd": str(tmp_path), "environment": {}, "answers": True}
    (tmp_path / "command.json").write_text(json.dumps(command))
    with subprocess.Popen([sys.executable, "-I", "-S", shim.__file__, str(tmp_path)]) as process:
        path = tmp_path / "process.json"
        while not path.exists():
            assert process.poll() is None
        attempt = RunningAttempt(RunFolder(tmp_path), 1, None)
        attempt.folder = tmp_path
        attempt.type_answer("y")
        process.wait(timeout=120)
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == 7
    assert "save?" in (tmp_path / "output.log").read_text()
    attempt.type_answer("y")  # it has ended: nothing is written, and nothing waits


def test_a_program_without_questions_has_no_input(tmp_path: Path) -> None:
    command = {"argv": [sys.executable, "-c", "input()"], "cwd": str(tmp_path), "environment": {}}
    (tmp_path / "command.json").write_text(json.dumps(command))
    subprocess.run([sys.executable, "-I", "-S", shim.__file__, str(tmp_path)], check=False, timeout=120)
    assert "EOFError" in (tmp_path / "output.log").read_text()
    assert not (tmp_path / "answers").exists()
