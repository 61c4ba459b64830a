"""Every error code at every call: no crash, no 0 for unknown, a readable reason. Old and slow
drivers."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memtop.supervisor.monitor.nvml import errors as nvml_errors
from memtop.supervisor.monitor.nvml.events import AGAIN_SECONDS
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.nvml.thread import DriverThread
from memtop.supervisor.monitor.values import Band, GpuSample, band_of
from tests.monitor.conftest import GIB, Clock, one
from tests.nvml_double.double import SOURCES, Script

CODES = sorted(nvml_errors.CODE_WORDS)
NUMBERS = ("total_bytes", "used_bytes", "free_bytes", "used_fraction")
PLACES = {
    "open": ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID"),
    "memory": ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"),
    "utilisation": ("nvmlDeviceGetUtilizationRates",),
    "sensor": ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"),
    "details": ("nvmlDeviceGetFanSpeed",),
    "fields": ("nvmlDeviceGetFieldValues",),
    "processes": ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    "samples": ("nvmlDeviceGetProcessUtilization",),
    "MIG": ("nvmlDeviceGetMigMode",),
    "events": ("nvmlDeviceRegisterEvents",),
    "GPM": ("nvmlGpmSampleGet",),
}
LOST = dict.fromkeys((*NUMBERS, "utilization_fraction", "temperature_celsius", "power_watts"))
FUNCTIONS = sorted(
    # Every name in the scripted driver's sources; its macros make some more.
    {
        name
        for source in SOURCES
        for name in re.findall(r"\b(nvml(?:Init|Shutdown|System|Device|Event|Gpm)\w+)", source.read_text())
    }
    | {f"nvmlDeviceGet{kind}RunningProcesses_v{number}" for kind in ("Compute", "Graphics", "MPSCompute") for number in (2, 3)}
)
NEEDED = {"nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"}


def machine(driver: Script) -> Script:
    driver.clear().gpu(0, total=8 * GIB, used=2 * GIB, util=50, gpm=1, mig=0).gpu(1, total=8 * GIB, used=GIB, util=60, gpm=1)
    return driver.process(0, pid=11, used=GIB, sm=50).process(1, pid=12, used=GIB, sm=50).field(0, 82, 70)


def honest(gpu: GpuSample) -> None:
    """Check that every unknown value is None and has a reason."""
    for holder, empty in ((gpu, {"error", "visible_index", "other_pool_bytes"}), (gpu.details, {"recovery_action"})):
        missing = {field for field in holder.__struct_fields__ if getattr(holder, field) is None} - empty
        assert missing <= set(holder.unknown), missing - set(holder.unknown)
        for field, reason in holder.unknown.items():
            assert reason
            assert getattr(holder, field, None) in (None, ()) or field in ("processes", "mig")
    for row in gpu.processes:
        assert row.sm_fraction is not None or row.unknown["sm_fraction"]


def well(gpu: GpuSample, used: int) -> None:
    assert (gpu.error, gpu.total_bytes, gpu.used_bytes, band_of(gpu.used_fraction)) == (None, 8 * GIB, used, Band.SAFE)
    honest(gpu)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("place", PLACES)
def test_every_code_at_every_place(driver: Script, reader: NvmlReader, clock: Clock, place: str, code: int) -> None:
    machine(driver)
    for call in PLACES[place]:
        driver.fail(call, 0, code)
    driver.write()
    for _ in range(7):
        first, second = reader.read().gpus
        well(second, GIB)
        honest(first)
        if first.error is None:
            assert first.total_bytes in (None, 8 * GIB)
        else:
            assert first.error == nvml_errors.words(code)
            assert {field: getattr(first, field) for field in LOST} == LOST
            assert (first.processes, band_of(first.used_fraction)) == ((), Band.UNKNOWN)
        clock.pass_(1.0)
    machine(driver).write()
    clock.pass_(60.0)
    first, second = reader.read().gpus
    well(second, GIB)
    assert first.error is None
    if code not in (3, 13):
        well(first, 2 * GIB)


@pytest.mark.parametrize("code", CODES)
def test_every_code_at_the_start(driver: Script, reader: NvmlReader, clock: Clock, code: int) -> None:
    machine(driver).init_error(code).write()
    reading = reader.read()
    assert reading.gpus == ()
    assert reading.note is not None
    assert reading.note.startswith("no NVIDIA GPU: ")
    machine(driver).write()
    clock.pass_(10.0)
    assert [gpu.error for gpu in reader.read().gpus] == [None, None]


@pytest.mark.parametrize("code", CODES)
def test_every_code_later_on(driver: Script, reader: NvmlReader, clock: Clock, code: int) -> None:
    """All calls of a healthy GPU fail for a while."""
    machine(driver).write()
    reader.read()
    driver.clear().gpu(0, total=8 * GIB, error=code).gpu(1, total=8 * GIB, used=GIB, util=60, gpm=1).write()
    for _ in range(6):
        clock.pass_(1.0)
        first, second = reader.read().gpus
        well(second, GIB)
        honest(first)
        assert first.total_bytes in (None, 8 * GIB)
    machine(driver).write()
    clock.pass_(60.0)
    first, _ = reader.read().gpus
    assert first.error is None


@pytest.mark.parametrize("function", sorted(set(FUNCTIONS) - NEEDED))
def test_a_driver_without_one_function(driver: Script, reader: NvmlReader, clock: Clock, function: str) -> None:
    machine(driver).missing(function).write()
    for _ in range(7):
        reading = reader.read()
        assert reading.note is None
        for gpu in reading.gpus:
            assert gpu.error is None
            assert gpu.total_bytes == 8 * GIB
            honest(gpu)
        clock.pass_(1.0)


def test_a_very_old_driver(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    """Handles and memory, nothing else."""
    machine(driver)
    for function in sorted(set(FUNCTIONS) - NEEDED - {"nvmlDeviceGetMemoryInfo"}):
        driver.missing(function)
    driver.write()
    for _ in range(7):
        first, second = reader.read().gpus
        assert (first.total_bytes, first.used_bytes, second.used_bytes) == (8 * GIB, 2 * GIB, GIB)
        for gpu in (first, second):
            assert gpu.error is None
            honest(gpu)
        clock.pass_(1.0)
    assert reader.read().driver_version is None
    assert first.unknown["processes"] == nvml_errors.words(13)


def test_a_driver_without_memory_calls(driver: Script, reader: NvmlReader) -> None:
    machine(driver).missing("nvmlDeviceGetMemoryInfo").missing("nvmlDeviceGetMemoryInfo_v2").write()
    first, _ = reader.read().gpus
    assert (first.error, first.total_bytes, first.unified) == (None, None, False)
    assert first.unknown["total_bytes"] == nvml_errors.words(13)


def test_a_slow_driver(driver: Script, reader: NvmlReader) -> None:
    machine(driver).delay(5).write()
    first, second = reader.read().gpus
    well(first, 2 * GIB)
    well(second, GIB)


HANGING = """
import threading, time
from memtop.supervisor.monitor.nvml import reader as nvml
nvml.CLOSE_SECONDS = 0.01
reader = nvml.NvmlReader()
reading = threading.Thread(target=reader.read, daemon=True)
reading.start()
while not reader._lock.locked():
    time.sleep(0.001)
reader.refresh(), reader.want_pcie(), reader.close()
print(reading.is_alive())
"""


def test_a_driver_that_does_not_answer_blocks_only_the_read(nvml_library: Path, tmp_path: Path) -> None:
    """The program also ends while its threads are blocked in the driver."""
    script = machine(Script(tmp_path / "script")).delay(3_600_000, "nvmlDeviceGetMemoryInfo_v2").write()
    environment = {**os.environ, **script.env(nvml_library)}
    done = subprocess.run([sys.executable, "-c", HANGING], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("True\n", ""), "all three came back while the driver slept"


def test_sixteen_gpus_with_many_processes(driver: Script, reader: NvmlReader) -> None:
    for index in range(16):
        driver.gpu(index, total=8 * GIB, used=index * GIB // 4)
        for pid in range(1, 65):
            driver.process(index, pid=1000 * (index + 1) + pid, used=pid)
    driver.write()
    gpus = reader.read().gpus
    assert [len(gpu.processes) for gpu in gpus] == [64] * 16
    assert len({gpu.pci_bus_id for gpu in gpus}) == 16


def test_all_functions_of_the_double_are_found(nvml_library: Path) -> None:
    library = ctypes.CDLL(str(nvml_library))
    there = [name for name in FUNCTIONS if hasattr(library, name)]
    assert len(there) > 70
    assert {"nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlGpmMetricsGet", "nvmlDeviceGetFanSpeed"} <= set(there)


@pytest.mark.parametrize("used", [9 * GIB, 2**64 - 1])
def test_more_memory_in_use_than_the_card_has_is_unknown(driver: Script, reader: NvmlReader, used: int) -> None:
    driver.gpu(0, total=8 * GIB, used=used).write()
    gpu = one(reader)
    assert gpu.total_bytes is gpu.used_bytes is gpu.free_bytes is gpu.used_fraction is None
    assert f"reported {used} used" in gpu.unknown["used_fraction"]
    assert band_of(gpu.used_fraction) is Band.UNKNOWN
    driver.clear().gpu(0, total=8 * GIB, used=GIB).write()
    gpu = one(reader)
    assert (gpu.used_bytes, gpu.unknown) == (GIB, {})


def test_no_thread_can_be_started(driver: Script, reader: NvmlReader, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pids limit of a container is reached: values that need a thread have that reason until
    a thread can start."""
    start = threading.Thread.start
    allowed: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("memtop-") and thread.name not in allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    driver.gpu(0, total=8 * GIB).write()
    thread = DriverThread(reader, patience=10.0)
    note = thread.read().reading.note
    assert note is not None
    assert "no more threads" in note
    allowed.append("memtop-driver")
    before = driver.calls("nvmlEventSetFree")
    reader.want_pcie()
    thread.read()
    (gpu,) = thread.read().reading.gpus
    assert gpu.error is None
    assert "no more threads" in gpu.details.unknown["pcie_sent_bytes_per_second"]
    assert driver.calls("nvmlEventSetFree") == before + 1, "nothing is left behind"
    created = driver.calls("nvmlEventSetCreate")
    thread.read()
    assert driver.calls("nvmlEventSetCreate") == created, "not tried at every read"
    allowed += ["memtop-nvml-events", "memtop-nvml-pcie"]
    clock.pass_(AGAIN_SECONDS)
    thread.read()
    assert "memtop-nvml-events" in {one.name for one in threading.enumerate()}
    thread.close()
