"""Growing memory: what grows, when its pool is full, whether to restart the run before that, and
what filled a gauge."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Kind
from memtop.supervisor.monitor.values import Band
from memtop.supervisor.recovery.trend import Slope
from memtop.supervisor.recovery.values import Trend, TrendKind, TrendSubject

SOON_SECONDS = 120.0
"""A leak that fills its memory within this time is acted on at once."""
SAVE_MARGIN = 5
"""Updates after the next save for which the memory must last, so that the save completes."""
FEWEST_UPDATES = 100
"""Updates that an attempt must have done before a leak may restart it: more frequent restarts cost
more than they save."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a leak fills."""

    name: str
    """`GPU 0`, `host RAM`, `the memory group`."""
    left_bytes: int | None
    """None if not known."""


class Leak(NamedTuple):
    """A series that grows steadily."""

    subject: TrendSubject
    pool: str
    """Key of the pool that it fills."""
    slope: Slope
    by_update: bool
    """The series has one value per update; otherwise one per second."""
    spare_bytes: int = 0
    """What the series can grow by before it takes anything from the pool: for tensors, the
    allocator's cache."""


_PROCESSES = {"rank": "the ranks", "loader worker": "the loader workers", "other": "the run's other processes"}


def processes_of(role: str) -> str:
    """A role as text: `the loader workers`."""
    return _PROCESSES.get(role, role)


def describe(subject: TrendSubject) -> str:
    """The subject as text, for people only."""
    if subject.kind is TrendKind.SWAP_IN:
        return "swap-in"
    who = processes_of(subject.role or "other") if subject.rank is None else f"rank {subject.rank}"
    if subject.kind is TrendKind.HOST_ANONYMOUS:
        return f"anonymous memory of {who}"
    gpu = "the GPU" if subject.gpu_index is None else f"GPU {subject.gpu_index}"
    if subject.kind is TrendKind.GPU_USED:
        return gpu
    return f"{gpu} allocated by {who}" if subject.kind is TrendKind.GPU_ALLOCATED else f"{gpu} reserved by {who}"


def trends(leaks: Iterable[Leak], pools: Mapping[str, Pool], update: int | None) -> tuple[Trend, ...]:
    """One `Trend` per leak, the one that fills its pool first at the front. Leaks into one pool
    fill it together."""
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
            at_update = update + int(full_in * slope.per_second / slope.per_unit)
    return Trend(
        subject=leak.subject,
        what=describe(leak.subject),
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
        how = f"{_rate(slope.per_second)}/s, without a fall for {units.about(slope.seconds)}"
    text = f"{describe(leak.subject)} grows by {how}"
    if full_in is None or pool is None:
        return text
    at = "" if at_update is None else f", at update {at_update}"
    return f"{text}: {pool.name} is full in {units.about(full_in)}{at}"


def _rate(value: float) -> str:
    for unit in ("B", "KiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} MiB" if value < 1024 else f"{value / 1024:.1f} GiB"


def cause_of_death(found: Iterable[Trend], kind: Kind) -> tuple[str, ...]:
    """The leaks that filled the memory which ran out, one line each."""
    return tuple(
        f"{trend.what} grew by {_rate_of(trend)} until the end: a leak; a smaller batch does not fix it, find what the program "
        "keeps from update to update"
        for trend in that_filled(found, kind)
    )


def that_filled(found: Iterable[Trend], kind: Kind) -> tuple[Trend, ...]:
    """The trends of the memory that ran out: of the host, or of a GPU."""
    if kind.of_host:
        return tuple(trend for trend in found if trend.subject.kind is TrendKind.HOST_ANONYMOUS)
    return tuple(trend for trend in found if kind.of_gpu and trend.subject.kind.of_gpu)


def _rate_of(trend: Trend) -> str:
    if trend.bytes_per_update is not None:
        return f"{_rate(trend.bytes_per_update)} per update"
    return f"{_rate(trend.bytes_per_second)}/s"


def swap_trend(rate: float, share: float) -> Trend:
    """Sustained swapping: memory that running processes use was moved to disk.

    `rate` in bytes per second; `share` is the fraction of the last seconds in which memory was read
    back.
    """
    subject = TrendSubject(kind=TrendKind.SWAP_IN)
    return Trend(
        subject=subject,
        what=describe(subject),
        bytes_per_second=rate,
        confidence=share,
        message=f"{_rate(rate)}/s are read back from swap, in {units.percent(share, 0)} of the last seconds: "
        "the programs use more memory than the machine has",
    )


def must_act(
    found: Iterable[Trend], *, update: int | None, start_update: int, seconds: float, save_every: int | None
) -> Trend | None:
    """The leak that fills its memory within two minutes, or before the next save and its margin;
    None if there is none.

    None, too, while the attempt is too young to be restarted: it must have run for at least as long
    as the memory will still last. `update` and `start_update`: the newest and the first update of
    the attempt; `seconds`: how long it has run; `save_every`: updates between two saves, None if
    not known.
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


# --- a gauge in danger --------------------------------------------------------------------------

HELD_SAMPLES = 10
"""Consecutive samples (seconds) in the danger band before it is reported. The band's hysteresis
takes three of them."""
_KEPT_SECONDS = 300.0
_MOST_SAMPLES = 400
# Growth below this share of the gauge explains nothing.
_WORTH_SAYING = 0.005


class _MemorySample(NamedTuple):
    time: float
    parts: dict[str, int]


class DangerWatch:
    """Reports when a gauge stays in its danger band, and which of its parts grew."""

    def __init__(self, gauge: str) -> None:
        self._gauge = gauge
        self._rows: deque[_MemorySample] = deque(maxlen=_MOST_SAMPLES)
        self._held = 0

    def add(
        self, time: float, band: Band, fraction: float | None, total_bytes: int | None, parts: Mapping[str, int | None]
    ) -> str | None:
        """Add a sample (time in seconds). Returns one line once danger has lasted for HELD_SAMPLES;
        None otherwise."""
        self._rows.append(_MemorySample(time, {name: value for name, value in parts.items() if value is not None}))
        while self._rows[0].time < time - _KEPT_SECONDS:
            self._rows.popleft()
        if band is Band.UNKNOWN:
            return None  # an unknown sample neither ends the danger nor confirms it
        self._held = self._held + 1 if band is Band.DANGER else 0
        if self._held != HELD_SAMPLES:
            return None
        least = int(_WORTH_SAYING * total_bytes) if total_bytes else 1
        why = what_grew(list(self._rows), least)
        return f"{self._gauge} stays in danger, {units.percent(fraction)} of {units.size(total_bytes)}: {why}"


def what_grew(rows: list[_MemorySample], least: int = 1) -> str:
    """The one or two parts that grew the most: `cache grew 0.9 GiB in 40 s`. `least`: bytes below
    which growth is ignored."""
    first, last = rows[0], rows[-1]
    gains = {name: value - first.parts[name] for name, value in last.parts.items() if name in first.parts}
    # A part that is missing in the first sample has grown from zero.
    gains |= {name: value for name, value in last.parts.items() if name not in first.parts}
    grown = sorted((gain, name) for name, gain in gains.items() if gain >= least)
    if not grown:
        return f"no part of it grew in the last {last.time - first.time:.0f} s: it was full before"
    texts = [f"{name} grew {units.size(gain)} in {_in_seconds(rows, name, gain):.0f} s" for gain, name in reversed(grown[-2:])]
    return ", ".join(texts)


def _in_seconds(rows: list[_MemorySample], name: str, gain: int) -> float:
    """How long most of the growth took: from the last sample near the first value to the first one
    near the last value."""
    start = rows[0].parts.get(name, 0)
    values = [(row.time, row.parts.get(name, 0) - start) for row in rows]
    began = max((time for time, grown in values if grown <= 0.1 * gain), default=values[0][0])
    ended = min((time for time, grown in values if grown >= 0.9 * gain and time > began), default=values[-1][0])
    return ended - began
