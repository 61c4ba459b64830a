"""Ends processes that a user has chosen: politely, then firmly, and tells what became of each and of the memory.

Every process is held by a pidfd from the check of its identity to its end, so no signal can reach another program.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import msgspec

from memtop.supervisor import units
from memtop.supervisor.monitor.nvml import NvmlReader
from memtop.supervisor.monitor.processes import ProcessDescriber
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
from memtop.supervisor.monitor.values import GpuSample

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
WAITS = (5.0, 5.0, 2.0)
"""Seconds given to each signal in turn."""
SETTLE_SECONDS = 3.0
"""How long the driver may take to take an ended process off its list."""
UNFREED_ADVICE = "end what shares its GPU context (its parent, its workers); if nobody has the GPU open, only a reset frees it"
_SETTLE_STEP = 0.1
# Drivers count in pages of 2 MiB and keep some for themselves: less than this share missing is not worth a word.
_NEARLY = 0.9
_LOOK_SECONDS = 0.5

StillHolds = Callable[[ProcessId], "bool | None"]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one chosen process."""

    identity: ProcessId
    outcome: str
    """ended | gone (before any signal) | released (lives on without GPU memory) | refused | survived"""
    signal: str | None = None
    """The last signal that was sent."""
    reason: str

    @property
    def is_over(self) -> bool:
        return self.outcome in ("ended", "gone")


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who still has memory on a GPU where less came back than the ended processes had held."""

    gpu_index: int
    used_bytes: int | None
    pid: int | None = None
    """None: no process is listed, yet the memory is in use."""
    user: str | None = None
    name: str | None = None
    ended: bool = False
    """The process has ended, but the driver still lists it."""

    @property
    def text(self) -> str:
        """`GPU 0: 3.0 GiB still held by pid 77 (bob, python)`."""
        line = f"GPU {self.gpu_index}: {units.size(self.used_bytes)} still held by "
        if self.pid is None:
            return line + "no process that is listed"
        if self.ended:
            return line + f"pid {self.pid}, which has ended: {UNFREED_ADVICE}"
        return line + f"pid {self.pid} ({', '.join(word for word in (self.user, self.name) if word) or 'not visible here'})"


class EndReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all of them, and the GPU memory that came back (bytes; None where it cannot be told)."""

    processes: tuple[Ended, ...]
    returned_bytes: int | None = None
    holders: tuple[Holder, ...] = ()
    """Told only for GPUs where less came back than the ended processes had held."""
    unknown: dict[str, str] = {}

    @property
    def memory_text(self) -> str:
        """`2 processes ended, 7.8 GiB returned`, and who holds what did not come back."""
        ended = sum(process.outcome == "ended" for process in self.processes)
        line = f"{ended or 'no'} {'process' if ended in (0, 1) else 'processes'} ended"
        if self.returned_bytes is not None:
            line += f", {units.size(self.returned_bytes)} returned"
        elif ended:
            line += f", memory returned not known: {self.unknown.get('returned_bytes', 'not measured')}"
        return "; ".join([line, *(holder.text for holder in self.holders)])

    @property
    def text(self) -> str:
        """One line for a person: the memory, then who was not ended and why."""
        return "; ".join([self.memory_text, *(process.reason for process in self.processes if process.outcome != "ended")])


def nobody_knows(identity: ProcessId) -> bool | None:
    """For callers who cannot tell whether a process still holds GPU memory."""
    return None


def end_processes(
    chosen: Iterable[ProcessId],
    *,
    waits: Sequence[float] = WAITS,
    still_holds: StillHolds = nobody_knows,
    kernel: Kernel = KERNEL,
) -> list[Ended]:
    """End the chosen processes with SIGINT, SIGTERM, SIGKILL in turn, all side by side, waiting `waits` seconds each.

    Refused, whoever asks: other users' processes (also to root), memtop itself and what it runs in, and a pid that has
    become another process. A process that `still_holds` says has let its GPU memory go is not signalled (again).
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
            reason = f"process {identity.pid} does not react even to {last.name if last else 'signals'}: "
            reason += "it is stuck in the kernel or the driver"
            results[identity] = Ended(identity=identity, outcome="survived", signal=last.name if last else None, reason=reason)
    return [results[identity] for identity in order]


def _open(identity: ProcessId, descriptors: ExitStack, kernel: Kernel) -> int:
    """A pidfd of a process that may be ended from here."""
    if identity.pid in kernel.own_family():
        raise SignalRefused(f"process {identity.pid} is memtop itself, a program that it runs in, or the system")
    descriptor = open_process(identity, kernel)
    descriptors.callback(kernel.close, descriptor)
    check_owner(identity.pid, kernel)
    return descriptor


def _signal_all(
    open_: dict[ProcessId, int],
    number: signal.Signals,
    last: signal.Signals | None,
    still_holds: StillHolds,
    kernel: Kernel,
) -> dict[ProcessId, Ended]:
    """Send to all that are left; take off the list (and return) those that need or allow no further signal."""
    done: dict[ProcessId, Ended] = {}
    for identity, descriptor in open_.items():
        if still_holds(identity) is False:
            reason = f"process {identity.pid} holds no GPU memory any more and was left alone"
            done[identity] = Ended(identity=identity, outcome="released", signal=_name(last), reason=reason)
            continue
        try:
            # Anew before every signal: between two of them it may have become another user's (setuid).
            check_owner(identity.pid, kernel)
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
    """Wait until all have ended or the time is over; take the ended off the list and return them."""
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
    reader: NvmlReader,
    *,
    waits: Sequence[float] = WAITS,
    settle_seconds: float = SETTLE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> EndReport:
    """End the chosen processes and measure, on the GPUs where they were, how much memory came back."""
    pids = {identity.pid for identity in chosen}
    before = {gpu.uuid: gpu for gpu in _fresh(reader) if pids & _pids(gpu)}

    processes = tuple(end_processes(chosen, waits=waits, still_holds=_holder(reader)))
    over = {process.identity.pid for process in processes if process.is_over}
    after = _settled(reader, over, settle_seconds, sleep)
    now = {gpu.uuid: gpu for gpu in after}
    holders = tuple(
        holder
        for uuid, gpu in before.items()
        if uuid in now and _is_short(gpu, now[uuid], over)
        for holder in _holders(now[uuid], over)
    )
    returned = _returned(before, now)
    if isinstance(returned, str):
        return EndReport(processes=processes, holders=holders, unknown={"returned_bytes": returned})
    return EndReport(processes=processes, returned_bytes=returned, holders=holders)


def _is_short(before: GpuSample, after: GpuSample, over: set[int]) -> bool:
    """Whether clearly less is free now than the ended processes should have given back."""
    expected = sum(row.used_bytes or 0 for row in before.processes if row.pid in over)
    if not expected or before.free_bytes is None or after.free_bytes is None:
        return False
    return after.free_bytes - before.free_bytes < _NEARLY * expected


def _holders(gpu: GpuSample, over: set[int]) -> list[Holder]:
    """Everyone on the GPU, the largest first; or the nameless rest where nobody is listed."""
    describer = ProcessDescriber()
    found = []
    for row in gpu.processes:
        facts = describer.describe(row.pid)
        ended = row.pid in over
        found.append(
            Holder(
                gpu_index=gpu.index,
                used_bytes=row.used_bytes,
                pid=row.pid,
                user=None if ended else facts.user,
                name=None if ended else facts.name,
                ended=ended,
            )
        )
    if not found and gpu.used_bytes:
        return [Holder(gpu_index=gpu.index, used_bytes=gpu.used_bytes)]
    return sorted(found, key=lambda holder: (-(holder.used_bytes or 0), holder.pid or 0))


def _holder(reader: NvmlReader) -> StillHolds:
    """Whether the driver lists a process; None where a list could not be read in full. One look serves a whole round of
    signals, since process lists are dear."""
    looked: tuple[float, tuple[GpuSample, ...]] = (float("-inf"), ())

    def holds(identity: ProcessId) -> bool | None:
        nonlocal looked
        if time.monotonic() > looked[0] + _LOOK_SECONDS:
            looked = (time.monotonic(), _fresh(reader))
        gpus = looked[1]
        if any(identity.pid in _pids(gpu) for gpu in gpus):
            return True
        return None if not gpus or any(gpu.error or "processes" in gpu.unknown for gpu in gpus) else False

    return holds


def _settled(reader: NvmlReader, over: set[int], seconds: float, sleep: Callable[[float], None]) -> tuple[GpuSample, ...]:
    """The GPUs once the driver no longer lists the ended processes, or after `seconds`, whichever is sooner."""
    for _ in range(round(seconds / _SETTLE_STEP)):
        gpus = _fresh(reader)
        if not any(over & _pids(gpu) for gpu in gpus):
            return gpus
        sleep(_SETTLE_STEP)
    return _fresh(reader)


def _fresh(reader: NvmlReader) -> tuple[GpuSample, ...]:
    reader.refresh()
    return reader.read().gpus


def _pids(gpu: GpuSample) -> set[int]:
    return {process.pid for process in gpu.processes}


def _returned(before: dict[str | None, GpuSample], after: dict[str | None, GpuSample]) -> int | str:
    """Bytes free now that were not before, or the reason why that cannot be told."""
    if not before:
        return "no chosen process was on a GPU"
    total = 0
    for uuid, gpu in before.items():
        now = after.get(uuid)
        if gpu.free_bytes is None or now is None or now.free_bytes is None:
            return f"GPU {gpu.index} does not tell its memory"
        total += now.free_bytes - gpu.free_bytes
    return total if total >= 0 else "other processes took more memory in the meantime"
