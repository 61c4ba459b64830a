"""Which rank a process reports as, in real programs, and that no two living processes write one
journal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forking import run as run_forked
from tests.forking import runs_torch
from tests.train.test_agent import AGENT, TORCH, run
from tests.train.test_processes import environment

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_")


def journals(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """All reports, by the number in the file's name. A successor begins with an empty line."""
    return {
        int(path.stem[len("rank-") :]): [json.loads(line) for line in path.read_text().splitlines() if line]
        for path in sorted(folder.glob("rank-*.jsonl"))
    }


def program(folder: Path, code: str, *start: str, timeout: float = 240, **extra: str) -> dict[int, list[dict[str, Any]]]:
    """Run a program with the agent from a file, as multiprocessing requires; return its
    journals."""
    path = folder / "program.py"
    path.write_text(code)
    env = {name: value for name, value in environment(folder).items() if not name.startswith(LAUNCHERS)} | extra
    started = run_forked if runs_torch(code) else subprocess.run
    done = started([sys.executable, *start, str(path)], env=env, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return journals(folder)


def updates(reports: list[dict[str, Any]]) -> list[int]:
    return [report["update"] for report in reports if report["type"] == "step"]


def hellos(found: dict[int, list[dict[str, Any]]]) -> list[tuple[int, int, int, int | None, int]]:
    """Each greeting's file number, rank, program rank, local rank and number of processes."""
    return [
        (number, report["rank"], report["program_rank"], report["local_rank"], report["world_size"])
        for number, reports in found.items()
        for report in reports
        if report["type"] == "hello"
    ]


TRAIN = """
import torch

def train(updates):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(updates):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""
SPAWN = (
    TRAIN
    + """
import sys
import torch.distributed as dist
import torch.multiprocessing as mp

def rank(number, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=number, world_size=2)
    train(3 + number)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(rank, args=(__file__ + ".store",), nprocs=2, start_method="METHOD")
"""
)


@pytest.mark.parametrize(
    ("method", "launcher"),
    [
        ("fork", {}),
        ("fork", {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}),
        pytest.param("forkserver", {}, marks=pytest.mark.long),
        pytest.param("spawn", {}, marks=pytest.mark.long),
        # Each rank imports torch.
        pytest.param("spawn", {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, marks=pytest.mark.long),
    ],
)
def test_ranks_that_the_program_starts_write_separate_journals(tmp_path: Path, method: str, launcher: dict[str, str]) -> None:
    """Only `init_process_group` knows their ranks: variables have none, or those of another
    launcher."""
    found = program(tmp_path, SPAWN.replace("METHOD", method), **launcher)
    assert {number: updates(reports) for number, reports in found.items()} == {0: [1, 2, 3], 1: [1, 2, 3, 4]}
    # Rank 0 greets before it knows better than the launcher's variables.
    first = 1 if launcher else 2
    assert [row[:3] + row[4:] for row in hellos(found)] == [(0, 0, 0, first), (1, 1, 1, 2)]
    assert len({report["pid"] for reports in found.values() for report in reports if "pid" in report}) == 2


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 0, 1)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (3, 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 0, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, (1, 1, 2)),
        ({"PMIX_RANK": "5"}, (5, None, 6)),
        ({"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NTASKS": "8"}, (6, 2, 8)),
        # One task: its rank 0 does not mean the first of several.
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, (0, 0, 1)),
        # torchrun in a Slurm task, mpirun in a Slurm job: the inner launcher counts.
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (1, 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (3, None, 4)),
        ({"RANK": "rank one", "PMI_RANK": "1"}, (1, None, 2)),
        ({"RANK": "-1"}, (0, 0, 1)),
    ],
)
def test_each_launcher_is_understood(tmp_path: Path, variables: dict[str, str], place: tuple[int, int | None, int]) -> None:
    found = program(tmp_path, "import memtop_agent as a\na.report('warning', message='here')", **variables)
    rank, local, size = place
    assert hellos(found) == [(rank, rank, rank, local, size)]


def test_a_rank_that_the_program_sets_itself_is_used(tmp_path: Path) -> None:
    code = "import os, memtop_agent as a\nos.environ.update(RANK='1', WORLD_SIZE='2')\na.report('warning', message='here')"
    assert hellos(program(tmp_path, code)) == [(1, 1, 1, None, 2)]


def test_a_second_living_process_of_a_rank_takes_a_free_number_and_reports_it(tmp_path: Path) -> None:
    """Two trainings that a script starts at the same time, then one after them."""
    code = (
        TORCH
        + """
import subprocess
def train(updates):
    for _ in range(updates):
        optimizer.step()
if len(sys.argv) == 1:
    train(3)
    memtop_agent.flush()
    for count in (2, 4):
        subprocess.run([sys.executable, __file__, str(count)], check=True)
    train(1)
else:
    train(int(sys.argv[1]))
"""
    )
    found = program(tmp_path, code)
    # The two others ran one after the other.
    assert {number: updates(reports) for number, reports in found.items()} == {0: [1, 2, 3, 4], 1: [1, 2, 1, 2, 3, 4]}
    assert hellos(found) == [(0, 0, 0, 0, 1), (1, 1, 0, 0, 1), (1, 1, 0, 0, 1)]


def test_extra_processes_take_no_number_of_a_rank(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys, memtop_agent as a
a.report("warning", message="here")
if len(sys.argv) == 1:
    a.flush()
    subprocess.run([sys.executable, __file__, "guest"], check=True)
"""
    found = program(tmp_path, code, RANK="0", WORLD_SIZE="4")
    assert hellos(found) == [(0, 0, 0, None, 4), (4, 4, 0, None, 4)]


def test_a_successor_of_a_dead_process_continues_its_journal(tmp_path: Path) -> None:
    """Like torchrun's restart of its ranks; a forked child that outlives its parent holds no
    lock."""
    first = """
import os, sys, time, memtop_agent as a
a.report("warning", message="first")
a.flush()
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("here", flush=True)
os.kill(os.getpid(), 9)
"""
    env = {**environment(tmp_path), "PYTHONPATH": str(AGENT / "site")}
    with subprocess.Popen([sys.executable, "-c", first], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        process.wait()
        run("import memtop_agent as a\na.report('warning', message='second')", tmp_path)
        assert process.stdin is not None
        process.stdin.close()
    assert [report["message"] for report in journals(tmp_path)[0] if "message" in report] == ["first", "second"]


def test_the_workers_of_a_loader_write_nothing(tmp_path: Path) -> None:
    code = """
import torch
from torch.utils.data import DataLoader

def main():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(8.0).unsqueeze(1), batch_size=2, num_workers=WORKERS, multiprocessing_context="METHOD")
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""
    for method, workers in (("fork", "2"), ("spawn", "1")):
        folder = tmp_path / method
        folder.mkdir()
        found = program(folder, code.replace("METHOD", method).replace("WORKERS", workers))
        assert {number: updates(reports) for number, reports in found.items()} == {0: [1, 2, 3, 4]}


def test_a_forked_child_that_trains_reports_if_its_parent_has_not(tmp_path: Path) -> None:
    code = """
import multiprocessing
def child():
    optimizer.step()
    optimizer.step()
process = multiprocessing.get_context("fork").Process(target=child)
process.start(); process.join()
print(process.exitcode)
"""
    assert run(TORCH + code, tmp_path) == "0\n"
    assert [updates(reports) for reports in journals(tmp_path).values()] == [[1, 2]]


def test_a_journal_on_a_file_system_without_locks_is_written(tmp_path: Path) -> None:
    code = """
import errno, fcntl, memtop_agent as a
def refuse(*_): raise OSError(errno.ENOLCK, "no locks available")
fcntl.lockf = refuse
a.report("warning", message="here")
"""
    run(code, tmp_path)
    assert [report["type"] for report in journals(tmp_path)[0]] == ["hello", "warning"]


def test_threads_that_report_first_at_once_greet_once(tmp_path: Path) -> None:
    code = """
import threading, time, memtop_agent as a
find = a.find_rank
def slowly(said):
    time.sleep(0.2)
    return find(said)
a.find_rank = slowly
threads = [threading.Thread(target=a.report, args=("warning",), kwargs={"message": str(number)}) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    run(code, tmp_path)
    (found,) = journals(tmp_path).values()
    assert [report["type"] for report in found] == ["hello", "warning", "warning", "warning", "warning"]
    assert {report["message"] for report in found[1:]} == {"0", "1", "2", "3"}
