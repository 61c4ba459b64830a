"""Options and types that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

CSV_HELP = (
    "CSV, one row per sample and GPU with the host's (and the run's) columns repeated: the columns stay the same "
    "when GPUs come and go, which is what spreadsheets and pandas group best; what is unknown is empty"
)
RUN_HELP = "RUN is a run's name, its folder, or `latest`."


class _Whole(click.ParamType[int]):
    """A whole number that every part of memtop can count with."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        if abs(number) >= 1 << 53:
            self.fail(f"{value!r} is too large a number", param, ctx)
        return number


class _Seconds(click.ParamType[float]):
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)


WHOLE, SECONDS, PATH = _Whole(), _Seconds(), click.Path(path_type=Path)

run_argument = click.argument("run_name", metavar="RUN")
runs_dir_option = click.option("--runs-dir", type=PATH, metavar="DIR", help="where runs live [./runs or MEMTOP_RUNS_DIR]")
json_option = click.option("--json", "as_json", is_flag=True, help="print one JSON document and nothing else")
headless_option = click.option("--headless", is_flag=True, help="stay in the foreground without a dashboard")
detach_option = click.option("--detach", is_flag=True, help="start, print the run's name, return")
_EDITS = (
    click.option("--preset", metavar="NAME", help="see `memtop presets`"),
    click.option("--batch", type=WHOLE, metavar="B", help="samples per micro-batch and process"),
    click.option("--accum", type=WHOLE, metavar="A", help="micro-batches per update"),
    click.option("--seq-len", type=WHOLE, metavar="T", help="tokens per sample"),
    click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="any other setting; repeatable"),
    click.option("--max-updates", type=WHOLE, metavar="N", help="end after N updates in all"),
)

Command = TypeVar("Command", bound=Callable[..., Any])


def edit_options(command: Command) -> Command:
    """The options that `train` and `restart` share."""
    for option in reversed(_EDITS):
        command = option(command)
    return command
