"""The identity of processes, whether they are alive, their description, and signals to exactly
them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memtop.supervisor.monitor.processes import proc
from memtop.supervisor.monitor.processes.facts import ProcessDescriber
from memtop.supervisor.monitor.processes.proc import ProcessId, identify, is_alive
from memtop.supervisor.monitor.processes.signals import ProcessGone, SignalRefused, signal_process
from memtop.supervisor.monitor.processes.table import process_tree, run_processes
from tests.monitor.conftest import Start, ended, known


def test_identity_is_pid_and_start(start: Start) -> None:
    one = known(start().pid)
    assert is_alive(one)
    assert not is_alive(ProcessId(one.pid, one.started_ticks + 1))
    assert known(one.pid) == one


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    identity = known(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identify(child.pid) == identity, "still in the process table"
    assert not is_alive(identity)
    child.wait()
    assert identify(child.pid) is None


def test_a_name_with_brackets_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    rest = " ".join(["S", "1", *["0"] * 17, "4242", "0"])
    (tmp_path / "7/stat").write_text(f"7 (a) R (b) {rest}")
    assert identify(7, tmp_path) == ProcessId(7, 4242)


def test_processes_of_a_run(start: Start, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    mine = [start(env={"MEMTOP_RUN": folder, "MEMTOP_ATTEMPT": number}) for number in ("3", "3", "4")]
    start(env={"MEMTOP_RUN": folder + "-other"})
    assert run_processes(folder) == sorted(known(process.pid) for process in mine)
    assert run_processes(folder, 3) == sorted(known(process.pid) for process in mine[:2])
    mine[0].kill()
    mine[0].wait()
    assert run_processes(folder, 3) == [known(mine[1].pid)]


def test_the_tree_below_a_process(start: Start) -> None:
    process = start()
    tree = process_tree(os.getpid())
    assert tree is not None
    assert tree[0].pid == os.getpid()
    child = next(one for one in tree if one.pid == process.pid)
    assert child.parent_pid == os.getpid()
    assert child.command.startswith(sys.executable)
    assert child.rss_bytes > 1024**2
    process.kill()
    process.wait()
    assert process_tree(process.pid) is None


def test_description(start: Start, tmp_path: Path) -> None:
    process = start(env={"MEMTOP_RUN": str(tmp_path), "MEMTOP_RUN_ID": "1f", "MEMTOP_ATTEMPT": "2"})
    facts = ProcessDescriber(same_namespace=lambda: True).describe(process.pid)
    assert facts.identity == known(process.pid)
    assert facts.uid == os.getuid()
    assert facts.user
    assert facts.name
    assert facts.command is not None
    assert facts.command.startswith(f"{sys.executable} -S -E -c")
    assert (facts.run_folder, facts.run_id, facts.attempt, facts.kernel) == (str(tmp_path), "1f", 2, False)
    assert facts.unknown == {}


def test_no_process_has_the_pid(start: Start) -> None:
    facts = ProcessDescriber(same_namespace=lambda: True).describe(ended(start).pid)
    assert facts.identity is None
    assert "ended" in facts.unknown["command"]


@pytest.mark.parametrize(("holds", "described"), [(True, True), (False, False), (None, False)])
def test_in_a_container_only_a_process_that_holds_the_gpu_is_described(
    start: Start, monkeypatch: pytest.MonkeyPatch, holds: bool | None, described: bool
) -> None:
    monkeypatch.delenv(proc.TRUST_VARIABLE, raising=False)
    describer = ProcessDescriber(holds=lambda pid, minors: holds, same_namespace=lambda: False)
    facts = describer.describe(start().pid)
    assert (facts.name is not None) is described
    assert (facts.identity is not None) is described
    assert ("container" in facts.unknown.get("name", "")) is not described


def test_a_process_without_a_gpu_device_does_not_hold_one(start: Start) -> None:
    assert proc.holds_gpu(start().pid) is False


def test_an_open_gpu_device_is_seen(tmp_path: Path) -> None:
    (tmp_path / "7/fd").mkdir(parents=True)
    (tmp_path / "7/fd/3").symlink_to("/dev/nvidia0")
    assert proc.holds_gpu(7, proc_root=tmp_path) is True


@pytest.mark.parametrize(
    ("wanted", "held"), [({1}, True), ({11}, True), ({1, 11}, True), ({0}, False), ({2}, False), ({1, 2}, False)]
)
def test_another_gpu_that_is_open_proves_nothing(tmp_path: Path, wanted: set[int], held: bool) -> None:
    (tmp_path / "7/fd").mkdir(parents=True)
    for number, device in enumerate(("/dev/nvidiactl", "/dev/nvidia1", "/dev/null")):
        (tmp_path / f"7/fd/{number}").symlink_to(device)
    mapped = ("/usr/lib/libcuda.so.550.54", "/dev/nvidia11")
    (tmp_path / "7/maps").write_text("".join(f"7f00-7f01 rw-s 0 00:00 0 {path}\n" for path in mapped))
    assert proc.holds_gpu(7, frozenset(wanted), tmp_path) is held


def test_the_mapped_driver_is_seen(tmp_path: Path) -> None:
    (tmp_path / "7/fd").mkdir(parents=True)
    (tmp_path / "7/maps").write_text("7f00-7f01 r-xp 0 00:00 0 /usr/lib/libcuda.so.550.54\n")
    assert proc.holds_gpu(7, proc_root=tmp_path) is True


def test_without_permission_it_is_unknown(tmp_path: Path) -> None:
    assert proc.holds_gpu(7, proc_root=tmp_path) is None


def test_a_description_is_made_once_per_process(start: Start) -> None:
    checked: list[int] = []

    def holds(pid: int, minors: frozenset[int]) -> bool:
        checked.append(pid)
        return True

    process = start()
    describer = ProcessDescriber(holds=holds, same_namespace=lambda: False)
    assert describer.describe(process.pid) is describer.describe(process.pid)
    assert len(checked) <= 1


def test_a_signal_reaches_the_process(start: Start) -> None:
    process = start()
    signal_process(known(process.pid), signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_a_number_that_was_used_again_is_refused(start: Start) -> None:
    process = start()
    earlier = ProcessId(process.pid, known(process.pid).started_ticks - 1)
    with pytest.raises(SignalRefused, match="was reused"):
        signal_process(earlier, signal.SIGKILL)
    assert process.poll() is None


def test_a_process_that_is_gone(start: Start) -> None:
    with pytest.raises(ProcessGone, match="already ended"):
        signal_process(ended(start), signal.SIGTERM)


def test_the_kernels_refusal_is_reported(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    process = start()
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(SignalRefused, match="the kernel refused SIGTERM: Operation not permitted"):
        signal_process(known(process.pid), signal.SIGTERM)


def test_own_family_reaches_up_to_the_first_process() -> None:
    family = proc.own_family()
    assert {0, 1, os.getpid(), os.getppid()} <= family
