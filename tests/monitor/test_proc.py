"""Reading /proc: rows, environments, what is hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtop.supervisor.monitor.processes import proc
from memtop.supervisor.monitor.processes.proc import (
    ProcessId,
    ProcessStat,
    environment_of,
    full_name,
    hidepid,
    read_stat,
)
from memtop.supervisor.monitor.processes.table import CpuMeter, ProcessTable, resident_bytes
from tests.monitor.conftest import Start, Tree, known

MOUNTS = "22 1 0:20 / /proc rw,relatime shared:5 - proc proc rw"


def row(pid: int, parent: int, *, session: int = 0, ticks: int = 0, cpu: int = 0) -> ProcessStat:
    return ProcessStat(ProcessId(pid, ticks or pid), "x", False, parent, session, 1, cpu, 0, 0, 0)


def test_a_row_has_the_kernels_values(start: Start) -> None:
    process = start()
    found = read_stat(process.pid)
    assert found is not None
    assert (found.identity, found.parent_pid) == (known(process.pid), os.getpid())
    assert (found.session, found.threads, found.is_dead) == (os.getsid(process.pid), 1, False)
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert f"\nName:\t{found.comm}\n" in "\n" + status
    (resident,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert abs(found.rss_bytes - resident * 1024) < 2 * 1024**2, "two ways of counting, one process"


def test_the_environment_of_a_process(start: Start) -> None:
    process = start(env={"A": "1", "B": "x=y"})
    assert environment_of(known(process.pid)) == {"A": "1", "B": "x=y"}
    assert environment_of(ProcessId(process.pid, 1)) == f"process {process.pid} has ended"
    identity = known(process.pid)
    process.kill()
    process.wait()
    assert environment_of(identity) == f"process {process.pid} has ended"


def test_an_environment_whose_owner_changes_while_it_is_read_is_not_shown(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(env={"SECRET": "1"})
    identity = known(process.pid)
    answers = iter([identity, ProcessId(process.pid, identity.started_ticks + 7)])
    monkeypatch.setattr(proc, "identify", lambda pid, root: next(answers))
    assert environment_of(identity) == f"process {process.pid} has ended"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can look as another user")
def test_the_environment_of_another_users_process_is_not_shown() -> None:
    """Reads as the user `nobody`, in a subprocess: a process cannot change its user back."""
    program = (
        "import os, sys; from memtop.supervisor.monitor.processes.proc import environment_of, identify; os.setuid(65534);"
        f"print(environment_of(identify({os.getpid()})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (
        done.stdout
        == f"the environment of process {os.getpid()} belongs to another user: only that user and root may read it\n"
    )


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ("rw", None),
        ("rw,hidepid=0", None),
        ("rw,hidepid=off", None),
        ("rw,hidepid=2", "2"),
        ("rw,gid=4,hidepid=invisible", "invisible"),
    ],
)
def test_hidepid(tree: Tree, tmp_path: Path, options: str, mode: str | None) -> None:
    text = MOUNTS.replace("/proc rw,", f"{tmp_path} rw,").removesuffix("rw") + options
    assert hidepid(tree({"self/mountinfo": text + "\n23 1 0:20 / /other rw - proc proc rw,hidepid=1\n"})) == mode


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount /proc")
def test_a_real_proc_that_hides(start: Start, tmp_path: Path) -> None:
    """In a separate mount namespace, the user `nobody` does not see all processes."""
    program = (
        "import ctypes, os, subprocess, sys\n"
        "from memtop.supervisor.monitor.processes.proc import hidepid, in_host_pid_namespace, read_stat, sees_all_pids\n"
        "assert ctypes.CDLL(None).unshare(0x20000) == 0\n"
        "subprocess.run(['mount', '--make-rprivate', '/'], check=True)\n"
        "subprocess.run(['mount', '-t', 'proc', '-o', 'hidepid=2', 'proc', '/proc'], check=True)\n"
        "seen = sees_all_pids(); os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(hidepid(), read_stat(1), seen == in_host_pid_namespace(), sees_all_pids())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if "mount:" in done.stderr:
        pytest.skip(f"/proc cannot be mounted here: {done.stderr.strip()}")
    assert done.stdout.split() in (["2", "None", "True", "False"], ["invisible", "None", "True", "False"]), done.stderr


def test_names_longer_than_the_kernel_keeps() -> None:
    assert full_name("nvidia-cuda-mps", ("/usr/bin/nvidia-cuda-mps-server",)) == "nvidia-cuda-mps-server"
    assert full_name("python", ("/usr/bin/python-other",)) == "python"
    assert full_name("exactly-15-long", ()) == "exactly-15-long"


def test_the_table_finds_new_processes_and_drops_ended_ones(start: Start) -> None:
    table = ProcessTable()
    first = start()
    assert first.pid in table.look(())
    second = start()
    first.kill()
    first.wait()
    rows = table.look(())
    assert second.pid in rows
    assert first.pid not in rows
    assert os.getpid() in table.again([second.pid])


def test_the_meter_needs_two_looks_and_the_same_process() -> None:
    meter, hertz = CpuMeter(), proc.TICKS_PER_SECOND
    assert meter.update([row(7, 1)], 10.0) == {}
    assert meter.update([row(7, 1, cpu=3 * hertz)], 12.0) == {ProcessId(7, 7): 1.5}
    assert meter.update([row(7, 1, ticks=9, cpu=9 * hertz)], 14.0) == {}, "another process under the number"


def test_resident_bytes_count_what_is_shared_once(tree: Tree) -> None:
    root = tree({"7/statm": "900 500 200 0 0 0 0", "8/statm": "900 300 250 0 0 0 0"})
    assert resident_bytes([7, 8, 9], root) == (300 + 50 + 250) * proc.PAGE_BYTES
    assert resident_bytes([9], root) is None
