"""The large allocations of a training, one after the other, for torch's allocator (`allocator.py`).

Of many equal layers only a few are there with all their tensors. What another one saves is one
block, as are its weights, its gradients and each of its moments.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memtop.presets.allocator import MIB, Allocator, CannotFit

Phase = Literal["load", "forward", "backward", "optimizer"]
_PIECES = 6
"""At most so many blocks for what equal layers have."""
NOWHERE = -1
"""The key of what is not part of a sequence, or small."""


Events = list[tuple[list[int], int]]
"""Events of a layer's own tensors, and after each part what ends then and is not its own; -1:
nothing."""


def split(events: list[int], outside: set[int]) -> Events:
    """`events`: n where the large tensor n begins, ~n where it ends. `outside`: those that begin
    outside of the layer."""
    found: Events = []
    part: list[int] = []
    for event in events:
        if (event if event >= 0 else ~event) not in outside:
            part.append(event)
        elif event < 0:
            found.append((part, ~event))
            part = []
    return [*found, (part, NOWHERE)]


class Passes(msgspec.Struct):
    """What a layer allocates, forward and backward, in its large tensors."""

    forward: Events
    made_forward: list[tuple[int, str]]
    """The large tensors of `forward`: bytes, and what each is for."""
    ends: list[int]
    """What ends with the model's forward pass."""
    backward: Events
    made_backward: list[tuple[int, str]] | None
    """With a checkpoint, the backward pass begins with the forward pass again, and tensors of its
    own. Otherwise None: it continues those of `forward`."""
    source: int
    """The layer's input, which is the result of the layer before."""
    result: int
    given: int
    """The gradient of the result."""
    passed_on: int
    """The gradient of the input."""
    others: list[int]
    """Other inputs, which begin and end outside."""
    rest: list[int]
    """Gradients of these."""


class Running(msgspec.Struct):
    """A layer between its forward and its backward pass; keys in the sequence."""

    passes: Passes
    base: int
    source: int
    result: int


class Sequence:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.uses: list[str] = []
        self.streams: list[int] = []
        self.events: list[int] = []
        """n where block n begins, ~n where it ends."""
        self.phases: list[tuple[int, Phase]] = [(0, "load")]
        self.kept: list[int] = []
        """Gradients that a layer's backward pass has made."""

    def phase(self, name: Phase) -> None:
        self.phases.append((len(self.events), name))

    def begin(self, size: int, use: str, stream: int = 0) -> int:
        if size <= 0:
            return NOWHERE
        self.sizes.append(size)
        self.uses.append(use)
        self.streams.append(stream)
        self.events.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def begin_for(self, times: int, size: int, use: str) -> list[int]:
        """The same for `times` equal layers, in at most _PIECES blocks."""
        pieces = min(times, _PIECES)
        return [self.begin(size * times // pieces, use) for _ in range(pieces)]

    def begin_small(self, size: int, use: str) -> list[int]:
        """Many tensors of at most 1 MiB, which large ones never share a segment with."""
        pieces = min(-(-size // MIB), _PIECES)
        if size > pieces * MIB:
            return [*self.begin_small(pieces * MIB, use), self.begin(size - pieces * MIB, use)]
        return [self.begin(min(MIB, size - number * MIB), use) for number in range(pieces)]

    def end(self, *keys: int) -> None:
        self.events += [~key for key in keys if key >= 0]

    def pass_through(self, size: int, use: str = "temporary", stream: int = 0) -> None:
        self.end(self.begin(size, use, stream))

    def live_bytes(self) -> int:
        """What is there now."""
        sizes = self.sizes
        return sum(sizes[event] if event >= 0 else -sizes[~event] for event in self.events)

    def forward(self, passes: Passes, source: int) -> Running:
        base = self._made(passes.made_forward)
        keys = dict.fromkeys(passes.others, NOWHERE)
        checkpointed = passes.made_backward is not None
        keys[passes.source] = NOWHERE if checkpointed else source
        self._play(passes.forward, base, keys)
        return Running(passes, base, source, base + passes.result if passes.result >= 0 else NOWHERE)

    def end_forward(self, running: Running) -> None:
        self.events += [event - running.base for event in running.passes.ends]

    def backward(self, running: Running, given: int) -> int:
        """`given`: the gradient of the layer's result. Returns that of its input."""
        passes, base = running.passes, running.base
        keys = dict.fromkeys(passes.others, NOWHERE)
        keys[passes.given] = given
        if passes.made_backward is None:
            keys[passes.source] = running.source
            made = passes.made_forward
        else:
            keys[passes.source] = NOWHERE
            base, made = self._made(passes.made_backward), passes.made_backward
        self._play(passes.backward, base, keys)
        if passes.given < 0:
            self.end(given)
        if passes.made_backward is not None or passes.source < 0:
            self.end(running.source)
        self.end(*(base + number for number in passes.rest))
        self.kept += [base + number for number, (_, use) in enumerate(made) if use == "gradients"]
        if passes.passed_on < 0:
            return NOWHERE
        return keys.get(passes.passed_on, base + passes.passed_on)

    def _made(self, large: list[tuple[int, str]]) -> int:
        base = len(self.sizes)
        for size, use in large:
            self.sizes.append(size)
            self.uses.append(use)
            self.streams.append(0)
        return base

    def _play(self, events: Events, base: int, keys: dict[int, int]) -> None:
        found = self.events
        for part, outside in events:
            found += [base + event if event >= 0 else event - base for event in part]
            if keys.get(outside, NOWHERE) >= 0:
                found.append(~keys[outside])

    def peaks(self, *, expandable: bool, capacity: int | None) -> tuple[dict[Phase, tuple[int, int]], int]:
        """The most bytes allocated and reserved by phase, and the place of the event at which most
        is allocated."""
        found = self._peaks(Allocator(expandable=expandable))
        allocated, reserved = (max(sizes) for sizes in zip(*found[0].values(), strict=True))
        if capacity is None or reserved <= capacity or allocated > capacity:
            return found
        # It gives back what is unused, if that is enough.
        try:
            return self._peaks(Allocator(expandable=expandable, capacity=capacity))
        except CannotFit:
            return found

    def _peaks(self, allocator: Allocator) -> tuple[dict[Phase, tuple[int, int]], int]:
        found: dict[Phase, tuple[int, int]] = {}
        highest = at = 0
        sizes, streams, events = self.sizes, self.streams, self.events
        allocate, release = allocator.allocate, allocator.release
        ends = [start for start, _ in self.phases[1:]] + [len(events)]
        for (start, phase), end in zip(self.phases, ends, strict=True):
            allocator.reset_peaks()
            for place in range(start, end):
                event = events[place]
                if event < 0:
                    release(~event)
                else:
                    allocate(event, sizes[event], streams[event])
                    if allocator.allocated > highest:
                        highest, at = allocator.allocated, place
            before = found.get(phase, (0, 0))
            found[phase] = (max(before[0], allocator.peak_allocated), max(before[1], allocator.peak_reserved))
        return found, at

    def components(self, place: int) -> dict[str, int]:
        """What is there after this event, by what it is for."""
        live: set[int] = set()
        for event in self.events[: place + 1]:
            if event >= 0:
                live.add(event)
            else:
                live.discard(~event)
        found: dict[str, int] = {}
        for key in live:
            found[self.uses[key]] = found.get(self.uses[key], 0) + self.sizes[key]
        return found
