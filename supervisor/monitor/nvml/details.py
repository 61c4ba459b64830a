"""Reads what changes slowly or never: temperatures, clocks, errors, PCIe, NVLink.

One table entry for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.query import ALL_ONES, NOT_REPORTED, GpuGone, NoValue, Query
from memtop.supervisor.monitor.nvml.rates import PCIE_NOT_WANTED, Gpm
from memtop.supervisor.monitor.values import GpuDetails

PCIE_FIELDS = ("pcie_sent_bytes_per_second", "pcie_received_bytes_per_second")
NO_MIG_UTILIZATION = "the driver reports no utilisation for MIG instances"

_UNKNOWN_STATE = 32  # NVML_PSTATE_UNKNOWN
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}

_HW_SLOWDOWN = 0x8
_HW_CAUSES = 0x40 | 0x80
_THROTTLE_WORDS = (
    (0x4, "power cap: the card draws as much power as its limit allows"),
    (0x40, "too hot: the hardware has cut the clocks"),
    (0x20, "too hot: the driver holds the clocks down"),
    (0x80, "power brake: the machine's power supply asked the card to slow down"),
    (_HW_SLOWDOWN, "hardware slowdown: heat or power"),
    (0x10, "sync boost: another GPU of the group is slower"),
    (0x2, "clocks fixed by the administrator (application clocks)"),
)


class Detail(NamedTuple):
    """Fields of GpuDetails, the functions that return them (best first) with their arguments, and
    the conversion."""

    fields: tuple[str, ...]
    call: tuple[str, ...]
    arguments: tuple[Any, ...] = ()
    convert: Callable[[Any], Any] = int


def percent(value: Any) -> float:
    """0-100 as a fraction.

    Raises NoValue for larger numbers. In NVML's pairs the second value is the sampling period.
    """
    number = value[0] if isinstance(value, list) else value
    if number > 100:
        raise NoValue(f"the driver reported {number} %")
    return float(number) / 100


def _fan(value: int) -> float:
    return value / 100  # may exceed 100 %: it is relative to the fan's rated speed


def _state(value: int) -> str:
    if value == _UNKNOWN_STATE:
        raise NoValue("the driver does not know the performance state now")
    return f"P{value}"


def throttle_words(mask: int) -> tuple[str, ...]:
    """Why a busy card's clocks are reduced.

    An idle card's low clocks and a display's setting do not count.
    """
    if mask & _HW_CAUSES:
        mask &= ~_HW_SLOWDOWN  # the general bit is set in addition to the exact one
    return tuple(words for bit, words in _THROTTLE_WORDS if mask & bit)


def _mode(value: int) -> str:
    if value not in _COMPUTE_MODES:
        raise NoValue(f"the driver reported compute mode {value}, which memtop does not know")
    return _COMPUTE_MODES[value]


def _first_on(value: Any) -> str:
    return "on" if value[0] else "off"


_FIXED = (
    Detail(("slowdown_temperature_celsius",), ("nvmlDeviceGetTemperatureThreshold",), (1,), float),
    Detail(("sm_clock_limit_megahertz",), ("nvmlDeviceGetMaxClockInfo",), (pynvml.NVML_CLOCK_SM,)),
    Detail(("memory_clock_limit_megahertz",), ("nvmlDeviceGetMaxClockInfo",), (pynvml.NVML_CLOCK_MEM,)),
    Detail(("pcie_generation_limit",), ("nvmlDeviceGetMaxPcieLinkGeneration",)),
    Detail(("pcie_width_limit",), ("nvmlDeviceGetMaxPcieLinkWidth",)),
    Detail(("compute_capability",), ("nvmlDeviceGetCudaComputeCapability",), (), lambda pair: f"{pair[0]}.{pair[1]}"),
    Detail(("device_minor",), ("nvmlDeviceGetMinorNumber",)),
)
_ECC = "nvmlDeviceGetTotalEccErrors"
_VOLATILE = pynvml.NVML_VOLATILE_ECC
_SENSORS = (
    Detail(("fan_fraction",), ("nvmlDeviceGetFanSpeed",), (), _fan),
    Detail(("sm_clock_megahertz",), ("nvmlDeviceGetClockInfo",), (pynvml.NVML_CLOCK_SM,)),
    Detail(("memory_clock_megahertz",), ("nvmlDeviceGetClockInfo",), (pynvml.NVML_CLOCK_MEM,)),
    Detail(("performance_state",), ("nvmlDeviceGetPerformanceState",), (), _state),
    Detail(
        ("throttle_reasons",),
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        (),
        throttle_words,
    ),
    Detail(("ecc_mode",), ("nvmlDeviceGetEccMode",), (), _first_on),
    Detail(("ecc_corrected_errors",), (_ECC,), (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, _VOLATILE)),
    Detail(("ecc_uncorrected_errors",), (_ECC,), (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, _VOLATILE)),
    Detail(
        ("remapped_rows_correctable", "remapped_rows_uncorrectable", "remapping_pending", "remapping_failed"),
        ("nvmlDeviceGetRemappedRows",),
        (),
        lambda rows: (rows[0], rows[1], bool(rows[2]), bool(rows[3])),
    ),
    Detail(("pcie_generation",), ("nvmlDeviceGetCurrPcieLinkGeneration",)),
    Detail(("pcie_width",), ("nvmlDeviceGetCurrPcieLinkWidth",)),
    Detail(
        ("bar1_total_bytes", "bar1_used_bytes"),
        ("nvmlDeviceGetBAR1MemoryInfo",),
        (),
        lambda bar1: (bar1.bar1Total, bar1.bar1Used),
    ),
    Detail(("energy_joules",), ("nvmlDeviceGetTotalEnergyConsumption",), (), lambda millijoules: millijoules / 1000),
    Detail(("persistence_mode",), ("nvmlDeviceGetPersistenceMode",), (), bool),
    Detail(("compute_mode",), ("nvmlDeviceGetComputeMode",), (), _mode),
    Detail(("display_connected",), ("nvmlDeviceGetDisplayMode",), (), bool),
    Detail(("display_active",), ("nvmlDeviceGetDisplayActive",), (), bool),
)
_CODECS = (
    Detail(("encoder_fraction",), ("nvmlDeviceGetEncoderUtilization",), (), percent),
    Detail(("decoder_fraction",), ("nvmlDeviceGetDecoderUtilization",), (), percent),
)


_MEMORY_TEMPERATURE = 82
_RETIRED_SINGLE_BIT, _RETIRED_DOUBLE_BIT = 29, 30
_LINK_COUNT, _LINK_STATE = 91, 165
_LINK_SENT, _LINK_RECEIVED = 138, 139  # counters of data in KiB, without protocol overhead
RECOVERY_ACTION = 230
_ALL_LINKS = 2**32 - 1  # the scope that asks for the sum over all links

_LINK_RATES = ("nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second")
_LINK_FIELDS = ("nvlink_links", *_LINK_RATES)
_RECOVERY_WORDS = {
    0: None,
    1: "reset the GPU: end its processes, then nvidia-smi --gpu-reset",
    2: "reboot the machine",
    3: "drain: let peer-to-peer work end, and start none",
    4: "drain and reset: let all work end, then nvidia-smi --gpu-reset",
    5: "recover the IMEX domain (the group of machines connected by NVLink)",
    6: "reset the bus of the GPU",
    7: "reboot the machine",
}
# by NVML's value type
_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

Key = tuple[int, int]


def recovery_words(action: int) -> str | None:
    """What the driver recommends for the card. None if the card needs nothing."""
    return _RECOVERY_WORDS.get(action, f"recovery action {action}, which memtop does not know: see nvidia-smi -q")


_SINGLE: dict[Key, tuple[str, Callable[[Any], Any]]] = {
    (_MEMORY_TEMPERATURE, 0): ("memory_temperature_celsius", float),
    (RECOVERY_ACTION, 0): ("recovery_action", recovery_words),
}


class FieldReader:
    """Reads numbered fields of one handle in one call: HBM temperature, retired pages, recovery
    action, NVLink.

    A field that the driver does not support is not requested again.
    """

    def __init__(self, query: Query) -> None:
        self._query = query
        self._wanted: list[Key] = [*_SINGLE, (_RETIRED_SINGLE_BIT, 0), (_RETIRED_DOUBLE_BIT, 0), (_LINK_COUNT, 0)]
        self._dropped: dict[Key, str] = {}
        """Why a field is not requested any more."""
        self._reported: set[Key] = set()
        self._links: int | None = None
        self._before: tuple[float, int, int] | None = None

    def read(self, now: float) -> dict[str, Any]:
        """Values by field name of GpuDetails. `now` is monotonic seconds. Raises GpuGone."""
        got = self._batch()
        values: dict[str, Any] = {}
        for key, (field, convert) in _SINGLE.items():
            if key in got:
                values[field] = convert(got[key])
        retired = [got.get((number, 0)) for number in (_RETIRED_SINGLE_BIT, _RETIRED_DOUBLE_BIT)]
        if None not in retired:
            values["retired_pages"] = sum(retired)
        return values | self._nvlink(now, got)

    def _batch(self) -> dict[Key, Any]:
        if not self._wanted:
            return {}
        answers = self._query.ask("the driver's fields", "nvmlDeviceGetFieldValues", self._wanted)
        if answers is None:
            # The whole call failed: its reason applies to every field that it would have returned.
            reason = self._query.reasons()["the driver's fields"]
            self._query.clear(("the driver's fields",))
            self._query.note((*(_field_of(key) for key in self._wanted),), reason)
            if self._query.is_unsupported("the driver's fields"):
                self._wanted = []
            return {}
        got, left = {}, []
        self._query.clear(tuple({_field_of(key) for key in self._wanted}))
        for key, reason in self._dropped.items():
            self._query.note((_field_of(key),), reason)  # several fields may make up one value
        for key, answer in zip(self._wanted, answers, strict=True):
            code = answer.nvmlReturn
            if code in codes.GPU_GONE:
                raise GpuGone(code)
            # A driver that does not know a field number returns "invalid argument".
            code = codes.FUNCTION_NOT_FOUND if code == codes.INVALID_ARGUMENT else code
            if code in codes.NEVER_AGAIN and key not in self._reported:
                self._dropped[key] = codes.words(code)
            else:
                left.append(key)
            value = None if code else _value_of(answer)
            if value is None:
                self._query.note((_field_of(key),), codes.words(code) if code else NOT_REPORTED)
            else:
                got[key] = value
        self._reported.update(got)
        self._wanted = left
        return got

    def _nvlink(self, now: float, got: dict[Key, Any]) -> dict[str, Any]:
        if self._links is None:
            self._find_links(got)
        if not self._links:
            return {}
        states = [got.get((_LINK_STATE, link)) for link in range(self._links)]
        values: dict[str, Any] = self._states_one_by_one() if None in states else {"nvlink_links": sum(map(bool, states))}
        sent, received = got.get((_LINK_SENT, _ALL_LINKS)), got.get((_LINK_RECEIVED, _ALL_LINKS))
        if sent is None or received is None:
            self._before = None
            reasons = self._query.reasons()
            # Both rates are reported or none: one that could be read gets the reason of the other.
            self._query.note(_LINK_RATES, next(reasons[field] for field in _LINK_RATES if field in reasons))
            return values
        before, self._before = self._before, (now, sent, received)
        if before is None or now <= before[0]:
            self._query.note(_LINK_RATES, "the rate needs two readings, 5 s apart")
        elif sent < before[1] or received < before[2]:
            self._query.note(_LINK_RATES, "the driver's counters were reset")
        else:
            self._query.clear(_LINK_RATES)
            rates = ((now_ - then) * 1024 / (now - before[0]) for now_, then in ((sent, before[1]), (received, before[2])))
            values.update(zip(_LINK_RATES, rates, strict=True))
        return values

    def _find_links(self, got: dict[Key, Any]) -> None:
        count = got.get((_LINK_COUNT, 0))
        if count is None:
            if (_LINK_COUNT, 0) not in self._wanted:
                self._links = 0
            self._query.note(_LINK_FIELDS, self._query.reasons()["nvlink_links"])
            return
        self._links = min(int(count), pynvml.NVML_NVLINK_MAX_LINKS)
        self._wanted.remove((_LINK_COUNT, 0))
        if not self._links:
            self._query.note(_LINK_FIELDS, "this GPU has no NVLink")
            return
        self._wanted += [(_LINK_STATE, link) for link in range(self._links)]
        self._wanted += [(_LINK_SENT, _ALL_LINKS), (_LINK_RECEIVED, _ALL_LINKS)]
        self._query.note(_LINK_FIELDS, "the links are read 5 s later")

    def _states_one_by_one(self) -> dict[str, Any]:
        """How many links are up, from a driver that does not have the states as fields."""
        if any((_LINK_STATE, link) in self._wanted for link in range(self._links or 0)):
            return {}  # not requested yet, or some failed for a temporary reason
        states = [self._query.ask("nvlink_links", "nvmlDeviceGetNvLinkState", link) for link in range(self._links or 0)]
        return {} if None in states else {"nvlink_links": sum(map(bool, states))}


def _value_of(answer: Any) -> int | float | None:
    """The number that the driver returned. None if it stands for "unknown"."""
    name = _VALUE_TYPES[answer.valueType] if answer.valueType < len(_VALUE_TYPES) else "ullVal"
    # Older bindings lack the newest number types. An unsigned short is the lowest bytes of the
    # largest type.
    value = getattr(answer.value, name, None)
    value = answer.value.ullVal & 0xFFFF if value is None else value
    return None if value in ALL_ONES else value


def _field_of(key: Key) -> str:
    """The field of GpuDetails that gets the reason if this NVML field fails."""
    if key in _SINGLE:
        return _SINGLE[key][0]
    names = {_RETIRED_SINGLE_BIT: "retired_pages", _RETIRED_DOUBLE_BIT: "retired_pages"}
    names |= {_LINK_SENT: _LINK_RATES[0], _LINK_RECEIVED: _LINK_RATES[1]}
    return names.get(key[0], "nvlink_links")


class DetailReader:
    """Reads the details of one handle: fixed values once, the others whenever `read` is called
    (every 5 s)."""

    def __init__(self, handle: Any) -> None:
        self._query = Query(handle)
        self._fields = FieldReader(self._query)
        self._gpm = Gpm(self._query)
        self._fixed: dict[str, Any] = {}
        self._moving: dict[str, Any] = {}
        self._pcie: tuple[float | None, float | None] | str = PCIE_NOT_WANTED
        self.value = GpuDetails(unknown=dict.fromkeys(PCIE_FIELDS, PCIE_NOT_WANTED))

    def read(self, now: float, *, mig: bool | None, mig_reason: str | None) -> None:
        """Read all sensors; `now` is monotonic seconds. Raises GpuGone."""
        # Each fixed value is read once. One that failed for a temporary reason is read again.
        self._fixed |= self._rows(row for row in _FIXED if row.fields[0] not in self._fixed)
        moving = self._rows(_SENSORS)
        if mig:
            self._query.note(("encoder_fraction", "decoder_fraction"), NO_MIG_UTILIZATION)
        else:
            moving |= self._rows(_CODECS)
        moving |= self._fields.read(now) | self._gpm.read(self._fixed.get("compute_capability"))
        if mig_reason is None:
            self._query.clear(("mig_mode",))
        else:
            self._query.note(("mig_mode",), mig_reason)
        self._moving = moving | {"mig_mode": mig}
        self._build()

    def pcie(self, reading: tuple[float | None, float | None] | str) -> None:
        """Set what the PCIe thread has read: bytes per second sent and received, or the reason why
        they are unknown."""
        if reading != self._pcie:
            self._pcie = reading
            self._build()

    def close(self) -> None:
        """Free what the driver holds for this handle."""
        self._gpm.close()

    def _build(self) -> None:
        sent, received = (None, None) if isinstance(self._pcie, str) else self._pcie
        if isinstance(self._pcie, str):
            self._query.note(PCIE_FIELDS, self._pcie)
        else:
            self._query.clear(PCIE_FIELDS)
        self.value = GpuDetails(
            **self._fixed,
            **self._moving,
            pcie_sent_bytes_per_second=sent,
            pcie_received_bytes_per_second=received,
            unknown=self._query.reasons(),
        )

    def _rows(self, rows: Iterable[Detail]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for row in rows:
            value = self._query.ask(row.fields, row.call, *row.arguments, convert=row.convert)
            if value is not None:
                values.update(zip(row.fields, (value,) if len(row.fields) == 1 else value, strict=True))
        return values
