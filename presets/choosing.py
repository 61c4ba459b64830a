"""The preset that fits the GPU memory that is free. Pure: the caller measures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memtop.presets.loading import load_presets
from memtop.presets.schema import Preset

_GIB = 1 << 30


def choose_by_memory(free_bytes: int | None, recipe: str = "") -> tuple[Preset, str]:
    """The preset for this much free memory on the GPU that has the least of it, and why; None: there is no GPU.

    A border belongs to the larger rung: 12 GiB and more, 6 up to 12, 4 up to 6, below 4. Recipes with a family of their own
    that says how much memory it wants (QLoRA) choose from that.
    """
    presets = load_presets()
    if free_bytes is None:
        return presets["standard"], "preset standard: no GPU memory to go by"
    rungs = _rungs(list(presets.values()), recipe)
    at = next((n for n, (border, _) in enumerate(rungs) if free_bytes >= border * _GIB), len(rungs) - 1)
    border, preset = rungs[at]
    where = f"from {border:g} GiB on" if border > 0 else "the last there is"
    if at > 0:
        above = rungs[at - 1][0]
        where = f"from {border:g} up to {above:g} GiB" if border > 0 else f"below {above:g} GiB"
    return preset, f"preset {preset.name}: {_floor_gib(free_bytes)} of GPU memory free, {where}"


def _rungs(presets: Sequence[Preset], recipe: str) -> list[tuple[float, Preset]]:
    ladder = [(p.free_gib_from, p) for p in presets if p.free_gib_from is not None and p.family == "ladder"]
    special = [
        (p.free_gib_from, p) for p in presets if p.free_gib_from is not None and p.family != "ladder" and recipe in p.recipes
    ]
    return sorted(special or ladder, key=lambda rung: -rung[0])


def _floor_gib(size: int) -> str:
    # Rounded down: 11.999 GiB is not 12.
    return f"{math.floor(size / _GIB * 100) / 100:.2f} GiB"
