"""The settings of a new run: the values of its recipe, its preset, and the paths of its data and
its model. memtop chooses the preset if the user has not named one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from memtop.presets import Preset, Recipe, Settings, choose_preset, edit_settings, load_recipes
from memtop.presets.checks import did_you_mean
from memtop.presets.choosing import Taken
from memtop.presets.edits import draft, find_preset
from memtop.presets.fields import SPLIT
from memtop.supervisor.errors import UsageError
from memtop.supervisor.wire import Change

if TYPE_CHECKING:
    from memtop.cli.gpus import Place
    from memtop.supervisor.recovery.forecast import Estimates


def recipe_named(name: str) -> Recipe:
    recipes = load_recipes()
    if name not in recipes:
        known, hint = ", ".join(recipes), did_you_mean(name, recipes)
        raise UsageError(f"RECIPE {name!r}: unknown; there are {known}; your own program goes after `--`{hint}")
    return recipes[name]


def edited_recipe(recipe: Recipe, preset: Preset, whole: bool, edits: Change, gpus: list[str] | None) -> Settings:
    # If a split is given, the number of processes need not divide the recipe's effective batch.
    world = len(gpus) if gpus else 1
    given = bool(set(SPLIT) & set(edits.assignments))
    settings = replace(draft(recipe, preset=preset, world_size=1 if given else world, whole=whole), world_size=world)
    updates = edits.max_updates
    if updates is None and settings.target_samples and "epochs" not in edits.assignments:
        # Keep the recipe's number of updates, whatever the effective batch is now.
        updates = recipe.max_updates
    return edit_settings(settings, assignments=edits.assignments, max_updates=updates)


def estimates_at(place: Place, python: str) -> Estimates | None:
    """With what earlier runs have measured there; None without a GPU of known size. `python`: the
    interpreter that trains."""
    if place.card is None:
        return None
    # They load what a run on the CPU does not need.
    from memtop.supervisor.interpreters import learned_on
    from memtop.supervisor.recovery.forecast import Estimates

    return Estimates(card=place.card, learned=learned_on(place.card.kind, python))


def own_preset(recipe: Recipe, edits: Change, gpus: list[str] | None, place: Place, python: str) -> tuple[Preset, str | None]:
    """The recipe's preset; for `auto`, the one for the free GPU memory, and the reason.

    The peaks are those that a launch says. `python`: the interpreter that trains.
    """
    if recipe.preset != "auto":
        return find_preset(recipe.preset, recipe.name), None
    processes, estimates = len(gpus) if gpus else 1, estimates_at(place, python)

    def under(preset: Preset) -> Settings:
        settings = edited_recipe(recipe, preset, False, edits, gpus)
        return replace(settings, model=placed_model(settings.model))

    def foresee(settings: Settings) -> Taken | None:
        if estimates is None:
            return None
        train = settings.data.get("train")
        if train:
            # Peaks that were measured with other samples count for less.
            settings = replace(settings, data={**settings.data, "train": str(_absolute(train))})
        found = estimates.forecast(settings)
        return None if isinstance(found, str) or found.fraction is None else Taken(found.peak_bytes, found.fraction)

    preset, reason = choose_preset(place.free_bytes, recipe.name, processes, under, foresee)
    return preset, f"{reason}; {place.note}" if processes > 1 and place.note else reason


def placed_data(data: dict[str, Any]) -> dict[str, Any]:
    """The data with absolute paths; UsageError if a file is missing."""
    if not data.get("source") and not data.get("train"):
        columns = ", ".join(data.get("columns", {}).values())
        shape = f" with columns {columns}" if columns else ""
        raise UsageError(f"data.train: not given; add --set data.train=FILE (parquet, jsonl or text{shape})")
    return {key: _placed(f"data.{key}", value) if key in ("train", "eval") else value for key, value in data.items()}


def _placed(field: str, value: str) -> str:
    if not value:
        return value
    path = _absolute(value)
    if not path.is_file():
        problem = "is a folder; give a file" if path.is_dir() else "no such file"
        raise UsageError(f"{field} {value}: {problem}; looked for {path}")
    return str(path)


def _absolute(text: str) -> Path:
    # Without a home folder `~` stays, and the path does not exist. Path's own method would raise.
    return Path(os.path.expanduser(text)).absolute()  # noqa: PTH111


def placed_model(model: dict[str, Any]) -> dict[str, Any]:
    """The model with an absolute path if it is a folder; a hub name stays unchanged."""
    name = model.get("path")
    if not isinstance(name, str):
        return model
    path = _absolute(name)
    if path.is_dir():
        return {**model, "path": str(path)}
    if name.startswith(("/", "~", "./", "../")):
        raise UsageError(f"model.path {name}: no such folder; looked for {path}")
    return model
