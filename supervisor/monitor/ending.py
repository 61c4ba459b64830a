"""Ends processes that a user has chosen: politely, then firmly, and tells what became of each and of the memory.

Every process is held by a pidfd from the check of its identity to its end, so no signal can reach another program.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import msgspec

from memtop.supervisor import units
from memtop.supervisor.monitor.nvml import NvmlReader
from memtop.supervisor.monitor.processes import (
    ProcessGone,
    ProcessId,
    SignalRefused,
    open_process,
    own_family,
    owner_of,
    send_signal,
    user_name,
)
from memtop.supervisor.monitor.values import GpuSample

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
WAITS = (5.0, 5.0, 2.0)
"""Seconds given to each signal in turn."""
SETTLE_SECONDS = 3.0
"""How long the driver may take to take an ended process off its list."""
_SETTLE_STEP = 0.1
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


class EndReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all of them, and the GPU memory that came back (bytes; None where it cannot be told)."""

    processes: tuple[Ended, ...]
    returned_bytes: int | None = None
    unknown: dict[str, str] = {}

    @property
    def text(self) -> str:
        """One line for a person: `2 processes ended, 7.8 GiB returned`, then who was not ended and why."""
        ended = sum(process.outcome == "ended" for process in self.processes)
        line = f"{ended or 'no'} {'process' if ended in (0, 1) else 'processes'} ended"
        if self.returned_bytes is not None:
            line += f", {units.size(self.returned_bytes)} returned"
        elif ended:
            line += f", memory returned not known: {self.unknown.get('returned_bytes', 'not measured')}"
        others = [process.reason for process in self.processes if process.outcome != "ended"]
        return "; ".join([line, *others])


def nobody_knows(identity: ProcessId) -> bool | None:
    """For callers who cannot tell whether a process still holds GPU memory."""
    return None


def end_processes(
    chosen: Iterable[ProcessId], *, waits: Sequence[float] = WAITS, still_holds: StillHolds = nobody_knows
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
                open_[identity] = _open(identity, descriptors)
            except ProcessGone as gone:
                results[identity] = Ended(identity=identity, outcome="gone", reason=str(gone))
            except SignalRefused as refusal:
                results[identity] = Ended(identity=identity, outcome="refused", reason=str(refusal))
        last: signal.Signals | None = None
        for number, wait in zip(SIGNALS, waits, strict=True):
            results |= _signal_all(open_, number, last, still_holds)
            results |= _wait(open_, number, wait)
            last = number
        for identity in open_:
            reason = f"process {identity.pid} does not react even to {last.name if last else 'signals'}: "
            reason += "it is stuck in the kernel or the driver"
            results[identity] = Ended(identity=identity, outcome="survived", signal=last.name if last else None, reason=reason)
    return [results[identity] for identity in order]


def _open(identity: ProcessId, descriptors: ExitStack) -> int:
    """A pidfd of a process that may be ended from here."""
    if identity.pid in own_family():
        raise SignalRefused(f"process {identity.pid} is memtop itself, a program that it runs in, or the system")
    descriptor = open_process(identity)
    descriptors.callback(os.close, descriptor)
    owner = owner_of(identity.pid)
    if owner is None:
        raise ProcessGone(f"process {identity.pid} has already ended")
    if owner != os.getuid():
        raise SignalRefused(f"process {identity.pid} belongs to {user_name(owner)}: memtop ends only your own")
    return descriptor


def _signal_all(
    open_: dict[ProcessId, int], number: signal.Signals, last: signal.Signals | None, still_holds: StillHolds
) -> dict[ProcessId, Ended]:
    """Send to all that are left; take off the list (and return) those that need or allow no further signal."""
    done: dict[ProcessId, Ended] = {}
    for identity, descriptor in open_.items():
        if still_holds(identity) is False:
            reason = f"process {identity.pid} holds no GPU memory any more and was left alone"
            done[identity] = Ended(identity=identity, outcome="released", signal=_name(last), reason=reason)
            continue
        try:
            send_signal(descriptor, identity.pid, number)
        except ProcessGone as gone:
            outcome = "ended" if last else "gone"
            done[identity] = Ended(identity=identity, outcome=outcome, signal=_name(last), reason=str(gone))
        except SignalRefused as refusal:
            done[identity] = Ended(identity=identity, outcome="refused", signal=_name(last), reason=str(refusal))
    for identity in done:
        del open_[identity]
    return done


def _wait(open_: dict[ProcessId, int], number: signal.Signals, seconds: float) -> dict[ProcessId, Ended]:
    """Wait until all have ended or the time is over; take the ended off the list and return them."""
    poller = select.poll()
    waiting = {descriptor: identity for identity, descriptor in open_.items()}
    for descriptor in waiting:
        poller.register(descriptor, select.POLLIN)
    done: dict[ProcessId, Ended] = {}
    deadline = time.monotonic() + seconds
    while waiting:
        left = deadline - time.monotonic()
        # A pidfd becomes readable when the process has ended, even while its parent has not collected it.
        for descriptor, _ in poller.poll(max(0.0, left) * 1000):
            poller.unregister(descriptor)
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
    returned = _returned(before, {gpu.uuid: gpu for gpu in after})
    if isinstance(returned, str):
        return EndReport(processes=processes, unknown={"returned_bytes": returned})
    return EndReport(processes=processes, returned_bytes=returned)


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
