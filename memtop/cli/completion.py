"""Shell completion: `eval "$(_MEMTOP_COMPLETE=bash_source memtop)"`, or zsh_source, fish_source.

click completes commands and options. The functions here complete values. What cannot be read
completes to nothing: a message would land in the line that the user types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, ShellComplete

from memtop.cli.language import LANGUAGE_OPTION, without_language
from memtop.cli.shells import SHELLS
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.language import LANGUAGES

if TYPE_CHECKING:
    from memtop.supervisor.run.record.folder import RunFolder

VARIABLE = "_MEMTOP_COMPLETE"
"""The shell asks with it: `bash_source` for the script, `bash_complete` for what fits the line."""
_GPU_SECONDS = 2.0
"""How long the driver may take to name the GPUs."""
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]


def answer(app: click.Command, instruction: str) -> list[str]:
    """The lines that memtop prints for the shell; UsageError for an unknown one."""
    name, _, what = instruction.partition("_")
    kind = SHELLS.get(name)
    if kind is None or what not in ("source", "complete"):
        raise UsageError(f"{VARIABLE}={instruction}: unknown; give bash_source, zsh_source or fish_source")
    shell = kind(app, {}, "memtop", VARIABLE)
    if what == "source":
        return shell.source().splitlines()
    words, incomplete = shell.get_completion_args()
    return [line for item in _found(shell, words, incomplete) for line in shell.format_completion(item).split("\n")]


def _found(shell: ShellComplete, words: list[str], incomplete: str) -> Iterator[CompletionItem[str]]:
    """What fits the whole word under the cursor. `head`: the part of it before a path."""
    if "--" in words:
        # The words of the user's own program are files.
        yield CompletionItem(incomplete, type="file", head="")
        return
    with suppress(UsageError):  # the command itself says it
        words, _ = without_language(words)
    option, sign, value = incomplete.partition("=")
    before = ""
    if sign and option.startswith("--"):
        words, incomplete, before = [*words, option], value, f"{option}="
    if words[-1:] == [LANGUAGE_OPTION]:
        # It may stand behind every command.
        yield from (CompletionItem(before + one, head=before) for one in LANGUAGES if one.startswith(incomplete))
        return
    shell.ctx_args["obj"] = words
    for item in shell.get_completions(words, incomplete):
        yield CompletionItem(before + item.value, type=item.type, help=item.help, head=before + (item.head or ""))


def _given(context: click.Context) -> Mapping[str, Any]:
    """The parameters of a line whose last word is an option: click leaves out its arguments until
    the option has a value."""
    name, words = str(context.info_name), context.obj
    before = words[words.index(name) + 1 : -1]
    return context.command.make_context(name, before, parent=context.parent, resilient_parsing=True).params


def one_of(*values: str) -> Completer:
    """Completes these words."""
    return lambda context, parameter, incomplete: _fitting(dict.fromkeys(values), incomplete)


def _fitting(values: Mapping[str, str | None], incomplete: str) -> list[CompletionItem[str]]:
    """Those that begin like this, with their help."""
    return [CompletionItem(value, help=words) for value, words in values.items() if value.startswith(incomplete)]


# --- runs -----------------------------------------------------------------------------------------


def _runs_dir(context: click.Context) -> Path:
    from memtop.cli.configuration import default_runs_dir

    return context.params.get("runs_dir") or default_runs_dir()


def runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The runs of the folder, the newest first, with their states; then folders."""
    from memtop.supervisor.run.record.folder import LATEST
    from memtop.supervisor.run.runs import row_of, run_folders

    found = []
    try:
        for folder in reversed(run_folders(_runs_dir(context))):
            if folder.name.startswith(incomplete):
                run = row_of(folder).run
                found.append(CompletionItem(folder.name, help="unreadable" if run is None else run.word))
    except MemtopError:
        return []
    if found and LATEST.startswith(incomplete):
        found.append(CompletionItem(LATEST, help="the newest run"))
    return found or [CompletionItem(incomplete, type="dir")]


def _run_of(given: Mapping[str, Any]) -> RunFolder | None:
    """The run that the line names."""
    from memtop.cli.common import find_run

    name = given.get("run_name")
    try:
        return None if name is None else find_run(name, given.get("runs_dir"))
    except MemtopError:
        return None


def configurations(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The earlier configurations of the run, the newest first, with their settings."""
    from memtop.cli.common import readable_ledger
    from memtop.supervisor.run.report.facts import configuration_words
    from memtop.supervisor.run.view import read_configurations

    folder = _run_of(context.params)
    if folder is None:
        return []
    try:
        with readable_ledger(folder):
            rows = configuration_words(read_configurations(folder.path))
    except (MemtopError, OSError):
        return []
    return _fitting({str(row.number): words or row.reason for row, words in reversed(rows[:-1])}, incomplete)


# --- recipes, presets and settings ----------------------------------------------------------------


def recipes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The recipes, the user's own included, with their titles."""
    from memtop.presets import PresetFileError, load_recipes

    try:
        return _fitting({one.name: one.title for one in load_recipes().values()}, incomplete)
    except PresetFileError:
        return []


def presets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The presets, the user's own included, with their titles."""
    from memtop.presets import PresetFileError, load_presets

    try:
        return _fitting({one.name: one.title for one in load_presets().values()}, incomplete)
    except PresetFileError:
        return []


def profiles(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The profiles of programs, the user's own included, with their titles; `auto` and `none`."""
    from memtop.presets import PresetFileError
    from memtop.presets.program_profiles import load_profiles

    words: dict[str, str | None] = {"auto": "the one that fits", "none": "without a profile"}
    try:
        return _fitting({**{one.name: one.title for one in load_profiles().values()}, **words}, incomplete)
    except PresetFileError:
        return _fitting(words, incomplete)


def files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Files and folders."""
    return [CompletionItem(incomplete, type="file", head="")]


def settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """`KEY=` for `--set`, and after it the values that the key may have, or files."""
    from memtop.presets.keys import FILES, LISTS, choices
    from memtop.supervisor.run.grip import POSITION

    key, sign, value = incomplete.partition("=")
    if not sign:
        return _fitting(_keys(context), incomplete)
    if key in LISTS:
        given, comma, last = value.rpartition(",")
        others = [word for word in LISTS[key] if word not in given.split(",")]
        return _fitting({f"{key}={given}{comma}{word}": None for word in others}, incomplete if last else f"{key}={value}")
    known = ["lost"] if key == POSITION else choices(key)
    found = _fitting({f"{key}={word}": None for word in known}, incomplete)
    return found or ([CompletionItem(incomplete, type="file", head=f"{key}=")] if key in FILES else [])


def _keys(context: click.Context) -> dict[str, str]:
    """The keys that the recipe or the run of this line has, each with its meaning."""
    from memtop.presets import PresetFileError, load_recipes
    from memtop.presets.fields import FIELDS, row_of
    from memtop.presets.keys import keys

    model: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}
    given = _given(context)
    is_new = "run_name" not in given
    if is_new:
        try:
            recipe = load_recipes().get(given.get("recipe") or "first-run")
        except PresetFileError:
            recipe = None
        if recipe is not None:
            model, data = recipe.model, recipe.data
    elif (own := _keys_of_program(given)) is not None:
        return own
    fields = {key: FIELDS[row_of(key)] for key in keys(model, data, new_run=is_new)}
    meanings = {key: ", ".join(filter(None, (field.label, field.unit))) for key, field in fields.items()}
    return {key if key.endswith(".") else f"{key}=": words for key, words in meanings.items()}


def _keys_of_program(given: Mapping[str, Any]) -> dict[str, str] | None:
    """The keys for a run of the user's own program; None for a run of a recipe."""
    from memtop.presets.fields import FIELDS
    from memtop.presets.program_profiles import KNOB_NAMES
    from memtop.supervisor.program import known
    from memtop.supervisor.run.grip import KNOBS, POSITION
    from memtop.supervisor.run.view import read_state

    folder = _run_of(given)
    try:
        run = None if folder is None else read_state(folder)
    except (MemtopError, OSError):
        run = None
    if run is None or run.settings is not None:
        return None
    grip = None if run.program is None else run.program.grip
    settable = {"hooks": KNOBS, "profile": KNOB_NAMES}.get(grip or "", ())
    names = [name for name in known(run.program.knobs) or () if name in settable] if run.program is not None else []
    found = {f"{name}=": FIELDS[name].label for name in (*names, "allocator")}
    return {**found, f"{POSITION}=": "lost"} if settable else found


# --- GPUs -----------------------------------------------------------------------------------------


def gpus_to_use(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The GPUs with their names and free memory, one after the other with commas; `free:N`."""
    known = _gpus()
    free = {f"free:{number}": None for number in range(1, len(known) + 1)}
    return [*_listed(known, incomplete), *_fitting(free, incomplete)]


def gpus_to_show(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The same, but `visible` instead of `free:N`."""
    return [*_listed(_gpus(), incomplete), *_fitting({"visible": None}, incomplete)]


def _gpus() -> dict[str, str]:
    from memtop.supervisor import units
    from memtop.supervisor.monitor.sampler import Sampler

    # Not closed: that would wait for the driver's events, and this process ends at once.
    gpus = Sampler(patience=_GPU_SECONDS).sample().gpus
    return {str(gpu.index): f"{gpu.name or 'unknown'}, {units.size(gpu.free_bytes)} free" for gpu in gpus}


def _listed(known: Mapping[str, str], incomplete: str) -> list[CompletionItem[str]]:
    given, comma, _ = incomplete.rpartition(",")
    left = {f"{given}{comma}{index}": words for index, words in known.items() if index not in given.split(",")}
    return _fitting(left, incomplete)
