"""The driver, asked in a thread of its own: a slow or hung driver holds up nothing but the GPUs' own numbers.

A call into the driver cannot be interrupted. When a GPU is in trouble it may take seconds or never return; the host's memory,
the run's progress and every key press must go on meanwhile, and what is shown of the GPUs must say how old it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from memtop.supervisor.monitor.nvml.reader import NvmlReading

FRESH_SECONDS = 3.0
"""A reading is called old only beyond this: many GPUs behind a slow driver take more than a tick."""
PATIENCE_SECONDS = 0.25
"""How long one tick of many waits for the reading that belongs to it."""
ONCE_SECONDS = 10.0
"""How long a single look waits: a card that sleeps takes seconds to wake."""
_CLOSE_SECONDS = 1.0
_NO_THREAD = "GPUs are not read: the system allows memtop no further thread (see ulimit -u, or the pids limit of the container)"


class Reader(Protocol):
    """What is needed of `nvml.NvmlReader`."""

    def read(self) -> NvmlReading: ...

    def close(self) -> None: ...


class AgedReading(NamedTuple):
    """The newest reading, and how old it is where it is not fresh (seconds, else None)."""

    reading: NvmlReading
    age_seconds: float | None


class DriverThread:
    """Asks the reader once for each `read`, never twice at a time. It ends with the program, whatever it hangs in."""

    def __init__(
        self, reader: Reader, *, patience: float = PATIENCE_SECONDS, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = reader
        self.patience = patience
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._wanted = self._done = 0
        self._begun = self._finished = 0.0
        self._newest: NvmlReading | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def read(self) -> AgedReading:
        """The reading of this moment if the driver gives it within the patience, else the one before with its age.

        Raises what the reader raised: that is an error of ours, never the driver's.
        """
        with self._changed:
            if self._thread is None:
                self._begun = self._monotonic()
                thread = threading.Thread(target=self._serve, name="memtop-driver", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return AgedReading(NvmlReading(note=_NO_THREAD), None)
                self._thread = thread
            if self._wanted == self._done:
                self._wanted += 1
                self._changed.notify_all()
            goal = self._wanted
            self._changed.wait_for(lambda: self._done >= goal, self.patience)
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._newest is None:
                return self._nothing_yet()
            age = self._monotonic() - self._finished
            return AgedReading(self._newest, age if age > FRESH_SECONDS else None)

    def close(self) -> None:
        """Let go of the driver, if it lets us: a hung one keeps what it has until the program ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                return
        self._reader.close()

    def _nothing_yet(self) -> AgedReading:
        waited = self._monotonic() - self._begun
        note = "waiting for the NVIDIA driver"
        if waited > FRESH_SECONDS:
            note = f"the NVIDIA driver has not answered for {waited:.0f} s: see dmesg for an Xid or a hung task"
        return AgedReading(NvmlReading(note=note), waited if waited > FRESH_SECONDS else None)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted > self._done)
                if self._closed:
                    return
            reading, failure = None, None
            try:
                reading = self._reader.read()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the reading
                failure = error
            with self._changed:
                if reading is not None:
                    self._newest, self._finished = reading, self._monotonic()
                self._failure = failure
                self._done = self._wanted
                self._changed.notify_all()
