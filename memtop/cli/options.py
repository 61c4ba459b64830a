"""The options that several commands share, and their types.

A module of its own, so that `--help` and wrong usage do not load what finding runs needs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from memtop.cli import completion
from memtop.presets.edits import is_for_each
from memtop.presets.fields import FIELDS, OPTIONS, OTHER_NAMES
from memtop.supervisor.errors import UsageError

AUTO = "auto"
"""In place of a batch: the trainer finds it at the start."""
RUN_HELP = "RUN is a run's name, its folder, or `latest`."


class _Whole(click.ParamType[int]):
    """A whole number below 2^53, which JSON and SQLite store exactly."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(self.refusal(value), param, ctx)
        if abs(number) >= 1 << 53:
            self.fail(f"{value!r} is too large a number", param, ctx)
        return number

    def refusal(self, value: object) -> str:
        return f"{value!r} is not a whole number"


class _Batch(_Whole):
    """A whole number, one for each process (`3,1` or `2x12,1x8`), or the word `auto`."""

    name = "number, numbers or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:  # type: ignore[override]
        if isinstance(value, str) and (value == AUTO or is_for_each(value)):
            return value
        return super().convert(value, param, ctx)

    def refusal(self, value: object) -> str:
        return f"{value!r}: give a whole number, B,B (one for each of several processes) or auto (the largest that fits)"


class _PlannedBatch(_Whole):
    """A whole number for all processes."""

    def refusal(self, value: object) -> str:
        return f"{value!r}: give a whole number, for all processes; the plan says which is the largest that is safe"


class _Seconds(click.ParamType[float]):
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)


class _Gib(click.ParamType[float]):
    name = "GiB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            size = float(value)
        except ValueError:
            size = math.nan
        if not 0 < size < math.inf:
            self.fail(f"{value!r} is not a size: give GiB as a number, such as 24", param, ctx)
        return size


WHOLE, SECONDS, GIB, PATH = _Whole(), _Seconds(), _Gib(), click.Path(path_type=Path)
PLANNED_BATCH = _PlannedBatch()

run_argument = click.argument("run_name", metavar="RUN", shell_complete=completion.runs)
runs_dir_option = click.option("--runs-dir", type=PATH, metavar="DIR", help="the folder of the runs [./runs]")
json_option = click.option("--json", "as_json", is_flag=True, help="print one JSON document and nothing else")
headless_option = click.option("--headless", is_flag=True, help="stay in the foreground without the dashboard")
detach_option = click.option("--detach", is_flag=True, help="start the run, print its name and return")
gpus_option = click.option(
    "--gpus",
    metavar="0,1|free:N",
    help="the GPUs to use, or N free ones; one process per GPU",
    shell_complete=completion.gpus_to_use,
)
_BATCH_HELP = f"{FIELDS['batch'].unit}; 3,1: one for each process; auto: the largest that fits"
set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="any other setting; repeatable",
    shell_complete=completion.settings,
)
_EDITS = (
    click.option("--preset", metavar="NAME", help="a preset, see `memtop presets`", shell_complete=completion.presets),
    click.option("--batch", type=_Batch(), metavar="B|B,B|auto", help=_BATCH_HELP),
    click.option("--accum", type=WHOLE, metavar="A", help=FIELDS["accumulation"].unit),
    click.option("--seq-len", type=WHOLE, metavar="T", help=FIELDS["seq_len"].unit),
    set_option,
    click.option("--max-updates", type=WHOLE, metavar="N", help="end the run after N updates in total"),
)

Command = TypeVar("Command", bound=Callable[..., Any])


def edit_options(command: Command) -> Command:
    """Add the options that `train` and `restart` share."""
    for option in reversed(_EDITS):
        command = option(command)
    return command


def assignments_of(texts: Sequence[str], **numbers: int | str | None) -> dict[str, str]:
    """The settings that the options name, as text. UsageError if `--set` gives one of them another
    value."""
    options = given = {name: str(number) for name, number in numbers.items() if number is not None}
    if options.get("batch") == AUTO:
        if "accumulation" in options:
            raise UsageError(f"--accum {options['accumulation']}: --batch auto finds the accumulation, too; leave it out")
        options = {name: text for name, text in options.items() if name != "batch"} | {"auto_batch": "true"}
    pairs = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UsageError(f"--set {text!r}: give KEY=VALUE")
        name = OTHER_NAMES.get(key, key)
        if given.get(name, value) != value:
            option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"--set {text}: {option} says {given[name]}; give one of them")
        pairs[key] = _prompts(value) if key == "sample.prompts" and value else value
    return {**options, **pairs}


def _prompts(text: str) -> str:
    """The whole path of a file with prompts; UsageError if there is none."""
    path = Path(os.path.expanduser(text)).absolute()  # noqa: PTH111 - Path's raises without a home folder
    if not path.is_file():
        raise UsageError(f"sample.prompts {text}: no such file; looked for {path}; write one prompt in each line")
    return str(path)


def refuse_both(headless: bool, detach: bool) -> None:
    """UsageError if both were given."""
    if headless and detach:
        raise UsageError("--headless and --detach: give one of them")
