"""From a recipe to `Settings`, and from settings to edited settings. Every refusal names the field and the value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from memtop.presets.arithmetic import split_below
from memtop.presets.assigning import assign
from memtop.presets.checking import SettingsError, check, check_bounds, did_you_mean, max_seq_len
from memtop.presets.comparing import describe_split
from memtop.presets.fields import FIELDS, MOST_UPDATES, row_of, value_of
from memtop.presets.loading import load_presets, presets_for
from memtop.presets.schema import Preset, Recipe, Settings
from memtop.presets.strategies import apply_preset, shared_values, take_whole

__all__ = [
    "SettingsError",
    "apply_preset",
    "check",
    "describe_split",
    "draft",
    "edit_settings",
    "find_preset",
    "max_seq_len",
    "resolve",
    "take_whole",
]


def resolve(recipe: Recipe, *, preset: Preset, world_size: int = 1, whole: bool | None = None) -> Settings:
    """The settings of a new run, checked. See `draft`."""
    return check(draft(recipe, preset=preset, world_size=world_size, whole=whole))


def draft(recipe: Recipe, *, preset: Preset, world_size: int = 1, whole: bool | None = None) -> Settings:
    """The settings of a new run before any edit and unchecked: the recipe's values under the preset.

    `whole`: take the preset's guide values too; None: if it is meant for the recipe. Otherwise the recipe's effective batch is
    held with several processes too: accumulation shrinks where W divides it.
    """
    effective = recipe.batch * recipe.accumulation
    split = split_below(effective, world_size, recipe.batch)
    if split is None:
        raise SettingsError(
            "--gpus",
            world_size,
            f"{world_size} processes do not divide the effective batch {effective}; give --batch and --accum",
        )
    values = shared_values(recipe)
    values |= {"recipe": recipe.name, "preset": preset.name, "world_size": world_size}
    values |= {"batch": split[0], "accumulation": split[1], "target_samples": recipe.max_updates * effective}
    settings = Settings(**values)
    if preset.meant_for(recipe.name) if whole is None else whole:
        return take_whole(settings, preset)
    return apply_preset(settings, preset)


def edit_settings(
    settings: Settings,
    *,
    preset: str | None = None,
    assignments: Mapping[str, str] | None = None,
    max_updates: int | None = None,
    updates_done: int | None = None,
    samples_seen: int = 0,
    failed: Sequence[Settings] = (),
) -> Settings:
    """The settings after an edit, checked.

    `preset` is applied first (its memory strategy), then the `assignments`, as text by the names of `--set`.
    `max_updates` counts all updates of the run, those
    already done (`updates_done`, `samples_seen`) included. Without it the run keeps its target in samples. With `updates_done`
    given, be it 0, a run is in progress: what makes it that run cannot be changed. `failed`: see `apply_preset`.
    """
    before = settings
    if preset is not None:
        settings = apply_preset(settings, find_preset(preset, settings.recipe), failed)
    settings = _assigned(settings, assignments or {})
    if updates_done is not None:
        _refuse_another_run(before, settings, assignments or {})
    if max_updates is None:
        return check(settings)
    done = updates_done or 0
    check_bounds("max_updates", max_updates, 1, MOST_UPDATES)
    if max_updates < done:
        raise SettingsError("max_updates", max_updates, f"{done} updates are done already; give more")
    target = samples_seen + (max_updates - done) * settings.effective_batch
    return check(msgspec.structs.replace(settings, target_samples=target))


def _assigned(settings: Settings, assignments: Mapping[str, str]) -> Settings:
    after = assign(settings, assignments)
    # Two settings say when a run ends, and two how long it warms up: the one that was given must be the one that counts.
    if "epochs" in assignments:
        after = msgspec.structs.replace(after, target_samples=0)
    if "warmup_fraction" in assignments and "warmup_samples" not in assignments:
        after = msgspec.structs.replace(after, warmup_samples=0)
    return after


def _refuse_another_run(before: Settings, after: Settings, assignments: Mapping[str, str]) -> None:
    for key, text in assignments.items():
        name = row_of(key)
        if FIELDS[name].new_run and value_of(before, name) != value_of(after, name):
            how = f"memtop train {before.recipe} --name NEW --set {key}={text}, or --fresh with this run's name"
            raise SettingsError(key, text, f"makes a new run: {how}")


def find_preset(name: str, recipe: str = "") -> Preset:
    """The preset of that name, or of that digit key among those for the recipe; a SettingsError names what there is."""
    presets = load_presets()
    by_key = {str(preset.key): preset for preset in presets_for(recipe).values() if preset.key is not None}
    found = presets.get(name) or by_key.get(name)
    if found is None:
        raise SettingsError("preset", repr(name), f"unknown; there are {', '.join(presets)}{did_you_mean(name, presets)}")
    return found
