"""What holds weights, gradients and moments in a training, and when it allocates them, without
DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence as Several

import msgspec

from memtop.presets.allocator import MIB
from memtop.presets.schema import Settings
from memtop.presets.sequence import Sequence
from memtop.presets.states import Numbers, Parameter, block_bytes, optimizer_bytes, ring_bytes, weight_bytes


class Piece(msgspec.Struct, eq=False):
    """Weights that ZeRO-3 gathers together; sizes in numbers."""

    sizes: list[int]
    largest: int
    """Of one weight."""
    gathered: list[int] = []
    """Where they are, whole."""
    uses: int = 0
    passed: int = 0
    """In this pass: how often it was used, and found when looking ahead."""

    @property
    def count(self) -> int:
        return sum(self.sizes)


class Unit(msgspec.Struct, eq=False):
    """Parameters that are used together: of a layer, of `times` equal layers, or of the
    embeddings."""

    parameters: Several[Parameter]
    times: int = 1
    pieces: list[Piece] = []
    """With ZeRO-3; of many equal layers, a few."""

    @property
    def trained(self) -> list[Parameter]:
        return [one for one in self.parameters if one.trained]

    @property
    def count(self) -> int:
        """Numbers that are trained."""
        return self.times * sum(one.numbers for one in self.parameters if one.trained)


class Plain:
    """One process, or several with a whole model each."""

    def __init__(self, settings: Settings, numbers: Numbers, units: list[Unit], sequence: Sequence) -> None:
        self._settings, self._numbers, self._units, self._sequence = settings, numbers, units, sequence
        self._has_moments = False
        self._gradients: list[int] = []

    def load(self) -> None:
        sequence, expandable = self._sequence, self._numbers.expandable
        for unit in self._units:
            for one in unit.parameters:
                if not one.item:
                    sequence.pass_through(one.numbers * self._numbers.weights)
                if unit.times == 1 and weight_bytes(one, expandable) > MIB:
                    sequence.begin(weight_bytes(one, expandable), "weights")
            found = [weight_bytes(one, expandable) for one in unit.parameters]
            sizes = [size for size in found if unit.times > 1 or size <= MIB]
            large = sum(size for size in sizes if size > MIB)
            sequence.begin_small(unit.times * (sum(sizes) - large), "weights")
            sequence.begin(unit.times * large, "weights")
        trained = [one for unit in self._units for one in unit.trained]
        gradients = sum(
            block_bytes(one.numbers * one.item, expandable) * unit.times for unit in self._units for one in unit.trained
        )
        sequence.begin(ring_bytes(self._settings, trained, gradients), "workspace")

    def before_forward(self, unit: Unit) -> None:
        """Do nothing."""

    after_forward = before_backward = before_forward

    def begin_forward(self) -> None:
        """Do nothing."""

    def begin_backward(self, *, last: bool) -> None:
        """Do nothing."""

    def after_backward(self, unit: Unit) -> None:
        """The gradients of a unit are there, if they have not been made by its layer."""
        if self._numbers.resident and unit not in self._done:
            self._done.append(unit)
            self._blocks(unit, [one.numbers * one.item for one in unit.trained], "gradients", self._gradients)

    _done: list[Unit]

    def begin_update(self) -> None:
        self._done = []

    def end_backward(self) -> None:
        """Do nothing."""

    def step(self) -> None:
        kind, sequence = self._settings.optimizer, self._sequence
        trained = [one for unit in self._units for one in unit.trained]
        if kind == "adafactor":
            # The square of a gradient and its sum with a constant; later the change and its
            # negative.
            largest = 4 * max(one.numbers for one in trained)
            first = sequence.begin(largest, "temporary")
            sequence.pass_through(largest)
            sequence.end(first)
        if not self._has_moments:
            self._has_moments = True
            for unit in self._units:
                sizes = [optimizer_bytes(kind, one, self._numbers.expandable) for one in unit.trained]
                # Of Adam two moments each, one after the other.
                halves = sizes if kind == "adafactor" else [size // 2 for size in sizes for _ in range(2)]
                self._blocks(unit, halves, "optimizer", [])
        sequence.end(*self._gradients, *sequence.kept)
        self._gradients.clear()
        sequence.kept.clear()

    def _blocks(self, unit: Unit, sizes: list[int], use: str, keys: list[int]) -> None:
        if unit.times == 1:
            keys += [self._sequence.begin(size, use) for size in sizes if size > MIB]
            sizes = [size for size in sizes if size <= MIB]
        keys += self._together(unit, sizes, use)

    def _together(self, unit: Unit, sizes: list[int], use: str) -> list[int]:
        large = sum(size for size in sizes if size > MIB)
        small = self._sequence.begin_small(unit.times * (sum(sizes) - large), use)
        return [*small, *(self._sequence.begin_for(unit.times, large, use) if large else [])]
