"""From a recipe to the settings of a new run, and from settings to edited settings.

Three kinds of edits exist: a preset's memory strategy (`apply_preset`), a preset with its guide's
values (`take_whole`) and single settings as text (`assign`, the `--set KEY=VALUE` of the command
line). `edit_settings` combines and checks them. Every refusal is a `SettingsError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import fields, replace

from memtop.presets.checks import (
    SettingsError,
    check,
    check_bounds,
    check_one_for_each,
    did_you_mean,
    preset_meant,
    setting_meant,
    unknown_key,
    wanted,
)
from memtop.presets.fields import FIELDS, MOST_UPDATES, SPLIT, row_of, value_of
from memtop.presets.files import load_presets, load_recipes, presets_for
from memtop.presets.schema import (
    Guide,
    Lora,
    Preset,
    Recipe,
    Sampling,
    Settings,
    Split,
    Zero,
    capped,
    split_below,
    with_splits,
)

# --- a new run ------------------------------------------------------------------------------------


def resolve(recipe: Recipe, *, preset: Preset, world_size: int = 1, whole: bool | None = None) -> Settings:
    """The settings of a new run, checked. See `draft`."""
    return check(draft(recipe, preset=preset, world_size=world_size, whole=whole))


def draft(recipe: Recipe, *, preset: Preset, world_size: int = 1, whole: bool | None = None) -> Settings:
    """The settings of a new run before any edit and unchecked: the recipe's values under the
    preset.

    `whole` takes the preset's guide values too; None takes them if the preset is meant for the
    recipe. Without them the recipe's effective batch is kept: several processes shrink the
    accumulation. SettingsError if `world_size` does not divide it.
    """
    effective = recipe.batch * recipe.accumulation
    split = _split_over(effective, world_size, recipe.batch)
    values = _shared_values(recipe)
    values |= {"recipe": recipe.name, "preset": preset.name, "world_size": world_size}
    values |= {"batch": split[0], "accumulation": split[1], "target_samples": recipe.max_updates * effective}
    settings = Settings(**values)
    if preset.meant_for(recipe.name) if whole is None else whole:
        return take_whole(settings, preset)
    return apply_preset(settings, preset)


def _split_over(effective: int, processes: int, largest: int, *, auto: bool = False) -> Split:
    """B and A of each of these processes. If there are none, --gpus is refused, or with `auto`
    --batch auto."""
    split = split_below(effective, processes, largest)
    if split is None:
        how = "--batch B --accum A first" if auto else "--batch and --accum"
        why = f"{processes} processes do not divide the effective batch {effective}; give {how}"
        raise SettingsError("--batch" if auto else "--gpus", "auto" if auto else processes, why)
    return split


def find_preset(name: str, recipe: str = "") -> Preset:
    """The preset with that name, or with that digit key among those for the recipe; SettingsError
    if there is none."""
    presets = load_presets()
    by_key = {str(preset.key): preset for preset in presets_for(recipe).values() if preset.key is not None}
    found = presets.get(name) or by_key.get(name)
    if found is None:
        raise SettingsError("preset", repr(name), f"unknown; there are {', '.join(presets)}{preset_meant(name, presets)}")
    return found


# --- presets --------------------------------------------------------------------------------------


def apply_preset(settings: Settings, preset: Preset, failed: Sequence[Settings] = ()) -> Settings:
    """The same run under another memory strategy, unchecked: effective batch, T, LoRA and learning
    rate stay the same.

    `failed`: settings with which the run ran out of memory. If there are any, the micro-batch does
    not grow, and checkpointing stays on unless all of them had it.
    """
    after = _with_strategy(settings, preset)
    if after.zero.stage or not settings.rank_splits:
        batch, accumulation = _split(settings, preset)
        if failed and batch > settings.batch:
            batch, accumulation = settings.batch, settings.accumulation
        found = batch * accumulation * settings.world_size == settings.effective_batch
        after = replace(after, batch=batch, accumulation=accumulation, rank_splits=() if found else settings.rank_splits)
    elif preset.max_batch is not None:
        after = capped(after, preset.max_batch)
    if settings.gradient_checkpointing and not all(one.gradient_checkpointing for one in failed):
        after = replace(after, gradient_checkpointing=True)
    return after


def take_whole(settings: Settings, preset: Preset) -> Settings:
    """A new run's settings with the preset's guide values too, unchecked.

    Batch and accumulation per process are the guide's, whatever the number of processes; a guide
    without a batch keeps the effective batch. LoRA values are taken only if the method trains
    adapters.
    """
    guide = preset.guide
    settings = apply_preset(settings, preset) if guide.batch is None else _with_strategy(settings, preset)
    values = _shared_values(guide)
    if settings.method == "full":
        values.pop("lora", None)
    if guide.epochs is not None:
        values["target_samples"] = 0
    settings = replace(settings, **values)
    if guide.warmup_updates is None:
        return settings
    return replace(settings, warmup_samples=guide.warmup_updates * settings.effective_batch)


def _shared_values(source: Recipe | Preset | Guide) -> dict[str, Any]:
    """What a recipe, a preset or a guide gives for the settings of the same names."""
    names = [name for name in source.__struct_fields__ if name in Settings.__struct_fields__]
    return {name: value for name in names if (value := getattr(source, name)) is not None}


def _with_strategy(settings: Settings, preset: Preset) -> Settings:
    after = replace(settings, **{**_reverted(settings, preset), **_shared_values(preset), "preset": preset.name})
    if after.optimizer == "cpu_adam" and not after.zero.offload_optimizer:
        # The same update and the same state, but computed on the GPU, where the state is now.
        after = replace(after, optimizer="adamw")
    return after


_DEFAULTS = {field.name: field.default for field in fields(Settings) if field.name in ("workers", "pin_memory")}


def _reverted(settings: Settings, preset: Preset) -> dict[str, Any]:
    """The defaults of what the present preset has set and the next one leaves open. Another value
    than the present preset's is a person's choice, and stays."""
    left = [name for name, value in _DEFAULTS.items() if getattr(preset, name) is None and getattr(settings, name) != value]
    present = load_presets().get(settings.preset) if left else None
    return {name: _DEFAULTS[name] for name in left if getattr(present, name, None) == getattr(settings, name)}


def _split(settings: Settings, preset: Preset) -> Split:
    """Batch and accumulation under the preset, with the effective batch kept."""
    recipe = load_recipes().get(settings.recipe)
    ceiling = preset.max_batch
    if recipe is not None:
        # A ceiling only lowers the batch: it never exceeds what the recipe or the run already uses.
        # A preset without a ceiling restores the recipe's own micro-batch, so that `standard`
        # undoes the others.
        ceiling = recipe.batch if ceiling is None else min(ceiling, max(recipe.batch, settings.batch))
    found = None if ceiling is None else split_below(settings.effective_batch, settings.world_size, ceiling)
    return found or (settings.batch, settings.accumulation)


# --- edits ----------------------------------------------------------------------------------------


def edit_settings(
    settings: Settings,
    *,
    preset: str | None = None,
    assignments: Mapping[str, str] | None = None,
    gpus: str | None = None,
    max_updates: int | None = None,
    updates_done: int | None = None,
    samples_seen: int = 0,
    failed: Sequence[Settings] = (),
) -> Settings:
    """The settings after an edit, checked.

    `gpus` gets one process each. Then the memory strategy of `preset` is applied, and at last the
    `assignments` (see `assign`).
    `max_updates` counts all updates of the run, including those already done (`updates_done`,
    `samples_seen`); without it the run keeps its target in samples. If `updates_done` is given,
    even 0, a run is in progress, and settings that would make it another run are refused. `failed`:
    see `apply_preset`.
    """
    before, texts = settings, assignments or {}
    if gpus is not None:
        settings = _on_gpus(settings, gpus, set(texts))
    if preset is not None:
        settings = apply_preset(settings, find_preset(preset, settings.recipe), failed)
    settings = _assigned(settings, texts)
    if updates_done is not None:
        _refuse_another_run(before, settings, texts)
    if max_updates is None:
        return check(settings)
    done = updates_done or 0
    check_bounds("max_updates", max_updates, 1, MOST_UPDATES)
    if max_updates < done:
        raise SettingsError("max_updates", max_updates, f"{done} updates are done already; give more")
    target = samples_seen + (max_updates - done) * settings.effective_batch
    return check(replace(settings, target_samples=target))


def _on_gpus(settings: Settings, gpus: str, given: Set[str]) -> Settings:
    """The settings for these GPUs, with the effective batch kept if no split is among the `given`
    settings."""
    processes = gpus.count(",") + 1
    after = replace(settings, gpus=gpus, world_size=processes)
    # A split of each process suits the GPUs for which it was chosen.
    of_others = bool(settings.rank_splits) and gpus != settings.gpus and not {"batch", "rank_splits"} & given
    if not of_others and (processes == settings.world_size or set(SPLIT) & given):
        return after
    batch, accumulation = _split_over(settings.effective_batch, processes, settings.batch)
    return replace(after, batch=batch, accumulation=accumulation, rank_splits=())


def _assigned(settings: Settings, assignments: Mapping[str, str]) -> Settings:
    after = assign(settings, assignments)
    if "auto_batch" not in assignments and (after.zero.stage or set(SPLIT) & set(assignments)):
        # A given split is kept. Under ZeRO there is no search: a remedy may have chosen it for a
        # run that ran out of memory before it could search.
        after = replace(after, auto_batch=False)
    elif after.auto_batch and after.rank_splits:
        after = _even(after)
    # Two settings can end a run, and two can give its warm-up: clear the one that would win over
    # the one that was given.
    if "epochs" in assignments:
        after = replace(after, target_samples=0)
    if "warmup_fraction" in assignments and "warmup_samples" not in assignments:
        after = replace(after, warmup_samples=0)
    return after


def _even(settings: Settings) -> Settings:
    """The settings with one split for all processes, and the effective batch kept."""
    batch, accumulation = _split_over(settings.effective_batch, settings.world_size, settings.batch, auto=True)
    return replace(settings, batch=batch, accumulation=accumulation, rank_splits=())


def _refuse_another_run(before: Settings, after: Settings, assignments: Mapping[str, str]) -> None:
    for key, text in assignments.items():
        name = row_of(key)
        if FIELDS[name].new_run and value_of(before, name) != value_of(after, name):
            how = f"memtop train {before.recipe} --name NEW --set {key}={text}, or --fresh with this run's name"
            raise SettingsError(key, text, f"makes a new run: {how}")


# --- single settings as text ----------------------------------------------------------------------

_Part = Lora | Zero | Sampling
PARTS: dict[str, type[_Part]] = {"lora": Lora, "zero": Zero, "sample": Sampling}
DATA: dict[str, type] = {"source": str, "max_bytes": int, "train": str, "eval": str, "tokenizer": str, "text": str}
_COLUMNS = ("prompt", "response", "text")
DOTTED = (*PARTS, "model", "data")


def assign(settings: Settings, assignments: Mapping[str, str]) -> Settings:
    """The settings with the named values, given as text: {"batch": "4", "lora.r": "16",
    "data.train": "pairs.jsonl"}.

    Each value gets the type of its setting; the result is not checked as a whole. SettingsError for
    an unknown key or a value of another type.
    """
    changes: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    split: dict[str, str] = {}
    for key, text in assignments.items():
        head, dot, rest = key.partition(".")
        _refuse_unknown(key, head, bool(rest))
        if head in PARTS:
            parts.setdefault(head, {})[rest] = _part_value(head, rest, text)
        elif head == "model":
            changes["model"] = _model(changes.get("model", settings.model), rest, text)
        elif head == "data":
            changes["data"] = _data(changes.get("data", settings.data), rest, text)
        elif dot:
            raise SettingsError("--set", key, f"unknown key; {head} has no parts")
        elif head in SPLIT:
            split[head] = text
        elif head == "leave_out":
            changes[head] = _ranges(text)
        else:
            changes[key] = typed(key, get_type_hints(Settings, include_extras=True)[key], text)
    for head, values in parts.items():
        changes[head] = _part(head, getattr(settings, head), values, changes.get("method", settings.method))
    return _split_as_given(replace(settings, **changes), split)


def is_for_each(text: str) -> bool:
    """Whether this text of a batch has one size for each process: `3,1` or `2x12,1x8`."""
    return ("," in text or "x" in text) and any(map(str.isdecimal, text))


def _split_as_given(settings: Settings, given: Mapping[str, str]) -> Settings:
    """The settings with a split as text. `rank_splits`, or a batch with one size for each process,
    gives each process its own; a batch alone is that of all."""
    each = given.get("rank_splits") or given.get("batch", "")
    if "x" in each:
        pairs = [_numbers(each, word, "x", 2) for word in each.split(",")]
        splits = [(batch, accumulation) for batch, accumulation in pairs]
        # The form and a live edit give the largest ones, too.
        if given.get("rank_splits") and given.get("batch"):
            _refuse_another("batch", given["batch"], max(batch for batch, _ in splits), each)
        if given.get("accumulation"):
            _refuse_another("accumulation", given["accumulation"], max(accumulation for _, accumulation in splits), each)
        return _of_each(settings, each, splits)
    hints = get_type_hints(Settings, include_extras=True)
    values = {name: typed(name, hints[name], text) for name, text in given.items() if name == "accumulation"}
    if "," in each:
        accumulation = values.get("accumulation", settings.accumulation)
        sizes = _numbers(each, each, ",", each.count(",") + 1)
        return _of_each(settings, each, [(batch, accumulation) for batch in sizes])
    if given.get("rank_splits"):
        raise SettingsError("rank_splits", repr(each), "gives no size for each process; write B,B or BxA,BxA")
    if "batch" in given or "rank_splits" in given:
        batch = typed("batch", hints["batch"], given["batch"]) if "batch" in given else settings.batch
        return replace(settings, batch=batch, rank_splits=(), **values)
    if values and settings.rank_splits:
        if len({a for _, a in settings.rank_splits}) > 1:
            why = f"the processes have their own now, {settings.split_text}; give --batch too"
            raise SettingsError("accumulation", values["accumulation"], why)
        return with_splits(settings, [(batch, values["accumulation"]) for batch, _ in settings.rank_splits])
    return replace(settings, **values)


def _refuse_another(name: str, given: str, most: int, each: str) -> None:
    """SettingsError if this is not the largest one of the splits `each`."""
    if given != str(most):
        raise SettingsError(name, given, f"{each} gives it already; leave it out, or give {most}")


def _of_each(settings: Settings, text: str, splits: list[Split]) -> Settings:
    """The settings with one split for each process; SettingsError for another number of them."""
    check_one_for_each(text, len(splits), settings.world_size)
    return with_splits(settings, splits)


def _numbers(text: str, part: str, separator: str, count: int) -> list[int]:
    words = [word.strip() for word in part.split(separator)]
    if len(words) != count or not all(word.isascii() and word.isdigit() for word in words):
        why = "must be a whole number, or one size for each process: B,B or BxA,BxA"
        raise SettingsError("batch", repr(text), why)
    return [int(word) for word in words]


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    """`1200-1264,1500-1516`; empty for none."""
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = word.partition("-")
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
            raise SettingsError("leave_out", repr(text), "gives no positions; write FIRST-END or FIRST-END,FIRST-END")
        found.append((int(first), int(last)))
    return tuple(sorted(found))


def typed(key: str, kind: Any, text: str) -> Any:
    """The text as a value of that type; lists are separated by commas, as `a,b` or `["a", "b"]`."""
    choices = [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []
    value: Any = text
    if get_origin(kind) is tuple:
        words = text.strip().removeprefix("[").removesuffix("]").split(",")
        value = [bare for word in words if (bare := word.strip(" \"'"))]
    elif choices and text.isdecimal():
        value = int(text)  # msgspec converts text to an int, but not to a Literal of ints.
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(key, repr(text), wanted(kind, text, choices, str(error))) from None


def assignable() -> list[str]:
    """The settings that `--set` takes, those with parts by their first word."""
    return [name for name in Settings.__struct_fields__ if name not in FIELDS or FIELDS[name].editable]


def _refuse_unknown(key: str, head: str, dotted: bool) -> None:
    names = assignable()
    if head not in names:
        listed = ", ".join(f"{name}.…" if name in DOTTED else name for name in names)
        raise SettingsError("--set", key, unknown_key(setting_meant(head, names), listed))
    if head in DOTTED and not dotted:
        raise SettingsError("--set", key, f"has parts; there are {', '.join(parts_of(head))}")


def parts_of(head: str) -> list[str]:
    """The keys of a setting with parts. A word in capitals stands for a name."""
    if head in PARTS:
        return [f"{head}.{name}" for name in PARTS[head].__struct_fields__]
    if head == "model":
        return ["model.path", "model.config.KEY"]
    return [*(f"data.{name}" for name in DATA), "data.columns.NAME"]


def _unknown_part(head: str, rest: str) -> SettingsError:
    known = parts_of(head)
    key = f"{head}.{rest}"
    return SettingsError("--set", key, unknown_key(did_you_mean(key, known), ", ".join(known)))


def _part_value(head: str, rest: str, text: str) -> Any:
    hints = get_type_hints(PARTS[head], include_extras=True)
    if rest not in hints:
        raise _unknown_part(head, rest)
    return typed(f"{head}.{rest}", hints[rest], text)


def _part(head: str, present: _Part | None, values: dict[str, Any], method: str) -> _Part:
    """The part with these values; SettingsError if it is a new one, and others are needed, too."""
    whole = {**({} if present is None else msgspec.to_builtins(present)), **values}
    needed = [f"{head}.{one.name}=N" for one in msgspec.structs.fields(PARTS[head]) if one.required and one.name not in whole]
    if needed:
        add = " ".join(f"--set {one}" for one in [*needed, *(["method=lora"] if method == "full" else [])])
        raise SettingsError("--set", f"{head}.{next(iter(values))}", f"the recipe has no [{head}] table; add {add}")
    return msgspec.convert(whole, PARTS[head])


def _model(model: dict[str, Any], rest: str, text: str) -> dict[str, Any]:
    name, _, key = rest.partition(".")
    if name == "path" and not key:
        if not text:
            raise SettingsError("model.path", "''", "give a folder or a hub name")
        return {"path": text}
    if name == "config" and key:
        # A configuration replaces a path: the weights are then initialized at random.
        present = model.get("config", {})
        value = _finite(f"model.{rest}", _scalar(text))
        return {"config": {**present, key: _of_kind(f"model.{rest}", value, present.get(key))}}
    raise _unknown_part("model", rest)


def _data(data: dict[str, Any], rest: str, text: str) -> dict[str, Any]:
    name, _, column = rest.partition(".")
    if name == "columns" and column:
        columns = data.get("columns", {})
        known = [*columns, *(known for known in _COLUMNS if known not in columns)]
        if column not in known:
            listed = ", ".join(f"data.columns.{name}" for name in known)
            raise SettingsError("--set", f"data.{rest}", unknown_key(did_you_mean(column, known), listed))
        return {**data, "columns": {**columns, column: text}}
    if name not in DATA or column:
        raise _unknown_part("data", rest)
    value = typed(f"data.{name}", DATA[name], text)
    # Files and a built-in source exclude each other: the one given last wins.
    dropped = {"train": ("source", "max_bytes"), "source": ("train", "eval")}.get(name, ())
    return {**{key: kept for key, kept in data.items() if key not in dropped}, name: value}


def _scalar(text: str) -> Any:
    """A number, true, false, null or a list in JSON; anything else is text."""
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, dict) else value


def _of_kind(key: str, value: Any, present: Any) -> Any:
    """The value; SettingsError if the recipe's value for a key of the model is of another kind. 1e3
    counts as a whole number. Only transformers knows all rules, and it takes seconds to load."""
    # A token's id may be 0, and several tokens can end a text.
    if value is None or present is None or isinstance(present, list | str) or key.endswith(("_id", "_ids")):
        return value
    if isinstance(present, int) and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(present, bool):
        wanted, fits = "true or false", isinstance(value, bool)
    elif isinstance(present, int):
        least = min(1, present)
        wanted, fits = f"a whole number from {least}", is_number and isinstance(value, int) and value >= least
    else:
        wanted, fits = "a number", is_number
    if not fits:
        raise SettingsError(key, repr(value), f"give {wanted}")
    return value


def _finite(key: str, value: Any) -> Any:
    """The value; SettingsError if it holds a number that cannot be stored. JSON has no infinity,
    msgspec no wider integers."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, list):
            _finite(key, item)
        elif isinstance(item, int | float) and not abs(item) < 1 << 63:
            raise SettingsError(key, item, "is too large a number")
    return value
