"""Which processes may be chosen to be ended: one rule for the command line, the dashboard and the last look before a signal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.proc import ProcessId
from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot

NOT_YOURS = "it is not yours"


def forbidden(rows: Iterable[GpuProcess]) -> Mapping[int, str]:
    """Why a process must not be ended, by pid. It has a row on each of its GPUs; one that forbids it (graphics) is enough."""
    found: dict[int, str] = {}
    for row in rows:
        if not row.choosable:
            found.setdefault(row.pid, row.reason or NOT_YOURS)
    return found


def agreed(by_gpu: Sequence[tuple[GpuProcess, ...]]) -> tuple[tuple[GpuProcess, ...], ...]:
    """The rows of all GPUs, a process choosable on all of its rows or on none: whoever sees one GPU only must not be misled."""
    reasons = forbidden(row for rows in by_gpu for row in rows)
    return tuple(tuple(overruled(row, reasons) for row in rows) for rows in by_gpu)


def overruled(row: GpuProcess, reasons: Mapping[int, str]) -> GpuProcess:
    """The row, not choosable where another row of its process forbids it, with that row's reason."""
    if not row.choosable or row.pid not in reasons:
        return row
    return msgspec.structs.replace(row, choosable=False, reason=reasons[row.pid])


def rows_of(snapshot: MachineSnapshot) -> Iterable[GpuProcess]:
    """The rows of all GPUs."""
    return (row for gpu in snapshot.gpus for row in gpu.processes)


def choose(snapshot: MachineSnapshot, pids: Iterable[int]) -> list[ProcessId]:
    """The processes that the user picked by number, as sampled. Raises RefusedError for the first that
    is not on a GPU or must not be ended, with the reason; then none is to be ended."""
    listed = {row.pid: row for row in rows_of(snapshot)}
    reasons = forbidden(rows_of(snapshot))
    chosen = []
    for pid in dict.fromkeys(pids):
        row = listed.get(pid)
        if row is None:
            raise RefusedError(f"process {pid} is not on a GPU")
        if pid in reasons or row.started_ticks is None:
            raise RefusedError(f"process {pid} is not to be ended from here: {reasons.get(pid, row.reason)}")
        chosen.append(ProcessId(pid, row.started_ticks))
    return chosen
