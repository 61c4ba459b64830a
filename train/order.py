"""Which samples an update sees: a pure function of seed and position, whatever batch, accumulation or world size.

The samples of all epochs form one endless sequence; epoch e is a permutation drawn from (seed, e) alone. An update takes the
next `count` of them. So B, A and W may change at any update and each sample is still used exactly once per epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np


class SampleOrder:
    """The endless sequence of sample ids over a data set of `size` samples."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def take(self, position: int, count: int) -> list[int]:
        """The ids at positions [position, position + count)."""
        ids: list[int] = []
        while count > 0:
            epoch, offset = divmod(position, self._size)
            part = self._of_epoch(epoch)[offset : offset + count]
            ids += part.tolist()
            position += len(part)
            count -= len(part)
        return ids

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            # Its own generator: the global random state has no say in the order.
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
            self._epoch, self._permutation = epoch, generator.permutation(self._size)
        return self._permutation


class UpdatePlan(msgspec.Struct, frozen=True):
    """One update: its number (from 1), the position it starts at, and its sample ids over all ranks."""

    number: int
    position: int
    ids: list[int]

    def micro_batches(self, batch: int, world_size: int, rank: int) -> list[list[int]]:
        """This rank's micro-batches. Every rank gets equally many; in a short last update some may be empty."""
        whole = batch * world_size
        return [self.ids[start + rank * batch : start + (rank + 1) * batch] for start in range(0, len(self.ids), whole)]


def plan_updates(order: SampleOrder, *, updates: int, position: int, target: int, effective_batch: int) -> Iterator[UpdatePlan]:
    """The updates from here to the target; the last one is short if the target is no multiple of the effective batch."""
    while position < target:
        updates += 1
        ids = order.take(position, min(effective_batch, target - position))
        yield UpdatePlan(updates, position, ids)
        position += len(ids)


def sample_digest(ids: Sequence[int]) -> str:
    """SHA-256 (hex) of the ids, sorted as numbers, written in decimal and joined by newlines."""
    return hashlib.sha256("\n".join(map(str, sorted(ids))).encode()).hexdigest()
