"""The evidence collected while an attempt runs: memory groups and their counters, samples, and the
kernel's log. Reads written files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from memtop.supervisor.monitor.cgroup import KillCount, kill_counts
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.run.post_mortem import evidence as evidence_files
from memtop.supervisor.run.post_mortem.evidence import AttemptEvidence, Baseline, gpus_without, kernel_lines
from memtop.supervisor.run.record.folder import write_json


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with version 2 groups /all and /all/run, and a process 77 in the latter."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "77").mkdir(parents=True)
    (proc / "77" / "cgroup").write_text("0::/all/run\n")
    for path, kills in (("all", 5), ("all/run", 2)):
        (root / path).mkdir(parents=True)
        (root / path / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\n")
    monkeypatch.setattr(evidence_files, "PROC", proc)
    monkeypatch.setattr(evidence_files, "CGROUPS", root)
    return root


def attempt(tmp_path: Path) -> Path:
    folder = tmp_path / "attempt"
    folder.mkdir(exist_ok=True)
    return folder


def test_kills_count_from_the_first_look_and_outlive_the_supervisor(groups: Path, tmp_path: Path) -> None:
    first = AttemptEvidence(attempt(tmp_path), time.time())
    assert first.kills() is None
    first.look(77)
    assert first.kills() == 0
    (groups / "all/run/memory.events").write_text("oom_kill 3\n")
    assert first.kills() == 1
    assert AttemptEvidence(attempt(tmp_path), time.time()).kills() == 1


def test_a_group_that_is_gone_is_answered_for_by_the_one_above(groups: Path, tmp_path: Path) -> None:
    seen = AttemptEvidence(attempt(tmp_path), time.time())
    seen.look(77)
    (groups / "all/run/memory.events").unlink()
    (groups / "all/run").rmdir()
    (groups / "all/memory.events").write_text("oom_kill 7\n")
    assert seen.kills() == 2


def test_version_1_counts_only_where_the_process_was(groups: Path, tmp_path: Path) -> None:
    path, above = str(groups / "run"), str(groups / "all")
    counts = tuple(KillCount(path=each, version=1, kills=2) for each in (path, above))
    write_json(attempt(tmp_path) / "baseline.json", Baseline(started=1.0, groups={path: counts}))
    (groups / "run").mkdir()
    (groups / "run/memory.oom_control").write_text("under_oom 0\noom_kill 3\n")
    (groups / "all/memory.oom_control").write_text("under_oom 0\noom_kill 9\n")
    seen = AttemptEvidence(attempt(tmp_path), time.time())
    assert seen.kills() == 1
    quiet = AttemptEvidence(attempt(tmp_path), time.time())
    (groups / "run/memory.oom_control").unlink()
    assert seen.kills() == 1, "what was seen stays seen"
    assert quiet.kills() is None, "the group above counts only its own: nothing is known"
    assert (seen.killed_near(time.time()), quiet.killed_near(time.time())) == (None, None)


def test_a_program_that_moves_counts_where_it_is(groups: Path, tmp_path: Path) -> None:
    seen = AttemptEvidence(attempt(tmp_path), time.time())
    seen.look(77)
    (groups / "other").mkdir()
    (groups / "other/memory.events").write_text("oom_kill 0\n")
    (tmp_path / "proc/77/cgroup").write_text("0::/other\n")
    seen.look(77)
    (groups / "all/run/memory.events").write_text("oom_kill 9\n")
    assert seen.kills() == 0


def kill_at(seen: AttemptEvidence, groups: Path, at: float, kills: int, path: str = "all/run") -> None:
    (groups / path / "memory.events").write_text(f"oom_kill {kills}\n")
    seen.sample(snapshot(at, 0.5, 0), (), None)


def test_a_kill_is_near_the_end_only_where_its_counter_rose_then(groups: Path, tmp_path: Path) -> None:
    seen, begun = AttemptEvidence(attempt(tmp_path), time.time()), time.time()
    seen.look(77)
    assert seen.killed_near(begun) is False
    kill_at(seen, groups, begun + 1, 3)
    for second in range(2, 5):
        kill_at(seen, groups, begun + second, 3)
    assert seen.killed_near(begun + 5) is True
    assert seen.killed_near(begun + 3600) is False, "an hour ago"
    assert seen.killed_near(begun - 5) is False, "afterwards"
    kill_at(seen, groups, begun + 3599, 4)
    assert seen.killed_near(begun + 3600) is None, "nobody looked for an hour"
    kill_at(seen, groups, begun + 3599.5, 5)
    assert seen.killed_near(begun + 3600) is True
    assert seen.kills() == 3


@pytest.mark.parametrize(("supervisor", "own"), [("/all", True), ("/all/run", False), ("/all/run/below", False), (None, False)])
def test_a_kill_in_a_group_that_the_supervisor_is_in_may_be_of_another_program(
    groups: Path, tmp_path: Path, supervisor: str | None, own: bool
) -> None:
    """The limit was set after the machine's sample was taken, so the sample does not have it."""
    (groups / "all/run/below").mkdir()
    if supervisor is not None:
        (tmp_path / "proc/self").mkdir()
        (tmp_path / "proc/self/cgroup").write_text(f"0::{supervisor}\n")
    seen, begun = AttemptEvidence(attempt(tmp_path), time.time()), time.time()
    seen.look(77)
    (groups / "all/run/memory.max").write_text("90\n")
    (groups / "all/run/memory.current").write_text("80\n")
    (groups / "all/run/memory.stat").write_text("inactive_file 0\n")
    (groups / "all/run/memory.events").write_text("oom_kill 3\n")
    seen.sample(snapshot(begun + 1, 0.5, 0), {77}, 77)
    assert (seen.killed_near(begun + 2), seen.killed_in_own_group(begun + 2)) == (True, own)
    assert (seen.in_own_group, seen.host_limit_bytes) == (own, 90)
    assert not seen.killed_in_own_group(begun + 3600), "an hour ago"


def test_when_a_kill_was_that_an_earlier_supervisor_missed_is_not_known(groups: Path, tmp_path: Path) -> None:
    begun = time.time()
    AttemptEvidence(attempt(tmp_path), begun).look(77)
    (groups / "all/run/memory.events").write_text("oom_kill 3\n")
    later = AttemptEvidence(attempt(tmp_path), begun)
    kill_at(later, groups, begun + 100, 3)
    assert later.killed_near(begun + 101) is None
    assert later.killed_near(begun + 400) is False, "it was before this supervisor came"


def test_earlier_kills_of_other_programs_do_not_explain_a_removed_group(groups: Path, tmp_path: Path) -> None:
    """A scope ends with its program. The group above it has counted kills of other programs,
    too."""
    seen, begun = AttemptEvidence(attempt(tmp_path), time.time()), time.time()
    seen.look(77)
    kill_at(seen, groups, begun + 1, 9, "all")
    (groups / "all/run/memory.events").unlink()
    (groups / "all/run").rmdir()
    assert (seen.kills(), seen.killed_near(begun + 2)) == (0, False)


def test_a_rise_in_one_of_several_groups_is_seen(groups: Path, tmp_path: Path) -> None:
    """Two programs of the run in groups of their own: the older one has counted more."""
    seen, begun = AttemptEvidence(attempt(tmp_path), time.time()), time.time()
    seen.look(77)
    (tmp_path / "proc/78").mkdir()
    (tmp_path / "proc/78/cgroup").write_text("0::/other\n")
    (groups / "other").mkdir()
    (groups / "other/memory.events").write_text("oom_kill 0\n")
    seen.look(78)
    kill_at(seen, groups, begun + 1, 7)
    kill_at(seen, groups, begun + 1000, 7)
    kill_at(seen, groups, begun + 1001, 1, "other")
    assert (seen.kills(), seen.killed_near(begun + 1002)) == (5, True)


def test_the_runs_part_of_each_gpu_is_kept(tmp_path: Path) -> None:
    seen = AttemptEvidence(attempt(tmp_path), 0.0)
    seen.sample(snapshot(1.0, 0.5, 0), (7,), None)
    assert seen.moments[-1].gpu_run_bytes == {"GPU-0": 30}


def test_the_kernel_s_counters_of_all_groups_above(groups: Path, tmp_path: Path) -> None:
    found = kill_counts(tmp_path / "proc", groups, "0::/all/run\n")
    assert [(Path(count.path).name, count.kills) for count in found] == [("run", 2), ("all", 5)]


def snapshot(at: float, fraction: float, shm: int) -> MachineSnapshot:
    host = HostSample(total_bytes=100, used_fraction=fraction, shm_total_bytes=100, shm_used_bytes=shm)
    rows = (GpuProcess(pid=7, used_bytes=30), GpuProcess(pid=8, used_bytes=5))
    return MachineSnapshot(time=at, host=host, gpus=(GpuSample(index=0, uuid="GPU-0", used_bytes=40, processes=rows),))


def test_the_last_half_minute_is_kept(tmp_path: Path) -> None:
    seen = AttemptEvidence(attempt(tmp_path), 0.0)
    for at in range(60):
        seen.sample(snapshot(float(at), 0.99 if at == 10 else 0.5, at), (), None)
    assert len(seen.moments) == 31
    assert max(sight.host_fraction or 0 for sight in seen.moments) == 0.5
    assert min(sight.shm_free_bytes or 0 for sight in seen.moments) == 41
    assert seen.baseline.gpu_used_bytes == {"GPU-0": 40}


def test_the_runs_memory_is_not_the_level_before_it() -> None:
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
