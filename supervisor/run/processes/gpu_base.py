"""Measures the least GPU memory that a run holds outside torch's allocator: the CUDA contexts and
little else."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory, placed, ranks_on

# How much older than the snapshot the driver's process list may be, in seconds, with a margin for
# clock differences.
_LIST_AGE = 3.0


class _Steady(msgspec.Struct):
    """A GPU whose ranks have reported the same number of reserved bytes repeatedly."""

    reserved: int
    since: float
    """When they first reported it, in seconds since the epoch."""
    candidate: int | None = None
    """Memory outside the allocators at the time `seen`. It counts once the ranks have reported the
    same number later."""
    seen: float = 0.0


class GpuBase:
    """The least value in one attempt, by uuid of the GPU or MIG instance.

    The driver's list and the ranks' reports are from different moments, and a wrong minimum would
    never be corrected. So a list counts only if every rank on the GPU reported the same number of
    reserved bytes before and after it.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._attempt: int | None = None
        self._steady: dict[str, _Steady] = {}

    def update(self, attempt: int, machine: MachineSnapshot, ranks: Iterable[RankMemory], pids: Collection[int]) -> None:
        """Add a sample. `pids` are the run's processes. A new attempt starts over."""
        if attempt != self._attempt:
            self._attempt, self._steady, self.bytes = attempt, {}, {}
        ranks = placed(ranks, machine.gpus)
        mine = {*pids, *(rank.pid for rank in ranks)}
        for gpu in machine.gpus:
            for mig in gpu.mig or (None,):
                uuid = gpu.uuid if mig is None else mig.uuid
                here = ranks_on(gpu, ranks, mig=mig)
                rows = [
                    row
                    for row in gpu.processes
                    if row.pid in mine and not row.gone and (mig is None or row.mig_instance == mig.position)
                ]
                if uuid is None or not here or not {rank.pid for rank in here} <= {row.pid for row in rows}:
                    continue
                held, times = [row.used_bytes for row in rows], [rank.time for rank in here]
                reserved = [rank.reserved_bytes for rank in here]
                if None in held or None in times or None in reserved:
                    continue
                self._look(
                    uuid,
                    sum(number for number in held if number is not None),
                    sum(number for number in reserved if number is not None),
                    [time for time in times if time is not None],
                    machine.time,
                    machine.gpu_age_seconds or 0.0,
                )

    def _look(self, uuid: str, held: int, reserved: int, times: list[float], now: float, age: float) -> None:
        steady = self._steady.get(uuid)
        if steady is None or steady.reserved != reserved or held < reserved:
            # The allocator has freed memory since the report.
            self._steady[uuid] = _Steady(reserved, max(now, *times))
            return
        if steady.candidate is not None and min(times) > steady.seen:
            self.bytes = self.bytes | {uuid: min(steady.candidate, self.bytes.get(uuid, steady.candidate))}
            steady.candidate = None
        if now - age - _LIST_AGE >= steady.since:
            outside = held - reserved
            steady.candidate = outside if steady.candidate is None else min(outside, steady.candidate)
            steady.seen = now
