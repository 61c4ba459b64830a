"""`memtop compare`: several runs side by side."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
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
from memtop.presets.comparison import shown
from memtop.presets.fields import FIELDS
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.errors import UsageError
from memtop.supervisor.killed import state_word
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.names import shortened
from memtop.supervisor.program import Program, known
from memtop.supervisor.run import view
from memtop.supervisor.run.record.configurations import mean_speed
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import Ledger, reading_ledger
from memtop.supervisor.run.report.facts import newest_evaluation
from memtop.supervisor.run.speed import ran_seconds
from memtop.supervisor.run_memory import Measure
from memtop.supervisor.wire import Configuration, Metric

_AVERAGED = 10
"""Updates whose mean loss is compared: the loss of one update depends on its samples."""
_MOST_LISTED = 3
"""Settings that only some runs have: more of them are counted, not listed."""
_MOST_CHANGES = 4
"""Values of a setting in a run that changed it: of more, the first ones and the last."""
_OF_RECORD = (
    *("loss", "best_loss", "evaluation_loss", "mean_samples_per_second"),
    *("peak_bytes", "host_peak_bytes", "host_measure"),
)
_NARROWEST = 12
"""Cells of a column that is shortened."""
_OF_SPLIT = ("batch", "accumulation", "rank_splits", "world_size")
"""The row `split` shows them."""


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
    """As everywhere: of the newest updates."""
    tokens_per_second: float | None = None
    mean_samples_per_second: float | None = None
    """Of all updates, without the time between them."""
    peak_bytes: int | None
    """The highest of the updates, of the first process."""
    host_peak_bytes: int | None
    """The highest host memory of the run's processes together."""
    host_measure: Measure | None
    seconds: float | None
    """How long its attempts ran, together."""
    split: str | None = None
    effective_batch: int | None = None
    settings: dict[str, Any] = {}
    """By their dotted names."""
    changed: dict[str, list[Any]] = {}
    """Settings that changed in the run, also `split` and `effective_batch`: their values in order,
    the present one last."""

    def values(self, name: str) -> list[Any]:
        """What a setting has been, in order; empty if it is not known."""
        known = self.settings.get(name) if name in self.settings else getattr(self, name, None)
        return self.changed.get(name) or ([] if known is None else [known])


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
    differing = differences(runs)
    if as_json:
        print_json({"runs": msgspec.to_builtins(runs), "common_update": common, "differing_settings": differing})
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print_lines(*_table(runs, common, differing, width))
    return 0


def differences(runs: Sequence[ComparedRun]) -> list[str]:
    """The names of the settings that are not the same in all runs, or have changed in one."""
    names = dict.fromkeys(name for run in runs for name in (*run.settings, *run.changed) if name not in _DERIVED)
    return [name for name in names if any(run.changed.get(name) or run.values(name) != runs[0].values(name) for run in runs)]


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings in settings by their dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(folder: RunFolder) -> ComparedRun:
    state = view.read_state(folder)
    with readable_ledger(folder), reading_ledger(folder) as ledger:
        attempts = [] if ledger is None else ledger.attempts()
        periods = [] if ledger is None else [record.configuration for record in ledger.configurations()]
        known = {} if ledger is None else _of_record(ledger)
    present = _period(state.settings, state.program, state.effective_batch)
    history = [found for one in periods if (found := _earlier(one, present))] + [present]
    return ComparedRun(
        name=state.name,
        state=state.state.value,
        ended_by=state.ended_by,
        attempts=len(attempts),
        # The newest attempt may have had nothing left to do.
        updates=state.updates if state.updates is not None else known.get("updates"),
        samples_seen=state.samples_seen,
        samples_per_second=state.samples_per_second,
        tokens_per_second=state.tokens_per_second,
        seconds=ran_seconds(attempts, until=time.time() if state.alive else None),
        settings={name: value for name, value in present.items() if name not in _DERIVED},
        split=present.get("split"),
        effective_batch=present.get("effective_batch"),
        changed=_changed(history, own=state.settings is None),
        **{name: known.get(name) for name in _OF_RECORD},
    )


_DERIVED = ("split", "effective_batch")


def _period(settings: Settings | None, program: Program | None, effective_batch: int | None) -> dict[str, Any]:
    """The settings of a run for some time by their dotted names, with what follows from them."""
    if settings is not None:
        found = dict(flat(msgspec.to_builtins(settings)))
        return found | {"split": settings.split_text, "effective_batch": settings.effective_batch}
    found = {} if program is None else dict(known(program.knobs) or {})
    batch, accumulation = found.get("batch"), found.get("accumulation")
    if batch and accumulation and effective_batch:
        found["split"] = f"{batch} x {accumulation} x {effective_batch // (batch * accumulation)}"
    return found if effective_batch is None else found | {"effective_batch": effective_batch}


def _earlier(one: Configuration, present: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an earlier period; empty if they are not known."""
    if one.settings is not None or not one.uses:
        return _period(one.settings, None, None)
    # The processes of the user's own program stay.
    found = dict[str, Any](one.uses)
    batch, accumulation, whole = (present.get(name) for name in ("batch", "accumulation", "effective_batch"))
    if batch and accumulation and whole and found.get("batch") and found.get("accumulation"):
        processes = whole // (batch * accumulation)
        effective = found["batch"] * found["accumulation"] * processes
        found |= {"split": f"{found['batch']} x {found['accumulation']} x {processes}", "effective_batch": effective}
    return found


def _changed(history: Sequence[Mapping[str, Any]], *, own: bool) -> dict[str, list[Any]]:
    """The settings that changed from one period to the next, with their values. `own`: of the
    user's own program; a period in which one is not known is left out."""
    found = {}
    for name in dict.fromkeys(name for period in history for name in period):
        values = [value for value, _ in itertools.groupby(one.get(name) for one in history if name in one or not own)]
        if len(values) > 1:
            found[name] = values
    return found


def _of_record(ledger: Ledger) -> dict[str, Any]:
    """The values of the whole history."""
    last: Metric | None = None
    updates: int | None = None
    peak = None
    for one in ledger.final_history():
        if one.peak_bytes is not None:
            peak = max(peak or 0, one.peak_bytes)
        last = one if one.loss is not None else last
        updates = one.update + one.updates - 1
    host = ledger.host_peak()
    return {
        "updates": updates,
        "loss": None if last is None else last.loss,
        "best_loss": ledger.best_loss(),
        "evaluation_loss": newest_evaluation(ledger),
        "mean_samples_per_second": mean_speed(ledger.configurations()),
        "peak_bytes": peak,
        "host_peak_bytes": host.size,
        "host_measure": host.measure,
    }


def _loss_at(folder: RunFolder, update: int) -> float | None:
    with readable_ledger(folder), reading_ledger(folder) as ledger:
        rows = [] if ledger is None else ledger.final_history(max(1, update - _AVERAGED + 1))
        losses = [row.loss for row in rows if row.update <= update and row.loss is not None]
    return sum(losses) / len(losses) if losses else None


def _table(
    runs: Sequence[ComparedRun], common: int | None, differing: Sequence[str], width: int | None = None
) -> Iterator[str]:
    """`width`: cells of a terminal; what is too long for it has a mark in its middle."""
    # The split says all of these, where it is known.
    in_split = _OF_SPLIT if all(run.split for run in runs) else ()
    differing = [name for name in differing if name not in in_split]
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
        ("mean samples/s", [units.rate(run.mean_samples_per_second) for run in runs]),
        ("tokens/s", [units.thousands(run.tokens_per_second) for run in runs]),
        ("peak GPU memory", [units.size(run.peak_bytes) for run in runs]),
        ("peak RAM", [_host_peak(run) for run in runs]),
        ("time of all attempts", [units.duration(run.seconds) for run in runs]),
        ("split", [Verbatim(_values(run, "split")) for run in runs]),
        ("effective batch", [Verbatim(_values(run, "effective_batch")) for run in runs]),
        *((_label(name), [Verbatim(_values(run, name)) for run in runs]) for name in listed),
    ]
    first = max(cell_len(tr(label)) for label, _ in rows)
    widths = _widths([[cell_len(tr(cells[column])) for _, cells in rows] for column in range(len(runs))], width, first)
    for label, cells in rows:
        short = (Verbatim(shortened(tr(cell), most)) for cell, most in zip(cells, widths, strict=True))
        yield row((label, first), *((cell, -most) for cell, most in zip(short, widths, strict=True)), between="  ")
    for owners, names in folded.items():
        yield f"{len(names)} settings only of {', '.join(owners)}: --json lists them"


def _widths(columns: Sequence[Sequence[int]], width: int | None, first: int) -> list[int]:
    """The cells of each column, from the lengths of what stands in it. Without room the widest give
    way, but no column gets narrower than its numbers need."""
    widths = [max(lengths) for lengths in columns]
    while width is not None and first + sum(2 + one for one in widths) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths


def _folded(runs: Sequence[ComparedRun], differing: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Settings that not every run has, as between a recipe and a program of your own, by the names
    of the runs that have them; only where there are many."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in differing:
        owners = tuple(run.name for run in runs if name in run.settings)
        known = {_values(run, name) for run in runs if name in run.settings}
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


def _label(name: str) -> str:
    """What the screens call a setting; a part of one that has no name of its own keeps its dotted
    name."""
    return FIELDS[name].label if name in FIELDS else Verbatim(name)


def _values(run: ComparedRun, name: str) -> str:
    """`8 x 4 x 1 -> 4 x 8 x 1`: what a setting was in a run, in order."""
    values = [_setting(value) for value in run.values(name)]
    if len(values) > _MOST_CHANGES:
        values = [*values[: _MOST_CHANGES - 1], "...", values[-1]]
    return " -> ".join(values) if values else units.UNKNOWN


def _setting(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        # As the counts in the other rows, but in full.
        return f"{value:,}".replace(",", " ")
    return shown(tuple(map(str, value)) if isinstance(value, list) else value)
