"""`memtop watch --gpus` shows only the selected GPUs and their processes, in every output
format."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.monitor.values import GpuProcess, GpuSample, Job, MachineSnapshot, only_gpus
from memtop.supervisor.units import GIB
from memtop.supervisor.wire import HistoryRows, Phase, RunState, StateUpdate
from memtop.tui.feed import Connected, FeedMessage, LocalFeed, choosing
from tests.conftest import Runs
from tests.nvml_double.double import Script, nvml_library  # noqa: F401 (a fixture)
from tests.terminal import Terminal
from tests.test_streaming import free_port, scrape, started


def row(pid: int, job: str, used: int | None) -> GpuProcess:
    unknown = {} if used is not None else {"used_bytes": "the driver does not say"}
    return GpuProcess(pid=pid, job=job, used_bytes=used, unknown=unknown)


def three(*, second: int | None = 5) -> MachineSnapshot:
    """Job `ddp` computes on all three GPUs, `one` on GPU 1."""
    gpus = (
        GpuSample(index=0, processes=(row(10, "ddp", 20),)),
        GpuSample(index=1, processes=(row(11, "ddp", second), row(12, "one", 7))),
        GpuSample(index=2, processes=(row(13, "ddp", None), GpuProcess(pid=99))),
    )
    ddp = Job(
        key="ddp",
        name="sft.py",
        leader_pid=9,
        pids=(9, 10, 11, 13),
        gpu_indices=(0, 1, 2),
        host_rss_bytes=1000,
        unknown={"used_bytes": "the driver does not say"},
    )
    one = Job(key="one", name="eval.py", leader_pid=12, pids=(12,), gpu_indices=(1,), used_bytes=7)
    return MachineSnapshot(time=1.0, gpus=gpus, jobs=(ddp, one))


def test_only_these_gpus_and_what_is_on_them() -> None:
    found = only_gpus(three(), {0})
    assert [gpu.index for gpu in found.gpus] == [0]
    (job,) = found.jobs
    # Memory of the job on other GPUs does not count, so the sum is known. The job keeps all its
    # processes.
    assert (job.gpu_indices, job.used_bytes, job.unknown) == ((0,), 20, {})
    assert (job.pids, job.host_rss_bytes) == ((9, 10, 11, 13), 1000)


def test_jobs_are_in_the_order_of_their_memory_here() -> None:
    assert [(job.key, job.used_bytes) for job in only_gpus(three(), {1}).jobs] == [("one", 7), ("ddp", 5)]


def test_unknown_values_stay_unknown_with_their_reason() -> None:
    for indices in ({2}, {0, 2}):
        (job,) = only_gpus(three(), indices).jobs
        assert (job.used_bytes, job.unknown) == (None, {"used_bytes": "the driver does not say"})


def test_all_of_them_is_the_same_snapshot() -> None:
    whole = three()
    assert only_gpus(whole, {0, 1, 2}) is whole
    bare = MachineSnapshot(time=1.0, gpu_note="no NVIDIA GPU")
    assert only_gpus(bare, {0}) is bare


def test_missing_gpus_are_reported() -> None:
    found = only_gpus(three(), {5, 4})
    assert (found.gpus, found.jobs) == ((), ())
    assert found.gpu_note == "GPU 4, 5: the driver does not list it now, only GPU 0, 1, 2"


def history(index: int | None, key: str) -> HistoryRows:
    return HistoryRows(key=key, gpu_index=index, label="", times=b"", columns={})


def test_a_run_and_its_history_are_reported_for_the_chosen_gpus_only() -> None:
    turn = choosing({1})
    run = RunState(name="a", folder="f", state=Phase.TRAINING, created=1.0)
    kept = turn(StateUpdate(run=run, machine=three()))
    assert isinstance(kept, StateUpdate)
    assert kept.machine is not None
    assert [gpu.index for gpu in kept.machine.gpus] == [1]
    bare = StateUpdate(run=run)
    assert turn(bare) is bare
    assert turn(history(0, "GPU-a")) is None
    assert turn(history(10, "GPU-k")) is None
    for kept in (history(1, "GPU-b"), history(None, "host"), Connected()):
        assert turn(kept) is kept


async def test_a_feed_changes_its_messages_by_its_turns() -> None:
    class Two:
        def sample(self) -> MachineSnapshot:
            return three()

    feed = LocalFeed(Two, 0.01, turns=[choosing({2})])
    messages: AsyncIterator[FeedMessage] = feed.messages()
    assert isinstance(await anext(messages), Connected)
    sample = await anext(messages)
    assert isinstance(sample, MachineSnapshot)
    assert [gpu.index for gpu in sample.gpus] == [2]


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "120"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def machine(runs: Runs, tmp_path: Path, program: subprocess.Popen[bytes], nvml_library: Path) -> Runs:  # noqa: F811
    """Three GPUs; one program on all of them."""
    script = Script(tmp_path / "script")
    for index in range(3):
        script.gpu(index, total=20 * GIB, used=5 * GIB, uuid=f"GPU-{index}", name="A4500")
        script.process(index, pid=program.pid, used=(index + 1) * GIB)
    runs.environment |= script.write().env(nvml_library)
    runs.environment["CUDA_VISIBLE_DEVICES"] = "2,1"
    return runs


def documents(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_once_and_follow(machine: Runs) -> None:
    once = json.loads(machine.memtop("watch", "--once", "--json", "--gpus", "0,2").stdout)
    (followed,) = documents(machine.memtop("watch", "--json", "--follow", "--count", "1", "--gpus", "0,2").stdout)
    for document in (once, followed):
        assert [gpu["index"] for gpu in document["gpus"]] == [0, 2]
        assert [(job["gpu_indices"], job["used_bytes"]) for job in document["jobs"]] == [([0, 2], 4 * GIB)]
    lines = machine.memtop("watch", "--once", "--gpus", "visible").stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("GPU")] == ["GPU 1", "GPU 2"]


def test_csv(machine: Runs) -> None:
    done = machine.memtop("watch", "--csv", "--gpus", "visible")
    assert [row["gpu"] for row in csv.DictReader(io.StringIO(done.stdout))] == ["1", "2"]


def test_prometheus(machine: Runs) -> None:
    port = free_port()
    process = started(machine, "--prometheus", str(port), "--interval", "0.2", "--gpus", "1")
    try:
        assert process.stderr is not None
        process.stderr.readline()
        deadline = time.monotonic() + 120
        while "memtop_gpu_up" not in (found := scrape(port)):
            assert time.monotonic() < deadline
        assert [dict(labels)["gpu"] for labels in found["memtop_gpu_up"]] == ["1"]
        assert list(found["memtop_process_memory_used_bytes"].values()) == [2 * GIB]
        assert list(found["memtop_job_memory_used_bytes"].values()) == [2 * GIB]
    finally:
        process.terminate()
        process.communicate(timeout=120)


def test_the_dashboard(machine: Runs) -> None:
    command = [sys.executable, "-m", "memtop", "watch", "--gpus", "2,1"]
    terminal = Terminal(command, columns=120, rows=40, cwd=str(machine.root), environment=machine.environment)
    try:
        shown = terminal.wait_for("GPU 1", "GPU 2", "Processes")
        assert "GPU 0" not in shown
        terminal.keys("q")
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_a_missing_gpu_is_one_line(machine: Runs) -> None:
    for form in (["--once"], ["--csv"], ["--json", "--follow"], ["--prometheus", "9400"]):
        done = machine.memtop("watch", *form, "--gpus", "0,7", status=2)
        assert done.stderr == "memtop: --gpus 0,7: this machine has no GPU 7; there are 0, 1, 2\n"
        assert done.stdout == ""


def test_the_first_sample_waits_for_a_driver_that_has_to_wake_up(machine: Runs, tmp_path: Path) -> None:
    """The only sample of `watch --csv` has the GPUs, however long the driver takes."""
    Script(tmp_path / "script").gpu(0, total=GIB, used=0, uuid="GPU-0").delay(600, "nvmlInitWithFlags").write()
    (row,) = csv.DictReader(io.StringIO(machine.memtop("watch", "--csv").stdout))
    assert (row["gpu"], row["gpu_total_bytes"]) == ("0", str(GIB))
