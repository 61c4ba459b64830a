"""Reads the driver's process lists: memory by pid, and how busy each process keeps the GPU."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.query import Query
from memtop.supervisor.monitor.values import GpuProcess

_NOT_AVAILABLE = 2**64 - 1
_KINDS = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}
_FIRST_LENGTH = 32
_TRIES = 3
_MOST = 100_000
"""No GPU has more processes. A driver in trouble may report any number."""
_WINDOW = 2.5
"""How far back the driver's samples count at most, in seconds. The lists are read every 2 s."""

_NO_MEMORY = "the driver does not report memory per process here (WSL, MIG, vGPU)"
_NOT_ALL = "the driver does not report all of this process's memory"
_MPS = "the driver counts the work of MPS clients for the MPS server"
_HIDDEN = "the driver reports neither memory nor utilisation of this process"
_SHARES = ("sm_fraction", "memory_bandwidth_fraction", "encoder_fraction", "decoder_fraction")


# Unpacked by hand: the bindings' structures need more time for one field than the driver for the
# whole list.
_ROW = struct.Struct("@IQII")  # pid, bytes, GPU instance, compute instance
_LONG_ROW = struct.Struct("@IQIIQ")
"""The layout of some early 535 drivers, with protected memory at the end."""
# pid, microseconds since the epoch, multiprocessors, memory, encoder, decoder
_SAMPLE = struct.Struct("@IQIIII")


Shares = tuple[float, ...] | str
"""How busy a process keeps each part of the GPU, in the order of `_SHARES` (0-1), or the reason why
it is unknown."""


class ListRow(NamedTuple):
    """One entry of a process list. `used` is in bytes, None if the driver does not report it."""

    pid: int
    used: int | None
    gpu_instance: int
    compute_instance: int


class _BufferedList:
    """Reads one of the driver's lists with one call, into a buffer that is reused.

    The bindings' own functions make two calls, the first for the length. The call is the most
    expensive one of all (milliseconds on some cards).
    """

    def __init__(self, row: struct.Struct, *names: str) -> None:
        """`row`: the layout of an entry.

        `names`: the functions that return the list, the best first.
        """
        self._row = row
        self._names = list(names)
        self._length = 0
        self._rows: Any = None
        self._grow(_FIRST_LENGTH)

    def read(self, handle: Any, call: Callable[[Any, Any, Any, Any], int]) -> list[tuple[int, ...]]:
        """The entries. `call` receives function, handle, rows and count. Raises NVMLError."""
        for _ in range(_TRIES):
            count = ctypes.c_uint(self._length)
            code = self._ask(handle, count, call)
            if code != codes.TOO_SMALL or count.value > _MOST:
                break
            self._grow(2 * count.value + 5)
        if code:
            raise pynvml.NVMLError(code)
        return list(self._row.iter_unpack(memoryview(self._rows)[: self._row.size * count.value]))

    def _ask(self, handle: Any, count: Any, call: Callable[[Any, Any, Any, Any], int]) -> int:
        while True:
            code = call(_function(self._names[0]), handle, self._rows, count)
            if code != codes.FUNCTION_NOT_FOUND or len(self._names) == 1:
                return code
            self._names.pop(0)

    def _grow(self, length: int) -> None:
        self._length = length
        self._rows = ctypes.create_string_buffer(self._row.size * length)


def _missing(*_: Any) -> int:
    return codes.FUNCTION_NOT_FOUND


def _function(name: str) -> Any:
    """The driver's function. The bindings have no public way to look it up."""
    try:
        return pynvml._nvmlGetFunctionPointer(name)
    except pynvml.NVMLError as error:
        if error.value != codes.FUNCTION_NOT_FOUND:
            raise
        return _missing


def _row_layout() -> struct.Struct:
    """The layout of a process row.

    Drivers that report protected memory but lack the detailed list write the long layout. Read as
    the short layout it yields pids such as 0 and 4294967295, and the driver writes past the end of
    a buffer for the short one.
    """
    detailed = _function("nvmlDeviceGetRunningProcessDetailList") is not _missing
    long = not detailed and _function("nvmlDeviceGetConfComputeMemSizeInfo") is not _missing
    return _LONG_ROW if long else _ROW


class ProcessReader:
    """Reads the process lists of one handle (a GPU or a MIG instance)."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._lists: dict[str, _BufferedList] | None = None
        self._unsupported: dict[str, int] = {}
        self._reported: set[str] = set()

    def read(self) -> tuple[dict[str, list[ListRow]], dict[str, int]]:
        """Rows by kind, and by kind NVML's error for lists that could not be read."""
        if self._lists is None:
            self._lists = _make_lists()
        rows: dict[str, list[ListRow]] = {}
        errors = dict(self._unsupported)
        for kind, source in self._lists.items():
            if kind in self._unsupported:
                continue
            try:
                rows[kind] = [_list_row(row) for row in source.read(self._handle, _call_list)]
            except pynvml.NVMLError as error:
                errors[kind] = error.value
                if error.value in codes.NEVER_AGAIN and kind not in self._reported:
                    self._unsupported[kind] = error.value
        self._reported.update(rows)
        return rows, errors


def _make_lists() -> dict[str, _BufferedList]:
    row = _row_layout()
    return {
        kind: _BufferedList(row, *(f"nvmlDeviceGet{name}RunningProcesses_v{version}" for version in (3, 2)))
        for kind, name in _KINDS.items()
    }


def _call_list(function: Any, handle: Any, rows: Any, count: Any) -> int:
    return int(function(handle, ctypes.byref(count), rows))


def _list_row(row: tuple[int, ...]) -> ListRow:
    return ListRow(row[0], None if row[1] == _NOT_AVAILABLE else row[1], row[2], row[3])


class UtilizationReader:
    """Reads how busy each process kept the GPU since the last read, from the driver's own
    samples."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._samples = _BufferedList(_SAMPLE, "nvmlDeviceGetProcessUtilization")
        self._seen = 0

    def read(self, now: float) -> dict[int, Shares] | str:
        """Shares by pid (multiprocessors, memory, encoder, decoder; 0-1), or the reason why they
        are unknown.

        `now` is seconds since the epoch. The driver leaves out idle processes, so a missing pid was
        idle.
        """
        if self._query.is_unsupported(_SHARES[0]):
            return self._query.reasons()[_SHARES[0]]
        # Ask for samples since the last one, but not over a long pause: the driver would include it
        # in the average.
        if self._seen > now * 1e6:
            # the clock was set back: processes that work since then must not seem idle
            self._seen = 0
        since = max(self._seen, int((now - _WINDOW) * 1e6))
        try:
            samples = self._samples.read(self._query.handle, _call_samples(since))
        except pynvml.NVMLError as error:
            if error.value == codes.NOT_FOUND:
                return {}
            self._query.failed((_SHARES[0],), error.value)
            return codes.words(error.value)
        self._query.reported((_SHARES[0],))
        # Shares above 100 % are wrong values, or garbage in unused parts of the buffer: ignore
        # their time stamps.
        sound = sorted((sample for sample in samples if max(sample[2:]) <= 100), key=lambda sample: sample[1])
        if sound:
            self._seen = sound[-1][1]
        found: dict[int, Shares] = {
            sample[0]: f"the driver reported {max(sample[2:])} %" for sample in samples if max(sample[2:]) > 100
        }
        # Of several samples of a pid, the newest is kept.
        return found | {sample[0]: tuple(part / 100 for part in sample[2:]) for sample in sound}


def _call_samples(since: int) -> Callable[[Any, Any, Any, Any], int]:
    def call(function: Any, handle: Any, rows: Any, count: Any) -> int:
        return int(function(handle, rows, ctypes.byref(count), ctypes.c_ulonglong(since)))

    return call


def merge_processes(
    lists: Iterable[tuple[int | None, dict[str, list[ListRow]]]], pid_max: int
) -> tuple[list[GpuProcess], list[int]]:
    """One row for each pid and MIG instance, largest first, and the pids that cannot exist.

    A list that is read with another driver's structure size contains pids such as 0 and 4294967295.
    """
    rows: list[GpuProcess] = []
    dropped: set[int] = set()
    for instance, by_kind in lists:
        sums = {kind: _bytes_by_pid(entries) for kind, entries in by_kind.items()}
        for pid in {pid for by_pid in sums.values() for pid in by_pid}:
            if not 0 < pid <= pid_max:
                dropped.add(pid)
                continue
            kinds = [kind for kind, by_pid in sums.items() if pid in by_pid]
            # A process in several lists has the same total in each: take the largest, not the sum.
            known = [used for kind in kinds if (used := sums[kind][pid]) is not None]
            rows.append(
                GpuProcess(
                    pid=pid,
                    used_bytes=max(known, default=None),
                    # An MPS client may also be in the compute list. `mps` says more.
                    kind="mps" if "mps" in kinds else "+".join(kinds),
                    mig_instance=instance,
                    unknown={} if known else {"used_bytes": _why_no_memory(pid, by_kind)},
                )
            )
    rows.sort(key=lambda row: (-(row.used_bytes or 0), row.pid))
    return rows, sorted(dropped)


def _why_no_memory(pid: int, by_kind: Mapping[str, list[ListRow]]) -> str:
    partly = any(row.used is not None for rows in by_kind.values() for row in rows if row.pid == pid)
    return _NOT_ALL if partly else _NO_MEMORY


def _bytes_by_pid(rows: list[ListRow]) -> dict[int, int | None]:
    """Bytes by pid.

    Several rows of one pid in one list are added up; None if one of them is unknown.
    """
    sums: dict[int, int | None] = {}
    for row in rows:
        before = sums.get(row.pid, 0)
        sums[row.pid] = None if before is None or row.used is None else before + row.used
    return sums


def with_shares(rows: list[GpuProcess], shares: dict[int, Shares] | str) -> tuple[GpuProcess, ...]:
    """Add to each row how busy its process kept the GPU, or the reason why that is unknown.

    A process that is missing from `shares` was idle: a true zero. This holds only for processes
    that the driver sees in full. It proves nothing about a process whose memory the driver does not
    report (WSL, other guests), nor about MPS clients, whose work is counted for their server.
    """
    done = []
    for row in rows:
        found: Shares
        if isinstance(shares, str):
            found = shares
        elif row.pid in shares:
            found = shares[row.pid]
        elif row.kind == "mps":
            found = _MPS
        else:
            found = _HIDDEN if row.used_bytes is None else (0.0, 0.0, 0.0, 0.0)
        done.append(_with(row, found))
    return tuple(done)


def _with(row: GpuProcess, found: Shares) -> GpuProcess:
    known = not isinstance(found, str)
    shares: dict[str, Any] = dict(zip(_SHARES, found, strict=True)) if known else {}
    unknown = row.unknown if known else row.unknown | dict.fromkeys(_SHARES, str(found))
    return msgspec.structs.replace(row, unknown=unknown, **shares)
