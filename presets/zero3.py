"""What holds weights, gradients and moments with DeepSpeed's ZeRO-3, and when it allocates them.

The rules are those of train/dry_run/zero3.py and gathering.py.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque

import msgspec

from memtop.presets.parameters import LIVE_PARAMETERS
from memtop.presets.sequence import NOWHERE
from memtop.presets.updates import Unit
from memtop.presets.zero import Sharded

_GATHERING, _REDUCING = 1, 2
"""ZeRO-3 gathers and reduces on CUDA streams of its own. Stream 0 computes."""


class Gathered(msgspec.Struct, eq=False):
    """Weights that ZeRO-3 gathers together."""

    arrived: int
    """What they arrive in, until the last of them is used."""
    pieces: list[Piece]
    unused: int
    """How many of them were not used yet."""


class Piece(msgspec.Struct, eq=False):
    """A weight that ZeRO-3 gathers."""

    number: int
    """Its place in the model."""
    count: int
    """Its numbers."""
    gathered: int = -1
    """Where it is, whole."""
    arrives: Gathered | None = None
    """With which others, until it is used."""
    fetched_for: int = -1
    """The last step for which it was gathered."""
    used_at: int = -1
    """The step that used it last."""


class Stage3(Sharded):
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
        self._waiting: list[tuple[Unit, int]] = []
        """The last unit and the gradient of its first parameter: they are reduced when those of the
        next unit exist."""
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

    def after_backward(self, unit: Unit, gradient: int = NOWHERE) -> None:
        for waiting in self._waiting:
            self._reduce(*waiting)
        self._waiting = [(unit, gradient)] if unit is self._units[-1] else []
        if not self._waiting:
            self._reduce(unit, gradient)
        self.release(unit)

    def _reduce(self, unit: Unit, gradient: int) -> None:
        self._sequence.end(gradient)
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

    def release(self, unit: Unit) -> None:
        """Release its weights: the backward pass of the modules that use them has ended."""
        pieces = self._pieces[unit]
        self._release_unused(pieces[-1:] if self._again else pieces)
        while self._later:
            # What is gathered ahead takes the place of those before.
            piece = self._later.pop()
            self._use(piece)
            self._release_unused([piece])

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
