"""Safety bands of a memory fraction, and the hysteresis that keeps a value near a border from
flickering."""

from __future__ import annotations

from memtop.supervisor.monitor.values import Band

EDGE_FROM = 0.85
"""Lowest fraction of the edge band (inclusive)."""
DANGER_ABOVE = 0.90
"""Highest fraction of the edge band (inclusive). Above it is danger."""

MARGIN = 0.01
"""How far a value must be past a border for the band to change at once, as a fraction."""
STAY_SAMPLES = 3
"""After this many samples in a row past a border, the band changes even within the margin."""

_ORDER = (Band.SAFE, Band.EDGE, Band.DANGER)
_BORDERS = (EDGE_FROM, DANGER_ABOVE)
# 0.91 - 0.90 is 0.010000000000000009 and 0.90 - 0.89 is 0.0099999...: both must count as one
# percentage point.
_ROUNDING = 1e-9

_MARKS = {Band.SAFE: "·", Band.EDGE: "^", Band.DANGER: "!!", Band.UNKNOWN: "?"}


def band_of(fraction: float | None) -> Band:
    """The band of a fraction (0-1) without hysteresis: safe < 0.85 <= edge <= 0.90 < danger."""
    if fraction is None or fraction != fraction:
        return Band.UNKNOWN
    if fraction < EDGE_FROM:
        return Band.SAFE
    return Band.DANGER if fraction > DANGER_ABOVE else Band.EDGE


def mark(band: Band) -> str:
    """The sign shown next to the colour, so that a band can be recognized without colours."""
    return _MARKS[band]


class Hysteresis:
    """The band of one gauge over time.

    The band changes if the value is at least one percentage point past a border, or if it stays on
    the other side for three samples. For a missing value it is unknown; the band before it is
    remembered.
    """

    def __init__(self) -> None:
        self._band = Band.UNKNOWN
        self._beyond = 0

    def update(self, fraction: float | None) -> Band:
        """Add a sample (0-1, None if unknown). Returns the band to show."""
        raw = band_of(fraction)
        if fraction is None or raw is Band.UNKNOWN:
            return Band.UNKNOWN
        if self._band is Band.UNKNOWN or raw is self._band:
            return self._settle(raw)
        reached = _well_past(self._band, raw, fraction)
        if reached is not self._band:
            # A jump may be well past one border but only just past the next, which then needs more
            # samples.
            self._beyond = 0 if reached is raw else 1
            self._band = reached
            return reached
        self._beyond += 1
        return self._settle(raw) if self._beyond >= STAY_SAMPLES else self._band

    def _settle(self, band: Band) -> Band:
        self._band = band
        self._beyond = 0
        return band


def _well_past(current: Band, raw: Band, fraction: float) -> Band:
    """The furthest band from `current` towards `raw` whose border the value has passed by at least
    the margin."""
    here, goal = _ORDER.index(current), _ORDER.index(raw)
    while here < goal and fraction - _BORDERS[here] >= MARGIN - _ROUNDING:
        here += 1
    while here > goal and _BORDERS[here - 1] - fraction >= MARGIN - _ROUNDING:
        here -= 1
    return _ORDER[here]
