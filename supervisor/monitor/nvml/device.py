"""Reads one GPU: opens its handle, reads each value as often as needed, and keeps the reasons for
unknown values. `HoldingsReader` reads only free memory and processes of some GPUs, in few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.details import NO_MIG_UTILIZATION, DetailReader
from memtop.supervisor.monitor.nvml.memory import MEMORY_FIELDS, HostRam, MemoryReader, Mig
from memtop.supervisor.monitor.nvml.processes import ProcessReader, Shares, UtilizationReader, merge_processes, with_shares
from memtop.supervisor.monitor.nvml.query import GpuGone, Query
from memtop.supervisor.monitor.values import GpuDetails, GpuProcess, GpuSample, GpuTrouble

PROCESS_SECONDS = 2.0
"""How often process lists are read. They are the most expensive calls (milliseconds, under a lock
that programs share)."""
SENSOR_SECONDS = 5.0
"""How often temperatures, power, clocks and counters are read."""
MIG_SECONDS = 10.0
"""How often MIG instances are enumerated, unless the driver reports a change."""

_NEVER_READ = float("-inf")
_CANNOT_BE_READ = "the GPU cannot be read"
_NO_RECOVERY = "the driver reports that the GPU needs no recovery any more"
_UNKNOWN_RECOVERY = "the driver asks for a recovery of the GPU, but does not say which: see nvidia-smi -q and dmesg"
_SENSORS = ("temperature_celsius", "power_watts", "power_limit_watts")
_UTILIZATION = ("utilization_fraction", "memory_utilization_fraction")
_READ_FIELDS = (*MEMORY_FIELDS, *_UTILIZATION, *_SENSORS, "processes")


def _bus_id(pci: Any) -> str:
    return str(pci.busId.decode() if isinstance(pci.busId, bytes) else pci.busId)


_FIXED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "uuid": ("nvmlDeviceGetUUID", str),
    "name": ("nvmlDeviceGetName", str),
    "pci_bus_id": ("nvmlDeviceGetPciInfo", _bus_id),
}
"""Values that never change: the driver's function, and the conversion of its result."""
_NO_DETAILS = GpuDetails(
    unknown=dict.fromkeys((field for field in GpuDetails.__struct_fields__ if field != "unknown"), _CANNOT_BE_READ)
)


class Host(msgspec.Struct):
    """What the readers of all GPUs need from the machine."""

    pid_max: Callable[[], int]
    pool: HostRam
    clock: Callable[[], float]
    """Seconds since the epoch."""


class DeviceReaders:
    """The readers of one handle. A new handle gets new readers."""

    def __init__(self, handle: Any, host: Host) -> None:
        self.handle = handle
        self.query = Query(handle)
        self.memory = MemoryReader(self.query, host.pool)
        self.details = DetailReader(handle)
        self.processes = ProcessReader(handle)
        self.utilization = UtilizationReader(Query(handle))
        self.mig = Mig(handle)


class Gpu:
    """Reads one GPU. Opens the handle at the first sample and again after an error."""

    def __init__(self, index: int, host: Host) -> None:
        self.index = index
        self.uuid: str | None = None
        self.error: str | None = None
        self.visible_index: int | None = None
        self.visible_reason: str | None = None
        self.troubles: tuple[GpuTrouble, ...] = ()
        self._host = host
        self._readers: DeviceReaders | None = None
        self._fixed: dict[str, Any] = dict.fromkeys(_FIXED)
        self._sensors: dict[str, Any] = {}
        self._processes: tuple[GpuProcess, ...] = ()
        self._processes_known = False
        self._processes_due = self._sensors_due = self._mig_due = _NEVER_READ

    @property
    def key(self) -> str:
        """The UUID, or `place` until the UUID is known."""
        return self.uuid or self.place

    @property
    def place(self) -> str:
        """`gpu INDEX`."""
        return f"gpu {self.index}"

    @property
    def name(self) -> str | None:
        """The model, if known."""
        name: str | None = self._fixed["name"]
        return name

    @property
    def handle(self) -> Any:
        """The driver's handle. None while the GPU cannot be read."""
        return None if self._readers is None else self._readers.handle

    @property
    def has_mig(self) -> bool:
        """Whether MIG is on."""
        return self._readers is not None and bool(self._readers.mig.mode)

    @property
    def mig_uuids(self) -> tuple[str, ...]:
        """UUIDs of its MIG instances."""
        return () if self._readers is None else self._readers.mig.uuids()

    @property
    def recovery(self) -> str:
        """A sentence that says what the card needed when the details were last read."""
        if self._readers is None or "recovery_action" in self._readers.details.value.unknown:
            return _UNKNOWN_RECOVERY
        return self._readers.details.value.recovery_action or _NO_RECOVERY

    def sample(self, now: float) -> GpuSample:
        """One sample.

        `now` is monotonic seconds. Never raises for a driver error; the sample has the reason.
        """
        try:
            readers = self._readers or self._open()
            memory = readers.memory.read()
            before, readers = readers, self._with_mig(now, readers)
            if readers is not before:
                memory = readers.memory.read()  # the values and reasons of the old handle are gone
            if now >= self._sensors_due:
                self._read_sensors(now, readers)
                self._sensors_due = now + SENSOR_SECONDS
            if now >= self._processes_due:
                self._read_processes(readers)
                self._processes_due = now + PROCESS_SECONDS
            fresh = self._utilization(readers)
        except GpuGone as gone:
            self.close()
            self.error = str(gone)
            return self._unreadable(self.index, self.error)
        if readers.memory.unified:
            memory = readers.memory.shared(self._processes, self._processes_known)
        self.error = None
        mig = readers.mig.sample() if readers.mig.mode else ()
        unknown = readers.query.reasons() | readers.mig.reasons()
        if self.visible_reason is not None:
            unknown = unknown | {"visible_index": self.visible_reason}
        return GpuSample(
            index=self.index,
            visible_index=self.visible_index,
            processes=self._processes,
            mig=mig,
            troubles=self.troubles,
            details=readers.details.value,
            unknown=unknown,
            **self._fixed,
            **self._sensors,
            **memory,
            **fresh,
        )

    def pcie(self, reading: tuple[float | None, float | None] | str) -> None:
        """Set what the PCIe thread has read for this GPU."""
        if self._readers is not None:
            self._readers.details.pcie(reading)

    def look_again(self) -> None:
        """Read details and MIG instances at the next sample, because the driver reported an
        event."""
        self._sensors_due = self._mig_due = _NEVER_READ

    def close(self) -> None:
        """Drop the handle. The next sample opens it again and reads everything."""
        if self._readers is not None:
            self._readers.details.close()
        self._readers = None
        self._processes_due = self._sensors_due = self._mig_due = _NEVER_READ

    def missing(self, index: int) -> GpuSample:
        """The sample of this GPU while the driver does not list it. `index` is its new row."""
        return self._unreadable(index, f"{codes.NOT_LISTED} (it was GPU {self.index})")

    def _unreadable(self, index: int, error: str) -> GpuSample:
        reasons = dict.fromkeys(_READ_FIELDS, _CANNOT_BE_READ)
        reasons |= {field: _CANNOT_BE_READ for field in _FIXED if self._fixed[field] is None}
        return GpuSample(
            index=index,
            error=error,
            visible_index=self.visible_index,
            troubles=self.troubles,
            details=_NO_DETAILS,
            unknown=reasons,
            **self._fixed,
        )

    def _open(self) -> DeviceReaders:
        """Open by UUID if known (the order of GPUs may have changed), else by index.

        Reads the values that never change.
        """
        try:
            handle = self._find_handle()
        except pynvml.NVMLError as error:
            raise GpuGone(error.value) from error
        self._readers = readers = DeviceReaders(handle, self._host)
        self._ask_fixed(readers, _FIXED)
        return readers

    def _ask_fixed(self, readers: DeviceReaders, fields: Iterable[str]) -> None:
        """Read values that never change. One that is unknown now keeps its earlier value."""
        for field in fields:
            call, convert = _FIXED[field]
            self._fixed[field] = readers.query.ask(field, call, convert=convert) or self._fixed[field]
            if self._fixed[field] is not None:
                readers.query.clear((field,))
        self.uuid = self._fixed["uuid"]

    def _find_handle(self) -> Any:
        if self.uuid is not None:
            try:
                return pynvml.nvmlDeviceGetHandleByUUID(self.uuid.encode())
            except pynvml.NVMLError as error:
                # The card was exchanged: use the one that now has this index.
                if error.value not in (codes.NOT_FOUND, codes.INVALID_ARGUMENT, codes.FUNCTION_NOT_FOUND):
                    raise
                self.uuid = None
                self._fixed = dict.fromkeys(_FIXED)
        return pynvml.nvmlDeviceGetHandleByIndex(self.index)

    def _with_mig(self, now: float, readers: DeviceReaders) -> DeviceReaders:
        """Enumerate MIG instances if that is due.

        If MIG was switched on or off, open the GPU again.
        """
        if now < self._mig_due and not readers.mig.stale:
            return readers
        first, before = not readers.mig.enumerated, readers.mig.mode
        readers.mig.enumerate()
        if readers.mig.mode != before and not first:
            self.close()
            readers = self._open()
            readers.mig.enumerate()
        elif readers.mig.mode:
            self._processes_due = _NEVER_READ  # instances have new handles
        self._mig_due = now + MIG_SECONDS
        return readers

    def _utilization(self, readers: DeviceReaders) -> dict[str, Any]:
        """Share of the driver's last sample period in which a kernel ran, and in which memory was
        accessed (0-1)."""
        if readers.mig.mode:
            readers.query.note(_UTILIZATION, NO_MIG_UTILIZATION)
            return {}
        rates = readers.query.ask(_UTILIZATION, "nvmlDeviceGetUtilizationRates")
        if rates is None:
            return {}
        values: dict[str, Any] = {}
        for field, number in zip(_UTILIZATION, (rates.gpu, rates.memory), strict=True):
            if number > 100:
                readers.query.note((field,), f"the driver reported {number} %")
            else:
                values[field] = number / 100
        return values

    def _read_sensors(self, now: float, readers: DeviceReaders) -> None:
        """Read temperature (degrees Celsius), power and its limit (NVML reports milliwatts), and
        the details."""
        # Fixed values are read once for each handle. One that failed for a temporary reason is read
        # again.
        self._ask_fixed(readers, [field for field in _FIXED if field in readers.query.reasons()])
        ask = readers.query.ask
        names = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
        self._sensors = {
            "temperature_celsius": ask("temperature_celsius", names, pynvml.NVML_TEMPERATURE_GPU, convert=float),
            "power_watts": ask("power_watts", "nvmlDeviceGetPowerUsage", convert=_watts),
            "power_limit_watts": ask("power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", convert=_watts),
        }
        readers.details.read(now, mig=readers.mig.mode, mig_reason=readers.mig.mode_reason)

    def _read_processes(self, readers: DeviceReaders) -> None:
        """Read all process lists and merge them by pid.

        Pids that cannot exist are dropped and noted.
        """
        if readers.mig.mode:
            lists, errors = readers.mig.processes()
        else:
            rows, errors = readers.processes.read()
            lists = [(None, rows)]
        for code in errors.values():
            if code in codes.GPU_GONE and not readers.mig.mode:
                raise GpuGone(code)
        merged, dropped = merge_processes(lists, self._host.pid_max())
        shares: dict[int, Shares] | str = NO_MIG_UTILIZATION if readers.mig.mode else {}
        if merged and not readers.mig.mode:
            shares = readers.utilization.read(self._host.clock())
        self._processes = with_shares(merged, shares)
        self._processes_known = "compute" not in errors
        self._note_processes(readers.query, errors, dropped)

    def _note_processes(self, query: Query, errors: dict[str, int], dropped: list[int]) -> None:
        notes = []
        for kind, code in errors.items():
            # A card without graphics or MPS has no such list, so no processes are missing.
            if kind == "compute":
                notes.append(codes.words(code))
            elif code not in codes.NEVER_AGAIN:
                notes.append(f"{kind} processes are missing: {codes.words(code)}")
        if dropped:
            numbers = ", ".join(str(pid) for pid in dropped)
            notes.append(f"dropped pids that the driver reported but that cannot exist: {numbers}")
        if notes:
            query.note(("processes",), "; ".join(notes))
        else:
            query.clear(("processes",))


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


_NO_GPUS_FLAG = 1  # NVML_INIT_FLAG_NO_GPUS
_BIGGEST_PID = 2**22  # the kernel's PID_MAX_LIMIT on 64 bit


class _HandleReaders:
    """The readers of one handle."""

    def __init__(self, handle: Any, pool: HostRam) -> None:
        self.query = Query(handle)
        self.memory = MemoryReader(self.query, pool)
        self.processes = ProcessReader(handle)
        self.mig = Mig(handle)


class HoldingsReader:
    """Reads the GPUs of these samples, which it finds by their UUIDs.

    Keeps NVML open until it is closed.
    """

    def __init__(self, gpus: Iterable[GpuSample], *, proc_root: Path = Path("/proc")) -> None:
        self._gpus = tuple((gpu.index, gpu.uuid) for gpu in gpus)
        self._pool = HostRam(proc_root)
        self._readers: dict[int, _HandleReaders] = {}
        self._started = False

    def read(self) -> tuple[GpuSample, ...]:
        """Memory and processes of each GPU.

        Never raises for a driver error: the sample of that GPU carries it.
        """
        try:
            if not self._started:
                pynvml.nvmlInitWithFlags(_NO_GPUS_FLAG)
                self._started = True
        except pynvml.NVMLError as error:
            return tuple(_failed(index, uuid, error.value) for index, uuid in self._gpus)
        return tuple(self._one(index, uuid) for index, uuid in self._gpus)

    def close(self) -> None:
        """Close NVML."""
        self._readers.clear()
        if self._started:
            self._started = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                # If the driver was unloaded in the meantime, there is nothing left to close.
                if error.value not in codes.GPU_GONE:
                    raise

    def _one(self, index: int, uuid: str | None) -> GpuSample:
        try:
            readers = self._readers.get(index)
            if readers is None:
                readers = self._readers[index] = _HandleReaders(_handle(index, uuid), self._pool)
            return _sample(index, uuid, readers)
        except (pynvml.NVMLError, GpuGone) as error:
            self._readers.pop(index, None)
            return _failed(index, uuid, error.code if isinstance(error, GpuGone) else error.value)


def _handle(index: int, uuid: str | None) -> Any:
    if uuid is None:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())


def _sample(index: int, uuid: str | None, readers: _HandleReaders) -> GpuSample:
    memory = readers.memory.read()
    if not readers.mig.enumerated or readers.mig.stale:
        readers.mig.enumerate()
    if readers.mig.mode:
        lists, errors = readers.mig.processes()
    else:
        rows, errors = readers.processes.read()
        lists = [(None, rows)]
    gone = next((code for code in errors.values() if code in codes.GPU_GONE), None)
    if gone is not None:
        raise GpuGone(gone)
    processes = tuple(merge_processes(lists, _BIGGEST_PID)[0])
    if readers.memory.unified:
        memory = readers.memory.shared(processes, "compute" not in errors)
    # A card without graphics or MPS has no such list, so no processes are missing.
    missing = [code for kind, code in errors.items() if kind == "compute" or code not in codes.NEVER_AGAIN]
    unknown = {**readers.query.reasons(), **({"processes": codes.words(missing[0])} if missing else {})}
    return GpuSample(index=index, uuid=uuid, processes=processes, unknown=unknown, **memory)


def _failed(index: int, uuid: str | None, code: int) -> GpuSample:
    return GpuSample(index=index, uuid=uuid, error=codes.words(code))
