"""Where the training is by one counter in a program's output: the counter may begin again in each
epoch."""

from __future__ import annotations

import msgspec

from memtop.supervisor.run.output.lines import Line


class Counter(msgspec.Struct, kw_only=True):
    """The counter in the lines of one shape."""

    step: int | None = None
    """The newest, as the program writes it."""
    total: int | None = None
    base: int = 0
    """Steps of the epochs before, where the program begins again at 0 in each."""
    offset: int = 0
    """Steps of the part of the program before this one, which had a counter of its own."""
    epoch: float | None = None
    first_epoch: int = 1
    per_epoch: bool | None = None
    """Whether the counter begins again in each epoch; None while that is not known."""
    grown: int = 0
    position: int | None = None
    """The newest step of the training."""
    target: int | None = None

    def move(self, line: Line, epoch: float | None, epochs: int | None) -> bool:
        """Count one more line. False if it repeats the step, or comes late.

        `epoch`, `epochs`: in this line, or in the newest line that names nothing else.
        """
        count, before = line.step, self.step
        assert count is not None
        if epoch is not None and epoch < 1:
            self.first_epoch = 0
        if before is not None and count < before:
            if 2 * count > before and epoch == self.epoch:
                return False  # of another rank or thread, written late
            from_zero = count == 0 and not line.is_bar and self.position == self.offset + self.base + before
            self.base += self.total or before + from_zero
            self.per_epoch = self.per_epoch or epoch is not None
        elif before is not None and epoch is not None and self.epoch is not None and epoch > self.epoch:
            self.per_epoch = False  # it goes on
        elif before is None:
            self.per_epoch = _begins_again(line, epochs)
        self.step, self.total, self.epoch = count, line.total, epoch
        position = self.base + count
        target = line.total if not self.base else None
        if self.per_epoch and line.total and epoch is not None:
            position = (int(epoch) - self.first_epoch) * line.total + count
            target = epochs * line.total if epochs else None
        position += self.offset
        if self.position is not None and position <= self.position:
            return False
        self.grown += self.position is not None
        self.position, self.target = position, None if target is None else target + self.offset
        return True

    def follow(self, offset: int) -> None:
        """The part of the program before this one has done so many steps."""
        self.offset += offset
        self.position = None if self.position is None else self.position + offset
        self.target = None if self.target is None else self.target + offset


def _begins_again(line: Line, epochs: int | None) -> bool | None:
    """Whether a counter is that of one epoch, as far as its first line shows."""
    if line.total is None:
        return None
    if line.epoch is not None and "n/m" in line.shape:
        return True
    return True if epochs is not None and epochs > 1 else None
