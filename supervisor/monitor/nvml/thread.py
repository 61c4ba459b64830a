"""Reads the driver in a thread, so that a slow or hung driver delays only the GPUs' own numbers.

A call into the driver cannot be interrupted. With a GPU in trouble it may take seconds or never
return. Host memory, the run's progress and key presses must not wait for it, and the display must
show how old the GPUs' numbers are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from memtop.supervisor.monitor.nvml.reader import NvmlReading

FRESH_SECONDS = 3.0
"""A reading gets an age only if it is older than this: many GPUs behind a slow driver need more
than one tick."""
PATIENCE_SECONDS = 0.25
"""How long one of many samples waits for its reading."""
ONCE_SECONDS = 10.0
"""How long a single sample waits: waking a sleeping card takes seconds."""
_CLOSE_SECONDS = 0.5
"""How long closing waits for a read that is under way."""
_LET_GO_SECONDS = 5.0
"""How long closing waits until the reader has closed NVML."""
_NO_THREAD = "GPUs are not read: the system allows memtop no more threads (see ulimit -u, or the pids limit of the container)"

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Reader(Protocol[T_co]):
    """What a ReaderThread reads from."""

    def read(self) -> T_co: ...

    def close(self) -> None: ...


class ReaderThread(Generic[T]):
    """Calls the reader in a daemon thread, one read at a time.

    A hung driver does not block the program's end.
    """

    def __init__(self, reader: Reader[T], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.newest: T | None = None
        """The newest result."""
        self._reader = reader
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._wanted = self._done = 0
        self._reading = False
        self._started = self._finished = 0.0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> bool:
        """Start the thread if it does not run yet. False if the system allows no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="memtop-driver", daemon=True)
            self._started = self._monotonic()
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def wait(self, seconds: float, *, fresh: bool = False) -> T | None:
        """The result of a read, or None if there is none within `seconds`.

        If a read is under way, its result is returned, unless `fresh` asks for a read that begins
        after this call. Raises what the reader raised: readers never raise for what the driver
        reports.
        """
        with self._changed:
            if not self.start():
                return None
            if fresh or self._wanted == self._done:
                self._wanted += 1
                self._changed.notify_all()
            goal = self._wanted
            in_time = self._changed.wait_for(lambda: self._done >= goal or self._failure is not None, max(0.0, seconds))
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            return self.newest if in_time else None

    @property
    def age_seconds(self) -> float:
        """How long ago the newest result was read, or how long the first one has been awaited."""
        return self._monotonic() - (self._started if self.newest is None else self._finished)

    def close(self) -> None:
        """End the thread and close the reader.

        If the driver hangs, the thread closes the reader once the driver returns.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            hung = not self._changed.wait_for(lambda: not self._reading, _CLOSE_SECONDS)
        if self._thread is None:
            self._reader.close()
        elif not hung:
            self._thread.join(_LET_GO_SECONDS)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted > self._done)
                if self._closed:
                    break
                begun, self._reading = self._wanted, True
            result, failure = None, None
            try:
                result = self._reader.read()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                failure = error
            with self._changed:
                if failure is None:
                    self.newest, self._finished = result, self._monotonic()
                self._failure, self._done, self._reading = failure, begun, False
                self._changed.notify_all()
        self._reader.close()


class AgedReading(NamedTuple):
    """The newest reading and its age in seconds. The age is None while the reading is fresh."""

    reading: NvmlReading
    age_seconds: float | None


class DriverThread:
    """Gives each sample the newest reading of all GPUs, without waiting for the driver longer than
    `patience` seconds."""

    def __init__(
        self,
        reader: Reader[NvmlReading],
        *,
        patience: float = PATIENCE_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thread = ReaderThread(reader, monotonic=monotonic)
        self.patience = patience

    def read(self) -> AgedReading:
        """The present reading if the driver returns it within the patience, else the previous one
        with its age."""
        if not self._thread.start():
            return AgedReading(NvmlReading(note=_NO_THREAD), None)
        self._thread.wait(self.patience)
        age = self._thread.age_seconds
        reading, old = self._thread.newest, age > FRESH_SECONDS
        if reading is None:
            note = "waiting for the NVIDIA driver"
            if old:
                note = f"the NVIDIA driver has not answered for {age:.0f} s: see dmesg for an Xid or a hung task"
            reading = NvmlReading(note=note)
        return AgedReading(reading, age if old else None)

    def close(self) -> None:
        """End the thread and let go of the driver."""
        self._thread.close()
