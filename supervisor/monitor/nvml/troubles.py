"""The troubles of each GPU since memtop began to watch: what the driver announced, and GPUs that went and came back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml import events as kinds
from memtop.supervisor.monitor.nvml.events import Event
from memtop.supervisor.monitor.nvml.xid import FAULTS_OF_PROGRAMS, xid_words
from memtop.supervisor.monitor.values import GpuTrouble

KEPT = 8
"""How many are kept of each GPU."""

_RETURNED = "the GPU can be read again"
_ECC_WORDS = {
    kinds.ECC_DOUBLE_BIT: "an uncorrectable (double-bit) memory error: work on this GPU may be wrong; end it and reset the GPU",
    kinds.ECC_STORM: "very many corrected memory errors in a short time: the card's memory is wearing out; watch it",
    kinds.RETIREMENT: "the card takes bad memory out of use: reset the GPU when its work is done, to complete it",
    kinds.RETIREMENT_FAILED: "the card could not take bad memory out of use: have the card replaced",
    kinds.POISON: "a program used memory that an uncorrectable error had marked bad: it fails, the GPU goes on",
    kinds.FATAL_POISON: "an uncorrectable memory error has spread: end all work on this GPU and reset it",
}
_UNAVAILABLE = "the driver says that the GPU cannot be used until it is recovered: see its recovery action and dmesg"


class Troubles:
    """The newest troubles by GPU (its UUID, or its place where it has none)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds since the epoch."""
        self._clock = clock
        self._book: dict[str, tuple[GpuTrouble, ...]] = {}
        self._well: set[str] = set()
        self._lost: set[str] = set()

    def of(self, key: str) -> tuple[GpuTrouble, ...]:
        """Oldest first; the same object until something is added."""
        return self._book.get(key, ())

    def state(self, key: str, error: str | None) -> None:
        """Take note of whether this GPU can be read. One that never could has not been lost."""
        if error is None:
            if key in self._lost:
                self._lost.discard(key)
                self._add(key, GpuTrouble(time=self._clock(), kind="returned", message=_RETURNED))
            self._well.add(key)
        elif key in self._well:
            self._well.discard(key)
            self._lost.add(key)
            self._add(key, GpuTrouble(time=self._clock(), kind="lost", message=error))

    def named(self, place: str, key: str) -> None:
        """The GPU in this place has told its UUID: what was noted under its place is its own."""
        for group in (self._well, self._lost):
            if place in group:
                group.discard(place)
                group.add(key)
        if place in self._book:
            self._book[key] = (*self._book.pop(place), *self.of(key))[-KEPT:]

    def listed(self, keys: Iterable[str]) -> None:
        """These GPUs are all that the driver lists: those that were well and are missing are lost."""
        for key in self._well.difference(keys):
            self.state(key, codes.NOT_LISTED)

    def announced(self, key: str, event: Event, recovery: str) -> None:
        """Take in an event of the driver. `recovery` is what the card needs by now, as a sentence."""
        trouble = _of_event(event, recovery)
        if trouble is not None:
            self._add(key, trouble)

    def _add(self, key: str, trouble: GpuTrouble) -> None:
        self._book[key] = (*self._book.get(key, ()), trouble)[-KEPT:]


def _of_event(event: Event, recovery: str) -> GpuTrouble | None:
    if event.kind == kinds.XID:
        return GpuTrouble(
            time=event.time,
            kind="xid",
            code=event.data,
            message=xid_words(event.data),
            fault_of_program=event.data in FAULTS_OF_PROGRAMS,
        )
    if event.kind in _ECC_WORDS:
        return GpuTrouble(time=event.time, kind="ecc", message=_ECC_WORDS[event.kind])
    if event.kind == kinds.UNAVAILABLE:
        return GpuTrouble(time=event.time, kind="recovery", message=_UNAVAILABLE)
    if event.kind == kinds.RECOVERY_ACTION:
        return GpuTrouble(time=event.time, kind="recovery", message=recovery)
    return None  # a change of the MIG instances is somebody's will, no trouble
