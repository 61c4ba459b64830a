"""From a recipe to `Settings`, and from settings to edited settings. Every refusal names the field and the value."""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from memtop.presets.arithmetic import nearest_splits, split_below
from memtop.presets.loading import load_presets, load_recipes
from memtop.presets.schema import Preset, Recipe, Settings

# Not for --set: each has an option of its own, or follows from others.
_FIXED = {"recipe", "preset", "target_samples", "world_size", "model", "data"}


class SettingsError(ValueError):
    """A value that cannot be used. `str()` is one line: field, value, what to do."""

    def __init__(self, field: str, value: object, message: str) -> None:
        super().__init__(f"{field} {value}: {message}")
        self.field = field
        self.value = value
        self.message = message


def resolve(recipe: Recipe, *, preset: Preset, world_size: int = 1) -> Settings:
    """The settings of a new run: the recipe's values under the preset's memory strategy.

    With several processes the recipe's effective batch is held: accumulation shrinks where W divides it.
    """
    effective = recipe.batch * recipe.accumulation
    split = split_below(effective, world_size, recipe.batch)
    if split is None:
        raise SettingsError(
            "--gpus",
            world_size,
            f"{world_size} processes do not divide the effective batch {effective}; give --batch and --accum",
        )
    settings = Settings(
        recipe=recipe.name,
        preset=preset.name,
        batch=split[0],
        accumulation=split[1],
        world_size=world_size,
        seq_len=recipe.seq_len,
        target_samples=recipe.max_updates * effective,
        save_every=recipe.save_every,
        learning_rate=recipe.learning_rate,
        warmup_fraction=recipe.warmup_fraction,
        final_learning_rate_fraction=recipe.final_learning_rate_fraction,
        weight_decay=recipe.weight_decay,
        clip_norm=recipe.clip_norm,
        seed=recipe.seed,
        precision=recipe.precision,
        model=recipe.model,
        data=recipe.data,
    )
    return check(apply_preset(settings, preset))


def apply_preset(settings: Settings, preset: Preset) -> Settings:
    """The same run under another memory strategy: the effective batch stays exactly as it is."""
    batch, accumulation = settings.batch, settings.accumulation
    if preset.max_batch is not None:
        split = split_below(settings.effective_batch, settings.world_size, preset.max_batch)
        if split is not None:
            batch, accumulation = split
    else:
        batch, accumulation = _recipe_split(settings) or (batch, accumulation)
    return msgspec.structs.replace(
        settings,
        preset=preset.name,
        batch=batch,
        accumulation=accumulation,
        gradient_checkpointing=(
            settings.gradient_checkpointing if preset.gradient_checkpointing is None else preset.gradient_checkpointing
        ),
        workers=settings.workers if preset.workers is None else preset.workers,
    )


def _recipe_split(settings: Settings) -> tuple[int, int] | None:
    # A preset without a ceiling gives back the recipe's own micro-batch, so that key 1 undoes keys 2 and 3.
    recipe = load_recipes().get(settings.recipe)
    return None if recipe is None else split_below(settings.effective_batch, settings.world_size, recipe.batch)


def edit_settings(
    settings: Settings,
    *,
    batch: int | None = None,
    accumulation: int | None = None,
    seq_len: int | None = None,
    preset: str | None = None,
    max_updates: int | None = None,
    save_every: int | None = None,
    assignments: dict[str, str] | None = None,
    updates_done: int = 0,
    samples_seen: int = 0,
) -> Settings:
    """The settings after an edit, checked.

    `preset` is applied first, then the single values. `max_updates` counts all updates of the run, those already done
    (`updates_done`, `samples_seen`) included. Without it the run keeps its target in samples.
    """
    if preset is not None:
        settings = apply_preset(settings, find_preset(preset))
    changes: dict[str, Any] = {
        name: value
        for name, value in (
            ("batch", batch),
            ("accumulation", accumulation),
            ("seq_len", seq_len),
            ("save_every", save_every),
        )
        if value is not None
    }
    for key, text in (assignments or {}).items():
        changes[key] = _typed(_known_key(key), text)
    settings = check(msgspec.structs.replace(settings, **changes))
    if max_updates is not None:
        if max_updates < 1:
            raise SettingsError("max_updates", max_updates, "must be at least 1")
        if max_updates < updates_done:
            raise SettingsError("max_updates", max_updates, f"{updates_done} updates are done already; give more")
        left = max_updates - updates_done
        settings = msgspec.structs.replace(settings, target_samples=samples_seen + left * settings.effective_batch)
    return settings


def find_preset(name: str) -> Preset:
    """The preset of that name or digit key; a SettingsError names what there is."""
    presets = load_presets()
    by_key = {str(p.key): p for p in presets.values()}
    found = presets.get(name) or by_key.get(name)
    if found is None:
        raise SettingsError("preset", repr(name), f"unknown; there are {', '.join(presets)}{_did_you_mean(name, presets)}")
    return found


def check(settings: Settings) -> Settings:
    """Return the settings, or raise a SettingsError for the first value that cannot work."""
    for field in ("batch", "accumulation", "seq_len", "save_every", "world_size", "target_samples"):
        value = getattr(settings, field)
        if value < 1:
            raise SettingsError(field, value, "must be at least 1")
    if settings.seq_len < 2:
        raise SettingsError("seq_len", settings.seq_len, "must be at least 2: a token is predicted from those before it")
    if settings.workers < 0:
        raise SettingsError("workers", settings.workers, "must be 0 or more")
    if not 0 < settings.learning_rate < 10:
        raise SettingsError("learning_rate", settings.learning_rate, "must lie between 0 and 10")
    for field in ("warmup_fraction", "final_learning_rate_fraction"):
        value = getattr(settings, field)
        if not 0 <= value <= 1:
            raise SettingsError(field, value, "must lie between 0 and 1")
    for field in ("weight_decay", "clip_norm"):
        value = getattr(settings, field)
        if not 0 <= value < float("inf"):
            raise SettingsError(field, value, "must be 0 or more")
    longest = max_seq_len(settings)
    if longest is not None and settings.seq_len > longest:
        raise SettingsError("seq_len", settings.seq_len, f"beyond the model's {longest} positions; give at most {longest}")
    return settings


def max_seq_len(settings: Settings) -> int | None:
    """The longest sequence that the model's configuration allows, or None where it does not say."""
    config = settings.model.get("config", {})
    value = config.get("max_position_embeddings") or config.get("n_positions")
    return value if isinstance(value, int) else None


def describe_split(before: Settings, after: Settings) -> str:
    """One line on what an edit does to the effective batch, with the nearest exact pairs where it breaks it."""
    old, new = before.effective_batch, after.effective_batch
    if old == new:
        return f"effective batch {old} -> {new}: same mathematics"
    pairs = ", ".join(f"{b} x {a}" for b, a in nearest_splits(old, after.world_size, after.batch))
    hint = f"; exact pairs: {pairs}" if pairs else ""
    return f"effective batch {old} -> {new} ({(new - old) / old:+.1%}): other mathematics{hint}"


def _known_key(key: str) -> str:
    names = [f for f in Settings.__struct_fields__ if f not in _FIXED]
    if key not in names:
        raise SettingsError("--set", key, f"unknown key; there are {', '.join(names)}{_did_you_mean(key, names)}")
    return key


def _typed(key: str, text: str) -> Any:
    kind = next(f.type for f in msgspec.structs.fields(Settings) if f.name == key)
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(key, repr(text), str(error)) from None


def _did_you_mean(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
