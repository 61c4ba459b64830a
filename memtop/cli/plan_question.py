"""What the options of `memtop plan` ask for: the settings that they give, and the options that give
other settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from memtop.cli.configuration import configured
from memtop.presets import Preset, PresetFileError, Settings, SettingsError
from memtop.presets.comparison import given
from memtop.presets.edits import find_preset
from memtop.presets.fields import FIELDS, differing, value_of
from memtop.presets.parameters import stored_config
from memtop.supervisor.errors import UsageError
from memtop.supervisor.interpreters import Interpreter
from memtop.supervisor.plan import Card
from memtop.supervisor.wire import Change

METHODS = {"full": "pretrain-causal", "lora": "sft-lora", "qlora": "sft-qlora"}
"""The recipe for each method."""
_OPTIONS = {"batch": "--batch", "accumulation": "--accum", "seq_len": "--seq-len"}
_ROUNDS = 3
"""With a value added, memtop may choose another preset, which needs other values."""
_NULL = "null"
"""No value, as `--set` takes it."""


class Question(NamedTuple):
    """The options of a plan."""

    recipe: str | None
    model: str | None
    method: str | None
    preset: str | None
    values: Mapping[str, str]
    """Settings as `--set` takes them."""
    by_set: frozenset[str]
    """Those of them that were given by `--set`."""
    processes: int
    card: Card
    python: Interpreter | None
    """None: none has torch."""


def settings_of(question: Question) -> tuple[Settings, bool]:
    """What `memtop train` would begin with, and whether it chooses the preset; UsageError names the
    option that is wrong."""
    # They import what a plan does not need otherwise.
    from memtop.cli.gpus import Place
    from memtop.cli.recipes import edited_recipe, own_preset, placed_model, recipe_named

    place = None if question.model is None else _place_of(question.model)
    method, card, python = question.method, question.card, question.python
    name = question.recipe or _recipe_for(place, method)
    gpus = [str(number) for number in range(question.processes)]
    try:
        base = recipe_named(name)
        if method is not None and method != base.method:
            raise UsageError(f"--method {method}: recipe {base.name} is for method {base.method}; leave out RECIPE")
        if place is not None:
            base = replace(base, model=placed_model(place))
        wanted = question.preset or configured("preset").value
        edits = Change(assignments=dict(question.values))
        if wanted is not None:
            chosen: Preset = find_preset(wanted, base.name)
            whole, reason = chosen.meant_for(base.name), None
        else:
            there = Place()
            if card.total_bytes is not None:
                there = Place(free_bytes=card.total_bytes - card.others_bytes, card=card)
            (chosen, reason), whole = own_preset(base, edits, gpus, there, "" if python is None else python.path), False
        settings = edited_recipe(base, chosen, whole, edits, gpus)
        return replace(settings, model=placed_model(settings.model), device="cuda"), reason is not None
    except (SettingsError, PresetFileError) as error:
        raise UsageError(str(error)) from None


def _place_of(model: str) -> dict[str, Any]:
    """The `model` of the settings; UsageError for a file that is no config.json."""
    path = Path(model).expanduser()
    if not path.is_file():
        return {"path": model}
    if path.name != "config.json":
        raise UsageError(f"--model {model}: is a file; give a folder with a config.json, that file, or a hub name")
    return {"path": str(path.absolute().parent)}


def _recipe_for(model: dict[str, Any] | None, method: str | None) -> str:
    """The recipe for a model and a method that were given without one."""
    if model is None and method is None:
        return "first-run"
    kind = None if model is None else (stored_config(_with_model(model)) or {}).get("model_type")
    return "pretrain-t5" if kind == "t5" and method in (None, "full") else METHODS[method or "full"]


def _with_model(model: dict[str, Any]) -> Settings:
    return Settings(recipe="", preset="", batch=1, accumulation=1, seq_len=1, save_every=1, learning_rate=1e-4, model=model)


# --- and back -------------------------------------------------------------------------------------


class Added(NamedTuple):
    """Options that give settings."""

    options: list[str]
    """To add to those of the question, at their end: the last one of the same name counts."""
    settings: Settings
    """Under the name of the preset that these options give."""
    values: Mapping[str, str] = {}
    """Of the options, the settings as `--set` takes them."""


def added(question: Question, wanted: Settings) -> Added | None:
    """The shortest options that give these settings, but for the name of the preset; None if no
    options do."""
    presets = dict.fromkeys((None, wanted.preset, "standard"))
    found = [one for preset in presets if (one := _added(question, preset, wanted)) is not None]
    return min(found, key=lambda one: len(" ".join(one.options)), default=None)


def whole_options(question: Question, wanted: Settings) -> list[str] | None:
    """All options of a plan for these settings, but for those of the machine. The question names
    no preset; None if no options give them."""
    found = _added(question, None, wanted)
    if found is None:
        return None
    words = [] if question.recipe is None else [question.recipe]
    gpus = str(question.processes) if question.processes > 1 else None
    for name, text in (("--model", question.model), ("--method", question.method), ("--gpus", gpus)):
        words += [] if text is None else [name, text]
    return [*words, *_words(question, None, {**question.values, **found.values})]


def _added(question: Question, preset: str | None, wanted: Settings) -> Added | None:
    """The same with this preset; None: with that of the question."""
    asked = question if preset is None else question._replace(preset=preset)
    values: dict[str, str] = {}
    for _ in range(_ROUNDS):
        try:
            settings, _ = settings_of(asked._replace(values={**asked.values, **values}))
        except UsageError:
            return None
        names = [name for name in differing(settings, wanted) if name != "preset"]
        if not names:
            return Added(_words(asked, preset, values), settings, values)
        if not all(FIELDS[name].editable for name in names):
            return None
        values |= {name: _NULL if (value := value_of(wanted, name)) is None else given(value) for name in names}
    return None


def _words(question: Question, preset: str | None, values: Mapping[str, str]) -> list[str]:
    words = [] if preset is None else ["--preset", preset]
    for name, text in sorted(values.items(), key=lambda one: one[0] not in _OPTIONS):
        option = _OPTIONS.get(name)
        words += ["--set", f"{name}={text}"] if option is None or name in question.by_set else [option, text]
    return words
