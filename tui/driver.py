"""What the dashboard adds to Textual's driver, which reads and writes the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import signal
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from queue import Empty
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from textual import constants

if TYPE_CHECKING:
    from textual.driver import Driver

_TICK_SECONDS = 0.05
_TICKS_FOR_SECONDS = 0.5 + constants.ESCAPE_DELAY
"""After a character the parser may wait for the rest of a key; it must know how long it has
waited."""


def counting(driver: type[Driver], count: Callable[[int], None]) -> type[Driver]:
    """The driver; `count` gets the number of bytes of everything that it sends."""

    class CountingDriver(driver):  # type: ignore[misc, valid-type]
        def write(self, data: str) -> None:
            count(len(data.encode(errors="replace")))
            super().write(data)

    return CountingDriver


def waiting(driver: type[Driver]) -> type[Driver]:
    """The driver; while nobody types, its thread sleeps. Textual's looks ten times per second,
    which costs a monitor of one GPU a tenth of its processor time."""
    from textual._xterm_parser import XTermParser
    from textual.drivers.linux_driver import LinuxDriver

    if not issubclass(driver, LinuxDriver):
        return driver  # of a browser, or without a terminal

    class WaitingDriver(driver):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.exit_event = WakingEvent()

        def run_input_thread(self) -> None:
            parser, decode = XTermParser(self._debug), getincrementaldecoder("utf-8")().decode
            with self.exit_event.waking() as asked, selectors.SelectSelector() as selector:
                selector.register(self.fileno, selectors.EVENT_READ)
                selector.register(asked, selectors.EVENT_READ)
                ticks_until = 0.0
                while not self.exit_event.is_set():
                    ticks = time.monotonic() < ticks_until
                    ready = {key.fd for key, _ in selector.select(_TICK_SECONDS if ticks else None)}
                    if self.fileno in ready:
                        data = os.read(self.fileno, 4096)
                        if not data:
                            selector.unregister(self.fileno)  # it has ended
                        for event in parser.feed(decode(data)) if data else ():
                            self.process_message(event)
                        ticks_until = time.monotonic() + _TICKS_FOR_SECONDS
                    for event in parser.tick():
                        self.process_message(event)

    return WaitingDriver


def suspending(driver: type[Driver]) -> type[Driver]:
    """The driver; the event loop suspends and resumes it.

    Textual does both inside a signal handler. A handler that interrupts a write deadlocks with it,
    and a second SIGCONT starts a second thread that reads the terminal.
    """
    from textual.drivers.linux_driver import LinuxDriver

    if not issubclass(driver, LinuxDriver):
        return driver

    class SuspendingDriver(driver):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTSTP, self._suspend)
            loop.add_signal_handler(signal.SIGCONT, self._resume)

        def _leave_terminal(self) -> None:
            if self._key_thread is not None and self._key_thread.is_alive():
                self.suspend_application_mode()

        def _suspend(self) -> None:
            self._leave_terminal()
            signal.raise_signal(signal.SIGSTOP)

        def _resume(self) -> None:
            # After a SIGSTOP the terminal is as the shell left it.
            self._leave_terminal()
            if self._app.is_running:
                self._must_signal_resume = True
                self.resume_application_mode()

    return SuspendingDriver


def forget_output(driver: Driver | None) -> None:
    """Drop the output that waits to be written, if the thread that writes it has ended with its
    terminal. The queue would stay full, and a thread that writes would block forever."""
    writer: Any = getattr(driver, "_writer_thread", None)
    if writer is not None and not writer.is_alive():
        with contextlib.suppress(Empty):
            while True:
                writer._queue.get_nowait()


def wait_for_hangup(terminal: int, ended: WakingEvent) -> bool:
    """Wait until the other side of the terminal is closed. False if `ended` comes first."""
    with ended.waking() as asked:
        poller = select.poll()
        poller.register(terminal, 0)
        poller.register(asked, select.POLLIN)
        while not ended.is_set():
            if any(descriptor == terminal for descriptor, _ in poller.poll()):
                return True
    return False


class WakingEvent(Event):
    """An event that also wakes one thread that waits for files."""

    def __init__(self) -> None:
        super().__init__()
        self._pipe = Lock()
        self._writable: int | None = None

    def set(self) -> None:
        super().set()
        with self._pipe:
            if self._writable is not None:
                os.write(self._writable, b"\n")

    @contextlib.contextmanager
    def waking(self) -> Iterator[int]:
        """A file that `set` makes readable from now on. It may be set already."""
        readable, writable = os.pipe()
        with self._pipe:
            self._writable = writable
        try:
            yield readable
        finally:
            with self._pipe:
                self._writable = None
            os.close(readable)
            os.close(writable)
