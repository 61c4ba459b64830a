"""Reads PCIe throughput in a separate thread, because the driver needs 20 ms for each value.

The thread runs on demand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.details import PCIE_NOT_WANTED
from memtop.supervisor.monitor.nvml.query import ALL_ONES, NOT_REPORTED

WANTED_SECONDS = 10.0
"""How long the thread runs after `want` was called."""
PAUSE_SECONDS = 1.0
"""How long the thread waits after it has read all GPUs."""
_OLD_SECONDS = 10.0
_SILENT = "the driver has not answered for more than 10 s"
_NO_THREAD = "the system allows memtop no more threads (see ulimit -u, or the pids limit of the container)"

Rates = tuple[float | None, float | None]
Handles = Callable[[], Sequence[tuple[int, Any]]]


class PcieReader:
    """Reads each GPU in turn while its throughput is wanted."""

    def __init__(self, handles: Handles, monotonic: Callable[[], float]) -> None:
        """`handles` returns (index, handle) of the GPUs that can be read now."""
        self._handles = handles
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._no_thread = False
        self._rates: dict[int, tuple[float, Rates | str]] = {}
        """By GPU: when it was read, and the result."""
        self._unsupported: dict[int, tuple[Any, str]] = {}
        self._reported: dict[int, Any] = {}
        """By GPU: the handle with which the driver has reported it."""

    def want(self) -> None:
        """Read for the next 10 s."""
        with self._lock:
            self._until = self._monotonic() + WANTED_SECONDS
            if self._thread is not None and self._thread.is_alive():
                return
            self._stop = threading.Event()
            thread = threading.Thread(target=self._run, args=(self._stop,), name="memtop-nvml-pcie", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # the system allows no more threads now: the next call tries again
                self._no_thread = True
                return
            self._no_thread = False
            self._thread = thread

    def of(self, index: int) -> Rates | str:
        """Bytes per second sent and received by this GPU, or the reason why they are unknown."""
        if self._monotonic() > self._until:
            return PCIE_NOT_WANTED
        if self._no_thread:
            return _NO_THREAD
        read, rates = self._rates.get(index, (0.0, PCIE_NOT_WANTED))
        if not isinstance(rates, str) and self._monotonic() > read + _OLD_SECONDS:
            return _SILENT
        return rates

    def stop(self, seconds: float = 2.0) -> bool:
        """End the thread. False if the driver does not return within `seconds`."""
        thread = self._thread
        self._until = float("-inf")
        self._stop.set()
        if thread is not None:
            thread.join(seconds)
            if thread.is_alive():
                return False
        self._rates = {}
        self._unsupported = {}
        self._reported = {}
        return True

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            for index, handle in self._handles():
                if stop.is_set():
                    return
                rates = self._read(index, handle)
                self._rates[index] = self._monotonic(), rates
            stop.wait(PAUSE_SECONDS)
            with self._lock:
                if self._monotonic() > self._until:
                    self._rates = {}
                    self._thread = None
                    return

    def _read(self, index: int, handle: Any) -> Rates | str:
        known, reason = self._unsupported.get(index, (None, ""))
        if known is handle:
            return reason
        try:
            sent = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES)
            received = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES)
        except pynvml.NVMLError as error:
            if error.value in codes.NEVER_AGAIN and self._reported.get(index) is not handle:
                self._unsupported[index] = (handle, codes.words(error.value))
            return codes.words(error.value)
        if sent in ALL_ONES or received in ALL_ONES:
            return NOT_REPORTED
        self._reported[index] = handle
        return sent * 1024.0, received * 1024.0  # NVML reports KB/s of 1024 bytes
