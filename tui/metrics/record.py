"""Reads the numbers of a run's updates from its ledger, piece by piece."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memtop.supervisor.monitor.history import HOST, Bucket
from memtop.supervisor.wire import Event, Metric
from memtop.tui.metrics.curves import RunCurves

if TYPE_CHECKING:
    from memtop.supervisor.run.record.ledger import Ledger

_EVALUATIONS = 10_000
"""The newest, that are read."""


class NewRecords(NamedTuple):
    """What is new in a run's ledger."""

    rows: list[Metric]
    fresh: RunCurves | None
    """The whole run, if what was known of it does not count any more."""
    events: list[Event]
    evaluations: list[Event]
    memory: list[Bucket]


def new_in(folder: Path, after: Metric | None) -> NewRecords:
    """What the run's ledger has beyond this update; all of it if that update does not count any
    more. Runs in a thread."""
    from memtop.supervisor.run.record.folder import RunFolder
    from memtop.supervisor.run.record.ledger import reading_ledger

    with reading_ledger(RunFolder(folder)) as ledger:
        if ledger is None:
            return NewRecords([], RunCurves(folder.name), [], [], [])
        rows = [] if after is None else list(ledger.final_history(after.update))
        fresh = None
        if after is None or not rows or _identity(rows[0]) != _identity(after):
            rows, fresh = [], RunCurves(folder.name)
            fresh.take(ledger.final_history())
        return NewRecords(rows[1:], fresh, ledger.events(), ledger.events(_EVALUATIONS, kind="evaluation"), _run_memory(ledger))


def _run_memory(ledger: Ledger) -> list[Bucket]:
    """The host memory of the run's processes over time: PSS, or RSS where the kernel does not
    report it."""
    extent = ledger.extent()
    series = {} if extent is None else ledger.history(HOST, *extent)
    return series.get("run_pss_bytes") or series.get("run_rss_bytes") or []


def _identity(row: Metric) -> tuple[int, int, float | None]:
    return row.update, row.attempt, row.time
