"""The machine's history in the ledger: least, mean and most of every series, the coarser the older.

One row per stretch of time and source (a GPU or the host). `numbers` packs four lists of floats: least, mean, most, and of how
many samples, each in the order of `series_of(source)`; a ledger written before a series existed has shorter lists.
"""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from memtop.supervisor.monitor.history import Bucket, History, series_of, values_of
from memtop.supervisor.monitor.values import MachineSnapshot

TIERS = ((10, 6 * 3600.0), (60, 7 * 86400.0), (600, math.inf))
"""(seconds of a stretch, how long it is kept)"""
SNAPSHOTS_KEPT = 720
"""Full snapshots: an hour of one every 5 s, for finding out why something died."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS sources (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, label TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS history (
    seconds INTEGER NOT NULL, time INTEGER NOT NULL, source INTEGER NOT NULL, numbers BLOB NOT NULL,
    PRIMARY KEY (seconds, time, source)) WITHOUT ROWID;
"""
# Of what an older version stored, so many snapshots are thinned out with every writing: 10 ms.
_CONVERTED_AT_ONCE = 100
# Stretches that wait for a ledger that cannot be written: an hour of them.
_WAITING = 360
_FINEST = TIERS[0][0]


class Stretch:
    """The samples of one source in one stretch of time."""

    def __init__(self, key: str, label: str, length: int) -> None:
        self.key, self.label = key, label
        self.low = [math.inf] * length
        self.sum = [0.0] * length
        self.high = [-math.inf] * length
        self.count = [0] * length

    def add(self, values: Sequence[float]) -> None:
        for n, value in enumerate(values):
            if value == value:
                self.low[n] = min(self.low[n], value)
                self.high[n] = max(self.high[n], value)
                self.sum[n] += value
                self.count[n] += 1

    def merge(self, packed: bytes) -> None:
        """Add what is stored already of the same stretch."""
        for n, (low, mean, high, count) in enumerate(_unpacked(packed)):
            if count and n < len(self.count):
                self.low[n] = min(self.low[n], low)
                self.high[n] = max(self.high[n], high)
                self.sum[n] += mean * count
                self.count[n] += int(count)

    def packed(self) -> bytes:
        means = (total / count if count else 0.0 for total, count in zip(self.sum, self.count, strict=True))
        return array("f", [*self.low, *means, *self.high, *self.count]).tobytes()


class Recorder:
    """The newest hour in memory, and its way into the ledger: stretches of ten seconds, and a full snapshot now and then.

    What cannot be written waits for the next time; of more than an hour of it the oldest is given up.
    """

    def __init__(self, db: sqlite3.Connection, now: float) -> None:
        self.history = History()
        self._db = db
        self._waiting: deque[tuple[int, dict[str, Stretch]]] = deque(maxlen=_WAITING)
        refill(db, self.history, now)

    def add(self, snapshot: MachineSnapshot, run_rss_bytes: float | None) -> None:
        """Take a sample in; nothing is written yet."""
        self.history.append(snapshot, run_rss_bytes)
        start = int(snapshot.time // _FINEST) * _FINEST
        if not self._waiting or self._waiting[-1][0] != start:
            self._waiting.append((start, {}))
        _gather(self._waiting[-1][1], snapshot, run_rss_bytes)

    def write(self, snapshot: MachineSnapshot, attempt: int) -> None:
        """One small transaction: this snapshot in full, and the stretches that are over.

        Raises sqlite3.OperationalError on a full disk; no stretch is lost then.
        """
        done = list(self._waiting)[:-1]
        with self._db:
            text = msgspec.json.encode(snapshot).decode()
            self._db.execute("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", (snapshot.time, attempt, text))
            # Where there are no more than that, the inner query is empty, and nothing is less than its NULL.
            oldest = "SELECT time FROM samples ORDER BY time DESC LIMIT 1 OFFSET ?"
            self._db.execute(f"DELETE FROM samples WHERE time < ({oldest})", (SNAPSHOTS_KEPT - 1,))
            for start, stretches in done:
                _merge(self._db, start, stretches)
            if done:
                _forget(self._db, snapshot.time)
            _convert_some(self._db, snapshot.time)
        for _ in done:
            self._waiting.popleft()

    def flush(self) -> None:
        """Write the stretch that is not over yet, too: whoever records next adds to it. Raises as `write`."""
        with self._db:
            for start, stretches in self._waiting:
                _merge(self._db, start, stretches)
        self._waiting.clear()


def prepare(db: sqlite3.Connection, schema: str = "") -> None:
    """Make the tables, and those of `schema`, in one step for whoever reads meanwhile; what an older version stored at full
    length is set aside, to be thinned out bit by bit."""
    tables = _tables(db)
    aside = "ALTER TABLE samples RENAME TO old_samples;" if "history" not in tables and "samples" in tables else ""
    db.executescript(f"BEGIN IMMEDIATE;{aside}{SCHEMA}{schema}COMMIT;")


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _gather(stretches: dict[str, Stretch], snapshot: MachineSnapshot, run_rss_bytes: float | None) -> None:
    for key, label, values in values_of(snapshot, run_rss_bytes):
        if key not in stretches:
            stretches[key] = Stretch(key, label, len(values))
        stretches[key].add(values)


def _merge(
    db: sqlite3.Connection, start: int, stretches: dict[str, Stretch], tiers: Sequence[tuple[int, float]] = TIERS
) -> None:
    """Add the stretch to the one that contains it in every tier."""
    for stretch in stretches.values():
        db.execute(
            "INSERT INTO sources (key, label) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET label = excluded.label"
            " WHERE label != excluded.label",
            (stretch.key, stretch.label),
        )
        (source,) = db.execute("SELECT id FROM sources WHERE key = ?", (stretch.key,)).fetchone()
        for seconds, _ in tiers:
            key = (seconds, start // seconds * seconds, source)
            row = db.execute("SELECT numbers FROM history WHERE (seconds, time, source) = (?, ?, ?)", key).fetchone()
            whole = Stretch(stretch.key, stretch.label, len(stretch.count))
            whole.merge(stretch.packed())
            if row is not None:
                whole.merge(row[0])
            db.execute("INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?)", (*key, whole.packed()))


def _forget(db: sqlite3.Connection, now: float) -> None:
    coarsest = TIERS[-1][0]
    for seconds, kept in TIERS:
        if kept < math.inf:
            # Only whole stretches of the coarser tiers, which stand in for what is gone.
            border = (now - kept) // coarsest * coarsest
            db.execute("DELETE FROM history WHERE seconds = ? AND time < ?", (seconds, border))


def _convert_some(db: sqlite3.Connection, now: float) -> None:
    """Thin out the oldest of what an older version stored at full length."""
    if "old_samples" not in _tables(db):
        return
    rows = db.execute("SELECT time, machine FROM old_samples ORDER BY time LIMIT ?", (_CONVERTED_AT_ONCE,)).fetchall()
    if not rows:
        db.execute("DROP TABLE old_samples")
        return
    for time, machine in rows:
        try:
            snapshot = msgspec.json.decode(machine, type=MachineSnapshot)
        except msgspec.MsgspecError:
            # Of a version whose snapshots looked otherwise: its numbers are not to be had.
            continue
        stretches: dict[str, Stretch] = {}
        _gather(stretches, snapshot, None)
        _merge(db, int(time // _FINEST) * _FINEST, stretches, [tier for tier in TIERS if time > now - tier[1]])
    db.execute("DELETE FROM old_samples WHERE time <= ?", (rows[-1][0],))


def sources(db: sqlite3.Connection) -> dict[str, str]:
    """Key and words of all GPUs (and the host) that the ledger knows; nothing in one of an older version."""
    if "history" not in _tables(db):
        return {}
    return dict(db.execute("SELECT key, label FROM sources ORDER BY label != 'host', label, id"))


def extent(db: sqlite3.Connection) -> tuple[float, float] | None:
    """The first and the last moment that the history knows."""
    if "history" not in _tables(db):
        return None
    first = math.inf
    for seconds, _ in TIERS:
        begin = _first(db, seconds)
        # A coarse stretch begins before its first sample: it counts only where nothing finer is left of it.
        if begin is not None and begin + seconds <= first:
            first = begin
    (last,) = db.execute("SELECT max(time + seconds) FROM history WHERE seconds = ?", (_FINEST,)).fetchone()
    if last is None:
        (last,) = db.execute("SELECT max(time + seconds) FROM history").fetchone()
    return None if last is None else (first, float(last))


def read(db: sqlite3.Connection, key: str, since: float, until: float, *, most: int = 2200) -> dict[str, list[Bucket]]:
    """Every series of that source between two moments, in the finest stretches that are at most `most` in number.

    Where the finer tier does not reach back, the coarser one stands in for it.
    """
    if "history" not in _tables(db):
        return {}
    found: dict[str, list[Bucket]] = {name: [] for name in series_of(key)}
    # From coarse to fine: each takes over where it begins.
    fits = [seconds for seconds, _ in reversed(TIERS) if (until - since) / seconds <= most] or [TIERS[-1][0]]
    begins = [_first(db, seconds) for seconds in fits]
    for n, seconds in enumerate(fits):
        end = min((begin for begin in begins[n + 1 :] if begin is not None), default=math.inf)
        rows = db.execute(
            "SELECT history.time, numbers FROM history JOIN sources ON source = id"
            " WHERE seconds = ? AND time > ? AND time <= ? AND key = ? ORDER BY time",
            # A coarse stretch that reaches into the finer ones says nothing that they do not.
            (seconds, since - seconds, min(until, end - seconds), key),
        )
        for time, numbers in rows:
            for name, (low, mean, high, count) in zip(series_of(key), _unpacked(numbers), strict=False):
                if count:
                    found[name].append(Bucket(float(time), float(seconds), low, mean, high))
    return found


def _first(db: sqlite3.Connection, seconds: int) -> float | None:
    (time,) = db.execute("SELECT min(time) FROM history WHERE seconds = ?", (seconds,)).fetchone()
    return None if time is None else float(time)


def refill(db: sqlite3.Connection, history: History, now: float) -> None:
    """The newest hour back into memory: two values for each ten seconds, the least and the most, so that no peak is lost."""
    half = _FINEST / 2
    for key, label in sources(db).items():
        rows = db.execute(
            "SELECT time, numbers FROM history JOIN sources ON source = id"
            " WHERE seconds = ? AND key = ? AND time > ? ORDER BY time",
            (_FINEST, key, now - 3600),
        )
        for time, numbers in rows:
            values = list(_unpacked(numbers))
            missing = [math.nan] * (len(series_of(key)) - len(values))
            history.add(key, label, time, [low if count else math.nan for low, _, _, count in values] + missing)
            history.add(key, label, time + half, [high if count else math.nan for _, _, high, count in values] + missing)


def _unpacked(numbers: bytes) -> Iterator[tuple[float, float, float, float]]:
    values = array("f")
    values.frombytes(numbers)
    n = len(values) // 4
    return zip(values[:n], values[n : 2 * n], values[2 * n : 3 * n], values[3 * n :], strict=True)
