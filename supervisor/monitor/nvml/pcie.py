"""PCIe throughput. Every reading takes the driver 20 ms, so it has a thread of its own that lives only while it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.ask import ALL_ONES, NOT_TOLD
from memtop.supervisor.monitor.nvml.details import PCIE_NOT_WANTED

WANTED_SECONDS = 10.0
"""How long one wish lasts."""
_PAUSE_SECONDS = 1.0
_OLD_SECONDS = 10.0
_SILENT = "the driver has not answered for more than 10 s"
_NO_THREAD = "the system allows memtop no further thread (see ulimit -u, or the pids limit of the container)"

Rates = tuple[float | None, float | None]
Handles = Callable[[], Sequence[tuple[int, Any]]]


class PcieReader:
    """Reads each GPU in turn while somebody wants it."""

    def __init__(self, handles: Handles, monotonic: Callable[[], float]) -> None:
        """`handles` gives (index, handle) of the GPUs that can be read just now."""
        self._handles = handles
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._no_thread = False
        self._rates: dict[int, tuple[float, Rates | str]] = {}
        """By GPU: when it was read, and what."""
        self._never: dict[int, tuple[Any, str]] = {}
        self._told: dict[int, Any] = {}
        """By GPU: the handle that it was told for."""

    def want(self) -> None:
        """Somebody looks at it: read for the next 10 s."""
        with self._lock:
            self._until = self._monotonic() + WANTED_SECONDS
            if self._thread is not None and self._thread.is_alive():
                return
            self._stop = threading.Event()
            thread = threading.Thread(target=self._run, args=(self._stop,), name="memtop-nvml-pcie", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._no_thread = True  # the system allows no more threads just now: the next wish tries again
                return
            self._no_thread = False
            self._thread = thread

    def of(self, index: int) -> Rates | str:
        """Bytes per second sent and received by this GPU, or why they are not known."""
        if self._monotonic() > self._until:
            return PCIE_NOT_WANTED
        if self._no_thread:
            return _NO_THREAD
        read, rates = self._rates.get(index, (0.0, PCIE_NOT_WANTED))
        if not isinstance(rates, str) and self._monotonic() > read + _OLD_SECONDS:
            return _SILENT
        return rates

    def stop(self, seconds: float = 2.0) -> bool:
        """End the thread; False where the driver holds it longer than that."""
        thread = self._thread
        self._until = float("-inf")
        self._stop.set()
        if thread is not None:
            thread.join(seconds)
            if thread.is_alive():
                return False
        self._rates = {}
        self._never = {}
        self._told = {}
        return True

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            for index, handle in self._handles():
                if stop.is_set():
                    return
                rates = self._read(index, handle)
                self._rates[index] = self._monotonic(), rates
            stop.wait(_PAUSE_SECONDS)
            with self._lock:
                if self._monotonic() > self._until:
                    self._rates = {}
                    self._thread = None
                    return

    def _read(self, index: int, handle: Any) -> Rates | str:
        known, reason = self._never.get(index, (None, ""))
        if known is handle:
            return reason
        try:
            sent = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES)
            received = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES)
        except pynvml.NVMLError as error:
            if error.value in codes.NEVER_AGAIN and self._told.get(index) is not handle:
                self._never[index] = (handle, codes.words(error.value))
            return codes.words(error.value)
        if sent in ALL_ONES or received in ALL_ONES:
            return NOT_TOLD
        self._told[index] = handle
        return sent * 1024.0, received * 1024.0  # NVML tells KB/s and counts 1024 in them
