"""`memtop advise`: what limits a run's speed, what would make it faster, and a trial of the first
proposal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from memtop.cli.common import find_run
from memtop.cli.options import RUN_HELP, json_option, run_argument, runs_dir_option
from memtop.cli.output import print_json, print_lines
from memtop.cli.requests import final_answer
from memtop.supervisor import units
from memtop.supervisor.errors import NotRunningError
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.recovery.values import Advice, Remedy, trial_word
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.view import read_state
from memtop.supervisor.wire import RunState, Trial, Try

_ROWS = (("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s"))
_SIZES = (("peak_bytes", "peak"), ("host_bytes", "host memory of the run"), ("swap_bytes", "swap"))


@click.command(epilog=RUN_HELP)
@run_argument
@json_option
@click.option("--try", "try_it", is_flag=True, help="try the first proposal: measure, change, measure, keep or undo")
@runs_dir_option
def advise(run_name: str, as_json: bool, try_it: bool, runs_dir: Path | None) -> int:
    """Show what limits a run's speed and what would make it faster.

    It also lists the changes that must not be made now, and the memory that grows.
    """
    folder = find_run(run_name, runs_dir)
    if not try_it:
        return _print_advice(folder, as_json=as_json)
    return _print_trial(final_answer(folder, lambda number: Try(id=number)).data, as_json=as_json)


def _print_advice(folder: RunFolder, *, as_json: bool) -> int:
    state = read_state(folder)
    if not state.alive:
        raise NotRunningError(f"run {folder.name!r} is not running: it is {state.word}; advice needs a run in progress")
    if as_json:
        print_json(_document(state))
    else:
        print_lines(*_lines(state))
    return 0


def _print_trial(answer: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print_json(answer)
    else:
        print_lines(*_trial_lines(msgspec.convert(answer, Trial)))
    return 0


def _document(state: RunState) -> dict[str, Any]:
    """The JSON document; `bottleneck` is null before anything was measured."""
    advice = state.advice
    empty = dict.fromkeys(Advice.__struct_fields__)
    return {
        **(empty if advice is None else msgspec.to_builtins(advice)),
        "trends": msgspec.to_builtins(state.trends),
        "trial": msgspec.to_builtins(state.trial),
    }


def _lines(state: RunState) -> Iterator[str]:
    advice = state.advice
    if advice is None:
        yield "not known yet: nothing has been measured"
    else:
        yield advice.summary
        yield from (f"  {text}" for text in advice.evidence)
        for number, remedy in enumerate(advice.proposals, start=1):
            yield from _proposal(number, remedy)
        yield from (f"not now: {text}" for text in advice.refused)
    yield from (f"grows: {trend.message}" for trend in state.trends)
    if state.trial is not None:
        yield from _trial_lines(state.trial)


def _proposal(number: int, remedy: Remedy) -> Iterator[str]:
    yield f"{number}. {remedy.title}"
    forecast = remedy.forecast
    if forecast is not None:
        share = f", {units.percent(forecast.fraction)}: {forecast.band.value}"
        yield f"   predicted peak {units.size(forecast.peak_bytes)}{share} ({forecast.basis})"
    yield f"   {remedy.why}"
    yield from (Verbatim(f"   {tr(line)}") for line in remedy.instructions)


def _trial_lines(trial: Trial) -> Iterator[str]:
    yield f"trial of {trial.title}: {trial_word(trial.state)}" + (f": {trial.reason}" if trial.reason else "")
    for name, words in _ROWS:
        if name in trial.before and name in trial.after:
            yield f"  {words:<22} {_speed(trial.before, name)} -> {_speed(trial.after, name)}"
    for name, words in _SIZES:
        if name in trial.before and name in trial.after:
            yield f"  {words:<22} {units.size(trial.before[name])} -> {units.size(trial.after[name])}"


def _speed(values: dict[str, float], name: str) -> str:
    return f"{values[name]:.1f} ± {values.get(f'{name}_spread', 0.0):.1f}"
