"""What the output of a program says about its training."""

from __future__ import annotations

import msgspec


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The newest numbers. None: the output does not say."""

    attempt: int
    first: int
    """The first step that the attempt has printed."""
    steps_of_epoch: int | None = None
    """If the program's counter begins again in each epoch, which `first` and `step` do not."""
    step: int
    """As the program counts."""
    update: int
    total_updates: int | None = None
    agrees: bool | None = None
    """Whether the program's steps follow from the updates that memtop's agent counts. None while
    that is not known, or without an agent. False, too, if its workers have begun again: then
    their agents count anew."""
    steps_per_update: int = 1
    """More than 1 if the program counts micro-batches."""
    loss: float | None = None
    best_loss: float | None = None
    not_finite: bool = False
    """The loss is nan or infinite."""
    learning_rate: float | None = None
    epoch: float | None = None
    step_seconds: float | None = None
    """Of one update."""
    tokens_per_second: float | None = None
    time: float
    """When the line was read, in seconds since the epoch."""
    example: str = ""
    """The line by which memtop has learned where the numbers are."""
    printed: dict[str, int] = {}
    """Settings that the program has named in its output, by the names of its profile."""
    log: str | None = None
    """The program's own log file, if the numbers are from there."""
    again: bool = False
    """An earlier supervisor has read this."""
