"""Batch arithmetic: effective batch E = B x A x W, and the ways to split it exactly."""

from __future__ import annotations

import math


def exact_splits(effective_batch: int, world_size: int = 1) -> list[tuple[int, int]]:
    """All (B, A) with B x A x W equal to the effective batch, largest B first; empty if W does not divide it."""
    if effective_batch < 1 or world_size < 1 or effective_batch % world_size:
        return []
    share = effective_batch // world_size
    small = [b for b in range(1, math.isqrt(share) + 1) if share % b == 0]
    return [(b, share // b) for b in sorted({*small, *(share // b for b in small)}, reverse=True)]


def split_below(effective_batch: int, world_size: int, max_batch: int) -> tuple[int, int] | None:
    """The exact split with the largest B that is at most `max_batch`, or None if W does not divide the batch."""
    return next((s for s in exact_splits(effective_batch, world_size) if s[0] <= max_batch), None)


def nearest_splits(effective_batch: int, world_size: int, batch: int, count: int = 2) -> list[tuple[int, int]]:
    """The exact splits whose B lies nearest to `batch`, nearest first."""
    return sorted(exact_splits(effective_batch, world_size), key=lambda s: (abs(s[0] - batch), s[0]))[:count]
