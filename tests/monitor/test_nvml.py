"""GPUs, read through the real bindings from a scripted driver library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtop.supervisor.monitor.nvml import errors as nvml_errors
from memtop.supervisor.monitor.nvml.reader import MISSING_SECONDS, NvmlReader
from memtop.supervisor.monitor.values import Band, GpuSample, band_of
from tests.monitor.conftest import GIB, MIB, Clock, one
from tests.nvml_double.double import Script


@pytest.mark.parametrize("count", [0, 1, 8, 16])
def test_number_of_gpus(driver: Script, reader: NvmlReader, count: int) -> None:
    for index in range(count):
        driver.gpu(index, total=24 * GIB, used=index * GIB)
    driver.write()
    reading = reader.read()
    assert [(gpu.index, gpu.used_bytes) for gpu in reading.gpus] == [(index, index * GIB) for index in range(count)]
    assert (reading.note is None) == (count > 0)
    assert reading.driver_version == "550.54.14"


def test_every_field(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(
        0,
        total=24 * GIB,
        used=20 * GIB,
        reserved=GIB,
        util=73,
        memory_util=31,
        temp=61,
        power=215500,
        limit=350000,
        name="RTX 4090",
    ).write()
    gpu = one(reader)
    assert gpu == GpuSample(
        index=0,
        uuid="GPU-00000000",
        name="RTX 4090",
        pci_bus_id="00000000:01:00.0",
        total_bytes=24 * GIB,
        used_bytes=20 * GIB,
        free_bytes=3 * GIB,
        reserved_bytes=GIB,
        used_fraction=21 / 24,
        utilization_fraction=0.73,
        memory_utilization_fraction=0.31,
        temperature_celsius=61.0,
        power_watts=215.5,
        power_limit_watts=350.0,
        details=gpu.details,
    )


def test_an_error_without_words_keeps_its_number() -> None:
    assert nvml_errors.words(12345) == "the driver reported error 12345"


@pytest.mark.parametrize(("code", "advice"), [(18, "reboot"), (999, "recreate it"), (9, "modprobe"), (17, "/dev/nvidia")])
def test_messages_name_the_remedy(code: int, advice: str) -> None:
    assert advice in nvml_errors.words(code)


def in_subprocess(environment: dict[str, str]) -> dict[str, Any]:
    program = (
        "import json; from memtop.supervisor.monitor.sampler import Sampler, snapshot_json;"
        "print(json.dumps(snapshot_json(Sampler().sample())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def test_without_a_library(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    document = in_subprocess({"LD_LIBRARY_PATH": str(tmp_path)})
    assert document["gpus"] == []
    assert document["gpu_note"] == "no NVIDIA GPU: no NVIDIA driver found"


def test_the_library_is_found_by_its_name(nvml_library: Path, tmp_path: Path) -> None:
    script = Script(tmp_path / "script").gpu(0, total=GIB, used=MIB).process(0, pid=os.getpid(), used=MIB).write()
    document = in_subprocess(script.env(nvml_library))
    (gpu,) = document["gpus"]
    assert gpu["used_bytes"] == MIB
    assert gpu["processes"][0]["pid"] == os.getpid()
    assert gpu["processes"][0]["name"]


@pytest.mark.parametrize("code", [15, 16, 999, 28, 17])
def test_a_lost_gpu_and_its_return(driver: Script, reader: NvmlReader, clock: Clock, code: int) -> None:
    driver.gpu(0, total=24 * GIB, used=GIB).gpu(1, total=8 * GIB, used=GIB).write()
    reader.read()
    driver.clear().gpu(0, total=24 * GIB, used=GIB).gpu(1, total=8 * GIB, error=code).write()
    clock.pass_(1.0)
    well, lost = reader.read().gpus
    assert well.error is None
    assert lost.error == nvml_errors.words(code)
    assert (lost.uuid, lost.name) == ("GPU-00000001", "Scripted GPU"), "still known who it is"
    assert lost.total_bytes is lost.used_fraction is lost.temperature_celsius is None
    assert lost.unknown["total_bytes"]
    assert band_of(lost.used_fraction) is Band.UNKNOWN
    driver.clear().gpu(0, total=24 * GIB, used=GIB).gpu(1, total=8 * GIB, used=2 * GIB).write()
    clock.pass_(3.0)
    _, back = reader.read().gpus
    assert (back.error, back.used_bytes) == (None, 2 * GIB)
    assert back.unknown == {}


def test_a_gpu_that_is_lost_from_the_start_does_not_hide_the_others(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB, error=15).gpu(1, total=GIB, used=MIB).write()
    lost, well = reader.read().gpus
    assert lost.error
    assert lost.unknown["name"]
    assert well.used_bytes == MIB


def test_a_driver_that_was_reloaded(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB).write()
    reader.read()
    driver.clear().init_error(9).gpu(0, total=GIB, error=1).write()
    clock.pass_(1.0)
    assert one(reader).error
    clock.pass_(2.0)
    gone = reader.read()
    assert gone.gpus == ()
    assert gone.note is not None
    assert "not loaded" in gone.note
    driver.clear().gpu(0, total=GIB).write()
    clock.pass_(10.0)
    assert one(reader).error is None


@pytest.mark.parametrize("how", ["missing", "invalid", "version"])
def test_old_memory_call(driver: Script, reader: NvmlReader, how: str) -> None:
    driver.gpu(0, total=10 * GIB, used=6 * GIB, reserved=GIB)
    if how == "missing":
        driver.missing("nvmlDeviceGetMemoryInfo_v2")
    else:
        driver.fail("nvmlDeviceGetMemoryInfo_v2", 0, 2 if how == "invalid" else 25)
    driver.write()
    gpu = one(reader)
    assert (gpu.used_bytes, gpu.free_bytes, gpu.reserved_bytes) == (7 * GIB, 3 * GIB, None)
    assert gpu.used_fraction == 0.7
    assert "reserve" in gpu.unknown["reserved_bytes"]


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization_fraction"),
        ("nvmlDeviceGetPciInfo_v3", "pci_bus_id"),
        ("nvmlDeviceGetPowerUsage", "power_watts"),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_watts"),
        ("nvmlDeviceGetName", "name"),
        ("nvmlDeviceGetUUID", "uuid"),
    ],
)
@pytest.mark.parametrize("code", [3, 4, 13, 999])
def test_a_missing_field_is_unknown_with_a_reason(
    driver: Script, reader: NvmlReader, function: str, field: str, code: int
) -> None:
    driver.gpu(0, total=GIB, used=MIB).fail(function, 0, code).write()
    gpu = one(reader)
    assert getattr(gpu, field) is None
    assert gpu.unknown.pop("memory_utilization_fraction", None) == (
        nvml_errors.words(code) if field == "utilization_fraction" else None
    ), "both come from one call"
    assert gpu.unknown == {field: nvml_errors.words(code)}
    assert gpu.used_bytes == MIB


def test_a_field_that_comes_back_loses_its_reason(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB).fail("nvmlDeviceGetPowerUsage", 0, 27).write()
    assert one(reader).power_watts is None
    driver.clear().gpu(0, total=GIB, power=5000).write()
    clock.pass_(5.0)
    gpu = one(reader)
    assert (gpu.power_watts, gpu.unknown) == (5.0, {})


def test_memory_that_the_driver_does_not_report(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).process(0, pid=11, used=None).write()
    (row,) = one(reader).processes
    assert row.used_bytes is None
    assert "does not report" in row.unknown["used_bytes"]


def test_impossible_pids_are_dropped_and_reported(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).process(0, pid=11, used=MIB, sm=20)
    for pid in (0, 4294967295, 2**22 + 1):
        driver.process(0, pid=pid, used=MIB, sm=10)
    driver.write()
    gpu = one(reader)
    assert [(row.pid, row.sm_fraction) for row in gpu.processes] == [(11, 0.2)]
    assert "0, 4194305, 4294967295" in gpu.unknown["processes"]


@pytest.mark.parametrize("kind", ["Compute", "Graphics"])
def test_process_lists_of_an_old_driver(driver: Script, reader: NvmlReader, kind: str) -> None:
    driver.gpu(0, total=GIB).process(0, pid=11, used=MIB, kind=kind.lower())
    driver.missing(f"nvmlDeviceGet{kind}RunningProcesses_v3").write()
    gpu = one(reader)
    assert [row.pid for row in gpu.processes] == [11]
    assert gpu.unknown == {}


def test_a_list_that_cannot_be_read_is_not_an_empty_list(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).fail("nvmlDeviceGetComputeRunningProcesses_v3", 0, 4).write()
    gpu = one(reader)
    assert gpu.processes == ()
    assert "permission" in gpu.unknown["processes"]


def test_gpus_come_and_go(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB, uuid="GPU-a").write()
    assert len(reader.read().gpus) == 1
    driver.gpu(1, total=GIB, uuid="GPU-b").write()
    clock.pass_(10.0)
    assert [gpu.uuid for gpu in reader.read().gpus] == ["GPU-a", "GPU-b"]
    driver.clear().gpu(0, total=GIB, uuid="GPU-b").write()
    clock.pass_(10.0)
    assert [gpu.uuid for gpu in reader.read().gpus if gpu.error is None] == ["GPU-b"]
    driver.clear().write()
    clock.pass_(10.0)
    assert reader.read().gpus == ()


def test_with_no_gpu_left_to_disturb_the_library_is_started_afresh_sooner(
    driver: Script, reader: NvmlReader, clock: Clock
) -> None:
    driver.gpu(0, total=GIB, error=15).write()
    before = driver.calls("nvmlInitWithFlags")
    for _ in range(26):
        reader.read()
        clock.pass_(1.0)
    assert driver.calls("nvmlInitWithFlags") - before >= 1 + 3


def test_a_lost_gpu_is_not_hammered(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB, error=15).gpu(1, total=GIB).write()
    before = driver.calls("nvmlInitWithFlags"), driver.calls("nvmlDeviceGetHandleByIndex_v2")
    for _ in range(60):
        reader.read()
        clock.pass_(1.0)
    assert driver.calls("nvmlInitWithFlags") - before[0] <= 4
    assert driver.calls("nvmlDeviceGetHandleByIndex_v2") - before[1] <= 45


MEMORY = ("total_bytes", "used_bytes", "free_bytes", "used_fraction")


@pytest.mark.parametrize("how", ["total 0", "not supported", "too old"])
def test_one_wrong_answer_is_read_again(driver: Script, reader: NvmlReader, clock: Clock, how: str) -> None:
    """As the first answer, and after good ones, which prove that the card supports the call."""
    odd = {"not supported": 3, "too old": 13}
    for before in range(2):
        if before:
            driver.clear().gpu(0, total=GIB, used=MIB, util=7).write()
            gpu = one(reader)
            assert (gpu.used_bytes, gpu.utilization_fraction, gpu.unknown) == (MIB, 0.07, {})
            clock.pass_(1.0)
        elif how != "total 0":
            continue  # as the first answer it is final
        driver.clear().gpu(0, total=GIB if how in odd else 0, util=7)
        for function in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates"):
            if how in odd:
                driver.fail(function, 0, odd[how])
        driver.write()
        gpu = one(reader)
        clock.pass_(1.0)
        assert (gpu.error, gpu.unified, band_of(gpu.used_fraction)) == (None, False, Band.UNKNOWN)
        reason = nvml_errors.words(odd[how]) if how in odd else "the driver reported 0 bytes of memory"
        assert {field: (getattr(gpu, field), gpu.unknown[field]) for field in MEMORY} == dict.fromkeys(MEMORY, (None, reason))
    driver.clear().gpu(0, total=GIB, used=2 * MIB, reserved=MIB, util=8).write()
    gpu = one(reader)
    assert (gpu.used_bytes, gpu.reserved_bytes, gpu.utilization_fraction, gpu.unknown) == (2 * MIB, MIB, 0.08, {})


@pytest.mark.parametrize(
    ("function", "field"),
    [("nvmlDeviceGetUUID", "uuid"), ("nvmlDeviceGetName", "name"), ("nvmlDeviceGetPciInfo_v3", "pci_bus_id")],
)
def test_the_identity_is_read_until_it_is_known(
    driver: Script, reader: NvmlReader, clock: Clock, function: str, field: str
) -> None:
    driver.gpu(0, total=GIB).fail(function, 0, 10).write()
    assert one(reader).unknown == {field: nvml_errors.words(10)}
    driver.clear().gpu(0, total=GIB).write()
    clock.pass_(5.0)
    gpu = one(reader)
    assert getattr(gpu, field)
    assert gpu.unknown == {}
    clock.pass_(5.0)
    before = driver.calls(function)
    one(reader)
    assert driver.calls(function) - before == (function == "nvmlDeviceGetUUID"), "only whether the GPUs have changed places"


def test_bytes_that_are_not_text_are_unknown(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.driver("550\udcff").gpu(0, total=GIB, used=MIB, name="Bad\udcff", uuid="GPU-\udcfe", bus="\udcfd").write()
    for _ in range(12):
        reading = reader.read()
        clock.pass_(1.0)
    (gpu,) = reading.gpus
    assert (reading.driver_version, reading.note) == (None, None)
    assert (gpu.uuid, gpu.name, gpu.pci_bus_id, gpu.used_bytes) == (None, None, None, MIB)
    assert gpu.unknown == dict.fromkeys(("uuid", "name", "pci_bus_id"), "the driver returned bytes that are not valid text")


def write(driver: Script, *names: str) -> None:
    """The driver lists GPUs with these names."""
    driver.clear()
    for index, name in enumerate(names):
        driver.gpu(index, total=GIB, uuid=f"GPU-{name}", name=name)
    driver.write()


def listed(reader: NvmlReader) -> list[tuple[int, str | None, str | None]]:
    """Index, name and error of each row. Rows that cannot be read have no values."""
    gpus = reader.read().gpus
    for gpu in gpus:
        if gpu.error is not None:
            assert gpu.total_bytes is gpu.visible_index is None
            assert (gpu.processes, band_of(gpu.used_fraction)) == ((), Band.UNKNOWN)
            assert gpu.unknown["total_bytes"]
    return [(gpu.index, gpu.name, gpu.error) for gpu in gpus]


def missing(place: int) -> str:
    return f"{nvml_errors.NOT_LISTED} (it was GPU {place})"


def test_a_gpu_that_the_driver_does_not_list_any_more_keeps_a_row(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    """The driver renumbers the other GPUs, and each row keeps its identity."""
    for names, rows in (
        ("ABC", [(0, "A", None), (1, "B", None), (2, "C", None)]),
        ("AB", [(0, "A", None), (1, "B", None), (2, "C", missing(2))]),
        ("B", [(0, "B", None), (1, "A", missing(0)), (2, "C", missing(2))]),
        ("CB", [(0, "C", None), (1, "B", None), (2, "A", missing(0))]),
        ("ABC", [(0, "A", None), (1, "B", None), (2, "C", None)]),
        ("BAC", [(0, "B", None), (1, "A", None), (2, "C", None)]),  # two change places
        ("ABC", [(0, "A", None), (1, "B", None), (2, "C", None)]),
        # A card was exchanged.
        ("ABX", [(0, "A", None), (1, "B", None), (2, "X", None), (3, "C", missing(2))]),
    ):
        write(driver, *names)
        assert listed(reader) == rows
        clock.pass_(10.0)


def test_a_missing_gpu_keeps_its_row_for_a_day(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    write(driver, "A", "B")
    reader.read()
    write(driver, "A")
    clock.pass_(10.0)
    reader.read()
    clock.pass_(MISSING_SECONDS - 1)
    assert len(listed(reader)) == 2
    clock.pass_(1.0)
    assert listed(reader) == [(0, "A", None)]


def test_without_any_gpu_there_is_a_note_and_missing_rows_return_with_the_others(
    driver: Script, reader: NvmlReader, clock: Clock
) -> None:
    write(driver, "A", "B")
    reader.read()
    driver.clear().init_error(9).gpu(0, total=GIB, error=1).gpu(1, total=GIB, error=1).write()
    for _ in range(4):
        clock.pass_(1.0)
        reading = reader.read()
    assert reading.gpus == ()
    assert "not loaded" in (reading.note or "")
    write(driver, "B")
    clock.pass_(10.0)
    assert listed(reader) == [(0, "B", None), (1, "A", missing(0))]


def test_an_unidentified_gpu_that_may_be_the_missing_one_has_one_row(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    write(driver, "A", "B", "C")
    reader.read()
    driver.clear().gpu(0, total=GIB, uuid="GPU-A", name="A").gpu(1, total=GIB, uuid="GPU-C", name="C", error=15).write()
    clock.pass_(10.0)
    assert listed(reader) == [(0, "A", None), (1, None, nvml_errors.words(15))]
    write(driver, "A", "C")
    clock.pass_(10.0)
    assert listed(reader) == [(0, "A", None), (1, "C", None), (2, "B", missing(1))]
