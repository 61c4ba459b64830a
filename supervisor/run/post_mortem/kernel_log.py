"""Reads OOM kills from the kernel's log."""

from __future__ import annotations

import os
import re
import time
from collections import deque

_WANTED = re.compile(r"oom-kill|oom_kill|out of memory|killed process|memory cgroup", re.IGNORECASE)
_MOST_LINES = 64
# A margin, because two clocks are compared.
_MARGIN_SECONDS = 1.0


def kernel_lines(since: float, until: float, now: float, path: str = "/dev/kmsg") -> tuple[str, ...]:
    """The lines about OOM kills between two moments (seconds since the epoch).

    Empty if this user may not read the log.

    `now` is the present time of the same clock.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    found: deque[str] = deque(maxlen=_MOST_LINES)
    booted = now - time.monotonic()
    try:
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue  # overwritten before it was read
            except OSError:
                break  # no more lines: the next read would block
            if not record:
                break
            head, _, text = record.decode(errors="replace").partition(";")
            stamp = head.split(",")[2:3]
            if not stamp or not stamp[0].isdigit() or not _WANTED.search(text):
                continue
            if since - _MARGIN_SECONDS <= booted + int(stamp[0]) / 1e6 <= until + _MARGIN_SECONDS:
                found.append(text.splitlines()[0])
    finally:
        os.close(descriptor)
    return tuple(found)
