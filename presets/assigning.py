"""`--set KEY=VALUE`: finds the setting that a key names, dotted keys included, and gives the text its type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from memtop.presets.checking import SettingsError, did_you_mean
from memtop.presets.fields import FIELDS
from memtop.presets.schema import Lora, Settings, Zero

_PARTS: dict[str, type[Lora] | type[Zero]] = {"lora": Lora, "zero": Zero}
_DATA: dict[str, type] = {"source": str, "max_bytes": int, "train": str, "eval": str, "tokenizer": str, "text": str}
_COLUMNS = ("prompt", "response", "text")
_DOTTED = ("lora", "zero", "model", "data")


def assign(settings: Settings, assignments: Mapping[str, str]) -> Settings:
    """The settings after `--set`, unchecked as a whole; SettingsError for an unknown key or a value of another type."""
    changes: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for key, text in assignments.items():
        head, dot, rest = key.partition(".")
        _refuse_unknown(key, head, bool(rest))
        if head in _PARTS:
            parts.setdefault(head, {})[rest] = _part_value(head, rest, text)
        elif head == "model":
            changes["model"] = _model(changes.get("model", settings.model), rest, text)
        elif head == "data":
            changes["data"] = _data(changes.get("data", settings.data), rest, text)
        elif dot:
            raise SettingsError("--set", key, f"unknown key; {head} has no parts")
        else:
            changes[key] = typed(key, get_type_hints(Settings, include_extras=True)[key], text)
    for head, values in parts.items():
        changes[head] = _part(head, getattr(settings, head), values)
    return msgspec.structs.replace(settings, **changes)


def typed(key: str, kind: Any, text: str) -> Any:
    """The text as a value of that type; lists are separated by commas."""
    choices = [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []
    value: Any = text
    if get_origin(kind) is tuple:
        value = [word.strip() for word in text.split(",") if word.strip()]
    elif choices and text.isdecimal():
        value = int(text)  # A choice between numbers takes no text, however lenient.
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        hint = f"; there are {', '.join(choices)}{did_you_mean(text, choices)}" if choices else ""
        raise SettingsError(key, repr(text), f"{error}{hint}") from None


def _refuse_unknown(key: str, head: str, dotted: bool) -> None:
    names = [name for name in Settings.__struct_fields__ if name not in FIELDS or FIELDS[name].editable]
    if head not in names:
        listed = ", ".join(f"{name}.…" if name in _DOTTED else name for name in names)
        raise SettingsError("--set", key, f"unknown key; there are {listed}{did_you_mean(head, names)}")
    if head in _DOTTED and not dotted:
        raise SettingsError("--set", key, f"has parts; there are {', '.join(_parts_of(head))}")


def _parts_of(head: str) -> list[str]:
    if head in _PARTS:
        return [f"{head}.{name}" for name in _PARTS[head].__struct_fields__]
    if head == "model":
        return ["model.path", "model.config.KEY"]
    return [*(f"data.{name}" for name in _DATA), "data.columns.NAME"]


def _unknown_part(head: str, rest: str) -> SettingsError:
    known = _parts_of(head)
    key = f"{head}.{rest}"
    return SettingsError("--set", key, f"unknown key; there are {', '.join(known)}{did_you_mean(key, known)}")


def _part_value(head: str, rest: str, text: str) -> Any:
    hints = get_type_hints(_PARTS[head], include_extras=True)
    if rest not in hints:
        raise _unknown_part(head, rest)
    return typed(f"{head}.{rest}", hints[rest], text)


def _part(head: str, present: Lora | Zero | None, values: dict[str, Any]) -> Lora | Zero:
    try:
        return msgspec.convert({**({} if present is None else msgspec.to_builtins(present)), **values}, _PARTS[head])
    except msgspec.ValidationError as error:
        given = ", ".join(f"{head}.{name}" for name in values)
        raise SettingsError("--set", given, f"{error}; this run has no {head} values yet, so give the others too") from None


def _model(model: dict[str, Any], rest: str, text: str) -> dict[str, Any]:
    name, _, key = rest.partition(".")
    if name == "path" and not key:
        if not text:
            raise SettingsError("model.path", "''", "give a folder or a hub name")
        return {"path": text}
    if name == "config" and key:
        # A configuration takes the place of a path: the weights are drawn then.
        return {"config": {**model.get("config", {}), key: _finite(f"model.{rest}", scalar(text))}}
    raise _unknown_part("model", rest)


def _data(data: dict[str, Any], rest: str, text: str) -> dict[str, Any]:
    name, _, column = rest.partition(".")
    if name == "columns" and column:
        columns = data.get("columns", {})
        known = [*columns, *(known for known in _COLUMNS if known not in columns)]
        if column not in known:
            listed = ", ".join(f"data.columns.{name}" for name in known)
            raise SettingsError("--set", f"data.{rest}", f"unknown key; there are {listed}{did_you_mean(column, known)}")
        return {**data, "columns": {**columns, column: text}}
    if name not in _DATA or column:
        raise _unknown_part("data", rest)
    value = typed(f"data.{name}", _DATA[name], text)
    # Files and a built-in source exclude each other: the one given last is meant.
    dropped = {"train": ("source", "max_bytes"), "source": ("train", "eval")}.get(name, ())
    return {**{key: kept for key, kept in data.items() if key not in dropped}, name: value}


def scalar(text: str) -> Any:
    """A number, true, false, null or a list as JSON writes them; anything else is text."""
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, dict) else value


def _finite(key: str, value: Any) -> Any:
    """The value, if every number in it can be kept: JSON has no infinity, and msgspec integers of 64 bits."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, list):
            _finite(key, item)
        elif isinstance(item, int | float) and not abs(item) < 1 << 63:
            raise SettingsError(key, item, "is too large a number")
    return value
