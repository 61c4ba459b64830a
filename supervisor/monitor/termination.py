"""Ends processes that a user has selected, first with SIGINT, and measures how much GPU memory was
freed.

Every process is held by a pidfd from the check of its identity to its end, so no signal can reach
another process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import msgspec

from memtop.supervisor import units
from memtop.supervisor.monitor.nvml.device import HoldingsReader
from memtop.supervisor.monitor.nvml.thread import Reader, ReaderThread
from memtop.supervisor.monitor.processes.facts import ProcessDescriber
from memtop.supervisor.monitor.processes.proc import ProcessId
from memtop.supervisor.monitor.processes.signals import (
    KERNEL,
    Kernel,
    ProcessGone,
    SignalRefused,
    check_owner,
    open_process,
    send_signal,
)
from memtop.supervisor.monitor.strays import UNFREED_ADVICE
from memtop.supervisor.monitor.values import GpuProcess, GpuSample, MachineSnapshot

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
WAITS = (5.0, 5.0, 2.0)
"""How long to wait after each signal, in seconds."""
SETTLE_SECONDS = 3.0
"""How long to wait until the driver no longer lists an ended process."""
PATIENCE_SECONDS = 1.0
"""How long a signal waits for the driver. It is then sent anyway: users end processes because a GPU
is in trouble."""
_SETTLE_STEP = 0.1
# Drivers count in pages of 2 MiB and keep some of them. If this share of the memory was freed,
# nothing is missing.
_NEARLY = 0.9
_LOOK_SECONDS = 0.5
_NOT_ON_A_GPU = "no selected process was on a GPU"
_SILENT = "the driver did not answer in time"

StillHolds = Callable[[ProcessId], "bool | None"]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one selected process."""

    identity: ProcessId
    outcome: str
    """ended | gone (before any signal) | released (still runs, but without GPU memory) | refused |
    survived"""
    signal: str | None = None
    """The last signal that was sent."""
    reason: str

    @property
    def is_over(self) -> bool:
        return self.outcome in ("ended", "gone")


class MemoryHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that still holds memory of a GPU where less was freed than the ended processes had
    held."""

    gpu_index: int
    used_bytes: int | None
    pid: int | None = None
    """None: memory is in use although no process is listed."""
    user: str | None = None
    name: str | None = None
    ended: bool = False
    """The process has ended, but the driver still lists it."""

    @property
    def text(self) -> str:
        """`GPU 0: 3.0 GiB still held by pid 77 (bob, python)`."""
        holder = f"pid {self.pid} ({', '.join(word for word in (self.user, self.name) if word) or 'not visible here'})"
        if self.pid is None:
            holder = "no listed process"
        elif self.ended:
            holder = f"pid {self.pid}, which has ended: {UNFREED_ADVICE}"
        return f"GPU {self.gpu_index}: {units.size(self.used_bytes)} still held by {holder}"


class EndReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to all selected processes, and how many bytes of GPU memory were freed (None if
    unknown)."""

    processes: tuple[Ended, ...]
    returned_bytes: int | None = None
    holders: tuple[MemoryHolder, ...] = ()
    """Only for GPUs where less memory was freed than the ended processes had held."""
    unknown: dict[str, str] = {}

    @property
    def memory_text(self) -> str:
        """`2 processes ended, 7.8 GiB returned`, and the processes that hold the rest."""
        ended = sum(process.outcome == "ended" for process in self.processes)
        line = f"{ended} processes ended" if ended > 1 else "1 process ended" if ended else "no process ended"
        if self.returned_bytes is not None:
            line += f", {units.size(self.returned_bytes)} returned"
        elif ended:
            line += f", memory returned not known: {self.unknown.get('returned_bytes', 'not measured')}"
        return "; ".join([line, *(holder.text for holder in self.holders)])

    @property
    def text(self) -> str:
        """One line: the memory, then the processes that were not ended, with reasons."""
        return "; ".join([self.memory_text, *(process.reason for process in self.processes if process.outcome != "ended")])


def _unknown_if_held(identity: ProcessId) -> bool | None:
    """For callers that do not know whether a process still holds GPU memory."""
    return None


def end_processes(
    chosen: Iterable[ProcessId],
    *,
    waits: Sequence[float] = WAITS,
    still_holds: StillHolds = _unknown_if_held,
    kernel: Kernel = KERNEL,
) -> list[Ended]:
    """End processes with SIGINT, SIGTERM and SIGKILL in turn, all in parallel, waiting `waits`
    seconds after each signal.

    Always refused, also for root: other users' processes, memtop itself and its ancestors, and a
    pid that now belongs to another process. A process for which `still_holds` returns False gets no
    (further) signal.
    """
    order = list(dict.fromkeys(chosen))
    results: dict[ProcessId, Ended] = {}
    with ExitStack() as descriptors:
        open_: dict[ProcessId, int] = {}
        for identity in order:
            try:
                open_[identity] = _open(identity, descriptors, kernel)
            except ProcessGone as gone:
                results[identity] = Ended(identity=identity, outcome="gone", reason=str(gone))
            except SignalRefused as refusal:
                results[identity] = Ended(identity=identity, outcome="refused", reason=str(refusal))
        last: signal.Signals | None = None
        for number, wait in zip(SIGNALS, waits, strict=True):
            results |= _signal_all(open_, number, last, still_holds, kernel)
            results |= _wait(open_, number, wait, kernel)
            last = number
        for identity in open_:
            sent = last.name if last else "signals"
            reason = f"process {identity.pid} does not react even to {sent}: it hangs in the kernel or the driver"
            results[identity] = Ended(identity=identity, outcome="survived", signal=last.name if last else None, reason=reason)
    return [results[identity] for identity in order]


def _open(identity: ProcessId, descriptors: ExitStack, kernel: Kernel) -> int:
    """A pidfd of a process that may be ended."""
    if identity.pid in kernel.own_family():
        raise SignalRefused(f"process {identity.pid} is memtop itself, a program that it runs in, or the system")
    descriptor = open_process(identity, kernel)
    descriptors.callback(kernel.close, descriptor)
    _check_owner(identity, descriptor, kernel)
    return descriptor


def _check_owner(identity: ProcessId, descriptor: int, kernel: Kernel) -> None:
    """Raise SignalRefused unless the process belongs entirely to this user, ProcessGone if it has
    ended."""
    try:
        check_owner(identity.pid, kernel)
    except ProcessGone:
        raise
    except SignalRefused:
        # The owner was read by pid. If our process has ended, the pid may already belong to another
        # process.
        if kernel.has_ended(descriptor):
            raise ProcessGone(f"process {identity.pid} has already ended") from None
        raise


def _signal_all(
    open_: dict[ProcessId, int],
    number: signal.Signals,
    last: signal.Signals | None,
    still_holds: StillHolds,
    kernel: Kernel,
) -> dict[ProcessId, Ended]:
    """Signal all remaining processes.

    Remove and return those that need or allow no further signal.
    """
    done: dict[ProcessId, Ended] = {}
    for identity, descriptor in open_.items():
        if still_holds(identity) is False:
            reason = f"process {identity.pid} holds no GPU memory any more and gets no signal"
            done[identity] = Ended(identity=identity, outcome="released", signal=_name(last), reason=reason)
            continue
        try:
            # Check again before every signal: the process may have changed its user in the meantime
            # (setuid).
            _check_owner(identity, descriptor, kernel)
            send_signal(descriptor, identity.pid, number, kernel)
        except ProcessGone as gone:
            outcome = "ended" if last else "gone"
            done[identity] = Ended(identity=identity, outcome=outcome, signal=_name(last), reason=str(gone))
        except SignalRefused as refusal:
            done[identity] = Ended(identity=identity, outcome="refused", signal=_name(last), reason=str(refusal))
    for identity in done:
        del open_[identity]
    return done


def _wait(open_: dict[ProcessId, int], number: signal.Signals, seconds: float, kernel: Kernel) -> dict[ProcessId, Ended]:
    """Wait until all have ended, at most `seconds`. Remove and return those that have ended."""
    waiting = {descriptor: identity for identity, descriptor in open_.items()}
    done: dict[ProcessId, Ended] = {}
    deadline = time.monotonic() + seconds
    while waiting:
        left = deadline - time.monotonic()
        for descriptor in kernel.wait(waiting, left):
            identity = waiting.pop(descriptor)
            del open_[identity]
            reason = f"process {identity.pid} ended on {number.name}"
            done[identity] = Ended(identity=identity, outcome="ended", signal=number.name, reason=reason)
        if left <= 0:
            break
    return done


def _name(number: signal.Signals | None) -> str | None:
    return None if number is None else number.name


def end_and_measure(
    chosen: Sequence[ProcessId],
    machine: MachineSnapshot,
    *,
    waits: Sequence[float] = WAITS,
    patience: float = PATIENCE_SECONDS,
    settle_seconds: float = SETTLE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    reader: Callable[[Sequence[GpuSample]], Reader[tuple[GpuSample, ...]]] = HoldingsReader,
) -> EndReport:
    """End processes and measure how much memory was freed on the GPUs where `machine` lists them.

    Only the memory and the processes of these GPUs are read. No signal waits for the driver longer
    than `patience` seconds, and the report no longer than `settle_seconds`. What the driver has not
    reported by then stays unknown.
    """
    pids = {identity.pid for identity in chosen}
    where = tuple(gpu for gpu in machine.gpus if pids & _pids(gpu))
    driver = ReaderThread(reader(where or machine.gpus))
    try:
        first = driver.wait(patience, fresh=True)
        # The processes hold nothing on the other GPUs, unless a process list is incomplete.
        elsewhere_known = all(_is_listed(gpu) for gpu in machine.gpus if gpu not in where)
        still_holds = _holder(driver, first, patience) if elsewhere_known else _unknown_if_held
        processes = tuple(end_processes(chosen, waits=waits, still_holds=still_holds))
        over = {process.identity.pid for process in processes if process.is_over}
        after = _settled(driver, over, settle_seconds, sleep)
    finally:
        driver.close()
    places = {gpu.index for gpu in where}
    before = [gpu for gpu in first or where if gpu.index in places or pids & _pids(gpu)]
    if after is None or (first is None and machine.gpu_age_seconds is not None):
        return EndReport(processes=processes, unknown={"returned_bytes": _SILENT if before else _NOT_ON_A_GPU})
    now = {gpu.index: gpu for gpu in after}
    returned = {gpu.index: _returned(gpu, now[gpu.index], pids) for gpu in before}
    holders = tuple(
        holder
        for gpu in before
        if _is_short(gpu, now[gpu.index], over, returned[gpu.index])
        for holder in _holders(now[gpu.index], over)
    )
    total = _total(returned.values())
    if isinstance(total, str):
        return EndReport(processes=processes, holders=holders, unknown={"returned_bytes": total})
    return EndReport(processes=processes, returned_bytes=total, holders=holders)


def _is_short(before: GpuSample, after: GpuSample, over: set[int], returned: int | str) -> bool:
    """Whether clearly less memory was freed than the ended processes had held."""
    expected = sum(row.used_bytes or 0 for row in before.processes if row.pid in over)
    if isinstance(returned, str):
        if before.free_bytes is None or after.free_bytes is None:
            return False
        returned = after.free_bytes - before.free_bytes
    return bool(expected) and returned < _NEARLY * expected


def _holders(gpu: GpuSample, over: set[int]) -> list[MemoryHolder]:
    """All processes on the GPU, the largest first. If none is listed, one holder without a pid."""
    describer = ProcessDescriber()
    found = []
    for row in gpu.processes:
        facts = describer.describe(row.pid)
        ended = row.pid in over
        found.append(
            MemoryHolder(
                gpu_index=gpu.index,
                used_bytes=row.used_bytes,
                pid=row.pid,
                user=None if ended else facts.user,
                name=None if ended else facts.name,
                ended=ended,
            )
        )
    if not found and gpu.used_bytes:
        return [MemoryHolder(gpu_index=gpu.index, used_bytes=gpu.used_bytes)]
    return sorted(found, key=lambda holder: (-(holder.used_bytes or 0), holder.pid or 0))


def _holder(driver: ReaderThread[tuple[GpuSample, ...]], first: tuple[GpuSample, ...] | None, patience: float) -> StillHolds:
    """A function that returns whether the driver lists a process, None if it does not report in
    time or not completely.

    One reading serves a whole round of signals, because process lists are expensive. `first` serves
    the first round.
    """
    looked = (time.monotonic(), first)

    def holds(identity: ProcessId) -> bool | None:
        nonlocal looked
        if time.monotonic() > looked[0] + _LOOK_SECONDS:
            gpus = driver.wait(patience, fresh=True)
            # Its age counts from its end, so that a slow reading still serves the next process.
            looked = (time.monotonic(), gpus)
        gpus = looked[1]
        if gpus is not None and any(identity.pid in _pids(gpu) for gpu in gpus):
            return True
        return False if gpus and all(_is_listed(gpu) for gpu in gpus) else None

    return holds


def _settled(
    driver: ReaderThread[tuple[GpuSample, ...]], over: set[int], seconds: float, sleep: Callable[[float], None]
) -> tuple[GpuSample, ...] | None:
    """The GPUs once the driver no longer lists the ended processes, at the latest after `seconds`.

    None if the driver has not answered until then.
    """
    newest: tuple[GpuSample, ...] | None = None
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        newest = driver.wait(left, fresh=True) or newest
        if newest is not None and all(_is_listed(gpu) and not over & _pids(gpu) for gpu in newest):
            break
        sleep(_SETTLE_STEP)
    return newest


def _is_listed(gpu: GpuSample) -> bool:
    """Whether the driver lists all processes of the GPU."""
    return gpu.error is None and "processes" not in gpu.unknown


def _pids(gpu: GpuSample) -> set[int]:
    return {process.pid for process in gpu.processes}


def _returned(before: GpuSample, after: GpuSample, chosen: set[int]) -> int | str:
    """Bytes of one GPU that the selected processes freed, or the reason why that is unknown.

    This is the increase of free memory, less what other processes freed and plus what they
    allocated in the meantime.
    """
    if before.free_bytes is None or after.free_bytes is None:
        return f"the memory of GPU {before.index} is not known"
    if not (_is_listed(before) and _is_listed(after)):
        return f"not all processes of GPU {before.index} are known"
    had, have = (_others(gpu.processes, chosen) for gpu in (before, after))
    if had is None or have is None:
        return f"the driver does not report the memory of other processes on GPU {before.index}"
    returned = after.free_bytes - before.free_bytes - (had - have)
    return returned if returned >= 0 else "other processes allocated more memory in the meantime"


def _others(rows: Iterable[GpuProcess], chosen: set[int]) -> int | None:
    """Bytes of all other processes. None if the driver does not report the memory of each."""
    sizes = [row.used_bytes for row in rows if row.pid not in chosen]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _total(returned: Iterable[int | str]) -> int | str:
    """The sum over all GPUs, or the reason why one of them is unknown."""
    every = list(returned)
    reason = next((one for one in every if isinstance(one, str)), None if every else _NOT_ON_A_GPU)
    return sum(one for one in every if isinstance(one, int)) if reason is None else reason
