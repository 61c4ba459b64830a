"""Appends reports to a file from a thread of its own. A step pays for one deque append."""

from __future__ import annotations

import atexit
import collections
import json
import os
import threading
import time
from typing import Any

CAPACITY = 4096
"""Reports kept while the file cannot be written; beyond that the oldest are dropped and counted."""
PERIOD_SECONDS = 0.05


class Journal:
    """A bounded queue in front of an append-only file of JSON lines."""

    def __init__(self, path: str, capacity: int = CAPACITY) -> None:
        self.path = path
        self.dropped = 0
        self._queue: collections.deque[dict[str, Any]] = collections.deque()
        self._capacity = capacity
        self._sequence = 0
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        thread = threading.Thread(target=self._run, name="memtop-journal", daemon=True)
        thread.start()
        atexit.register(self.flush)

    def put(self, report: dict[str, Any]) -> None:
        """Queue one report; stamped with time (seconds since the epoch) and a sequence number."""
        self._sequence += 1
        report["time"] = time.time()
        report["seq"] = self._sequence
        self._queue.append(report)
        if len(self._queue) > self._capacity:
            self._queue.popleft()
            self.dropped += 1

    def flush(self) -> None:
        """Write all that is queued now. What cannot be written stays queued."""
        with self._lock:
            while self._queue:
                report = self._queue.popleft()
                line = (json.dumps(report, allow_nan=True, default=str) + "\n").encode()
                if not self._write(line):
                    self._queue.appendleft(report)
                    return

    def _write(self, line: bytes) -> bool:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            written = os.write(self._descriptor, line)
            if written == len(line):
                return True
            # A full disk cut the line: end it, so that the reader passes it over, and write it again later.
            os.write(self._descriptor, b"\n")
        except OSError:
            return False
        return False

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_SECONDS)
            if self._queue:
                self.flush()
