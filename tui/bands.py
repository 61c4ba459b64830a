"""How a band looks: a mark, a word and a role, so that it can be told without any colour."""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.monitor.bands import mark
from memtop.supervisor.monitor.values import Band
from memtop.tui.line import Line, line

ROLES = {Band.SAFE: "safe", Band.EDGE: "edge", Band.DANGER: "danger", Band.UNKNOWN: "unknown"}
_WIDEST = max(len(f"{mark(b)} {b.value}") for b in (Band.SAFE, Band.EDGE, Band.DANGER))


def padded_tag(band: Band) -> Line:
    """The tag in a field of fixed width, so that what follows does not jump when the band changes."""
    text = f"{mark(band)} {band.value}"
    return line((text, ROLES[band]), " " * max(0, _WIDEST - len(text)))


def banded(fraction: float | None, band: Band) -> Line:
    """`84.7 %   · safe` in one piece, the number right-aligned."""
    text = units.percent(fraction)
    return line(" " * max(0, 7 - len(text)), (f"{text}   {mark(band)} {band.value}", ROLES[band]))
