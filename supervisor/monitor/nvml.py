"""All GPUs through NVML's official bindings. No GPU, no driver and no library are normal states with words of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pynvml

from memtop.supervisor.monitor import nvml_errors as codes
from memtop.supervisor.monitor.nvml_gpu import Gpu
from memtop.supervisor.monitor.processes import in_host_pid_namespace
from memtop.supervisor.monitor.values import GpuSample

ENUMERATE_SECONDS = 10.0
"""How often the number and order of GPUs is looked at again, and NVML itself started again where it failed."""
REOPEN_SECONDS = 2.0
"""How often a GPU that cannot be read is tried again: opening a sick GPU can take long in the driver."""
RESTART_SECONDS = 30.0
"""How often the library is started afresh while some GPUs, but not all, cannot be read."""

_NO_GPUS_FLAG = 1  # NVML_INIT_FLAG_NO_GPUS: starting without a GPU is not an error
_BIGGEST_PID = 2**22  # the kernel's PID_MAX_LIMIT on 64 bit


class NvmlReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at the driver gave. Processes carry pid, memory and kind only; who they are is told elsewhere."""

    gpus: tuple[GpuSample, ...] = ()
    note: str | None = None
    driver_version: str | None = None


class NvmlReader:
    """Samples every GPU within the call budget; starts NVML on the first read and again after failures.

    Per tick: memory and utilisation. Every 2 s: process lists. Every 5 s: sensors. Every 10 s: the set of GPUs. Once
    per handle: name and UUID. `monotonic` gives seconds and exists for tests.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, proc_root: Path = Path("/proc")) -> None:
        self._monotonic = monotonic
        self._proc_root = proc_root
        self._lock = threading.Lock()
        self._gpus: list[Gpu] = []
        self._last: dict[int, tuple[float, GpuSample]] = {}
        self._started = False
        self._note: str | None = None
        self._driver: str | None = None
        self._enumerate_due = self._restart_due = float("-inf")
        self._sick = 0
        self._biggest_pid: int | None = None

    def read(self) -> NvmlReading:
        """One reading of every GPU. Never raises for what the driver says."""
        with self._lock:
            now = self._monotonic()
            if now >= self._enumerate_due:
                self._enumerate_due = now + ENUMERATE_SECONDS
                self._enumerate(now)
            samples = tuple(self._sample(gpu, now) for gpu in self._gpus)
            sick = sum(gpu.error is not None for gpu in self._gpus)
            if sick > self._sick:
                # Trouble is when GPUs come and go: look at the set of them sooner, once.
                self._enumerate_due = min(self._enumerate_due, now + REOPEN_SECONDS)
            self._sick = sick
            return NvmlReading(gpus=samples, note=self._note, driver_version=self._driver)

    def refresh(self) -> None:
        """Make the next read fetch everything anew, process lists included: used after ending processes."""
        with self._lock:
            for gpu in self._gpus:
                gpu.close()

    def close(self) -> None:
        """Let go of NVML."""
        with self._lock:
            self._stop()

    def _sample(self, gpu: Gpu, now: float) -> GpuSample:
        tried, last = self._last.get(gpu.index, (float("-inf"), None))
        if last is not None and last.error is not None and now < tried + REOPEN_SECONDS:
            return last
        sample = gpu.sample(now)
        self._last[gpu.index] = (now, sample)
        return sample

    def _enumerate(self, now: float) -> None:
        """Start NVML where needed and bring the list of GPUs up to date."""
        all_sick = bool(self._gpus) and self._sick == len(self._gpus)
        if self._started and (all_sick or (self._sick and now >= self._restart_due)):
            # After a reset or a reloaded driver only a fresh start of the library sees the GPU again. It costs the
            # healthy GPUs their handles, so with some of them it happens less often.
            self._stop()
            self._restart_due = now + RESTART_SECONDS
        try:
            if not self._started:
                self._start()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self._note = codes.no_gpu_note(error.value)
            self._driver = None
            self._gpus.clear()
            self._last.clear()
            self._stop()
            return
        self._note = None if count else "no NVIDIA GPU: the driver is loaded but finds no GPU"
        if count != len(self._gpus) or self._order_changed():
            self._gpus = [Gpu(index, self._pid_max) for index in range(count)]
            self._last.clear()

    def _order_changed(self) -> bool:
        """True where an index now leads to another GPU than the one whose row it is."""
        for gpu in self._gpus:
            if gpu.uuid is None:
                continue
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
                uuid = pynvml.nvmlDeviceGetUUID(handle)
            except pynvml.NVMLError:
                # This GPU cannot be read just now; its own next sample says why. That is no change of order.
                continue
            if uuid != gpu.uuid:
                return True
        return False

    def _start(self) -> None:
        pynvml.nvmlInitWithFlags(_NO_GPUS_FLAG)
        self._started = True
        try:
            self._driver = pynvml.nvmlSystemGetDriverVersion()
        except pynvml.NVMLError:
            self._driver = None  # shown as unknown; the GPUs may still be readable

    def _stop(self) -> None:
        for gpu in self._gpus:
            gpu.close()
        if not self._started:
            return
        self._started = False
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            # The driver was unloaded under us: there is nothing left to shut down.
            if error.value not in codes.GPU_GONE:
                self._note = codes.no_gpu_note(error.value)

    def _pid_max(self) -> int:
        """The largest pid that the kernel hands out; the driver's pids are the host's, so a container's own limit
        (Linux 6.14 and later) must not hide them."""
        if self._biggest_pid is None:
            self._biggest_pid = _read_pid_max(self._proc_root)
        return self._biggest_pid


def _read_pid_max(proc_root: Path) -> int:
    try:
        limit = int((proc_root / "sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return _BIGGEST_PID
    return limit if in_host_pid_namespace(proc_root) else _BIGGEST_PID
