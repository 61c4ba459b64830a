"""Values in the text of a JSON or YAML file. Everything else in a changed text stays as it was."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

Kind = Literal["json", "yaml"]
_LINE = re.compile(
    r"""(?P<indent>\ *)(?P<key>[\w./-]+|"[^"]*"|'[^']*')\ *:(?P<space>\s*)(?P<value>[^#\n]*?)(?P<rest>\s*(?:\s\#.*)?)""", re.X
)
"""`  batch_size: 8   # comment`."""
_MISSING = object()


class ConfigTextError(ValueError):
    """A value that cannot be changed; the text says why."""


def value_in(text: str, kind: Kind, key: str) -> str | int | None:
    """The value of `a.b`, `true` and `false` as words; None if the file has no such key, or no
    plain value there."""
    found: Any = _json_at(text, key) if kind == "json" else _yaml_at(text, key)
    if isinstance(found, bool):
        return str(found).lower()
    return found if isinstance(found, (str, int)) else None


def has_key(text: str, kind: Kind, key: str) -> bool:
    if kind == "json":
        return _json_at(text, key) is not _MISSING
    return _yaml_line(text, key) is not None


def with_value(text: str, kind: Kind, key: str, value: int) -> str:
    """The text with another value of `a.b`. ConfigTextError if that is impossible."""
    return _json_with(text, key, value) if kind == "json" else _yaml_with(text, key, value)


def _json_at(text: str, key: str) -> Any:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _MISSING
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _json_with(text: str, key: str, value: int) -> str:
    try:
        whole = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigTextError(f"it is not JSON: {error}") from None
    *above, last = key.split(".")
    found = whole
    for part in above:
        found = found.get(part) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise ConfigTextError(f"it has no object {'.'.join(above)}")
    found[last] = value
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode() + "\n"


def _yaml_line(text: str, key: str) -> tuple[int, re.Match[str]] | None:
    """The number of the line that has the value of `a.b`, in the block style of YAML."""
    wanted = key.split(".")
    above: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines()):
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        indent = len(match["indent"])
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, match["key"].strip("\"'")))
        if [name for _, name in above] == wanted:
            return number, match
    return None


def _yaml_at(text: str, key: str) -> Any:
    found = _yaml_line(text, key)
    if found is None:
        return _MISSING
    value = found[1]["value"].strip()
    if value[:1] in "\"'" and value[-1:] == value[:1] and len(value) > 1:
        return value[1:-1]
    if re.fullmatch(r"[-+]?\d[\d_]*", value):
        return int(value.replace("_", ""))
    return value if value and value[0] not in "[{&*!|>" and value not in ("null", "~") else None


def _yaml_with(text: str, key: str, value: int) -> str:
    found = _yaml_line(text, key)
    if found is None:
        raise ConfigTextError(f"it has no line for {key}")
    number, match = found
    if match["value"][:1] in ("[", "{", "&", "*", "|", ">"):
        raise ConfigTextError(f"{key} is no plain number there")
    lines = text.splitlines(keepends=True)
    old = lines[number]
    end = old[len(old.rstrip("\r\n")) :]
    lines[number] = f"{old[: match.end('key')]}: {value}{match['rest']}{end}"
    return "".join(lines)
