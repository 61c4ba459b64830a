"""What is seen of an attempt while it lives: groups and their counters, samples, and the kernel's log; on written files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from memtop.supervisor.monitor.cgroup import KillCount, kill_counts
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.run import witness
from memtop.supervisor.run.kernel_log import kernel_lines
from memtop.supervisor.run.witness import Witness, gpus_without


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with version 2 groups /all and /all/run, and a process 77 in the latter."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "77").mkdir(parents=True)
    (proc / "77" / "cgroup").write_text("0::/all/run\n")
    for path, kills in (("all", 5), ("all/run", 2)):
        (root / path).mkdir(parents=True)
        (root / path / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\n")
    monkeypatch.setattr(witness, "PROC", proc)
    monkeypatch.setattr(witness, "CGROUPS", root)
    return root


def attempt(tmp_path: Path) -> Path:
    folder = tmp_path / "attempt"
    folder.mkdir(exist_ok=True)
    return folder


def test_kills_count_from_the_first_look_and_outlive_the_supervisor(groups: Path, tmp_path: Path) -> None:
    first = Witness(attempt(tmp_path), time.time())
    assert first.kills() is None
    first.look(77)
    assert first.kills() == 0
    (groups / "all/run/memory.events").write_text("oom_kill 3\n")
    assert first.kills() == 1
    assert Witness(attempt(tmp_path), time.time()).kills() == 1


def test_a_group_that_is_gone_is_answered_for_by_the_one_above(groups: Path, tmp_path: Path) -> None:
    seen = Witness(attempt(tmp_path), time.time())
    seen.look(77)
    (groups / "all/run/memory.events").unlink()
    (groups / "all/run").rmdir()
    (groups / "all/memory.events").write_text("oom_kill 7\n")
    assert seen.kills() == 2


def test_version_1_counts_only_where_the_process_was(groups: Path, tmp_path: Path) -> None:
    seen = Witness(attempt(tmp_path), time.time())
    seen.look(77)
    (path,) = seen.baseline.groups
    old = [KillCount(path=count.path, version=1, kills=count.kills) for count in seen.baseline.groups[path]]
    seen.baseline.groups[path] = tuple(old)
    assert seen.kills() is None, "a version 1 group without its file: nothing is known"


def test_a_program_that_moves_counts_where_it_is(groups: Path, tmp_path: Path) -> None:
    seen = Witness(attempt(tmp_path), time.time())
    seen.look(77)
    (groups / "other").mkdir()
    (groups / "other/memory.events").write_text("oom_kill 0\n")
    (tmp_path / "proc/77/cgroup").write_text("0::/other\n")
    seen.look(77)
    (groups / "all/run/memory.events").write_text("oom_kill 9\n")
    assert seen.kills() == 0


def test_the_kernel_s_counters_of_all_groups_above(groups: Path, tmp_path: Path) -> None:
    found = kill_counts(tmp_path / "proc", groups, "0::/all/run\n")
    assert [(Path(count.path).name, count.kills) for count in found] == [("run", 2), ("all", 5)]


def snapshot(at: float, fraction: float, shm: int) -> MachineSnapshot:
    host = HostSample(total_bytes=100, used_fraction=fraction, shm_total_bytes=100, shm_used_bytes=shm)
    rows = (GpuProcess(pid=7, used_bytes=30), GpuProcess(pid=8, used_bytes=5))
    return MachineSnapshot(time=at, host=host, gpus=(GpuSample(index=0, uuid="GPU-0", used_bytes=40, processes=rows),))


def test_the_last_half_minute_is_kept(tmp_path: Path) -> None:
    seen = Witness(attempt(tmp_path), 0.0)
    for at in range(60):
        seen.sample(snapshot(float(at), 0.99 if at == 10 else 0.5, at), (), None)
    assert len(seen.sights) == 31
    assert max(sight.host_fraction or 0 for sight in seen.sights) == 0.5
    assert min(sight.shm_free_bytes or 0 for sight in seen.sights) == 41
    assert seen.baseline.gpu_used_bytes == {"GPU-0": 40}


def test_what_the_run_itself_holds_is_not_the_level_before_it() -> None:
    assert gpus_without(snapshot(1.0, 0.5, 0), {7}) == {"GPU-0": 10}


def test_only_kills_of_the_attempts_time_are_read_from_the_kernel(tmp_path: Path) -> None:
    """One record is read at a time, as /dev/kmsg gives them; here a pipe stands in for it."""
    now, up = time.time(), time.monotonic()
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    keeper = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    stamp = int((up - 5) * 1e6)
    os.write(keeper, f"6,1,{stamp},-;Memory cgroup out of memory: Killed process 7 (python)\n".encode())
    try:
        assert kernel_lines(now - 10, now, now, str(pipe)) == ("Memory cgroup out of memory: Killed process 7 (python)",)
        os.write(keeper, f"6,1,{stamp},-;Memory cgroup out of memory: Killed process 7 (python)\n".encode())
        assert kernel_lines(now - 2, now, now, str(pipe)) == ()
        assert kernel_lines(now - 10, now, now, str(tmp_path / "nothing")) == ()
    finally:
        os.close(keeper)
