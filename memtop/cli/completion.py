"""Shell completion: `eval "$(_MEMTOP_COMPLETE=bash_source memtop)"`, or zsh_source, fish_source.

click completes commands and options. The functions here complete runs, recipes and presets. What
cannot be read completes to nothing: a message would land in the line that the user types.
"""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from memtop.supervisor.errors import MemtopError, UsageError

VARIABLE = "_MEMTOP_COMPLETE"
"""The shell asks with it: `bash_source` for the script, `bash_complete` for what fits the line."""


def answer(app: click.Command, instruction: str) -> list[str]:
    """The lines that memtop prints for the shell; UsageError for an unknown one."""
    shell, _, what = instruction.partition("_")
    kind = get_completion_class(shell)
    if kind is None or what not in ("source", "complete"):
        raise UsageError(f"{VARIABLE}={instruction}: unknown; give bash_source, zsh_source or fish_source")
    shell_of_user = kind(app, {}, "memtop", VARIABLE)
    if what == "source":
        return shell_of_user.source().splitlines()
    words, incomplete = shell_of_user.get_completion_args()
    # The words of the user's own program are files.
    own = [CompletionItem(incomplete, type="file")] if "--" in words else None
    found = own or shell_of_user.get_completions(words, incomplete)
    return [line for item in found for line in shell_of_user.format_completion(item).split("\n")]


def runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The runs of the folder, the newest first, with their states; then folders."""
    from memtop.cli.configuration import default_runs_dir
    from memtop.supervisor.run.record.folder import LATEST
    from memtop.supervisor.run.runs import row_of, run_folders

    found = []
    try:
        where: Path = context.params.get("runs_dir") or default_runs_dir()
        for folder in reversed(run_folders(where)):
            if folder.name.startswith(incomplete):
                run = row_of(folder).run
                found.append(CompletionItem(folder.name, help="unreadable" if run is None else run.state.value))
    except MemtopError:
        return []
    if found and LATEST.startswith(incomplete):
        found.append(CompletionItem(LATEST, help="the newest run"))
    return found or [CompletionItem(incomplete, type="dir")]


def recipes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The recipes, the user's own included, with their titles."""
    from memtop.presets import PresetFileError, load_recipes

    try:
        return [CompletionItem(one.name, help=one.title) for one in load_recipes().values() if one.name.startswith(incomplete)]
    except PresetFileError:
        return []


def presets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The presets, the user's own included, with their titles."""
    from memtop.presets import PresetFileError, load_presets

    try:
        return [CompletionItem(one.name, help=one.title) for one in load_presets().values() if one.name.startswith(incomplete)]
    except PresetFileError:
        return []
