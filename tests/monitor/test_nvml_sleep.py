"""Sleeping GPUs of laptops: watching must not wake them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memtop.cli import gpus
from memtop.supervisor.monitor.nvml.environment import ASLEEP, all_asleep
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.sampler import Sampler
from tests.monitor.conftest import Clock
from tests.nvml_double.double import Script

Device = Callable[..., None]


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """Writes one PCI device; again to change it."""

    def write(name: str, status: str | None, *, vendor: str = "0x10de", kind: str = "0x030000") -> None:
        folder = tmp_path / "sys/bus/pci/devices" / name
        (folder / "power").mkdir(parents=True, exist_ok=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
        if status is not None:
            (folder / "power/runtime_status").write_text(f"{status}\n")

    return write


@pytest.fixture
def reader(driver: Script, tmp_path: Path, clock: Clock) -> Iterator[NvmlReader]:
    reader = NvmlReader(monotonic=clock, environment={}, sys_root=tmp_path / "sys")
    yield reader
    reader.close()


@pytest.mark.parametrize("status", ["active", "resuming", "suspending", "error", None])
def test_only_suspended_devices_sleep(device: Device, tmp_path: Path, status: str | None) -> None:
    device("0000:01:00.0", "suspended")
    assert all_asleep(tmp_path / "sys")
    device("0000:02:00.0", status, kind="0x030200")
    assert not all_asleep(tmp_path / "sys"), "one is awake"


def test_other_makers_and_other_functions_of_the_card_do_not_count(device: Device, tmp_path: Path) -> None:
    assert not all_asleep(tmp_path / "sys"), "no PCI bus"
    device("0000:00:02.0", "suspended", vendor="0x8086")
    device("0000:01:00.1", "suspended", kind="0x040300")
    assert not all_asleep(tmp_path / "sys"), "no GPU of NVIDIA"
    device("0000:01:00.0", "suspended")
    device("0000:01:00.1", "active", kind="0x040300")
    device("0000:00:02.0", "active", vendor="0x8086")
    assert all_asleep(tmp_path / "sys")


def test_a_sleeping_gpu_is_not_woken_and_checked_every_ten_seconds(
    driver: Script, reader: NvmlReader, clock: Clock, device: Device
) -> None:
    driver.gpu(0, total=1).write()
    device("0000:01:00.0", "suspended")
    before = driver.calls("nvmlInitWithFlags")
    for _ in range(30):
        reading = reader.read()
        assert (reading.gpus, reading.note) == ((), ASLEEP)
        clock.pass_(1.0)
    assert driver.calls("nvmlInitWithFlags") == before
    device("0000:01:00.0", "active")
    clock.pass_(10.0)
    reading = reader.read()
    assert (len(reading.gpus), reading.note) == (1, None)


def test_a_gpu_that_is_being_read_is_not_let_go(driver: Script, reader: NvmlReader, clock: Clock, device: Device) -> None:
    """Its status can be outdated, and reading the GPU keeps it awake."""
    driver.gpu(0, total=1).write()
    reader.read()
    device("0000:01:00.0", "suspended")
    clock.pass_(11.0)
    assert len(reader.read().gpus) == 1


def test_a_reader_that_will_use_the_gpus_wakes_them(driver: Script, clock: Clock, tmp_path: Path, device: Device) -> None:
    driver.gpu(0, total=1).write()
    device("0000:01:00.0", "suspended")
    reader = NvmlReader(monotonic=clock, environment={}, sys_root=tmp_path / "sys", wake=True)
    assert len(reader.read().gpus) == 1
    reader.close()


def test_choosing_gpus_for_a_run_wakes_them_and_watching_does_not(driver: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.gpu(0, total=1).write()
    monkeypatch.setattr("memtop.supervisor.monitor.nvml.reader.all_asleep", lambda root: True)
    assert len(gpus.sample().gpus) == 1
    watcher = Sampler(patience=10.0)
    assert watcher.sample().gpu_note == ASLEEP
    watcher.close()
