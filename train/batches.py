"""The micro-batches of each update, from any position and with any split; their loader's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader

from memtop.presets import Settings
from memtop.presets.host_memory import HostPlan
from memtop.train.data.samples import Sample, collate, in_one_row
from memtop.train.objective import IGNORED, counted_positions
from memtop.train.order import Key, Position, SampleOrder, Samples, UpdatePlan, grouped, plan_updates
from memtop.train.packing import packed_row

Batch = dict[str, Any]
"""What the objective takes: input_ids [b, t], labels [b, u], and by the task the attention_mask
[b, t] or the counted positions [n]; for a row of several samples what `packed_row` gives."""


class MicroBatches(msgspec.Struct, frozen=True):
    """One rank's part of an update, on the CPU."""

    batches: list[Batch]
    tokens: int
    """Predicted tokens."""
    places: int
    """Tokens that the model computes."""
    filled: int
    """Of these, tokens of samples; the others are padding."""


class Batches:
    """One rank's micro-batches.

    `start` may be called at any time: the same position gives the same samples. With `ahead`, a
    thread makes the micro-batches of the next update while this one is computed; call `close` at
    the end. With `packed`, a row may have several samples.
    """

    def __init__(
        self,
        samples: Samples,
        order: SampleOrder,
        pad: int,
        rank: int,
        *,
        ahead: bool = False,
        packed: bool = False,
    ) -> None:
        self._samples = samples
        # The loader has a separate order because it runs ahead of the updates.
        self._order, self._order_ahead = order, order.copy()
        self._pad = pad
        self._rank = rank
        self._ahead = ahead
        self._packed = packed
        self._plans: Iterator[UpdatePlan] = iter(())
        self._maker: _Maker | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._next: Future[MicroBatches] | None = None

    def start(self, settings: Settings, host: HostPlan, position: Position, target: int) -> None:
        """Start again at this position. `target`: samples at which the training ends."""
        # The old workers end before new ones start: both together may not fit into memory.
        self.close()
        self._plans = _planned(self._order, settings, position, target)
        ahead = _planned(self._order_ahead, settings, position, target)
        self._maker = _Maker(self._samples, settings, host, ahead, self._pad, self._rank, packed=self._packed)
        if self._ahead:
            on_gpu = torch.cuda.is_available()
            # A thread begins with the first GPU, where pinning would make a second context.
            choose = partial(torch.cuda.set_device, torch.cuda.current_device()) if on_gpu else None
            self._thread = ThreadPoolExecutor(1, "batches", choose)
            self._next = self._thread.submit(self._maker)

    def next_update(self) -> UpdatePlan | None:
        """The next update; None at the target."""
        return next(self._plans, None)

    def fetch(self) -> MicroBatches:
        """This rank's micro-batches of the next update that was not fetched yet.

        An error in the data is raised here, although the thread may have met it earlier.
        """
        assert self._maker is not None, "start comes first"
        if self._thread is None or self._next is None:
            return self._maker()
        found = self._next.result()
        self._next = self._thread.submit(self._maker)
        return found

    def close(self) -> None:
        """End the thread and the loader's workers."""
        if self._maker is not None:
            self._maker.stopped = True
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        if self._maker is not None:
            self._maker.close()
        self._maker = self._thread = self._next = None


class _Maker:
    """Each call makes the micro-batches of the next update on this rank."""

    def __init__(
        self,
        samples: Samples,
        settings: Settings,
        host: HostPlan,
        plans: Iterator[UpdatePlan],
        pad: int,
        rank: int,
        *,
        packed: bool,
    ) -> None:
        self.stopped = False
        """Another thread sets it to end a call early, whose result nobody needs."""
        self._samples = samples
        self._settings = settings
        self._rank = rank
        self._packed = packed
        self._pin = host.pin_memory
        # For each update that the loader has begun: which of its micro-batches have samples.
        self._begun: deque[list[bool]] = deque()
        data: Any = samples
        self._keys = self._chosen(plans)
        loader: DataLoader[Any] = DataLoader(
            data,
            batch_sampler=self._keys,
            num_workers=host.workers,
            collate_fn=partial(collated, pad=pad, packed=packed),
        )
        self._batches: Iterator[Any] = iter(loader)

    def __call__(self) -> MicroBatches:
        found: list[Batch] = []
        tokens = places = filled_places = 0
        batch = next(self._batches, None)
        with_samples = self._begun.popleft() if batch is not None else []
        for number, has_samples in enumerate(with_samples, start=1):
            assert batch is not None
            size, used = _fill(batch, self._settings.task)
            places += size
            filled_places += used if has_samples else 0
            complete, counted = completed(batch, self._settings.task, masked=not has_samples, pin=self._pin)
            found.append(complete)
            tokens += counted
            if self.stopped:
                break
            batch = next(self._batches) if number < len(with_samples) else None
        return MicroBatches(found, tokens, places, filled_places)

    def close(self) -> None:
        """End the loader's workers. A loader ends them when nothing refers to its iterator."""
        # The generator refers to this object, which refers to the iterator. When Python collects
        # such a cycle, it ends the threads of the loader's queues first: the workers get no message
        # that they should end, and the loader waits 5 s for each of them.
        self._keys.close()
        self._batches = iter(())

    def _chosen(self, plans: Iterator[UpdatePlan]) -> Generator[list[Key], None, None]:
        for plan in plans:
            parts = self._parts(plan)
            self._begun.append([bool(keys) for keys in parts])
            # A rank without samples in a short last update runs a masked one, to stay in step with
            # the others.
            yield from (keys or plan.keys[:1] for keys in parts)

    def _parts(self, plan: UpdatePlan) -> list[list[Key]]:
        """The samples of this rank's micro-batches."""
        splits = self._settings.splits
        own = plan.micro_batches(splits, self._rank)
        if not self._settings.packing:
            return own
        # Micro-batches that run at the same time are neighbours, so they are of similar length.
        of_each = [plan.micro_batches(splits, rank) for rank in range(len(splits))]
        sizes = [len(keys) for step in zip_longest(*of_each, fillvalue=[]) for keys in step]
        groups = grouped(plan.keys, self._samples.lengths(plan.keys), sizes, balanced=self._packed)
        return groups[self._rank :: len(splits)][: len(own)]


_WORTH_PACKING = 0.1


def collated(samples: Sequence[Sample], pad: int, *, packed: bool) -> Batch:
    """Samples as rows of their own, padded; or with `packed` in one row, if much were padding."""
    longest = max(len(ids) for ids, _ in samples) * len(samples)
    padding = 1 - sum(len(ids) for ids, _ in samples) / longest
    return in_one_row(samples) if packed and padding >= _WORTH_PACKING else collate(samples, pad)


def _fill(collated: Batch, task: str) -> tuple[int, int]:
    """The tokens that a model computes for this batch, and how many of them are not padding."""
    size = used = collated["input_ids"].numel()
    if "attention_mask" in collated:
        used = int(collated["attention_mask"].sum())
    if task == "seq2seq":
        size += collated["labels"].numel()
        used += int((collated["labels"] != IGNORED).sum())
    return size, used


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device. Pinned ones are copied without a wait."""
    return {name: value.to(device, non_blocking=True) if torch.is_tensor(value) else value for name, value in batch.items()}


def completed(collated: Batch, task: str, *, masked: bool, pin: bool) -> tuple[Batch, int]:
    """What the objective needs of a batch, and the number of predicted tokens.

    What depends on the numbers in the batch is decided here, on the CPU: on a GPU each such
    decision would wait for it. `masked`: no token counts. `pin`: copies to the GPU do not wait.
    """
    labels = collated["labels"]
    if masked:
        labels = torch.full_like(labels, IGNORED)
    positions = counted_positions(labels, seq2seq=task == "seq2seq")
    batch = {"input_ids": collated["input_ids"], "labels": labels}
    if "lengths" in collated:
        batch |= packed_row(collated["lengths"].tolist())
    if task == "sft":
        batch["counted"] = positions
    elif task == "seq2seq" and not collated["attention_mask"].all():
        batch["attention_mask"] = collated["attention_mask"]
    if pin:
        batch = {name: value.pin_memory() if torch.is_tensor(value) else value for name, value in batch.items()}
    return batch, len(positions)


def _planned(order: SampleOrder, settings: Settings, position: Position, target: int) -> Iterator[UpdatePlan]:
    return plan_updates(
        order,
        updates=position.updates,
        position=position.samples_seen,
        target=target,
        effective_batch=settings.effective_batch,
        left_out=settings.leave_out,
    )
