"""How fast the dashboard draws: no faster than its terminal can take it.

A frame of a large terminal has up to 100 kB. A slow line would show it long after it was drawn,
and keys would seem to have no effect. So the samples that arrive in the meantime share one frame.
The frames that answer keys are never held back. Many of them do not add up: most terminals are
faster than assumed here, and a terminal that is not blocks.
"""

from __future__ import annotations

import select
import sys
import termios
import time
from collections.abc import Callable

MOST_PER_SECOND = 128 << 10
"""Bytes per second for a terminal that names no speed, such as a window or most ssh connections."""
MOST_COUNTED = 128 << 10
"""How many bytes the next frame waits for at most: one frame of a large terminal."""
_BITS_OF_A_BYTE = 10
_SLOW = (50, 75, 110, 134, 150, 200, 300, 600, 1200, 1800, 2400, 4800, 9600, 19200)
"""Speeds in bits per second that a terminal does not have by default (ssh hands them on)."""
_BLOCKED_SECONDS = 0.2
"""How long to wait before looking again whether a terminal takes text."""


class Pace:
    """Counts what is sent, and says how long the next frame should wait."""

    def __init__(self, bytes_per_second: float, takes_more: Callable[[], bool] = lambda: True) -> None:
        self._rate = bytes_per_second
        self._takes_more = takes_more
        self._done = 0.0
        """When the terminal has what counts, on the monotonic clock."""

    def sent(self, count: int) -> None:
        now = time.monotonic()
        self._done = min(max(self._done, now) + count / self._rate, now + MOST_COUNTED / self._rate)

    def wait(self) -> float:
        """Seconds until the terminal has what counts of all that was sent; 0: draw now."""
        if not self._takes_more():
            return _BLOCKED_SECONDS
        return max(0.0, self._done - time.monotonic())


def pace_of_terminal() -> Pace:
    """The pace of the terminal on which Textual draws, standard error."""
    stream = sys.__stderr__
    if stream is None or not stream.isatty():
        return Pace(MOST_PER_SECOND)
    descriptor = stream.fileno()
    return Pace(bytes_per_second(descriptor), lambda: takes_more(descriptor))


def bytes_per_second(descriptor: int) -> float:
    """What the terminal takes, by the speed that it names if that is a slow one."""
    named = termios.tcgetattr(descriptor)[5]
    slow = {getattr(termios, f"B{bits}"): bits for bits in _SLOW}
    return slow[named] / _BITS_OF_A_BYTE if named in slow else MOST_PER_SECOND


def takes_more(descriptor: int) -> bool:
    """Whether a write to the terminal would not block."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(0))
