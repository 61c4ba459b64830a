"""What holds weights, gradients and moments with DeepSpeed's ZeRO-1 and 2, and when it allocates
them.

The rules are those of train/dry_run/zero.py and zero12.py.
"""

from __future__ import annotations

import itertools

from memtop.presets.autograd import GRADIENT
from memtop.presets.schema import Settings
from memtop.presets.sequence import NOWHERE, Sequence
from memtop.presets.states import Numbers
from memtop.presets.updates import Engine, Unit


class Sharded(Engine):
    """What the stages of ZeRO have in common. Sizes in numbers, not bytes, have no unit here."""

    def __init__(
        self,
        settings: Settings,
        numbers: Numbers,
        units: list[Unit],
        sequence: Sequence,
        rank: int,
        width: int,
        capacity: int | None,
    ) -> None:
        self._settings, self._numbers, self._units, self._sequence = settings, numbers, units, sequence
        self._item = numbers.weights
        self._world, self._rank, self._capacity = settings.world_size, rank, capacity
        self._count = sum(unit.count for unit in units)
        self._part = -(-self._count // self._world)
        self._largest = max(one.numbers for unit in units for one in unit.trained)
        self._bucket = min(max(width * width, 12_500_000), 50_000_000)
        self._persists = 10 * width
        self._offloads = settings.zero.offload_optimizer
        self._has_moments = False
        self._last = False

    def _flatten(self, *, leaves: bool) -> None:
        """Load the weights and copy the trained ones into one tensor. `leaves`: if the GPU has no
        room for both, the trained weights are moved to the host before."""
        sequence, size = self._sequence, self._item * self._count
        trained = [key for unit in self._units for key in unit.load(sequence, self._item)]
        leave = leaves and self._capacity is not None and sequence.live_bytes() + size > self._capacity
        if leave:
            sequence.end(*trained)
        sequence.begin(size, "weights")
        if not leave:
            sequence.end(*trained)

    def _make_moments(self, size: int) -> None:
        if not self._has_moments and not self._offloads:
            for _ in range(2):
                self._sequence.begin(4 * size, "optimizer")

    def begin_backward(self, *, last: bool) -> None:
        self._last = last


class Stage1InBf16(Sharded):
    keeps_gradients = True

    def load(self) -> None:
        sequence = self._sequence
        self._flatten(leaves=False)
        part = sequence.begin(self._item * self._part, "temporary")
        sequence.begin(4 * self._part, "master weights")
        sequence.end(part)
        sequence.begin(4 * self._count, "gradients")

    def end_backward(self) -> None:
        self._sequence.pass_through(4 * self._largest)
        if self._last:
            self._sequence.pass_through(self._item * self._count)

    def step(self) -> None:
        self._make_moments(self._part)
        self._has_moments = True
        self._sequence.end(*self._sequence.kept)
        self._sequence.kept.clear()


class Stages1And2(Sharded):
    def load(self) -> None:
        sequence = self._sequence
        self._flatten(leaves=True)
        part = sequence.begin(self._item * self._part, "temporary")
        if self._offloads:
            sequence.end(part)
            sequence.begin(self._item * self._largest, "gradients")
        elif self._item == 4:
            sequence.uses[part] = "master weights"
            sequence.pass_through(4 * self._part)
        else:
            sequence.begin(4 * self._part, "master weights")
            sequence.end(part)
            sequence.pass_through(4 * self._part)
        self._partitions = self._settings.zero.stage == 2
        self._compact = self._item == 2 and not self._offloads
        self._separate = self._compact and not self._partitions
        self.keeps_gradients = not (self._separate or self._partitions)
        self._flat = self._copies = self._in_bucket = self._oversized = NOWHERE
        self._filled: list[int] = []
        """Bounds of the numbers in the bucket, which follow each other."""
        self._staying: list[int] = []
        """Gradients larger than the bucket that stay until all are reduced."""
        self._left: list[tuple[int, int]] = []
        """Bounds of the parameters of the unit whose backward pass runs, without those of which the
        gradient is in the bucket."""
        if self._partitions:
            sequence.take = self._take
        self._sums: list[int] = []
        self._done: set[Unit] = set()
        ends = list(itertools.accumulate(unit.count for unit in self._units))
        self._starts = {unit: end - unit.count for unit, end in zip(self._units, ends, strict=True)}
        trained = [one.numbers for unit in self._units for one in unit.trained]
        ranges = itertools.pairwise(itertools.accumulate(trained, initial=0))
        self._copied = [end - start for start, end in ranges if self._own(start, end)]
        """Numbers of each parameter of which this process updates a part."""

    def _own(self, start: int, end: int) -> int:
        """How many of these numbers this process updates."""
        return max(0, min(end, (self._rank + 1) * self._part) - max(start, self._rank * self._part))

    def begin_backward(self, *, last: bool) -> None:
        super().begin_backward(last=last)
        if self._in_bucket < 0:
            self._sequence.calls[GRADIENT] = self._start_bucket

    def _start_bucket(self) -> None:
        self._in_bucket = self._sequence.begin((4 if self._separate else self._item) * self._bucket, "buckets")

    def after_backward(self, unit: Unit, gradient: int = NOWHERE) -> None:
        if unit.count:
            self._sequence.reach(GRADIENT)
        if unit.count and self._separate:
            self._add_to_sums(unit, gradient)
        elif unit.count and self._partitions:
            for start, end in reversed(self._left):
                self._put_in_bucket(start, end, gradient if start == self._starts[unit] else NOWHERE)
        else:
            self._sequence.end(gradient)

    def before_backward(self, unit: Unit) -> None:
        ends = list(itertools.accumulate((one.numbers for one in unit.trained), initial=self._starts[unit]))
        self._left = list(itertools.pairwise(ends))

    def _take(self, *gradients: int) -> None:
        """New gradients of a layer: its last parameter of this size has it."""
        for key in gradients:
            count = self._sequence.sizes[key] // self._item
            found = next(bounds for bounds in reversed(self._left) if bounds[1] - bounds[0] == count)
            self._left.remove(found)
            self._put_in_bucket(*found, key)

    def _add_to_sums(self, unit: Unit, gradient: int) -> None:
        """They are in fp32. A gradient ends when it has been added."""
        sequence, most = self._sequence, max(one.numbers for one in unit.trained)
        if gradient < 0:
            gradient = sequence.begin(self._item * most, "gradients")
        if unit in self._done:
            sequence.pass_through(4 * most)
        else:
            self._done.add(unit)
            self._sums += sequence.begin_all((4 * one.numbers for one in unit.trained), "gradients")
        sequence.end(gradient)

    def _put_in_bucket(self, start: int, end: int, gradient: int = NOWHERE) -> None:
        """The gradient of these numbers, or its sum; NOWHERE: it has just ended."""
        sequence, count = self._sequence, end - start
        is_large = count > self._bucket
        if is_large and gradient < 0:
            gradient = sequence.begin(self._item * count, "gradients")
        if self._filled and max(self._filled) - min(self._filled) + count > self._bucket:
            self._reduce_bucket()
        if is_large:
            # It does not go through the bucket. What will be moved to the host is a copy.
            self._oversized = sequence.begin(self._item * count, "gradients") if self._offloads else gradient
        if self._oversized != gradient:
            sequence.end(gradient)
        self._filled += (start, end)

    def _reduce_all(self) -> None:
        """All gradients go through the bucket, in the order of the model."""
        found, start = self._sums if self._separate else self._sequence.kept, 0
        for key in reversed(found):
            end = start + self._sequence.sizes[key] // (4 if self._separate else self._item)
            self._put_in_bucket(start, end, key)
            start = end
        found.clear()
        self._reduce_bucket()

    def _reduce_bucket(self) -> None:
        if not self._filled:
            return
        sequence, start, end = self._sequence, min(self._filled), max(self._filled)
        own = self._own(start, end)
        self._reduce(start, end)
        copies = bool(own) and not self._compact and not self._offloads
        if copies and self._copies < 0:
            self._copies = sequence.begin(self._item * sum(self._copied), "gradients")
        if own and self._offloads and self._last:
            sequence.pass_through(8 * min(own, self._largest))
        moves = copies or self._separate or (self._offloads and self._last)
        if moves if own else self._partitions:
            sequence.end(self._oversized)
        else:
            self._staying.append(self._oversized)
        self._filled.clear()
        self._oversized = NOWHERE

    def _reduce(self, start: int, end: int) -> None:
        """Of a gradient larger than the bucket, the parts of some processes at a time."""
        sequence, part, item = self._sequence, self._part, self._item
        if self._compact and self._own(start, end):
            self._sum()
        bounds, begun = [*range(-(-(start + 1) // part) * part, end, part), end], start
        for bound in bounds:
            size, own = bound - begun, self._own(begun, bound)
            if size <= self._bucket and bound < end:
                continue
            # Several parts are put together; so are parameters that are added to a sum.
            several = begun // part < (bound - 1) // part or (self._compact and own and end - start <= self._bucket)
            joined = sequence.begin(4 * size if self._separate and several else 0, "temporary")
            whole = sequence.begin(item * size if self._separate or several else 0, "temporary")
            sequence.end(joined)
            sequence.pass_through(4 * own if self._compact else 0)
            sequence.end(whole)
            begun = bound

    def _sum(self) -> None:
        if self._flat < 0:
            self._flat = self._sequence.begin(4 * self._part, "gradients")

    def end_backward(self) -> None:
        sequence = self._sequence
        if self._partitions:
            self._reduce_bucket()
        elif self._last:
            self._reduce_all()
        if self._compact and self._last:
            self._sum()
        if self._flat < 0:
            self._flat = self._copies
        else:
            # They were added to those of the first micro-batch.
            sequence.end(self._copies)
        self._copies = NOWHERE
        if self._last:
            self._done.clear()
        if self._partitions or (self._last and not self._separate):
            self._end_bucket()

    def _end_bucket(self) -> None:
        """With the gradients that are parts of it, or were too large for it."""
        self._sequence.end(self._in_bucket, *self._staying)
        self._in_bucket = NOWHERE
        self._staying.clear()

    def step(self) -> None:
        sequence = self._sequence
        if not self._offloads:
            sequence.pass_through(8 * min(self._part, self._largest))
            if not self._compact and len(self._copied) > 1:
                # The parts of several parameters are put together.
                copies, self._flat = self._flat, sequence.begin(4 * self._part, "gradients")
                sequence.end(copies)
            self._end_bucket()
            self._make_moments(self._part)
            self._has_moments = True
            sequence.end(self._flat)
            self._flat = NOWHERE
