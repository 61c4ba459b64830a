"""The learning rate as a pure function of progress in samples: a changed batch neither restarts nor stretches it."""

from __future__ import annotations

import math

from memtop.presets import Settings


def learning_rate(settings: Settings, samples_seen: int, target_samples: int) -> float:
    """The rate of the update that ends at `samples_seen`: linear warm-up, then a cosine down to the final fraction."""
    warmup = settings.warmup_samples or settings.warmup_fraction * target_samples
    if samples_seen < warmup:
        return settings.learning_rate * samples_seen / warmup
    rest = min(1.0, (samples_seen - warmup) / max(1.0, target_samples - warmup))
    final = settings.final_learning_rate_fraction
    return settings.learning_rate * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * rest)))
