"""A micro-batch that fits into memory: smaller after a failure or before one, larger again later.

`OomGuard` turns an allocation failure into a value, `DeviceMemory` measures, and `BatchSizer`
decides from values alone. `batch_search.py` finds the batch to start with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from memtop.presets.schema import Split, exact_splits, split_below
from memtop.train import TrainingError, first_line
from memtop.train.agent.failures import is_allocation_failure
from memtop.train.channel import Channel
from memtop.train.devices import usable_fraction

PATIENCE = 50
"""Updates without failure or pressure before the batch may grow; doubled after a failed growth."""
SAFE_FRACTION = 0.85
"""The predicted peak of a larger micro-batch must stay below this share of the memory."""
_FIRST_MEASURED = 3
"""The first update allocates the optimizer's moments; from the second on all are alike."""
_PRESSED = 2
"""Consecutive updates with a freed cache that count as pressure; a single one may happen."""

Found = TypeVar("Found")


def smaller_split(split: Split) -> Split | None:
    """The next smaller B, at most half, and its A with the same product; None at B 1."""
    return split_below(split[0] * split[1], 1, split[0] // 2)


def larger_split(split: Split, largest: int) -> Split | None:
    """The next larger B up to `largest`, and its A with the same product, or None."""
    splits = exact_splits(split[0] * split[1])
    return min((found for found in splits if split[0] < found[0] <= largest), default=None)


class OomGuard:
    """Runs parts of an update and catches allocation failures in them."""

    def __init__(self, channel: Channel, *, retries: bool) -> None:
        self._channel = channel
        self._retries = retries
        self._fatal: Exception | None = None
        self.update: int | None = None
        """The update in progress, for the reports."""
        self.phase = "unknown"
        """What is in progress: data, forward, backward, optimizer, evaluation or save."""
        self.failed = False
        """Whether an attempt on this rank has failed; reset it before the next ones."""

    def attempt(self, work: Callable[[], Found], *, batch: int, accumulation: int | None) -> Found | None:
        """Return what `work` returns, or None if memory ran out in it.

        The error is not kept: its frames hold tensors.

        `batch` and `accumulation` are the split that `work` uses. At batch 1 the error is kept for
        `give_up`, which all ranks call once they know of the failure. If the engine cannot repeat
        an update, the error is raised at once.
        """
        try:
            return work()
        except Exception as error:
            if not is_allocation_failure(error):
                raise
            survived = self._retries and batch > 1
            self._report(error, survived=survived, batch=batch, accumulation=accumulation)
            if not self._retries:
                raise
            self.failed = True
            if survived:
                print(
                    f"memtop: update {self.update}, {self.phase}: {first_line(error)}; it is done again in smaller pieces",
                    flush=True,
                )
            else:
                self._fatal = error
        return None

    def fits(self, work: Callable[[], None]) -> bool:
        """Run work that only tries whether memory suffices. A failure is not reported as one."""
        try:
            work()
        except Exception as error:
            if not is_allocation_failure(error):
                raise
            return False
        return True

    def give_up(self, what: str) -> None:
        """Raise the error for which no smaller batch is left; on other ranks, a TrainingError."""
        if self._fatal is not None:
            raise self._fatal
        raise TrainingError(f"{what}: another rank is out of memory, and no smaller batch is left")

    def report(self, error: Exception) -> None:
        """Report a fatal error if it is an allocation failure and was not reported yet."""
        if is_allocation_failure(error):
            self._report(error, survived=False, batch=None, accumulation=None)

    def _report(self, error: Exception, **values: Any) -> None:
        self._channel.oom(error, update=self.update, phase=self.phase, **values)


class DeviceMemory(Protocol):
    """This rank's memory for micro-batches. Every method returns None if the value is not known."""

    def name(self) -> str | None:
        """The device's model, for the user and for what is remembered of it."""

    def total_bytes(self) -> int | None:
        """The size of the whole memory."""

    def peak_bytes(self) -> int | None:
        """The allocator's peak since the last reset, by `reset` or by anything else."""

    def end_phase(self) -> int | None:
        """What was allocated at the most since the last phase or reset, in bytes. `peak_bytes`
        still counts the phases before."""

    def end_update(self) -> tuple[int, int]:
        """What was allocated and reserved at the most in the phases since the last reset, in bytes;
        0 without any. The next update has none yet."""

    def held_bytes(self) -> int | None:
        """What is allocated now. Between two updates that is what a batch of any size needs."""

    def fullness(self, peak_bytes: int) -> float | None:
        """How full the memory would be (0-1) at this peak, with everything that others hold."""

    def generation(self) -> int | None:
        """The GPU's compute capability without its point; None on the CPU."""

    def retries(self) -> int | None:
        """How often the allocator had to free its cache and try again since the process began."""

    def reset(self) -> None:
        """Free the cache and restart the peak.

        Cached memory would otherwise count as used by the next work.
        """


class UnmeasuredMemory:
    """The CPU: a micro-batch's share of host memory cannot be separated from the rest."""

    def name(self) -> str | None:
        return None

    def total_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int | None:
        return None

    def end_phase(self) -> int | None:
        return None

    def end_update(self) -> tuple[int, int]:
        return 0, 0

    def held_bytes(self) -> int | None:
        return None

    def fullness(self, peak_bytes: int) -> float | None:
        return None

    def generation(self) -> int | None:
        return None

    def retries(self) -> int | None:
        return None

    def reset(self) -> None:
        """There is nothing to reset."""


class CudaMemory:
    """A GPU, or the share of it that torch may use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phases = 0, 0
        """The most that was allocated and reserved in the phases of this update that are over."""

    def name(self) -> str | None:
        return torch.cuda.get_device_name(self._device)

    def total_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self._device)[1]

    def peak_bytes(self) -> int | None:
        return max(self._phases[1], torch.cuda.max_memory_reserved(self._device))

    def end_phase(self) -> int | None:
        allocated, reserved = torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        self._phases = max(self._phases[0], allocated), max(self._phases[1], reserved)
        torch.cuda.reset_peak_memory_stats(self._device)
        return allocated

    def end_update(self) -> tuple[int, int]:
        found, self._phases = self._phases, (0, 0)
        return found

    def held_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)

    def fullness(self, peak_bytes: int) -> float | None:
        free, total = torch.cuda.mem_get_info(self._device)
        # This process's CUDA context and the memory of all other processes.
        others = total - free - torch.cuda.memory_reserved(self._device)
        return max((peak_bytes + others) / total, peak_bytes / (usable_fraction(self._device) * total))

    def generation(self) -> int | None:
        major, minor = torch.cuda.get_device_capability(self._device)
        return 10 * major + minor

    def retries(self) -> int | None:
        found: int | None = torch.cuda.memory_stats(self._device).get("num_alloc_retries")
        return found

    def reset(self) -> None:
        self._phases = 0, 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def open_device_memory(device: torch.device) -> DeviceMemory:
    """The memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else UnmeasuredMemory()


class PhasePeaks:
    """What is allocated at the most in each phase of an update.

    To read that takes a moment for each micro-batch. So it is read in the first updates with some
    settings, and in the update after one with a new highest peak.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._found: dict[str, int] = {}
        self._settings: object = None
        self._left = 0
        """Updates to measure."""
        self._highest = 0

    def begin(self, settings: object) -> None:
        """An update, or another attempt at it, begins."""
        if settings is not self._settings:
            self._settings, self._left, self._highest = settings, _FIRST_MEASURED, 0
        self._found = {}
        if self._left:
            # What was allocated since the last update is of no phase.
            self._memory.end_phase()

    def end(self, phase: str) -> None:
        """A phase of a micro-batch, or the optimizer step, is over."""
        found = self._memory.end_phase() if self._left else None
        if found is not None:
            self._found[phase] = max(found, self._found.get(phase, 0))

    def of_update(self, readings: Mapping[str, int | None]) -> dict[str, int | None]:
        """The readings after an update, with the peaks of its phases if they were measured."""
        allocated, reserved = self._memory.end_update()
        found = {**readings, **{f"{phase}_peak_bytes": size for phase, size in self._found.items()}}
        for name, before in (("peak_bytes", allocated), ("peak_reserved_bytes", reserved)):
            size = found.get(name)
            found[name] = None if size is None else max(size, before)
        self._left = max(0, self._left - 1)
        peak = found["peak_bytes"] or 0
        if peak > self._highest:
            self._highest, self._left = peak, max(1, self._left)
        return found


class BatchSizer:
    """Decides from the updates of one rank when its micro-batch may grow and when it should shrink.

    Failures and pressure are the same on all ranks, so all ranks count alike. Only the peaks are
    each rank's own.
    """

    def __init__(self, memory: DeviceMemory, patience: int = PATIENCE) -> None:
        self.memory = memory
        self._patience = self._wait = patience
        self._peaks: dict[int, int] = {}
        self._stable = 0
        self._pressed = 0
        self._on_trial = False
        # Loading the model is not part of any update's peak.
        memory.reset()
        self.retries = memory.retries()
        """The allocator's retries at the last call of `new_retries`; None if not known."""
        self.pressed_here = False
        """What `new_retries` returned last: which rank has caused the pressure."""
        self._not_counted = 0

    @property
    def pressed(self) -> bool:
        """Whether the allocator had to free its cache in several consecutive updates."""
        return self._pressed >= _PRESSED

    @property
    def due(self) -> bool:
        """Whether the updates have been stable for long enough to try a larger micro-batch."""
        return self._stable >= self._wait

    def new_retries(self) -> bool:
        """Whether the allocator had to free its cache since the last call."""
        before, self.retries = self.retries, self.memory.retries()
        others, self._not_counted = self._not_counted, 0
        self.pressed_here = before is not None and self.retries is not None and self.retries > before + others
        return self.pressed_here

    @contextmanager
    def outside_updates(self) -> Iterator[None]:
        """Do not count the peak and retries of the block: an evaluation, a save."""
        before = self.memory.retries()
        try:
            yield
        finally:
            after = self.memory.retries()
            if before is not None and after is not None:
                self._not_counted += after - before
            self.memory.reset()

    def updated(self, batch: int, *, pressed: bool) -> bool:
        """Note an update with this batch; `pressed` if any rank had new retries.

        True when pressure has just begun.
        """
        self._note_peak(batch)
        self._pressed = self._pressed + 1 if pressed else 0
        self._stable = 0 if pressed else self._stable + 1
        if self._on_trial and self.due:
            # The larger micro-batch has proven itself.
            self._on_trial, self._wait = False, self._patience
        return self._pressed == _PRESSED

    def failed(self, batch: int) -> None:
        """Note that memory ran out, or nearly ran out, with this batch."""
        self._note_peak(batch)
        if self._on_trial:
            self._wait *= 2
        self._on_trial = False

    def changed(self, *, grown: bool = False, forget: bool = False) -> None:
        """Note another split.

        `grown`: it is on trial. `forget`: earlier peaks and failures no longer apply.
        """
        self._stable = self._pressed = self._not_counted = 0
        # The retries of a failed attempt must not count against the next one.
        self.retries = self.memory.retries()
        self._on_trial = grown
        if forget:
            self._peaks.clear()
            self._wait = self._patience

    def refused(self) -> None:
        """Note that a larger batch would not fit now: wait for another stable stretch."""
        self._stable = 0

    @property
    def peaks(self) -> dict[int, int]:
        """The highest peak of each batch so far, in bytes."""
        return dict(self._peaks)

    def probed(self, batch: int, to_come: int) -> None:
        """Note the peak of passes with this batch, before the first update.

        `to_come`: bytes that the first update will allocate and keep.
        """
        peak = self.memory.peak_bytes()
        if peak is not None:
            self._peaks[batch] = peak + to_come

    def recall(self, peaks: Mapping[int, int]) -> None:
        """Replace the peaks by others: corrected ones, or those of another process."""
        self._peaks = dict(peaks)

    def measured_fullness(self, batch: int) -> float:
        """How full this rank's memory is at the peak of this batch (0-1); infinite if not known."""
        peak = self._peaks.get(batch)
        fullness = None if peak is None else self.memory.fullness(peak)
        return math.inf if fullness is None else fullness

    def fullness(self, batch: int) -> float:
        """How full this rank's memory would be with this batch (0-1); infinite if not known.

        Call it between two updates.

        The prediction is the line through the peaks measured at two or more batches, and never less
        than the peak at this batch or a smaller one. With a single peak, the second point is what
        is held now, at batch 0. That point lacks the gradients, which do not grow with the batch,
        so the line is too steep rather than too flat.
        """
        points = dict(self._peaks)
        if len(points) == 1:
            held = self.memory.held_bytes()
            if held is not None:
                points[0] = held
        if len(points) < 2:
            return math.inf
        line = statistics.linear_regression(list(points), list(points.values()))
        measured = max((peak for size, peak in self._peaks.items() if size <= batch), default=0)
        fullness = self.memory.fullness(max(measured, math.ceil(line.intercept + line.slope * batch)))
        return math.inf if fullness is None else fullness

    def _note_peak(self, batch: int) -> None:
        peak = self.memory.peak_bytes()
        if peak is not None:
            self._peaks[batch] = max(peak, self._peaks.get(batch, 0))
