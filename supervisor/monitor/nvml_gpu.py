"""One GPU behind NVML: its handle, what has been read of it and when, and what could not be read and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from memtop.supervisor.monitor import nvml_errors as codes
from memtop.supervisor.monitor.bands import band_of
from memtop.supervisor.monitor.values import GpuProcess, GpuSample

PROCESS_SECONDS = 2.0
"""Process lists are the dearest calls (milliseconds each, behind a lock that the applications share)."""
SENSOR_SECONDS = 5.0
"""Temperature, power and power limit change slowly."""

_NOT_AVAILABLE = 2**64 - 1
_UNIFIED = "the driver does not tell this GPU's memory: it shares the machine's RAM (unified memory), see the host panel"
_CANNOT_BE_READ = "the GPU cannot be read"
_READ_FIELDS = (
    "total_bytes",
    "used_bytes",
    "free_bytes",
    "reserved_bytes",
    "used_fraction",
    "utilization_fraction",
    "temperature_celsius",
    "power_watts",
    "power_limit_watts",
    "processes",
)


class GpuGone(Exception):
    """Nothing of the GPU can be read with the present handle; `code` is NVML's reason."""

    def __init__(self, code: int) -> None:
        super().__init__(codes.words(code))
        self.code = code


class Gpu:
    """Reads one GPU within the call budget. The handle is opened on the first read and again after an error."""

    def __init__(self, index: int, pid_max: Callable[[], int]) -> None:
        self.index = index
        self.uuid: str | None = None
        self.error: str | None = None
        self._pid_max = pid_max
        self._handle: Any = None
        self._fixed: dict[str, Any] = {}
        self._slow: dict[str, Any] = {}
        self._unknown: dict[str, str] = {}
        self._processes_due = self._sensors_due = float("-inf")
        self._memory_v2 = True

    def sample(self, now: float) -> GpuSample:
        """One sample; `now` is monotonic seconds. Never raises for what the driver says."""
        try:
            if self._handle is None:
                self._open()
            fresh = self._memory() | self._utilization()
            if now >= self._sensors_due:
                self._sensors()
                self._sensors_due = now + SENSOR_SECONDS
            if now >= self._processes_due:
                self._processes()
                self._processes_due = now + PROCESS_SECONDS
        except GpuGone as gone:
            return self._lost(gone)
        self.error = None
        return GpuSample(index=self.index, uuid=self.uuid, unknown=dict(self._unknown), **self._fixed, **self._slow, **fresh)

    def close(self) -> None:
        """Forget the handle; the next sample opens it again and reads everything anew."""
        self._handle = None
        self._processes_due = self._sensors_due = float("-inf")

    def _lost(self, gone: GpuGone) -> GpuSample:
        self.close()
        self.error = str(gone)
        reasons = dict.fromkeys(_READ_FIELDS, _CANNOT_BE_READ)
        for field, value in (("uuid", self.uuid), ("name", self._fixed.get("name"))):
            if value is None:
                reasons[field] = _CANNOT_BE_READ
        return GpuSample(index=self.index, uuid=self.uuid, name=self._fixed.get("name"), error=self.error, unknown=reasons)

    def _open(self) -> None:
        """Open by UUID where it is known (the index order may have changed), else by index; read what never changes."""
        self._unknown = {}
        try:
            self._handle = self._find_handle()
        except pynvml.NVMLError as error:
            raise GpuGone(error.value) from error
        self._memory_v2 = True
        self.uuid = self._ask("uuid", pynvml.nvmlDeviceGetUUID) or self.uuid
        self._fixed = {"name": self._ask("name", pynvml.nvmlDeviceGetName) or self._fixed.get("name")}

    def _find_handle(self) -> Any:
        if self.uuid is not None:
            try:
                return pynvml.nvmlDeviceGetHandleByUUID(self.uuid.encode())
            except pynvml.NVMLError as error:
                # The card in this place was exchanged: take whatever sits there now.
                if error.value not in (codes.NOT_FOUND, codes.INVALID_ARGUMENT, codes.FUNCTION_NOT_FOUND):
                    raise
                self.uuid = None
                self._fixed = {}
        return pynvml.nvmlDeviceGetHandleByIndex(self.index)

    def _ask(self, field: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """One value, or None with the reason noted under `field`."""
        try:
            value = call(self._handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in codes.GPU_GONE:
                raise GpuGone(error.value) from error
            self._unknown[field] = codes.words(error.value)
            return None
        self._unknown.pop(field, None)
        return value

    def _memory(self) -> dict[str, Any]:
        """Total, used, free, reserved (bytes) and the fraction that cannot be allocated any more."""
        try:
            info, reserved = self._memory_info()
        except pynvml.NVMLError as error:
            if error.value in codes.GPU_GONE_ON_MEMORY:
                raise GpuGone(error.value) from error
            return self._no_memory(_UNIFIED if error.value == codes.NOT_SUPPORTED else codes.words(error.value))
        if info.total in (0, _NOT_AVAILABLE):
            return self._no_memory(_UNIFIED)
        for field in ("total_bytes", "used_bytes", "free_bytes", "used_fraction", "band"):
            self._unknown.pop(field, None)
        if reserved is None:
            self._unknown["reserved_bytes"] = "this driver only tells used memory with its own reserve included"
        else:
            self._unknown.pop("reserved_bytes", None)
        fraction = (info.total - info.free) / info.total
        return {
            "total_bytes": info.total,
            "used_bytes": info.used,
            "free_bytes": info.free,
            "reserved_bytes": reserved,
            "used_fraction": fraction,
            "band": band_of(fraction),
        }

    def _memory_info(self) -> tuple[Any, int | None]:
        """NVML's memory structure, and the reserved bytes where the driver tells them apart (version 2)."""
        if self._memory_v2:
            try:
                info = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
                return info, info.reserved
            except pynvml.NVMLError as error:
                if error.value not in (codes.FUNCTION_NOT_FOUND, codes.INVALID_ARGUMENT, 25):
                    raise
                self._memory_v2 = False
        return pynvml.nvmlDeviceGetMemoryInfo(self._handle), None

    def _no_memory(self, reason: str) -> dict[str, Any]:
        for field in ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "used_fraction"):
            self._unknown[field] = reason
        return {}

    def _utilization(self) -> dict[str, Any]:
        """Share of the driver's last sample period in which any kernel ran, 0-1."""
        rates = self._ask("utilization_fraction", pynvml.nvmlDeviceGetUtilizationRates)
        if rates is not None and rates.gpu > 100:
            self._unknown["utilization_fraction"] = f"the driver reported {rates.gpu} %"
            rates = None
        return {"utilization_fraction": None if rates is None else rates.gpu / 100}

    def _sensors(self) -> None:
        """Temperature (degrees Celsius), power and its limit (NVML tells milliwatts)."""
        celsius = self._ask("temperature_celsius", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        power = self._ask("power_watts", pynvml.nvmlDeviceGetPowerUsage)
        limit = self._ask("power_limit_watts", pynvml.nvmlDeviceGetEnforcedPowerLimit)
        self._slow["temperature_celsius"] = None if celsius is None else float(celsius)
        self._slow["power_watts"] = None if power is None else power / 1000
        self._slow["power_limit_watts"] = None if limit is None else limit / 1000

    def _processes(self) -> None:
        """Compute and graphics lists merged by pid; rows that cannot be processes are dropped and said so."""
        compute = self._ask("processes", _process_list("Compute"))
        if compute is None:
            self._slow["processes"] = ()
            return
        graphics = self._ask("graphics_processes", _process_list("Graphics"))
        rows, dropped = merge_processes(compute, graphics or (), self._pid_max())
        self._slow["processes"] = rows
        if dropped:
            numbers = ", ".join(str(pid) for pid in dropped)
            self._unknown["processes"] = f"dropped process ids that cannot exist, as the driver reported them: {numbers}"


def _process_list(kind: str) -> Callable[[Any], Any]:
    """The newest process-list call of this kind that the driver has."""

    def call(handle: Any) -> Any:
        try:
            return getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses_v3")(handle)
        except pynvml.NVMLError as error:
            if error.value != codes.FUNCTION_NOT_FOUND:
                raise
            return getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses_v2")(handle)

    return call


def merge_processes(compute: Any, graphics: Any, pid_max: int) -> tuple[tuple[GpuProcess, ...], list[int]]:
    """One row per possible pid, largest first, and the pids that cannot exist.

    Reading a list with another driver's structure size yields pids such as 0 and 4294967295; those are not processes.
    """
    lists = {"compute": _bytes_by_pid(compute), "graphics": _bytes_by_pid(graphics)}
    pids = {pid for by_pid in lists.values() for pid in by_pid}
    dropped = sorted(pid for pid in pids if not 0 < pid <= pid_max)
    rows = []
    for pid in pids.difference(dropped):
        kinds = [kind for kind, by_pid in lists.items() if pid in by_pid]
        # A process in both lists is reported with the same total in each: the larger, not the sum.
        known = [used for kind in kinds if (used := lists[kind][pid]) is not None]
        unknown = {} if known else {"used_bytes": "the driver does not tell memory per process here (WSL, MIG, vGPU)"}
        rows.append(GpuProcess(pid=pid, used_bytes=max(known, default=None), kind="+".join(kinds), unknown=unknown))
    rows.sort(key=lambda row: (-(row.used_bytes or 0), row.pid))
    return tuple(rows), dropped


def _bytes_by_pid(rows: Any) -> dict[int, int | None]:
    """Bytes by pid; a process on several MIG instances has several rows, which add up."""
    sums: dict[int, int | None] = {}
    for row in rows:
        used = row.usedGpuMemory
        used = None if used is None or used == _NOT_AVAILABLE else int(used)
        before = sums.get(row.pid)
        sums[row.pid] = used if before is None else before + (used or 0)
    return sums
