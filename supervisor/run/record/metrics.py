"""The updates in the ledger. The newest updates are exact; older ones are merged into means.

A run that reports a thousand updates a second, or runs for a year, must not fill the disk. The
newest 50,000 updates of a run are exact. Older ones are merged ten at a time, again and again:
there are about 50,000 rows that stand for 10 updates each, as many for 100, and so on. A merged row
is the first of its updates, with the means of loss and times and the highest peak of all of them.
It has no digest of samples.

Updates that count and updates that a later attempt took back are merged apart. A restart may also
return to an update inside a row that is merged already. What it takes back cannot be removed from
the means and the peak then: the single updates are gone. The row stands for fewer updates from then
on, and has no least loss.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from memtop.presets.decoding import decoder_of
from memtop.supervisor.run.reports import Step
from memtop.supervisor.wire import Metric

KEPT = 50_000
"""Rows of each tier that are not merged."""
MERGED_AT_ONCE = 5_000
"""Rows are merged when there are so many more."""
_TIMES = 10
_NEVER = 1 << 62
"""After the last update of any run."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS metrics (
    attempt INTEGER NOT NULL, "update" INTEGER NOT NULL, time REAL, loss REAL, learning_rate REAL, samples_seen INTEGER,
    sample_digest TEXT, step_seconds REAL, data_wait_seconds REAL, peak_bytes INTEGER, report TEXT NOT NULL,
    updates INTEGER NOT NULL, least_loss REAL, tier INTEGER NOT NULL, PRIMARY KEY (attempt, "update")) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS metrics_by_tier ON metrics (tier, attempt, "update", updates, least_loss, peak_bytes);
"""
_OF_OUTPUT = ("loss", "learning_rate", "epoch", "step_seconds", "time")
_SHOWN = Metric.__struct_fields__
_IN_REPORT = ("gradient_norm", "tokens")
"""What of `_SHOWN` has no column of its own."""
# A small part of the table, for the two numbers that every start of a supervisor needs.
_INDEX = "metrics AS m INDEXED BY metrics_by_tier"
# The last update of each attempt that no later attempt took back.
_WITH_LAST = """LEFT JOIN (
    SELECT number, (SELECT min(start_updates) FROM attempts AS later WHERE later.number > attempts.number) AS last FROM attempts
    ) ON number = m.attempt"""
_COUNTS = '(last IS NULL OR m."update" <= last)'
_COUNTS_WHOLLY = '(last IS NULL OR m."update" + m.updates - 1 <= last)'
# A merged row of which a later attempt took back the end, and the updates that are left of a row.
_CUT = f"({_COUNTS} AND NOT {_COUNTS_WHOLLY})"
_LEFT = f'CASE WHEN {_CUT} THEN last - m."update" + 1 ELSE m.updates END'
_FINAL = f"metrics AS m {_WITH_LAST} WHERE {_COUNTS}"


class _Row(NamedTuple):
    attempt: int
    step: Step
    updates: int = 1
    """How many updates it stands for."""
    least_loss: float | None = None


def add(db: sqlite3.Connection, attempt: int, steps: Iterable[Step]) -> None:
    """Store updates of an attempt. Part of the caller's transaction, as all functions here."""
    steps = list(steps)
    if steps and any(step.loss is None for step in steps):
        # The output may have been read before the agent's report.
        known = {
            update: decoder_of(Step).decode(report)
            for update, report in db.execute(
                'SELECT "update", report FROM metrics WHERE attempt = ? AND "update" BETWEEN ? AND ? AND tier = 1',
                (attempt, min(step.update for step in steps), max(step.update for step in steps)),
            )
        }
        steps = [_filled(step, known[step.update]) if step.update in known else step for step in steps]
    _insert(db, (_Row(attempt, step, 1, step.loss) for step in steps), tier=1)


def fill_in(db: sqlite3.Connection, attempt: int, steps: Iterable[Step]) -> None:
    """Store updates that were read from the output. What the agent has reported stays."""
    for step in steps:
        key = (attempt, step.update)
        found = db.execute('SELECT report, tier FROM metrics WHERE (attempt, "update") = (?, ?)', key).fetchone()
        if found is not None and found[1] > 1:
            continue  # an old update, merged with others
        if found is not None:
            step = _filled(decoder_of(Step).decode(found[0]), step)
        _insert(db, [_Row(attempt, step, 1, step.loss)], tier=1)


def _filled(step: Step, other: Step) -> Step:
    """The step, and what only the other one has."""
    missing = {name: getattr(other, name) for name in _OF_OUTPUT if getattr(step, name) is None}
    return replace(step, **missing)


def take_back(db: sqlite3.Connection, attempt: int, update: int) -> None:
    """Remove the attempt's updates from this one on: its program has gone back."""
    db.execute('DELETE FROM metrics WHERE attempt = ? AND "update" >= ?', (attempt, update))


def remove(db: sqlite3.Connection, attempt: int) -> None:
    db.execute("DELETE FROM metrics WHERE attempt = ?", (attempt,))


def _insert(db: sqlite3.Connection, rows: Iterable[_Row], tier: int) -> None:
    db.executemany(
        "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                *(row.attempt, step.update, step.time, step.loss, step.learning_rate, step.samples_seen, step.sample_digest),
                *(step.step_seconds, step.data_wait_seconds, step.peak_bytes, msgspec.json.encode(step).decode()),
                *(row.updates, row.least_loss, tier),
            )
            for row in rows
            for step in (row.step,)
        ],
    )


def thin(db: sqlite3.Connection, kept: int = KEPT, at_once: int = MERGED_AT_ONCE) -> None:
    """Merge the oldest rows of each tier that has too many."""
    tier = 1
    while _thin_tier(db, tier, kept, at_once):
        tier *= _TIMES


def _thin_tier(db: sqlite3.Connection, tier: int, kept: int, at_once: int) -> bool:
    """Whether there were too many."""
    (count,) = db.execute("SELECT count(*) FROM metrics WHERE tier = ?", (tier,)).fetchone()
    if count < kept + at_once:
        return False
    attempt, update = db.execute(
        'SELECT attempt, "update" FROM metrics WHERE tier = ? ORDER BY attempt, "update" LIMIT 1 OFFSET ?',
        (tier, count - kept),
    ).fetchone()
    coarser = tier * _TIMES
    # Only whole groups. A row that is cut is shortened first, so that the merged row is not cut.
    old = (tier, attempt, update // coarser * coarser)
    rows = db.execute(
        f"SELECT m.attempt, report, {_LEFT}, CASE WHEN {_CUT} THEN NULL ELSE least_loss END, {_COUNTS}"
        f" FROM metrics AS m {_WITH_LAST}"
        ' WHERE tier = ? AND (m.attempt, m."update") < (?, ?) ORDER BY m.attempt, m."update"',
        old,
    ).fetchall()
    found = ((_Row(n, decoder_of(Step).decode(text), *rest), counts) for n, text, *rest, counts in rows)
    groups = itertools.groupby(found, lambda one: (one[0].attempt, one[0].step.update // coarser, one[1]))
    merged = [_merged([row for row, _ in group]) for _, group in groups]
    db.execute('DELETE FROM metrics WHERE tier = ? AND (attempt, "update") < (?, ?)', old)
    _insert(db, merged, coarser)
    return True


def _merged(rows: Sequence[_Row]) -> _Row:
    if len(rows) == 1:
        return rows[0]
    first = rows[0].step
    step = replace(
        first,
        sample_digest=None,
        loss=_mean(rows, lambda step: step.loss),
        gradient_norm=_mean(rows, lambda step: step.gradient_norm),
        tokens=None if (tokens := _mean(rows, lambda step: step.tokens)) is None else round(tokens),
        step_seconds=_mean(rows, lambda step: step.step_seconds),
        data_wait_seconds=_mean(rows, lambda step: step.data_wait_seconds),
        peak_bytes=max((row.step.peak_bytes for row in rows if row.step.peak_bytes is not None), default=None),
    )
    least = min((row.least_loss for row in rows if row.least_loss is not None), default=None)
    return _Row(rows[0].attempt, step, sum(row.updates for row in rows), least)


def _mean(rows: Sequence[_Row], value: Callable[[Step], float | None]) -> float | None:
    known = [(found, row.updates) for row in rows if (found := value(row.step)) is not None]
    return sum(found * updates for found, updates in known) / sum(updates for _, updates in known) if known else None


def final_history(db: sqlite3.Connection, first: int = 0) -> Iterator[Metric]:
    """The run's final history from the update `first` on, in order, without the updates that a
    later attempt took back.

    Rows are read as they are needed.
    """
    before = None
    for metric in _read(db, f'SELECT {_columns()} FROM {_FINAL} AND m."update" >= {first:d} ORDER BY "update", attempt DESC'):
        if metric.update != before:
            yield metric
        before = metric.update


def newest(db: sqlite3.Connection, count: int) -> list[Metric]:
    """The end of the final history, at most so many rows."""
    found: dict[int, Metric] = {}
    for metric in _read(db, f'SELECT {_columns()} FROM {_FINAL} ORDER BY "update" DESC, attempt DESC LIMIT {count:d}'):
        found.setdefault(metric.update, metric)
    return [found[update] for update in sorted(found)]


def _columns() -> str:
    return ", ".join(map(_column, _SHOWN))


def _column(name: str) -> str:
    if name in _IN_REPORT:
        return f"json_extract(report, '$.{name}')"
    return _LEFT if name == "updates" else f'm."{name}"'


def _read(db: sqlite3.Connection, sql: str) -> Iterator[Metric]:
    return (Metric(**dict(zip(_SHOWN, row, strict=True))) for row in db.execute(sql))


def best_loss(db: sqlite3.Connection, before: int | None = None) -> float | None:
    """The least loss of the final history, or of what is in it before an update. Merged rows that a
    restart has cut do not count."""
    sql = f'SELECT min(least_loss) FROM {_INDEX} {_WITH_LAST} WHERE {_COUNTS_WHOLLY} AND m."update" + m.updates <= ?'
    (loss,) = db.execute(sql, (_NEVER if before is None else before,)).fetchone()
    return None if loss is None else float(loss)


def of_gpu(db: sqlite3.Connection) -> bool:
    """Whether any update has reported device memory."""
    (found,) = db.execute(f"SELECT max(peak_bytes) FROM {_INDEX}").fetchone()
    return found is not None


def highest_peak(db: sqlite3.Connection, attempt: int) -> int | None:
    """The highest peak of an attempt's updates."""
    (peak,) = db.execute(f"SELECT max(peak_bytes) FROM {_INDEX} WHERE +attempt = ?", (attempt,)).fetchone()
    return None if peak is None else int(peak)
