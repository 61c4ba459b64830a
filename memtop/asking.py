"""From what was typed after `memtop train` to the settings of a run."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

from memtop.presets import PresetFileError, Settings, SettingsError, edit_settings, load_recipes, resolve
from memtop.presets.editing import find_preset
from memtop.supervisor.errors import UsageError
from memtop.supervisor.wire import Change

_NEEDED = ("torch", "transformers", "accelerate", "safetensors")


def settings_for(
    recipe_name: str, preset_name: str | None, edits: Change, save_every: int | None, gpus: list[str] | None
) -> Settings:
    """The settings of a new run; UsageError names the option and the value that cannot be."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"RECIPE {recipe_name}: the built-in trainer needs {', '.join(missing)}: pip install 'memtop[train]'; "
            "your own program goes after `--` and needs none of it"
        )
    try:
        recipes = load_recipes()
        if recipe_name not in recipes:
            near = difflib.get_close_matches(recipe_name, list(recipes), n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                f"RECIPE {recipe_name!r}: unknown; there are {', '.join(recipes)}{hint}; your own program goes after `--`"
            )
        recipe = recipes[recipe_name]
        preset = find_preset(preset_name or recipe.preset)
        # With a batch given, W need not divide the recipe's own effective batch.
        world = len(gpus) if gpus else 1
        given = edits.batch is not None or edits.accumulation is not None
        settings = resolve(recipe, preset=preset, world_size=1 if given else world)
        if given:
            from msgspec.structs import replace

            settings = replace(settings, world_size=world)
        updates = edits.max_updates or recipe.max_updates
        return edit_settings(
            settings,
            batch=edits.batch,
            accumulation=edits.accumulation,
            seq_len=edits.seq_len,
            save_every=save_every,
            max_updates=edits.max_updates if edits.max_updates is not None else updates,
            assignments=edits.assignments,
        )
    except (SettingsError, PresetFileError) as error:
        raise UsageError(str(error)) from None


def refuse_for_own_program(recipe: str | None, preset: str | None, edits: Change, save_every: int | None) -> None:
    """Options that mean nothing for a program of the user's own are refused, not passed over."""
    given = {
        f"RECIPE {recipe}": recipe,
        f"--preset {preset}": preset,
        f"--batch {edits.batch}": edits.batch,
        f"--accum {edits.accumulation}": edits.accumulation,
        f"--seq-len {edits.seq_len}": edits.seq_len,
        f"--max-updates {edits.max_updates}": edits.max_updates,
        f"--save-every {save_every}": save_every,
        "--set": edits.assignments or None,
    }
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option}: your own program's settings are its own; pass them after `--`")


def parse_gpus(text: str | None) -> list[str] | None:
    """`0,1` as a list of device indices; None if not given."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words) or len(set(words)) != len(words):
        raise UsageError(f"--gpus {text!r}: give different device indices like 0 or 0,1")
    return words


def free_name(runs_dir: Path, stem: str) -> str:
    """`first-run`, or `first-run-2` where that is taken, ..."""
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("-._") or "run"
    number, name = 1, stem
    while (runs_dir / name).exists():
        number += 1
        name = f"{stem}-{number}"
    return name
