"""The speed of a run and the time that it took, for the dashboard, the lists, the reports and the
replay alike. Pure.

The speed is that of the newest updates of an attempt: what they have done, divided by the time from
the first of them to the last, with evaluations and saves between them. A mean of all updates is
another number (`Configuration.samples_per_second`); people see it as `mean`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memtop.supervisor import units

if TYPE_CHECKING:
    from memtop.supervisor.run.record.ledger import Attempt

NEWEST = 20
"""Enough updates to be steady, few enough to follow a change."""


class Done(NamedTuple):
    """One update that is done."""

    time: float
    """Seconds since the epoch."""
    update: int
    samples_seen: int | None
    """None where the program does not count samples."""
    tokens: int | None
    """Of this update."""


class Speed(NamedTuple):
    """None is not known."""

    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    pace_seconds: float | None = None
    """From one update to the next."""


def words(samples_per_second: float | None, tokens_per_second: float | None) -> str:
    """`31.2 samples/s, 55.9 k tok/s`, as far as they are known."""
    parts = [] if samples_per_second is None else [f"{units.rate(samples_per_second)} samples/s"]
    parts += [] if tokens_per_second is None else [f"{units.thousands(tokens_per_second)} tok/s"]
    return ", ".join(parts)


def speed(updates: Sequence[Done], effective_batch: int | None) -> Speed:
    """The speed of the newest of these updates, in their order; unknown before there are two.

    `effective_batch`: the samples of an update, for a program that does not count its samples.
    """
    newest = updates[-NEWEST:]
    if len(newest) < 2 or newest[-1].time <= newest[0].time:
        return Speed()
    first, last = newest[0], newest[-1]
    seconds = last.time - first.time
    done = last.update - first.update
    tokens = sum(one.tokens or 0 for one in newest[1:])
    samples: int | None = None
    if first.samples_seen is not None and last.samples_seen is not None:
        samples = last.samples_seen - first.samples_seen
    elif effective_batch and done > 0:
        samples = effective_batch * done
    return Speed(
        samples_per_second=None if samples is None else samples / seconds,
        tokens_per_second=tokens / seconds if tokens else None,
        pace_seconds=seconds / done if done > 0 else None,
    )


def ran_seconds(attempts: Iterable[Attempt], *, until: float | None = None) -> float | None:
    """How long these attempts ran, together: the time between them does not count. None if no end
    is known. `until`: for one that still runs."""
    ends = ((one.started, until if one.ended is None else one.ended) for one in attempts if one.launched)
    lasted = [max(0.0, end - started) for started, end in ends if end is not None]
    return sum(lasted) if lasted else None
