"""A gauge that stays in its danger band: when to say so, and what has grown to bring it there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from memtop.supervisor import units
from memtop.supervisor.monitor.values import Band

HELD_SAMPLES = 10
"""Samples (seconds) in danger before it is told: three is what the band's hysteresis takes, the rest is the holding."""
_KEPT_SECONDS = 300.0
_MOST_ROWS = 400
# Less growth than this share of the gauge explains nothing.
_WORTH_SAYING = 0.005


class _Row(NamedTuple):
    time: float
    parts: dict[str, int]


class DangerWatch:
    """One gauge: its band, and the parts of what it measures."""

    def __init__(self, gauge: str) -> None:
        self._gauge = gauge
        self._rows: deque[_Row] = deque(maxlen=_MOST_ROWS)
        self._held = 0

    def add(
        self, time: float, band: Band, fraction: float | None, total_bytes: int | None, parts: Mapping[str, int | None]
    ) -> str | None:
        """Take a sample (time in seconds); one line when danger has been held for long enough, once until it is left."""
        self._rows.append(_Row(time, {name: value for name, value in parts.items() if value is not None}))
        while self._rows[0].time < time - _KEPT_SECONDS:
            self._rows.popleft()
        if band is Band.UNKNOWN:
            return None  # nothing is known of this moment: it neither ends the danger nor proves it
        self._held = self._held + 1 if band is Band.DANGER else 0
        if self._held != HELD_SAMPLES:
            return None
        least = int(_WORTH_SAYING * total_bytes) if total_bytes else 1
        why = what_grew(list(self._rows), least)
        return f"{self._gauge} stays in danger, {units.percent(fraction)} of {units.size(total_bytes)}: {why}"


def what_grew(rows: list[_Row], least: int = 1) -> str:
    """The part that grew the most over the rows, by how much, and in which time it did so: `cache grew 0.9 GiB in 40 s`."""
    first, last = rows[0], rows[-1]
    gains = {name: value - first.parts[name] for name, value in last.parts.items() if name in first.parts}
    # A part that was not there at the beginning has grown from nothing.
    gains |= {name: value for name, value in last.parts.items() if name not in first.parts}
    grown = sorted((gain, name) for name, gain in gains.items() if gain >= least)
    if not grown:
        return f"nothing of it grew in the last {last.time - first.time:.0f} s: it was full before"
    texts = [f"{name} grew {units.size(gain)} in {_in_seconds(rows, name, gain):.0f} s" for gain, name in reversed(grown[-2:])]
    return ", ".join(texts)


def _in_seconds(rows: list[_Row], name: str, gain: int) -> float:
    """How long the part took for most of its growth: from the last time it was near its beginning to the first near its end."""
    start = rows[0].parts.get(name, 0)
    values = [(row.time, row.parts.get(name, 0) - start) for row in rows]
    began = max((time for time, grown in values if grown <= 0.1 * gain), default=values[0][0])
    ended = min((time for time, grown in values if grown >= 0.9 * gain and time > began), default=values[-1][0])
    return ended - began
