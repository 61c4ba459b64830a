"""Reads the data files: memtop's own, then the user's, which extend or override by name.

User files: `<config dir>/memtop/recipes/*.toml`, `<config dir>/memtop/levels/*.toml`, and `./memtop.toml` with tables
`[recipes.NAME]` and `[levels.NAME]`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from memtop.presets.schema import Preset, Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T", Preset, Recipe)
_HERE = Path(__file__).resolve().parent


class PresetFileError(ValueError):
    """A preset or recipe file that cannot be used; the text names the file and the field."""


def load_presets() -> dict[str, Preset]:
    """All presets by name, in the order of their keys."""
    found = _load("levels", Preset)
    return dict(sorted(found.items(), key=lambda item: item[1].key))


def load_recipes() -> dict[str, Recipe]:
    """All recipes by name."""
    return _load("recipes", Recipe)


def _load(kind: str, shape: type[T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for origin, name, table in _tables(kind):
        try:
            item = msgspec.convert({"name": name, **table}, shape)
        except msgspec.ValidationError as error:
            raise PresetFileError(f"{origin}: {error}") from None
        found[item.name] = item
    return found


def _tables(kind: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for folder in (_HERE / kind, Path(platformdirs.user_config_dir("memtop")) / kind):
        for path in sorted(folder.glob("*.toml")):
            yield str(path), path.stem, _parse(path)
    local = Path("memtop.toml")
    if local.is_file():
        for name, table in _parse(local).get(kind, {}).items():
            if not isinstance(table, dict):
                raise PresetFileError(f"{local}: [{kind}.{name}] is not a table")
            yield f"{local} [{kind}.{name}]", name, table


def _parse(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PresetFileError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise PresetFileError(f"{path}: cannot be read: {error.strerror}") from None
    return table
