"""From growth to a warning and a decision: what grows, when its pool is full, and whether something must be done before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.recovery.trend import Slope
from memtop.supervisor.wire import Trend

SOON_SECONDS = 120.0
"""A pool that is full within this time is full soon."""
SAVE_MARGIN = 5
"""Updates after the next save that the memory must still last, so that the save is whole and another one can follow."""
FEWEST_UPDATES = 100
"""Updates of an attempt before a leak may restart it: a restart that comes more often costs more than it gives."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """What the growth fills."""

    name: str
    """`GPU 0`, `host RAM`, `the memory group`"""
    left_bytes: int | None
    """None: not known."""


class Leak(NamedTuple):
    """A series that grows, by its slope."""

    what: str
    """`anonymous memory of rank 0`"""
    pool: str
    """Key of the pool that it fills."""
    slope: Slope
    by_update: bool
    """Followed from update to update; otherwise by time alone."""
    spare_bytes: int = 0
    """What it may take before the pool gives anything: the allocator's cache, for allocated memory."""


def trends(leaks: Iterable[Leak], pools: Mapping[str, Pool], update: int | None) -> tuple[Trend, ...]:
    """One `Trend` for each, the nearest end first. Leaks into the same pool fill it together."""
    leaks = list(leaks)
    rates: dict[str, float] = {}
    for leak in leaks:
        rates[leak.pool] = rates.get(leak.pool, 0.0) + leak.slope.per_second
    found = [_trend(leak, pools.get(leak.pool), rates[leak.pool], update) for leak in leaks]
    return tuple(sorted(found, key=lambda trend: (trend.full_in_seconds is None, trend.full_in_seconds or 0.0)))


def _trend(leak: Leak, pool: Pool | None, rate: float, update: int | None) -> Trend:
    slope = leak.slope
    full_in = at_update = None
    if pool is not None and pool.left_bytes is not None:
        left = pool.left_bytes + leak.spare_bytes
        full_in = left / rate
        if leak.by_update and update is not None:
            # As many updates as this rate makes in that time.
            at_update = update + int(full_in * slope.per_second / slope.per_unit)
    return Trend(
        what=leak.what,
        bytes_per_second=slope.per_second,
        bytes_per_update=slope.per_unit if leak.by_update else None,
        confidence=slope.confidence,
        full_in_seconds=full_in,
        full_at_update=at_update,
        message=_message(leak, pool, full_in, at_update),
    )


def _message(leak: Leak, pool: Pool | None, full_in: float | None, at_update: int | None) -> str:
    slope = leak.slope
    if leak.by_update:
        how = f"{_rate(slope.per_unit)} per update ({_rate(slope.per_second)}/s), without a fall for {slope.span:.0f} updates"
    else:
        how = f"{_rate(slope.per_second)}/s, without a fall for {_time(slope.seconds)}"
    text = f"{leak.what} grows by {how}"
    if full_in is None or pool is None:
        return text
    at = "" if at_update is None else f", at update {at_update}"
    return f"{text}: {pool.name} is full in {_time(full_in)}{at}"


def _rate(value: float) -> str:
    for unit in ("B", "KiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} MiB" if value < 1024 else f"{value / 1024:.1f} GiB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def cause_of_death(found: Iterable[Trend], kind: Kind) -> tuple[str, ...]:
    """What grew until a program died of this kind of memory, a line for each: it is what is to be mended."""
    return tuple(
        f"{trend.what} grew by {_rate_of(trend)} until the end: a leak; a smaller batch cures none, find what is kept from "
        "update to update"
        for trend in that_filled(found, kind)
    )


def that_filled(found: Iterable[Trend], kind: Kind) -> tuple[Trend, ...]:
    """Those that filled the memory which ran out: the host's, or a card's."""
    host = kind in (Kind.HOST_OOM_ALLOC, Kind.HOST_OOM_KILLED)
    return tuple(
        trend
        for trend in found
        if trend.what != SWAP_IN and (host or kind.of_gpu) and trend.what.startswith(OF_HOST_MEMORY) == host
    )


OF_HOST_MEMORY, SWAP_IN = "anonymous memory", "swap-in"
"""How `Trend.what` begins for the host's memory, and what it is for swapping."""


def _rate_of(trend: Trend) -> str:
    if trend.bytes_per_update is not None:
        return f"{_rate(trend.bytes_per_update)} per update"
    return f"{_rate(trend.bytes_per_second)}/s"


def swap_trend(rate: float, share: float) -> Trend:
    """Sustained swapping in: no growth, but the memory of processes that run is on the disk."""
    return Trend(
        what=SWAP_IN,
        bytes_per_second=rate,
        confidence=share,
        message=f"{_rate(rate)}/s are read back from swap, in {units.percent(share, 0)} of the last seconds: "
        "more memory is in use than there is",
    )


def must_act(
    found: Iterable[Trend], *, update: int | None, start_update: int, seconds: float, save_every: int | None
) -> Trend | None:
    """The leak that will have filled its memory before the next save and its margin, or within two minutes; None if there is
    none, or if this attempt is too young to be restarted for it: it must have lasted for as long as it still would.

    `update` and `start_update`: where the attempt is and where it began; `seconds`: for how long it has run; `save_every`:
    updates between two saves.
    """
    if update is None or update - start_update < FEWEST_UPDATES:
        return None
    last = None if not save_every else (update // save_every + 1) * save_every + SAVE_MARGIN
    for trend in found:
        if trend.full_in_seconds is None or trend.full_in_seconds > seconds:
            continue
        soon = trend.full_in_seconds <= SOON_SECONDS
        before_save = last is not None and trend.full_at_update is not None and trend.full_at_update <= last
        if soon or before_save:
            return trend
    return None
