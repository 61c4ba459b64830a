"""What operations allocate, forward and backward, as with torch's autograd, with sizes only.

A `Tape` records operations. Each result takes its bytes until nothing refers to it, and what an
operation saves for its gradient stays until the backward pass has run that operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memtop.presets.allocator import MIB

PRODUCT = 1 << 60
"""The event of a pass's first matrix product, for which cuBLAS may need its workspace."""
GRADIENT = PRODUCT + 1
"""The event of gradients of weights, when what their operation had saved has ended."""
RECOMPUTED = PRODUCT + 2
"""The event at which a checkpoint has run its layer again."""
BIAS = PRODUCT + 3
"""Where a layer needs what is added to the scores of its attention."""
MODULES = PRODUCT + 4
"""From here on, four events for each of a layer's modules: it begins and ends, its backward pass
begins and ends."""


class Tensor:
    """A result: `count` numbers of `item` bytes. `node` computes its gradient, if it has one."""

    __slots__ = ("count", "item", "node", "number", "size", "tape")

    def __init__(self, tape: Tape, count: int, item: int, size: int, node: int | None) -> None:
        self.tape, self.count, self.item, self.size, self.node = tape, count, item, size, node
        self.number = tape.began(size, "activations")

    def __del__(self) -> None:
        self.tape.live -= self.size
        if self.number >= 0:
            self.tape.events.append(~self.number)


class _View(Tensor):
    """A part of another result, without memory of its own."""

    __slots__ = ("whole",)

    def __init__(self, whole: Tensor, count: int, node: int | None) -> None:
        super().__init__(whole.tape, count, whole.item, 0, node)
        self.whole = whole

    def __del__(self) -> None:
        pass


class _Gradient(msgspec.Struct):
    """What the backward pass computes; `holders`: how many operations hold it."""

    size: int
    numbers: tuple[int, ...]
    """In `Tape.large`, if it is not small."""
    item: int = 0
    holders: int = 1
    is_view: bool = False
    """Of a matrix that autograd holds as well."""


class _Node(msgspec.Struct):
    """An operation whose result has a gradient."""

    parents: list[tuple[int, int | tuple[int, ...], int, int]]
    """Of each operand with a gradient: its node, bytes that exist only while the gradient is
    computed, and the gradient's count and item."""
    saved: tuple[Tensor | None, ...]
    """In the order in which they end. None: of a weight, which exists anyway."""
    weights: Sequence[tuple[int, int]] = ()
    """Of each trained weight: bytes only while its gradient is computed, and the gradient's."""
    weights_first: bool = False
    """Whether their gradients come before those of the operands."""
    hidden: tuple[int, ...] = ()
    """Bytes that exist while all gradients do."""
    passes: bool = False
    """Whether the operands' gradient is the result's own."""
    joins: bool = False
    """Whether the results are parts of the operand."""
    multiplies: bool = False
    """Whether the gradients are matrix products of their own."""
    gives_views: bool = False
    """Whether they are matrix products that autograd gives as views."""
    computed: int = 0
    """The item in which the gradients are computed, if autograd converts them then."""
    before: tuple[int, ...] = ()
    """Events of modules of which the backward pass begins with this operation."""
    after: tuple[int, ...] = ()
    """The same of those that end with it."""


class Tape:
    """Runs operations forward, then backward, and knows which large tensors were live when."""

    def __init__(self, *, least: int, saves: bool = True) -> None:
        """`least`: what takes no more bytes is small, unless it is the gradient of a weight.
        `saves`: whether there will be a backward pass."""
        self.least, self.saves = least, saves
        self.again = False
        """Whether a checkpoint computes this again: then each saved tensor ends after its use."""
        self.live = self.kept = 0
        """Bytes; kept: of new gradients of weights."""
        self._nodes: list[_Node | None] = []
        self.large: list[tuple[int, str]] = []
        """What is not small: bytes, and what it is for."""
        self.events: list[int] = []
        """n where `large[n]` begins, ~n where it ends; or an event from PRODUCT on."""
        self.last_saved = 0
        """How many events there were when something was saved last. A second run ends there."""
        self.looked_back = -1
        """How many there were when the backward pass first needed something saved. A second run
        begins there."""
        self.looked_back_last = -1
        """The same when it last needed something."""
        self.inputs: list[int] = []
        """In `large`, what was there before."""
        self.given: tuple[int, ...] = ()
        """In `large`, the gradient of the result."""
        self.passed_on: tuple[int, ...] = ()
        """The gradient of the input."""
        self._has_product = False
        self._shared: set[int] = set()
        """The nodes of inputs that other tapes have as well."""

    def began(self, size: int, use: str) -> int:
        """The place in `large` of what begins now; -1 if it is small."""
        if size <= (MIB if use == "gradients" else self.least):
            return -1
        self.large.append((size, use))
        self.events.append(len(self.large) - 1)
        return len(self.large) - 1

    def new(self, count: int, item: int, node: int | None = None) -> Tensor:
        size = count * item
        self.live += size
        return Tensor(self, count, item, size, node)

    def product(self) -> None:
        """A matrix product has just got its result."""
        if not self._has_product:
            self._has_product = True
            self.events.append(PRODUCT)

    def _make(self, size: int, item: int = 0) -> _Gradient:
        """Allocate what no forward pass makes."""
        self.live += size
        number = self.began(size, "temporary")
        return _Gradient(size, () if number < 0 else (number,), item)

    def _drop(self, gone: _Gradient) -> None:
        self.live -= gone.size
        self.events += [~number for number in gone.numbers]

    def input(self, count: int, item: int, *, trained: bool = True, shared: bool = False) -> Tensor:
        """What was there before. `trained`: it gets a gradient; `shared`: which is added to that of
        others."""
        node = None
        if trained and self.saves:
            self._nodes.append(None)
            node = len(self._nodes) - 1
            if shared:
                self._shared.add(node)
        found = self.new(count, item, node)
        self.inputs.append(found.number)
        return found

    def _result(
        self,
        count: int,
        item: int,
        operands: Sequence[tuple[Tensor, int | tuple[int, ...], int]],
        saved: tuple[Tensor | None, ...] = (),
        weights: Sequence[tuple[int, int]] = (),
        hidden: tuple[int, ...] = (),
        passes: bool = False,
        saves_itself: bool = False,
        second: int = 0,
        multiplies: bool = False,
        gives_views: bool = False,
        weights_first: bool = False,
        computed: int = 0,
    ) -> Tensor:
        """What an operation gives.

        `operands`: each with the bytes that exist only while its gradient is computed, and the item
        of that gradient. `saves_itself`: the result is saved. `second`: bytes of a second result,
        such as a dropout's mask, which is saved. The others: see `_Node`.
        """
        parents = [(one.node, extra, one.count, grad) for one, extra, grad in operands if one.node is not None]
        if not self.saves or not (parents or weights):
            found = self.new(count, item)
            self.new(second, 1)
            return found
        node = _Node(
            parents,
            saved,
            weights,
            weights_first,
            hidden,
            passes,
            multiplies=multiplies,
            gives_views=gives_views,
            computed=computed,
        )
        self._nodes.append(node)
        if saved:
            self.last_saved = len(self.events)  # before there is a result
        found = self.new(count, item, len(self._nodes) - 1)
        if second:
            node.saved = (*node.saved, self.new(second, 1))
        if saves_itself:
            node.saved = (*node.saved, found)
        if second or saves_itself:
            self.last_saved = len(self.events)
        return found

    def backward(self, node: int, count: int, item: int) -> None:
        """From the gradient of the result of this node."""
        gradients = {node: self._make(count * item, item)}
        self.given = gradients[node].numbers
        self._has_product = False
        nodes = self._nodes
        for number in range(len(nodes) - 1, -1, -1):
            step, nodes[number] = nodes[number], None
            gradient = gradients.pop(number, None)
            if gradient is None:
                continue
            if step is None:
                self.passed_on = gradient.numbers
                continue
            self.events += step.before
            if step.saved and self.looked_back < 0:
                self.looked_back = len(self.events)
            found, products = (self._passed_on(step, gradient), []) if step.passes else self._computed(step)
            parents, saved, weights, looks_back = step.parents, list(step.saved), step.weights, bool(step.saved)
            after = step.after
            # A product computes the gradient of its second factor first, and converts it last.
            order = -1 if step.computed else 1
            step = None
            while self.again and saved:
                saved.pop()
            for (_, size), product in zip(weights if products else (), products, strict=True):
                self._gradient_of(size, product)
            owns = [self._converted(*pair, item) for pair, (*_, item) in zip(found[::order], parents[::order], strict=True)]
            self._release(gradient)
            if looks_back:
                self.looked_back_last = len(self.events)
            while saved:
                saved.pop(0)
            if weights:
                self.events.append(GRADIENT)
            self.events += after
            for (parent, *_), own in zip(parents, owns[::order], strict=True):
                self._accumulate(gradients, parent, own)

    def _passed_on(self, step: _Node, gradient: _Gradient) -> list[tuple[_Gradient, list[_Gradient]]]:
        found = []
        for _, _, count, item in step.parents:
            own = gradient
            if gradient.item == item:
                gradient.holders += 1
            else:
                own = self._make(count * item, item)
            found.append((own, list[_Gradient]()))
        return found

    def _computed(self, step: _Node) -> tuple[list[tuple[_Gradient, list[_Gradient]]], list[_Gradient]]:
        """The gradients of the operands, each with what exists until it is converted; and the
        products that are still to be summed into gradients of weights."""
        found, products = [], list[_Gradient]()
        if step.weights_first:
            products = self._of_weights(step)
        for _, extra, count, item in step.parents:
            passing = [self._make(size) for size in ((extra,) if isinstance(extra, int) else extra) if size]
            item = step.computed or item
            own = self._make(count * item, item)
            own.is_view = step.gives_views
            if step.multiplies or step.gives_views:
                self.product()
            if not step.computed:
                while passing:
                    self._drop(passing.pop())
            found.append((own, passing))
        hidden = [self._make(size) for size in step.hidden]
        for one in hidden:
            self._drop(one)
        if not step.weights_first:
            products = self._of_weights(step)
        return found, products

    def _converted(self, gradient: _Gradient, passing: list[_Gradient], item: int) -> _Gradient:
        found = gradient
        if gradient.item != item:
            found = self._make(gradient.size // gradient.item * item, item)
            self._release(gradient)
        for one in passing:
            self._drop(one)
        return found

    def _of_weights(self, step: _Node) -> list[_Gradient]:
        made = [self._make(extra) for extra, _ in step.weights]
        if step.computed:
            return made
        for (_, size), product in zip(step.weights, made, strict=True):
            self._gradient_of(size, product)
        if step.weights_first and made:
            self.product()
        return []

    def _gradient_of(self, size: int, product: _Gradient) -> None:
        self.kept += size
        self.live += size
        self.began(size, "gradients")
        self._drop(product)

    def _release(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if not gradient.holders:
            self._drop(gradient)

    def _accumulate(self, gradients: dict[int, _Gradient], parent: int, own: _Gradient) -> None:
        if parent in self._shared:
            self._release(own)
            return
        before = gradients.get(parent)
        node = self._nodes[parent]
        if node is not None and node.joins:
            if own.holders > 1:
                own = self._make(own.size, own.item)
            if before is not None:
                own.size, own.numbers = own.size + before.size, own.numbers + before.numbers
            gradients[parent] = own
        elif before is None:
            gradients[parent] = own
        else:
            if before.holders > 1 or before.is_view:
                # Somebody else has it: the sum is new.
                gradients[parent] = self._make(before.size, before.item)
                self._release(before)
            self._release(own)

    def parts(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Views of a matrix's columns. They keep it, and their gradients become one of its size."""
        if x.node is not None:
            self._nodes.append(_Node([(x.node, 0, x.count, x.item)], (), joins=True))
        node, rows = None if x.node is None else len(self._nodes) - 1, x.count // sum(sizes)
        return [_View(x, rows * size, node) for size in sizes]

    def view(self, x: Tensor, count: int) -> Tensor:
        """A view, such as some of a matrix's columns, or by head, whose gradient becomes a new one
        of the whole."""
        if x.node is not None:
            self._nodes.append(_Node([(x.node, 0, x.count, x.item)], ()))
        return _View(x, count, None if x.node is None else len(self._nodes) - 1)
