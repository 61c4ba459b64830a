"""`--batch auto`: finds the largest micro-batch whose measured peak stays below 85 % of the memory.

`BatchSearch` runs passes over samples of the largest size, without an optimizer step, and drops
their gradients. So the training is the same as one that was started with the found batch. What it
has measured is kept for the next start, in the user's cache folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers

from memtop.presets import Settings, user_cache
from memtop.presets.schema import exact_splits
from memtop.train.agent.memory import free_cache
from memtop.train.batch_adapter import SAFE_FRACTION, BatchAdapter, DeviceMemory, OomGuard
from memtop.train.batches import Batch, completed, to_device
from memtop.train.channel import Channel
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
second is the first to compute gradients beside them."""
_SHAPING = (
    *("model", "data", "task", "method", "lora", "precision", "seq_len", "gradient_checkpointing", "optimizer"),
    *("loss_chunk", "packing", "compile", "bf16_residual", "allocator", "effective_batch", "world_size"),
)
"""The settings that decide which sizes are possible, and their peaks."""


class Remembered(msgspec.Struct, frozen=True):
    """What an earlier start has found on this machine with the same settings."""

    batch: int
    peaks: dict[int, int]
    """Bytes by micro-batch, on this rank."""


class Tried(msgspec.Struct, frozen=True):
    """A micro-batch whose peak was measured."""

    batch: int
    share: float | None
    """How full the memory was at the peak (0-1), on the rank where it was fullest; None if it ran
    out on any rank."""
    own_share: float | None
    """The same on this rank."""

    @property
    def fits(self) -> bool:
        return self.share is not None and self.share < SAFE_FRACTION


def next_size(sizes: Sequence[int], begin: int, tried: Sequence[Tried], forecast: Callable[[int], float]) -> int | None:
    """The micro-batch to try next, from `sizes` in ascending order; None if the largest is found.

    The first is `begin`. Smaller ones follow until one fits, then one about twice as large, so that
    there are two peaks. From then on the `forecast` chooses. Each size is tried once at most.
    """
    if not tried:
        return begin
    fits = max((one.batch for one in tried if one.fits), default=0)
    too_large = min((one.batch for one in tried if not one.fits), default=math.inf)
    possible = [size for size in sizes if fits < size < too_large]
    if not possible:
        return None
    if not fits:
        return max(size for size in possible if size <= max(1, too_large // 2))
    if sum(one.share is not None for one in tried) < 2:
        return next((size for size in possible if size >= 2 * fits), possible[-1])
    return max((size for size in possible if forecast(size) < SAFE_FRACTION), default=None)


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
    """Finds the split to start with, and checks it after the first updates. All ranks call every
    method together; the rank with the least memory decides for all.
    """

    def __init__(
        self,
        engine: Engine,
        samples: Samples,
        pad: int,
        guard: OomGuard,
        adapter: BatchAdapter,
        memory: DeviceMemory,
        channel: Channel,
    ) -> None:
        self._engine = engine
        self._samples = samples
        self._pad = pad
        self._guard = guard
        self._adapter = adapter
        self._memory = memory
        self._channel = channel
        self._ranks = Ranks(engine.accelerator)
        self._first = engine.accelerator.is_main_process
        self._moments = self._held = 0
        self._before: dict[int, int] = {}
        self._checks = 0
        self._path: Path | None = None

    def find(self, settings: Settings) -> tuple[int, int] | None:
        """The split with the largest micro-batch that fits; None, with the reason in the log, if
        it cannot be found here.
        """
        engine = self._engine
        if not isinstance(engine, PlainEngine):
            self._refuse(settings, f"{settings.zero} cannot repeat an update")
            return None
        total = self._memory.total_bytes()
        if total is None:
            self._refuse(settings, "the memory of this device cannot be measured")
            return None
        self._path = _path_of(settings, self._memory.name(), total, self._engine.accelerator.process_index)
        self._moments, self._held = bytes_of_first_step(engine.bare_optimizer), self._memory.held_bytes() or 0
        splits = dict(exact_splits(settings.effective_batch, settings.world_size))
        sizes = sorted(splits)
        batch, tried = self._recalled(sizes), list[Tried]()
        remembered = batch is not None
        if batch is None:
            batch, tried = self._measured(settings, splits)
        self._report((batch, splits[batch]), tried, total, larger=next((size for size in sizes if size > batch), None))
        self._before = self._adapter.peaks
        self._checks = _CHECKS if remembered or any(one.fits for one in tried) else 0
        return batch, splits[batch]

    def after_update(self, settings: Settings) -> tuple[int, int] | None:
        """A smaller split if the peak of the first updates is too high, else None.

        The split is kept for the next start once it has proven itself.
        """
        if not self._checks:
            return None
        self._checks -= 1
        if self._checks == _CHECKS - 1:
            # The estimate of the moments becomes a measurement.
            missing = max(0, (self._memory.held_bytes() or 0) - self._held - self._moments)
            measured = self._adapter.peaks
            for size, peak in self._before.items():
                measured[size] = max(measured.get(size, 0), peak + missing)
            self._adapter.recall(measured)
        share = self._ranks.most(self._adapter.measured_share(settings.batch))
        if math.isinf(share):
            # A person has changed the batch, or something else that shapes the peaks.
            self._checks = 0
            return None
        if share < SAFE_FRACTION:
            if not self._checks:
                self._remember(settings.batch)
            return None
        splits = exact_splits(settings.effective_batch, settings.world_size)
        smaller = [split for split in splits if split[0] < settings.batch]
        self.forget()
        if not smaller:
            return None
        self._checks = 1
        return next((split for split in smaller if self._forecast(split[0]) < SAFE_FRACTION), smaller[-1])

    def forget(self) -> None:
        """The next start searches again: the batch has failed."""
        self._checks = 0
        if self._path is not None:
            with self._told("cannot be forgotten"):
                self._path.unlink(missing_ok=True)

    # --- trying sizes

    def _measured(self, settings: Settings, splits: Mapping[int, int]) -> tuple[int, list[Tried]]:
        """The largest size that fits, or the smallest one; and all that were tried."""
        sample, sizes = longest_sample(self._samples, settings.seq_len, settings.task), sorted(splits)
        tried: list[Tried] = []
        with self._leaving_no_trace(settings):
            while (size := next_size(sizes, settings.batch, tried, self._forecast)) is not None:
                # With accumulation, the gradients of the first pass exist during the second.
                passes = min(2, splits[size])
                tried.append(self._try(size, passes, *self._micro_batch(sample, size, settings.task)))
                self._print(f"{size} x {splits[size]}: {_peak_text(tried[-1])}")
        return max((one.batch for one in tried if one.fits), default=sizes[0]), tried

    def _forecast(self, size: int) -> float:
        """How full the fullest rank's memory would be (0-1)."""
        return self._ranks.most(self._adapter.share(size))

    def _try(self, size: int, passes: int, batch: Batch, tokens: int) -> Tried:
        def work() -> None:
            for _ in range(passes):
                loss = self._engine.objective(**to_device(batch, self._engine.accelerator.device)) / tokens
                self._engine.backward(loss, last=False)

        self._memory.reset()
        own = math.inf
        if self._guard.fits(work):
            self._adapter.probed(size, self._moments)
            own = self._adapter.measured_share(size)
        self._engine.drop_gradients()
        free_cache()
        share = self._ranks.most(own)
        return Tried(size, *(None if math.isinf(value) else value for value in (share, own)))

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

    def _recalled(self, sizes: Sequence[int]) -> int | None:
        """The largest remembered size that fits into what is free now; None to search."""
        found = self._read()
        if self._ranks.any(found is None) or found is None:
            return None
        self._adapter.recall(found.peaks)
        largest = -self._ranks.most(-found.batch)
        for size in reversed(sizes):
            if size <= largest and self._known_share(size) < SAFE_FRACTION:
                return size
        self._adapter.changed(forget=True)
        return None

    def _known_share(self, size: int) -> float:
        """How full the fullest rank's memory was with this size, or would be if none had it."""
        measured = self._adapter.measured_share(size)
        return self._ranks.most(self._adapter.share(size) if math.isinf(measured) else measured)

    def _read(self) -> Remembered | None:
        if self._path is None:
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Remembered)
        except (OSError, msgspec.DecodeError):
            # There is none, or another program has written it: it is measured again.
            return None

    def _remember(self, batch: int) -> None:
        if self._path is None:
            return
        with self._told("cannot be remembered"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(Remembered(batch, self._adapter.peaks)))
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
        text = f"not available: {reason}; training with {settings.batch} x {settings.accumulation}"
        if self._first:
            self._channel.report("warning", message=f"batch auto: {text}")
        self._print(text)

    def _report(self, split: tuple[int, int], tried: Sequence[Tried], total: int, larger: int | None) -> None:
        size = f" of {total / 2**30:.3g} GiB"
        parts = []
        for number, one in enumerate(sorted(tried, key=lambda one: one.batch)):
            parts.append(f"{one.batch} {_peak_text(one, '' if number else size)}")
        if not tried:
            share = self._known_share(split[0])
            parts = [f"{split[0]} fits ({100 * share:.0f} %{size}), as an earlier start has found"]
        forecast = None
        if larger is not None and all(one.batch != larger for one in tried):
            forecast = self._forecast(larger)
            forecast = None if math.isinf(forecast) else forecast
        if forecast is not None:
            parts.append(f"{larger} is forecast at {100 * forecast:.0f} %")
        text = f"batch auto: {', '.join(parts)}: {split[0]} x {split[1]}"
        if tried and not any(one.fits for one in tried):
            text += f", although none stays below {100 * SAFE_FRACTION:.0f} %"
        self._channel.report(
            "batch_search",
            message=text,
            batch=split[0],
            accumulation=split[1],
            tried=msgspec.to_builtins(tried),
            remembered=not tried,
            forecast_batch=None if forecast is None else larger,
            forecast_share=forecast,
            total_bytes=total,
        )
        self._print(text.removeprefix("batch auto: "))

    def _print(self, text: str) -> None:
        if self._first:
            print(f"memtop: batch auto: {text}", flush=True)


def _peak_text(tried: Tried, size: str = "") -> str:
    if tried.share is None:
        return "is too large (out of memory)"
    percent = f"({100 * tried.share:.0f} %{size})"
    return f"fits {percent}" if tried.fits else f"is too large {percent}"


def _path_of(settings: Settings, device: str | None, total: int, rank: int) -> Path | None:
    """Where the result for this machine, these settings and this rank is kept."""
    folder = user_cache()
    if folder is None:
        return None
    values = {name: getattr(settings, name) for name in _SHAPING}
    versions = torch.__version__, transformers.__version__
    key = digest(str(device), str(total), str(rank), *versions, msgspec.json.encode(values, order="sorted").decode())
    return folder / "batches" / f"{key}.json"
