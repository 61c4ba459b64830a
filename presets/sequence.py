"""The large allocations of a training in their order, for torch's allocator (`allocator.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from typing import Literal, NamedTuple

import msgspec

from memtop.presets.allocator import MIB, Allocator, CannotFit, rounded
from memtop.presets.autograd import GRADIENT, MODULES, PRODUCT, RECOMPUTED, Tensor
from memtop.presets.layers import Layer
from memtop.presets.states import Parameter

Phase = Literal["load", "forward", "backward", "optimizer"]
NOWHERE = -1
"""The key of what is not part of a sequence, or small."""


Events = list[tuple[list[int], int]]
"""Events of a layer's own tensors, and after each part what ends then and is not its own, or
an event of `autograd.py` from PRODUCT on; -1: nothing."""


def split(events: list[int], outside: set[int]) -> Events:
    """`events`: n where the large tensor n begins, ~n where it ends. `outside`: those that begin
    outside of the layer."""
    found: Events = []
    part: list[int] = []
    for event in events:
        if event >= PRODUCT:
            found.append((part, event))
            part = []
        elif (event if event >= 0 else ~event) not in outside:
            part.append(event)
        elif event < 0:
            found.append((part, ~event))
            part = []
    return [*found, (part, NOWHERE)]


class Tensors(NamedTuple):
    """The large tensors of a pass."""

    sizes: list[int]
    """Bytes."""
    uses: list[str]
    """What each is for."""

    @classmethod
    def of(cls, large: list[tuple[int, str]]) -> Tensors:
        return cls([size for size, _ in large], [use for _, use in large])


class Passes(msgspec.Struct):
    """What a layer allocates, forward and backward, in its large tensors."""

    forward: Events
    made_forward: Tensors
    """Those of `forward`."""
    ends: list[int]
    """What ends with the model's forward pass."""
    backward: Events
    made_backward: Tensors | None
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
    """Other inputs. They and their gradients begin and end outside."""
    gradients: list[int]
    """Of weights, which the backward pass makes."""

    def outliving_bytes(self) -> tuple[int, int, int]:
        """What is kept until the backward pass, until the end of the forward pass, and
        gradients."""
        forward, made = self.made_forward, self.made_backward or self.made_forward
        gradients = sum(made.sizes[number] for number in self.gradients)
        copies = sum(forward.sizes[~event] for event in self.ends)
        ends = {~event for event in self.ends}
        saved = sum(forward.sizes[number] for number in _outliving(self.forward) if number not in ends)
        return saved, copies, gradients

    @property
    def ends_source(self) -> bool:
        """Whether the forward pass ends what the layer gets."""
        return self.made_backward is None and any(outside == self.source for _, outside in self.forward)


def _outliving(events: Events) -> list[int]:
    """What begins in a pass and does not end there."""
    ended = {~event for part, _ in events for event in part if event < 0}
    return [event for part, _ in events for event in part if event >= 0 and event not in ended]


class Stack(msgspec.Struct):
    """Equal layers, one of which was run."""

    count: int
    passes: Passes
    small_saved: int
    """Bytes of small tensors that live until the backward pass."""
    small_copies: int
    """The same until the forward pass ends: autocast's copies of weights."""
    small_gradients: int
    """Of weights."""
    small_again: int
    """Bytes of small tensors that a checkpoint saves when it runs the layer again."""
    parameters: list[Parameter]
    matrices: dict[int, int]
    """The places in `parameters` of those that modules gather, by the module's first event."""
    names: set[str]
    first: Stack | None = None
    """The layer as the first one of the model, if it gets something else there."""


def stack_of(run: Callable[[Layer], tuple[int, Tensor]], layer: Layer, unsaved: Layer | None, count: int) -> Stack:
    """`run` runs a layer; it gives what was live before, and the result. `unsaved`: with a
    checkpoint, the layer that the forward pass runs, without a backward pass."""
    layer.again = unsaved is not None
    before, found = run(layer)
    layer.shares = None
    ran, with_copies = len(layer.events), layer.live - before
    copied = sum(copy.size for copy in layer.copies)
    layer.copies.clear()
    saved, ended = layer.live - before, len(layer.events)
    result, node, size, item = found.number, found.node, found.count, found.item
    del found
    began = len(layer.events)
    if node is not None:
        layer.backward(node, size, item)
    events, source = layer.events, layer.inputs[-1]
    forward, ends, backward = events[:ran], events[ran:ended], events[began:]
    made = Tensors.of(layer.large)
    again, small_again = None, 0
    copies = with_copies - saved
    if unsaved is not None:
        # Forward, a layer keeps only its result. Backward, it is run again up to what was saved
        # last.
        last = layer.last_saved
        late = {event for event in events[last:ran] if event >= 0}
        gone = [event for event in events[last:ended] if event < 0 and ~event not in late]
        ahead, used = max(0, layer.looked_back - began), max(0, layer.looked_back_last - began)
        rest = [event for event in backward[ahead:used] if event >= 0 or ~event not in late]
        after = [event for event in backward[used:] if event >= 0 or ~event not in late]
        backward = [*backward[:ahead], *events[:last], *gone]
        # The checkpoint holds the input until the last that was saved has been used.
        backward = [*(event for event in [*backward, RECOMPUTED, *rest] if event != ~source), ~source, *after]
        again = made
        ran_again = split(events[:ended], set())
        small_again = saved - sum(made.sizes[number] for number in _outliving(ran_again))
        saved, copies = size * item, copied
        found = run(unsaved)[1]
        unsaved.shares = None
        forward, made, result = unsaved.events[:], Tensors.of(unsaved.large), found.number
        ends = [~copy.number for copy in unsaved.copies if copy.number >= 0]
        source = unsaved.inputs[-1]
        forward = [event for event in forward if event >= 0 or ~event != source]
    passes = Passes(
        forward=split(forward, {source, *layer.inputs[:-1]}),
        made_forward=made,
        ends=ends,
        backward=split(backward, {source, *layer.inputs[:-1], *layer.given[:1]}),
        made_backward=again,
        source=source,
        result=result,
        given=layer.given[0] if layer.given else -1,
        passed_on=layer.passed_on[0] if layer.passed_on else -1,
        others=layer.inputs[:-1],
        gradients=[number for number, (_, use) in enumerate(layer.large) if use == "gradients"],
    )
    large_saved, large_copies, large_gradients = passes.outliving_bytes()
    return Stack(
        count=count,
        passes=passes,
        small_saved=saved - large_saved,
        small_copies=copies - large_copies,
        small_gradients=layer.kept - large_gradients,
        small_again=small_again,
        parameters=layer.parameters,
        matrices={
            module - MODULES: place
            for module, matrix in layer.matrices.items()
            for place, one in enumerate(layer.parameters)
            if one is matrix
        },
        names=layer.names,
    )


class Running(msgspec.Struct, frozen=True):
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
        self._counted = self._live = 0
        """So many events have been counted, and this is live after them, bytes."""
        self.keeps = True
        """Whether gradients of weights stay; otherwise they are added to older ones, or moved."""
        self.kept: list[int] = []
        """Those that stay."""
        self.calls: dict[int, Callable[[], object]] = {}
        """What is called once, when this event comes next."""
        self.on_module: Callable[[int], object] = self.reach
        """What is called for each event of a module."""
        self.take: Callable[..., object] = self.end
        """What becomes of new gradients that do not stay."""

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

    def begin_all(self, sizes: Iterable[int], use: str) -> list[int]:
        """Tensors of these sizes. Those of at most 1 MiB, which never share a segment with larger
        ones, are put together."""
        large, small = [], 0
        for size in sizes:
            if size > MIB:
                large.append(self.begin(size, use))
            else:
                small += rounded(size)
        return [*large, *self.begin_small(small, use)]

    def begin_small(self, size: int, use: str, stream: int = 0) -> list[int]:
        """Many tensors of at most 1 MiB."""
        return [self.begin(min(MIB, size - start), use, stream) for start in range(0, size, MIB)]

    def chain(self, before: int, sizes: Iterable[int]) -> int:
        """Tensors of these sizes, each of which ends the one before. Returns the last."""
        for size in sizes:
            made = self.begin(size, "activations")
            self.end(before)
            before = made
        return before

    def end(self, *keys: int) -> None:
        self.events += [~key for key in keys if key >= 0]

    def keep(self, gradient: int) -> None:
        """The gradient of a weight stays, or is added to an older one."""
        self.end(self.moved(gradient))

    def moved(self, gradient: int) -> int:
        """The gradient of a weight, if it does not stay."""
        if self.keeps and gradient >= 0:
            self.kept.append(gradient)
            return NOWHERE
        return gradient

    def pass_through(self, size: int, use: str = "temporary", stream: int = 0) -> None:
        self.end(self.begin(size, use, stream))

    def reach(self, event: int) -> None:
        """This event of `autograd.py` has come."""
        if event in self.calls:
            self.calls.pop(event)()

    def begin_at(self, event: int, sizes: Several[int], keys: list[int]) -> None:
        """Begin one of these tensors each time that this event comes; `keys` gets them."""

        def begin() -> None:
            keys.append(self.begin(sizes[0], "activations"))
            self.begin_at(event, sizes[1:], keys)

        if sizes:
            self.calls[event] = begin

    def begin_until(self, last: int, event: int, sizes: Several[int]) -> None:
        """The same, until another event comes."""
        keys = list[int]()
        self.begin_at(event, sizes, keys)
        self.calls[last] = lambda: self.end(*keys)

    def live_bytes(self) -> int:
        """What is there now."""
        sizes, new = self.sizes, self.events[self._counted :]
        self._counted += len(new)
        self._live += sum(sizes[event] if event >= 0 else -sizes[~event] for event in new)
        return self._live

    def forward(self, passes: Passes, source: int, *, holds_source: bool = False) -> Running:
        """`holds_source`: something else holds what the layer gets."""
        base = self._made(passes.made_forward)
        keys = dict.fromkeys(passes.others, NOWHERE)
        checkpointed = passes.made_backward is not None
        keys[passes.source] = NOWHERE if checkpointed or holds_source else source
        self._play(passes.forward, base, keys)
        return Running(passes, base, source, base + passes.result if passes.result >= 0 else NOWHERE)

    def end_forward(self, running: Running) -> None:
        self.events += [event - running.base for event in running.passes.ends]

    def backward(self, running: Running, given: int) -> int:
        """`given`: the gradient of the layer's result. Returns that of its input."""
        passes, base = running.passes, running.base
        keys = dict.fromkeys(passes.others, NOWHERE)
        keys[passes.given], keys[passes.source] = given, running.source
        if passes.made_backward is not None:
            base = self._made(passes.made_backward)
        gradients = [base + number for number in passes.gradients]
        self._play(passes.backward, base, keys, moved=frozenset(() if self.keeps else gradients))
        if self.keeps:
            self.kept += gradients
        if passes.given == NOWHERE:
            self.end(given)
        if passes.source < 0:
            self.end(running.source)
        if passes.passed_on < 0:
            return NOWHERE
        return keys.get(passes.passed_on, base + passes.passed_on)

    def _made(self, large: Tensors) -> int:
        base = len(self.sizes)
        self.sizes += large.sizes
        self.uses += large.uses
        self.streams += [0] * len(large.sizes)
        return base

    def _play(self, events: Events, base: int, keys: dict[int, int], moved: frozenset[int] = frozenset()) -> None:
        """`moved`: gradients that do not stay."""
        found, made = self.events, list[int]()
        for part, outside in events:
            new = [base + event if event >= 0 else event - base for event in part]
            found += new
            if moved:
                made += sorted(moved.intersection(new))
            if outside == GRADIENT:
                self.take(*made)
                made.clear()
            if outside >= MODULES:
                self.on_module(outside - MODULES)
            elif outside >= PRODUCT:
                self.reach(outside)
            elif keys.get(outside, NOWHERE) >= 0:
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
