"""GPUs that share the machine's RAM, and discrete GPUs that resemble them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from memtop.supervisor.monitor.nvml import errors as nvml_errors
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.values import Band, band_of
from tests.monitor.conftest import GIB, Clock, Tree, one
from tests.nvml_double.double import Script

TOTAL, AVAILABLE = 128 * GIB, 16 * GIB
MEMINFO = f"MemTotal: {TOTAL // 1024} kB\nMemFree: 1 kB\nMemAvailable: {AVAILABLE // 1024} kB\nSwapTotal: 0 kB\n"

Make = Callable[..., NvmlReader]


@pytest.fixture
def reading(driver: Script, clock: Clock, tree: Tree) -> Iterator[Make]:
    """Makes a reader on a machine with this /proc/meminfo."""
    made: list[NvmlReader] = []

    def make(meminfo: str | None = MEMINFO) -> NvmlReader:
        root = tree({} if meminfo is None else {"meminfo": meminfo})
        made.append(NvmlReader(monotonic=clock, proc_root=root, environment={}))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


@pytest.mark.parametrize("how", ["not supported", "total is 0", "total is that of the machine", "all ones"])
def test_one_pool_in_three_parts(driver: Script, reading: Make, how: str) -> None:
    fields = {
        "total is 0": {"total": 0},
        "total is that of the machine": {"total": 120 * GIB},
        "all ones": {"total": 2**64 - 1},
    }
    driver.gpu(0, integrated=1, util=40, **fields.get(how, {}))
    driver.process(0, pid=11, used=30 * GIB).process(0, pid=12, used=10 * GIB).write()
    gpu = one(reading())
    assert gpu.unified
    assert gpu.error is None
    assert (gpu.total_bytes, gpu.free_bytes, gpu.used_bytes) == (TOTAL, AVAILABLE, 40 * GIB)
    assert gpu.other_pool_bytes == TOTAL - AVAILABLE - 40 * GIB
    assert gpu.used_fraction == (TOTAL - AVAILABLE) / TOTAL
    assert band_of(gpu.used_fraction) is Band.EDGE
    assert gpu.utilization_fraction == 0.4
    assert gpu.reserved_bytes is None
    assert set(gpu.unknown) == {"reserved_bytes"}


@pytest.mark.parametrize("how", ["a process without its memory", "no process list"])
def test_memory_of_processes_that_is_not_reported(driver: Script, reading: Make, how: str) -> None:
    driver.gpu(0, integrated=1).process(0, pid=11, used=GIB).process(0, pid=12, used=None)
    if how == "no process list":
        driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", 0, 4)
    driver.write()
    gpu = one(reading())
    assert (gpu.total_bytes, band_of(gpu.used_fraction)) == (TOTAL, Band.EDGE)
    for field in ("used_bytes", "other_pool_bytes"):
        assert getattr(gpu, field) is None
        assert gpu.unknown[field]


@pytest.mark.parametrize("meminfo", [None, "MemTotal: x kB\n", "MemTotal: 5 kB\n", "MemTotal:\n", "garbage\n"])
def test_without_meminfo(driver: Script, reading: Make, meminfo: str | None) -> None:
    driver.gpu(0, integrated=1).write()
    gpu = one(reading(meminfo))
    assert gpu.unified
    assert gpu.total_bytes is gpu.used_bytes is gpu.free_bytes is gpu.used_fraction is gpu.other_pool_bytes is None
    assert band_of(gpu.used_fraction) is Band.UNKNOWN
    assert "meminfo" in gpu.unknown["total_bytes"]


@pytest.mark.parametrize("evidence", ["bus_width", "memory_limit", "bar1_total"])
def test_a_big_card_in_a_small_machine_is_no_unified_one(driver: Script, reading: Make, evidence: str) -> None:
    none = {"bus_width": 0, "memory_limit": 0, "bar1_total": 0}
    driver.gpu(0, total=141 * GIB, used=GIB, **(none | {evidence: 1})).write()
    gpu = one(reading())
    assert not gpu.unified
    assert (gpu.total_bytes, gpu.used_bytes, gpu.other_pool_bytes) == (141 * GIB, GIB, None)


@pytest.mark.parametrize(("name", "unified"), [("NVIDIA GB10", True), ("Orin (nvgpu)", True), ("NVIDIA GB102", False)])
@pytest.mark.parametrize("reported", [True, False])
def test_some_are_known_by_name(driver: Script, reading: Make, name: str, unified: bool, reported: bool) -> None:
    """Even where the driver reports a memory bus."""
    driver.gpu(0, total=125 * GIB, used=GIB, name=name, bus_width=256)
    if not reported:
        driver.fail("nvmlDeviceGetMemoryInfo_v2", 0, 3)
    driver.write()
    gpu = one(reading())
    assert gpu.unified == unified
    assert gpu.total_bytes == (TOTAL if unified else 125 * GIB if reported else None)


def test_a_discrete_card_that_does_not_report_its_memory(driver: Script, reading: Make, clock: Clock) -> None:
    driver.gpu(0, total=24 * GIB).fail("nvmlDeviceGetMemoryInfo_v2", 0, 3).write()
    reader = reading()
    before = driver.calls("nvmlDeviceGetMemoryInfo_v2")
    for _ in range(3):
        gpu = one(reader)
        clock.pass_(1.0)
    assert not gpu.unified
    assert gpu.total_bytes is None
    assert gpu.unknown["total_bytes"] == nvml_errors.words(3)
    assert driver.calls("nvmlDeviceGetMemoryInfo_v2") - before == 1


def test_whether_memory_is_unified_is_decided_once_it_can_be_read(driver: Script, reading: Make, clock: Clock) -> None:
    driver.gpu(0, integrated=1).fail("nvmlDeviceGetBAR1MemoryInfo", 0, 999).write()
    reader = reading()
    gpu = one(reader)
    assert not gpu.unified
    assert gpu.total_bytes is None
    assert gpu.unknown["total_bytes"]
    driver.clear().gpu(0, integrated=1).write()
    clock.pass_(1.0)
    gpu = one(reader)
    assert gpu.unified
    assert gpu.total_bytes == TOTAL


def test_memory_of_a_shared_gpu_is_read_once(driver: Script, reading: Make, clock: Clock) -> None:
    driver.gpu(0, integrated=1).write()
    reader = reading()
    before = driver.calls("nvmlDeviceGetMemoryInfo_v2")
    for _ in range(5):
        one(reader)
        clock.pass_(1.0)
    assert driver.calls("nvmlDeviceGetMemoryInfo_v2") - before == 1


def test_a_shared_gpu_that_is_lost(driver: Script, reading: Make, clock: Clock) -> None:
    driver.gpu(0, integrated=1).write()
    reader = reading()
    one(reader)
    driver.clear().gpu(0, integrated=1, error=15).write()
    clock.pass_(1.0)
    gpu = one(reader)
    assert gpu.error == nvml_errors.words(15)
    assert gpu.total_bytes is None
