"""`memtop strays`: what it prints and returns, with real processes on a scripted driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtop.cli import run, strays
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.proc import sees_all_pids
from tests.nvml_double.double import Script, driver, nvml_library

__all__ = ["driver", "nvml_library"]

GIB = 1024**3


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the scripted pids as pids of this machine."""
    monkeypatch.setenv("MEMTOP_NVML_TRUST_PIDS", "1")


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "120"], env={"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "sft"})
    yield process
    process.kill()
    process.wait()


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def run_folder(runs: Path) -> str:
    """A run that is over."""
    folder = runs / "old"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps({"name": "old", "created": 0.0, "settings": None, "command": ["x"], "cwd": "/", "memtop_version": "0"})
    )
    state = {"name": "old", "folder": str(folder), "state": "finished", "created": 0.0, "attempt": 1, "settings": None}
    (folder / "state.json").write_text(json.dumps({"run": state, "socket": ""}))
    return str(folder)


def test_a_line_has_gpu_age_and_reason(
    driver: Script, program: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.gpu(0, total=24 * GIB, used=9 * GIB).process(0, pid=program.pid, used=2 * GIB).write()
    assert strays.list_or_end(tmp_path, as_json=False, kill=[]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    words = line.split()
    assert words[:4] == ["yours", "GPU", "0", str(program.pid)]
    assert words[5:7] == ["2.0", "GiB"]
    assert words[7].count(":") == 2, "its age"
    assert "[slurm job 7 (sft)]  sleep 120  (your own process, not started by a memtop run)" in line


def test_strays_come_first_and_the_command_to_end_them_is_printed(
    driver: Script, tmp_path: Path, program: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path)
    with subprocess.Popen(["sleep", "120"], env={"MEMTOP_RUN": folder, "MEMTOP_ATTEMPT": "1"}) as stray:
        driver.gpu(0, total=24 * GIB, used=9 * GIB).process(0, pid=program.pid, used=2 * GIB)
        driver.process(0, pid=stray.pid, used=3 * GIB).write()
        strays.list_or_end(tmp_path, as_json=False, kill=[])
        lines = capsys.readouterr().out.splitlines()
        strays.list_or_end(tmp_path, as_json=True, kill=[])
        rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        stray.kill()
    assert lines[0].startswith("stray")
    assert lines[-1] == f"3.0 GiB held by strays: memtop strays --kill {stray.pid}"
    assert [(row["pid"], row["stray"]) for row in rows] == [(stray.pid, True), (program.pid, False)]
    assert rows[0]["job"] == "run old attempt 1"
    assert rows[1]["container"] == "slurm job 7 (sft)"
    assert all(row["age_seconds"] >= 0 for row in rows)


@pytest.mark.skipif(
    not sees_all_pids(), reason="only where all of the machine's processes are to be seen can one be called gone"
)
def test_memory_under_an_ended_process(driver: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = ended_pid()
    driver.gpu(0, total=24 * GIB, used=9 * GIB).process(0, pid=pid, used=2 * GIB).write()
    strays.list_or_end(tmp_path, as_json=False, kill=[])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gone")
    assert f"the driver still lists 2.0 GiB under pid {pid}, which has ended" in line


def test_ending_a_process_reports_who_still_holds_memory(
    driver: Script, tmp_path: Path, program: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """The memory of the program is not freed: the driver still lists it."""
    driver.gpu(0, total=24 * GIB, used=9 * GIB).process(0, pid=program.pid, used=2 * GIB).write()
    assert strays.list_or_end(tmp_path, as_json=False, kill=[program.pid]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == [str(program.pid), "ended", *f"process {program.pid} ended on SIGINT".split()]
    assert second.startswith(f"1 process ended, 0 B returned; GPU 0: 2.0 GiB still held by pid {program.pid}, which has ended")


def test_ending_a_process_as_json(driver: Script, nvml_library: Path, tmp_path: Path, program: subprocess.Popen[bytes]) -> None:
    driver.gpu(0, total=24 * GIB, used=9 * GIB).process(0, pid=program.pid, used=2 * GIB).write()
    done = subprocess.run(
        [sys.executable, "-m", "memtop", "strays", "--json", "--kill", str(program.pid), "--runs-dir", str(tmp_path)],
        env=os.environ | driver.env(nvml_library),
        capture_output=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert (report["processes"][0]["outcome"], report["returned_bytes"]) == ("ended", 0)
    assert report["holders"][0] | {"gpu_index": 0, "used_bytes": 2 * GIB, "ended": True} == report["holders"][0]
    assert report["text"].startswith("1 process ended, 0 B returned")


def test_memtop_itself_is_refused(driver: Script, tmp_path: Path) -> None:
    driver.gpu(0, total=24 * GIB).process(0, pid=os.getpid(), used=GIB).write()
    with pytest.raises(RefusedError, match=f"--kill {os.getpid()}: you cannot end it: memtop itself"):
        strays.list_or_end(tmp_path, as_json=False, kill=[os.getpid()])


@pytest.mark.parametrize("as_json", [False, True])
def test_a_list_that_the_driver_refuses_is_not_reported_as_empty(
    as_json: bool, driver: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.gpu(0, total=24 * GIB, used=9 * GIB).fail("nvmlDeviceGetComputeRunningProcesses_v3", 0, 4).write()
    assert strays.list_or_end(tmp_path, as_json=as_json, kill=[]) == 1
    said = capsys.readouterr()
    assert said.out == ("[]\n" if as_json else "")
    assert said.err.startswith("GPU 0: not all of its processes are known: no permission")


def test_the_process_list_of_one_gpu_is_enough(
    driver: Script, tmp_path: Path, program: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    driver.gpu(0, total=24 * GIB, error=15).gpu(1, total=24 * GIB).process(1, pid=program.pid, used=2 * GIB).write()
    assert strays.list_or_end(tmp_path, as_json=False, kill=[]) == 0
    said = capsys.readouterr()
    assert str(program.pid) in said.out
    assert said.err.startswith("GPU 0: its processes are not known: the GPU is lost")
    with pytest.raises(RefusedError, match=r"no GPU lists this process \(GPU 0: its processes are not known"):
        strays.list_or_end(tmp_path, as_json=False, kill=[os.getpid()])


def test_a_mismatched_driver_library_is_not_reported_as_an_empty_list(
    driver: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.init_error(18).write()
    assert strays.list_or_end(tmp_path, as_json=True, kill=[]) == 1
    assert "different versions" in capsys.readouterr().err
    driver.clear().init_error(9).write()
    assert strays.list_or_end(tmp_path, as_json=True, kill=[]) == 0, "without a driver nobody computes"


def test_the_row_that_forbids_ending_gives_the_reason(
    driver: Script, tmp_path: Path, program: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    driver.gpu(0, total=24 * GIB).gpu(1, total=24 * GIB).process(0, pid=program.pid, used=2 * GIB)
    driver.process(1, pid=program.pid, used=GIB, kind="graphics").write()
    with pytest.raises(RefusedError, match=f"--kill {program.pid}: you cannot end it: draws on the screen"):
        strays.list_or_end(tmp_path, as_json=False, kill=[program.pid])
    assert program.poll() is None
    strays.list_or_end(tmp_path, as_json=True, kill=[])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["choosable"], "draws on the screen" in row["reason"]) for row in rows] == [(False, True)] * 2


def test_once_names_the_gpus_whose_process_list_may_be_incomplete(
    driver: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.gpu(0, total=24 * GIB, used=9 * GIB).fail("nvmlDeviceGetComputeRunningProcesses_v3", 0, 999).write()
    assert run(["watch", "--once", "--read-only", "--runs-dir", str(tmp_path)]) == 0
    assert "  not all of its processes are known: unknown error in the driver" in capsys.readouterr().out
