"""Learns from several lines of a program's output which numbers are those of its training.

One line proves little: `step 3` may be a stage of a download. A shape of line counts once two of
its lines move together: there is a loss, and the step has grown. Progress bars show no loss. The
training bar is the one that has moved on from one line with a loss to the next, or that moves as
the updates that memtop's agent counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from memtop.supervisor.clean import clean
from memtop.supervisor.run.output.counter import Counter
from memtop.supervisor.run.output.lines import Line, declared_by, read_line

_SHAPES = 64
"""Shapes of lines that are remembered."""
_RECENT = 20
_SILENT_LINES, _SILENT_BARS = 5, 50
"""Another shape takes over when it has so many lines with no line of the present one between. A bar
is drawn more often than a line is written."""
_FACTORS = 16
_PAIRS = 3
_UNPLACED = 200


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The training at one line of the output."""

    step: int
    total: int | None = None
    loss: float | None = None
    """None if it is not finite, or if the line has none."""
    not_finite: bool = False
    learning_rate: float | None = None
    epoch: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    time: float
    """When memtop read the line, in seconds since the epoch."""


class Shape(Counter, kw_only=True):
    """What is known about the lines of one shape."""

    waiting: list[Row] = msgspec.field(default_factory=list)
    """Rows until the shape is learned."""
    at_loss: int | None = None
    """The position at the newest line with a loss alone."""
    before_loss: int | None = None
    """The same of the line before that."""
    with_loss: int = 0
    """How often it had moved on from one such line to the next."""
    pairs: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """Positions, and the updates that the agent had counted then."""
    unanswered: int = 0
    """Lines since the newest line of the shape that counts."""
    with_evaluation: bool = False
    """Whether its lines are about an evaluation too."""
    counted: bool = False
    """Whether this shape has counted before another one did."""
    is_interlude: bool = False
    """Whether the shape that counted before it went on after it, as after an evaluation."""


class Learner(msgspec.Struct, kw_only=True):
    """Everything that was learned so far; it can be written and read again."""

    shapes: dict[str, Shape] = {}
    counts: str | None = None
    """The shape whose steps are those of the training."""
    losses: str | None = None
    """The shape with the loss; the same, or lines without a step: `{'loss': 2.3, 'epoch': 0.1}`."""
    example: str | None = None
    """The line by which it was learned."""
    epoch: float | None = None
    epochs: int | None = None
    """The newest line that names nothing but the epoch."""
    unplaced: list[Line] = []
    """Lines with a loss alone since the newest line with a step."""
    placed: list[Line] = []
    """Those before them."""
    text: str = ""
    """The newest of them."""
    loss_step: int = 0
    """The step of the newest row of such a line."""
    newest: Row | None = None
    recent: list[tuple[float, int]] = []
    """Times and steps of the newest rows."""
    certain: bool = False
    declared: int | None = None
    """How many steps there will be, by the settings that the program prints at its start, or else
    by the options of its command."""
    declared_epochs: int | None = None
    from_zero: list[str] = []
    """Shapes in which earlier attempts counted their epochs from 0. A program that has resumed does
    not show that."""
    counted_at: int | None = None
    """The updates that the agent had counted at the newest line that counts."""

    @classmethod
    def of(cls, command: Sequence[str], before: Learner | None = None) -> Learner:
        """Of a program that was started so. `before`: of its attempt before this one."""
        declared, declared_epochs = declared_by(command)
        learner = cls(declared=declared, declared_epochs=declared_epochs)
        if before is not None:
            now = [name for name, shape in before.shapes.items() if not shape.first_epoch]
            learner.from_zero = list(dict.fromkeys((*before.from_zero, *now)))
        return learner

    def take(
        self, lines: Iterable[str], now: float, *, updates: int | None = None, pattern: re.Pattern[str] | None = None
    ) -> list[Row]:
        """The rows of these lines. `updates`: how many the agent has counted until now."""
        rows = [row for text in lines for row in self._take(text, now, updates, pattern)]
        return [*rows, *self._place(now)]

    def begin_again(self) -> None:
        """The program starts anew within the output: its counters may go back."""
        for shape in self.shapes.values():
            shape.step = shape.position = shape.epoch = shape.at_loss = shape.before_loss = None
            shape.base, shape.waiting, shape.pairs = 0, [], []
        self.newest, self.recent, self.unplaced, self.placed, self.loss_step = None, [], [], [], 0

    def _take(self, text: str, now: float, updates: int | None, pattern: re.Pattern[str] | None) -> Iterator[Row]:
        line = read_line(text, pattern)
        if line is None or (line.evaluated and not (line.trained and self._is_provisional)):
            return
        if line.declared is not None or line.declared_epochs is not None:
            if self.counts is None:
                self.declared = line.declared or self.declared
                self.declared_epochs = line.declared_epochs or self.declared_epochs
            return
        if self.certain and not line.certain:
            # The program says where it is; another line may still have the loss.
            line = replace(line, step=None)
        elif line.step is None and self._counts_epochs(line):
            line = replace(line, shape=f"{line.shape} of an epoch", step=whole_of(line.epoch), total=line.epochs, epoch=None)
        if line.step is None and line.loss is None:
            self.epoch, self.epochs = line.epoch, line.epochs
            return
        shape = self._shape_of(line)
        if line.step is None:
            self.unplaced, self.text = [*self.unplaced, line][-_UNPLACED:], text
            return
        yield from self._place(now)
        epoch, epochs = (line.epoch, line.epochs) if line.epoch is not None else (self.epoch, self.epochs)
        if shape.move(line, epoch, epochs or self.declared_epochs):
            yield from self._position(text, shape, line, now, updates)

    def _counts_epochs(self, line: Line) -> bool:
        """Whether the epochs are the only thing that the program counts."""
        counted = any(shape.step is not None and not name.endswith("of an epoch") for name, shape in self.shapes.items())
        return line.loss is not None and not counted and whole_of(line.epoch) is not None

    def _position(self, text: str, shape: Shape, line: Line, now: float, updates: int | None) -> Iterator[Row]:
        """A line with a step that has grown."""
        row = self._row(shape, line, now)
        if self.counts == line.shape or self._replaces(shape, line, updates):
            if self.counts != line.shape:
                row = self._hand_over(text, shape, line, row)
            for other in self.shapes.values():
                other.unanswered = 0
            self.counted_at = updates
            waiting, shape.waiting = shape.waiting, []
            for one in (*waiting, row):
                yield self._noted(one)
        elif line.loss is not None:
            shape.waiting = [*shape.waiting, row][-_SILENT_BARS:]
            shape.unanswered += 1
        elif self.counts is None:
            if updates is not None and shape.position is not None:
                shape.pairs = [*shape.pairs[-_FACTORS:], (shape.position, updates)]
            # A learning rate beside a step belongs to a training.
            if _co_move(shape.pairs) or (shape.grown and line.learning_rate is not None):
                self._learn(text, line.shape, self.losses)
                yield self._noted(row)

    def _replaces(self, shape: Shape, line: Line, updates: int | None) -> bool:
        """Whether this shape counts from now on."""
        if line.certain and line.step is not None:
            return True
        if not shape.grown or line.loss is None or shape.is_interlude:
            return False
        if self.counts is None or self._is_provisional or shape.counted:
            return True
        if None not in (updates, self.counted_at) and updates == self.counted_at:
            return False  # nothing is trained while this shape counts
        # A program in two parts prints other lines in the second; a bar gives way to a line.
        return shape.unanswered >= (_SILENT_BARS if line.is_bar else _SILENT_LINES)

    def _shape_of(self, line: Line) -> Shape:
        """The line's shape, which is the newest from now on. Of too many, the oldest is
        forgotten."""
        shape = self.shapes.pop(line.shape, None)
        if shape is None:
            shape = Shape(with_evaluation=line.evaluated, first_epoch=0 if line.shape in self.from_zero else 1)
            if len(self.shapes) >= _SHAPES:
                del self.shapes[next(name for name in self.shapes if name not in (self.counts, self.losses))]
        self.shapes[line.shape] = shape
        return shape

    @property
    def _is_provisional(self) -> bool:
        """Whether no lines with a loss are known but those of evaluations."""
        return self.losses is None or self.shapes[self.losses].with_evaluation

    def _hand_over(self, text: str, shape: Shape, line: Line, row: Row) -> Row:
        """This shape counts from now on; the result is its newest row."""
        before = self.shapes.get(self.counts or "")
        if shape.counted and before is not None:
            before.is_interlude = True
        elif self.losses is not None and self.newest is not None and before is not None and not line.certain:
            before.counted = True
            first = shape.waiting[0].step if shape.waiting else row.step
            if first <= self.newest.step and not before.with_evaluation:
                # A second part of the program. It goes on from the end of the first.
                after = self.newest.step
                shape.follow(after)
                shape.waiting = [_later(one, after) for one in shape.waiting]
                row = _later(row, after)
        self._learn(text, line.shape, line.shape if line.loss is not None else self.losses, certain=line.certain)
        return row

    def _place(self, now: float) -> Iterator[Row]:
        """Lines with a loss and no step: they belong to the newest step of the training bar."""
        lines, self.unplaced = self.unplaced, []
        if not lines or (self.losses == self.counts and self.counts is not None):
            return
        newest = lines[-1]
        for name, shape in self.shapes.items():
            if shape.position is not None and name != newest.shape:
                moved = shape.at_loss is not None and shape.position > shape.at_loss
                shape.with_loss = shape.with_loss + 1 if moved else 0
                shape.before_loss, shape.at_loss = shape.at_loss, shape.position
        before, self.placed = self.placed, lines
        if self.counts is None or self.losses is None:
            counter = self._moving()
            if counter is None:
                return
            self._learn(self.text, counter, newest.shape)
            yield from self._at(self.shapes[counter], before, self.shapes[counter].before_loss, now)
        if self.counts is not None:
            counted = self.shapes[self.counts]
            yield from self._at(counted, lines, counted.position, now)

    def _at(self, counted: Shape, lines: list[Line], position: int | None, now: float) -> Iterator[Row]:
        """The rows of lines that were written together, the last of them at this position.

        A program whose output goes through a buffer writes several at once. Their epochs tell how
        far apart they are.
        """
        known = [line for line in lines if line.shape == self.losses]
        if not known or position is None:
            return
        last = known[-1].epoch
        for line in known[:-1]:
            if last and line.epoch is not None and line.epoch < last:
                step = round(position * line.epoch / last)
                if self.newest is None or self.newest.loss is None or step > self.loss_step:
                    yield self._with_loss(replace(self._row(counted, line, now), step=step))
        yield self._with_loss(replace(self._row(counted, known[-1], now), step=position))

    def _with_loss(self, row: Row) -> Row:
        self.loss_step = row.step
        return self._noted(row)

    def _moving(self) -> str | None:
        """The counter that moves with the lines of the loss: of several, the one that ends last."""
        moving = [(shape.target or 0, name) for name, shape in self.shapes.items() if shape.with_loss]
        return max(moving)[1] if moving else None

    def _learn(self, text: str, counts: str, losses: str | None, *, certain: bool = False) -> None:
        self.counts, self.losses, self.certain = counts, losses, self.certain or certain
        if losses is not None:
            self.shapes.setdefault(losses, Shape())  # many others may have come since its line
        self.example = " ".join(clean(text).split())[:100]
        self.recent = []

    def _row(self, shape: Shape, line: Line, now: float) -> Row:
        assert shape.position is not None
        is_finite = line.loss is not None and math.isfinite(line.loss) and abs(line.loss) <= 1e100
        return Row(
            step=shape.position,
            total=shape.target if shape.target is None or shape.target >= shape.position else None,
            loss=line.loss if is_finite else None,
            not_finite=line.loss is not None and not is_finite,
            learning_rate=line.learning_rate,
            epoch=line.epoch if line.epoch is not None else self.epoch,
            step_seconds=line.step_seconds,
            tokens_per_second=line.tokens_per_second,
            time=now,
        )

    def _noted(self, row: Row) -> Row:
        """The row, with what the rows before it tell."""
        if not self.recent or row.step > self.recent[-1][1]:
            # Of lines that were read together, nobody knows when each was written.
            together = bool(self.recent) and self.recent[-1][0] == row.time
            before = self.recent[:-1] if together else self.recent
            self.recent = [*before[-_RECENT + 1 :], (row.time, row.step)]
        if row.total is None:
            row = replace(row, total=self._total_beside(row))
        newest = self.newest
        if newest is not None and row.loss is None and not row.not_finite:
            # A bar moves on without a new loss.
            kept = {name: getattr(newest, name) for name in ("loss", "not_finite", "learning_rate", "epoch")}
            self.newest = replace(row, **{name: value for name, value in kept.items() if not getattr(row, name)})
        else:
            self.newest = row
        return row

    def _total_beside(self, row: Row) -> int | None:
        """The total for lines of steps that name none: the end of a bar that moves as the steps do,
        or what the program has printed at its start."""
        for shape in self.shapes.values():
            if shape.target and shape.grown >= _PAIRS and shape.position is not None and abs(shape.position - row.step) <= 1:
                return shape.target
        counted = self.shapes[self.counts] if self.counts is not None else None
        begins_again = counted is None or counted.per_epoch or counted.base
        return self.declared if self.declared is not None and row.step <= self.declared and not begins_again else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of one step: as the output says, else as its lines come in."""
        if self.newest is not None and self.newest.step_seconds is not None:
            return self.newest.step_seconds
        if len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return None
        (begun, first), (ended, last) = self.recent[0], self.recent[-1]
        return (ended - begun) / (last - first) if last > first else None


def _later(row: Row, steps: int) -> Row:
    return replace(row, step=row.step + steps, total=None if row.total is None else row.total + steps)


def _co_move(pairs: list[tuple[int, int]]) -> bool:
    """Whether a counter moves as the agent's updates do, or a whole number of times as fast."""
    if len(pairs) < _PAIRS:
        return False
    (first, since), (last, until) = pairs[0], pairs[-1]
    if until - since < _FACTORS:
        return False
    ratio = (last - first) / (until - since)
    return 1 <= round(ratio) <= _FACTORS and abs(ratio - round(ratio)) <= 0.1


def whole_of(value: float | None) -> int | None:
    return int(value) if value is not None and value == int(value) else None
