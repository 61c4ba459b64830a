"""The whole sample and its JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memtop.supervisor.monitor.host import HostReader
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.processes import facts, proc
from memtop.supervisor.monitor.processes.facts import ProcessDescriber
from memtop.supervisor.monitor.processes.proc import read_stat
from memtop.supervisor.monitor.sampler import Sampler, snapshot_json
from memtop.supervisor.monitor.strays import KnownRun
from memtop.supervisor.monitor.values import Band, MachineSnapshot, only_gpus
from memtop.supervisor.monitor.vram import vram_parts
from tests.monitor.conftest import GIB, Clock, Start, ended, eventually
from tests.nvml_double.double import Script

GPU_KEYS = {
    *("index", "uuid", "name", "total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "used_fraction", "band"),
    *("utilization_fraction", "temperature_celsius", "power_watts", "power_limit_watts", "error", "processes"),
}
PROCESS_KEYS = {"pid", "user", "name", "command", "used_bytes", "kind", "run", "stray", "reason"}
HOST_KEYS = {
    *("total_bytes", "used_bytes", "available_bytes", "used_fraction", "band", "limit_bytes", "swap_total_bytes"),
    *("swap_used_bytes", "swap_fraction", "swap_band", "swap_in_bytes_per_second", "swap_out_bytes_per_second"),
    "pressure_fraction",
}


def sampler(reader: NvmlReader, runs: Sequence[KnownRun] = (), **options: Any) -> Sampler:
    return Sampler(lambda: runs, nvml=reader, describer=ProcessDescriber(same_namespace=lambda: True), **options)


def test_the_document_has_the_public_fields(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB, used=GIB // 2).process(0, pid=os.getpid(), used=GIB // 2).write()
    document = json.loads(json.dumps(snapshot_json(sampler(reader).sample())))
    assert set(document) >= {"time", "gpus", "host"}
    assert set(document["gpus"][0]) >= GPU_KEYS
    assert set(document["gpus"][0]["processes"][0]) >= PROCESS_KEYS
    assert set(document["host"]) >= HOST_KEYS
    assert document["gpus"][0]["band"] == "safe"


def test_every_value_of_a_process_that_is_none_has_its_reason(driver: Script, reader: NvmlReader, start: Start) -> None:
    driver.gpu(0, total=GIB).process(0, pid=ended(start).pid, used=None).process(0, pid=start().pid, used=5).write()
    snapshot = sampler(reader).sample()
    # A process outside all runs has no run. A process outside a container has no container, and
    # without MIG it has no MIG instance. Other tests check the values of the driver.
    plain = {"run", "container", "mig_instance", "job", "role"}
    driver_says = {"sm_fraction", "memory_bandwidth_fraction", "encoder_fraction", "decoder_fraction"}
    values: list[Any] = [*snapshot.gpus[0].processes, *snapshot.jobs]
    assert len(values) == 3
    for value in values:
        missing = {field for field in value.__struct_fields__ if getattr(value, field) is None} - plain - driver_says
        assert missing <= set(value.unknown), missing - set(value.unknown)


def test_a_process_is_choosable_on_all_of_its_gpus_or_on_none(driver: Script, reader: NvmlReader, start: Start) -> None:
    """Also in a view of only one of the GPUs."""
    process = start()
    driver.gpu(0, total=GIB).gpu(1, total=GIB).process(0, pid=process.pid, used=9)
    driver.process(1, pid=process.pid, used=8, kind="graphics").write()
    (row,) = only_gpus(sampler(reader).sample(), [0]).gpus[0].processes
    assert not row.choosable
    assert row.reason is not None
    assert "draws on the screen" in row.reason


def test_a_stray_in_the_list(driver: Script, reader: NvmlReader, start: Start) -> None:
    stray, own = start(env={"MEMTOP_RUN": "/runs/over"}), start()
    driver.gpu(0, total=GIB).process(0, pid=stray.pid, used=9).process(0, pid=own.pid, used=8).write()
    runs = [KnownRun(name="over", folder="/runs/over", alive=False, attempt=1)]
    first, second = sampler(reader, runs).sample().gpus[0].processes
    assert (first.pid, first.run, first.stray, first.choosable) == (stray.pid, "over", True, True)
    assert (second.pid, second.run, second.stray, second.choosable) == (own.pid, None, False, True)
    assert first.started is not None
    assert first.started_ticks is not None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_another_users_process_is_shown_and_not_choosable(driver: Script, reader: NvmlReader, start: Start) -> None:
    other = start(user=65534, env={"MEMTOP_RUN": "/runs/over"})
    driver.gpu(0, total=GIB).process(0, pid=other.pid, used=9).write()
    (row,) = sampler(reader).sample().gpus[0].processes
    assert row.user is not None
    assert row.user != "root"
    assert row.name
    assert not row.choosable


def test_runs_are_read_only_when_a_process_may_belong_to_one(driver: Script, reader: NvmlReader) -> None:
    def ask() -> Sequence[KnownRun]:
        raise AssertionError("no process is this user's")

    driver.gpu(0, total=GIB).process(0, pid=os.getpid(), used=9).write()
    describer = ProcessDescriber(same_namespace=lambda: True)
    Sampler(ask, nvml=reader, describer=describer, own_uid=os.getuid() + 1).sample()


def test_runs_are_read_no_more_often_than_the_process_lists(
    driver: Script, reader: NvmlReader, clock: Clock, start: Start
) -> None:
    process = start(env={"MEMTOP_RUN": "/runs/r"})
    driver.gpu(0, total=GIB).process(0, pid=process.pid, used=9).write()
    read_at: list[float] = []

    def ask() -> Sequence[KnownRun]:
        read_at.append(clock())
        return ()

    watcher = Sampler(ask, nvml=reader, describer=ProcessDescriber(same_namespace=lambda: True))
    for _ in range(4):
        assert watcher.sample().gpus[0].processes[0].run == "r"
        clock.pass_(1.0)
    assert len(read_at) == 2


def test_verdicts_follow_the_runs(driver: Script, reader: NvmlReader, clock: Clock, start: Start) -> None:
    process = start(env={"MEMTOP_RUN": "/runs/r", "MEMTOP_ATTEMPT": "1"})
    driver.gpu(0, total=GIB).process(0, pid=process.pid, used=9).write()
    alive = True
    watcher = Sampler(
        lambda: [KnownRun(name="r", folder="/runs/r", alive=alive, attempt=1)],
        nvml=reader,
        describer=ProcessDescriber(same_namespace=lambda: True),
    )
    assert not watcher.sample().gpus[0].processes[0].stray
    alive = False
    clock.pass_(2.0)
    assert watcher.sample().gpus[0].processes[0].stray


def test_the_bands_of_the_host(reader: NvmlReader, tmp_path: Path) -> None:
    meminfo = "MemTotal: 1000 kB\nMemAvailable: 120 kB\nSwapTotal: 100 kB\nSwapFree: 5 kB\n"
    (tmp_path / "meminfo").write_text(meminfo)
    host = HostReader(proc_root=tmp_path, cgroup_root=tmp_path / "cgroup")
    found = Sampler(nvml=reader, host=host).sample().host
    assert (found.band, found.swap_band) == (Band.EDGE, Band.DANGER)


def test_bands_have_hysteresis_per_gauge(driver: Script, reader: NvmlReader) -> None:
    watcher = sampler(reader)
    seen = []
    for used in (840, 852, 848, 852, 852, 852, 870):
        driver.clear().gpu(0, total=1000, used=used).gpu(1, total=1000, used=950).write()
        seen.append([gpu.band for gpu in watcher.sample().gpus])
    assert [bands[0] for bands in seen] == [Band.SAFE] * 5 + [Band.EDGE] * 2
    assert {bands[1] for bands in seen} == {Band.DANGER}


def test_a_process_is_described_once_however_often_it_is_sampled(
    driver: Script, reader: NvmlReader, clock: Clock, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight processes on each of eight GPUs over a minute: describing them is what would cost."""
    pids = [start().pid for _ in range(8)]
    for index in range(8):
        driver.gpu(index, total=24 * GIB, used=index * GIB)
        for pid in pids:
            driver.process(index, pid=pid, used=GIB)
    driver.write()
    described: list[int] = []
    describe = facts.describe_process

    def counted(identity: proc.ProcessId, proc_root: Path) -> facts.ProcessFacts:
        described.append(identity.pid)
        return describe(identity, proc_root)

    monkeypatch.setattr(facts, "describe_process", counted)
    watcher = sampler(reader)
    for _ in range(60):
        assert all(len(gpu.processes) == 8 for gpu in watcher.sample().gpus)
        clock.pass_(1.0)
    assert sorted(described) == sorted(pids)


def test_neither_torch_nor_textual_is_loaded() -> None:
    program = (
        "import sys; from memtop.supervisor.monitor import sampler; sampler.Sampler().sample();"
        "print(sorted({'torch', 'textual', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_memory_under_an_ended_process_is_called_gone_at_the_second_look(
    driver: Script, reader: NvmlReader, clock: Clock, start: Start
) -> None:
    process = ended(start)
    driver.gpu(0, total=GIB, used=GIB // 2).process(0, pid=process.pid, used=GIB // 2).write()
    describer = ProcessDescriber(same_namespace=lambda: True, sees_all=lambda: True)
    watcher = Sampler(nvml=reader, describer=describer, monotonic=clock)
    (first,) = watcher.sample().gpus[0].processes
    assert (first.gone, first.reason) == (False, f"process {process.pid} has just ended")
    clock.pass_(2.0)
    (second,) = watcher.sample().gpus[0].processes
    assert (second.gone, second.choosable, second.stray) == (True, False, False)
    assert second.reason is not None
    assert (
        f"still lists 512 MiB under pid {process.pid}, which has ended: end the processes that share its GPU context"
        in second.reason
    )


@pytest.mark.parametrize(("same_namespace", "sees_all"), [(True, False), (False, False), (False, True)])
def test_no_process_is_called_gone_unless_all_are_visible(
    driver: Script,
    reader: NvmlReader,
    clock: Clock,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    same_namespace: bool,
    sees_all: bool,
) -> None:
    monkeypatch.delenv(proc.TRUST_VARIABLE, raising=False)
    process = ended(start)
    driver.gpu(0, total=GIB).process(0, pid=process.pid, used=9).write()
    describer = ProcessDescriber(same_namespace=lambda: same_namespace, sees_all=lambda: sees_all)
    watcher = Sampler(nvml=reader, describer=describer, monotonic=clock)
    for _ in range(3):
        (row,) = watcher.sample().gpus[0].processes
        assert (row.gone, row.name, row.job) == (False, None, None)
        clock.pass_(2.0)


def test_a_zombie_is_gone_and_named_with_the_parent_that_must_collect_it(
    driver: Script, reader: NvmlReader, clock: Clock
) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    driver.gpu(0, total=GIB, used=GIB // 2).process(0, pid=child.pid, used=GIB // 4).write()
    watcher = sampler(reader, monotonic=clock)
    for gone in (False, True, True):
        gpu = watcher.sample().gpus[0]
        (row,) = gpu.processes
        assert (row.gone, row.choosable, row.parent_pid, row.job) == (gone, False, os.getpid(), None)
        assert row.name
        assert f"process {child.pid} has ended (zombie), but its parent {os.getpid()} (" in (row.reason or "")
        clock.pass_(2.0)
    parts = vram_parts(gpu)
    child.wait()
    assert (parts.gone_bytes, parts.jobs) == (GIB // 4, ())


def test_the_gpus_on_which_a_pid_is_listed_decide_who_it_is(
    driver: Script, reader: NvmlReader, clock: Clock, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(proc.TRUST_VARIABLE, raising=False)
    mine, other = start().pid, start().pid
    held = {mine: frozenset({3, 5}), other: frozenset({5})}
    driver.gpu(0, total=GIB, device_minor=5).gpu(1, total=GIB, device_minor=3).gpu(2, total=GIB)
    driver.fail("nvmlDeviceGetMinorNumber", 2, 3).process(0, pid=mine, used=9).process(1, pid=mine, used=9)
    driver.process(1, pid=other, used=9).process(2, pid=other, used=9).write()
    describer = ProcessDescriber(holds=lambda pid, minors: minors <= held[pid], same_namespace=lambda: False)
    watcher = Sampler(nvml=reader, describer=describer, monotonic=clock)
    named = {(gpu.index, row.pid): row.name is not None for gpu in watcher.sample().gpus for row in gpu.processes}
    assert named == {(0, mine): True, (1, mine): True, (1, other): False, (2, other): False}


def test_host_memory_and_cpu(driver: Script, reader: NvmlReader, clock: Clock, start: Start) -> None:
    busy, idle = (
        start("import threading; threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()"),
        start(),
    )
    driver.gpu(0, total=GIB).process(0, pid=busy.pid, used=9).process(0, pid=idle.pid, used=8).write()
    watcher = sampler(reader, monotonic=clock)
    for row in watcher.sample().gpus[0].processes:
        assert row.host_cpu_fraction is None
        assert "two samples" in row.unknown["host_cpu_fraction"]
        assert row.host_rss_bytes is not None
        assert row.host_rss_bytes > 1024**2
        assert row.parent_pid == os.getpid()
    # The clock is manual, but the work is real: wait for it, then advance the clock by two seconds.
    before = cpu_ticks(busy.pid)
    eventually(lambda: cpu_ticks(busy.pid), lambda now: now >= before + 20)
    clock.pass_(2.0)
    first, second = watcher.sample().gpus[0].processes
    assert first.host_cpu_fraction is not None
    assert first.host_cpu_fraction >= 0.1
    assert second.host_cpu_fraction == 0.0
    assert "host_cpu_fraction" not in second.unknown


def cpu_ticks(pid: int) -> int:
    row = read_stat(pid)
    assert row is not None
    return row.cpu_ticks


def test_the_same_rows_until_the_lists_are_read_again(driver: Script, reader: NvmlReader, clock: Clock, start: Start) -> None:
    driver.gpu(0, total=GIB).process(0, pid=start().pid, used=9).write()
    watcher = sampler(reader, monotonic=clock)
    first = watcher.sample()
    clock.pass_(1.0)
    second = watcher.sample()
    assert second.gpus[0].processes is first.gpus[0].processes
    assert second.jobs is first.jobs
    clock.pass_(1.0)
    assert watcher.sample().gpus[0].processes is not first.gpus[0].processes


FORKS = """
import ctypes
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
    while True: time.sleep(60)
"""


def test_jobs_of_real_processes(driver: Script, reader: NvmlReader, start: Start) -> None:
    """Two programs, one of a run and with a worker that it forked; the other on two GPUs."""
    run, plain = start(FORKS, env={"MEMTOP_RUN": "/runs/r", "MEMTOP_ATTEMPT": "1", "RANK": "3"}), start()
    driver.gpu(0, total=24 * GIB).gpu(1, total=24 * GIB).process(0, pid=run.pid, used=GIB)
    driver.process(0, pid=plain.pid, used=2 * GIB).process(1, pid=plain.pid, used=3 * GIB).write()
    snapshot = sampler(reader, [KnownRun(name="r", folder="/runs/r", alive=True, attempt=1)]).sample()
    worker = int(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text())
    first, second = snapshot.jobs
    assert (first.key, first.used_bytes, first.gpu_indices) == (f"pid {plain.pid}@{ticks(plain.pid)}", 5 * GIB, (0, 1))
    assert (second.key, second.name, second.run, second.leader_pid) == ("run r", "r", "r", run.pid)
    assert (second.pids, second.roles) == ((run.pid, worker), {"rank": 1, "loader worker": 1})
    rows = [row for gpu in snapshot.gpus for row in gpu.processes]
    assert {(row.pid, row.job, row.role) for row in rows} == {
        (run.pid, "run r", "rank 3"),
        (plain.pid, first.key, "process"),
    }
    alone, both = read_stat(run.pid), second.host_rss_bytes
    assert alone is not None
    assert both is not None
    assert both < 2 * alone.rss_bytes, "what the fork shares is counted once"


def ticks(pid: int) -> int:
    found = proc.started_ticks(pid)
    assert found is not None
    return found


def test_a_program_that_becomes_another_is_described_anew(
    driver: Script, reader: NvmlReader, clock: Clock, start: Start
) -> None:
    """The same pid and start time, another program and environment: exec."""
    code = "print('ready', flush=True); import time; time.sleep(60)"
    become = f"os.execve(sys.executable, [sys.executable, '-S', '-E', '-c', {code!r}], {{'MEMTOP_RUN': '/runs/r'}})"
    process = start(f"signal.signal(signal.SIGUSR1, lambda *_: {become})")
    driver.gpu(0, total=GIB).process(0, pid=process.pid, used=9).write()
    watcher = sampler(reader, monotonic=clock)
    assert watcher.sample().gpus[0].processes[0].run is None
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    clock.pass_(2.0)
    row = watcher.sample().gpus[0].processes[0]
    assert row.run == "r"
    assert (row.command or "").endswith(code)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a mount namespace")
def test_the_marker_of_a_containers_run_is_no_proof(driver: Script, reader: NvmlReader, start: Start, tmp_path: Path) -> None:
    """A path of that name exists here and there, and means two folders."""
    folder = tmp_path / "run"
    folder.mkdir()
    inside = (
        "import ctypes, subprocess\n"
        "assert ctypes.CDLL(None).unshare(0x20000) == 0\n"
        "subprocess.run(['/bin/mount', '--make-rprivate', '/'], check=True)\n"
        f"subprocess.run(['/bin/mount', '-t', 'tmpfs', 'x', {str(folder)!r}], check=True)"
    )
    process = start(inside, env={"MEMTOP_RUN": str(folder), "MEMTOP_ATTEMPT": "1"})
    driver.gpu(0, total=GIB).process(0, pid=process.pid, used=9).write()
    runs = [KnownRun(name="run", folder=str(folder), alive=False, attempt=1)]
    (row,) = sampler(reader, runs).sample().gpus[0].processes
    assert (row.run, row.stray) == ("run", False)
    assert "of its container" in (row.reason or "")


def test_bytes_that_are_not_utf_8_can_be_sent_and_shown(driver: Script, reader: NvmlReader, tmp_path: Path) -> None:
    """File names of old locales, in the command line and in the variables that are shown."""
    command: list[str | bytes] = [sys.executable, "-S", "-E", "-c", "import time; time.sleep(60)", b"/data/caf\xe9.txt"]
    marks = {b"MEMTOP_RUN": os.fsencode(tmp_path) + b"/caf\xe9", b"MEMTOP_ATTEMPT": b"9" * 5000, b"SLURM_JOB_ID": b"7\xe9"}
    with subprocess.Popen(command, env=marks) as program:
        driver.gpu(0, total=GIB).process(0, pid=program.pid, used=5).write()

        def look() -> MachineSnapshot:
            reader.refresh()
            return sampler(reader).sample()

        # The child has this command line only after its exec.
        snapshot = eventually(look, lambda found: "caf" in (found.gpus[0].processes[0].command or ""))
        program.kill()
    msgspec.json.encode(snapshot)
    (row,) = snapshot.gpus[0].processes
    assert (row.command or "").endswith("/data/caf\ufffd.txt")
    assert row.run == "caf\ufffd"
    assert row.container == "slurm job 7\ufffd"
