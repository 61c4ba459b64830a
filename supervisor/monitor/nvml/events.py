"""What the driver announces by itself (Xid, ECC, recovery action, MIG changes), waited for in a thread of its own."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes

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

WAIT_MILLISECONDS = 200
"""How long one wait lasts, and so how long stopping can take: the driver cannot be woken from it."""
_LOST_SECONDS = 1.0
_AGAIN_SECONDS = 10.0
"""How long after the last start a thread that the driver threw out is started again."""
_STOP_SECONDS = 2.0
_KEPT = 256


class Event(NamedTuple):
    """One announcement: seconds since the epoch, the GPU's place, NVML's event type and its data."""

    time: float
    gpu: int
    kind: int
    data: int


class EventWatcher:
    """Waits for events of a set of GPUs. It holds no reference to NVML, so stop it before shutting NVML down."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._watched: list[tuple[int, int]] = []
        self._tried: list[tuple[int, int]] = []
        self._again = 0.0

    def watch(self, handles: list[tuple[int, Any]]) -> None:
        """Watch these GPUs (index, handle) from now on; where they are watched already, do nothing."""
        watched = [(index, address(handle)) for index, handle in handles]
        if watched == self._watched and (self._thread is None or self._thread.is_alive()):
            return
        if watched == self._tried and time.monotonic() < self._again:
            return
        if not self.stop():
            return
        self._watched = self._tried = watched
        self._again = time.monotonic() + _AGAIN_SECONDS
        if not handles:
            return
        try:
            events, registered = _register(handles)
        except pynvml.NVMLError:
            # No event sets here (not Linux, an old driver): everything else is still read, so this is no error.
            return
        if not registered:
            _free(events)
            return
        self._stop = threading.Event()
        # A daemon: the driver cannot be woken, and the program must be able to end.
        arguments = (events, {place: index for index, place in registered}, self._stop)
        thread = threading.Thread(target=self._wait, args=arguments, name="memtop-nvml-events", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system allows no more threads just now: everything else is still read, and this is tried again.
            _free(events)
            self._watched = []
            return
        self._thread = thread

    def take(self) -> list[Event]:
        """The events since the last call, oldest first."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def stop(self) -> bool:
        """End the thread. False where the driver does not let go of it in time: NVML must not be shut down then."""
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
                        return  # the driver went away; the reader watches anew once it is back
                    stop.wait(_LOST_SECONDS)  # one GPU is lost and says so at once: the others go on
                    continue
                index = indices.get(address(data.device))
                if index is not None:
                    self._events.append(Event(time.time(), index, data.eventType, data.eventData))
        finally:
            _free(events)


def address(handle: Any) -> int:
    """What tells one handle from another: events carry the handle and nothing else of the GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _register(handles: list[tuple[int, Any]]) -> tuple[Any, list[tuple[int, int]]]:
    """A new event set, and (index, address) of the GPUs that have events. NOT_SUPPORTED only means that one has none."""
    events = pynvml.nvmlEventSetCreate()
    registered = []
    for index, handle in handles:
        try:
            kinds = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _WANTED
            if kinds:
                pynvml.nvmlDeviceRegisterEvents(handle, kinds, events)
                registered.append((index, address(handle)))
        except pynvml.NVMLError:
            # This GPU has no events, or cannot be read just now, which its own sample says: never an illness by itself.
            continue
    return events, registered


def _free(events: Any) -> None:
    try:
        pynvml.nvmlEventSetFree(events)
    except pynvml.NVMLError:
        # The driver went away and took the set along: there is nothing left to free.
        return
