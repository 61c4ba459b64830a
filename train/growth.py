"""When a micro-batch that a failure made smaller may grow again, and when it should shrink before there is a failure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from memtop.train.gauge import Gauge

PATIENCE = 50
"""Updates without failure or pressure before the micro-batch may grow; doubled after each growth that did not last as long."""
SAFE_FRACTION = 0.85
"""The predicted peak of a larger micro-batch must stay below this share of the memory."""
_PRESSED = 2
"""Updates running in which the allocator had to free its cache: once happens, twice is a warning."""


class Growth:
    """Follows the updates of one rank. Given the same failures and pressure, which all ranks agree on, all ranks count alike;
    only the peaks are each rank's own."""

    def __init__(self, gauge: Gauge, patience: int = PATIENCE) -> None:
        self._gauge = gauge
        self._patience = self._wait = patience
        self._peaks: dict[int, int] = {}
        self._stable = 0
        self._pressed = 0
        self._on_trial = False
        # What loading took is no update's.
        gauge.reset()
        self.retries = gauge.retries()
        """How often the allocator had freed its cache when `new_retries` was last asked; None: not known."""
        self._not_counted = 0

    @property
    def pressed(self) -> bool:
        """Whether the allocator found room only by freeing its cache in update after update."""
        return self._pressed >= _PRESSED

    @property
    def due(self) -> bool:
        """Whether the updates have been stable for long enough to ask for more."""
        return self._stable >= self._wait

    def new_retries(self) -> bool:
        """Whether the allocator had to free its cache since this was last asked."""
        before, self.retries = self.retries, self._gauge.retries()
        others, self._not_counted = self._not_counted, 0
        return before is not None and self.retries is not None and self.retries > before + others

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around work between two updates (evaluation, a save): neither its peak nor its retries are those of an update."""
        before = self._gauge.retries()
        try:
            yield
        finally:
            after = self._gauge.retries()
            if before is not None and after is not None:
                self._not_counted += after - before
            self._gauge.reset()

    def updated(self, batch: int, *, pressed: bool) -> bool:
        """An update was done with this batch; `pressed` if any rank had new retries. True when that becomes a warning."""
        self._note_peak(batch)
        self._pressed = self._pressed + 1 if pressed else 0
        self._stable = 0 if pressed else self._stable + 1
        if self._on_trial and self.due:
            # It has lasted as long as it was waited for.
            self._on_trial, self._wait = False, self._patience
        return self._pressed == _PRESSED

    def failed(self, batch: int) -> None:
        """Memory ran out, or nearly so, with this batch."""
        self._note_peak(batch)
        if self._on_trial:
            self._wait *= 2
        self._on_trial = False

    def changed(self, *, grown: bool = False, forget: bool = False) -> None:
        """Another split is used from here on; `grown` if it is on trial, `forget` if earlier peaks say nothing any more: what
        they predicted is then predicted from the next ones."""
        self._stable = self._pressed = self._not_counted = 0
        # A try that failed has made the allocator retry; the next one begins anew.
        self.retries = self._gauge.retries()
        self._on_trial = grown
        if forget:
            self._peaks.clear()
            self._wait = self._patience

    def refused(self) -> None:
        """A larger batch would not fit now: ask again after another stable stretch."""
        self._stable = 0

    def share(self, batch: int) -> float:
        """How full this rank's memory would be with this batch (0-1); infinite where that is not known.

        By the line through the peaks that this process measured at two batches or more, and at least what was measured at this
        batch or a smaller one. To be asked between two updates: a single peak is joined with what is held then, without any
        batch. That lacks the gradients, which do not grow with the batch, so such a line is too steep rather than too flat.
        """
        points = dict(self._peaks)
        if len(points) == 1:
            held = self._gauge.held_bytes()
            if held is not None:
                points[0] = held
        if len(points) < 2:
            return math.inf
        line = statistics.linear_regression(list(points), list(points.values()))
        measured = max((peak for size, peak in self._peaks.items() if size <= batch), default=0)
        share = self._gauge.share(max(measured, math.ceil(line.intercept + line.slope * batch)))
        return math.inf if share is None else share

    def _note_peak(self, batch: int) -> None:
        peak = self._gauge.peak_bytes()
        if peak is not None:
            self._peaks[batch] = max(peak, self._peaks.get(batch, 0))
