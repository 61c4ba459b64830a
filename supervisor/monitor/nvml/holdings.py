"""Reads only free memory and processes of some GPUs, with a few calls for each where a full reading
needs dozens.

`termination` uses it to measure how much memory was freed after processes were ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.memory import HostRam, MemoryReader, Mig
from memtop.supervisor.monitor.nvml.processes import ProcessReader, merge_processes
from memtop.supervisor.monitor.nvml.query import GpuGone, Query
from memtop.supervisor.monitor.values import GpuSample

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
