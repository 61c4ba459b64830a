"""What the built-in trainer's loss allocates, in `sequence.py`'s terms: see train/objective.py."""

from __future__ import annotations

from collections.abc import Callable

from memtop.presets.architectures import Shape
from memtop.presets.autograd import PRODUCT
from memtop.presets.logits import ROWS, tokens_at_once
from memtop.presets.schema import Settings
from memtop.presets.sequence import NOWHERE, Sequence
from memtop.presets.states import Numbers

_PLENTY = 1 << 50
"""Bytes that no GPU has."""


class Loss:
    """The head and the cross entropy. `item`: bytes of a number of the hidden states."""

    def __init__(
        self, settings: Settings, shape: Shape, numbers: Numbers, sequence: Sequence, *, item: int, capacity: int | None
    ) -> None:
        self._chunk, self._capacity = settings.loss_chunk, capacity
        self._sequence, self._numbers, self._vocabulary, self._hidden = sequence, numbers, shape.vocabulary, shape.hidden
        self._item, self._compute = item, numbers.compute
        self._tokens = settings.batch * settings.seq_len
        self._head = shape.vocabulary * shape.hidden
        self._states = self._tokens * shape.hidden
        self._is_capped = shape.logit_cap
        self._is_sharded = settings.zero.stage == 3
        """Then the head is a layer of DeepSpeed's: the gradient of its weights comes last."""
        self.in_pieces = settings.loss_chunk != 0 and not shape.logit_cap
        self._of_states = self._of_head = NOWHERE
        self._kept: list[int] = []

    def forward(self, states: list[int]) -> None:
        """`states`: the hidden states, the last of which the head gets. A loss that is not in
        pieces ends them."""
        self._kept = []
        copy = self._new(self._head * self._compute if self._numbers.weights != self._compute else 0)
        if self.in_pieces:
            self._forward_in_pieces()
            self._sequence.end(copy)
        else:
            self._kept.append(copy)
            self._forward_whole(states)
        self._sequence.reach(PRODUCT)

    def _new(self, size: int, use: str = "temporary") -> int:
        return self._sequence.begin(size, use)

    def _forward_whole(self, states: list[int]) -> None:
        sequence, size = self._sequence, self._tokens * self._vocabulary * self._compute
        wide_size = 4 * self._tokens * self._vocabulary
        states = [*states, self._new(self._states * self._compute if self._item != self._compute else 0, "activations")]
        first = self._new(size, "logits")
        self._cap = NOWHERE
        if self._is_capped:
            # Divided, the hyperbolic tangent of it, multiplied.
            divided = self._new(size, "logits")
            sequence.end(first)
            self._cap = self._new(size, "logits")
            sequence.end(divided)
            first = self._new(size, "logits")
        if self._numbers.full:
            # The gradient of the head's weights needs what the head got.
            self._kept.append(next(key for key in reversed(states) if key != NOWHERE))
        sequence.end(*(key for key in states if key not in self._kept))
        wide = self._new(wide_size if self._compute != 4 else 0, "logits")
        self._of_states = self._new(wide_size, "logits")
        sequence.end(wide, first)

    def _tokens_of_piece(self) -> int:
        chunk = self._chunk
        if chunk < 0:
            free = _PLENTY if self._capacity is None else self._capacity - self._sequence.live_bytes()
            of_head = 4 * self._head if self._numbers.full else 0
            chunk = tokens_at_once(max(0, free - of_head), self._vocabulary, self._tokens, self._compute)
        return min(chunk, self._tokens)

    def _forward_in_pieces(self) -> None:
        sequence, numbers, compute = self._sequence, self._numbers, self._compute
        self._of_states = self._new(4 * self._states, "activations")
        chunk = self._tokens_of_piece()
        hidden = chunk * self._hidden
        self._of_head = NOWHERE
        # From the second piece on, all are alike.
        for piece in range(2 if chunk < self._tokens else 1):
            narrow = self._new(hidden * compute if self._item != compute else 0)
            logits = self._new(chunk * self._vocabulary * compute, "logits")
            sequence.end(narrow)
            if compute == 2:
                self._rows(chunk)
            sequence.pass_through(4 * hidden)
            if numbers.full:
                narrow = self._converted(self._new(4 * hidden), hidden * compute, compute != 4)
                if not piece:
                    self._of_head = self._new(4 * self._head, "gradients")
                sequence.end(narrow)
            sequence.end(logits)

    def _rows(self, chunk: int) -> None:
        """Logits in 32 bits, of some rows at one time. bf16 also needs them widened."""
        size = 4 * min(ROWS, chunk) * self._vocabulary
        wide = self._new(size if self._numbers.half == "bf16" else 0, "logits")
        softmax = self._new(size, "logits")
        self._sequence.end(wide, softmax)

    def backward(self, before_head: Callable[[], object]) -> tuple[int, int]:
        """The gradients of the hidden states and of the head's weights. `before_head` is called
        before those of the head are computed."""
        sequence, numbers, compute = self._sequence, self._numbers, self._compute
        if self.in_pieces:
            before_head()
            found, of_head = self._of_states, self._of_head
            if self._item != 4:
                found = self._new(self._states * self._item)
            if numbers.full and numbers.weights != 4:
                of_head = self._new(self._head * numbers.weights, "gradients")
            self._sequence.end(*({self._of_states, self._of_head} - {found, of_head}))
        else:
            logits = self._backward_of_logits()
            before_head()
            of_head = NOWHERE if self._is_sharded else self._of_weights()
            found = self._new(self._states * compute)
            sequence.reach(PRODUCT)
            if self._is_sharded:
                of_head = self._of_weights()
            sequence.end(logits, *self._kept)
            found = self._converted(found, self._states * self._item, self._item != compute)
            of_head = self._converted(of_head, self._head * numbers.weights, numbers.full and numbers.weights != compute)
        return found, of_head

    def _of_weights(self) -> int:
        if not self._numbers.full:
            return NOWHERE
        found = self._new(self._head * self._compute, "gradients")
        self._sequence.reach(PRODUCT)
        return found

    def _converted(self, key: int, size: int, differs: bool) -> int:
        if not differs:
            return key
        use = self._sequence.uses[key]
        found = self._new(size, "temporary" if use == "activations" else use)
        self._sequence.end(key)
        return found

    def _backward_of_logits(self) -> int:
        sequence, size = self._sequence, self._tokens * self._vocabulary * self._compute
        wide = 4 * self._tokens * self._vocabulary
        of_shares, found = self._new(wide, "logits"), self._new(wide, "logits")
        sequence.end(of_shares, self._of_states)
        found = self._converted(found, size, self._compute != 4)
        if self._is_capped:
            multiplied = self._new(size, "logits")
            sequence.end(found)
            of_cap = self._new(size, "logits")
            sequence.end(multiplied, self._cap)
            found = self._new(size, "logits")
            sequence.end(of_cap)
        return found
