"""Measures what the driver cannot return at once: how busy multiprocessors and tensor cores are,
and PCIe throughput.

GPM metrics (Hopper and newer GPUs) compare two samples. A PCIe value takes 20 ms, so a separate
thread reads them, on demand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.query import ALL_ONES, NOT_REPORTED, Query

_FIELDS = ("sm_active_fraction", "tensor_active_fraction")
_METRICS = (2, 5)  # share of busy multiprocessors; share of time with tensor operations
_OLDER = "only Hopper and newer GPUs report it"
_NOT_HERE = "the driver does not report it for this GPU, although this architecture has it"
_UNKNOWN_KIND = "the driver does not report it for this GPU; only Hopper and newer GPUs have it"
_HOPPER = 9  # the major number of its compute capability
_FIRST = "it needs two readings, 5 s apart"


def _supported(answer: Any) -> bool:
    return bool(answer.isSupportedDevice)


def _why_not(compute_capability: str | None) -> str:
    if compute_capability is None:
        return _UNKNOWN_KIND
    return _OLDER if int(compute_capability.partition(".")[0]) < _HOPPER else _NOT_HERE


class Gpm:
    """Compares two samples of one GPU.

    Every read takes a new sample and compares it with the last, so that no read waits.
    """

    def __init__(self, query: Query) -> None:
        self._query = query
        self._supported: bool | None = None
        self._samples: list[Any] = []
        self._taken = 0
        self._question: Any = None
        self._sampled = False

    def read(self, compute_capability: str | None) -> dict[str, Any]:
        """Both fractions (0-1) since the last call.

        Empty if unknown; the reason is noted. Raises GpuGone.

        `compute_capability`, for example `9.0`, is used in the reason if the driver does not
        support GPM.
        """
        if self._supported is None:
            self._supported = self._query.ask(_FIELDS, "nvmlGpmQueryDeviceSupport", convert=_supported)
            if self._supported is None and self._query.is_unsupported(_FIELDS[0]):
                self._supported = False
            elif self._supported is False:
                self._query.note(_FIELDS, _why_not(compute_capability))
        if not self._supported:
            return {}
        try:
            return self._compare()
        except pynvml.NVMLError as error:
            self._taken = 0
            self._query.failed(_FIELDS, error.value)
            if error.value in codes.NEVER_AGAIN and not self._sampled:
                self._supported = False
            return {}

    def close(self) -> None:
        """Free the samples in the driver."""
        samples, self._samples, self._taken = self._samples, [], 0
        for sample in samples:
            try:
                pynvml.nvmlGpmSampleFree(sample)
            except pynvml.NVMLError as error:
                # If the driver is gone, so is its memory. Any other error leaks a few bytes and
                # changes no value.
                if error.value in codes.GPU_GONE:
                    return

    def _compare(self) -> dict[str, Any]:
        while len(self._samples) < 2:
            self._samples.append(pynvml.nvmlGpmSampleAlloc())
        older, newer = self._samples
        pynvml.nvmlGpmSampleGet(self._query.handle, older)  # overwrite the older sample ...
        self._sampled = True
        self._samples = [newer, older]  # ... which is now the newer one
        self._taken += 1
        if self._taken < 2:
            self._query.note(_FIELDS, _FIRST)
            return {}
        if self._question is None:
            self._question = pynvml.c_nvmlGpmMetricsGet_t()
            self._question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
            self._question.numMetrics = len(_METRICS)
        question = self._question
        question.sample1, question.sample2 = self._samples
        for place, metric in enumerate(_METRICS):
            question.metrics[place].metricId = metric
        pynvml.nvmlGpmMetricsGet(question)
        return self._values(question)

    def _values(self, question: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for place, field in enumerate(_FIELDS):
            answer = question.metrics[place]
            if answer.nvmlReturn:
                self._query.note((field,), codes.words(answer.nvmlReturn))
            elif not 0 <= answer.value <= 100:
                self._query.note((field,), f"the driver reported {answer.value} %")
            else:
                self._query.clear((field,))
                values[field] = answer.value / 100
        return values


PCIE_NOT_WANTED = "read only while GPU details are displayed"
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
