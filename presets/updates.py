"""What holds weights, gradients and moments in a training, and when it allocates them, without
DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several

import msgspec

from memtop.presets.allocator import MIB
from memtop.presets.architectures import Shape
from memtop.presets.schema import Settings
from memtop.presets.sequence import NOWHERE, Sequence
from memtop.presets.states import Numbers, Parameter, optimizer_sizes, ring_bytes, weight_sizes


class Unit(msgspec.Struct, eq=False):
    """Parameters that are used together: of a layer, or of the embeddings."""

    parameters: Several[Parameter]
    matrices: Mapping[int, int] = {}
    """Of a layer: see `Stack`."""

    @property
    def trained(self) -> list[Parameter]:
        return [one for one in self.parameters if one.trained]

    @property
    def count(self) -> int:
        """Numbers that are trained."""
        return sum(one.numbers for one in self.parameters if one.trained)

    def load(self, sequence: Sequence, whole_item: int) -> list[int]:
        """Its weights come; those of 4 bits come whole, with `whole_item` bytes for each number.
        Returns those that are trained."""
        for one in self.parameters:
            if not one.item:
                whole = sequence.begin(whole_item * one.numbers, "temporary")
                sequence.begin_all(weight_sizes(one), "weights")
                sequence.end(whole)
        others = [one for one in self.parameters if one.item]
        sequence.begin_all((one.numbers * one.item for one in others if not one.trained), "weights")
        return sequence.begin_all((one.numbers * one.item for one in others if one.trained), "weights")


def outside_parameters(shape: Shape, numbers: Numbers) -> list[Parameter]:
    """The parameters that are neither in a layer nor in the last norm: the embeddings' first, then
    the head's if it has its own."""
    item, full = numbers.weights, numbers.full
    found = [Parameter(shape.vocabulary, shape.hidden, item, full)] * (1 if shape.tied else 2)
    if shape.positions:
        found.append(Parameter(shape.positions, shape.hidden, item, full))
    if shape.buckets:
        # Of both stacks, and the encoder's last norm.
        found += [Parameter(shape.buckets, shape.heads, item, full)] * 2
        found.append(Parameter(shape.hidden, 0, numbers.vectors, full))
    return found


class Engine:
    """What happens around the passes of a unit, and of the whole model: in most cases nothing."""

    keeps_gradients = False
    """Whether those of a layer stay where its backward pass has made them."""
    _sequence: Sequence

    def before_forward(self, unit: Unit) -> None:
        """Do nothing."""

    after_forward = before_backward = release = before_forward

    def after_backward(self, unit: Unit, gradient: int = NOWHERE) -> None:
        """`gradient`: of its first parameter, if it still exists and does not stay."""
        self._sequence.end(gradient)

    def begin_forward(self) -> None:
        """Do nothing."""

    def begin_backward(self, *, last: bool) -> None:
        """Do nothing."""

    def end_backward(self) -> None:
        """Do nothing."""


class Plain(Engine):
    """One process, or several with a whole model each."""

    keeps_gradients = True

    def __init__(self, settings: Settings, numbers: Numbers, units: list[Unit], sequence: Sequence) -> None:
        self._settings, self._numbers, self._units, self._sequence = settings, numbers, units, sequence
        self._has_moments = False

    def load(self) -> None:
        sequence = self._sequence
        for unit in self._units:
            unit.load(sequence, self._numbers.weights)
        trained = [one for unit in self._units for one in unit.trained]
        sequence.begin(ring_bytes(self._settings, trained), "buckets" if self._settings.ddp else "workspace")

    def step(self) -> None:
        kind, sequence = self._settings.optimizer, self._sequence
        if kind == "adafactor":
            self._adafactor()
        if not self._has_moments:
            self._has_moments = True
            for unit in self._units:
                sequence.begin_all((size for one in unit.trained for size in optimizer_sizes(kind, one)), "optimizer")
        sequence.end(*reversed(sequence.kept))
        sequence.kept.clear()

    def _adafactor(self) -> None:
        """What each parameter takes for a moment. Of equal layers, which may take turns with those
        of another kind, only the first two are played: the others take the places of the second."""
        sequence, change, copies = self._sequence, NOWHERE, list[int]()
        units = [unit for n, unit in enumerate(self._units) if n < 2 or unit.parameters is not self._units[n - 2].parameters]
        for one in (one for unit in units for one in unit.trained):
            size = 4 * one.numbers
            is_large = size > MIB
            sequence.end(*copies)
            # In 32 bits, of the gradient and the weights.
            copies = [sequence.begin(size, "temporary") for _ in range(2 if is_large and one.item == 2 else 0)]
            # The gradient's square, and its sum with a constant. Only then the change of the
            # parameter before ends.
            square, total = (sequence.begin(size if is_large else 0, "temporary") for _ in range(2))
            sequence.end(square, change)
            change = sequence.begin(size if is_large else 0, "temporary")
            sequence.end(total)
            # The negative change.
            sequence.pass_through(size if is_large else 0)
        sequence.end(*copies, change)
