"""The processes on a GPU as the driver lists them: memory by pid, and how busy each kept the GPU."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.ask import Asker
from memtop.supervisor.monitor.values import GpuProcess

_NOT_AVAILABLE = 2**64 - 1
_KINDS = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}
_ROOM = 32
_TRIES = 3
_MOST = 100_000
"""A driver in trouble may name any number: no GPU has more processes (or samples of them)."""
_WINDOW = 2.5
"""Seconds: how far back the driver's samples are looked at, at most. The lists are read every 2 s."""

_NO_MEMORY = "the driver does not tell memory per process here (WSL, MIG, vGPU)"
_NOT_ALL = "the driver does not tell all of this process's memory"
_MPS = "the work of MPS clients is counted for the MPS server"
_HIDDEN = "the driver tells neither memory nor samples of this process"
_SHARES = ("sm_fraction", "memory_bandwidth_fraction", "encoder_fraction", "decoder_fraction")


# Unpacked by hand: the bindings' structures take longer over each field than the driver over the whole list.
_ROW = struct.Struct("@IQII")  # pid, bytes, GPU instance, compute instance
_LONG_ROW = struct.Struct("@IQIIQ")
"""The layout that the first 535 drivers wrote for a while: protected memory at the end."""
_SAMPLE = struct.Struct("@IQIIII")  # pid, microseconds since the epoch, multiprocessors, memory, encoder, decoder


Shares = tuple[float, ...] | str
"""How busy a process kept the parts of the GPU, in the order of `_SHARES` (0-1), or why that is not known."""


class ListRow(NamedTuple):
    """One entry of a driver's list; `used` is None where the driver does not tell it."""

    pid: int
    used: int | None
    gpu_instance: int
    compute_instance: int


class _Buffered:
    """One of the driver's lists, read in one call into a buffer that is kept.

    The bindings' own functions ask for the length first: twice the dearest call there is (milliseconds on some cards).
    """

    def __init__(self, row: struct.Struct, *names: str) -> None:
        """`row`: the layout of an entry; `names`: the functions that give the list, the best first."""
        self._row = row
        self._names = list(names)
        self._room = 0
        self._rows: Any = None
        self._grow(_ROOM)

    def read(self, handle: Any, call: Callable[[Any, Any, Any, Any], int]) -> list[tuple[int, ...]]:
        """The entries. `call` gets function, handle, rows and count. Raises NVMLError."""
        for _ in range(_TRIES):
            count = ctypes.c_uint(self._room)
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

    def _grow(self, room: int) -> None:
        self._room = room
        self._rows = ctypes.create_string_buffer(self._row.size * room)


def _missing(*_: Any) -> int:
    return codes.FUNCTION_NOT_FOUND


def _function(name: str) -> Any:
    """The driver's function itself. The bindings' look-up is private by its name, and the only one that they have."""
    try:
        return pynvml._nvmlGetFunctionPointer(name)
    except pynvml.NVMLError as error:
        if error.value != codes.FUNCTION_NOT_FOUND:
            raise
        return _missing


def _row_layout() -> struct.Struct:
    """The layout of a process row. Drivers that can tell protected memory but not yet the detailed list write the long
    one; read with the short one it yields pids such as 0 and 4294967295, and writes past a buffer made for the short."""
    detailed = _function("nvmlDeviceGetRunningProcessDetailList") is not _missing
    long = not detailed and _function("nvmlDeviceGetConfComputeMemSizeInfo") is not _missing
    return _LONG_ROW if long else _ROW


class ProcessReader:
    """Reads the lists of one handle (a GPU or a MIG instance)."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._lists: dict[str, _Buffered] | None = None
        self._never: dict[str, int] = {}
        self._told: set[str] = set()

    def read(self) -> tuple[dict[str, list[ListRow]], dict[str, int]]:
        """Rows by kind, and NVML's error by kind for lists that could not be read."""
        if self._lists is None:
            self._lists = _make_lists()
        rows: dict[str, list[ListRow]] = {}
        errors = dict(self._never)
        for kind, source in self._lists.items():
            if kind in self._never:
                continue
            try:
                rows[kind] = [_list_row(row) for row in source.read(self._handle, _call_list)]
            except pynvml.NVMLError as error:
                errors[kind] = error.value
                if error.value in codes.NEVER_AGAIN and kind not in self._told:
                    self._never[kind] = error.value
        self._told.update(rows)
        return rows, errors


def _make_lists() -> dict[str, _Buffered]:
    row = _row_layout()
    return {
        kind: _Buffered(row, *(f"nvmlDeviceGet{name}RunningProcesses_v{version}" for version in (3, 2)))
        for kind, name in _KINDS.items()
    }


def _call_list(function: Any, handle: Any, rows: Any, count: Any) -> int:
    return int(function(handle, ctypes.byref(count), rows))


def _list_row(row: tuple[int, ...]) -> ListRow:
    return ListRow(row[0], None if row[1] == _NOT_AVAILABLE else row[1], row[2], row[3])


class UtilizationReader:
    """How busy each process kept the GPU since the last look, from the driver's own samples."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._samples = _Buffered(_SAMPLE, "nvmlDeviceGetProcessUtilization")
        self._seen = 0

    def read(self, now: float) -> dict[int, Shares] | str:
        """Shares (multiprocessors, memory, encoder, decoder; 0-1) by pid, or why they are not known. `now` is seconds
        since the epoch. A pid that is not in the answer was idle: the driver leaves out who did nothing."""
        if self._asker.never(_SHARES[0]):
            return self._asker.reasons()[_SHARES[0]]
        # From the last sample on, but not from long ago: over a long pause the driver would average the pause in.
        if self._seen > now * 1e6:
            self._seen = 0  # the clock was set back: whoever works since then must not seem idle
        since = max(self._seen, int((now - _WINDOW) * 1e6))
        try:
            samples = self._samples.read(self._asker.handle, _call_samples(since))
        except pynvml.NVMLError as error:
            if error.value == codes.NOT_FOUND:
                return {}
            self._asker.failed((_SHARES[0],), error.value)
            return codes.words(error.value)
        self._asker.told((_SHARES[0],))
        # Shares above 100 %: of a process that works, or garbage in unused places of the buffer, whose stamps mean nothing.
        sound = sorted((sample for sample in samples if max(sample[2:]) <= 100), key=lambda sample: sample[1])
        if sound:
            self._seen = sound[-1][1]
        found: dict[int, Shares] = {
            sample[0]: f"the driver reported {max(sample[2:])} %" for sample in samples if max(sample[2:]) > 100
        }
        return found | {sample[0]: tuple(part / 100 for part in sample[2:]) for sample in sound}  # the newest of a pid stays


def _call_samples(since: int) -> Callable[[Any, Any, Any, Any], int]:
    def call(function: Any, handle: Any, rows: Any, count: Any) -> int:
        return int(function(handle, rows, ctypes.byref(count), ctypes.c_ulonglong(since)))

    return call


def merge_processes(
    lists: Iterable[tuple[int | None, dict[str, list[ListRow]]]], pid_max: int
) -> tuple[list[GpuProcess], list[int]]:
    """One row per possible pid and MIG instance, largest first, and the pids that cannot exist.

    Reading a list with another driver's structure size yields pids such as 0 and 4294967295; those are not processes.
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
            # A process in several lists is reported with the same total in each: the largest, not the sum.
            known = [used for kind in kinds if (used := sums[kind][pid]) is not None]
            rows.append(
                GpuProcess(
                    pid=pid,
                    used_bytes=max(known, default=None),
                    # An MPS client may stand in the compute list too; the other word for it would be less.
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
    """Bytes by pid; several rows of one pid in one list add up, unless one of them is not known."""
    sums: dict[int, int | None] = {}
    for row in rows:
        before = sums.get(row.pid, 0)
        sums[row.pid] = None if before is None or row.used is None else before + row.used
    return sums


def with_shares(rows: list[GpuProcess], shares: dict[int, Shares] | str) -> tuple[GpuProcess, ...]:
    """The rows with how busy each process kept the GPU, by pid, or why that is known of none.

    Who is missing from the driver's answer did nothing in the window: a true zero. That holds only for processes that the
    driver sees in full. Where it hides even the memory of one (WSL, other guests), its silence proves nothing; and what
    MPS clients do is counted for their server.
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
    told = not isinstance(found, str)
    shares: dict[str, Any] = dict(zip(_SHARES, found, strict=True)) if told else {}
    return GpuProcess(
        pid=row.pid,
        used_bytes=row.used_bytes,
        kind=row.kind,
        mig_instance=row.mig_instance,
        unknown=row.unknown if told else row.unknown | dict.fromkeys(_SHARES, str(found)),
        **shares,
    )
