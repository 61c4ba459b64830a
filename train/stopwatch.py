"""Where the time of an update goes, without stopping the device more often than once per update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("data_wait_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")


class Stopwatch:
    """Sums the seconds of each part. On CUDA the parts are measured by events and read at the end of the update."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if self._on_cuda and name != "data_wait_seconds":
            before, after = _event(), _event()
            before.record()
            yield
            after.record()
            self._events.append((name, before, after))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def lap(self) -> dict[str, float]:
        """Seconds of the update that ends here, by part and as `step_seconds`; starts the next. Waits for the device."""
        if self._events:
            torch.cuda.synchronize()
            for name, before, after in self._events:
                self._seconds[name] += before.elapsed_time(after) / 1000.0
        now = time.perf_counter()
        found = {**self._seconds, "step_seconds": now - self._started}
        self._seconds, self._events, self._started = dict.fromkeys(PARTS, 0.0), [], now
        return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
