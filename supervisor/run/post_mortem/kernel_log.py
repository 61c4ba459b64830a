"""Reads the kernel's own log for what it killed for lack of memory."""

from __future__ import annotations

import os
import re
import time
from collections import deque

_WANTED = re.compile(r"oom-kill|oom_kill|out of memory|killed process|memory cgroup", re.IGNORECASE)
_MOST_LINES = 64
# Two clocks are compared.
_MARGIN_SECONDS = 1.0


def kernel_lines(since: float, until: float, now: float, path: str = "/dev/kmsg") -> tuple[str, ...]:
    """What the kernel's log says of kills for memory between two moments (seconds since the epoch); empty where this user may
    not read it. `now` is the present moment by the same clock."""
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
                continue  # overwritten before we read it
            except OSError:
                break  # no more: it would have to wait
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
