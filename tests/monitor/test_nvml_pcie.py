"""PCIe throughput: read in a thread, and only while it is wanted."""

from __future__ import annotations

import pytest

from memtop.supervisor.monitor.nvml import errors as nvml_errors
from memtop.supervisor.monitor.nvml import rates as nvml_pcie
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.values import GpuDetails
from tests.monitor.conftest import Clock, eventually
from tests.monitor.test_nvml_events import names
from tests.nvml_double.double import Script

THREAD = "memtop-nvml-pcie"
CALL = "nvmlDeviceGetPcieThroughput"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_pcie, "PAUSE_SECONDS", 0.01)


def details(reader: NvmlReader) -> list[GpuDetails]:
    return [gpu.details for gpu in reader.read().gpus]


def test_while_it_is_wanted(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=1, pcie_tx=100, pcie_rx=200).gpu(1, total=1, pcie_tx=0, pcie_rx=0).delay(5, CALL).write()
    before = driver.calls(CALL)
    first, _ = details(reader)
    assert first.unknown["pcie_sent_bytes_per_second"] == "read only while GPU details are displayed"
    assert driver.calls(CALL) == before
    reader.want_pcie()
    first, second = eventually(lambda: details(reader), lambda both: both[1].pcie_sent_bytes_per_second is not None)
    assert (first.pcie_sent_bytes_per_second, first.pcie_received_bytes_per_second) == (102400.0, 204800.0)
    assert (second.pcie_sent_bytes_per_second, second.pcie_received_bytes_per_second) == (0.0, 0.0)
    assert "pcie_sent_bytes_per_second" not in first.unknown
    clock.pass_(nvml_pcie.WANTED_SECONDS + 1)
    first, _ = details(reader)
    assert first.pcie_sent_bytes_per_second is None, "it is no longer wanted"
    assert first.unknown["pcie_sent_bytes_per_second"] == "read only while GPU details are displayed"
    eventually(names, lambda running: THREAD not in running)


def test_one_thread_however_often_it_is_wanted(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=1).write()
    details(reader)
    for _ in range(20):
        reader.want_pcie()
    assert names().count(THREAD) == 1
    reader.close()
    assert THREAD not in names()


@pytest.mark.parametrize(("code", "again"), [(3, False), (13, False), (999, True), (15, True)])
def test_throughput_that_cannot_be_read(driver: Script, reader: NvmlReader, code: int, again: bool) -> None:
    driver.gpu(0, total=1).gpu(1, total=1, pcie_tx=1).fail(CALL, 0, code).write()
    details(reader)
    reader.want_pcie()
    words = nvml_errors.words(code)
    failed, _ = eventually(lambda: details(reader), lambda both: both[0].unknown["pcie_sent_bytes_per_second"] == words)
    assert failed.pcie_sent_bytes_per_second is None
    driver.clear().gpu(0, total=1, pcie_tx=3).gpu(1, total=1, pcie_tx=2).write()
    # Both are read in turns: two new values of the other GPU mean that this one was read in
    # between.
    eventually(lambda: details(reader), lambda both: both[1].pcie_sent_bytes_per_second == 2048.0)
    driver.clear().gpu(0, total=1, pcie_tx=3).gpu(1, total=1, pcie_tx=4).write()
    first, _ = eventually(lambda: details(reader), lambda both: both[1].pcie_sent_bytes_per_second == 4096.0)
    assert first.pcie_sent_bytes_per_second == (3072.0 if again else None)


def test_a_value_that_was_read_before_is_read_again(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=1, pcie_tx=1).write()
    details(reader)
    reader.want_pcie()
    eventually(lambda: details(reader), lambda all_: all_[0].pcie_sent_bytes_per_second == 1024.0)
    words = nvml_errors.words(3)
    driver.fail(CALL, 0, 3).write()
    eventually(lambda: details(reader), lambda all_: all_[0].unknown.get("pcie_sent_bytes_per_second") == words)
    driver.clear().gpu(0, total=1, pcie_tx=2).write()
    eventually(lambda: details(reader), lambda all_: all_[0].pcie_sent_bytes_per_second == 2048.0)


def test_want_before_the_first_read(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=1, pcie_tx=1).write()
    reader.want_pcie()
    eventually(lambda: details(reader), lambda all_: all_[0].pcie_sent_bytes_per_second == 1024.0)
