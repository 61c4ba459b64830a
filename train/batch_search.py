"""`--batch auto`: finds the largest micro-batch whose measured peak stays below 85 % of the memory.

`BatchSearch` runs passes over samples of the largest size, without an optimizer step, and drops
their gradients. So the training is the same as one that was started with the found batch. Each rank
finds its own, and measures its speed; `batch_choice.py` has the rules. What was measured is kept
for the next start, in the user's cache folder.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from msgspec.structs import replace

from memtop.presets import Settings, user_cache
from memtop.presets.estimate import estimate
from memtop.presets.fields import SPLIT, memory_shape
from memtop.presets.measured import GpuKind, learned
from memtop.presets.schema import Split, exact_splits, ranks_text
from memtop.presets.states import UnknownMemoryError
from memtop.train.agent.memory import free_cache
from memtop.train.batch_choice import (
    Measured,
    Tried,
    choose_splits,
    earlier_scale,
    even_splits,
    first_size,
    next_size,
    update_seconds,
)
from memtop.train.batch_sizer import SAFE_FRACTION, BatchSizer, OomGuard
from memtop.train.batches import Batch, completed, to_device
from memtop.train.channel import Channel, warn_from_first
from memtop.train.data.files import digest
from memtop.train.data.samples import Sample, collate
from memtop.train.engine import Engine, PlainEngine
from memtop.train.exchange import Ranks
from memtop.train.objective import IGNORED
from memtop.train.optimizers import bytes_of_first_step
from memtop.train.order import Samples

_EXAMINED = 20_000
"""Rows whose length is looked up to find the longest."""
_CHECKS = 2
"""Updates after which the measured peak is checked: the first one allocates the moments, and the
second is the first to compute gradients while they exist."""
_TIMED_PASSES = 3
"""Passes with one size, of which the fastest counts: the first one loads kernels."""
_MORE_ROOM = 0.05
"""If others hold this share of the memory less than at an earlier start, a larger batch may fit."""
_REMEMBERED = "as an earlier start has found"


class Remembered(msgspec.Struct, frozen=True):
    """What an earlier start has found on this rank with the same settings."""

    measured: Measured
    peaks: dict[int, int]
    """Bytes by micro-batch."""
    others: float
    """How full the memory was then with what other programs held (0-1)."""


class Outcome(msgspec.Struct, frozen=True):
    """What the search has found on one rank."""

    measured: Measured
    fullness: float
    """How full the memory is with the largest micro-batch that fits (0-1)."""
    total_bytes: int
    tried: list[Tried]
    """Empty if an earlier start has found it."""

    @property
    def fits(self) -> bool:
        """Whether any micro-batch fits."""
        return not self.tried or any(one.fits for one in self.tried)


def longest_sample(samples: Any, seq_len: int, task: str) -> Sample:
    """A sample of the largest size that the data gives.

    Of many rows only some are examined. Others may be longer, so the result has T tokens then.
    """
    table = samples.table(seq_len)
    if table.lengths.any():
        number = int(table.lengths.argmax())
        longest: Sample = samples[int(table.ids[number]), int(table.lengths[number])]
        return longest
    examined = np.linspace(0, len(table) - 1, min(len(table), _EXAMINED)).astype(np.int64)
    inputs = labels = torch.empty(0, dtype=torch.int64)
    most = 0
    # An encoder-decoder model's longest input and longest response may be in different rows.
    for ids, targets in (samples[number, 0] for number in table.ids[examined].tolist()):
        inputs, labels = max(inputs, ids, key=len), max(labels, targets, key=len)
        most = max(most, int((targets != IGNORED).sum()))
    if task == "sft":
        # Another row may have more tokens that count for the loss.
        labels = inputs.clone()
        labels[: len(inputs) - most] = IGNORED
    if len(examined) < len(table):
        inputs, labels = (part.repeat(-(-seq_len // len(part)))[:seq_len] for part in (inputs, labels))
    return inputs, labels


class BatchSearch:
    """Finds the splits to start with, and checks them after the first updates. All ranks call every
    method together.
    """

    def __init__(
        self,
        engine: Engine,
        samples: Samples,
        pad: int,
        guard: OomGuard,
        sizer: BatchSizer,
        channel: Channel,
    ) -> None:
        self._engine = engine
        self._samples = samples
        self._pad = pad
        self._guard = guard
        self._sizer = sizer
        self._memory = sizer.memory
        self._channel = channel
        self._ranks = Ranks(engine.accelerator)
        self._rank, self._several = engine.accelerator.process_index, engine.accelerator.num_processes > 1
        self._moments = self._held = 0
        self._others = 0.0
        self._is_new = False
        self._measured: Measured | None = None
        self._before: dict[int, int] = {}
        self._foreseen: dict[int, int] = {}
        """By micro-batch, the bytes of the peak by the estimate; empty if there is none."""
        self._checks = 0
        self._path: Path | None = None

    def find(self, settings: Settings) -> tuple[Split, ...] | None:
        """The splits of the ranks with the largest micro-batches that fit; None, with the reason in
        the log, if they cannot be found here.
        """
        engine = self._engine
        if not isinstance(engine, PlainEngine):
            self._refuse(settings, f"{settings.zero} cannot repeat an update")
            return None
        total = self._memory.total_bytes()
        if total is None:
            self._refuse(settings, "the memory of this device cannot be measured")
            return None
        self._path = _path_of(settings, self._memory.name(), total, self._rank)
        self._others = self._memory.fullness(0) or 0.0
        self._moments, self._held = bytes_of_first_step(engine.bare_optimizer), self._memory.held_bytes() or 0
        accumulations = dict(exact_splits(settings.effective_batch, settings.world_size))
        sizes = sorted(accumulations)
        found, tried = self._recalled(sizes), list[Tried]()
        if found is None:
            found, tried = self._searched(settings, accumulations)
        each = self._ranks.from_each(Outcome(found, self._known_fullness(found.largest), total, tried))
        splits = choose_splits(settings.effective_batch, [one.measured for one in each])
        self._report(splits, each, larger=next((size for size in sizes if size > found.largest), None))
        self._measured, self._is_new, self._before = found, bool(tried), self._sizer.peaks
        self._checks = _CHECKS if all(one.fits for one in each) else 0
        return splits

    def after_update(self, settings: Settings) -> tuple[Split, ...] | None:
        """Smaller splits for the ranks on which the peak of the first updates is too high; None if
        there are none.

        The result is kept for the next start once it has proven itself.
        """
        if not self._checks:
            return None
        self._checks -= 1
        if self._checks == _CHECKS - 1:
            # The estimate of the moments becomes a measurement.
            missing = max(0, (self._memory.held_bytes() or 0) - self._held - self._moments)
            peaks = self._sizer.peaks
            for size, peak in self._before.items():
                peaks[size] = max(peaks.get(size, 0), peak + missing)
            self._sizer.recall(peaks)
        split = settings.splits[self._rank]
        fullness = self._sizer.measured_fullness(split[0])
        if self._ranks.any(math.isinf(fullness)):
            # A person has changed the batch, or something else that shapes the peaks.
            self._checks = 0
            return None
        if not self._ranks.any(fullness >= SAFE_FRACTION):
            if not self._checks:
                self._remember()
            return None
        self.forget()
        if fullness >= SAFE_FRACTION:
            split = self._smaller(split)
        splits = tuple(self._ranks.from_each(split))
        if splits == settings.splits:
            return None
        self._checks = 1
        return splits

    def _smaller(self, split: Split) -> Split:
        """The next smaller micro-batch for the same samples that is forecast to fit, or else the
        smallest one.
        """
        smaller = [found for found in exact_splits(split[0] * split[1]) if found[0] < split[0]]
        if not smaller:
            return split
        found = next((one for one in smaller if self._sizer.fullness(one[0]) < SAFE_FRACTION), smaller[-1])
        if self._measured is not None:
            self._measured, self._is_new = replace(self._measured, largest=found[0]), True
        return found

    def forget(self) -> None:
        """The next start searches again: the batch has failed."""
        self._checks = 0
        if self._path is not None:
            with self._told("cannot be forgotten"):
                self._path.unlink(missing_ok=True)

    # --- trying sizes

    def _searched(self, settings: Settings, accumulations: Mapping[int, int]) -> tuple[Measured, list[Tried]]:
        """What this rank measures, with the smallest size as the largest if none fits; and all
        sizes that it has tried.
        """
        sample, sizes = longest_sample(self._samples, settings.seq_len, settings.task), sorted(accumulations)
        who = f"process {self._rank}: " if self._several else ""
        tried: list[Tried] = []
        seconds: dict[int, float] = {}
        self._foreseen = self._estimated(settings, accumulations)
        begin = first_size(sizes, settings.batch, self._foreseen_fullness)
        if self._foreseen:
            self._print(f"{who}begins with {begin}, foreseen at {_percent(self._foreseen_fullness(begin))}")
        with self._leaving_no_trace(settings):
            by_one = bool(self._foreseen)
            while (size := next_size(sizes, begin, tried, self._forecast, by_one=by_one)) is not None:
                # With accumulation, the gradients of the first pass exist during the second. A rank
                # of several may get more samples than an even share.
                passes = 2 if self._several else min(2, accumulations[size])
                tried.append(self._try(size, self._pass_of(sample, size, settings.task), passes))
                self._print(f"{who}{size} x {accumulations[size]}: {_peak_text(tried[-1])}")
            fitting = [one.batch for one in tried if one.fits]
            if self._several:
                # The ranks compute at the same time, as in an update.
                self._ranks.wait()
                for size in fitting:
                    seconds |= self._timed(size, self._pass_of(sample, size, settings.task))
        return Measured(max(seconds or fitting, default=sizes[0]), seconds), tried

    def _estimated(self, settings: Settings, accumulations: Mapping[int, int]) -> dict[int, int]:
        generation, total = self._memory.generation(), self._memory.total_bytes()
        if generation is None or total is None:
            return {}
        model: Any = self._engine.model
        config, capacity = model.config.to_dict(), int(total * (1 - self._others))
        kind, found = GpuKind(self._memory.name() or "", total), {}
        scale = earlier_scale(learned(kind, torch.__version__), settings, config, generation=generation, capacity=capacity)
        for size, accumulation in accumulations.items():
            tried = replace(settings, batch=size, accumulation=accumulation, rank_splits=())
            try:
                reserved = estimate(tried, config, generation=generation, capacity=capacity).reserved
            except UnknownMemoryError:
                return {}  # the search begins with the given batch
            found[size] = round(scale * reserved)
        return found

    def _foreseen_fullness(self, size: int) -> float | None:
        return self._memory.fullness(self._foreseen[size]) if size in self._foreseen else None

    def _forecast(self, size: int) -> float:
        """How full this rank's memory would be (0-1): by the line through two measured peaks; with
        one, by the estimate, scaled by it."""
        peaks = self._sizer.peaks
        known = [batch for batch in peaks if batch in self._foreseen]
        if len(peaks) != 1 or not known or size not in self._foreseen:
            return self._sizer.fullness(size)
        scale = peaks[known[0]] / self._foreseen[known[0]]
        fullness = self._memory.fullness(round(scale * self._foreseen[size]))
        return math.inf if fullness is None else fullness

    def _pass_of(self, sample: Sample, size: int, task: str) -> Callable[[], None]:
        """A forward and backward pass with a micro-batch of this size."""
        batch, tokens = self._micro_batch(sample, size, task)

        def work() -> None:
            loss = self._engine.objective(**to_device(batch, self._engine.accelerator.device)) / tokens
            self._engine.backward(loss, last=False)

        return work

    def _try(self, size: int, work: Callable[[], None], passes: int) -> Tried:
        self._memory.reset()
        fullness = math.inf
        if all(self._guard.fits(work) for _ in range(passes)):
            self._sizer.probed(size, self._moments)
            fullness = self._sizer.measured_fullness(size)
        self._engine.drop_gradients()
        free_cache()
        return Tried(size, None if math.isinf(fullness) else fullness)

    def _timed(self, size: int, work: Callable[[], None]) -> dict[int, float]:
        """The size, and how many seconds the fastest of a few passes takes; empty if memory runs
        out now.
        """
        taken = []
        self._memory.reset()
        for _ in range(_TIMED_PASSES):
            self._wait_for_device()
            started = time.perf_counter()
            fits = self._guard.fits(work)
            self._wait_for_device()
            taken.append(time.perf_counter() - started)
            self._engine.drop_gradients()
            if not fits:
                free_cache()
                return {}
        return {size: min(taken)}

    def _wait_for_device(self) -> None:
        device = self._engine.accelerator.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _micro_batch(self, sample: Sample, size: int, task: str) -> tuple[Batch, int]:
        samples = [sample] * size
        inputs, labels = sample
        if task == "seq2seq" and size > 1 and len(inputs) > 1:
            # Rows of different length have a mask, which takes memory.
            samples[-1] = inputs[:-1], labels
        batch, tokens = completed(collate(samples, self._pad), task, masked=False, pin=False)
        return batch, max(1, tokens)

    @contextmanager
    def _leaving_no_trace(self, settings: Settings) -> Iterator[None]:
        """Restore the random state and the model's buffers after the block."""
        device = self._engine.accelerator.device
        before = [(buffer, buffer.clone()) for buffer in self._engine.model.buffers()]
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
        for buffer, value in before:
            buffer.copy_(value)
        if settings.compile:
            # Otherwise the layers would stay compiled for batches of any size.
            torch.compiler.reset()
        self._memory.reset()
        self._held = self._memory.held_bytes() or 0

    # --- between two starts

    def _recalled(self, sizes: Sequence[int]) -> Measured | None:
        """What an earlier start has measured, with the largest size that fits into what is free
        now; None on all ranks if any of them must search, because more is free than then.
        """
        remembered, fitting = self._read(), list[int]()
        if remembered is not None and self._others > remembered.others - _MORE_ROOM:
            self._sizer.recall(remembered.peaks)
            known = [size for size in sizes if size <= remembered.measured.largest]
            fitting = [size for size in known if self._known_fullness(size) < SAFE_FRACTION]
        if self._ranks.any(not fitting) or remembered is None:
            self._sizer.changed(forget=True)
            return None
        return replace(remembered.measured, largest=fitting[-1])

    def _known_fullness(self, size: int) -> float:
        """How full this rank's memory was with this size (0-1), or would be if it was not tried."""
        measured = self._sizer.measured_fullness(size)
        return self._sizer.fullness(size) if math.isinf(measured) else measured

    def _read(self) -> Remembered | None:
        if self._path is None:
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Remembered)
        except (OSError, msgspec.DecodeError):
            # There is none, or another program has written it: it is measured again.
            return None

    def _remember(self) -> None:
        if self._path is None or self._measured is None or not self._is_new:
            return
        with self._told("cannot be remembered"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(Remembered(self._measured, self._sizer.peaks, self._others)))
            temporary.replace(self._path)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Report a file that cannot be written: the training does not need it."""
        try:
            yield
        except OSError as error:
            self._print(f"{what}: {self._path}: {error.strerror}")

    # --- what the person sees

    def _refuse(self, settings: Settings, reason: str) -> None:
        text = f"batch auto: not available: {reason}; training with {settings.batch} x {settings.accumulation}"
        warn_from_first(self._channel, self._engine.accelerator, text)

    def _report(self, splits: Sequence[Split], each: Sequence[Outcome], larger: int | None) -> None:
        own, forecast = each[self._rank], None
        if larger is not None and all(one.batch != larger for one in own.tried):
            forecast = self._forecast(larger)
            forecast = None if math.isinf(forecast) else forecast
        if self._several:
            text = _text_of_several(splits, each)
        else:
            text = _text_of_one(splits[0], own, "" if forecast is None else f"{larger} is forecast at {_percent(forecast)}")
        self._channel.report(
            "batch_search",
            message=f"batch auto: {text}",
            batch=max(batch for batch, _ in splits),
            accumulation=max(accumulation for _, accumulation in splits),
            rank_splits=splits if len(set(splits)) > 1 else (),
            tried=[{"batch": one.batch, "share": _fullest(one.batch, each), "own_share": one.fullness} for one in own.tried],
            samples_per_second=own.measured.speed if own.measured.seconds else None,
            remembered=not own.tried,
            forecast_batch=None if forecast is None else larger,
            forecast_share=forecast,
            total_bytes=own.total_bytes,
        )
        self._print(text)

    def _print(self, text: str) -> None:
        if not self._rank:
            print(f"memtop: batch auto: {text}", flush=True)


def _text_of_one(split: Split, found: Outcome, forecast: str) -> str:
    size = _size(found)
    parts = []
    for number, one in enumerate(sorted(found.tried, key=lambda one: one.batch)):
        parts.append(f"{one.batch} {_peak_text(one, '' if number else size)}")
    if not found.tried:
        parts.append(f"{split[0]} fits ({_percent(found.fullness)}{size}), {_REMEMBERED}")
    text = f"{', '.join([*parts, *filter(None, [forecast])])}: {split[0]} x {split[1]}"
    return text if found.fits else f"{text}, although none stays below {_percent(SAFE_FRACTION)}"


def _text_of_several(splits: Sequence[Split], each: Sequence[Outcome]) -> str:
    parts = []
    for number, one in enumerate(each):
        largest = f"{one.measured.largest} fits ({_percent(one.fullness)}{_size(one)})"
        speed = f", {one.measured.speed:.3g} samples/s" if one.measured.seconds else ""
        parts.append(f"process {number}: {largest}{speed}" if one.fits else f"process {number}: none fits")
    text = "; ".join(parts) + ("" if each[0].tried else f", {_REMEMBERED}")
    if len(set(splits)) == 1:
        return f"{text}: {splits[0][0]} x {splits[0][1]}"
    measured = [one.measured for one in each]
    even = even_splits(sum(batch * accumulation for batch, accumulation in splits), measured)
    part = update_seconds(splits, measured) / update_seconds(even, measured)
    return f"{text}: {ranks_text(splits)}, forecast to take {_percent(part)} of the time of {even[0][0]} x {even[0][1]}"


def _size(found: Outcome) -> str:
    return f" of {found.total_bytes / 2**30:.3g} GiB"


def _percent(fraction: float | None) -> str:
    return "?" if fraction is None else f"{100 * fraction:.0f} %"


def _peak_text(tried: Tried, size: str = "") -> str:
    if tried.fullness is None:
        return "is too large (out of memory)"
    return f"{'fits' if tried.fits else 'is too large'} ({_percent(tried.fullness)}{size})"


def _fullest(batch: int, each: Sequence[Outcome]) -> float | None:
    """How full the memory was on the fullest of the ranks that have tried this; None if it ran
    out.
    """
    found = [tried.fullness for one in each for tried in one.tried if tried.batch == batch]
    return None if None in found else max(fullness for fullness in found if fullness is not None)


def _path_of(settings: Settings, device: str | None, total: int, rank: int) -> Path | None:
    """Where the result for this machine, these settings and this rank is kept."""
    folder = user_cache()
    if folder is None:
        return None
    # The search begins with any split, and evaluations have a peak of their own.
    values = {name: value for name, value in memory_shape(settings, "peak").items() if name not in (*SPLIT, "eval_batch")}
    values |= {"effective_batch": settings.effective_batch, "world_size": settings.world_size}
    versions = torch.__version__, transformers.__version__
    key = digest(str(device), str(total), str(rank), *versions, msgspec.json.encode(values, order="sorted").decode())
    return folder / "batches" / f"{key}.json"
