"""Waits in a thread for the driver's events (Xid, ECC, recovery action, MIG changes) and keeps each
GPU's troubles."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.values import GpuTrouble

ECC_DOUBLE_BIT = 0x2
XID = 0x8
MIG_CHANGED = 0x100
ECC_STORM = 0x200
RETIREMENT = 0x400
RETIREMENT_FAILED = 0x800
POISON = 0x1000
FATAL_POISON = 0x2000
UNAVAILABLE = 0x4000
RECOVERY_ACTION = 0x8000
_WANTED = (
    ECC_DOUBLE_BIT | XID | MIG_CHANGED | ECC_STORM | RETIREMENT | RETIREMENT_FAILED | POISON | FATAL_POISON | UNAVAILABLE
) | RECOVERY_ACTION

WAIT_MILLISECONDS = 1000
"""How long one wait lasts. Stopping can take as long, because the driver's wait cannot be
interrupted."""
LOST_SECONDS = 1.0
"""How long the thread pauses while a wait fails because one GPU is lost."""
AGAIN_SECONDS = 10.0
"""How long after its start a thread that ended with an error is started again."""
_STOP_SECONDS = 2.0
_MOST_EVENTS = 256

KEPT = 8
"""How many troubles are kept for each GPU."""

_RETURNED = "the GPU can be read again"
_ECC_WORDS = {
    ECC_DOUBLE_BIT: "an uncorrectable (double-bit) memory error: results may be wrong; end the work on this GPU and reset it",
    ECC_STORM: "very many corrected memory errors in a short time: the card's memory is wearing out; watch the card",
    RETIREMENT: "the card takes bad memory out of use: reset the GPU when its work is done, to complete this",
    RETIREMENT_FAILED: "the card could not take bad memory out of use: have the card replaced",
    POISON: "a program used memory that an uncorrectable error had marked bad: the program fails, the GPU goes on",
    FATAL_POISON: "an uncorrectable memory error has spread: end all work on this GPU and reset it",
}
_UNAVAILABLE = "the driver reports that the GPU cannot be used until it is recovered: see its recovery action and dmesg"


class DriverEvent(NamedTuple):
    """One event: seconds since the epoch, the GPU's index, NVML's event type and its data."""

    time: float
    gpu: int
    kind: int
    data: int


class EventWatcher:
    """Waits for events of a set of GPUs. Stop it before NVML is shut down."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`monotonic` returns seconds."""
        self._monotonic = monotonic
        self._events: deque[DriverEvent] = deque(maxlen=_MOST_EVENTS)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._watched: list[tuple[int, int]] = []
        self._tried: list[tuple[int, int]] = []
        self._again = 0.0

    def watch(self, handles: list[tuple[int, Any]]) -> None:
        """Watch these GPUs (index, handle) from now on.

        Does nothing if they are already watched.
        """
        watched = [(index, address(handle)) for index, handle in handles]
        if watched == self._watched and (self._thread is None or self._thread.is_alive()):
            return
        if watched == self._tried and self._monotonic() < self._again:
            return
        if not self.stop():
            return
        self._watched = self._tried = watched
        self._again = self._monotonic() + AGAIN_SECONDS
        if not handles:
            return
        try:
            events, registered = _register(handles)
        except pynvml.NVMLError:
            # This driver has no event sets. This is no error: everything else is still read.
            return
        if not registered:
            _free(events)
            return
        self._stop = threading.Event()
        # A daemon thread, because the driver's wait cannot be interrupted and the program must be
        # able to end.
        arguments = (events, {place: index for index, place in registered}, self._stop)
        thread = threading.Thread(target=self._wait, args=arguments, name="memtop-nvml-events", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system allows no more threads now: everything else is still read, and this is
            # tried again.
            _free(events)
            self._watched = []
            return
        self._thread = thread

    def take(self) -> list[DriverEvent]:
        """The events since the last call, oldest first."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def stop(self) -> bool:
        """End the thread.

        False if the driver does not return in time; NVML must not be shut down then.
        """
        thread = self._thread
        if thread is not None:
            self._stop.set()
            thread.join(_STOP_SECONDS)
            if thread.is_alive():
                return False
        self._thread = None
        self._watched, self._tried = [], []
        return True

    def _wait(self, events: Any, indices: dict[int, int], stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                try:
                    data = pynvml.nvmlEventSetWait(events, WAIT_MILLISECONDS)
                except pynvml.NVMLError as error:
                    if error.value == codes.TIMEOUT:
                        continue
                    if error.value != codes.GPU_IS_LOST:
                        # the driver was unloaded; the reader starts a new watch once it is back
                        return
                    # one GPU is lost, and every wait returns at once: go on with the others
                    stop.wait(LOST_SECONDS)
                    continue
                index = indices.get(address(data.device))
                if index is not None:
                    self._events.append(DriverEvent(time.time(), index, data.eventType, data.eventData))
        finally:
            _free(events)


def address(handle: Any) -> int:
    """Identifies a handle. Events carry only the handle of their GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _register(handles: list[tuple[int, Any]]) -> tuple[Any, list[tuple[int, int]]]:
    """A new event set, and (index, address) of the GPUs that have events."""
    events = pynvml.nvmlEventSetCreate()
    registered = []
    for index, handle in handles:
        try:
            kinds = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _WANTED
            if kinds:
                pynvml.nvmlDeviceRegisterEvents(handle, kinds, events)
                registered.append((index, address(handle)))
        except pynvml.NVMLError:
            # This GPU has no events, or cannot be read now, which its own sample reports.
            continue
    return events, registered


def _free(events: Any) -> None:
    try:
        pynvml.nvmlEventSetFree(events)
    except pynvml.NVMLError:
        # The driver was unloaded and the set with it: there is nothing left to free.
        return


class Troubles:
    """The newest troubles of each GPU.

    The key is its UUID, or `gpu INDEX` until the UUID is known.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds since the epoch."""
        self._clock = clock
        self._book: dict[str, tuple[GpuTrouble, ...]] = {}
        self._readable: set[str] = set()
        self._lost: set[str] = set()

    def of(self, key: str) -> tuple[GpuTrouble, ...]:
        """The troubles of a GPU, oldest first. The same object until one is added."""
        return self._book.get(key, ())

    def state(self, key: str, error: str | None) -> None:
        """Note whether this GPU can be read now.

        A GPU that never could be read does not count as lost.
        """
        if error is None:
            if key in self._lost:
                self._lost.discard(key)
                self._add(key, GpuTrouble(time=self._clock(), kind="returned", message=_RETURNED))
            self._readable.add(key)
        elif key in self._readable:
            self._readable.discard(key)
            self._lost.add(key)
            self._add(key, GpuTrouble(time=self._clock(), kind="lost", message=error))

    def named(self, place: str, key: str) -> None:
        """The UUID of the GPU at this index has become known: its troubles are moved to the
        UUID."""
        for group in (self._readable, self._lost):
            if place in group:
                group.discard(place)
                group.add(key)
        if place in self._book:
            self._book[key] = (*self._book.pop(place), *self.of(key))[-KEPT:]

    def listed(self, keys: Iterable[str]) -> None:
        """The driver lists only these GPUs.

        Those that could be read before and are missing are lost.
        """
        for key in self._readable.difference(keys):
            self.state(key, codes.NOT_LISTED)

    def announced(self, key: str, event: DriverEvent, recovery: str) -> None:
        """Add an event of the driver.

        `recovery` is the sentence that says what the card needs now.
        """
        trouble = _trouble_of(event, recovery)
        if trouble is not None:
            self._add(key, trouble)

    def _add(self, key: str, trouble: GpuTrouble) -> None:
        self._book[key] = (*self._book.get(key, ()), trouble)[-KEPT:]


def _trouble_of(event: DriverEvent, recovery: str) -> GpuTrouble | None:
    if event.kind == XID:
        return GpuTrouble(
            time=event.time,
            kind="xid",
            code=event.data,
            message=codes.xid_words(event.data),
            fault_of_program=event.data in codes.FAULTS_OF_PROGRAMS,
        )
    if event.kind in _ECC_WORDS:
        return GpuTrouble(time=event.time, kind="ecc", message=_ECC_WORDS[event.kind])
    if event.kind == UNAVAILABLE:
        return GpuTrouble(time=event.time, kind="recovery", message=_UNAVAILABLE)
    if event.kind == RECOVERY_ACTION:
        return GpuTrouble(time=event.time, kind="recovery", message=recovery)
    return None  # a change of the MIG instances is intended, and no trouble
