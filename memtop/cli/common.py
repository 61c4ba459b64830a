"""What several commands share: finding runs, and describing them in lines.

A run that cannot be read is listed with the reason and hides no other run.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from memtop.cli.configuration import default_runs_dir
from memtop.cli.output import row
from memtop.presets.comparison import speed_words
from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import in_words, layers_command
from memtop.supervisor.errors import MemtopError, RunFolderError, UsageError
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.recovery.values import Remedy, unknown_for_several
from memtop.supervisor.run import view
from memtop.supervisor.run.record import folder as folders
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ownership import why_unreadable
from memtop.supervisor.run.runs import run_folders
from memtop.supervisor.wire import Proposal, RunState


class Unreadable(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose files cannot be read or decoded; `error` is one line."""

    name: str
    folder: str
    error: str


def find_run(reference: str, runs_dir: Path | None = None) -> RunFolder:
    """The run with that name or path, or the newest for `latest`.

    `runs_dir` defaults to MEMTOP_RUNS_DIR or ./runs. UsageError if there is no such run,
    RunFolderError if its place cannot be read.
    """
    runs_dir = runs_dir or default_runs_dir()
    try:
        return folders.find_run(reference, runs_dir)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"run {reference!r}: not found in {runs_dir}: no file has so long a name") from None
        raise RunFolderError(why_unreadable(Path(error.filename or runs_dir), error)) from None
    except MemtopError:
        # If the runs' folder or all runs in it cannot be read, that is the reason to report.
        there = run_folders(runs_dir)
        if reference == folders.LATEST and there:
            runs = "the only run" if len(there) == 1 else f"all {len(there)} runs"
            raise RunFolderError(f"{runs_dir}: {runs} there cannot be read; `memtop runs` shows why") from None
        raise


def state_of(folder: RunFolder) -> RunState | Unreadable:
    """The run's state, or why it cannot be read."""
    try:
        folder.spec()
        return view.read_state(folder)
    except MemtopError as error:
        return _unreadable(folder, str(error))
    except OSError as error:
        return _unreadable(folder, why_unreadable(Path(error.filename or folder.path), error))


def living_runs(runs_dir: Path) -> list[tuple[RunFolder, RunState]]:
    """The runs in progress, oldest first."""
    states = [(folder, state_of(folder)) for folder in run_folders(runs_dir)]
    return [(folder, state) for folder, state in states if isinstance(state, RunState) and state.alive]


@contextmanager
def readable_ledger(folder: RunFolder) -> Iterator[None]:
    """Turn the exceptions of a damaged ledger into a RunFolderError of one line."""
    try:
        yield
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise RunFolderError(f"{folder.ledger_path}: cannot be read: {error}") from None


def _unreadable(folder: RunFolder, error: str) -> Unreadable:
    return Unreadable(name=folder.name, folder=str(folder.path), error=" ".join(error.split()))


_EVIDENCE_LINES = 3


def summary(state: RunState | Unreadable) -> dict[str, Any]:
    """One run as it appears in JSON lists, or why it cannot be read."""
    return msgspec.structs.asdict(state) if isinstance(state, Unreadable) else view.summary(state)


def run_line(state: RunState | Unreadable) -> str:
    """One run in one line."""
    if isinstance(state, Unreadable):
        return row((Verbatim(state.name), 20), (f"unreadable: {state.error}", 0))
    total = "" if state.total_updates is None else f"/{state.total_updates}"
    loss = "" if state.loss is None else f"  loss {state.loss:.4f}"
    nothing = "no updates" if state.state.final else "no updates yet"
    where = nothing if state.updates is None else f"update {state.updates}{total}{loss}"
    adopted = [("(adopted)", 0)] if state.adopted else []
    attempt = [(f"attempt {state.attempt} ", 0)] if state.attempt else []
    cells = [(Verbatim(state.name), 20), (state.word, 10), *attempt, (f"{where} ", 0), *adopted]
    return row(*cells)


def proposal_lines(proposal: Proposal, *, resumes: bool = True, said: str | None = None) -> Iterator[str]:
    """Why a run ran out of memory, what memtop does about it, and what else can be done.

    Without `resumes` a restart is not known to continue where the run was. `said`: the reason that
    the reader has read already.
    """
    diagnosis = proposal.diagnosis
    if diagnosis.summary != said:
        yield f"{in_words(diagnosis.kind.value)}: {diagnosis.summary}"
    for line in diagnosis.evidence[:_EVIDENCE_LINES]:
        yield f"  evidence: {line.strip()}"
    if (command := layers_command(diagnosis.snapshot_file)) is not None:
        yield f"  {command}"
    yield from proposal.causes
    if proposal.waiting:
        then = "; you can do one of these:" if proposal.remedies else ""
        yield f"memtop does nothing by itself: {proposal.waiting}{then}"
    elif proposal.begins is not None:
        yield "memtop applies the first of these"
    often = unknown_for_several(proposal.remedies)
    yield from (f"  peaks not known where none is given: {reason}" for reason in often)
    for number, remedy in enumerate(proposal.remedies, start=1):
        yield Verbatim(f"  {number}. {tr(remedy.title)} [{tr(', '.join(_price(remedy, resumes=resumes)))}]")
        if remedy.forecast is not None or remedy.forecast_unknown not in often:
            yield f"     {_peak(remedy)}"
        for line in remedy.instructions:
            yield Verbatim(f"     {tr(line)}")
    for advice in proposal.last_advice:
        yield f"  - {advice}"


def _price(remedy: Remedy, *, resumes: bool) -> Iterator[str]:
    yield "training unchanged" if remedy.keeps_math else "changes training"
    if remedy.resumable == "none":
        yield "for you to do"
    elif resumes or remedy.resumable != "resumes":
        yield remedy.resumable
    if remedy.needs_consent and remedy.resumable != "none":
        yield "needs your consent"
    if remedy.speed_basis:
        yield speed_words(remedy.speed_class)
    if remedy.seconds_left is not None:
        yield f"about {units.duration(remedy.seconds_left)} left"


def _peak(remedy: Remedy) -> str:
    forecast = remedy.forecast
    if forecast is None:
        return f"peak not known: {remedy.forecast_unknown or 'there are no measurements for a forecast'}"
    size, basis = units.size(forecast.peak_bytes), forecast.basis
    if forecast.fraction is None:
        return f"predicted peak {size}: {basis}"
    total, percent = units.size(forecast.total_bytes), units.percent(forecast.fraction)
    return f"predicted peak {size} of {total} ({percent}, {forecast.band.value}): {basis}"
