"""What of a GPU changes slowly or never: one row per value, with the driver's function and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pynvml

from memtop.supervisor.monitor.nvml.ask import Asker, Untold
from memtop.supervisor.monitor.nvml.fields import FieldReader
from memtop.supervisor.monitor.nvml.gpm import Gpm
from memtop.supervisor.monitor.values import GpuDetails

PCIE_FIELDS = ("pcie_sent_bytes_per_second", "pcie_received_bytes_per_second")
PCIE_NOT_WANTED = "read only while it is looked at"
NO_MIG_UTILIZATION = "the driver tells no utilisation for MIG instances"

_UNKNOWN_STATE = 32  # NVML_PSTATE_UNKNOWN
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}

_HW_SLOWDOWN = 0x8
_HW_CAUSES = 0x40 | 0x80
_THROTTLE_WORDS = (
    (0x4, "power cap: the card draws as much as its limit allows"),
    (0x40, "too hot: the hardware has cut the clocks"),
    (0x20, "too hot: the driver holds the clocks down"),
    (0x80, "power brake: the machine's power supply asked the card to slow down"),
    (_HW_SLOWDOWN, "hardware slowdown: heat or power"),
    (0x10, "sync boost: another GPU of the group is slower"),
    (0x2, "clocks set by hand (application clocks)"),
)


class Row(NamedTuple):
    """Fields of GpuDetails, the functions that give them (best first) with their arguments, and the conversion."""

    fields: tuple[str, ...]
    call: tuple[str, ...]
    arguments: tuple[Any, ...] = ()
    convert: Callable[[Any], Any] = int


def percent(value: Any) -> float:
    """0-100 as a fraction; Untold for what the driver sometimes says instead. NVML's pairs carry the period second."""
    number = value[0] if isinstance(value, list) else value
    if number > 100:
        raise Untold(f"the driver reported {number} %")
    return float(number) / 100


def _fan(value: int) -> float:
    return value / 100  # may pass 100 %: it is a share of the fan's rated speed


def _state(value: int) -> str:
    if value == _UNKNOWN_STATE:
        raise Untold("the driver does not know the performance state just now")
    return f"P{value}"


def throttle_words(mask: int) -> tuple[str, ...]:
    """What holds a busy card's clocks down. An idle card's low clocks and a display's setting are no such thing."""
    if mask & _HW_CAUSES:
        mask &= ~_HW_SLOWDOWN  # the general bit is set beside the exact one
    return tuple(words for bit, words in _THROTTLE_WORDS if mask & bit)


def _mode(value: int) -> str:
    if value not in _COMPUTE_MODES:
        raise Untold(f"the driver reported compute mode {value}, which memtop does not know")
    return _COMPUTE_MODES[value]


def _first_on(value: Any) -> str:
    return "on" if value[0] else "off"


_FIXED = (
    Row(("slowdown_temperature_celsius",), ("nvmlDeviceGetTemperatureThreshold",), (1,), float),
    Row(("sm_clock_limit_megahertz",), ("nvmlDeviceGetMaxClockInfo",), (pynvml.NVML_CLOCK_SM,)),
    Row(("memory_clock_limit_megahertz",), ("nvmlDeviceGetMaxClockInfo",), (pynvml.NVML_CLOCK_MEM,)),
    Row(("pcie_generation_limit",), ("nvmlDeviceGetMaxPcieLinkGeneration",)),
    Row(("pcie_width_limit",), ("nvmlDeviceGetMaxPcieLinkWidth",)),
    Row(("compute_capability",), ("nvmlDeviceGetCudaComputeCapability",), (), lambda pair: f"{pair[0]}.{pair[1]}"),
    Row(("device_minor",), ("nvmlDeviceGetMinorNumber",)),
)
_ECC = "nvmlDeviceGetTotalEccErrors"
_VOLATILE = pynvml.NVML_VOLATILE_ECC
_SENSORS = (
    Row(("fan_fraction",), ("nvmlDeviceGetFanSpeed",), (), _fan),
    Row(("sm_clock_megahertz",), ("nvmlDeviceGetClockInfo",), (pynvml.NVML_CLOCK_SM,)),
    Row(("memory_clock_megahertz",), ("nvmlDeviceGetClockInfo",), (pynvml.NVML_CLOCK_MEM,)),
    Row(("performance_state",), ("nvmlDeviceGetPerformanceState",), (), _state),
    Row(
        ("throttle_reasons",),
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        (),
        throttle_words,
    ),
    Row(("ecc_mode",), ("nvmlDeviceGetEccMode",), (), _first_on),
    Row(("ecc_corrected_errors",), (_ECC,), (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, _VOLATILE)),
    Row(("ecc_uncorrected_errors",), (_ECC,), (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, _VOLATILE)),
    Row(
        ("remapped_rows_correctable", "remapped_rows_uncorrectable", "remapping_pending", "remapping_failed"),
        ("nvmlDeviceGetRemappedRows",),
        (),
        lambda rows: (rows[0], rows[1], bool(rows[2]), bool(rows[3])),
    ),
    Row(("pcie_generation",), ("nvmlDeviceGetCurrPcieLinkGeneration",)),
    Row(("pcie_width",), ("nvmlDeviceGetCurrPcieLinkWidth",)),
    Row(
        ("bar1_total_bytes", "bar1_used_bytes"),
        ("nvmlDeviceGetBAR1MemoryInfo",),
        (),
        lambda bar1: (bar1.bar1Total, bar1.bar1Used),
    ),
    Row(("energy_joules",), ("nvmlDeviceGetTotalEnergyConsumption",), (), lambda millijoules: millijoules / 1000),
    Row(("persistence_mode",), ("nvmlDeviceGetPersistenceMode",), (), bool),
    Row(("compute_mode",), ("nvmlDeviceGetComputeMode",), (), _mode),
    Row(("display_connected",), ("nvmlDeviceGetDisplayMode",), (), bool),
    Row(("display_active",), ("nvmlDeviceGetDisplayActive",), (), bool),
)
_CODECS = (
    Row(("encoder_fraction",), ("nvmlDeviceGetEncoderUtilization",), (), percent),
    Row(("decoder_fraction",), ("nvmlDeviceGetDecoderUtilization",), (), percent),
)


class DetailReader:
    """Reads the details behind one handle: what is fixed once, the rest whenever `read` is called (every 5 s)."""

    def __init__(self, handle: Any) -> None:
        self._asker = Asker(handle)
        self._fields = FieldReader(self._asker)
        self._gpm = Gpm(self._asker)
        self._fixed: dict[str, Any] = {}
        self._moving: dict[str, Any] = {}
        self._pcie: tuple[float | None, float | None] | str = PCIE_NOT_WANTED
        self.value = GpuDetails(unknown=dict.fromkeys(PCIE_FIELDS, PCIE_NOT_WANTED))

    def read(self, now: float, *, mig: bool | None, mig_reason: str | None) -> None:
        """Read all sensors; `now` is monotonic seconds. Raises GpuGone."""
        # Once each; what failed for a passing reason is asked again.
        self._fixed |= self._rows(row for row in _FIXED if row.fields[0] not in self._fixed)
        moving = self._rows(_SENSORS)
        if mig:
            self._asker.note(("encoder_fraction", "decoder_fraction"), NO_MIG_UTILIZATION)
        else:
            moving |= self._rows(_CODECS)
        moving |= self._fields.read(now) | self._gpm.read(self._fixed.get("compute_capability"))
        if mig_reason is None:
            self._asker.clear(("mig_mode",))
        else:
            self._asker.note(("mig_mode",), mig_reason)
        self._moving = moving | {"mig_mode": mig}
        self._build()

    def pcie(self, reading: tuple[float | None, float | None] | str) -> None:
        """Put in what the PCIe thread has read: bytes per second sent and received, or why there is nothing."""
        if reading != self._pcie:
            self._pcie = reading
            self._build()

    def close(self) -> None:
        """Give back what the driver holds for this handle."""
        self._gpm.close()

    def _build(self) -> None:
        sent, received = (None, None) if isinstance(self._pcie, str) else self._pcie
        if isinstance(self._pcie, str):
            self._asker.note(PCIE_FIELDS, self._pcie)
        else:
            self._asker.clear(PCIE_FIELDS)
        self.value = GpuDetails(
            **self._fixed,
            **self._moving,
            pcie_sent_bytes_per_second=sent,
            pcie_received_bytes_per_second=received,
            unknown=self._asker.reasons(),
        )

    def _rows(self, rows: Iterable[Row]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for row in rows:
            value = self._asker.ask(row.fields, row.call, *row.arguments, convert=row.convert)
            if value is not None:
                values.update(zip(row.fields, (value,) if len(row.fields) == 1 else value, strict=True))
        return values
