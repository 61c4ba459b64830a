"""The whole sample and its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.monitor import processes
from memtop.supervisor.monitor.nvml import NvmlReader
from memtop.supervisor.monitor.processes import ProcessDescriber
from memtop.supervisor.monitor.sampler import Sampler, snapshot_json
from memtop.supervisor.monitor.strays import KnownRun
from memtop.supervisor.monitor.values import Band
from tests.monitor.conftest import Clock, Start
from tests.nvml_double.double import Script

GIB = 1024**3

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


def sampler(reader: NvmlReader, runs: Sequence[KnownRun] = ()) -> Sampler:
    return Sampler(lambda: runs, nvml=reader, describer=ProcessDescriber(same_namespace=lambda: True))


def test_the_document_has_the_public_fields(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB, used=GIB // 2).process(0, pid=os.getpid(), used=GIB // 2).write()
    document = json.loads(json.dumps(snapshot_json(sampler(reader).sample())))
    assert set(document) >= {"time", "gpus", "host"}
    assert set(document["gpus"][0]) >= GPU_KEYS
    assert set(document["gpus"][0]["processes"][0]) >= PROCESS_KEYS
    assert set(document["host"]) >= HOST_KEYS
    assert document["gpus"][0]["band"] == "safe"


def test_every_value_of_a_process_that_is_none_has_its_reason(driver: Script, reader: NvmlReader, start: Start) -> None:
    ended = start()
    ended.kill()
    ended.wait()
    driver.gpu(0, total=GIB).process(0, pid=ended.pid, used=None).process(0, pid=start().pid, used=5).write()
    snapshot = sampler(reader).sample()
    # One that is no run's has no run, one that runs plainly has no container and no MIG instance; the driver's own
    # values are tested where they are read.
    plain = {"run", "container", "mig_instance", "job", "role"}
    driver_says = {"sm_fraction", "memory_bandwidth_fraction", "encoder_fraction", "decoder_fraction"}
    values: list[Any] = [*snapshot.gpus[0].processes, *snapshot.jobs]
    assert len(values) == 3
    for value in values:
        missing = {field for field in value.__struct_fields__ if getattr(value, field) is None} - plain - driver_says
        assert missing <= set(value.unknown), missing - set(value.unknown)


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


def test_runs_are_asked_for_only_when_a_process_may_be_of_one(driver: Script, reader: NvmlReader) -> None:
    def ask() -> Sequence[KnownRun]:
        raise AssertionError("no process is this user's")

    driver.gpu(0, total=GIB).process(0, pid=os.getpid(), used=9).write()
    describer = ProcessDescriber(same_namespace=lambda: True)
    Sampler(ask, nvml=reader, describer=describer, own_uid=os.getuid() + 1).sample()


def test_runs_are_asked_for_no_more_often_than_the_lists_are_read(
    driver: Script, reader: NvmlReader, clock: Clock, start: Start
) -> None:
    process = start(env={"MEMTOP_RUN": "/runs/r"})
    driver.gpu(0, total=GIB).process(0, pid=process.pid, used=9).write()
    asked: list[float] = []

    def ask() -> Sequence[KnownRun]:
        asked.append(clock())
        return ()

    watcher = Sampler(ask, nvml=reader, describer=ProcessDescriber(same_namespace=lambda: True))
    for _ in range(4):
        assert watcher.sample().gpus[0].processes[0].run == "r"
        clock.pass_(1.0)
    assert len(asked) == 2


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
    describe = processes.describe_process

    def counted(identity: processes.ProcessId, proc_root: Path) -> processes.ProcessFacts:
        described.append(identity.pid)
        return describe(identity, proc_root)

    monkeypatch.setattr(processes, "describe_process", counted)
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
