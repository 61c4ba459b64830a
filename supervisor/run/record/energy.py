"""The energy that the GPUs of each attempt have used, from the drivers' counters.

A counter goes on while no supervisor runs, so nothing is lost between two supervisors.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

SCHEMA = """
CREATE TABLE IF NOT EXISTS energy (
    attempt INTEGER NOT NULL, gpu TEXT NOT NULL, counter REAL, joules REAL NOT NULL, PRIMARY KEY (attempt, gpu)) WITHOUT ROWID;
"""
# A counter that is smaller than before has begun at 0 again: the driver was loaded again.
_ADD = """
INSERT INTO energy VALUES (?, ?, ?, 0) ON CONFLICT (attempt, gpu) DO UPDATE SET
    joules = joules + CASE
        WHEN excluded.counter IS NULL OR counter IS NULL THEN 0
        WHEN excluded.counter >= counter THEN excluded.counter - counter
        ELSE excluded.counter END,
    counter = coalesce(excluded.counter, counter)
"""


def add(db: sqlite3.Connection, attempt: int, counters: Mapping[str, float | None]) -> None:
    """Add readings of the counters of the attempt's GPUs, joules by uuid; None if a GPU has no
    counter. The first one of a GPU is where its energy begins."""
    db.executemany(_ADD, [(attempt, uuid, counter) for uuid, counter in counters.items()])


def totals(db: sqlite3.Connection) -> dict[int, float]:
    """Joules by attempt. An attempt is missing if it used no GPU, or one without a counter."""
    there = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'energy'").fetchone()
    if there is None:
        return {}  # written by an older memtop
    return dict(db.execute("SELECT attempt, sum(joules) FROM energy GROUP BY attempt HAVING count(*) = count(counter)"))
