"""The slow values of a GPU: every field, its reasons, and which ones are read only once."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml
import pytest

from memtop.supervisor.monitor.nvml import errors as nvml_errors
from memtop.supervisor.monitor.nvml.details import PCIE_FIELDS, FieldReader, recovery_words, throttle_words
from memtop.supervisor.monitor.nvml.query import NOT_REPORTED, Query
from memtop.supervisor.monitor.nvml.reader import NvmlReader
from memtop.supervisor.monitor.values import GpuDetails
from tests.monitor.conftest import GIB, Clock, one
from tests.nvml_double.double import Script

ALL_LINKS = 2**32 - 1

FIXED = {
    "slowdown_temperature_celsius": "nvmlDeviceGetTemperatureThreshold",
    "sm_clock_limit_megahertz": "nvmlDeviceGetMaxClockInfo",
    "memory_clock_limit_megahertz": "nvmlDeviceGetMaxClockInfo",
    "pcie_generation_limit": "nvmlDeviceGetMaxPcieLinkGeneration",
    "pcie_width_limit": "nvmlDeviceGetMaxPcieLinkWidth",
    "compute_capability": "nvmlDeviceGetCudaComputeCapability",
    "device_minor": "nvmlDeviceGetMinorNumber",
}
SENSORS = (
    "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetBAR1MemoryInfo",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetDisplayMode",
    "nvmlDeviceGetDisplayActive",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetFieldValues",
    "nvmlGpmQueryDeviceSupport",
    "nvmlDeviceGetMigMode",
)

EVERY_VALUE: dict[str, Any] = {
    "memory_temperature_celsius": 71.0,
    "slowdown_temperature_celsius": 89.0,
    "fan_fraction": 0.42,
    "sm_clock_megahertz": 1755,
    "sm_clock_limit_megahertz": 1980,
    "memory_clock_megahertz": 2500,
    "memory_clock_limit_megahertz": 2619,
    "performance_state": "P0",
    "throttle_reasons": ("power cap: the card draws as much power as its limit allows",),
    "ecc_mode": "on",
    "ecc_corrected_errors": 7,
    "ecc_uncorrected_errors": 2,
    "remapped_rows_correctable": 3,
    "remapped_rows_uncorrectable": 1,
    "remapping_pending": True,
    "remapping_failed": False,
    "retired_pages": 5,
    "recovery_action": recovery_words(1),
    "pcie_generation": 4,
    "pcie_generation_limit": 5,
    "pcie_width": 8,
    "pcie_width_limit": 16,
    "nvlink_links": 3,
    "nvlink_sent_bytes_per_second": 1024.0 * 1000 / 5,
    "nvlink_received_bytes_per_second": 1024.0 * 500 / 5,
    "bar1_total_bytes": 128 * GIB,
    "bar1_used_bytes": GIB,
    "encoder_fraction": 0.11,
    "decoder_fraction": 0.12,
    "energy_joules": 5000.25,
    "persistence_mode": True,
    "compute_mode": "exclusive process",
    "display_active": True,
    "display_connected": True,
    "mig_mode": False,
    "compute_capability": "9.0",
    "device_minor": 4,
    "sm_active_fraction": 0.61,
    "tensor_active_fraction": 0.27,
}


def rich(driver: Script, sent: int, received: int) -> Script:
    driver.clear().gpu(
        0, total=GIB, slowdown=89, fan=42, sm_clock=1755, sm_limit=1980, memory_clock=2500, memory_limit=2619, pstate=0,
        throttle=0x4 | 0x1, ecc=1, ecc_corrected=7, ecc_uncorrected=2, remapped_cor=3, remapped_unc=1, remap_pending=1,
        pcie_gen=4, pcie_gen_limit=5, pcie_width=8, pcie_width_limit=16, bar1_total=128 * GIB, bar1_used=GIB, encoder=11,
        decoder=12, energy=5000250, persistence=1, compute_mode=3, display_active=1, display_connected=1, mig=0, major=9,
        minor=0, gpm=1, sm_active=61, tensor_active=27, device_minor=4,
    )  # fmt: skip
    driver.field(0, 82, 71).field(0, 230, 1).field(0, 29, 2).field(0, 30, 3).field(0, 91, 4)
    for link in range(4):
        driver.field(0, 165, int(link != 2), scope=link)
    driver.field(0, 138, sent, scope=ALL_LINKS).field(0, 139, received, scope=ALL_LINKS)
    return driver.write()


def test_every_value(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    for sent, received in ((10, 20), (2**33, 20), (2**33 + 1000, 520)):
        rich(driver, sent, received)
        details = one(reader).details
        clock.pass_(5.0)
    found = {field: getattr(details, field) for field in details.__struct_fields__ if field != "unknown"}
    assert found == EVERY_VALUE | dict.fromkeys(PCIE_FIELDS)
    assert details.unknown == dict.fromkeys(PCIE_FIELDS, "read only while GPU details are displayed")


def missing(details: GpuDetails) -> set[str]:
    return {field for field in details.__struct_fields__ if getattr(details, field) is None}


@pytest.mark.parametrize("code", [3, 4, 13, 27, 999])
def test_every_value_that_the_driver_refuses_has_a_reason(driver: Script, reader: NvmlReader, code: int) -> None:
    driver.gpu(0, total=GIB)
    for call in (*FIXED.values(), *SENSORS):
        driver.fail(call, 0, code)
    driver.write()
    gpu = one(reader)
    assert gpu.error is None
    assert gpu.total_bytes == GIB
    assert missing(gpu.details) == set(GpuDetails.__struct_fields__) - {"unknown"}
    words = {field: reason for field, reason in gpu.details.unknown.items() if field not in PCIE_FIELDS}
    assert set(words) == missing(gpu.details) - set(PCIE_FIELDS)
    assert set(words.values()) == {nvml_errors.words(code)}


def test_unsupported_values_are_not_read_again_but_failed_ones_are(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB).fail("nvmlDeviceGetFanSpeed", 0, 3).missing("nvmlDeviceGetEccMode")
    driver.fail("nvmlDeviceGetPerformanceState", 0, 999).fail("nvmlDeviceGetUtilizationRates", 0, 3).write()
    names = ("nvmlDeviceGetFanSpeed", "nvmlDeviceGetEccMode", "nvmlDeviceGetPerformanceState", "nvmlDeviceGetUtilizationRates")
    before = [driver.calls(name) for name in names]
    for _ in range(20):
        gpu = one(reader)
        clock.pass_(1.0)
    assert [driver.calls(name) - then for name, then in zip(names, before, strict=True)] == [1, 1, 4, 1]
    assert gpu.details.unknown["fan_fraction"] == nvml_errors.words(3), "the reason stays"
    assert gpu.unknown["utilization_fraction"] == nvml_errors.words(3)


def test_fields_fail_each_for_themselves(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB).field(0, 82, 60).field(0, 230, status=2).field(0, 29, 1).field(0, 30, status=999).write()
    details = one(reader).details
    assert details.memory_temperature_celsius == 60.0
    assert details.recovery_action is None
    assert details.unknown["recovery_action"] == nvml_errors.words(13), "a number that the driver has not heard of"
    assert details.retired_pages is None
    assert details.unknown["retired_pages"] == nvml_errors.words(999)
    driver.clear().gpu(0, total=GIB).field(0, 82, 61).field(0, 230, 2).field(0, 29, 1).field(0, 30, 0).write()
    clock.pass_(5.0)
    details = one(reader).details
    assert (details.memory_temperature_celsius, details.retired_pages) == (61.0, 1)
    assert details.recovery_action is None, "this driver does not know it: not read again"


def test_a_healthy_card_needs_nothing(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).field(0, 230, 0).write()
    details = one(reader).details
    assert details.recovery_action is None
    assert "recovery_action" not in details.unknown


@pytest.mark.parametrize("action", range(9))
def test_recovery_actions_have_messages(action: int) -> None:
    assert (recovery_words(action) is None) == (action == 0)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (0, []),
        (0x1, []),
        (0x100, []),
        (0x8 | 0x40, ["too hot: the hardware"]),
        (0x8 | 0x80, ["power brake"]),
        (0x8, ["hardware slowdown"]),
        (0x4 | 0x20 | 0x10 | 0x2, ["power cap", "too hot: the driver", "sync boost", "clocks fixed by"]),
    ],
)
def test_throttle_words(mask: int, expected: list[str]) -> None:
    words = throttle_words(mask)
    assert len(words) == len(expected)
    assert all(word.startswith(start) for word, start in zip(words, expected, strict=True))


def test_an_older_driver_has_the_older_name(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB, throttle=0x20).missing("nvmlDeviceGetCurrentClocksEventReasons").write()
    assert one(reader).details.throttle_reasons == ("too hot: the driver holds the clocks down",)


@pytest.mark.skipif(not hasattr(pynvml, "nvmlDeviceGetTemperatureV"), reason="these bindings have only the older name")
def test_a_newer_driver_may_have_only_the_newer_name(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB, temp=66).missing("nvmlDeviceGetTemperature").write()
    assert one(reader).temperature_celsius == 66.0


def test_links_of_a_driver_without_their_state_as_field(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=GIB, links=4, links_up=2).field(0, 91, 4).write()
    assert "5 s later" in one(reader).details.unknown["nvlink_links"]
    clock.pass_(5.0)
    details = one(reader).details
    assert details.nvlink_links == 2
    assert details.nvlink_sent_bytes_per_second is None
    assert details.unknown["nvlink_sent_bytes_per_second"] == nvml_errors.words(3)


def test_counters_that_begin_anew_give_no_rate(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    for sent in (10, 5000, 3):
        rich(driver, sent, 7)
        details = one(reader).details
        clock.pass_(5.0)
    assert details.nvlink_sent_bytes_per_second is None
    assert "were reset" in details.unknown["nvlink_sent_bytes_per_second"]


def test_without_nvlink(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).field(0, 91, 0).write()
    details = one(reader).details
    assert details.nvlink_links is None
    assert details.unknown["nvlink_links"] == "this GPU has no NVLink"


@pytest.mark.parametrize(
    ("field", "script"),
    [("encoder_fraction", {"encoder": 101}), ("performance_state", {"pstate": 32}), ("compute_mode", {"compute_mode": 9})],
)
def test_values_out_of_range_are_unknown(driver: Script, reader: NvmlReader, field: str, script: dict[str, int | str]) -> None:
    driver.gpu(0, total=GIB, **script).write()
    details = one(reader).details
    assert getattr(details, field) is None
    assert details.unknown[field]


def test_gpm_is_freed_and_begins_anew(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    names = ("nvmlGpmSampleAlloc", "nvmlGpmSampleFree")
    before = [driver.calls(name) for name in names]
    driver.gpu(0, total=GIB, gpm=1, sm_active=50).write()
    assert "two readings" in one(reader).details.unknown["sm_active_fraction"]
    clock.pass_(5.0)
    assert one(reader).details.sm_active_fraction == 0.5
    reader.refresh()
    assert one(reader).details.sm_active_fraction is None
    reader.close()
    assert [driver.calls(name) - then for name, then in zip(names, before, strict=True)] == [4, 4]


@pytest.mark.parametrize(
    ("major", "words"),
    [
        (8, "only Hopper and newer GPUs report it"),
        (9, "although this architecture has it"),
        (None, "only Hopper and newer GPUs have it"),
    ],
)
def test_gpm_that_is_not_offered(driver: Script, reader: NvmlReader, clock: Clock, major: int | None, words: str) -> None:
    driver.gpu(0, total=GIB, major=major or 9)
    if major is None:
        driver.fail("nvmlDeviceGetCudaComputeCapability", 0, 3)
    driver.write()
    before = driver.calls("nvmlGpmQueryDeviceSupport")
    for _ in range(3):
        details = one(reader).details
        clock.pass_(5.0)
    assert details.sm_active_fraction is None
    assert words in details.unknown["sm_active_fraction"]
    assert ("only Hopper and newer" in details.unknown["sm_active_fraction"]) == (major != 9)
    assert driver.calls("nvmlGpmQueryDeviceSupport") - before == 1


def test_cuda_version(driver: Script, reader: NvmlReader) -> None:
    driver.gpu(0, total=GIB).cuda(13010).write()
    assert reader.read().cuda_version == "13.1"


def test_call_budget_of_eight_gpus(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    """Ten seconds: memory and utilisation each tick, lists every 2 s, sensors every 5 s, fixed
    values once, PCIe never."""
    for index in range(8):
        driver.gpu(index, total=GIB, gpm=1).field(index, 82, 60)
        for pid in range(101, 109):
            driver.process(index, pid=pid, used=1, sm=5)
    driver.write()
    every_tick = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates")
    lists = tuple(f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute"))
    sensors = ("nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetFanSpeed", "nvmlDeviceGetFieldValues")
    once = ("nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetMinorNumber")
    expected = dict.fromkeys(every_tick, 80) | dict.fromkeys((*lists, "nvmlDeviceGetProcessUtilization"), 40)
    expected |= dict.fromkeys(sensors, 16) | dict.fromkeys(once, 8) | {"nvmlDeviceGetPcieThroughput": 0}
    expected |= {"nvmlDeviceGetMaxClockInfo": 16, "nvmlDeviceGetMigMode": 8, "nvmlInitWithFlags": 1}
    before = {name: driver.calls(name) for name in expected}
    for _ in range(10):
        reader.read()
        clock.pass_(1.0)
    assert {name: driver.calls(name) - before[name] for name in expected} == expected


def test_half_of_a_sum_is_no_sum(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    """The driver has one count and lacks the other. Likewise, one link of several cannot be
    read."""
    driver.gpu(0, total=1).field(0, 29, 3).field(0, 91, 2).field(0, 165, 1).field(0, 165, 1, scope=1, status=999).write()
    for _ in range(4):
        details = reader.read().gpus[0].details
        clock.pass_(5.0)
        assert details.retired_pages is None
        assert details.unknown["retired_pages"] == nvml_errors.words(3), "the reason stays when it is no longer read"
    assert details.nvlink_links is None
    assert details.unknown["nvlink_links"] == nvml_errors.words(999)


def test_one_direction_of_nvlink_that_cannot_be_read(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    driver.gpu(0, total=1).field(0, 91, 1).field(0, 165, 1).field(0, 138, 5, scope=2**32 - 1)
    driver.field(0, 139, status=10, scope=2**32 - 1).write()
    for _ in range(3):
        details = reader.read().gpus[0].details
        clock.pass_(5.0)
    assert details.nvlink_links == 1
    for field in ("nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second"):
        assert getattr(details, field) is None
        assert details.unknown[field] == nvml_errors.words(10)


def test_bindings_that_do_not_know_the_newest_number_type(monkeypatch: pytest.MonkeyPatch) -> None:
    class Union(ctypes.Union):
        _fields_ = (("ullVal", ctypes.c_ulonglong), ("uiVal", ctypes.c_uint))

    class Answer(ctypes.Structure):
        _fields_ = (("nvmlReturn", ctypes.c_uint), ("valueType", ctypes.c_uint), ("value", Union))

    def answer(handle: object, keys: list[tuple[int, int]]) -> list[Answer]:
        number, unknown = Answer(0, 6), Answer(0, 1)
        number.value.ullVal, unknown.value.ullVal = 0xFFFF_0007, 2**32 - 1
        return [number if key == (82, 0) else unknown for key in keys]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", answer)
    query = Query(None)
    assert FieldReader(query).read(0.0) == {"memory_temperature_celsius": 7.0}
    assert query.reasons()["recovery_action"] == NOT_REPORTED, "the largest number stands for unknown"


@pytest.mark.parametrize(("field", "call"), FIXED.items())
def test_a_fixed_value_that_failed_once_is_read_again_until_it_is_known(
    driver: Script, reader: NvmlReader, clock: Clock, field: str, call: str
) -> None:
    driver.gpu(0, total=GIB).fail(call, 0, 10).write()
    details = one(reader).details
    assert getattr(details, field) is None
    assert details.unknown[field] == nvml_errors.words(10)
    driver.clear().gpu(0, total=GIB).write()
    clock.pass_(5.0)
    details = one(reader).details
    assert getattr(details, field) is not None
    assert field not in details.unknown
    calls = driver.calls(call)
    clock.pass_(5.0)
    one(reader)
    assert driver.calls(call) == calls


def test_a_sensor_that_was_read_before_is_read_again(driver: Script, reader: NvmlReader, clock: Clock) -> None:
    """The driver says "not supported" twice about a value that it has reported before: a sensor, a
    numbered field, and GPM's samples."""
    for _ in range(2):
        driver.clear().gpu(0, total=GIB, fan=40, gpm=1).field(0, 82, 70).write()
        for _ in range(2):
            details = one(reader).details
            clock.pass_(5.0)
        found = details.fan_fraction, details.memory_temperature_celsius, details.sm_active_fraction
        assert found == (0.4, 70.0, 0.6)
        driver.clear().gpu(0, total=GIB, gpm=0).fail("nvmlDeviceGetFanSpeed", 0, 3).write()
        details = one(reader).details
        clock.pass_(5.0)
        for field in ("fan_fraction", "memory_temperature_celsius", "sm_active_fraction"):
            assert getattr(details, field) is None
            assert details.unknown[field] == nvml_errors.words(3)
