"""Which Python trains a recipe, what it lacks, and the command that installs it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memtop.cli.configuration import configured
from memtop.cli.installing import install, install_extra
from memtop.cli.output import print_message
from memtop.presets.checks import DECODERS, TABLES, did_you_mean, wrong_value
from memtop.presets.parameters import as_stored, stored_config
from memtop.presets.schema import Settings
from memtop.supervisor.errors import UsageError
from memtop.supervisor.interpreters import NEEDED, OLDEST, Interpreter, Named, Proof, Search, find, folder_of, missing_in

# By tracker: the modules of which one must be installed, and the package to install. The trainer
# refuses unknown names.
_TRACKERS = {"tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"), "wandb": (("wandb",), "wandb")}
_OWN_PROGRAM = "your own program, given after `--`, does not need it"


def search(given: str | None = None, option: str = "--python") -> Search:
    """The interpreter for new runs. `given`: what was named with `option`."""
    found = configured("python")
    named = None
    if given is not None:
        named = Named(given, option)
    elif found.value is not None:
        named = Named(found.value, found.where or found.source, by_project=found.source == "project")
    return find(named, os.environ, Path.cwd(), lambda path: print_message(f"memtop: starts {path} to see whether it has torch"))


def python_for(who: str, given: str | None = None, option: str = "--python") -> Interpreter:
    """The interpreter that trains, with all that every run needs. UsageError if there is none."""
    result = search(given, option)
    found = result.found
    if found is None:
        first, proof = result.refused[0]
        if first.named:
            raise UsageError(f"{first.why} {first.path}: {proof.why_not()}; {_advice(first.path, proof)}")
        raise UsageError(
            f"{who} needs a Python with torch, and none was found: {result.reasons()}; "
            f"name yours with --python PATH, or install it beside memtop: {install_extra('train')}; {_OWN_PROGRAM}"
        )
    refuse_missing(found, NEEDED, who)
    return found


def _advice(path: str, proof: Proof) -> str:
    if proof.problem is not None or proof.version < OLDEST:
        return "give a Python that has torch"
    return command_for(Interpreter(path=path, why="", proof=proof), missing_in(proof, NEEDED))


def refuse_missing(python: Interpreter, modules: Sequence[str], who: str) -> None:
    """UsageError if this interpreter lacks one of the modules."""
    missing = python.missing(modules)
    if missing:
        where = "" if python.is_own else f", which {python.path} ({python.why}) lacks"
        raise UsageError(f"{who} needs {', '.join(missing)}{where}: {command_for(python, missing)}; {_OWN_PROGRAM}")


def command_for(python: Interpreter, packages: Sequence[str]) -> str:
    """The command that installs these packages of the trainer there."""
    if python.is_own:
        return install_extra("train")
    return install(python.path, list(packages), has_pip="pip" in python.proof.packages)


def refuse_missing_trackers(python: Interpreter, names: Sequence[str]) -> None:
    for name in names:
        modules, package = _TRACKERS.get(name, ((), ""))
        if modules and all(python.missing([module]) for module in modules):
            command = install(python.path, [package], has_pip="pip" in python.proof.packages)
            raise UsageError(f"trackers {name}: not installed: {command}")


def refuse_wrong_model(python: Interpreter | None, settings: Settings) -> None:
    """UsageError if no model works with the model's configuration, or if the transformers of this
    interpreter refuses it."""
    config = stored_config(settings) or {}
    wrong = wrong_value(config)
    is_new, by_itself = "config" in settings.model, "model_type" in config and "auto_map" not in config
    if wrong is None and python is not None and (is_new or by_itself):  # not by code in the model's folder
        wrong = _refused_by_transformers(python, config, is_new=is_new)
    if wrong is not None:
        raise UsageError(wrong)


_DIVIDES = re.compile(r"^ *if self\.hidden_size % self\.num_attention_heads != 0:$", re.MULTILINE)
"""Not in each version and for each architecture: others train with heads that are narrower."""
_CLASS = re.compile(r"^class\b", re.MULTILINE)
_ROPE = "rope_parameters"
"""A setting of transformers 5. Versions before do not read it."""
_FUNCTION = re.compile(r"\bACT2FN\[config\.(\w+)\]")
_FUNCTIONS = re.compile(r"^ACT2CLS = \{.*?^\}", re.MULTILINE | re.DOTALL)


def _refused_by_transformers(python: Interpreter, config: Mapping[str, Any], *, is_new: bool) -> str | None:
    """Why it refuses the model, as one line. Its files say that: to import it takes seconds. None
    if transformers takes it, or if its files do not tell. `is_new`: the model has no folder; of one
    that has, a plan says something even if its architecture is not known."""
    folder, kind = folder_of(python, "transformers"), str(config.get("model_type") or "")
    if not kind:
        return "model.config.model_type: missing; name a Hugging Face architecture such as llama"
    if folder is None:
        return None
    which = python.proof.packages.get("transformers", "")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    try:
        listed = "".join(file.read_text(encoding="utf-8") for file in (folder / "models/auto").glob("*.py"))
        if is_new and '"llama"' in listed and f'"{kind}"' not in listed:
            near = did_you_mean(kind, re.findall(r'"([\w.-]+)"[,:]\s*"\w+Config"', listed))
            return (
                f"model.config.model_type {kind}: transformers {which} does not know this architecture; a newer one may{near}"
            )
        name = kind.replace("-", "_")
        source = (folder / f"models/{name}/configuration_{name}.py").read_text(encoding="utf-8")
        if len(_CLASS.findall(source)) != 1:
            return None  # of several classes, another one may refuse it
        if type(hidden) is int and type(heads) is int and heads > 0 and hidden % heads and _DIVIDES.search(source):
            return (
                f"model.config.hidden_size {hidden}: must be a multiple of num_attention_heads {heads}, "
                f"says transformers {which}"
            )
        rope = config.get(_ROPE)
        theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
        wrong = theta is not None and not (type(theta) in (int, float) and theta > 0)
        rotates = kind in DECODERS and kind not in TABLES
        if wrong and rotates and _ROPE in (folder / "modeling_rope_utils.py").read_text(encoding="utf-8"):
            return f"model.config.rope_parameters.rope_theta {as_stored(theta)}: must be a number above 0"
        return _unknown_function(config, folder, name, which)
    except (OSError, ValueError):
        return None  # It has other files: the trainer finds out.


def _unknown_function(config: Mapping[str, Any], folder: Path, name: str, which: str) -> str | None:
    """Why transformers has no activation function of the model; None if it has. OSError if its
    files do not tell."""
    used = set(_FUNCTION.findall((folder / f"models/{name}/modeling_{name}.py").read_text(encoding="utf-8")))
    listed = _FUNCTIONS.search((folder / "activations.py").read_text(encoding="utf-8"))
    known = [] if listed is None else re.findall(r'"(\w+)":', listed[0])
    for setting in used if "silu" in known else ():
        value = config.get(setting)
        if isinstance(value, str) and value not in known:
            near, value = did_you_mean(value, known), as_stored(value)
            return f"model.config.{setting} {value}: transformers {which} has no such function{near}"
    return None


def libraries_of(settings: Settings) -> tuple[str, ...]:
    """The further modules that a run with these settings imports."""
    needed = {"lora": ("peft",), "qlora": ("peft", "bitsandbytes")}.get(settings.method, ())
    eight_bit = ("bitsandbytes",) if settings.optimizer.endswith("8bit") else ()
    return (*needed, *eight_bit, *(("deepspeed",) if settings.zero.stage else ()))


def said_at_start(python: Interpreter) -> str | None:
    """Which interpreter trains, and why. None for memtop's own, unless another environment is
    active."""
    if not python.is_own:
        passed = f"; not taken: {python.not_taken}" if python.not_taken else ""
        return f"trains with {python.text()}{passed}" + ("" if python.why == "--python" else "; --python chooses another")
    active = os.environ.get("VIRTUAL_ENV")
    if not active or os.path.realpath(active) == os.path.realpath(sys.prefix):
        return None
    return f"trains with {python.text()}; --python {active} chooses the active environment"
