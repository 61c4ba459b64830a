"""When memory runs out inside an update: it is reported, nothing of the try is kept, and the update is done again smaller.

How full the device is: what decides whether a larger micro-batch would fit.

When a micro-batch that a failure made smaller may grow again, and when it should shrink before there is a failure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from memtop.presets import Settings
from memtop.presets.schema import exact_splits, split_below
from memtop.train import TrainingError
from memtop.train.agent.failures import is_allocation_failure
from memtop.train.agent.memory import free_cache
from memtop.train.reporting import Channel

__all__ = ["Guard", "free_cache", "is_allocation_failure", "larger_split", "smaller_split"]

Found = TypeVar("Found")


def smaller_split(settings: Settings) -> tuple[int, int] | None:
    """The next smaller B and A with the same effective batch: B at most half; None at B 1."""
    return split_below(settings.effective_batch, settings.world_size, settings.batch // 2)


def larger_split(settings: Settings, most: int) -> tuple[int, int] | None:
    """The next larger B, at most `most`, and A with the same effective batch; None where there is none."""
    splits = exact_splits(settings.effective_batch, settings.world_size)
    return min((split for split in splits if settings.batch < split[0] <= most), default=None)


class Guard:
    """Runs the parts of an update and catches it when memory runs out in one of them."""

    def __init__(self, channel: Channel, *, retries: bool) -> None:
        self._channel = channel
        self._retries = retries
        self._fatal: Exception | None = None
        self.update: int | None = None
        """The update under way, for the reports."""
        self.phase = "unknown"
        """What is being done: data, forward, backward, optimizer, evaluation, save."""

    def attempt(self, work: Callable[[], Found], *, batch: int, accumulation: int | None) -> Found | None:
        """What `work` returns; None where memory ran out. Then the error is gone, and with it all that its frames held.

        With the split that `work` runs under: at batch 1 nothing smaller is left, and `give_up` raises the error when all ranks
        know of it. Where no update can be done again it is raised at once.
        """
        try:
            return work()
        except Exception as error:
            if not is_allocation_failure(error):
                raise
            smaller = self._retries and batch > 1
            self._tell(error, survived=smaller, batch=batch, accumulation=accumulation)
            if not self._retries:
                raise
            if not smaller:
                self._fatal = error
        return None

    def give_up(self, what: str) -> None:
        """Raise the error for which nothing smaller is left; on the other ranks a TrainingError that says so."""
        if self._fatal is not None:
            raise self._fatal
        raise TrainingError(f"{what}: another rank is out of memory, and no smaller batch is left")

    def tell(self, error: Exception) -> None:
        """Report an error that ends the training, if it is about memory and was not reported before."""
        if is_allocation_failure(error):
            self._tell(error, survived=False, batch=None, accumulation=None)

    def _tell(self, error: Exception, **values: Any) -> None:
        self._channel.oom(error, update=self.update, phase=self.phase, **values)


class Gauge(Protocol):
    """The memory that micro-batches are computed in, of this rank. None: not known."""

    def peak_bytes(self) -> int | None:
        """The most that the allocator held since it was last reset, by this or by whoever else resets torch's counters."""

    def held_bytes(self) -> int | None:
        """What is in use of what the allocator holds now: between two updates that is what a batch of any size needs."""

    def share(self, peak_bytes: int) -> float | None:
        """How full the memory would be (0-1) if the allocator came to hold so much now, with all that others hold."""

    def retries(self) -> int | None:
        """How often the allocator had to free its cache and try again, since the process began."""

    def reset(self) -> None:
        """Count the peak anew from here on, without what is only cached: it would count as if the next work had taken it."""


class Unmeasured:
    """The CPU: what a micro-batch takes of the host's memory cannot be told from what everything else takes."""

    def peak_bytes(self) -> int | None:
        return None

    def held_bytes(self) -> int | None:
        return None

    def share(self, peak_bytes: int) -> float | None:
        return None

    def retries(self) -> int | None:
        return None

    def reset(self) -> None:
        """Nothing is counted."""


class CudaGauge:
    """A card, or the share of it that torch was allowed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved(self._device)

    def held_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)

    def share(self, peak_bytes: int) -> float | None:
        free, total = torch.cuda.mem_get_info(self._device)
        # The context of this process and all that others hold: on the card, but not in the allocator's hands.
        beside = total - free - torch.cuda.memory_reserved(self._device)
        # Newer than the oldest torch that we take.
        fraction: Any = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        allowed = 1.0 if fraction is None else float(fraction(self._device))
        return max((peak_bytes + beside) / total, peak_bytes / (allowed * total))

    def retries(self) -> int | None:
        found: int | None = torch.cuda.memory_stats(self._device).get("num_alloc_retries")
        return found

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def open_gauge(device: torch.device) -> Gauge:
    """The gauge of a device."""
    return CudaGauge(device) if device.type == "cuda" else Unmeasured()


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
