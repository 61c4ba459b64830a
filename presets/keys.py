"""The keys of `--set`, and the values that a key may have, for shell completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from memtop.presets.edits import DATA, DOTTED, PARTS, assignable, parts_of
from memtop.presets.fields import FIELDS, row_of
from memtop.presets.schema import ALL_TARGETS, TRACKERS, Settings

FILES = frozenset({"data.train", "data.eval", "data.tokenizer", "model.path", "sample.prompts", "python"})
"""The keys whose value is a file or a folder."""
LISTS: Mapping[str, Sequence[str]] = {
    "lora.targets": (*ALL_TARGETS, "all-linear"),
    "trackers": TRACKERS,
}
"""The keys whose value is a list, with commas between these words."""
_WORDS: Mapping[str, Sequence[str]] = {
    "data.source": ("python-stdlib",),
    "data.tokenizer": ("bytes",),
    "allocator": ("expandable_segments:True",),
}


def keys(model: Mapping[str, Any], data: Mapping[str, Any], *, new_run: bool) -> list[str]:
    """The keys for a run with this model and this data. Those that only a new run can have are left
    out unless `new_run`. A key that ends with a dot needs a name after it."""
    found = [key for name in assignable() for key in (_parts(name, model, data) if name in DOTTED else [name])]
    return [key for key in found if new_run or not FIELDS[row_of(key)].new_run]


def _parts(head: str, model: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    open_ends = {"model.config.KEY": model.get("config", {}), "data.columns.NAME": data.get("columns", {})}
    found = []
    for part in parts_of(head):
        if part in open_ends:
            stem = part.rpartition(".")[0]
            found += [f"{stem}.{name}" for name in open_ends[part]] or [f"{stem}."]
        else:
            found.append(part)
    return found


def choices(key: str) -> list[str]:
    """All values of a setting that has few; of one that takes any text, those with a meaning of
    their own. Empty for numbers."""
    if key in _WORDS:
        return list(_WORDS[key])
    kind = _kind_of(key)
    kinds = [kind] if get_origin(kind) is Literal or not get_args(kind) else list(get_args(kind))
    found: list[str] = []
    for one in kinds:
        if get_origin(one) is Literal:
            found += map(str, get_args(one))
        elif one is bool:
            found += ["true", "false"]
        elif one is NoneType and bool in kinds:
            found.append("null")
    return found


def _kind_of(key: str) -> Any:
    """The type of a setting; None if the key has none."""
    head, _, rest = key.partition(".")
    if head in PARTS:
        return get_type_hints(PARTS[head]).get(rest)
    return DATA.get(rest) if head == "data" else get_type_hints(Settings).get(key)
