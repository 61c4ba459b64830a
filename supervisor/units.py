"""Formats numbers for display. All other code uses bytes, seconds and fractions."""

from __future__ import annotations

from typing import NamedTuple

GIB = 1024**3
UNKNOWN = "–"


def gib(size_bytes: float | None, digits: int = 1) -> str:
    """Bytes as GiB without the unit, or a dash if unknown."""
    return UNKNOWN if size_bytes is None else f"{size_bytes / GIB:.{digits}f}"


def size(size_bytes: float | None) -> str:
    """Bytes in the largest binary unit in which the number is at least 1: `812 MiB`, `1.4 GiB`,
    `728.0 TiB`."""
    if size_bytes is None:
        return UNKNOWN
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    for unit in ("GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def at_least(size_bytes: float | None) -> str:
    """A sum of which a part is not known: `≥ 10.7 GiB`, or a dash if nothing is known: every sum is
    0 or more."""
    return f"≥ {size(size_bytes)}" if size_bytes else UNKNOWN


class Scale(NamedTuple):
    """A common unit for a total and its parts."""

    unit: str
    unit_bytes: int
    digits: int

    def number(self, size_bytes: float | None) -> str:
        """Bytes as a number in this unit, or a dash if unknown."""
        return UNKNOWN if size_bytes is None else f"{size_bytes / self.unit_bytes:.{self.digits}f}"


def scale(whole_bytes: float | None) -> Scale:
    """GiB, but MiB if the total is less than 1 GiB: `64 MiB` of shared memory, not `0.1 GiB`."""
    small = whole_bytes is not None and 0 < whole_bytes < GIB
    return Scale("MiB", GIB // 1024, 0) if small else Scale("GiB", GIB, 1)


def used_of(used_bytes: float | None, whole_bytes: float | None) -> str:
    """`24.0 / 31.2 GiB`, `38 / 64 MiB`."""
    of = scale(whole_bytes)
    return f"{of.number(used_bytes)} / {of.number(whole_bytes)} {of.unit}"


def energy(joules: float | None) -> str:
    """`1.24 kWh`, `36 Wh`."""
    if joules is None:
        return UNKNOWN
    watt_hours = joules / 3600
    return f"{watt_hours / 1000:.2f} kWh" if watt_hours >= 1000 else f"{watt_hours:.3g} Wh"


def processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"


def percent(fraction: float | None, digits: int = 1) -> str:
    return UNKNOWN if fraction is None else f"{fraction * 100:.{digits}f} %"


def shares(parts: dict[str, float]) -> dict[str, int]:
    """Parts in whole percents of their sum, which must not be 0. They add up to 100: what rounding
    leaves goes to those that lost most."""
    exact = {name: 100 * value / sum(parts.values()) for name, value in parts.items()}
    whole = {name: int(value) for name, value in exact.items()}
    lost = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in lost[: 100 - sum(whole.values())]:
        whole[name] += 1
    return whole


def change(fraction: float, digits: int = 1) -> str:
    """A relative change, with its sign: `+12.5 %`."""
    return f"{fraction * 100:+.{digits}f} %"


def duration(seconds: float | None) -> str:
    """Seconds as HH:MM:SS, with the number of days in front from 24 h on."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


def about(seconds: float) -> str:
    """A duration in one number: `40 s`, `14 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def rate(value: float | None) -> str:
    """A number per second: `31.2`. Below 1 it has two significant digits: `0.027`."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value >= 1 or value <= 0 else f"{value:.2g}"


def thousands(value: float | None) -> str:
    """A large number per second: `55.9 k`, `8 200`; below 10 as `rate`."""
    if value is None or value < 10:
        return rate(value)
    return f"{value / 1000:.1f} k" if value >= 10_000 else count(value)


def count(number: float | None) -> str:
    """A large count: `44 640`. From a million on: `1.2 M`."""
    if number is None:
        return UNKNOWN
    return f"{number / 1e6:.1f} M" if abs(number) >= 1e6 else f"{number:,.0f}".replace(",", " ")
