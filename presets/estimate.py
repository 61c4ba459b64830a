"""The GPU memory of a training, estimated in less than a millisecond without torch.

`train.dry_run` runs the model on tensors without contents and is exact. Here only one layer of each
kind is run, with sizes alone (`layers.py`), and repeated; everything else is a formula. So this
serves sliders and machines without torch. It is rather too high than too low.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from memtop.presets.architectures import Shape, UnknownMemoryError, causal_layer, kernel_of, shape_of, t5_layer
from memtop.presets.layers import Layer, Numbers, Tensor, block_bytes
from memtop.presets.logits import ROWS, tokens_at_once
from memtop.presets.schema import Settings

Phase = Literal["forward", "backward", "optimizer"]
Component = Literal["weights", "gradients", "optimizer", "activations", "logits", "workspace", "temporary"]
MIB = 1 << 20
_PLENTY = 1 << 50
_BUCKET, _RING = 16 << 20, 2
"""See train/exchange.py."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes, as torch counts them: without the CUDA context."""

    allocated: int
    reserved: int
    peaks: dict[Phase, int]
    """The most that is allocated in each phase."""
    peak_phase: Phase
    components: dict[Component, int]
    """What is allocated at the peak; the sum is `allocated`."""


class _Point(msgspec.Struct):
    """A moment with much memory: bytes in addition to weights, optimizer and workspaces."""

    phase: Phase
    gradients: int
    activations: int
    logits: int = 0
    temporary: int = 0

    @property
    def size(self) -> int:
        return self.gradients + self.activations + self.logits + self.temporary


class _Stack(msgspec.Struct):
    """Equal layers, one of which was run."""

    count: int
    saved: int
    """What a layer adds to what is live."""
    forward: int
    """The most above what was live before the layer; so `backward`."""
    backward: int
    passing: int
    """Of the latter, what no forward pass has made; so `kept`, new gradients of weights."""
    kept: int
    gradients: int
    """Of its weights."""
    copies: int
    """Weights in 16 bits that only autocast keeps, until the forward pass ends."""
    parameters: list[tuple[int, int, int, bool]]
    names: set[str]


def estimate(settings: Settings, config: Mapping[str, Any], *, generation: int, capacity: int | None = None) -> Estimate:
    """The memory of a run of the built-in trainer with this model; UnknownMemoryError, with a
    reason, if it cannot be estimated.

    `config`: the values of a Hugging Face configuration, with `model_type`. `generation`: the GPU's
    compute capability without its point. `capacity`: bytes that torch can reserve there, which
    decide how many logits exist at one time; None: there is room for the most.
    """
    return _Run(settings, shape_of(config), generation, capacity).estimate()


class _Run:
    def __init__(self, settings: Settings, shape: Shape, generation: int, capacity: int | None) -> None:
        self.settings, self.shape, self.generation, self.capacity = settings, shape, generation, capacity
        precision = settings.precision
        if precision == "auto":
            precision = "bf16" if generation >= 80 else "fp16"
        self.half = None if precision == "fp32" else precision
        self.numbers = _numbers(settings, self.half, shape)
        if (settings.task == "seq2seq") != bool(shape.decoder_layers):
            raise UnknownMemoryError(f"task {settings.task}: does not go together with model_type {shape.kind}")
        self.tokens = settings.batch * settings.seq_len
        self.scores = settings.seq_len * settings.seq_len

    def estimate(self) -> Estimate:
        stacks = self._stacks()
        self._check_targets(stacks)
        tail_parameters, tail = self._tail()
        parameters = [(p, 1) for p in self._outside()] + [(p, 1) for p in tail_parameters]
        parameters += [(p, stack.count) for stack in stacks for p in stack.parameters]
        weights = sum(_weight_bytes(*p) * n for p, n in parameters)
        trained = [
            (rows * max(columns, 1), item, n)
            for (rows, columns, item, is_trained), n in parameters
            if is_trained
            for rows, columns, item in [(rows, columns, item)]
        ]
        gradients = sum(block_bytes(count * item) * n for count, item, n in trained)
        optimizer = sum(
            _optimizer_bytes(self.settings.optimizer, rows, columns, item) * n
            for (rows, columns, item, is_trained), n in parameters
            if is_trained
        )
        workspace = 2 * (32 * MIB if self.generation >= 90 else 8_519_680) + self._ring(trained)
        fixed = weights + optimizer + workspace
        points = self._points(stacks, tail, gradients, fixed)
        points.append(_Point("optimizer", gradients, 0, temporary=self._step_bytes(trained)))
        peaks: dict[Phase, int] = {}
        for point in points:
            peaks[point.phase] = max(peaks.get(point.phase, 0), fixed + point.size)
        top = max(points, key=lambda point: point.size)
        components: dict[Component, int] = {
            "weights": weights,
            "optimizer": optimizer,
            "workspace": workspace,
            "gradients": top.gradients,
            "activations": top.activations,
            "logits": top.logits,
            "temporary": top.temporary,
        }
        allocated = fixed + top.size
        return Estimate(
            allocated=allocated,
            reserved=allocated,
            peaks=peaks,
            peak_phase=top.phase,
            components=components,
        )

    # --- the model's parts

    def _stacks(self) -> list[_Stack]:
        shape = self.shape
        if shape.decoder_layers:
            kernel = kernel_of(shape, self.generation, half=self.half, masked=True)
            return [self._t5_stack(kernel, shape.layers, False), self._t5_stack(kernel, shape.decoder_layers, True)]
        length = self.settings.seq_len
        masked = sum(0 < window <= length for window in shape.windows)
        found = []
        for count, is_masked in ((shape.layers - masked, False), (masked, True)):
            if count:
                kernel = kernel_of(shape, self.generation, half=self.half, masked=is_masked)
                mask = self.scores * self.numbers.compute if is_masked else 0
                found.append(self._causal_stack(count, kernel, mask))
        return found

    def _causal_stack(self, count: int, kernel: Any, mask: int) -> _Stack:
        layer = Layer(self.numbers, self.settings.batch, self.settings.seq_len)
        x = layer.input(self.tokens * self.shape.hidden, self.numbers.stream)
        before = layer.live
        found = causal_layer(layer, self.shape, x, kernel, mask)
        del x
        return self._ran(layer, found, before, count)

    def _t5_stack(self, kernel: Any, count: int, decodes: bool) -> _Stack:
        numbers, shape = self.numbers, self.shape
        layer = Layer(numbers, self.settings.batch, self.settings.seq_len)
        near = layer.input(shape.heads * self.scores, numbers.weights, trained=numbers.full)
        far = seen = None
        if decodes:
            far = layer.input(shape.heads * self.scores, numbers.compute, trained=self.settings.gradient_checkpointing)
            seen = layer.input(self.tokens * shape.hidden, numbers.stream)
        x = layer.input(self.tokens * shape.hidden, numbers.stream)
        before = layer.live
        found = t5_layer(layer, shape, x, kernel, (near, far), seen)
        del x
        ran = self._ran(layer, found, before, count)
        del near, far, seen
        return ran

    def _ran(self, layer: Layer, found: Tensor, before: int, count: int) -> _Stack:
        with_copies = layer.live - before
        forward = layer.peak - before
        copied = sum(copy.size for copy in layer.copies)
        layer.copies.clear()
        saved = layer.live - before
        checkpointed = self.settings.gradient_checkpointing
        layer.peak = layer.live
        node, size, item = found.node, found.count, found.item
        assert node is not None
        del found
        layer.backward(node, size, item)
        backward, passing, kept = layer.peak - before, layer.passing_at_peak, layer.kept_at_peak
        if checkpointed:
            again = forward + size * item
            if again > backward:
                backward, passing, kept = again, size * item, 0
            saved = self.tokens * self.shape.hidden * item
            copies = copied
        else:
            copies = with_copies - saved
        return _Stack(count, saved, forward, backward, passing, kept, layer.kept, copies, layer.parameters, layer.names)

    def _tail(self) -> tuple[list[tuple[int, int, int, bool]], _Stack]:
        """The norm after the last layer."""
        shape, numbers = self.shape, self.numbers
        layer = Layer(numbers, self.settings.batch, self.settings.seq_len)
        x = layer.input(self.tokens * shape.hidden, numbers.stream)
        before = layer.live
        found = layer.norm(x, shape.hidden, shape.norm)
        if shape.decoder_layers:
            found = layer.dropout(found, shape.residual_dropout)
            if shape.scaled_output:
                found = layer.changed(found)
        del x
        self.head_item = found.item
        saved, forward = layer.live - before, layer.peak - before
        layer.peak = layer.live
        node, size, item = found.node, found.count, found.item
        assert node is not None
        del found
        layer.backward(node, size, item)
        ran = _Stack(
            1, saved, forward, layer.peak - before, layer.passing_at_peak, layer.kept_at_peak, layer.kept, 0, [], set()
        )
        return layer.parameters, ran

    def _outside(self) -> list[tuple[int, int, int, bool]]:
        """The parameters that are in no layer and not in the last norm."""
        shape, item, full = self.shape, self.numbers.weights, self.numbers.full
        found = [(shape.vocabulary, shape.hidden, item, full)] * (1 if shape.tied else 2)
        if shape.positions:
            found.append((shape.positions, shape.hidden, item, full))
        if shape.buckets:
            found += [(shape.buckets, shape.heads, item, full)] * 2 + [(shape.hidden, 0, self.numbers.vectors, full)]
        return found

    def _check_targets(self, stacks: list[_Stack]) -> None:
        targets = self.numbers.targets
        names = set().union(*(stack.names for stack in stacks))
        if targets and targets != ("all-linear",) and names.isdisjoint(targets):
            raise UnknownMemoryError(
                f"lora.targets {', '.join(targets)}: no such layers (there are {', '.join(sorted(names))})"
            )

    # --- what is live when

    def _points(self, stacks: list[_Stack], tail: _Stack, gradients: int, fixed: int) -> list[_Point]:
        shape, numbers, settings = self.shape, self.numbers, self.settings
        item = numbers.stream
        width = self.tokens * shape.hidden
        resident = gradients if settings.accumulation > 1 else 0
        ids = 8 * self.tokens * (4 if shape.decoder_layers else 2)
        embedded = width * item + self.tokens * (1 if shape.embedding_dropout else 0) * shape.hidden
        angles = 0 if shape.positions or shape.buckets else 2 * settings.seq_len * shape.width * item
        start = ids + embedded + angles
        if shape.decoder_layers:
            bias = shape.heads * self.scores * numbers.weights + 8 * self.scores
            # Both stacks, with the encoder's last norm and result, and a mask for each token.
            start += embedded + 2 * bias + tail.saved + self.scores * settings.batch
        saved = sum(stack.count * (stack.saved + stack.copies) for stack in stacks)
        points = []
        before = start
        for stack in stacks:
            top = before + (stack.count - 1) * (stack.saved + stack.copies)
            points.append(_Point("forward", resident, top + stack.forward))
            before = top + stack.saved + stack.copies
        head = shape.vocabulary * shape.hidden
        end = start + saved
        points.append(_Point("forward", resident, end + tail.forward))
        end += tail.saved
        kept = start + sum(stack.count * stack.saved for stack in stacks) + tail.saved
        of_head, loss_points = self._loss(end, kept, resident, fixed)
        points += loss_points
        # The backward pass: the last norm, and each stack from its last layer to its first.
        new = of_head
        points.append(
            _Point("backward", resident + new, kept - tail.saved + tail.backward - tail.passing, temporary=tail.passing)
        )
        new += tail.gradients
        before = start + sum(stack.count * stack.saved for stack in stacks)
        for stack in reversed(stacks):
            for done in (0, stack.count - 1):
                live = before - (done + 1) * stack.saved
                made = 0 if resident else done * stack.gradients
                # Those of the layer that runs are in stack.backward.
                activations = live + stack.backward - stack.passing - stack.kept
                points.append(_Point("backward", resident + new + made + stack.kept, activations, temporary=stack.passing))
            before -= stack.count * stack.saved
            new += 0 if resident else stack.count * stack.gradients
        if numbers.full:
            # The embeddings' gradient, and with tied weights that of the head.
            points.append(_Point("backward", resident + new + head * numbers.weights, start, temporary=width * item))
        return points

    def _loss(self, forward: int, kept: int, resident: int, fixed: int) -> tuple[int, list[_Point]]:
        """The gradient of the head's weights, and what is live in the loss and at the beginning of
        the backward pass."""
        shape, numbers, settings = self.shape, self.numbers, self.settings
        compute, tokens = numbers.compute, self.tokens
        head = shape.vocabulary * shape.hidden
        of_hidden = tokens * shape.hidden
        copy = head * compute if numbers.weights != compute else 0
        trained = numbers.full
        if settings.loss_chunk == 0 or shape.logit_cap:
            logits = tokens * shape.vocabulary
            capped = logits * compute if shape.logit_cap else 0
            narrow = of_hidden * compute if self.head_item != compute else 0
            first = _Point(
                "forward",
                resident,
                forward + narrow + copy,
                logits=capped + logits * (compute + (4 if compute != 4 else 0) + 4),
            )
            second = _Point("backward", resident, kept + narrow + copy, logits=capped + 12 * logits)
            new = head * numbers.weights if trained else 0
            third = _Point(
                "backward",
                resident + new,
                kept + narrow + copy,
                logits=capped + logits * compute,
                temporary=new // 2 + of_hidden * compute,
            )
            return new, [first, second, third]
        new = 4 * head if trained else 0
        chunk = settings.loss_chunk
        hidden_gradient = 4 * of_hidden
        if chunk < 0:
            free = _PLENTY if self.capacity is None else self.capacity - fixed - resident - forward - copy - hidden_gradient
            chunk = tokens_at_once(max(0, free - new), shape.vocabulary, tokens, compute)
        chunk = min(chunk, tokens)
        pieces = -(-tokens // chunk)
        logits = block_bytes(chunk * shape.vocabulary * compute)
        blocks = min(ROWS, chunk) * shape.vocabulary * 4
        # The last rows in 32 bits are there until the next ones are; bf16 also needs them widened.
        rows = 0 if compute == 4 else blocks * ((1 if self.half == "fp16" else 2) + (1 if chunk > ROWS else 0))
        products = chunk * shape.hidden * (compute + 8)
        if pieces == 1:
            most = [(logits + rows, 0), (logits, products + new)]
        else:
            most = [(2 * logits + rows, new), (logits, products + new)]
        of_pieces = [
            _Point(
                "forward",
                resident + (new if extra else 0),
                forward + hidden_gradient,
                logits=of_logits,
                temporary=copy + extra - (new if extra else 0),
            )
            for of_logits, extra in most
        ]
        narrow = of_hidden * self.head_item if self.head_item != 4 else 0
        second = _Point("backward", resident + new, kept + hidden_gradient, temporary=narrow)
        return new, [*of_pieces, second]

    # --- what is there all the time

    def _ring(self, trained: list[tuple[int, int, int]]) -> int:
        if self.settings.world_size == 1:
            return 0
        largest = max(count * item for count, item, _ in trained)
        whole = sum(count * item * n for count, item, n in trained)
        return _RING * min(_BUCKET, max(largest, whole)) if trained else 0

    def _step_bytes(self, trained: list[tuple[int, int, int]]) -> int:
        norms = 512 * sum(n for _, _, n in trained)
        if self.settings.optimizer != "adafactor":
            return norms
        return norms + 2 * 4 * max(count for count, _, _ in trained)


def _numbers(settings: Settings, half: str | None, shape: Shape) -> Numbers:
    full, quantized = settings.method == "full", settings.method == "qlora"
    if not full and settings.lora is None:
        raise UnknownMemoryError(f"method {settings.method}: needs lora.r and lora.alpha")
    # As train.model builds the base: see there.
    narrow_base = half is not None and (quantized or (settings.method == "lora" and bool(settings.model.get("path"))))
    weights = 2 if narrow_base else 4
    vectors = 4 if quantized else weights
    narrow_norms = settings.bf16_residual and half == "bf16"
    stream = weights if half != "fp16" else 4
    if quantized and not narrow_norms:
        stream = 4
    if narrow_norms:
        stream = 2
    lora = None if full else settings.lora
    return Numbers(
        weights=weights,
        vectors=vectors,
        compute=2 if half else 4,
        stream=stream,
        autocast=half is not None,
        narrow_norms=narrow_norms,
        full=full,
        quantized=quantized,
        rank=lora.r if lora else 0,
        dropout=lora.dropout if lora else 0.0,
        targets=lora.targets if lora else (),
        resident=settings.accumulation > 1,
    )


def _weight_bytes(rows: int, columns: int, item: int, trained: bool) -> int:
    count = rows * max(columns, 1)
    if item:
        return block_bytes(count * item)
    blocks = -(-count // 64)
    return block_bytes(-(-count // 2)) + block_bytes(blocks) + block_bytes(4 * -(-blocks // 256)) + 1024 + 1024


def _optimizer_bytes(kind: str, rows: int, columns: int, item: int) -> int:
    count = rows * max(columns, 1)
    if kind == "adafactor":
        second = count if not columns else rows + columns
        return block_bytes(4 * rows) + block_bytes(4 * columns) + 512 if columns else block_bytes(4 * second) + 512
    if kind in ("adamw_8bit", "paged_adamw_8bit"):
        if count < 4096:
            return 2 * block_bytes(4 * count)
        scales = 2 * block_bytes(4 * -(-count // 256))
        return scales + (0 if kind.startswith("paged") and count >= 100_000 else 2 * block_bytes(count))
    return 2 * block_bytes(count * item) + 512
