"""Reads presets and recipes: memtop's own files, then the user's, which add to them or override
them by name.

User files: `<config dir>/memtop/<family>/*.toml` (families: levels, ladder, t5, qlora; recipes and
programs), and the project's file with tables `[presets.NAME]`, `[levels.NAME]`, `[recipes.NAME]`
and `[programs.NAME]`. The project's file is the nearest `memtop.toml`, or `pyproject.toml` with a
table `[tool.memtop]`, in the working directory or above. It contains the project's settings, too.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import platformdirs

from memtop.presets.schema import Family, Preset, Recipe

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
    for origin, name, table in tables_of("recipes"):
        recipe = _shaped(origin, name, table, Recipe)
        found[recipe.name] = recipe
    return found


def tables_of(family: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The tables of a family, those that override others last: where each is, its name, and its
    contents."""
    for root in (_HERE, *_user_folders()):
        yield from _folder_tables(root / family)
    yield from _local_tables(family)


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


def user_config() -> Path | None:
    """The folder of the user's files; None for a user without a home folder."""
    try:
        return Path(platformdirs.user_config_dir("memtop"))
    except RuntimeError:
        return None


def _user_folders() -> tuple[Path, ...]:
    folder = user_config()
    return () if folder is None else (folder,)


def user_cache() -> Path | None:
    """The user's folder for files that can be made again; None for a user without a home folder."""
    try:
        return platformdirs.user_cache_path("memtop")
    except RuntimeError:
        return None


def _folder_tables(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path in sorted(folder.glob("*.toml")):
        yield str(path), path.stem, parse(path)


class ProjectFile(NamedTuple):
    """The file with a project's settings, presets and recipes."""

    path: Path
    shown: str
    """For people: without its folder if that is the working directory."""
    prefix: str
    """What is before the names of its tables: `tool.memtop.` in pyproject.toml."""
    table: dict[str, Any]


def project_file() -> ProjectFile | None:
    """The project's file, nearest first; None if there is none.

    A file above that another user has put there does not count: see `is_trusted`.
    """
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        return None  # it was removed
    for folder in (cwd, *cwd.parents):
        for name in ("memtop.toml", "pyproject.toml"):
            path = folder / name
            if path.is_file() and is_trusted(path, cwd):
                shown = name if folder == cwd else str(path)
                if name == "memtop.toml":
                    return ProjectFile(path, shown, "", parse(path, shown))
                if (table := _tool_table(path, shown)) is not None:
                    return ProjectFile(path, shown, "tool.memtop.", table)
    return None


def is_trusted(path: Path, cwd: Path) -> bool:
    """Whether a file in the working directory or above may change what memtop does.

    Its owner is the caller, root, or the owner of the working directory, where the caller chose to
    work. Others may have put it into a shared folder above, such as /tmp.
    """
    try:
        return path.stat().st_uid in (os.geteuid(), 0, cwd.stat().st_uid)
    except OSError:
        return False


def _tool_table(path: Path, shown: str) -> dict[str, Any] | None:
    """The table [tool.memtop] of a pyproject.toml. None without one: such a file is not ours, and
    may be damaged."""
    try:
        if b"memtop" not in path.read_bytes():
            return None
    except OSError:
        return None
    tools = parse(path, shown).get("tool", {})
    table = tools.get("memtop") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise PresetFileError(f"{shown}: tool.memtop is not a table; write [tool.memtop]")
    return table


def _local_tables(kind: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    local = project_file()
    if local is None:
        return
    tables = local.table.get(kind, {})
    where = f"{local.prefix}{kind}"
    if not isinstance(tables, dict):
        raise PresetFileError(f"{local.shown}: {where} is not a table; write [{where}.NAME]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise PresetFileError(f"{local.shown}: [{where}.{name}] is not a table")
        yield f"{local.shown} [{where}.{name}]", name, table


def parse(path: Path, shown: str = "") -> dict[str, Any]:
    """The contents of a TOML file; PresetFileError calls it `shown`."""
    shown = shown or str(path)
    try:
        return parse_text(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PresetFileError(f"{shown}: not valid TOML: {error}") from None
    except OSError as error:
        raise PresetFileError(f"{shown}: cannot be read: {error.strerror}") from None


def parse_text(text: str) -> dict[str, Any]:
    """The contents of a text in TOML, for the caller alone; ValueError if it is not valid."""
    return copy.deepcopy(_parsed(text))


@lru_cache(maxsize=256)
def _parsed(text: str) -> dict[str, Any]:
    """A form reads all presets again and again, and most of the time went into this."""
    # Its import takes 6 ms, and most people have no such file.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        # Editors on Windows begin a file with a byte order mark.
        table: dict[str, Any] = tomllib.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    return table
