"""The learning rate as a pure function of progress in samples: a changed batch neither restarts nor stretches it."""

from __future__ import annotations

import math

from memtop.presets import Settings


def learning_rate(settings: Settings, samples_seen: int) -> float:
    """The rate of the update that ends at `samples_seen`: linear warm-up, then a cosine down to the final fraction."""
    progress = min(1.0, samples_seen / settings.target_samples)
    if progress < settings.warmup_fraction:
        return settings.learning_rate * progress / settings.warmup_fraction
    rest = (progress - settings.warmup_fraction) / max(1e-12, 1.0 - settings.warmup_fraction)
    final = settings.final_learning_rate_fraction
    return settings.learning_rate * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * rest)))
