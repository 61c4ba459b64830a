"""The driver's process lists and how busy each process keeps the GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pynvml
import pytest

from memtop.supervisor.monitor.nvml import errors as nvml_errors
from memtop.supervisor.monitor.nvml.processes import UtilizationReader
from memtop.supervisor.monitor.nvml.query import Query
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.values import GpuProcess
from tests.monitor.conftest import MIB, Clock
from tests.nvml_double.double import Script, build, in_process

SHARES = ("sm_fraction", "memory_bandwidth_fraction", "encoder_fraction", "decoder_fraction")


def rows(reader: NvmlReader) -> dict[int, GpuProcess]:
    (gpu,) = reader.read().gpus
    return {row.pid: row for row in gpu.processes}


def shares(row: GpuProcess) -> tuple[float | None, ...]:
    return tuple(getattr(row, field) for field in SHARES)


def test_shares(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=MIB).process(0, pid=11, used=MIB).process(0, pid=12, used=MIB).process(0, pid=13, used=MIB)
    driver.busy(0, pid=11, sm=80, mem=40, enc=5, dec=6).busy(0, pid=13, sm=255, mem=3).busy(0, pid=99, sm=20).write()
    found = rows(reader)
    assert set(found) == {11, 12, 13}, "a pid that only the samples know is no row"
    assert shares(found[11]) == (0.8, 0.4, 0.05, 0.06)
    assert shares(found[12]) == (0.0, 0.0, 0.0, 0.0), "not in the answer: idle"
    assert shares(found[13]) == (None,) * 4, "more than 100 % is no share, and no proof of idleness"
    assert found[13].unknown == dict.fromkeys(SHARES, "the driver reported 255 %")
    assert found[11].unknown == found[12].unknown == {}


def test_no_process_is_busy(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=MIB).process(0, pid=11, used=MIB).write()
    assert shares(rows(reader)[11]) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("kind", "used"), [("compute", None), ("mps", MIB)])
def test_silence_proves_nothing_where_the_driver_does_not_see_the_process(
    driver: Script, reader: NvmlReader, kind: str, used: int | None
) -> None:
    driver.gpu(0, total=MIB).process(0, pid=11, used=used, kind=kind).write()
    row = rows(reader)[11]
    assert row.kind == kind
    assert shares(row) == (None,) * 4
    assert set(SHARES) <= set(row.unknown)


@pytest.mark.parametrize("code", [3, 4, 13, 999])
def test_samples_that_cannot_be_read(driver: Script, reader: NvmlReader, clock: Clock, code: int) -> None:
    driver.gpu(0, total=MIB).process(0, pid=11, used=MIB).fail("nvmlDeviceGetProcessUtilization", 0, code).write()
    before = driver.calls("nvmlDeviceGetProcessUtilization")
    for _ in range(3):
        row = rows(reader)[11]
        clock.pass_(2.0)
    assert shares(row) == (None,) * 4
    assert row.unknown["sm_fraction"] == nvml_errors.words(code)
    assert driver.calls("nvmlDeviceGetProcessUtilization") - before == (1 if code in (3, 13) else 3)


def test_old_samples_are_not_counted_again(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    stamp = int(time.time() * 1e6)
    driver.gpu(0, total=MIB).process(0, pid=11, used=MIB).busy(0, pid=11, sm=70, stamp=stamp).write()
    assert rows(reader)[11].sm_fraction == 0.7
    clock.pass_(2.0)
    assert rows(reader)[11].sm_fraction == 0.0, "nothing new since the sample that was seen"


def test_old_samples_do_not_count(driver: Script, reader: NvmlReader) -> None:
    stamp = int((time.time() - 60) * 1e6)
    driver.gpu(0, total=MIB).process(0, pid=11, used=MIB).busy(0, pid=11, sm=70, stamp=stamp).write()
    assert rows(reader)[11].sm_fraction == 0.0


def test_the_newest_sample_of_a_pid_counts(driver: Script, reader: NvmlReader) -> None:
    stamp = int(time.time() * 1e6)
    driver.gpu(0, total=MIB).process(0, pid=11, used=MIB).busy(0, pid=11, sm=70, stamp=stamp)
    driver.busy(0, pid=11, sm=10, stamp=stamp - 1000).write()
    assert rows(reader)[11].sm_fraction == 0.7


def test_more_processes_than_the_buffer_holds(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=MIB)
    for pid in range(1, 129):
        driver.process(0, pid=pid, used=pid, sm=50)
    driver.write()
    found = rows(reader)
    assert {pid: row.used_bytes for pid, row in found.items()} == {pid: pid for pid in range(1, 129)}
    assert {row.sm_fraction for row in found.values()} == {0.5}


def test_all_three_lists(driver: Script, reader: NvmlReader) -> None:
    """A process on two lists is one row; the largest comes first."""
    driver.gpu(0, total=MIB).process(0, pid=11, used=1).process(0, pid=12, used=2, kind="graphics")
    driver.process(0, pid=13, used=3, kind="mps").process(0, pid=11, used=1, kind="graphics").write()
    found = [(row.pid, row.kind, row.used_bytes) for row in rows(reader).values()]
    assert found == [(13, "mps", 3), (12, "graphics", 2), (11, "compute+graphics", 1)]


@pytest.mark.parametrize("kind", ["Graphics", "MPSCompute"])
@pytest.mark.parametrize(("code", "reported"), [(3, False), (13, False), (4, True), (999, True)])
def test_a_list_that_a_card_does_not_have_is_nothing_missing(
    driver: Script, reader: NvmlReader, kind: str, code: int, reported: bool
) -> None:
    driver.gpu(0, total=MIB).process(0, pid=11, used=MIB)
    for version in (2, 3):
        driver.fail(f"nvmlDeviceGet{kind}RunningProcesses_v{version}", 0, code)
    driver.write()
    (gpu,) = reader.read().gpus
    assert [row.pid for row in gpu.processes] == [11]
    assert ("processes" in gpu.unknown) == reported


def test_the_layout_of_the_first_535_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Rows with protected memory at the end: read with the usual layout, every second pid would be
    garbage."""
    script = Script(tmp_path / "script").gpu(0, total=MIB)
    for pid in range(11, 51):
        script.process(0, pid=pid, used=pid)
    script.write()
    monkeypatch.setenv("NVML_DOUBLE_SCRIPT", str(script.path))
    with in_process(build(tmp_path, "-DLONG_PROCESS_ROWS")):
        reader = NvmlReader(monotonic=clock)
        found = rows(reader)
        reader.close()
    assert {pid: row.used_bytes for pid, row in found.items()} == {pid: pid for pid in range(11, 51)}


def test_a_clock_that_is_set_back_makes_no_process_idle(driver: Script) -> None:
    now = time.time()
    pynvml.nvmlInit()
    driver.gpu(0, total=MIB).busy(0, pid=11, sm=70, mem=35, stamp=int((now + 3600) * 1e6)).write()
    utilization = UtilizationReader(Query(pynvml.nvmlDeviceGetHandleByIndex(0)))
    assert utilization.read(now + 3600) == {11: (0.7, 0.35, 0.0, 0.0)}
    driver.clear().gpu(0, total=MIB).busy(0, pid=11, sm=60, mem=0, stamp=int(now * 1e6)).write()
    assert utilization.read(now + 1) == {11: (0.6, 0.0, 0.0, 0.0)}
    pynvml.nvmlShutdown()


def test_a_sound_sample_counts_more_than_one_above_100(driver: Script, reader: NvmlReader) -> None:
    stamp = int(time.time() * 1e6)
    driver.gpu(0, total=MIB).process(0, pid=11, used=MIB).busy(0, pid=11, sm=70, stamp=stamp)
    driver.busy(0, pid=11, sm=104, stamp=stamp + 1000).write()
    assert rows(reader)[11].sm_fraction == 0.7


@pytest.mark.parametrize("order", [(MIB, None), (None, MIB), (MIB, None, MIB)])
def test_a_sum_with_an_unreported_row_is_unknown(driver: Script, reader: NvmlReader, order: tuple[int | None, ...]) -> None:
    driver.gpu(0, total=MIB).process(0, pid=12, used=5)
    for used in order:
        driver.process(0, pid=11, used=used)
    driver.write()
    found = rows(reader)
    assert (found[11].used_bytes, found[12].used_bytes) == (None, 5)
    assert found[11].unknown["used_bytes"] == "the driver does not report all of this process's memory"


def test_a_list_that_was_read_before_is_read_again(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    for _ in range(2):
        driver.clear().gpu(0, total=MIB).process(0, pid=11, used=MIB, sm=30).write()
        assert {pid: row.sm_fraction for pid, row in rows(reader).items()} == {11: 0.3}
        clock.pass_(2.0)
        driver.fail("nvmlDeviceGetProcessUtilization", 0, 3).write()
        assert rows(reader)[11].unknown["sm_fraction"] == nvml_errors.words(3)
        clock.pass_(2.0)
        driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", 0, 3).write()
        (gpu,) = reader.read().gpus
        assert (gpu.processes, gpu.unknown["processes"]) == ((), nvml_errors.words(3))
        clock.pass_(2.0)
