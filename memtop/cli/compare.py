"""`memtop compare`: several runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.cells import cell_len

from memtop.cli import completion
from memtop.cli.common import find_run, readable_ledger
from memtop.cli.options import RUN_HELP, json_option, runs_dir_option
from memtop.cli.output import print_json, print_lines, row
from memtop.supervisor import units
from memtop.supervisor.errors import UsageError
from memtop.supervisor.killed import state_word
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.run import view
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import Ledger, reading_ledger
from memtop.supervisor.run_memory import Measure
from memtop.supervisor.wire import Metric

_AVERAGED = 10
"""Updates whose mean loss is compared: the loss of one update depends on its samples."""
_MOST_LISTED = 3
"""Settings that only some runs have: more of them are counted, not listed."""
_OF_RECORD = ("loss", "best_loss", "evaluation_loss", "samples_per_second", "peak_bytes", "host_peak_bytes", "host_measure")


class ComparedRun(msgspec.Struct, kw_only=True):
    """What is compared of a run. None is unknown."""

    name: str
    state: str
    ended_by: int | None
    """See `RunState`."""
    attempts: int
    updates: int | None
    samples_seen: int | None
    loss: float | None
    best_loss: float | None
    evaluation_loss: float | None
    loss_at_common_update: float | None = None
    """The mean loss of the ten updates up to the last one that all of the runs have done."""
    samples_per_second: float | None
    """Over all updates, without the time between them."""
    peak_bytes: int | None
    """The highest of the updates, of the first process."""
    host_peak_bytes: int | None
    """The highest host memory of the run's processes together."""
    host_measure: Measure | None
    seconds: float | None
    """The time of all attempts together."""
    settings: dict[str, Any] = {}
    """By their dotted names."""


@click.command(epilog=RUN_HELP)
@click.argument("run_names", metavar="RUN RUN...", nargs=-1, required=True, shell_complete=completion.runs)
@json_option
@runs_dir_option
def compare(run_names: tuple[str, ...], as_json: bool, runs_dir: Path | None) -> int:
    """Compare runs: results, speed, memory, settings that differ.

    In the dashboard, `v` and then `a` lays the curves of other runs over those of the run.
    """
    if len(run_names) < 2:
        raise UsageError("RUN: give two runs or more, e.g. `memtop compare first second`")
    folders = [find_run(name, runs_dir) for name in run_names]
    runs = [_read(folder) for folder in folders]
    common = min((run.updates for run in runs if run.updates is not None), default=None)
    for run, folder in zip(runs, folders, strict=True):
        if common:
            run.loss_at_common_update = _loss_at(folder, common)
    differing = differences([run.settings for run in runs])
    if as_json:
        print_json({"runs": msgspec.to_builtins(runs), "common_update": common, "differing_settings": differing})
    else:
        print_lines(*_table(runs, common, differing))
    return 0


def differences(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that are not the same in all runs."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings in settings by their dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(folder: RunFolder) -> ComparedRun:
    with readable_ledger(folder):
        document = view.show(folder)
        with reading_ledger(folder) as ledger:
            known = {} if ledger is None else _of_record(ledger)
    attempts = document["attempts"]
    times = [one["ended"] - one["started"] for one in attempts if one["ended"] is not None and one["started"] is not None]
    return ComparedRun(
        name=document["name"],
        state=document["state"],
        ended_by=document["ended_by"],
        attempts=len(attempts),
        # The newest attempt may have had nothing left to do.
        updates=document["updates"] if document["updates"] is not None else known.get("updates"),
        samples_seen=document["samples_seen"],
        seconds=sum(times) if times else None,
        settings=dict(flat(document["settings"] or {})),
        **{name: known.get(name) for name in _OF_RECORD},
    )


def _of_record(ledger: Ledger) -> dict[str, Any]:
    """The values of the whole history."""
    last: Metric | None = None
    updates: int | None = None
    before, peak, samples, seconds = 0, None, 0, 0.0
    for one in ledger.final_history():
        if one.samples_seen is not None and one.step_seconds is not None:
            samples, seconds = samples + one.samples_seen - before, seconds + one.step_seconds * one.updates
        before = before if one.samples_seen is None else one.samples_seen
        if one.peak_bytes is not None:
            peak = max(peak or 0, one.peak_bytes)
        last = one if one.loss is not None else last
        updates = one.update + one.updates - 1
    host = ledger.host_peak()
    evaluations = [event.data.get("loss") for event in ledger.events(1, kind="evaluation")]
    return {
        "updates": updates,
        "loss": None if last is None else last.loss,
        "best_loss": ledger.best_loss(),
        "evaluation_loss": evaluations[0] if evaluations else None,
        "samples_per_second": samples / seconds if samples and seconds else None,
        "peak_bytes": peak,
        "host_peak_bytes": host.size,
        "host_measure": host.measure,
    }


def _loss_at(folder: RunFolder, update: int) -> float | None:
    with readable_ledger(folder), reading_ledger(folder) as ledger:
        rows = [] if ledger is None else ledger.final_history(max(1, update - _AVERAGED + 1))
        losses = [row.loss for row in rows if row.update <= update and row.loss is not None]
    return sum(losses) / len(losses) if losses else None


def _table(runs: Sequence[ComparedRun], common: int | None, differing: Sequence[str]) -> Iterator[str]:
    folded = _folded(runs, differing)
    listed = [name for name in differing if not any(name in names for names in folded.values())]
    rows: list[tuple[str, Sequence[str]]] = [
        ("", [Verbatim(run.name) for run in runs]),
        ("state", [state_word(run.state, run.ended_by) for run in runs]),
        ("attempts", [str(run.attempts) for run in runs]),
        ("updates", [units.count(run.updates) for run in runs]),
        ("samples", [units.count(run.samples_seen) for run in runs]),
        ("loss", [_number(run.loss) for run in runs]),
        ("best loss", [_number(run.best_loss) for run in runs]),
        *([] if not common else [(_mean_words(common), [_number(run.loss_at_common_update) for run in runs])]),
        ("evaluation loss", [_number(run.evaluation_loss) for run in runs]),
        ("samples/s", [units.rate(run.samples_per_second) for run in runs]),
        ("peak memory", [units.size(run.peak_bytes) for run in runs]),
        ("peak RAM", [_host_peak(run) for run in runs]),
        ("time of all attempts", [units.duration(run.seconds) for run in runs]),
        *((Verbatim(name), [Verbatim(_setting(run.settings.get(name))) for run in runs]) for name in listed),
    ]
    first = max(cell_len(tr(label)) for label, _ in rows)
    widths = [max(cell_len(tr(cells[column])) for _, cells in rows) for column in range(len(runs))]
    for label, cells in rows:
        yield row((label, first), *((cell, -width) for cell, width in zip(cells, widths, strict=True)), between="  ")
    for owners, names in folded.items():
        yield f"{len(names)} settings only of {', '.join(owners)}: --json lists them"


def _folded(runs: Sequence[ComparedRun], differing: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Settings that not every run has, as between a recipe and a program of your own, by the names
    of the runs that have them; only where there are many."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in differing:
        owners = tuple(run.name for run in runs if name in run.settings)
        known = {_setting(run.settings[name]) for run in runs if name in run.settings}
        if len(owners) < len(runs) and len(known) == 1:
            found.setdefault(owners, []).append(name)
    return {owners: names for owners, names in found.items() if len(names) > _MOST_LISTED}


def _mean_words(common: int) -> str:
    """`mean loss of updates 31 to 40`."""
    first = max(1, common - _AVERAGED + 1)
    return f"loss of update {common}" if first == common else f"mean loss of updates {first} to {common}"


def _host_peak(run: ComparedRun) -> str:
    """`2.1 GiB`, and `2.3 GiB RSS` where shared pages count more than once."""
    words = units.size(run.host_peak_bytes)
    return f"{words} RSS" if run.host_measure == "RSS" else words


def _number(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:.4f}"


def _setting(value: Any) -> str:
    return units.UNKNOWN if value is None else str(value)
