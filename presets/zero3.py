"""What holds weights, gradients and moments with DeepSpeed's ZeRO-3, and when it allocates them.

The rules are those of train/dry_run/zero3.py and gathering.py.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from functools import partial

import msgspec

from memtop.presets.parameters import LIVE_PARAMETERS
from memtop.presets.sequence import NOWHERE
from memtop.presets.updates import Unit
from memtop.presets.zero import Sharded

_GATHERING, _REDUCING = 1, 2
"""ZeRO-3 gathers and reduces on CUDA streams of its own. Stream 0 computes."""
_CHECKPOINT = -1
"""A user of a layer's frozen weights: what runs the layer again for its backward pass."""


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
    trained: bool
    users: set[int] = msgspec.field(default_factory=set)
    """The modules of its layer that run, and need it."""
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
        self._is_backward = False
        self._order: list[Piece] = []
        """What one step after the other uses, known from the second forward pass on."""
        self._again: list[int] = []
        """How many numbers other steps use before one uses the same weight again."""
        self._recomputed: list[Piece] = []
        """Frozen ones that a checkpoint has used. They stay until the backward pass of a module
        ends."""
        self._in_bucket: list[int] = []
        """The numbers of each large gradient that waits to be reduced."""
        self._small = self._taken = 0
        """The numbers of all small ones that wait, and of the unit's large ones."""
        self._staying: list[int] = []
        """The gradients that are too large for the bucket."""
        sequence.take = self._take
        numbers = itertools.count()
        # Norms and biases are never sharded.
        self._of = {
            unit: [
                Piece(next(numbers), one.numbers, one.trained) if one.numbers > self._persists else None
                for one in unit.parameters
            ]
            for unit in self._units
        }
        self._pieces = {unit: [piece for piece in pieces if piece is not None] for unit, pieces in self._of.items()}
        self._partition(arrive=bool(settings.model.get("path")))
        if self._keeps:
            sequence.begin(self._item * self._part, "weights")
        self._groups = self._updated_together()
        if not self._offloads:
            converted = NOWHERE
            for size in self._groups:
                before, converted = converted, sequence.begin(4 * size if self._item != 4 else 0, "temporary")
                sequence.end(before)
                sequence.begin(4 * size, "master weights")
            sequence.end(converted)
            sequence.pass_through(4 * max(self._groups))
        sequence.begin(self._item * self._bucket, "buckets")
        if not self._offloads:
            sequence.begin(4 * self._part, "gradients")
        # Each weight is gathered once, to get its hooks.
        whole = sequence.begin(self._item * self._largest, "temporary")
        sequence.pass_through(self._sent(self._largest))
        sequence.end(whole)

    def _updated_together(self) -> list[int]:
        """How many numbers of this process are updated at one time: of whole weights, and hardly
        more than may be live."""
        found = [0]
        for one in (one for unit in self._units for one in unit.trained):
            if found[-1] >= self._most:
                found.append(0)
            found[-1] += -(-one.numbers // self._world)
        return found

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
        """DeepSpeed does so before each module."""
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
        sequence.end(*[sequence.begin(self._sent(one.count), "gathered weights", _GATHERING) for one in missing])

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
        if piece.gathered >= 0 and not piece.users:
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
        ahead = 1
        if not self._is_backward and unit is self._units[0]:
            # What computes the loss, the model and its trunk come first, and peft's two modules.
            ahead = 3 if self._numbers.full else 5
        elif not self._is_backward and unit is self._units[1]:
            # After the one for positions.
            ahead = 2
        for _ in range(ahead):
            self._look_ahead()
        if unit.matrices:
            self._sequence.on_module = partial(self._at_module, unit)
            return
        # Modules between the layers have only norms.
        self._sequence.on_module = partial(self._at_module, Unit(()))
        for piece in self._pieces[unit]:
            self._use(piece)

    def after_forward(self, unit: Unit) -> None:
        if not unit.matrices:
            self._release_unused(self._pieces[unit])

    def _at_module(self, unit: Unit, event: int) -> None:
        """One of its modules begins or ends: see MODULES in autograd.py."""
        module, event = event & ~3, event & 3
        piece = self._of[unit][unit.matrices[module]] if module in unit.matrices else None
        if event in (0, 2):
            if piece is None:
                self._look_ahead()
                return
            self._use(piece)
            piece.users.add(module)
            if event == 0 and self._is_backward and not piece.trained:
                piece.users.add(_CHECKPOINT)
                self._recomputed.append(piece)
            return
        if piece is not None:
            piece.users.discard(module)
            self._release_unused([piece])
        if event == 3:
            for one in self._recomputed:
                one.users.discard(_CHECKPOINT)
                self._release(one)
            self._recomputed.clear()

    def before_backward(self, unit: Unit) -> None:
        self._is_backward, self._taken = True, 0
        self.before_forward(unit)

    def after_backward(self, unit: Unit, gradient: int = NOWHERE) -> None:
        self._take(gradient)
        self._take_small(unit.count - self._taken)
        if unit is not self._units[0]:
            self.release(unit)

    release = after_forward

    # --- gradients

    def _take(self, *gradients: int) -> None:
        """New gradients of large weights go into the bucket, or stay until it is reduced."""
        for key in gradients:
            if key < 0:
                continue
            count = self._sequence.sizes[key] // self._item
            self._taken += count
            self._make_room(count)
            if self._waiting() + count <= self._bucket:
                self._sequence.end(key)
            else:
                self._staying.append(key)
            self._in_bucket.append(count)

    def _take_small(self, count: int) -> None:
        if count:
            self._make_room(count)
            self._small += count

    def _waiting(self) -> int:
        return sum(self._in_bucket) + self._small

    def _make_room(self, count: int) -> None:
        if self._waiting() + count > self._bucket:
            self._reduce()

    def _reduce(self) -> None:
        """Average them over the processes, each of which gets a part."""
        waiting = self._waiting()
        if not waiting:
            return
        sequence, found, part = self._sequence, list[int](), -(-waiting // self._world)
        joined = len(self._in_bucket) > 1 or self._small or waiting % self._world
        whole = sequence.begin(self._item * part * self._world if joined else 0, "temporary", _REDUCING)
        parts = [-(-count // self._world) for count in self._in_bucket]
        if self._item != 4:
            found = [sequence.begin(4 * one, "temporary", _REDUCING) for one in parts]
            found += sequence.begin_small(4 * -(-self._small // self._world), "temporary", _REDUCING)
            sequence.end(whole)
            whole = NOWHERE
        for one in parts if self._offloads else []:
            # The sum so far, and in the last micro-batch a copy of it for its norm.
            on_gpu = sequence.begin(4 * one, "temporary", _REDUCING)
            sequence.pass_through(8 * one if self._last else 0, "temporary", _REDUCING)
            sequence.end(on_gpu)
        sequence.end(*self._staying, *found, whole)
        self._in_bucket.clear()
        self._staying.clear()
        self._small = 0

    def end_backward(self) -> None:
        self._reduce()
        # DeepSpeed sees no end of the embeddings' backward pass: their input has no gradient.
        self.release(self._units[0])
        self._is_backward = False

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
