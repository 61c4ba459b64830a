"""A preset on settings: as a memory strategy on a run in progress, or whole in a new one. Nothing is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from memtop.presets.arithmetic import split_below
from memtop.presets.loading import load_recipes
from memtop.presets.schema import Guide, Preset, Recipe, Settings


def apply_preset(settings: Settings, preset: Preset, failed: Sequence[Settings] = ()) -> Settings:
    """The same run under another memory strategy: effective batch, T, LoRA and learning rate stay exactly as they are.

    `failed`: settings with which the run has died of memory. Where there are any, the micro-batch does not grow, and
    checkpointing that was off in one of them stays on.
    """
    batch, accumulation = _split(settings, preset)
    after = _with_strategy(settings, preset)
    if failed and batch > settings.batch:
        batch, accumulation = settings.batch, settings.accumulation
    if settings.gradient_checkpointing and not all(one.gradient_checkpointing for one in failed):
        after = msgspec.structs.replace(after, gradient_checkpointing=True)
    return msgspec.structs.replace(after, batch=batch, accumulation=accumulation)


def take_whole(settings: Settings, preset: Preset) -> Settings:
    """A new run's settings with the preset's guide values too: B and A per process as the guide wrote them, whatever W.

    Adapters only where the method trains some. Without a batch in the guide the effective batch is held.
    """
    guide = preset.guide
    settings = apply_preset(settings, preset) if guide.batch is None else _with_strategy(settings, preset)
    values = shared_values(guide)
    if settings.method == "full":
        values.pop("lora", None)
    if guide.epochs is not None:
        values["target_samples"] = 0
    settings = msgspec.structs.replace(settings, **values)
    if guide.warmup_updates is None:
        return settings
    return msgspec.structs.replace(settings, warmup_samples=guide.warmup_updates * settings.effective_batch)


def shared_values(source: Recipe | Preset | Guide) -> dict[str, Any]:
    """What a recipe, a preset or a guide gives for the settings of the same names."""
    names = [name for name in source.__struct_fields__ if name in Settings.__struct_fields__]
    return {name: value for name in names if (value := getattr(source, name)) is not None}


def _with_strategy(settings: Settings, preset: Preset) -> Settings:
    after = msgspec.structs.replace(settings, preset=preset.name, **shared_values(preset))
    if after.optimizer == "cpu_adam" and not after.zero.offload_optimizer:
        # The same update and the same state, computed where the state now lies.
        after = msgspec.structs.replace(after, optimizer="adamw")
    return after


def _split(settings: Settings, preset: Preset) -> tuple[int, int]:
    recipe = load_recipes().get(settings.recipe)
    ceiling = preset.max_batch
    if recipe is not None:
        # A ceiling asks for less memory, never for more than the recipe or the run takes by itself; a preset without one gives
        # back the recipe's own micro-batch, so that `standard` undoes the others.
        ceiling = recipe.batch if ceiling is None else min(ceiling, max(recipe.batch, settings.batch))
    found = None if ceiling is None else split_below(settings.effective_batch, settings.world_size, ceiling)
    return found or (settings.batch, settings.accumulation)
