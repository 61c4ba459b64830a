"""How the steps in the output relate to the updates that memtop's agent counts.

A program may print a line for each micro-batch, or count from 0: then one follows from the other.
A program that has resumed prints how far the whole training is, and the agent counts from 1: then
the output's own counter is the better one.
"""

from __future__ import annotations

import msgspec

_LARGEST = 4096
"""Micro-batches in one update, or updates in one line's step (an epoch)."""
_TIMES = 4
_SLACK = 2
"""Steps by which the two may differ: a program may count from 0, or print before the update."""


class Relation(msgspec.Struct, frozen=True, kw_only=True):
    """`updates = steps * updates_per_step / steps_per_update`, one of them being 1."""

    first: tuple[int, int] | None = None
    """A step in the output and the agent's updates then."""
    steps_per_update: int = 1
    updates_per_step: int = 1
    shift: int = 0
    """1 where the output counts from 0."""
    agrees: bool | None = None
    """Whether each follows from the other. None while that is not known. False: the output's
    counter is shown."""

    def after(self, step: int, updates: int | None, *, begins_at: int, lag: float = 0.0, last: bool = False) -> Relation:
        """The relation after a line with this step.

        `begins_at`: the first step of the attempt. `lag`: updates that may be on their way. `last`:
        the program has ended, so what is known now must do.
        """
        if not updates or self.agrees is not None:
            return self
        known = msgspec.structs.replace(self, first=self.first or (step, updates))
        assert known.first is not None
        shift = 1 if begins_at == 0 else 0
        steps, counted = step - known.first[0], updates - known.first[1]
        if abs(step + shift - updates) <= (0 if counted < 1 and not last else _SLACK + lag):
            return msgspec.structs.replace(known, shift=shift, agrees=True) if counted or last else known
        slack = _SLACK + lag
        if counted < _TIMES * slack and not last:
            return known
        for factor in (round(step / updates), round(steps / max(1, counted))):
            off = max(abs(step - factor * updates), abs(steps - factor * counted) if not last else 0)
            from_zero = not last or 2 * begins_at <= step
            if 1 < factor <= _LARGEST and off <= slack * factor and from_zero:
                return msgspec.structs.replace(known, steps_per_update=factor, agrees=True)
        factor = round(updates / step) if step else 0
        if 1 < factor <= _LARGEST and abs(factor * step - updates) <= slack + factor:
            return msgspec.structs.replace(known, updates_per_step=factor, agrees=True)
        return msgspec.structs.replace(known, agrees=False)

    def update(self, step: int) -> int:
        """The agent's update at this step."""
        return (step * self.updates_per_step) // self.steps_per_update + self.shift

    def total(self, steps: int) -> int:
        return (steps * self.updates_per_step) // self.steps_per_update
