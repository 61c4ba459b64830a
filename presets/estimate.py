"""The GPU memory of a training, estimated in milliseconds and without torch.

`train.dry_run` runs the whole model on tensors without contents. Here one layer of each kind is
run, with sizes alone (`layers.py`). Its large tensors, as often as the model has them, go through
torch's allocator (`sequence.py`). So this serves sliders, and machines without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from memtop.presets.architectures import BF16_FROM, CPU, Shape, causal_layer, kernel_of, shape_of, t5_layer
from memtop.presets.autograd import BIAS, PRODUCT, RECOMPUTED, Tensor
from memtop.presets.layers import Kernel, Layer
from memtop.presets.losses import Loss
from memtop.presets.schema import Settings
from memtop.presets.sequence import NOWHERE, Passes, Phase, Running, Sequence, Stack, Tensors, stack_of
from memtop.presets.states import UnknownMemoryError, numbers_of
from memtop.presets.updates import Plain, Unit, outside_parameters
from memtop.presets.zero import Stage1InBf16, Stages1And2
from memtop.presets.zero3 import Stage3

Component = Literal[
    "weights",
    "gathered weights",
    "master weights",
    "gradients",
    "buckets",
    "optimizer",
    "activations",
    "logits",
    "workspace",
    "temporary",
]
_MIB = 1 << 20
_ABOVE = 1.03
"""It rather says a little too much: how large blocks fall into gaps is decided by small ones."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes, as torch counts them: without the CUDA context."""

    allocated: int
    reserved: int
    """With what torch keeps for later: less sure, because small tensors decide where large ones
    fit."""
    peaks: dict[Phase, int]
    """The most that is allocated in each phase of an update."""
    peak_phase: Phase
    components: dict[Component, int]
    """What is allocated at the peak; the sum is `allocated`."""
    numbers: int
    """Parameters of the model, with adapters if it has any."""
    trained: int
    """Of these."""


def estimate(settings: Settings, config: Mapping[str, Any], *, generation: int, capacity: int | None = None) -> Estimate:
    """The memory of a run of the built-in trainer; UnknownMemoryError, with the reason as one line,
    if it cannot be estimated.

    `config`: the values of the model's Hugging Face configuration, with `model_type`. `generation`:
    the GPU's compute capability without its point. `capacity`: the bytes that torch can reserve
    there, which decide how many logits exist at one time; None: enough for the most.
    """
    return _Run(settings, shape_of(config), generation, capacity).estimate()


_NONE = Tensors([], [])
_NOT_RUNNING = Running(Passes([], _NONE, [], [], None, -1, -1, -1, -1, [], []), 0, -1, -1)


class _Part(msgspec.Struct):
    """A layer, in the order of the model."""

    unit: Unit
    stack: Stack
    is_first: bool = False
    """Whether it gets what no layer has made."""
    before: int = -1
    """The result of another stack's last layer."""
    running: Running = _NOT_RUNNING
    saved: Several[int] = ()
    copies: Several[int] = ()
    """What is small."""


class _Places(NamedTuple):
    """The parameters of the parts of a model."""

    embeddings: Unit
    layers: list[_Part]
    tail: Unit
    head: Unit | None
    """With weights of its own."""

    @property
    def units(self) -> list[Unit]:
        layers = [part.unit for part in self.layers]
        return [self.embeddings, *layers, self.tail, *([] if self.head is None else [self.head])]


class _Start(NamedTuple):
    """Bytes of what the model makes before its layers."""

    embedded: list[int]
    """What the embeddings make, each from the one before: scaled, in another precision."""
    changed: list[int]
    """What the model makes of that for the first layer of a stack, each from the one before."""
    kept: list[int]
    """What lives until the backward pass ends."""
    biases: list[list[int]]
    """Of each stack, what its first layer makes for the scores of all; a checkpoint makes it again.
    """
    added: list[int]
    """What lives until the forward pass of the last norm ends."""
    made: list[int]
    """What the layers' backward passes make for it."""
    held: int
    """What else the loss of an earlier micro-batch still holds."""


class _Run:
    def __init__(self, settings: Settings, shape: Shape, generation: int, capacity: int | None) -> None:
        self.settings, self.shape, self.capacity = settings, shape, capacity
        precision = settings.precision
        if precision == "auto":
            precision = "bf16" if generation >= BF16_FROM else "fp16"
        self.half = None if precision == "fp32" else precision
        self.generation = generation
        self.numbers = numbers_of(settings, self.half)
        if shape.norm == "gemma" and self.half == "bf16" and self.numbers.weights == 2:
            # Its norms give the precision that they get, also with weights in fp32.
            self.numbers = replace(self.numbers, stream=2)
        if shape.buckets and self.numbers.quantized and self.half == "bf16":
            # What T5's layers add has the precision of its weights, not that of its norms.
            self.numbers = replace(self.numbers, stream=self.numbers.weights)
        if shape.kind == "gpt2":
            # Its layers are no linear ones, so DeepSpeed's do not replace them.
            self.numbers = replace(self.numbers, replaces_linear=False)
        if (settings.task == "seq2seq") != bool(shape.decoder_layers):
            raise UnknownMemoryError(f"task {settings.task}: does not go together with model_type {shape.kind}")
        narrow = self.numbers.narrow_norms or self.half == "fp16"
        self.embedded_item = self.numbers.stream if narrow else self.numbers.weights
        self.tokens = settings.batch * settings.seq_len
        self.square = settings.seq_len * settings.seq_len
        self.holds_inputs = settings.gradient_checkpointing and not self.numbers.full

    def estimate(self) -> Estimate:
        self.tail = self._tail(scales=self.shape.scaled_output)
        self.stacks = self._stacks()
        targets, names = self.numbers.targets, set[str]().union(*(stack.names for stack in self.stacks))
        if targets and targets != ("all-linear",) and names.isdisjoint(targets):
            known = ", ".join(sorted(names))
            raise UnknownMemoryError(f"lora.targets {', '.join(targets)}: no such layers (there are {known})")
        zero, last = self.settings.zero, self.settings.world_size - 1
        # Of ZeRO-1 and 2, the last process has the gradient of a head with weights of its own: all
        # the time from the beginning of the backward pass on.
        sequence = self._sequence(last if zero.stage in (1, 2) and self.numbers.full and not self.shape.tied else 0)
        by_phase, at = sequence.peaks(expandable=self.numbers.expandable, capacity=self.capacity)
        peaks = {phase: allocated for phase, (allocated, _) in by_phase.items()}
        top = max(peaks, key=lambda phase: peaks[phase])
        components = dict.fromkeys(get_args(Component), 0)
        components |= sequence.components(at)
        # What is not split off a block belongs to it.
        components["temporary"] += peaks[top] - sum(components.values())
        reserved = max(reserved for _, reserved in by_phase.values())
        above = round(_ABOVE * reserved)
        reserved = above if self.capacity is None or reserved > self.capacity else min(above, self.capacity)
        return Estimate(
            allocated=sum(components.values()),
            reserved=reserved,
            peaks=peaks,
            peak_phase=top,
            components=components,
            numbers=sum(one.numbers for unit in self.units for one in unit.parameters),
            trained=sum(unit.count for unit in self.units),
        )

    # --- the model's parts

    def _stacks(self) -> list[Stack]:
        shape = self.shape
        if shape.decoder_layers:
            kernel = kernel_of(shape, self.generation, half=self.half, masked=True)
            counts = (shape.layers, False), (shape.decoder_layers, True)
            return [self._t5_stack(kernel, count, decodes=decodes) for count, decodes in counts]
        masked = sum(0 < window <= self.settings.seq_len for window in shape.windows)
        found = []
        for count, is_masked in ((shape.layers - masked, False), (masked, True)):
            if count:
                kernel = kernel_of(shape, self.generation, half=self.half, masked=is_masked)
                mask = self.settings.batch * self.square * self.numbers.compute if is_masked else 0
                found.append(self._causal_stack(kernel, count, mask))
        return found

    def _causal_stack(self, kernel: Kernel, count: int, mask: int) -> Stack:
        def run(layer: Layer, *, is_first: bool) -> tuple[int, Tensor]:
            x = self._input(layer, is_first=is_first)
            return layer.live, causal_layer(layer, self.shape, x, kernel, mask)

        return self._ran(run, count)

    def _input(self, layer: Layer, *, is_first: bool) -> Tensor:
        """What a layer gets from the one before; the first one from the embeddings."""
        count = self.tokens * self.shape.hidden
        if is_first:
            return layer.input(count, self.embedded_item, trained=self.numbers.full or self.holds_inputs)
        return layer.input(count, self.numbers.stream)

    def _t5_stack(self, kernel: Kernel, count: int, *, decodes: bool) -> Stack:
        numbers, shape, scores = self.numbers, self.shape, self.shape.heads * self.square
        given: list[Tensor] = []  # from outside the layer: it lives longer

        def run(layer: Layer, *, is_first: bool) -> tuple[int, Tensor]:
            near = layer.input(scores, numbers.weights, trained=numbers.full, shared=True)
            far = seen = None
            if decodes:
                far = layer.input(scores, self._query_item, trained=self.settings.gradient_checkpointing, shared=True)
                seen = layer.input(self.tokens * shape.hidden, self.normed_item, shared=True)
                given.extend((far, seen))
            given.append(near)
            x = self._input(layer, is_first=is_first)
            return layer.live, t5_layer(layer, shape, x, kernel, (near, far), seen)

        return self._ran(run, count)

    @property
    def _query_item(self) -> int:
        """Bytes of a query's numbers: a layer in 4 bits gives what it gets, from a norm."""
        numbers = self.numbers
        return numbers.vectors if numbers.quantized and not numbers.narrow_norms else numbers.compute

    def _tail(self, *, scales: bool = False) -> Stack:
        """The norm after the last layer, or after the last one of an encoder."""
        shape = self.shape

        def run(layer: Layer) -> tuple[int, Tensor]:
            x = layer.input(self.tokens * shape.hidden, self.numbers.stream)
            before = layer.live
            found = layer.norm(x, shape.hidden, shape.norm)
            if shape.decoder_layers:
                found = layer.dropout(found, shape.residual_dropout)
                found = layer.changed(found) if scales else found
            self.normed_item = found.item
            return before, found

        return stack_of(run, self._layer(), None, 1)

    def _ran(self, run: Callable[..., tuple[int, Tensor]], count: int) -> Stack:
        def ran(*, is_first: bool) -> Stack:
            unsaved = self._layer(saves=False) if self.settings.gradient_checkpointing else None
            return stack_of(partial(run, is_first=is_first), self._layer(), unsaved, count)

        found = ran(is_first=False)
        if self.embedded_item != self.numbers.stream or not (self.numbers.full or self.holds_inputs):
            found.first = ran(is_first=True)
        return found

    def _layer(self, *, saves: bool = True) -> Layer:
        # In a large model, what is small hardly counts.
        least = self.tokens * self.shape.hidden * self.numbers.compute // 8
        return Layer(self.numbers, self.settings.batch, self.settings.seq_len, least=least, saves=saves)

    # --- one after the other

    def _sequence(self, rank: int) -> Sequence:
        settings, numbers, tail = self.settings, self.numbers, self.tail
        sequence = self.sequence = Sequence()
        places = self._places()
        self.units = places.units
        engine = self._engine(self.units, rank)
        engine.load()
        workspace = 0 if self.generation == CPU else 32 * _MIB if self.generation >= 90 else 8_519_680
        head, width = places.head or places.embeddings, self.tokens * self.shape.hidden
        loss = Loss(settings, self.shape, self.numbers, sequence, item=self.normed_item, capacity=self.capacity)
        start, encoder, checkpointed = self._start(), self._tail(), settings.gradient_checkpointing
        held = list[int]()
        for update in range(2):
            micro_batches = min(settings.accumulation, 1 + update)
            for number in range(micro_batches):
                sequence.phase("forward")
                engine.begin_forward()
                engine.before_forward(places.embeddings)
                embedded = sequence.chain(NOWHERE, start.embedded)
                engine.after_forward(places.embeddings)
                kept = [sequence.begin(size, "activations") for size in start.kept]
                added = [sequence.begin(size, "activations") for size in start.added]
                sequence.calls[PRODUCT] = partial(sequence.begin, 0 if update else workspace, "workspace")
                source, beside, holds, encoded = -1, NOWHERE, list[int](), _NOT_RUNNING
                biases, stacks = list[int](), iter(start.biases)
                for part in places.layers:
                    engine.before_forward(part.unit)
                    if part.is_first:
                        if source >= 0:
                            encoded = sequence.forward(encoder.passes, source)
                            source = encoded.result
                            sequence.end(beside, *([] if checkpointed else biases))
                            embedded = sequence.chain(NOWHERE, start.embedded)
                        part.before, beside = source, embedded
                        sequence.begin_at(BIAS, next(stacks), biases)
                        source = sequence.chain(NOWHERE, start.changed) if start.changed else beside
                    source = self._part_forward(sequence, part, source, held=beside)
                    if part.is_first:
                        beside = self._beside(part, beside, holds)
                    engine.after_forward(part.unit)
                engine.before_forward(places.tail)
                normed = sequence.forward(tail.passes, source)
                engine.after_forward(places.tail)
                sequence.end(*added, beside, *([] if checkpointed else biases[-2:]))
                kept += biases[2:] if checkpointed else []
                del biases[2:]
                engine.before_forward(head)
                # The model keeps what it scales for the head.
                scaled = sequence.begin(width * self.normed_item if self.shape.scaled_output else 0, "temporary")
                if loss.in_pieces:
                    # The head's forward pass computes it, with the gradients.
                    loss.forward([])
                    engine.after_forward(head)
                    sequence.end(normed.result)
                else:
                    engine.after_forward(head)
                    loss.forward([normed.result, scaled])
                    scaled = -1
                for part in places.layers:
                    sequence.end_forward(part.running)
                    sequence.end(*part.copies)
                sequence.end_forward(normed)
                sequence.end(scaled, *held)
                sequence.phase("backward")
                sequence.keeps = engine.keeps_gradients and not number
                engine.begin_backward(last=number + 1 == micro_batches)
                sequence.calls[PRODUCT] = partial(sequence.begin, 0 if update else workspace, "workspace")
                gradient, of_head = loss.backward(partial(engine.before_backward, head))
                engine.release(head)
                if places.head is not None:
                    engine.after_backward(head, sequence.moved(of_head))
                    of_head = NOWHERE
                engine.before_backward(places.tail)
                gradient = sequence.backward(normed, gradient)
                engine.after_backward(places.tail)
                is_view, summed, seen = not loss.in_pieces and numbers.weights == numbers.compute, list[int](), -1
                for part in reversed(places.layers):
                    engine.before_backward(part.unit)
                    if part.is_first and checkpointed and biases:
                        sequence.end(biases.pop())
                        sequence.begin_until(RECOMPUTED, BIAS, start.biases[len(biases)])
                    gradient = self._part_backward(sequence, part, gradient)
                    engine.after_backward(part.unit)
                    if part is places.layers[-1]:
                        summed = [sequence.begin(size, "temporary") for size in start.made]
                        seen = sequence.begin(width * self.normed_item if self.shape.decoder_layers else 0, "temporary")
                    if part.is_first:
                        gradient = self._of_embeddings(sequence, gradient, start)
                        if self.holds_inputs:
                            holds.append(gradient)
                            gradient = -1
                    if part.before >= 0:
                        # The decoder's embeddings have their gradient; the encoder's result has a
                        # sum of all layers that have seen it.
                        of_head, is_view = self._embedded(sequence, of_head, gradient, is_view=is_view), False
                        gradient = sequence.backward(encoded, seen)
                sequence.end(*summed)
                if numbers.full or settings.gradient_checkpointing:
                    engine.before_backward(places.embeddings)
                embedded = self._embedded(sequence, of_head, gradient, is_view=is_view)
                engine.after_backward(places.embeddings, sequence.moved(embedded))
                engine.end_backward()
                sequence.end(*kept)
                held = [*holds, sequence.begin(start.held, "activations")]
            sequence.phase("optimizer")
            engine.step()
            sequence.end(*held)
            held = []
        return sequence

    def _engine(self, units: list[Unit], rank: int) -> Plain | Stage1InBf16 | Stages1And2 | Stage3:
        zero = self.settings.zero
        if not zero.stage:
            return Plain(self.settings, self.numbers, units, self.sequence)
        simple = zero.stage == 1 and self.half == "bf16" and not zero.offload_optimizer
        kind = Stage3 if zero.stage == 3 else Stage1InBf16 if simple else Stages1And2
        return kind(self.settings, self.numbers, units, self.sequence, rank, self.shape.hidden, self.capacity)

    def _part_forward(self, sequence: Sequence, part: _Part, source: int, *, held: int) -> int:
        """`source`: the result of the layer before, which the layer ends if it is not `held`.
        Returns that of this one."""
        stack = part.stack
        part.copies = sequence.begin_small(stack.small_copies, "activations")
        part.saved = sequence.begin_small(stack.small_saved, "activations")
        part.running = sequence.forward(stack.passes, source, holds_source=source == held)
        return part.running.result

    def _beside(self, part: _Part, embedded: int, holds: list[int]) -> int:
        """What the embeddings gave to a stack, if the model holds it until the stack's forward pass
        ends. `part`: its first layer. `holds` gets what lives until the update ends."""
        is_source = part.running.source == embedded
        if self.holds_inputs:
            holds.append(embedded)
            if is_source:
                # The layer does not end it.
                part.running = replace(part.running, source=-1)
            return NOWHERE
        return NOWHERE if is_source and not part.running.passes.ends_source else embedded

    def _part_backward(self, sequence: Sequence, part: _Part, gradient: int) -> int:
        """`gradient`: of the part's result. Returns that of its input."""
        again = sequence.begin_small(part.stack.small_again, "activations")
        gradient = sequence.backward(part.running, gradient)
        sequence.end(*part.saved, *again)
        for small in sequence.begin_small(part.stack.small_gradients, "gradients"):
            sequence.keep(small)
        sequence.end(part.before)
        return gradient

    def _places(self) -> _Places:
        """The model's parts in their order."""
        outside = outside_parameters(self.shape, self.numbers)
        head = None if self.shape.tied else Unit([outside.pop(1)])
        return _Places(Unit(outside), self._parts(), Unit(self.tail.parameters), head)

    def _parts(self) -> list[_Part]:
        if self.shape.decoder_layers:
            return [part for stack in self.stacks for part in _parts_of([stack] * stack.count)]
        if len(self.stacks) == 1:
            return _parts_of(self.stacks * self.shape.layers)
        return _parts_of([self.stacks[0 < window <= self.settings.seq_len] for window in self.shape.windows])

    def _of_embeddings(self, sequence: Sequence, gradient: int, start: _Start) -> int:
        """The gradient of the embeddings' result, from that of the first layer's input."""
        if gradient < 0:
            return gradient
        sizes = start.embedded[-1:] if self.shape.embedding_dropout else []
        return sequence.chain(gradient, sizes if self.holds_inputs else [*sizes, *reversed(start.embedded[:-1])])

    def _embedded(self, sequence: Sequence, of_head: int, gradient: int, *, is_view: bool) -> int:
        """The gradient of the embeddings, if it does not stay. If they are tied, it is added to the
        head's: to a new tensor if that one is a view, which autograd holds as well."""
        shape, numbers = self.shape, self.numbers
        if not numbers.full:
            sequence.end(of_head, gradient)
            return NOWHERE
        size = shape.vocabulary * shape.hidden * numbers.weights
        embedded = sequence.begin(size, "temporary")
        sequence.end(gradient)
        if of_head >= 0:
            total = sequence.begin(size, "gradients") if is_view else of_head
            sequence.end(*([of_head] if is_view else []), embedded)
            embedded = total
        sequence.uses[embedded] = "gradients"
        return embedded

    def _start(self) -> _Start:
        shape, numbers, settings = self.shape, self.numbers, self.settings
        checkpointed = settings.gradient_checkpointing
        item = self.embedded_item
        stacks, count = 2 if shape.decoder_layers else 1, self.tokens * shape.hidden
        embedded = [count * numbers.weights] * (2 if shape.scaled_embeddings else 1)
        embedded += [count * item] * (item != numbers.weights)
        changed = [count * item] * (bool(shape.positions) + bool(shape.embedding_dropout))
        kept, added = [16 * self.tokens * stacks], list[int]()
        if shape.embedding_dropout:
            kept += [count] * stacks
        if not shape.decoder_layers:
            angles = 0 if shape.positions else settings.seq_len * shape.width * numbers.stream
            # Without a kernel, a mask for layers of each of two kinds. Checkpoints keep them.
            masks = [settings.batch * self.square * item] * 2 if shape.kind == "gemma2" else []
            (kept if checkpointed else added).extend(masks)
            return _Start(embedded, changed, [*kept, angles, angles], [[]], added, [], 0)
        scores = shape.heads * self.square
        bias, zeros = scores * numbers.weights, scores * self._query_item
        # A mask for each sample, and the distances.
        kept += [self.tail.small_saved, 2 * settings.batch * self.square]
        kept += [8 * self.square] * (2 if numbers.full and not checkpointed else 0)
        made = [bias] if numbers.full else []
        biases = [[bias], [bias, zeros]]
        if not checkpointed:
            return _Start(embedded, changed, kept, biases, added, made, 0)
        return _Start(embedded, changed, kept, biases, added, [*made, zeros], 2 * zeros)


def _parts_of(layers: list[Stack]) -> list[_Part]:
    parts = [_Part(Unit(one.parameters, one.matrices), one, is_first=not n) for n, one in enumerate(layers)]
    parts[0].stack = layers[0].first or layers[0]
    return parts
