"""GPUs cut into MIG instances."""

from __future__ import annotations

import pytest

from memtop.supervisor.monitor.nvml import errors as nvml_errors
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.values import Band, band_of
from tests.monitor.conftest import GIB, MIB, Clock, eventually, one
from tests.nvml_double.double import Script


def cut(driver: Script) -> Script:
    """Instances at 1, 2 and 5: gaps before and between."""
    driver.clear().gpu(0, total=80 * GIB, used=20 * GIB, mig=1)
    driver.mig(0, 1, total=10 * GIB, used=9 * GIB, gi=7, ci=0, name="NVIDIA H100 MIG 1g.10gb")
    driver.mig(0, 2, total=20 * GIB, used=GIB, reserved=MIB, gi=3, ci=1, uuid="MIG-x")
    driver.mig(0, 5, total=10 * GIB, used=0, gi=9, ci=0)
    return driver


def test_instances_behind_gaps(driver: Script, reader: NvmlReader) -> None:
    cut(driver).process(0, pid=11, used=5 * GIB, mig=1).process(0, pid=12, used=MIB, mig=2).write()
    gpu = one(reader)
    assert [row.position for row in gpu.mig] == [1, 2, 5]
    first, second, _ = gpu.mig
    assert (first.name, first.gpu_instance, first.compute_instance) == ("1g.10gb", 7, 0)
    assert (first.total_bytes, first.used_bytes, band_of(first.used_fraction), first.error) == (
        10 * GIB,
        9 * GIB,
        Band.EDGE,
        None,
    )
    assert (second.uuid, second.reserved_bytes, second.unknown) == ("MIG-x", MIB, {})
    assert [(row.pid, row.mig_instance, row.used_bytes) for row in gpu.processes] == [(11, 1, 5 * GIB), (12, 2, MIB)]
    assert gpu.total_bytes == 80 * GIB, "the whole GPU's memory, where it may be read"
    assert gpu.details.mig_mode is True


def test_no_utilisation_is_read_or_reported(driver: Script, reader: NvmlReader) -> None:
    names = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetEncoderUtilization")
    before = [driver.calls(name) for name in names]
    cut(driver).process(0, pid=11, used=MIB, mig=1).write()
    gpu = one(reader)
    reason = "the driver reports no utilisation for MIG instances"
    assert gpu.utilization_fraction is gpu.memory_utilization_fraction is None
    assert gpu.unknown["utilization_fraction"] == gpu.unknown["memory_utilization_fraction"] == reason
    assert gpu.details.unknown["encoder_fraction"] == reason
    (row,) = gpu.processes
    assert row.sm_fraction is None
    assert row.unknown["sm_fraction"] == reason
    assert [driver.calls(name) for name in names] == before


def test_the_whole_gpu_needs_a_right_that_the_instances_do_not(driver: Script, reader: NvmlReader) -> None:
    cut(driver).fail("nvmlDeviceGetMemoryInfo_v2", 0, 4)
    driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", 0, 4).process(0, pid=11, used=MIB, mig=2).write()
    gpu = one(reader)
    assert gpu.error is None
    assert gpu.total_bytes is None
    assert gpu.unknown["total_bytes"] == nvml_errors.words(4)
    assert [row.used_bytes for row in gpu.mig] == [9 * GIB, GIB, 0]
    assert [row.pid for row in gpu.processes] == [11]


def test_an_instance_that_is_destroyed_goes_and_the_others_stay(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    cut(driver).write()
    one(reader)
    driver.clear().gpu(0, total=80 * GIB, mig=1).mig(0, 5, total=10 * GIB, used=MIB, gi=9, ci=0).write()
    clock.pass_(1.0)
    assert [row.position for row in one(reader).mig] == [5]
    driver.mig(0, 0, total=20 * GIB, gi=1, ci=0, uuid="MIG-new").write()
    clock.pass_(10.0)
    assert [row.uuid for row in one(reader).mig] == ["MIG-new", "MIG-00000000-5"]


def test_instances_are_enumerated_every_ten_seconds(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    cut(driver).write()
    before = driver.calls("nvmlDeviceGetMigDeviceHandleByIndex")
    for _ in range(20):
        one(reader)
        clock.pass_(1.0)
    assert driver.calls("nvmlDeviceGetMigDeviceHandleByIndex") - before == 2 * 7


def test_mig_that_is_switched_off_and_on(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    cut(driver).fail("nvmlDeviceGetFanSpeed", 0, 3).write()
    gpu = one(reader)
    assert gpu.utilization_fraction is gpu.details.fan_fraction is None
    driver.clear().gpu(0, total=80 * GIB, mig=0, util=30, fan=20).write()
    clock.pass_(10.0)
    gpu = one(reader)
    assert (gpu.mig, gpu.utilization_fraction, gpu.unknown) == ((), 0.3, {})
    assert gpu.details.fan_fraction == 0.2, "values that MIG did not support are read again"
    cut(driver).write()
    clock.pass_(10.0)
    gpu = one(reader)
    assert len(gpu.mig) == 3
    assert gpu.utilization_fraction is None


@pytest.mark.parametrize("code", [3, 4, 999])
def test_an_instance_whose_memory_cannot_be_read(driver: Script, reader: NvmlReader, code: int) -> None:
    cut(driver).fail("nvmlDeviceGetMemoryInfo_v2", 0, code, mig=2).write()
    gpu = one(reader)
    assert gpu.error is None
    assert [row.position for row in gpu.mig] == [1, 2, 5]
    bad = gpu.mig[1]
    assert bad.total_bytes is bad.used_fraction is None
    assert bad.unknown["total_bytes"]
    assert (bad.error == nvml_errors.words(code)) == (code == 999)


def test_the_change_is_announced(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    """With the driver's event nothing waits for the ten seconds."""
    driver.gpu(0, total=80 * GIB, mig=0).write()
    assert one(reader).mig == ()
    cut(driver).event(0, 0x100).write()
    gpu = eventually(lambda: one(reader), lambda gpu: len(gpu.mig) == 3)
    assert gpu.troubles == (), "it was intended and is no trouble"


COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses_v3"


def test_the_gpus_list_is_used_if_no_instance_has_a_process_list(driver: Script, reader: NvmlReader) -> None:
    cut(driver).process(0, pid=11, used=MIB).process(0, pid=12, used=GIB)
    for position in (1, 2, 5):
        driver.fail(COMPUTE, 0, 3, mig=position)
    driver.write()
    gpu = one(reader)
    assert [(row.pid, row.used_bytes, row.mig_instance) for row in gpu.processes] == [(12, GIB, None), (11, MIB, None)]
    assert "processes" not in gpu.unknown


def test_one_instance_with_a_process_list_is_enough_to_use_the_instances(driver: Script, reader: NvmlReader) -> None:
    cut(driver).process(0, pid=11, used=MIB).process(0, pid=12, used=GIB, mig=2)
    driver.fail(COMPUTE, 0, 4, mig=1).fail(COMPUTE, 0, 4, mig=5).write()
    gpu = one(reader)
    assert [(row.pid, row.mig_instance) for row in gpu.processes] == [(12, 2)]
    assert gpu.unknown["processes"] == nvml_errors.words(4)


def test_rows_of_the_gpus_list_belong_to_the_instance_that_they_name(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=80 * GIB, mig=1)
    for position, compute in ((4, 0), (5, 1)):
        driver.mig(0, position, total=10 * GIB, gi=7, ci=compute)
        driver.fail(COMPUTE, 0, 3, mig=position).fail(GRAPHICS, 0, 3, mig=position)
    driver.process(0, pid=1, used=MIB, mig=5).process(0, pid=2, used=MIB)
    driver.process(0, pid=3, used=MIB, mig=4, kind="graphics").write()
    found = {row.pid: (row.mig_instance, row.kind) for row in one(reader).processes}
    assert found == {1: (5, "compute"), 2: (None, "compute"), 3: (4, "graphics")}


def test_no_process_list_can_be_read(driver: Script, reader: NvmlReader) -> None:
    cut(driver).fail(COMPUTE, -1, 4).write()
    gpu = one(reader)
    assert gpu.processes == ()
    assert gpu.unknown["processes"] == nvml_errors.words(4)


def test_a_gpu_that_is_cut_while_its_memory_may_not_be_read_keeps_the_reason(
    driver: Script, reader: NvmlReader, clock: Clock
) -> None:
    driver.gpu(0, total=80 * GIB, mig=0).fail("nvmlDeviceGetMemoryInfo_v2", 0, 4).write()
    one(reader)
    cut(driver).fail("nvmlDeviceGetMemoryInfo_v2", 0, 4).write()
    clock.pass_(11.0)
    gpu = one(reader)
    assert gpu.mig
    assert gpu.unknown["total_bytes"] == nvml_errors.words(4)


def test_bands_of_instances_have_hysteresis_and_destroyed_instances_are_forgotten(
    driver: Script, reader: NvmlReader, clock: Clock
) -> None:
    watcher = Sampler(nvml=reader)

    def band_at(percent: float, uuid: str) -> Band:
        driver.clear().gpu(0, total=80 * GIB, mig=1).mig(
            0, 0, total=1000 * MIB, used=int(percent * 10) * MIB, gi=1, uuid=uuid
        ).write()
        clock.pass_(11.0)
        return watcher.sample().gpus[0].mig[0].band

    bands = [band_at(percent, "MIG-a") for percent in (84, 85, 84, 85, 87)]
    assert bands == [Band.SAFE, Band.SAFE, Band.SAFE, Band.SAFE, Band.EDGE]
    assert band_at(84.5, "MIG-a") == Band.EDGE, "just below the edge: it stays"
    assert band_at(50, "MIG-b") == Band.SAFE
    assert band_at(84.5, "MIG-a") == Band.SAFE, "the destroyed instance was forgotten"


def test_utilisation_is_unknown_where_the_instances_refuse_their_lists(driver: Script, reader: NvmlReader) -> None:
    cut(driver).process(0, pid=11, used=MIB)
    for position in (1, 2, 5):
        driver.fail(COMPUTE, 0, 4, mig=position)
    driver.write()
    (row,) = one(reader).processes
    assert (row.mig_instance, row.sm_fraction) == (None, None), "of no instance that is known, and not idle for that"
    assert row.unknown["sm_fraction"] == "the driver reports no utilisation for MIG instances"


@pytest.mark.parametrize("code", [3, 4, 13, 999])
def test_an_unreadable_slot_hides_no_other_instance(driver: Script, reader: NvmlReader, clock: Clock, code: int) -> None:
    cut(driver).fail("nvmlDeviceGetMigDeviceHandleByIndex", 0, code).write()
    gpu = one(reader)
    assert (gpu.mig, gpu.unknown["mig"]) == ((), nvml_errors.words(code))
    cut(driver).write()
    clock.pass_(10.0)
    gpu = one(reader)
    assert [row.position for row in gpu.mig] == [1, 2, 5]
    assert "mig" not in gpu.unknown


def test_the_number_of_places_cannot_be_read(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    cut(driver).fail("nvmlDeviceGetMaxMigDeviceCount", 0, 10).write()
    assert one(reader).unknown["mig"] == nvml_errors.words(10)
    cut(driver).write()
    clock.pass_(10.0)
    gpu = one(reader)
    assert (len(gpu.mig), "mig" in gpu.unknown) == (3, False)
