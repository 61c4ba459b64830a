"""What a layer of a known architecture allocates when it is trained: its operations in the order in
which transformers and peft run them, with sizes only.

`autograd.py` has what is allocated for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from memtop.presets.autograd import MODULES, Tape, Tensor
from memtop.presets.states import Numbers, Parameter

Kernel = Literal["flash", "efficient", "math", "eager"]


class Layer(Tape):
    """The operations of a layer."""

    def __init__(self, numbers: Numbers, batch: int, length: int, *, least: int, saves: bool = True) -> None:
        """`least` and `saves`: see `Tape`. A checkpoint runs a layer without a backward pass
        first."""
        super().__init__(least=least, saves=saves)
        self.numbers, self.batch, self.length = numbers, batch, length
        self.tokens = batch * length
        self.shares: Tensor | None = None
        """The second result of an attention: the layer holds it until its end."""
        self.parameters: list[Parameter] = []
        self.matrices: dict[int, Parameter | None] = {}
        """Of modules, by their first event, if ZeRO-3 gathers each when its module begins."""
        self.copies: list[Tensor] = []
        """Weights in 16 bits, which autocast keeps until the forward pass ends."""
        self.names: set[str] = set()

    def begin(self, matrix: Parameter | None = None) -> tuple[int, int]:
        """A module begins, which has this matrix. Returns its first event, and how many operations
        there were before it."""
        if not self.numbers.gathers:
            return -1, -1
        event = MODULES + 4 * len(self.matrices)
        self.matrices[event] = matrix
        self.events.append(event)
        return event, len(self._nodes)

    def end(self, module: tuple[int, int], result: Tensor) -> Tensor:
        event, first = module
        if event < 0:
            return result
        self.events.append(event + 1)
        last = None if result.node is None else self._nodes[result.node]
        if last is not None:
            last.before = (event + 2, *last.before)
            own = self._nodes[first] if first < len(self._nodes) else None
            if own is not None:
                own.after = (*own.after, event + 3)
        return result

    def _saved_with(self, result: Tensor) -> None:
        """DeepSpeed's linear layers save their operands when they have a result."""
        if self.numbers.replaces_linear and result.node is not None:
            self.last_saved = len(self.events)

    def cast(self, x: Tensor, item: int) -> Tensor:
        return x if x.item == item else self._result(x.count, item, ((x, 0, x.item),))

    def changed(self, x: Tensor) -> Tensor:
        """A sum with, or a product with, a constant, or a negation: nothing is saved."""
        return self._result(x.count, x.item, ((x, 0, x.item),))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._result(a.count, max(a.item, b.item), ((a, 0, a.item), (b, 0, b.item)), passes=True)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        item = max(a.item, b.item)
        saved = (b if a.node is not None else None, a if b.node is not None else None)
        return self._result(a.count, item, ((b, 0, b.item), (a, 0, a.item)), saved, computed=item)

    def dropout(self, x: Tensor, rate: float) -> Tensor:
        if not rate:
            return x
        return self._result(x.count, x.item, ((x, 0, x.item),), second=x.count)

    def clamped(self, x: Tensor) -> Tensor:
        """In fp16, what T5 adds up is kept finite."""
        if x.item == 4 or self.numbers.half != "fp16":
            return x
        infinite, absolute = self.new(x.count, 1), self.new(x.count, x.item)
        del absolute, infinite
        return self._result(x.count, x.item, ((x, (x.count, x.count), x.item),), (x,))

    def activation(self, x: Tensor, name: str) -> Tensor:
        module = self.begin()
        return self.end(module, self._activation(x, name))

    def _activation(self, x: Tensor, name: str) -> Tensor:
        if name == "gelu_new":
            half = self.changed(x)
            wide = self.cast(x, 4) if self.numbers.autocast else x
            cube = self._result(x.count, wide.item, ((wide, (x.count * wide.item,) * 2, wide.item),), (wide,))
            del wide
            cube = self.changed(cube)
            inner = self.add(x, cube)
            del cube
            inner = self.changed(inner)
            hyperbolic = self._result(inner.count, inner.item, ((inner, 0, inner.item),), saves_itself=True)
            del inner
            hyperbolic = self._shifted(hyperbolic, hyperbolic.item)
            return self.multiply(half, hyperbolic)
        if name == "relu":
            return self._result(x.count, x.item, ((x, 0, x.item),), saves_itself=True)
        return self._result(x.count, x.item, ((x, 0, x.item),), (x,))

    def _vector(self, size: int) -> Sequence[tuple[int, int]]:
        """A norm's or a bias's weights, of which the gradients are small."""
        full = self.numbers.full
        self.parameters.append(Parameter(size, 0, self.numbers.vectors, full))
        return ((0, size * self.numbers.vectors),) if full else ()

    def _scaled(self, x: Tensor, width: int, item: int, *, weights_first: bool = False) -> Tensor:
        """The product with a norm's trained weights."""
        extra = x.count * item
        # The gradient of the weights is a sum over a product of the whole size.
        weights = [(extra, size) for _, size in self._vector(width)]
        saved = (x if weights else None,)
        return self._result(x.count, item, ((x, 0, x.item),), saved, weights, weights_first=weights_first, computed=item)

    def norm(self, x: Tensor, width: int, kind: str) -> Tensor:
        """`llama`, `t5` and `gemma` differ in where they go back to 16 bits."""
        module = self.begin()
        return self.end(module, self._norm(x, width, kind))

    def _norm(self, x: Tensor, width: int, kind: str) -> Tensor:
        if kind == "layer":
            return self._layer_norm(x, width)
        wide = self.cast(x, 4)
        rows = x.count // width
        # The gradient of the square takes two more matrices.
        square = self._result(x.count, 4, ((wide, (4 * x.count,) * 2, 4),), (wide,))
        root = self._result(rows, 4, ((square, 0, 4),), (self.new(2 * rows, 4),))
        base = x if kind == "t5" else wide
        del wide, square
        # The root's gradient is a sum over a product of the whole size.
        scaled = self._result(x.count, 4, ((root, 4 * x.count, 4), (base, 0, base.item)), (base, root), computed=4)
        del base, root
        vectors = self.numbers.vectors
        if kind == "gemma":
            scaled = self._scaled(scaled, width, 4, weights_first=True)
            found = self.cast(scaled, x.item)
        else:
            item = x.item if kind == "llama" else 2 if vectors == 2 else 4
            narrow = self.cast(scaled, item)
            if kind == "t5":
                scaled = narrow
            found = self._scaled(narrow, width, max(item, vectors))
            del narrow
        del scaled
        return self.cast(found, 2) if self.numbers.narrow_norms else found

    def _layer_norm(self, x: Tensor, width: int) -> Tensor:
        wide = self.cast(x, 4) if self.numbers.autocast else x
        weights = [*self._vector(width), *self._vector(width)]
        found = self._result(x.count, wide.item, ((wide, 0, wide.item),), (wide, self.new(2 * x.count // width, 4)), weights)
        return self.cast(found, 2) if self.numbers.narrow_norms else found

    def linear(self, x: Tensor, inputs: int, outputs: int, name: str, *, bias: bool = False, whole: bool = False) -> Tensor:
        """`whole`: never in 4 bits."""
        numbers = self.numbers
        self.names.add(name)
        compute, item, size = numbers.compute, numbers.kept if whole else numbers.weights, inputs * outputs
        count = x.count // inputs * outputs
        quantized = numbers.quantized and not whole
        weight = Parameter(outputs, inputs, 0 if quantized else item, numbers.full)
        self.parameters.append(weight)
        adapters = list[Parameter]()
        if name in numbers.targets or numbers.targets == ("all-linear",):
            shapes = (numbers.rank, inputs), (outputs, numbers.rank)
            adapters = [Parameter(*shape, numbers.adapters, True) for shape in shapes]
            # peft's module asks for the precision of the first one, so ZeRO-3 gathers it then.
            around = self.begin(adapters[0])
        module = self.begin(weight)
        weights = [*self._vector(outputs)] if bias else []
        if quantized:
            narrow = self.cast(x, compute)
            passing = [self.new(size, compute), self.new(size // 16, 1), self.new(size // 16, 1)]
            found = self._result(count, compute, ((narrow, (size * item, size // 16, size // 16), compute),), multiplies=True)
            del passing
            found = self.cast(found, x.item)
            del narrow
        else:
            own = ((0, size * item),) if numbers.full else ()
            copy = self._result(size, compute, (), weights=own) if compute != item else None
            narrow = self.cast(x, compute)
            operands = [(narrow, 0, compute)]
            # That of the weights comes first, but not from DeepSpeed's layers or with a bias.
            first = not (bias or numbers.replaces_linear)
            if copy is None:
                weights += own
            elif numbers.full:
                self.copies.append(copy)
                operands.insert(0 if first else 1, (copy, 0, compute))
            kept = narrow if numbers.full or numbers.replaces_linear else None
            saved = (kept, copy) if bias else (copy, kept)
            found = self._result(count, compute, operands, saved, weights, gives_views=True, weights_first=first)
            self._saved_with(found)
            self.product()
            del narrow, copy, operands, kept, saved
        self.end(module, found)
        if not adapters:
            return found
        held = [found]
        del found
        return self.end(around, self._adapted(x, held, inputs, adapters, quantized))

    def _adapted(self, x: Tensor, held: list[Tensor], inputs: int, adapters: list[Parameter], quantized: bool) -> Tensor:
        """`held` has the product without the adapter, and gives it up."""
        numbers, found = self.numbers, held.pop()
        rank, own = numbers.rank, numbers.adapters
        rows = x.count // inputs
        self.parameters += adapters
        if quantized:
            found = self.copied(found)
        if not (quantized and numbers.autocast):
            x = self.cast(x, own)
        kind = numbers.compute if numbers.autocast else own

        def product(x: Tensor, count: int, weight: Parameter) -> Tensor:
            module, size = self.begin(weight), weight.numbers
            weights: Sequence[tuple[int, int]] = ((0, size * own),)
            copy = None
            if kind != own:
                copy = self._result(size, kind, (), weights=weights)
                self.copies.append(copy)
                weights = ()
            narrow = self.cast(x, kind)
            operands = [(narrow, 0, kind), *([] if copy is None else [(copy, 0, kind)])]
            found = self._result(count, kind, operands, (copy, narrow), weights, gives_views=True)
            self._saved_with(found)
            self.product()
            del narrow, operands
            return self.end(module, found)

        module = self.begin()
        low = product(self.end(module, self.dropout(x, numbers.dropout)), rows * rank, adapters[0])
        high = product(low, found.count, adapters[1])
        del low
        scaled = self.changed(high)
        del high
        total, item = self.add(found, scaled), found.item
        if quantized:
            found = total
        # With a layer in 4 bits, the product of the adapter has a name of its own and ends last.
        del scaled
        found = total
        del total
        return self.cast(found, item)

    def rotated(self, x: Tensor, item: int, *, joined: bool = False) -> Tensor:
        """By its position; `item` is that of the cosines and sines. `joined`: with the columns that
        are not rotated, of which there are none."""
        wide = max(x.item, item)
        rest = self.view(x, 0) if joined else None
        one = self._result(x.count, wide, ((x, 0, x.item),), computed=wide)
        half = self.new(x.count // 2, x.item)
        # The gradients of both halves fill matrices of the whole size.
        halves = ((x, x.count // 2 * x.item, x.item), (x, 0, x.item))
        turned = self._result(x.count, x.item, halves)
        del half
        two = self._result(x.count, wide, ((turned, 0, x.item),), computed=wide)
        del turned
        found = self.add(one, two)
        del one, two
        if rest is None:
            return found
        operands = ((found, 0, found.item), (rest, 0, x.item))
        return self._result(found.count, found.item, operands, passes=True)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        heads: int,
        key_heads: int,
        bias: Tensor | None = None,
        mask_bytes: int = 0,
        cap: bool = False,
        rate: float = 0.0,
        by_head: bool = False,
    ) -> Tensor:
        """`bias`: what is added to the scores of each head; `mask_bytes`: of a mask that the kernel
        makes of a boolean one and keeps; `by_head`: the queries are in memory one head after the
        other."""
        count, times, rows = query.count, heads // key_heads, self.batch * heads * self.length
        scores = rows * self.length
        if kernel == "eager":
            return self._eager(query, key, value, scores, times, cap, rate)
        if self.numbers.autocast:
            compute = self.numbers.compute
            query, key, value = (self.cast(one, compute) for one in (query, key, value))
            bias = None if bias is None else self.cast(bias, compute)
        item = query.item
        if bias is not None and bias.count != scores:
            # The same for all samples.
            bias = self.view(bias, scores)
        if kernel == "flash":
            padded = self.batch * heads * -(-self.length // 128) * 128
            hidden = (4 * padded, 4 * padded * -(-(count // rows) // 32) * 32, *([count * item] * 2 if times > 1 else []))
            operands = tuple((one, 0, one.item) for one in (query, key, value))
            saved = (key, query, value)
            found = self._result(count, item, operands, saved, hidden=hidden, saves_itself=True, second=4 * rows)
            return self.copied(found) if by_head else found
        if kernel == "math":
            found, shares = self._math(query, key, value, scores, times, rate, masks=bias is None, by_head=by_head)
            # The last copy is made when all else has ended.
            del query, key, value, shares
            return self.changed(found)
        if key_heads not in (1, heads):  # a single one is repeated without a copy
            key, value = (self._repeated(one, times) for one in (key, value))
        sums = 4 * self.batch * heads * -(-self.length // 32) * 32
        mask = bias if bias is not None else self.new(mask_bytes, 1) if mask_bytes else None
        hidden = (4 * rows, *([4 * count] if item == 2 else []))
        operands = tuple((one, 0, one.item) for one in (query, key, value, *(() if bias is None else (bias,))))
        return self._result(count, item, operands, (mask, key, query, value), hidden=hidden, saves_itself=True, second=sums)

    def _repeated(self, x: Tensor, times: int) -> Tensor:
        """Keys or values for every query head; the gradient is a sum over them."""
        return self._result(x.count * times, x.item, ((x, 0, x.item),))

    def headed(self, x: Tensor) -> Tensor:
        """By head. Its gradient is in another order, so it is copied."""
        return self.view(x, x.count)

    def copied(self, x: Tensor) -> Tensor:
        """In another order of its dimensions; its gradient is passed on."""
        return self._shifted(x, x.item)

    def _shifted(self, x: Tensor, item: int) -> Tensor:
        """A sum with a mask or a constant: its gradient is passed on."""
        return self._result(x.count, item, ((x, 0, x.item),), passes=True)

    def _product(self, a: Tensor, b: Tensor, count: int) -> Tensor:
        return self._result(count, a.item, ((b, 0, b.item), (a, 0, a.item)), (b, a))

    def _eager(self, query: Tensor, key: Tensor, value: Tensor, scores: int, times: int, cap: bool, rate: float) -> Tensor:
        kind = self.numbers.compute if self.numbers.autocast else query.item
        keys, values = (self._repeated(one, times) if times > 1 else one for one in (key, value))
        narrow = self.cast(query, kind)
        raw = self._product(self.copied(narrow), self.cast(keys, kind), scores)
        del narrow
        raw = self.changed(raw)
        if cap:
            raw = self.changed(raw)
            raw = self._result(scores, raw.item, ((raw, 0, raw.item),), saves_itself=True)
            raw = self.changed(raw)
        raw = self._shifted(raw, max(raw.item, self.numbers.stream))
        raw = self.cast(self._softmax(raw), query.item)
        self.shares = self.dropout(raw, rate)
        del raw
        narrow = self.cast(values, kind)
        found = self._product(self.cast(self.shares, kind), narrow, query.count)
        del narrow
        # In another order of its dimensions; so is its gradient.
        return self.changed(found)

    def _softmax(self, x: Tensor) -> Tensor:
        wide = self.cast(x, 4)
        return self._result(x.count, 4, ((wide, 0, 4),), hidden=(4 * x.count,), saves_itself=True)

    def _math(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: int,
        times: int,
        rate: float,
        *,
        masks: bool,
        by_head: bool,
    ) -> tuple[Tensor, Tensor]:
        """The result and the shares. It computes in fp32; under autocast only its products are in
        16 bits. `masks`: it makes a mask of its own."""
        item, kind = query.item, self.numbers.compute if self.numbers.autocast else 4
        # What has a name of its own here is held until the end.
        wide_query, wide_key, wide_value = (self.cast(one, 4) for one in (query, key, value))
        scaled = self.changed(wide_query)
        mask = self.new(self.length * self.length, 4) if masks else None
        key, value = wide_key, wide_value
        if times > 1:
            key, value = (self._repeated(one, times) for one in (key, value))
        narrow = self.changed(key)
        # Autocast converts what comes last first.
        last = self.cast(narrow, kind)
        other = self.cast(scaled, kind)
        raw = self._product(other if by_head else self.copied(other), last, scores)
        del other, last, narrow
        masked = self._shifted(raw, 4)
        del raw
        shares = self._softmax(masked)
        del masked
        shares = self.dropout(shares, rate)
        own = self.new(scores, item) if item != 4 else shares
        narrow = self.cast(value, kind)
        found = self.cast(self._product(self.cast(shares, kind), narrow, query.count), item)
        del narrow, shares, key, value, scaled, mask, wide_value, wide_key, wide_query
        return found, own

    def shares_with(self, bias: Tensor, count: int, mask_bytes: int) -> Tensor:
        """What is added to unmasked scores; `bias` gets a sum. `mask_bytes`: of a mask for it."""
        mask = self.new(mask_bytes, 1) if mask_bytes else None
        extra = count * bias.item if count != bias.count else 0
        return self._result(count, bias.item, ((bias, extra, bias.item),), (mask,))
