"""Makes the trace of a deep model from the traces of two shallow ones.

The layers of most models are alike, so their operations repeat. A model with six layers shows what
one more layer adds to a model with five: in each phase, one or more sequences of events once more.
`deepened` repeats these sequences. It returns None where the layers are not alike.

Positions count the events of a phase. Where an event releases memory, the position at which that
memory was allocated changes linearly with the number of layers, and from one copy of a sequence to
the next: the backward pass meets the layers in the reverse order.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from memtop.train.dry_run.trace import Allocation, Recorded

SHALLOW = (5, 6)
"""The layers of the two models."""
_COPIES = 3
"""How often the deeper one must repeat a sequence: only three copies show what changes linearly."""
_Word = tuple[bool, str, str, int]
"""Whether an event allocates; operation, component and size of the memory."""


class _Place(NamedTuple):
    phase: int
    position: int


class _Moving(NamedTuple):
    """A place that depends on the number of layers and, in a repeated sequence, on the copy."""

    first: _Place
    for_each_layer: int
    for_each_copy: int = 0

    def at(self, layers: int, copy: int = 0) -> _Place:
        moved = self.for_each_layer * layers + self.for_each_copy * copy
        return _Place(self.first.phase, self.first.position + moved)


class _Repeats(NamedTuple):
    start: int
    length: int


class _Phase:
    """A phase of a trace: its events, and for each one that releases, where it was allocated."""

    def __init__(self, trace: Recorded, number: int, born: dict[int, _Place]) -> None:
        begin = trace.phases[number][0]
        end = trace.phases[number + 1][0] if number + 1 < len(trace.phases) else len(trace.events)
        self.events = _in_order(trace.events[begin:end])
        self.allocations = [trace.allocations[event if event >= 0 else ~event] for event in self.events]
        self.words: list[_Word] = [
            (event >= 0, one.operation, one.component, one.size)
            for event, one in zip(self.events, self.allocations, strict=True)
        ]
        self.targets: list[_Place | None] = []
        for position, event in enumerate(self.events):
            if event >= 0:
                born[event] = _Place(number, position)
            self.targets.append(born[~event] if event < 0 else None)


def _in_order(events: list[int]) -> list[int]:
    """The events, with what is released together in the order in which it was allocated. torch
    releases the weights in 16 bits in any order; what is free afterwards is the same."""
    found: list[int] = []
    for allocates, group in itertools.groupby(events, lambda event: event >= 0):
        together = list(group)
        found += together if allocates else sorted(together, reverse=True)
    return found


def deepened(shallow: Recorded, deeper: Recorded, layers: int) -> Recorded | None:
    """The trace of the model with so many layers, from those of the two shallow ones; None if they
    do not show it."""
    if [name for _, name in shallow.phases] != [name for _, name in deeper.phases]:
        return None
    born_in_less: dict[int, _Place] = {}
    born_in_more: dict[int, _Place] = {}
    made = _Made(layers - SHALLOW[1])
    for number, (_, name) in enumerate(deeper.phases):
        less, more = _Phase(shallow, number, born_in_less), _Phase(deeper, number, born_in_more)
        repeats = _repeats(less, more)
        if repeats is None or not made.add(name, less, more, repeats):
            return None
    return made.trace


def _repeats(less: _Phase, more: _Phase) -> list[_Repeats] | None:
    """Which sequences the deeper model has once more; None if these are not all that differs."""
    found: list[_Repeats] = []
    a, b = less.words, more.words
    at = shift = done = 0
    while True:
        while at < len(a) and at + shift < len(b) and a[at] == b[at + shift]:
            at += 1
        if at == len(a) and at + shift == len(b):
            return found
        end = at + shift
        lengths = [
            length
            for length in range(1, len(b) - len(a) - shift + 1)
            if end - (_COPIES - 1) * length >= done and _copies(b, end - (_COPIES - 1) * length, length)
        ]
        if lengths:
            length = max(lengths, key=lambda length: (_common(a, b, at, end + length), -length))
            last = first = end - (_COPIES - 1) * length
            while first > done and b[first - 1] == b[first - 1 + length]:
                first -= 1
            # In the middle: the first and the last layer differ in what they get and give.
            start = (first + last) // 2
            found.append(_Repeats(start, length))
            done = start + _COPIES * length
            shift += length
        elif at < len(a) and end < len(b) and a[at][:-1] == b[end][:-1]:
            at += 1  # something with another size
        else:
            return None


def _copies(words: list[_Word], start: int, length: int) -> bool:
    """Whether the same sequence is there three times."""
    last = start + (_COPIES - 1) * length
    return last + length <= len(words) and words[start:last] == words[start + length : last + length]


def _common(a: list[_Word], b: list[_Word], at: int, other: int) -> int:
    """How many events are the same from there on, but for their sizes; the end counts, too."""
    count = 0
    while at + count < len(a) and other + count < len(b) and a[at + count][:-1] == b[other + count][:-1]:
        count += 1
    return count + (at + count == len(a) and other + count == len(b))


class _Made:
    """The trace of the deep model, phase by phase."""

    def __init__(self, more: int) -> None:
        """`more`: the layers beyond those of the deeper shallow model."""
        self._more = more
        self._numbers: dict[_Place, int] = {}
        self.trace = Recorded([], [], [])

    def add(self, name: str, less: _Phase, more: _Phase, repeats: list[_Repeats]) -> bool:
        number = len(self.trace.phases)
        self.trace.phases.append((len(self.trace.events), name))  # type: ignore[arg-type]
        position = done = removed = 0
        for start, length in [*repeats, (len(more.events), 0)]:
            for at in range(done, start):
                if not self._outside(_Place(number, position), less, more, at, at - removed):
                    return False
                position += 1
            for copy in range(_COPIES + self._more if length else 0):
                for at in range(start, start + length):
                    if not self._inside(_Place(number, position), less, more, at, at - removed, length, copy):
                        return False
                    position += 1
            done, removed = start + _COPIES * length, removed + length
        return True

    def _outside(self, here: _Place, less: _Phase, more: _Phase, at: int, before: int) -> bool:
        allocation, target, former = more.allocations[at], more.targets[at], less.targets[before]
        if target is None:
            # What holds a number for each parameter grows with the layers.
            size = allocation.size + (allocation.size - less.allocations[before].size) * self._more
            return self._allocate(here, Allocation(size, allocation.operation, allocation.component))
        moving = _moving(target, former)
        return moving is not None and self._release(moving.at(self._more))

    def _inside(self, here: _Place, less: _Phase, more: _Phase, at: int, before: int, length: int, copy: int) -> bool:
        target = more.targets[at]
        if target is None:
            return self._allocate(here, more.allocations[at])
        moving = _moving(target, less.targets[before], [more.targets[at + n * length] for n in range(1, _COPIES)])
        return moving is not None and self._release(moving.at(self._more, copy))

    def _allocate(self, here: _Place, allocation: Allocation) -> bool:
        if allocation.size < 0:
            return False
        number = self._numbers[here] = len(self.trace.allocations)
        self.trace.allocations.append(allocation)
        self.trace.events.append(number)
        return True

    def _release(self, place: _Place) -> bool:
        number = self._numbers.pop(place, None)
        if number is None:
            return False
        self.trace.events.append(~number)
        return True


def _moving(more: _Place, less: _Place | None, copies: list[_Place | None] | None = None) -> _Moving | None:
    if less is None or less.phase != more.phase:
        return None
    step = 0
    for number, place in enumerate(copies or (), start=1):
        if place is None or place.phase != more.phase:
            return None
        if number == 1:
            step = place.position - more.position
        elif place.position != more.position + number * step:
            return None
    return _Moving(more, more.position - less.position, step)
