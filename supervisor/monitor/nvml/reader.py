"""Reads all GPUs with NVML's official bindings.

No GPU, no driver and no library are normal states with a note.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.device import Gpu, Host
from memtop.supervisor.monitor.nvml.environment import ASLEEP, CudaDevice, all_asleep, visible_indices
from memtop.supervisor.monitor.nvml.events import DriverEvent, EventWatcher, Troubles
from memtop.supervisor.monitor.nvml.memory import HostRam
from memtop.supervisor.monitor.nvml.query import NoValue, call_first
from memtop.supervisor.monitor.nvml.rates import PcieReader
from memtop.supervisor.monitor.processes.proc import in_host_pid_namespace
from memtop.supervisor.monitor.values import GpuSample

ENUMERATE_SECONDS = 10.0
"""How often the GPUs are enumerated, and NVML is started again if it failed."""
REOPEN_SECONDS = 2.0
"""How often a GPU that cannot be read is tried again: opening a faulty GPU can take the driver a
long time."""
CLOSE_SECONDS = 2.0
"""How long closing waits for a read that is under way."""
MISSING_SECONDS = 24 * 3600.0
"""How long a GPU that the driver no longer lists keeps its row, so that it is still visible the
next morning."""
RESTART_SECONDS = 30.0
"""How often the library is restarted while some GPUs, but not all, cannot be read."""

_NO_GPUS_FLAG = 1  # NVML_INIT_FLAG_NO_GPUS: starting without a GPU is no error
_BIGGEST_PID = 2**22  # the kernel's PID_MAX_LIMIT on 64 bit


class NvmlReading(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs at one moment.

    Processes have only the driver's values; `process_watch` adds the others.
    """

    gpus: tuple[GpuSample, ...] = ()
    note: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    """The newest CUDA version that the driver supports, e.g. `12.4`."""


class NvmlReader:
    """Samples every GPU. Starts NVML at the first read and again after a failure.

    Each read: memory and utilisation. Every 2 s: process lists. Every 5 s: sensors and details.
    Every 10 s: the set of GPUs and MIG instances. Once for each handle: values that never change.
    PCIe throughput is read only after `want_pcie`, and driver events arrive in a separate thread.

    If all GPUs sleep, they stay asleep unless `wake` is set. `monotonic` (seconds), `clock`
    (seconds since the epoch) and `environment` (for CUDA_VISIBLE_DEVICES) can be replaced in tests.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
        proc_root: Path = Path("/proc"),
        sys_root: Path = Path("/sys"),
        wake: bool = False,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._monotonic = monotonic
        self._sys_root = sys_root
        self._wake = wake
        self._proc_root = proc_root
        self._environment = environment
        self._host = Host(self._pid_max, HostRam(proc_root), clock)
        self._lock = threading.Lock()
        self._gpus: list[Gpu] = []
        self._last: dict[int, tuple[float, GpuSample]] = {}
        self._events = EventWatcher(monotonic)
        self._troubles = Troubles(clock)
        self._readable: list[tuple[int, Any]] = []
        self._pcie = PcieReader(lambda: self._readable, monotonic)
        self._started = False
        self._note: str | None = None
        self._driver: str | None = None
        self._cuda: str | None = None
        self._enumerate_due = self._restart_due = float("-inf")
        self._sick = 0
        self._missing: list[tuple[float, Gpu]] = []
        """GPUs that are not listed any more, with the time until which they keep a row."""
        self._late: list[tuple[Gpu, DriverEvent]] = []
        """Events of GPUs that have just been replaced by others."""
        self._biggest_pid: int | None = None
        self._numbered: list[CudaDevice] = []
        self._refresh = threading.Event()

    def read(self) -> NvmlReading:
        """One reading of every GPU.

        Takes as long as the driver does. Never raises for a driver error.
        """
        with self._lock:
            now = self._monotonic()
            if self._refresh.is_set():
                self._refresh.clear()
                for gpu in self._gpus:
                    gpu.close()
            events = self._take_events()
            if now >= self._enumerate_due:
                self._enumerate_due = now + ENUMERATE_SECONDS
                self._enumerate(now)
            samples = [self._sample(gpu, now) for gpu in self._gpus]
            for gpu, event in events + self._late:
                self._troubles.announced(gpu.key, event, gpu.recovery)
            self._late = []
            samples = self._with_news(samples)
            sick = sum(gpu.error is not None for gpu in self._gpus)
            if sick > self._sick:
                # After an error GPUs may appear or disappear: enumerate them soon, once.
                self._enumerate_due = min(self._enumerate_due, now + REOPEN_SECONDS)
            self._sick = sick
            self._watch()
            samples += self._missing_rows(now)
            return NvmlReading(gpus=tuple(samples), note=self._note, driver_version=self._driver, cuda_version=self._cuda)

    def want_pcie(self) -> None:
        """Read PCIe throughput for the next 10 s in a separate thread (the driver needs 20 ms for
        each value).

        Call it again as long as the values are displayed.
        """
        self._pcie.want()

    def refresh(self) -> None:
        """Make the next read fetch everything, including process lists."""
        # without the lock: the caller must not wait for a read that is under way
        self._refresh.set()

    def close(self) -> None:
        """End the threads and close NVML, unless a read hangs in the driver for more than 2 s."""
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            return
        try:
            self._stop()
        finally:
            self._lock.release()

    def _sample(self, gpu: Gpu, now: float) -> GpuSample:
        tried, last = self._last.get(gpu.index, (float("-inf"), None))
        if last is not None and last.error is not None and now < tried + REOPEN_SECONDS:
            return last
        gpu.pcie(self._pcie.of(gpu.index))
        sample = gpu.sample(now)
        self._last[gpu.index] = (now, sample)
        return sample

    def _with_news(self, samples: list[GpuSample]) -> list[GpuSample]:
        """The samples with the troubles that they revealed, and with CUDA's numbers if the GPUs
        have changed."""
        for gpu in self._gpus:
            if gpu.uuid is not None:
                self._troubles.named(gpu.place, gpu.uuid)
            self._troubles.state(gpu.key, gpu.error)
            gpu.troubles = self._troubles.of(gpu.key)
        self._number()
        done = []
        for gpu, sample in zip(self._gpus, samples, strict=True):
            noted = gpu.visible_reason is None or "visible_index" in sample.unknown
            if sample.troubles is not gpu.troubles or sample.visible_index != gpu.visible_index or not noted:
                unknown = sample.unknown if noted else sample.unknown | {"visible_index": str(gpu.visible_reason)}
                news = {"troubles": gpu.troubles, "visible_index": gpu.visible_index, "unknown": unknown}
                sample = msgspec.structs.replace(sample, **news)
                self._last[gpu.index] = (self._last[gpu.index][0], sample)
            done.append(sample)
        return done

    def _missing_rows(self, now: float) -> list[GpuSample]:
        """A row for each GPU that the driver no longer lists.

        The rows follow the others and have unused indices.

        There are none if the driver lists no GPU at all, which the note reports. There are none
        either while the UUID of a listed GPU is unknown, because that GPU may be the missing one.
        """
        self._missing = [(until, gpu) for until, gpu in self._missing if now < until]
        if not self._missing or not self._gpus or any(gpu.uuid is None for gpu in self._gpus):
            return []
        listed = {gpu.uuid for gpu in self._gpus}
        self._missing = [(until, gpu) for until, gpu in self._missing if gpu.uuid not in listed]
        rows: dict[int, GpuSample] = {}
        # First the GPUs whose old index is free. The others get the indices that are left.
        for _, gpu in sorted(self._missing, key=lambda one: one[1].index < len(self._gpus)):
            free = (n for n in itertools.count(len(self._gpus)) if n not in rows)
            index = next(free) if gpu.index < len(self._gpus) or gpu.index in rows else gpu.index
            gpu.troubles = self._troubles.of(gpu.key)
            rows[index] = gpu.missing(index)
        return [rows[index] for index in sorted(rows)]

    def _number(self) -> None:
        """Give every GPU its CUDA number, whenever the GPUs have changed."""
        seen = [CudaDevice(gpu.index, gpu.uuid, gpu.name, gpu.has_mig, gpu.mig_uuids) for gpu in self._gpus]
        if seen == self._numbered:
            return
        self._numbered = seen
        numbers = visible_indices(self._environment, seen)
        for gpu in self._gpus:
            gpu.visible_index = None if isinstance(numbers, str) else numbers.get(gpu.index)
            gpu.visible_reason = numbers if isinstance(numbers, str) else None

    def _take_events(self) -> list[tuple[Gpu, DriverEvent]]:
        """The events since the last read. The GPUs concerned read their details again."""
        by_index = {gpu.index: gpu for gpu in self._gpus}
        taken = [(gpu, event) for event in self._events.take() if (gpu := by_index.get(event.gpu)) is not None]
        for gpu, _ in taken:
            gpu.look_again()
        return taken

    def _watch(self) -> None:
        """Give both threads the GPUs that can be read."""
        readable = [(gpu.index, gpu.handle) for gpu in self._gpus if gpu.handle is not None]
        self._readable = readable
        self._events.watch(readable)

    def _enumerate(self, now: float) -> None:
        """Start NVML if needed and update the list of GPUs."""
        all_sick = bool(self._gpus) and self._sick == len(self._gpus)
        if self._started and (all_sick or (self._sick and now >= self._restart_due)):
            # After a reset or a reload of the driver, the library must be restarted to see the GPU
            # again. The healthy GPUs lose their handles by that, so it happens less often if there
            # are some.
            self._stop()
            self._restart_due = now + RESTART_SECONDS
        if not (self._gpus or self._wake) and all_asleep(self._sys_root):
            self._driver = self._cuda = None
            self._let_go(now)
            self._note = ASLEEP
            return
        try:
            if not self._started:
                self._start()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self._note = codes.no_gpu_note(error.value)
            self._driver = self._cuda = None
            self._let_go(now)
            return
        self._note = None if count else "no NVIDIA GPU: the driver is loaded but finds no GPU"
        if count != len(self._gpus) or self._order_changed():
            self._replace(count, now)

    def _let_go(self, now: float) -> None:
        """Drop all GPUs and stop the library."""
        self._stop()
        self._late += self._take_events()
        self._forget(now)
        self._gpus = []
        self._last.clear()
        self._troubles.listed(())

    def _replace(self, count: int, now: float) -> None:
        """Start over with this many GPUs."""
        # Events carry the index of a GPU, so earlier events belong to the earlier GPUs.
        self._events.stop()
        self._late += self._take_events()
        known = {gpu.key for gpu in self._gpus}
        self._forget(now)
        self._gpus = [Gpu(index, self._host) for index in range(count)]
        self._last.clear()
        if known:
            self._troubles.listed(_uuid_of(gpu.index) or gpu.key for gpu in self._gpus)

    def _forget(self, now: float) -> None:
        """Close the handles. GPUs that are not listed again count as missing from now on."""
        for gpu in self._gpus:
            gpu.close()
            gpu.visible_index = None
        gone = {gpu.uuid for gpu in self._gpus}
        self._missing = [(until, gpu) for until, gpu in self._missing if gpu.uuid not in gone]
        self._missing += [(now + MISSING_SECONDS, gpu) for gpu in self._gpus if gpu.uuid is not None]

    def _order_changed(self) -> bool:
        """True if an index now belongs to another GPU than before."""
        for gpu in self._gpus:
            if gpu.uuid is None:
                continue
            # None means that this GPU cannot be read now, which its next sample reports. The order
            # has not changed.
            uuid = _uuid_of(gpu.index)
            if uuid is not None and uuid != gpu.uuid:
                return True
        return False

    def _start(self) -> None:
        pynvml.nvmlInitWithFlags(_NO_GPUS_FLAG)
        self._started = True
        # the GPUs may be readable even if the versions are unknown
        self._driver = self._cuda = None
        try:
            self._driver = call_first(("nvmlSystemGetDriverVersion",))
            version = call_first(("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"))
            self._cuda = f"{version // 1000}.{version % 1000 // 10}"
        except NoValue:
            return  # a version that cannot be decoded
        except pynvml.NVMLError as error:
            if error.value in codes.GPU_GONE:
                raise

    def _stop(self) -> None:
        self._readable = []
        # NVML must not be shut down while a thread is inside the driver: the driver would free
        # memory that it uses.
        free = all([self._pcie.stop(), self._events.stop()])
        for gpu in self._gpus:
            gpu.close()
        if not self._started or not free:
            return
        self._started = False
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            # If the driver was unloaded, there is nothing left to shut down.
            if error.value not in codes.GPU_GONE:
                self._note = codes.no_gpu_note(error.value)

    def _pid_max(self) -> int:
        """The largest pid that the kernel assigns.

        The driver's pids are the host's, so a container's own limit (Linux 6.14 and later) does not
        apply.
        """
        if self._biggest_pid is None:
            self._biggest_pid = _read_pid_max(self._proc_root)
        return self._biggest_pid


def _uuid_of(index: int) -> str | None:
    try:
        return str(call_first(("nvmlDeviceGetUUID",), pynvml.nvmlDeviceGetHandleByIndex(index)))
    except (pynvml.NVMLError, NoValue):
        return None


def _read_pid_max(proc_root: Path) -> int:
    try:
        limit = int((proc_root / "sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return _BIGGEST_PID
    return limit if in_host_pid_namespace(proc_root) else _BIGGEST_PID
