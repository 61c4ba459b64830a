"""Reads presets and recipes: memtop's own files, then the user's, which add to them or override
them by name.

User files: `<config dir>/memtop/<family>/*.toml` (families: levels, ladder, t5, qlora; and
recipes), and `./memtop.toml` with tables `[presets.NAME]`, `[levels.NAME]` and `[recipes.NAME]`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from memtop.presets.schema import Family, Preset, Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T", Preset, Recipe)
_HERE = Path(__file__).resolve().parent
_FAMILIES: dict[str, Family] = {"ladder": "ladder", "levels": "level", "t5": "t5", "qlora": "qlora"}
"""The folder of each family, in the order in which families are listed."""


class PresetFileError(ValueError):
    """A preset or recipe file that cannot be used; the text names the file and the field."""


def load_presets() -> dict[str, Preset]:
    """All presets of all families by name, in the order of their digit keys."""
    found: dict[str, Preset] = {}
    origins: dict[str, str] = {}
    for origin, name, table in _preset_tables():
        # A table of ./memtop.toml that overrides a preset need not repeat its family.
        family = found[name].family if name in found else "level"
        preset = _shaped(origin, name, {"family": family, **table}, Preset)
        found[preset.name], origins[preset.name] = preset, origin
    _refuse_clashes(found.values(), origins)
    order = {family: place for place, family in enumerate(_FAMILIES.values())}
    return dict(sorted(found.items(), key=lambda item: (order[item[1].family], _place(item[1]))))


def presets_for(recipe: str) -> dict[str, Preset]:
    """The presets that are offered for runs of a recipe, in the order of their digit keys."""
    return usable(load_presets(), recipe)


def usable(presets: dict[str, Preset], recipe: str) -> dict[str, Preset]:
    """Those of `presets` that are offered for runs of a recipe, in the order of their digit
    keys.
    """
    offered = {name: preset for name, preset in presets.items() if preset.usable_with(recipe)}
    return dict(sorted(offered.items(), key=lambda item: _place(item[1])))


def load_recipes() -> dict[str, Recipe]:
    """All recipes by name."""
    found = {}
    folders = (root / "recipes" for root in (_HERE, *_user_folders()))
    tables = (table for folder in folders for table in _folder_tables(folder))
    for origin, name, table in (*tables, *_local_tables("recipes")):
        recipe = _shaped(origin, name, table, Recipe)
        found[recipe.name] = recipe
    return found


def _place(preset: Preset) -> int:
    # As on a keyboard: 0 after 9, and presets without a key last.
    return 11 if preset.key is None else preset.key or 10


def _shaped(origin: str, name: str, table: dict[str, Any], shape: type[T]) -> T:
    try:
        return msgspec.convert({"name": name, **table}, shape)
    except msgspec.ValidationError as error:
        raise PresetFileError(f"{origin}: {error}") from None


def _refuse_clashes(presets: Iterable[Preset], origins: dict[str, str]) -> None:
    for one, other in combinations([preset for preset in presets if preset.key is not None], 2):
        if one.key == other.key and _share_a_recipe(one, other):
            # Blame the later file: it is more likely the user's.
            raise PresetFileError(
                f"{origins[other.name]}: key {other.key}: preset {one.name} has it already; give another or none"
            )


def _share_a_recipe(one: Preset, other: Preset) -> bool:
    everywhere = any(preset.family == "ladder" or not preset.recipes for preset in (one, other))
    return everywhere or not set(one.recipes).isdisjoint(other.recipes)


def _preset_tables() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for root in (_HERE, *_user_folders()):
        for folder, family in _FAMILIES.items():
            for origin, name, table in _folder_tables(root / folder):
                yield origin, name, {"family": family, **table}
    yield from _local_tables("levels")
    yield from _local_tables("presets")


def _user_folders() -> tuple[Path, ...]:
    """The folder of the user's files; none for a user without a home folder."""
    try:
        return (Path(platformdirs.user_config_dir("memtop")),)
    except RuntimeError:
        return ()


def user_cache() -> Path | None:
    """The user's folder for files that can be made again; None for a user without a home folder."""
    try:
        return platformdirs.user_cache_path("memtop")
    except RuntimeError:
        return None


def _folder_tables(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path in sorted(folder.glob("*.toml")):
        yield str(path), path.stem, parse(path)


def _local_tables(kind: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    local = Path("memtop.toml")
    if not local.is_file():
        return
    tables = parse(local).get(kind, {})
    if not isinstance(tables, dict):
        raise PresetFileError(f"{local}: {kind} is not a table; write [{kind}.NAME]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise PresetFileError(f"{local}: [{kind}.{name}] is not a table")
        yield f"{local} [{kind}.{name}]", name, table


def parse(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PresetFileError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise PresetFileError(f"{path}: cannot be read: {error.strerror}") from None
    return table
