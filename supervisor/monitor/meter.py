"""Looks at the driver with an end to the patience: whoever waits for a look goes on without it after so many seconds."""

from __future__ import annotations

import threading
from typing import Protocol

from memtop.supervisor.monitor.values import GpuSample

CLOSE_SECONDS = 0.5
"""How long closing waits for a look that is under way."""


class Reader(Protocol):
    """What is needed of `nvml.holdings.HoldingsReader`."""

    def read(self) -> tuple[GpuSample, ...]: ...

    def close(self) -> None: ...


class Meter:
    """Asks the reader on a daemon thread: a driver that never returns holds up neither its caller nor the program's end.

    Unlike `nvml.thread.DriverThread` it never answers with a look that had begun before it was asked for.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._changed = threading.Condition()
        self._wanted = self._done = 0
        self._newest: tuple[GpuSample, ...] | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def look(self, seconds: float) -> tuple[GpuSample, ...] | None:
        """A look that begins now, None where the driver does not give it within so many seconds.

        Raises what the reader raised: that is an error of ours, never the driver's.
        """
        with self._changed:
            if not self._runs():
                return None
            self._wanted += 1
            goal = self._wanted
            self._changed.notify_all()
            told = self._changed.wait_for(lambda: self._done >= goal or self._failure is not None, max(0.0, seconds))
            if self._failure is not None:
                raise self._failure
            return self._newest if told else None

    def close(self) -> None:
        """Have the thread let go of the driver as soon as that returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _runs(self) -> bool:
        """Whether the thread runs; it is started at the first look. The system may allow no further one."""
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="memtop-meter", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._wanted > self._done)
                    if self._closed:
                        return
                    begun = self._wanted
                newest = self._reader.read()
                with self._changed:
                    self._newest, self._done = newest, begun
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the look
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._reader.close()
