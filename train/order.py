"""Which samples an update uses: a function of seed, cuts and position, not of batch or processes.

The samples of all epochs form one endless sequence; an epoch is a permutation drawn from (seed,
epoch) alone. An update uses the next `count` of them. So B, A and W may change at any update, and
each sample is still used exactly once per epoch.

A changed sequence length is a cut at a position: the rest of the epoch is cut again there, and
shuffled from (seed, epoch, number of the cut). So no token of an epoch is left out or used twice,
whatever T was in between.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Protocol

import msgspec
import numpy as np

from memtop.presets.schema import Split
from memtop.train.state_files import Cut

Key = tuple[int, int]
"""A sample: its id and, if the id does not determine it, its length (otherwise 0)."""


class Table(msgspec.Struct, frozen=True):
    """The samples of an epoch, or of the rest of one: ids [n] and lengths [n]."""

    ids: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


class Samples(Protocol):
    """A data set that can be cut into samples."""

    recut: bool
    """Whether the samples depend on the sequence length, as pieces of text do and rows do not."""

    def table(self, seq_len: int) -> Table: ...

    def cut_again(self, rest: Table, seq_len: int) -> Table: ...

    def shuffled(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """A permutation of [0, count)."""

    def lengths(self, keys: Sequence[Key]) -> list[int]:
        """The number of tokens of each sample, known without making the sample."""


class Position(msgspec.Struct, kw_only=True):
    """How far a training has come, and where texts were cut into another length."""

    updates: int = 0
    samples_seen: int = 0
    cuts: tuple[Cut, ...]


class _Stretch(msgspec.Struct):
    """Positions [start, end) of the sequence: the first samples of a shuffled table."""

    start: int
    end: int
    epoch: int
    part: int
    share: float
    """Of the epoch, before this stretch."""
    table: Table


def _share_at(stretch: _Stretch, position: int) -> float:
    """Of the epoch, before this position. What a cut leaves is cut into more samples, or fewer, but
    it stays the same share of the epoch."""
    done = (position - stretch.start) / len(stretch.table)
    return 1.0 if done == 1.0 else stretch.share + (1.0 - stretch.share) * done


class SampleOrder:
    """The endless sequence of samples."""

    def __init__(self, samples: Samples, seed: int, cuts: Sequence[Cut]) -> None:
        self._samples = samples
        self._seed = seed
        self._cuts = list(cuts) if samples.recut else [Cut(0, cuts[0].seq_len)]
        self._stretches: Iterator[_Stretch] = iter(())
        self._now: _Stretch | None = None
        self._permutation: tuple[int, int, np.ndarray] | None = None

    def copy(self) -> SampleOrder:
        """The same sequence, at a position of its own."""
        return SampleOrder(self._samples, self._seed, self._cuts)

    def take(self, position: int, count: int) -> list[Key]:
        """The samples at positions [position, position + count)."""
        keys: list[Key] = []
        while count > 0:
            stretch = self._at(position)
            offset = position - stretch.start
            chosen = self._shuffled(stretch)[offset : min(offset + count, stretch.end - stretch.start)]
            keys += zip(stretch.table.ids[chosen].tolist(), stretch.table.lengths[chosen].tolist(), strict=True)
            position += len(chosen)
            count -= len(chosen)
        return keys

    def epoch_at(self, position: int) -> float:
        """The number of passes over the data at this position."""
        if position == 0:
            return 0.0
        stretch = self._at(position - 1)
        return stretch.epoch + _share_at(stretch, position)

    def end_of(self, epochs: float) -> int:
        """The position after this many epochs."""
        whole, part = divmod(epochs, 1.0)
        start = self._epoch_start(int(whole))
        return start + round(part * (self._epoch_start(int(whole) + 1) - start))

    def _epoch_start(self, epoch: int) -> int:
        return next(stretch.start for stretch in self._walk() if stretch.epoch == epoch)

    def _at(self, position: int) -> _Stretch:
        if self._now is None or position < self._now.start:
            self._stretches = self._walk()
            self._now = next(self._stretches)
        while position >= self._now.end:
            self._now = next(self._stretches)
        return self._now

    def _walk(self) -> Iterator[_Stretch]:
        position, epoch = 0, 0
        tables: dict[int, Table] = {}
        while True:
            seq_len = next(cut.seq_len for cut in reversed(self._cuts) if cut.position <= position)
            if seq_len not in tables:
                tables = {seq_len: self._samples.table(seq_len)}
            table, part, share = tables[seq_len], 0, 0.0
            while True:
                end = position + len(table)
                cut = next((c for c in self._cuts if position < c.position < end), None)
                stretch = _Stretch(position, end if cut is None else cut.position, epoch, part, share, table)
                yield stretch
                position = stretch.end
                if cut is None:
                    break
                share = _share_at(stretch, position)
                rest = self._shuffled(stretch)[stretch.end - stretch.start :]
                table = self._samples.cut_again(Table(table.ids[rest], table.lengths[rest]), cut.seq_len)
                part += 1
            epoch += 1

    def _shuffled(self, stretch: _Stretch) -> np.ndarray:
        known = self._permutation
        if known is None or known[:2] != (stretch.epoch, stretch.part):
            # A separate generator, so that the global random state does not change the order.
            parts = [stretch.part] if stretch.part else []
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, stretch.epoch, *parts])))
            known = self._permutation = (stretch.epoch, stretch.part, self._samples.shuffled(len(stretch.table), generator))
        return known[2]


class UpdatePlan(msgspec.Struct, frozen=True):
    """One update: its number (from 1), its first position, and the samples of all ranks.

    Between its positions, some may be left out.
    """

    number: int
    position: int
    keys: list[Key]
    end: int
    """The position after its last sample."""

    @property
    def ids(self) -> list[int]:
        return [key[0] for key in self.keys]

    def micro_batches(self, splits: Sequence[Split], rank: int) -> list[list[Key]]:
        """This rank's micro-batches, at least one. `splits`: B and A of each rank.

        If all ranks have the same split, they get the same number of micro-batches. In a short last
        update some may be empty.
        """
        shares = [batch * accumulation for batch, accumulation in splits]
        even = len(set(splits)) == 1
        # The samples are dealt in rounds, in which each rank gets some in proportion to its share.
        unit = splits[0][1] if even else math.gcd(*shares)
        each = [share // unit for share in shares]
        first, whole = sum(each[:rank]), sum(each)
        rounds = [self.keys[start + first : start + first + each[rank]] for start in range(0, len(self.keys), whole)]
        if even:
            return rounds
        own, size = [key for keys in rounds for key in keys], splits[rank][0]
        return [own[start : start + size] for start in range(0, max(1, len(own)), size)]


def grouped(keys: Sequence[Key], lengths: Sequence[int], sizes: Sequence[int], *, balanced: bool) -> list[list[Key]]:
    """The samples of an update in groups of these sizes, so that little is padding.

    Samples of similar length share a group; with `balanced`, all groups have about the same number
    of tokens. The result depends on the arguments alone, so every rank computes the same. Which
    samples share a group changes no gradient of the update.
    """
    if min(lengths) == max(lengths):
        ends = list(accumulate(sizes))
        return [list(keys[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    # The longest come first: if memory runs out, then at the beginning of the update.
    longest_first = sorted(range(len(keys)), key=lambda number: -lengths[number])
    if not balanced:
        numbers = iter(longest_first)
        return [[keys[number] for number in islice(numbers, size)] for size in sizes]
    groups: list[list[Key]] = [[] for _ in sizes]
    # The tokens of each group that is not full, and its number: the smallest gets the next sample.
    room = [(0, group) for group, size in enumerate(sizes) if size]
    for number in longest_first:
        tokens, group = room[0]
        groups[group].append(keys[number])
        if len(groups[group]) < sizes[group]:
            heapq.heapreplace(room, (tokens + lengths[number], group))
        else:
            heapq.heappop(room)
    return groups


Ranges = Sequence[tuple[int, int]]
"""Positions, each from the first up to the second, which is not included; in order, apart."""


def plan_updates(
    order: SampleOrder, *, updates: int, position: int, target: int, effective_batch: int, left_out: Ranges = ()
) -> Iterator[UpdatePlan]:
    """The updates from here to the target, without the positions that are `left_out`.

    The last one is short if the target is not reached with a whole effective batch.
    """
    pieces = list(_kept(left_out, position, target))
    while pieces:
        updates += 1
        keys: list[Key] = []
        begin = position = pieces[0][0]
        while pieces and len(keys) < effective_batch:
            first, end = pieces.pop(0)
            position = min(end, first + effective_batch - len(keys))
            keys += order.take(first, position - first)
            if position < end:
                pieces.insert(0, (position, end))
        yield UpdatePlan(updates, begin, keys, position)


def count_kept(left_out: Ranges, position: int, target: int) -> int:
    """How many positions from here to the target are not left out."""
    return sum(end - first for first, end in _kept(left_out, position, target))


def _kept(left_out: Ranges, position: int, target: int) -> Iterator[tuple[int, int]]:
    for first, end in (*left_out, (target, target)):
        if position < min(first, target):
            yield position, min(first, target)
        position = max(position, end)


def sample_digest(ids: Sequence[int]) -> str:
    """SHA-256 (hex) of the ids in ascending order, written in decimal and joined by newlines."""
    return hashlib.sha256("\n".join(map(str, sorted(ids))).encode()).hexdigest()
