"""Small words that several panels share."""

from __future__ import annotations

BOTTLENECKS = {"data": "data-bound", "compute": "compute-bound", "launch": "launch-bound", "swap": "swapping"}
"""What a run spends its time on, as one word; nothing where it is not known."""


def age(seconds: float) -> str:
    """`12 s`, `4 min`, `3 h`, `2 days`: enough to judge, short enough for a line."""
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
