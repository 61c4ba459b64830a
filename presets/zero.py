"""What holds weights, gradients and moments with DeepSpeed's ZeRO, and when it allocates them.

The rules are those of train/dry_run/zero*.py.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque

from memtop.presets.autograd import GRADIENT
from memtop.presets.parameters import LIVE_PARAMETERS
from memtop.presets.schema import Settings
from memtop.presets.sequence import NOWHERE, Sequence
from memtop.presets.states import Numbers
from memtop.presets.updates import Gathered, Piece, Plain, Unit

_GATHERING, _REDUCING = 1, 2
"""ZeRO-3 gathers and reduces on CUDA streams of its own. Stream 0 computes."""


class _Sharded:
    """What the stages of ZeRO have in common. Sizes in numbers, not bytes, have no unit here."""

    keeps_gradients = False
    """Whether those of a layer stay where its backward pass has made them."""

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

    def begin_update(self) -> None:
        """Do nothing."""

    def before_forward(self, unit: Unit) -> None:
        """Do nothing."""

    after_forward = before_backward = after_backward = release = before_forward

    def begin_forward(self) -> None:
        """Do nothing."""

    def begin_backward(self, *, last: bool) -> None:
        self._last = last


class Stage1InBf16(_Sharded):
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


class Stages1And2(_Sharded):
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
        self._sums: list[int] = []
        self._done: set[Unit] = set()
        ends = list(itertools.accumulate(unit.count for unit in self._units))
        self._starts = {unit: end - unit.count for unit, end in zip(self._units, ends, strict=True)}
        trained = [one.numbers for unit in self._units for one in unit.trained]
        ranges = itertools.pairwise(itertools.accumulate(trained, initial=0))
        self._copied = sum(end - start for start, end in ranges if self._own(start, end))
        """Numbers of the parameters of which this process updates a part."""

    def _own(self, start: int, end: int) -> int:
        """How many of these numbers this process updates."""
        return max(0, min(end, (self._rank + 1) * self._part) - max(start, self._rank * self._part))

    def begin_backward(self, *, last: bool) -> None:
        super().begin_backward(last=last)
        if self._in_bucket < 0:
            self._sequence.calls[GRADIENT] = self._start_bucket

    def _start_bucket(self) -> None:
        self._in_bucket = self._sequence.begin((4 if self._separate else self._item) * self._bucket, "buckets")

    def after_backward(self, unit: Unit) -> None:
        if not unit.count:
            return
        self._sequence.reach(GRADIENT)
        if self._separate:
            self._add_to_sums(unit)
        if self._partitions:
            end = self._starts[unit] + unit.count
            for one in reversed(unit.trained):
                self._put_in_bucket(end - one.numbers, end)
                end -= one.numbers

    def _add_to_sums(self, unit: Unit) -> None:
        """They are in fp32. A gradient ends when it has been added."""
        sequence, most = self._sequence, max(one.numbers for one in unit.trained)
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
        if self._filled and max(self._filled) - min(self._filled) + count > self._bucket:
            self._reduce_bucket()
        if count > self._bucket:
            # It does not go through the bucket. What will be moved to the host is a copy.
            is_new = gradient < 0 or self._offloads
            self._oversized = sequence.begin(self._item * count, "gradients") if is_new else gradient
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
            self._copies = sequence.begin(self._item * self._copied, "gradients")
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
            gradient = -1 if self._compact else sequence.begin(4 * self._part, "gradients")
            if not self._compact:
                sequence.end(self._flat)
            self._end_bucket()
            self._make_moments(self._part)
            self._has_moments = True
            sequence.end(self._flat if self._compact else gradient)
            self._flat = -1


class Stage3(_Sharded):
    def load(self) -> None:
        zero, sequence, settings = self._settings.zero, self._sequence, self._settings
        self._keeps = not zero.offload_parameters
        self._most = LIVE_PARAMETERS if zero.offload_parameters else 1_000_000_000
        self._ahead = int(0.9 * self._bucket)
        self._live = self._step = 0
        self._order: list[Piece] = []
        """What one step after the other uses, known from the second forward pass on."""
        self._again: list[int] = []
        """How many numbers other steps use before one uses the same weight again."""
        self._later: list[Piece] = []
        """What the backward pass that runs will use."""
        numbers = itertools.count()
        # Norms and biases are never sharded.
        self._pieces = {
            unit: [Piece(next(numbers), one.numbers) for one in unit.parameters if one.numbers > self._persists]
            for unit in self._units
        }
        self._partition(arrive=bool(settings.model.get("path")))
        if self._keeps:
            sequence.begin(self._item * self._part, "weights")
        # In so many numbers at a time they are updated.
        group = min(self._part, self._most + self._largest // self._world)
        self._groups = [min(group, self._part - start) for start in range(0, self._part, group)]
        if not self._offloads:
            converted = NOWHERE
            for size in self._groups:
                before, converted = converted, sequence.begin(4 * size if self._item != 4 else 0, "temporary")
                sequence.end(before)
                sequence.begin(4 * size, "master weights")
            sequence.end(converted)
            sequence.pass_through(4 * group)
        sequence.begin(self._item * self._bucket, "buckets")
        if not self._offloads:
            sequence.begin(4 * self._part, "gradients")
        # Each weight is gathered once, to get its hooks.
        whole = sequence.begin(self._item * self._largest, "temporary")
        sequence.pass_through(self._sent(self._largest))
        sequence.end(whole)

    def _partition(self, *, arrive: bool) -> None:
        """Each whole weight makes room for this process's part. `arrive`: they are read from files,
        so they come one after the other."""
        sequence, own = self._sequence, list[int]()
        weights = [one for unit in self._units for one in unit.parameters]
        wholes = [] if arrive else [sequence.begin(self._item * one.numbers, "weights") for one in weights]
        for number, one in enumerate(weights):
            whole = sequence.begin(self._item * one.numbers, "weights") if arrive else wholes[number]
            part = sequence.begin(self._item * -(-one.numbers // self._world) if self._keeps else 0, "weights")
            sequence.end(whole)
            own += [part] if one.trained else []
        sequence.end(*own)

    # --- gathering

    def begin_forward(self) -> None:
        """From the second pass on, DeepSpeed knows the order in which weights are used. It gathers
        them ahead, until there are as many as may be."""
        if self._order and not self._again:
            self._again = _numbers_until_used_again(self._order)
        self._queue = deque(enumerate(self._order if self._again else []))
        for pieces in self._pieces.values():
            for piece in pieces:
                if piece.arrives is not None:
                    self._split(piece)
                    self._release(piece)
                piece.fetched_for = -1
        self._step = self._live = 0

    def _use(self, piece: Piece) -> None:
        self._gather([piece])
        if piece.arrives is not None:
            self._split(piece)
        piece.used_at = self._step
        if not self._again:
            self._order.append(piece)
        elif piece.fetched_for < self._step and self._queue:
            self._next()
        self._step += 1
        self._look_ahead()

    def _look_ahead(self) -> None:
        """DeepSpeed does so before each module: about every second one has no weights."""
        for _ in range(2):
            together: list[Piece] = []
            most = min(self._ahead, self._most - self._live)
            while self._queue and most > 0:
                one = self._next()
                if not (one.gathered >= 0 or one.arrives is not None or one in together):
                    together.append(one)
                    most -= one.count
            self._gather(together)

    def _next(self) -> Piece:
        step, found = self._queue.popleft()
        found.fetched_for = max(found.fetched_for, step)
        return found

    def _gather(self, pieces: list[Piece]) -> None:
        missing = sorted((one for one in pieces if one.gathered < 0 and one.arrives is None), key=lambda one: one.number)
        if not missing or (self._world == 1 and self._keeps):
            return
        sequence, count = self._sequence, sum(one.count for one in missing)
        self._live += count
        if self._world > 1 and len(missing) > 1:
            arrived = sequence.begin(self._item * count, "gathered weights", _GATHERING)
            together = Gathered(arrived, missing, len(missing))
            for one in missing:
                one.arrives = together
        else:
            for one in missing:
                one.gathered = sequence.begin(self._item * one.count, "gathered weights", _GATHERING)
        sequence.pass_through(self._sent(count), "gathered weights", _GATHERING)

    def _split(self, piece: Piece) -> None:
        """This piece is used. The first of those that arrived together splits them up."""
        together = piece.arrives
        assert together is not None
        for one in together.pieces if together.unused == len(together.pieces) else []:
            one.gathered = self._sequence.begin(self._item * one.count, "gathered weights", _GATHERING)
        piece.arrives = None
        together.unused -= 1
        if not together.unused:
            self._sequence.end(together.arrived)

    def _sent(self, count: int) -> int:
        """Bytes of this process's part of these numbers, if it is not on the GPU."""
        return 0 if self._keeps or self._world == 1 else self._item * count // self._world

    def _release(self, piece: Piece) -> None:
        if piece.gathered >= 0:
            self._live -= piece.count
            self._sequence.end(piece.gathered)
            piece.gathered = NOWHERE

    def _release_unused(self, pieces: list[Piece]) -> None:
        """Unless they are used again soon, or were gathered for a later step."""
        for one in pieces:
            at = one.used_at
            if not self._again or (one.fetched_for <= self._step and self._again[at] >= self._most):
                self._release(one)

    def before_forward(self, unit: Unit) -> None:
        self._look_ahead()
        for piece in self._pieces[unit][:-1]:
            self._use(piece)
            self._release_unused([piece])
        for piece in self._pieces[unit][-1:]:
            self._use(piece)

    def after_forward(self, unit: Unit) -> None:
        self._release_unused(self._pieces[unit][-1:])

    def before_backward(self, unit: Unit) -> None:
        self._look_ahead()
        pieces = self._pieces[unit]
        self._later = pieces[:-1] if self._again else []
        if self._settings.gradient_checkpointing and unit is not self._units[0] and len(pieces) > 1:
            # Forward again. What is frozen is kept until the backward pass of what needs it.
            for piece in pieces:
                self._use(piece)
                if self._numbers.full:
                    self._release_unused([piece])
        for piece in pieces[-1:] if self._again else reversed(pieces):
            self._use(piece)

    def after_backward(self, unit: Unit) -> None:
        if unit.count:
            sequence = self._sequence
            biggest = sorted((one.numbers for one in unit.trained), reverse=True)[:2]
            # A gradient stays until the next one is there; the small ones go through the bucket.
            first = [sequence.begin(self._item * size, "gradients") for size in biggest]
            size = max([*biggest, min(self._bucket, unit.count)], default=0)
            part = -(-size // self._world)
            whole = sequence.begin(self._item * size if size <= self._bucket else 0, "temporary", _REDUCING)
            own = sequence.begin(4 * part if self._item != 4 else 0, "temporary", _REDUCING)
            if self._offloads:
                # The sum so far, and in the last micro-batch a copy of it for its norm.
                on_gpu = sequence.begin(4 * part, "temporary", _REDUCING)
                sequence.pass_through(8 * part if self._last else 0, "temporary", _REDUCING)
                sequence.end(on_gpu)
            sequence.end(whole, own)
            sequence.end(*first)
        self.release(unit)

    def release(self, unit: Unit) -> None:
        """Release its weights: the backward pass of the modules that use them has ended."""
        pieces = self._pieces[unit]
        self._release_unused(pieces[-1:] if self._again else pieces)
        while self._later:
            # What is gathered ahead takes the place of those before.
            piece = self._later.pop()
            self._use(piece)
            self._release_unused([piece])

    def end_backward(self) -> None:
        """Do nothing."""

    def step(self) -> None:
        for pieces in self._pieces.values():
            for piece in pieces:
                if piece.arrives is not None:
                    self._split(piece)
                self._release(piece)
        if self._offloads:
            return
        sequence = self._sequence
        if self._numbers.half == "fp16":
            # Whether any number is infinite: absolute values, and a comparison of them.
            absolute = sequence.begin(4 * self._part, "temporary", _REDUCING)
            sequence.pass_through(self._part, "temporary", _REDUCING)
            sequence.end(absolute)
            sequence.pass_through(self._part, "temporary", _REDUCING)
        sequence.pass_through(8 * min(self._part, -(-self._largest // self._world)))
        for size in self._groups:
            gradient = sequence.begin(4 * size, "gradients")
            self._make_moments(size)
            sequence.end(gradient)
        self._has_moments = True


def _numbers_until_used_again(order: list[Piece]) -> list[int]:
    """For each step the numbers that others use before the next step with the same weight; more
    than any limit if there is none."""
    passed, found, used = 0, [0] * len(order), dict[int, int]()
    for step in range(len(order) - 1, -1, -1):
        piece = order[step]
        found[step] = passed - used[piece.number] if piece.number in used else sys.maxsize
        passed += piece.count
        used[piece.number] = passed
    return found


Engine = Plain | Stage1InBf16 | Stages1And2 | Stage3


def engine_of(
    settings: Settings,
    numbers: Numbers,
    units: list[Unit],
    sequence: Sequence,
    rank: int,
    width: int,
    capacity: int | None,
) -> Engine:
    zero = settings.zero
    if not zero.stage:
        return Plain(settings, numbers, units, sequence)
    if zero.stage == 3:
        return Stage3(settings, numbers, units, sequence, rank, width, capacity)
    simple = zero.stage == 1 and numbers.half == "bf16" and not zero.offload_optimizer
    kind = Stage1InBf16 if simple else Stages1And2
    return kind(settings, numbers, units, sequence, rank, width, capacity)
