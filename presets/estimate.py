"""The GPU memory of a training, estimated in about a millisecond and without torch.

`train.dry_run` runs the whole model on tensors without contents. Here one layer of each kind is
run, with sizes alone (`layers.py`), and counted as often as the model has it. So this serves
sliders, and machines without torch. It is rather a little too high than too low.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from memtop.presets.architectures import BF16_FROM, CPU, Shape, causal_layer, kernel_of, shape_of, t5_layer
from memtop.presets.layers import Kernel, Layer, Tensor
from memtop.presets.logits import ROWS, tokens_at_once
from memtop.presets.schema import Settings
from memtop.presets.states import Parameter, States, UnknownMemoryError, block_bytes, numbers_of, states_of

Phase = Literal["forward", "backward", "optimizer"]
Component = Literal["weights", "gradients", "optimizer", "activations", "logits", "workspace", "temporary"]
_MIB = 1 << 20
_PLENTY = 1 << 50
"""Bytes that no GPU has."""
_MOST_SAMPLES = 1 << 20
_LAST = {"down_proj", "c_proj", "wo"}
"""The linear layer that gives a layer's result, in any architecture."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes, as torch counts them: without the CUDA context."""

    allocated: int
    reserved: int
    """With what torch keeps for later: less sure, because it depends on the order of all sizes."""
    peaks: dict[Phase, int]
    """The most that is allocated in each phase of an update."""
    peak_phase: Phase
    components: dict[Component, int]
    """What is allocated at the peak; the sum is `allocated`."""


def estimate(settings: Settings, config: Mapping[str, Any], *, generation: int, capacity: int | None = None) -> Estimate:
    """The memory of a run of the built-in trainer; UnknownMemoryError, with the reason as one line,
    if it cannot be estimated.

    `config`: the values of the model's Hugging Face configuration, with `model_type`. `generation`:
    the GPU's compute capability without its point. `capacity`: the bytes that torch can reserve
    there, which decide how many logits exist at one time; None: enough for the most.
    """
    return _Run(settings, shape_of(config), generation, capacity).estimate()


def largest_batch(
    settings: Settings, config: Mapping[str, Any], limit: int, *, generation: int, capacity: int | None = None
) -> int | None:
    """The largest B with which at most `limit` bytes are reserved; None if not even one sample
    fits."""

    def fits(batch: int) -> bool:
        tried = replace(settings, batch=batch, rank_splits=())
        return estimate(tried, config, generation=generation, capacity=capacity).reserved <= limit

    if not fits(1):
        return None
    most = 1
    while most < _MOST_SAMPLES and fits(2 * most):
        most *= 2
    low, high = most, 2 * most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Point(msgspec.Struct):
    """A moment with much memory: bytes in addition to what is there all the time."""

    phase: Phase
    gradients: int
    activations: int
    logits: int = 0
    temporary: int = 0
    even: int = 0
    """Of what is temporary, what leaves no gaps: it is as large as what was there before."""

    @property
    def size(self) -> int:
        return self.gradients + self.activations + self.logits + self.temporary


class _Stack(msgspec.Struct):
    """Equal layers, one of which was run. Bytes."""

    count: int
    saved: int
    """What a layer adds to what is live until the backward pass has run it."""
    copies: int
    """The same until the forward pass ends: autocast's copies of weights."""
    forward: int
    """The most that is live above what was live before the layer; so `backward`."""
    backward: int
    passing: int
    """Of the latter, what no forward pass has made; so `kept`, new gradients of weights."""
    kept: int
    gradients: int
    """Of all its weights; 0 if they are added to older ones."""
    parameters: list[Parameter]
    names: set[str]


class _Run:
    def __init__(self, settings: Settings, shape: Shape, generation: int, capacity: int | None) -> None:
        self.settings, self.shape, self.capacity = settings, shape, capacity
        precision = settings.precision
        if precision == "auto":
            precision = "bf16" if generation >= BF16_FROM else "fp16"
        self.half = None if precision == "fp32" else precision
        self.generation = generation
        self.numbers = numbers_of(settings, self.half)
        if (settings.task == "seq2seq") != bool(shape.decoder_layers):
            raise UnknownMemoryError(f"task {settings.task}: does not go together with model_type {shape.kind}")
        self.tokens = settings.batch * settings.seq_len
        self.square = settings.seq_len * settings.seq_len

    def estimate(self) -> Estimate:
        stacks, tail = self._stacks(), self._tail()
        targets, names = self.numbers.targets, set[str]().union(*(stack.names for stack in stacks))
        if targets and targets != ("all-linear",) and names.isdisjoint(targets):
            known = ", ".join(sorted(names))
            raise UnknownMemoryError(f"lora.targets {', '.join(targets)}: no such layers (there are {known})")
        parameters = [(one, 1) for one in (*self._outside(), *tail.parameters)]
        parameters += [(one, stack.count) for stack in stacks for one in stack.parameters]
        fixed = states_of(
            self.settings, parameters, self.shape.hidden, max(stacks, key=lambda stack: len(stack.parameters)).parameters
        )
        if self.generation != CPU:
            fixed.workspace += 2 * (32 * _MIB if self.generation >= 90 else 8_519_680)
        points = self._points(stacks, tail, fixed)
        peaks: dict[Phase, int] = {}
        for point in points:
            peaks[point.phase] = max(peaks.get(point.phase, 0), fixed.size + point.size)
        top = max(points, key=lambda point: point.size)
        components: dict[Component, int] = {
            "weights": fixed.weights,
            "gradients": top.gradients,
            "optimizer": fixed.optimizer,
            "activations": top.activations,
            "logits": top.logits,
            "workspace": fixed.workspace,
            "temporary": top.temporary,
        }
        allocated = sum(components.values())
        expandable = "expandable_segments:True" in self.settings.allocator
        reserved = _reserved(allocated, top.temporary - top.even, 0 if self._in_pieces else top.logits, expandable=expandable)
        if self.capacity is not None:
            # Short of memory, torch gives back what it keeps for later.
            reserved = max(allocated, min(reserved, self.capacity))
        return Estimate(allocated=allocated, reserved=reserved, peaks=peaks, peak_phase=top.phase, components=components)

    # --- the model's parts

    def _stacks(self) -> list[_Stack]:
        shape = self.shape
        if shape.decoder_layers:
            kernel = kernel_of(shape, self.generation, half=self.half, masked=True)
            return [
                self._t5_stack(kernel, shape.layers, decodes=False),
                self._t5_stack(kernel, shape.decoder_layers, decodes=True),
            ]
        masked = sum(0 < window <= self.settings.seq_len for window in shape.windows)
        found = []
        for count, is_masked in ((shape.layers - masked, False), (masked, True)):
            if count:
                kernel = kernel_of(shape, self.generation, half=self.half, masked=is_masked)
                mask = self.square * self.numbers.compute if is_masked else 0
                found.append(self._causal_stack(kernel, count, mask))
        return found

    def _causal_stack(self, kernel: Kernel, count: int, mask: int) -> _Stack:
        def run(layer: Layer) -> tuple[int, Tensor]:
            x = layer.input(self.tokens * self.shape.hidden, self.numbers.stream)
            return layer.live, causal_layer(layer, self.shape, x, kernel, mask)

        return self._ran(run, count)

    def _t5_stack(self, kernel: Kernel, count: int, *, decodes: bool) -> _Stack:
        numbers, shape, scores = self.numbers, self.shape, self.shape.heads * self.square
        given: list[Tensor] = []  # from outside the layer: it lives longer

        def run(layer: Layer) -> tuple[int, Tensor]:
            near = layer.input(scores, numbers.weights, trained=numbers.full)
            far = seen = None
            if decodes:
                far = layer.input(scores, self._query_item, trained=self.settings.gradient_checkpointing)
                seen = layer.input(self.tokens * shape.hidden, numbers.stream)
                given.extend((far, seen))
            given.append(near)
            x = layer.input(self.tokens * shape.hidden, numbers.stream)
            return layer.live, t5_layer(layer, shape, x, kernel, (near, far), seen)

        return self._ran(run, count)

    @property
    def _query_item(self) -> int:
        """Bytes of a query's numbers: a layer in 4 bits gives what it gets, from a norm."""
        numbers = self.numbers
        return numbers.vectors if numbers.quantized and not numbers.narrow_norms else numbers.compute

    def _tail(self) -> _Stack:
        """The norm after the last layer."""
        shape = self.shape

        def run(layer: Layer) -> tuple[int, Tensor]:
            x = layer.input(self.tokens * shape.hidden, self.numbers.stream)
            before = layer.live
            found = layer.norm(x, shape.hidden, shape.norm)
            if shape.decoder_layers:
                found = layer.dropout(found, shape.residual_dropout)
                found = layer.changed(found) if shape.scaled_output else found
            self.head_item = found.item
            return before, found

        return self._ran(run, 1, may_checkpoint=False)

    def _ran(self, run: Callable[[Layer], tuple[int, Tensor]], count: int, *, may_checkpoint: bool = True) -> _Stack:
        """`run` gives what was live before the layer, and its result."""
        layer = self._layer()
        before, found = run(layer)
        with_copies, forward = layer.live - before, layer.peak - before
        copied = sum(copy.size for copy in layer.copies)
        layer.copies.clear()
        saved = layer.live - before
        node, size, item = found.node, found.count, found.item
        del found
        if node is not None:
            layer.peak = layer.live
            layer.backward(node, size, item)
        backward, passing, kept = layer.peak - before, layer.passing_at_peak, layer.kept_at_peak
        copies = with_copies - saved
        if may_checkpoint and self.settings.gradient_checkpointing:
            # Forward, a layer keeps only its result. Backward, it is run again at the first
            # gradient that needs something saved, up to what was saved last. The gradients of sums,
            # dropout and constant factors come before.
            early = self._early(size, item)
            forward = layer.peak_at_last_saved - before
            again = forward + early
            if again > backward:
                backward, passing, kept = again, early, 0
            saved, copies = size * item, copied
            only = self._layer(saves=False)
            before = run(only)[0]
            forward = only.peak - before
        return _Stack(count, saved, copies, forward, backward, passing, kept, layer.kept, layer.parameters, layer.names)

    def _early(self, size: int, item: int) -> int:
        """Bytes of the gradients that need nothing saved, from a layer's result on."""
        numbers = self.numbers
        found = size * item + size * numbers.compute * ((item != numbers.compute) + (self.shape.residual_dropout > 0))
        if numbers.targets == ("all-linear",) or _LAST.intersection(numbers.targets):
            return found + 2 * size * numbers.compute
        if numbers.quantized and not self.shape.decoder_layers:
            return found + self.tokens * self.shape.inner * numbers.compute
        return found

    def _layer(self, *, saves: bool = True) -> Layer:
        return Layer(self.numbers, self.settings.batch, self.settings.seq_len, saves=saves)

    def _outside(self) -> list[Parameter]:
        """The parameters that are neither in a layer nor in the last norm."""
        shape, item, full = self.shape, self.numbers.weights, self.numbers.full
        found = [Parameter(shape.vocabulary, shape.hidden, item, full)] * (1 if shape.tied else 2)
        if shape.positions:
            found.append(Parameter(shape.positions, shape.hidden, item, full))
        if shape.buckets:
            # Of both stacks, and the encoder's last norm.
            found += [Parameter(shape.buckets, shape.heads, item, full)] * 2
            found.append(Parameter(shape.hidden, 0, self.numbers.vectors, full))
        return found

    # --- what is live when

    def _points(self, stacks: list[_Stack], tail: _Stack, fixed: States) -> list[_Point]:
        shape, numbers, settings = self.shape, self.numbers, self.settings
        of_stream = self.tokens * shape.hidden * numbers.stream
        start, biases, made, again, held = self._start(tail)
        resident = fixed.resident
        points = [_Point("optimizer", fixed.gradients, held, temporary=fixed.step)]
        # The forward pass. Copies of weights, and what an earlier micro-batch holds, end with it.
        live = start + (held if settings.accumulation > 1 else 0)
        for stack in stacks:
            added = stack.saved + stack.copies
            points.append(_Point("forward", resident, live + (stack.count - 1) * added + stack.forward + biases))
            live += stack.count * added
        points.append(_Point("forward", resident, live + tail.forward))
        below = start + sum(stack.count * stack.saved for stack in stacks)
        new, of_loss = self._loss(live + tail.saved, below + tail.saved, fixed)
        points += of_loss
        # The backward pass: the last norm, and each stack from its last layer to its first.
        points.append(_Point("backward", resident + new, below + tail.backward - tail.passing, temporary=tail.passing))
        new += tail.gradients
        for stack in reversed(stacks):
            for done in (0, stack.count - 1):
                activations = below - (done + 1) * stack.saved + stack.backward - stack.passing - stack.kept
                gradients = resident + new + done * stack.gradients + stack.kept
                first = again if done == stack.count - 1 else 0
                points.append(_Point("backward", gradients, activations + first, temporary=stack.passing + made))
            below -= stack.count * stack.saved
            new += stack.count * stack.gradients
        if numbers.full:
            # The gradient of the embeddings. If they are tied, its sum with the head's is a third
            # matrix.
            embedded = (2 if shape.tied else 1) * shape.vocabulary * shape.hidden * numbers.weights
            points.append(_Point("backward", resident + new, start, temporary=of_stream + embedded, even=embedded))
        return points

    def _start(self, tail: _Stack) -> tuple[int, int, int, int, int]:
        """What is live before the first layer; what else is during the layers' forward passes;
        what their backward passes have made for what was before them; what the first layer's
        makes again; and what the loss of an earlier micro-batch still holds."""
        shape, numbers, settings = self.shape, self.numbers, self.settings
        checkpointed = settings.gradient_checkpointing
        count = self.tokens * shape.hidden
        item = numbers.stream if numbers.narrow_norms or self.half == "fp16" else numbers.weights
        embedded = count * item + (count if shape.embedding_dropout else 0)
        stacks = 2 if shape.decoder_layers else 1
        start = 16 * self.tokens * stacks + embedded * stacks
        # The gradient of frozen embeddings, which makes checkpoints run backward.
        held = 2 * count * item * stacks if checkpointed and not numbers.full else 0
        if not shape.decoder_layers:
            angles = 0 if shape.positions else 2 * settings.seq_len * shape.width * numbers.stream
            return start + angles, 0, 0, 0, held
        scores = shape.heads * self.square
        bias, zeros = scores * numbers.weights, scores * self._query_item
        # With the encoder's last norm and result, a mask for each sample, and the distances.
        start += tail.saved + self.square * (2 * settings.batch + (16 if numbers.full else 0))
        made = bias if numbers.full else 0
        if not checkpointed:
            return start, bias + zeros, made, 0, held
        return start + 2 * bias + zeros, 0, made + zeros, 2 * bias + zeros, held + 2 * zeros

    @property
    def _in_pieces(self) -> bool:
        return self.settings.loss_chunk != 0 and not self.shape.logit_cap

    def _loss(self, forward: int, kept: int, fixed: States) -> tuple[int, list[_Point]]:
        """The new gradient of the head's weights, and what is live in the loss and at the beginning
        of the backward pass. `forward` and `kept`: what is live then without the loss."""
        shape, numbers, tokens, resident = self.shape, self.numbers, self.tokens, fixed.resident
        compute, head, of_hidden = numbers.compute, shape.vocabulary * shape.hidden, self.tokens * shape.hidden
        copy = head * compute if numbers.weights != compute else 0
        if not self._in_pieces:
            logits = tokens * shape.vocabulary
            capped = logits * compute if shape.logit_cap else 0
            more = copy + (of_hidden * compute if self.head_item != compute else 0)
            wide = 4 * logits if compute != 4 else 0
            first = _Point("forward", resident, forward + more, capped + logits * compute + wide + 4 * logits)
            # The log-softmax, its gradient and that of the logits.
            second = _Point("backward", resident, kept + more, capped + 12 * logits)
            new = head * numbers.weights if numbers.full else 0
            made = of_hidden * compute + (head * compute if numbers.full else 0)
            third = _Point("backward", resident + new, kept + more, capped + logits * compute, made)
            return new, [first, second, third]
        new = 4 * head if numbers.full else 0
        of_hidden_32 = 4 * of_hidden
        chunk = self.settings.loss_chunk
        if chunk < 0:
            free = _PLENTY if self.capacity is None else self.capacity - fixed.size - resident - forward
            chunk = tokens_at_once(max(0, free - new), shape.vocabulary, tokens, compute)
        chunk = min(chunk, tokens)
        logits = block_bytes(chunk * shape.vocabulary * compute)
        # The last rows in 32 bits are there until the next ones are; bf16 also needs them widened.
        rows = min(ROWS, chunk) * shape.vocabulary * 4 * ((1 if self.half == "fp16" else 2) + (chunk > ROWS))
        rows = 0 if compute == 4 else rows
        products = chunk * shape.hidden * (compute + 8)
        live = forward + of_hidden_32
        several = chunk < tokens
        first = _Point("forward", resident + (new if several else 0), live, logits * (2 if several else 1) + rows, copy)
        second = _Point("forward", resident + new, live, logits, copy + products)
        narrow = of_hidden * self.head_item if self.head_item != 4 else 0
        third = _Point("backward", resident + new, kept + of_hidden_32, temporary=narrow)
        return new, [first, second, third]


_GAPS, _GAPS_EXPANDABLE = (1.08, 0.42, 0.16), (1.0, 0.46, 0.22)
"""Of what is allocated, of what is temporary, and of logits that exist whole, the part that is
reserved: fitted to the dry run, see docs/performance.md."""


def _reserved(allocated: int, temporary: int, whole_logits: int, *, expandable: bool) -> int:
    """Large tensors of different sizes, one after the other, leave gaps that the next ones do not
    fill."""
    of_all, of_temporary, of_logits = _GAPS_EXPANDABLE if expandable else _GAPS
    return int(of_all * allocated + of_temporary * temporary + of_logits * whole_logits)
