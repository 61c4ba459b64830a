"""`memtop train`: from the command line to the settings of a new run, and its start.

The functions import NVML and asyncio themselves, since `memtop train --help` needs neither.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec.structs import replace

from memtop import __version__
from memtop.cli import completion
from memtop.cli.configuration import configured, default_runs_dir
from memtop.cli.interpreters import (
    libraries_of,
    python_for,
    refuse_missing,
    refuse_missing_trackers,
    refuse_wrong_model,
    said_at_start,
)
from memtop.cli.options import (
    WHOLE,
    assignments_of,
    detach_option,
    edit_options,
    gpus_option,
    headless_option,
    refuse_both,
    runs_dir_option,
)
from memtop.cli.output import print_message
from memtop.cli.recipes import edited_recipe, estimates_at, own_preset, placed_data, placed_model, recipe_named
from memtop.presets import (
    PresetFileError,
    Settings,
    SettingsError,
    load_presets,
    load_recipes,
)
from memtop.presets.checks import did_you_mean, longer_than_known, without_adapters
from memtop.presets.edits import find_preset
from memtop.presets.fields import OPTIONS
from memtop.presets.program_profiles import load_profiles
from memtop.supervisor.errors import RunFolderError, UsageError
from memtop.supervisor.profile.command import PYTHON, shell_text, simple
from memtop.supervisor.profile.detection import ProfileMatch, propose
from memtop.supervisor.profile.reading import files_in, no_such_file
from memtop.supervisor.program import name_of
from memtop.supervisor.recovery.policy import ON_OOM
from memtop.supervisor.run.output.lines import PATTERN_GROUPS
from memtop.supervisor.run.record.folder import RunFolder, RunSpec
from memtop.supervisor.run.record.ownership import why_not_own
from memtop.supervisor.wire import Change

if TYPE_CHECKING:
    from memtop.supervisor.recovery.forecast import Estimates
    from memtop.supervisor.run.notices import Target

_ENDING_SECONDS = 60.0
"""How long `--fresh` waits for a supervisor whose program has ended."""


def _known_on_oom(value: str, given: str) -> str:
    if value not in ON_OOM:
        raise UsageError(f"{given} {value}: give auto (continue with less), ask (propose it) or stop (report it)")
    return value


class _TrainCommand(click.Command):
    """Its help lists the recipes and presets, the user's own included."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        try:
            recipes = [(one.name, one.title) for one in load_recipes().values()]
            presets = [(one.name, one.title) for one in load_presets().values()]
        except PresetFileError as error:
            formatter.write_paragraph()
            formatter.write_text(f"The recipes and presets cannot be listed: {error}")
            return
        for heading, rows in (("Recipes", recipes), ("Presets (memtop presets shows what each changes)", presets)):
            with formatter.section(heading):
                formatter.write_dl(rows)
        with formatter.section("Examples"):
            formatter.write_dl(list(_EXAMPLES.items()), col_max=42)


_EXAMPLES = {
    "memtop train": "the recipe first-run, which needs no GPU",
    "memtop train pretrain-causal --batch auto": "with the largest batch that fits",
    "memtop train -- python train.py --lr 1e-4": "your own program, unchanged",
}


@click.command(cls=_TrainCommand)
@click.argument("recipe", required=False, metavar="[RECIPE]", shell_complete=completion.recipes)
@edit_options
@gpus_option
@click.option("--name", metavar="NAME", help="the name of the run")
@click.option("--save-every", type=WHOLE, metavar="N", help="updates between two saves")
@click.option(
    "--python",
    metavar="PATH",
    help="the Python that trains a recipe, or the folder of its environment",
    shell_complete=completion.files,
)
@headless_option
@detach_option
@click.option(
    "--on-oom",
    metavar="auto|ask|stop",
    help="what to do when memory runs out [auto; your own program: ask]",
    shell_complete=completion.one_of("auto", "ask", "stop"),
)
@click.option(
    "--on-spike",
    metavar="ask|back|stop",
    help="what to do when the loss of a recipe jumps and stays high [ask]",
    shell_complete=completion.one_of("ask", "back", "stop"),
)
@click.option(
    "--program-profile",
    metavar="NAME",
    help="the profile of your own program, or none [the one that fits]",
    shell_complete=completion.profiles,
)
@click.option("--after", metavar="RUN", help="wait for this one run to end, however it ends", shell_complete=completion.runs)
@click.option(
    "--queue", is_flag=True, help="wait in turn until no other run and no program uses its GPUs (memtop next: be the next)"
)
@click.option("--then", metavar="COMMAND", help="a shell command for the very end, e.g. to shut a rented machine down")
@click.option(
    "--notify",
    multiple=True,
    metavar="TARGET",
    help="whom this run tells how it goes, too: desktop, a URL, ntfy:TOPIC or command:COMMAND; repeatable",
    shell_complete=completion.one_of("desktop", "ntfy:", "command:", "https://"),
)
@click.option("--fresh", is_flag=True, help="move an existing run of that name aside and start a new one")
@runs_dir_option
@click.pass_obj
def train(
    program: tuple[str, ...] | None,
    recipe: str | None,
    preset: str | None,
    batch: int | str | None,
    accum: int | None,
    seq_len: int | None,
    assignments: tuple[str, ...],
    max_updates: int | None,
    gpus: str | None,
    name: str | None,
    save_every: int | None,
    python: str | None,
    headless: bool,
    detach: bool,
    on_oom: str | None,
    on_spike: str | None,
    after: str | None,
    queue: bool,
    then: str | None,
    notify: tuple[str, ...],
    fresh: bool,
    program_profile: str | None,
    runs_dir: Path | None,
) -> int:
    """Train a recipe or your own program and open the dashboard.

    Your own program follows two dashes: `memtop train -- COMMAND ARG ...`. Without a terminal the
    run is headless. Closing the dashboard does not stop the run.
    """
    from memtop.cli import gpus as gpu_choice
    from memtop.cli.foreground import stay
    from memtop.supervisor.run.starting import free_name

    begun = time.time()
    refuse_both(headless, detach)
    told = _targets(notify)
    when_short = _on_oom(on_oom, program=bool(program))
    gpu_list = gpu_choice.wanted(gpus if gpus is not None else configured("gpus").value)
    options = {"save_every": save_every, "python": python, "on_spike": on_spike}
    values = assignments_of(assignments, batch=batch, accumulation=accum, seq_len=seq_len, **options)
    edits = Change(assignments=values, max_updates=max_updates)
    recipe_name = recipe or "first-run"
    if program:
        refuse_for_program(recipe, preset, edits)
        refuse_not_found(program, waits=queue or after is not None)
    else:
        preset = preset or configured("preset").value
        defaults = {name.replace("-", "_"): configured(name).value for name in ("save-every", "on-spike")}
        given = {name: text for name, text in defaults.items() if text}
        edits = replace(edits, assignments={**given, **values})
    chosen, program = _profile(program, program_profile) if program else (None, program)
    if program_profile is not None and not program:
        raise UsageError(f"--program-profile {program_profile}: it is for your own program, after `--`")
    plan = NewRun() if program else new_run(recipe_name, preset, edits, gpu_list, fresh=fresh)
    where = runs_dir or default_runs_dir()
    ahead = None if after is None else _find_run(after, where)
    spec = RunSpec(
        name=name or free_name(where, re.sub(r"\.(py|sh)$", "", name_of(program)) if program else recipe_name),
        created=begun,
        settings=plan.settings,
        command=program or (),
        cwd=str(Path.cwd()),
        gpus=",".join(gpu_list) if program and gpu_list else None,
        choice=plan.choice,
        on_oom=when_short,
        after=None if ahead is None else str(ahead.path),
        queue=queue,
        then=then,
        step_pattern=step_pattern(os.environ.get("MEMTOP_STEP")) if program else None,
        profile=chosen.profile if chosen is not None else None,
        profile_why=chosen.why if chosen is not None else "",
        memtop_version=__version__,
    )
    if program and _has_input():
        print_message("memtop: the standard input of this command is not passed on: that of the program is empty")
    return stay(_start(where, spec, fresh=fresh, notify=told), begun, headless=headless, detach=detach, told=plan.told)


def _has_input() -> bool:
    """Whether the standard input is a file or a pipe with something to read now. Cron and CI often
    give a command an empty pipe."""
    import fcntl
    import termios

    try:
        found = os.fstat(0)
        if stat.S_ISREG(found.st_mode):
            return os.lseek(0, 0, os.SEEK_CUR) < found.st_size
        return stat.S_ISFIFO(found.st_mode) and any(fcntl.ioctl(0, termios.FIONREAD, bytes(4)))
    except OSError:  # it is closed
        return False


def _find_run(name: str, runs_dir: Path) -> RunFolder:
    from memtop.cli.common import find_run

    return find_run(name, runs_dir)


def _profile(program: tuple[str, ...], given: str | None) -> tuple[ProfileMatch | None, tuple[str, ...]]:
    """The profile of the user's program, and why; None if none fits, or none is wanted. And the
    command: with a profile, that of `sh -c` is started without the shell."""
    found = configured("program-profile")
    name, option = (given, "--program-profile") if given is not None else (found.value, found.where)
    if name == "none":
        return None, program
    text = shell_text(program)
    inner = program if text is None else simple(text)
    try:
        profiles = load_profiles()
    except PresetFileError as error:
        raise UsageError(f"{error}; --program-profile none starts without profiles") from None
    if name == "auto":
        chosen = propose(profiles.values(), inner or program, str(Path.cwd()))
    elif name in profiles:
        chosen = ProfileMatch(profiles[name], f"chosen by {option}")
    else:
        known = f"{', '.join(profiles)}, auto and none{did_you_mean(str(name), profiles)}"
        raise UsageError(f"{option} {name!r}: unknown; there are {known}")
    if inner is None and ".py" in (text or ""):
        why = f"`{program[0]} -c` has more than one simple command, so memtop can change no options in it"
        advice = "give the program itself: memtop train -- python ..."
        if name != "auto":
            raise UsageError(f"{option} {name}: {why}; {advice}")
        print_message(f"memtop: no profile: {why}; {advice}")
        return None, program
    if chosen is not None:
        print_message(f"memtop: profile {chosen.profile.name}: {chosen.why}; --program-profile NAME chooses another, or none")
        return chosen, inner or program
    return None, program


def step_pattern(pattern: str | None) -> str | None:
    """MEMTOP_STEP, which tells how the user's program prints its step; UsageError if it cannot be
    used.
    """
    if not pattern:
        return None
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise UsageError(f"MEMTOP_STEP={pattern!r}: not a regular expression: {error}") from None
    unknown = [name for name in groups if name not in PATTERN_GROUPS]
    if "step" not in groups or unknown:
        what = f"the group {unknown[0]!r} is not known" if unknown else "it has no group (?P<step>...)"
        raise UsageError(f"MEMTOP_STEP={pattern!r}: {what}: the groups are {', '.join(PATTERN_GROUPS)}")
    return pattern


def _on_oom(given: str | None, *, program: bool) -> str:
    if given is not None:
        return _known_on_oom(given, "--on-oom")
    found = configured("on-oom")
    if found.value is None:
        return "ask" if program else "auto"
    return _known_on_oom(found.value, f"{found.where}: on-oom")


def _targets(texts: Sequence[str]) -> list[Target]:
    if not texts:
        return []
    # It loads what sends messages.
    from memtop.cli.notify import targets

    return targets(texts)


def _start(where: Path, spec: RunSpec, *, fresh: bool, notify: Sequence[Target] = ()) -> RunFolder:
    """Create the run and start its supervisor."""
    from memtop.supervisor.run.starting import start_run

    path = where / spec.name
    if fresh and path.is_dir():
        _free_name_of(RunFolder(path))
    return start_run(where, spec, fresh=fresh, notify=notify)


def _free_name_of(run: RunFolder) -> None:
    """Let the supervisor of an ended run leave, so that the run can be moved aside. RunFolderError
    if the run goes on, or is another user's."""
    from memtop.supervisor.run.starting import let_leave
    from memtop.supervisor.run.view import is_ending, refuse_living

    if (problem := why_not_own(run.path)) is not None:
        raise RunFolderError(f"--fresh: {problem}; --name chooses another name")
    let_leave(run)
    if is_ending(run):
        print_message(f"memtop: waiting until the supervisor of {run.name} has ended")
        deadline = time.monotonic() + _ENDING_SECONDS
        while is_ending(run) and time.monotonic() < deadline:
            time.sleep(0.2)
            let_leave(run)
    refuse_living(run)


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a new run of the built-in trainer begins with."""

    settings: Settings | None = None
    choice: str | None = None
    """What memtop chose because nobody did, and why."""
    told: int | None = None
    """The configuration whose foreseen peak was said."""


def new_run(
    recipe_name: str,
    preset_name: str | None,
    edits: Change,
    gpus: list[str] | None,
    *,
    fresh: bool = False,
) -> NewRun:
    """The settings of a new run and its GPU; UsageError names the option and the value that is
    wrong.

    A named preset is taken with its guide's values if it is meant for the recipe, and always with
    `fresh`.
    """
    from memtop.cli.gpus import choose_place

    python = python_for(f"RECIPE {recipe_name}: the built-in trainer", edits.assignments.get("python"))
    edits = replace(edits, assignments={**edits.assignments, "python": python.path})
    try:
        recipe = recipe_named(recipe_name)
        place = choose_place(gpus, edits.assignments.get("device"), python=python.path)
        reason = None
        if preset_name is not None:
            preset = find_preset(preset_name, recipe.name)
            whole = fresh or preset.meant_for(recipe.name)
        else:
            (preset, reason), whole = own_preset(recipe, edits, gpus, place, python.path), False
        settings = edited_recipe(recipe, preset, whole, edits, gpus)
    except (SettingsError, PresetFileError) as error:
        raise UsageError(str(error)) from None
    refuse_missing(python, libraries_of(settings), f"RECIPE {recipe_name}, preset {settings.preset}: this")
    refuse_missing_trackers(python, settings.trackers)
    settings = replace(
        settings,
        data=placed_data(settings.data),
        model=placed_model(settings.model),
        gpus=place.pinned or ",".join(gpus or ()),
    )
    told = [f"{reason}; --preset NAME chooses another"] if reason else []
    if place.pinned:
        told.append(f"trains {place.note}" if gpus else f"trains {place.note}; --gpus chooses others")
    if (words := said_at_start(python)) is not None:
        told.append(words)
    for words in (place.warning, *told, longer_than_known(settings), without_adapters(settings)):
        if words:
            print_message(f"memtop: {words}")
    refuse_wrong_model(python, settings)
    is_foreseen = _say_peak(settings, estimates_at(place, python.path))
    return NewRun(settings=settings, choice="; ".join(told) or None, told=1 if is_foreseen else None)


def _say_peak(settings: Settings, estimates: Estimates | None) -> bool:
    """Print the foreseen peak of GPU memory where the run trains, or why there is none; whether
    there is one. Nothing without a GPU, and with --batch auto, which finds the batch by
    measuring."""
    if estimates is None or settings.device == "cpu" or settings.auto_batch:
        return False
    # It loads what a run on the CPU does not need.
    from memtop.supervisor.recovery.forecast import words_at_launch

    for words in words_at_launch(settings, estimates.card, estimates.learned):
        print_message(f"memtop: {words}")
    # Where there is none, the supervisor may still foresee it.
    return not isinstance(estimates.forecast(settings), str)


def refuse_for_program(recipe: str | None, preset: str | None, edits: Change) -> None:
    """UsageError for options that have no meaning for the user's own program."""
    if recipe is not None:
        raise UsageError(f"RECIPE {recipe}: a recipe and a command of your own exclude each other; leave one of them out")
    given = {"--preset": preset, "--max-updates": edits.max_updates}
    options = {**OPTIONS, "save_every": "--save-every"}
    given |= {options.get(name, f"--set {name}"): text for name, text in edits.assignments.items()}
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} {value}: memtop does not set the options of your own program; pass them after `--`")


_NO_VALUE = re.compile(r"-[bBdEiIOPqRsSuvx]+")
"""Options of Python that take no value."""


def refuse_not_found(program: Sequence[str], *, waits: bool = False) -> None:
    """UsageError if the user's own program, or the script of a Python, is not there. `waits`: the
    run begins later, when its files may be there."""
    name, *arguments = program
    if "/" not in name and shutil.which(name) is None:
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        near = [file.name for folder in folders for file in files_in(Path(folder))]
        raise UsageError(f"COMMAND {name}: no such program on PATH{did_you_mean(name, near)}")
    script = next((word for word in arguments if not _NO_VALUE.fullmatch(word)), "-")
    # What another option means is up to Python.
    is_script = PYTHON.fullmatch(Path(name).name) is not None and not script.startswith("-")
    for file, words in ((name, name), *([(script, f"{name} {script}")] if is_script else [])):
        if not waits and ("/" in file or file is script) and not Path(file).exists():
            raise no_such_file(words, file)
