"""The machine's history in the ledger: minimum, mean and maximum of every series.

The older, the coarser.

One row for each time interval and source (a GPU or the host). `numbers` packs four lists of floats:
minimum, mean, maximum and number of samples, each in the order of `series_of(source)`.
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
"""(length of an interval, how long it is kept), in seconds."""
SNAPSHOTS_KEPT = 720
"""Number of full snapshots kept: one every 5 s for an hour, to find out why a run died."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS sources (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, gpu_index INTEGER);
CREATE TABLE IF NOT EXISTS history (
    seconds INTEGER NOT NULL, time INTEGER NOT NULL, source INTEGER NOT NULL, numbers BLOB NOT NULL,
    PRIMARY KEY (seconds, time, source)) WITHOUT ROWID;
"""
# Intervals that wait while the ledger cannot be written: one hour.
_WAITING = 360
_FINEST = TIERS[0][0]
# Of a series that an older ledger does not have.
_NO_SAMPLES = (0.0, 0.0, 0.0, 0.0)


class Interval:
    """The samples of one source in one time interval."""

    def __init__(self, key: str, gpu_index: int | None, length: int) -> None:
        self.key, self.gpu_index = key, gpu_index
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
        """Add what is already stored for the same interval."""
        for n, (low, mean, high, count) in enumerate(_unpacked(packed)):
            if count:
                self.low[n] = min(self.low[n], low)
                self.high[n] = max(self.high[n], high)
                self.sum[n] += mean * count
                self.count[n] += int(count)

    def packed(self) -> bytes:
        means = (total / count if count else 0.0 for total, count in zip(self.sum, self.count, strict=True))
        return array("f", [*self.low, *means, *self.high, *self.count]).tobytes()


class Recorder:
    """Keeps the newest hour in memory and writes intervals of ten seconds and full snapshots to the
    ledger.

    What cannot be written waits for the next write. If more than an hour waits, the oldest
    intervals are dropped.
    """

    def __init__(self, db: sqlite3.Connection, now: float) -> None:
        self.history = History()
        self._db = db
        self._waiting: deque[tuple[int, dict[str, Interval]]] = deque(maxlen=_WAITING)
        refill(db, self.history, now)

    def add(self, snapshot: MachineSnapshot, run_rss_bytes: float | None, run_pss_bytes: float | None = None) -> None:
        """Add a sample. Nothing is written yet."""
        self.history.append(snapshot, run_rss_bytes, run_pss_bytes)
        start = int(snapshot.time // _FINEST) * _FINEST
        if not self._waiting or self._waiting[-1][0] != start:
            self._waiting.append((start, {}))
        for key, gpu_index, values in values_of(snapshot, run_rss_bytes, run_pss_bytes):
            intervals = self._waiting[-1][1]
            if key not in intervals:
                intervals[key] = Interval(key, gpu_index, len(values))
            intervals[key].add(values)

    def write(self, snapshot: MachineSnapshot, attempt: int) -> None:
        """Write this snapshot in full and the intervals that are over, in one transaction.

        Raises sqlite3.OperationalError on a full disk. No interval is lost then.
        """
        done = list(self._waiting)[:-1]
        with self._db:
            text = msgspec.json.encode(snapshot).decode()
            self._db.execute("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", (snapshot.time, attempt, text))
            # With fewer snapshots the inner query returns NULL, and no time is less than NULL.
            oldest = "SELECT time FROM samples ORDER BY time DESC LIMIT 1 OFFSET ?"
            self._db.execute(f"DELETE FROM samples WHERE time < ({oldest})", (SNAPSHOTS_KEPT - 1,))
            for start, intervals in done:
                _merge(self._db, start, intervals)
            if done:
                _forget(self._db, snapshot.time)
        for _ in done:
            self._waiting.popleft()

    def flush(self) -> None:
        """Also write the interval that is not over yet.

        The next recorder adds to it. Raises as `write`.
        """
        with self._db:
            for start, intervals in self._waiting:
                _merge(self._db, start, intervals)
        self._waiting.clear()


def _merge(db: sqlite3.Connection, start: int, intervals: dict[str, Interval]) -> None:
    """Add each interval to the one that contains it in every tier."""
    for interval in intervals.values():
        db.execute(
            "INSERT INTO sources (key, gpu_index) VALUES (?, ?)"
            " ON CONFLICT (key) DO UPDATE SET gpu_index = excluded.gpu_index WHERE gpu_index IS NOT excluded.gpu_index",
            (interval.key, interval.gpu_index),
        )
        (source,) = db.execute("SELECT id FROM sources WHERE key = ?", (interval.key,)).fetchone()
        for seconds, _ in TIERS:
            key = (seconds, start // seconds * seconds, source)
            row = db.execute("SELECT numbers FROM history WHERE (seconds, time, source) = (?, ?, ?)", key).fetchone()
            whole = Interval(interval.key, interval.gpu_index, len(interval.count))
            whole.merge(interval.packed())
            if row is not None:
                whole.merge(row[0])
            db.execute("INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?)", (*key, whole.packed()))


def _forget(db: sqlite3.Connection, now: float) -> None:
    coarsest = TIERS[-1][0]
    for seconds, kept in TIERS:
        if kept < math.inf:
            # Delete only whole intervals of the coarsest tier, which replaces them.
            border = (now - kept) // coarsest * coarsest
            db.execute("DELETE FROM history WHERE seconds = ? AND time < ?", (seconds, border))


def sources(db: sqlite3.Connection) -> dict[str, int | None]:
    """The key and the index of all GPUs that the ledger knows, and the key of the host with
    None."""
    return dict(db.execute("SELECT key, gpu_index FROM sources ORDER BY gpu_index, id"))


def extent(db: sqlite3.Connection) -> tuple[float, float] | None:
    """The first and the last moment of the history. None if it is empty."""
    first = math.inf
    for seconds, _ in TIERS:
        begin = _first(db, seconds)
        # A coarse interval begins before its first sample, so it counts only if no finer one covers
        # it.
        if begin is not None and begin + seconds <= first:
            first = begin
    (last,) = db.execute("SELECT max(time + seconds) FROM history WHERE seconds = ?", (_FINEST,)).fetchone()
    if last is None:
        (last,) = db.execute("SELECT max(time + seconds) FROM history").fetchone()
    return None if last is None else (first, float(last))


def read(db: sqlite3.Connection, key: str, since: float, until: float, *, most: int = 2200) -> dict[str, list[Bucket]]:
    """All series of a source between two moments, in the finest intervals of which at most `most`
    are needed.

    Where the finer tier does not reach back, the coarser one is used.
    """
    found: dict[str, list[Bucket]] = {name: [] for name in series_of(key)}
    # From coarse to fine: each tier replaces the coarser one where it begins.
    fits = [seconds for seconds, _ in reversed(TIERS) if (until - since) / seconds <= most] or [TIERS[-1][0]]
    begins = [_first(db, seconds) for seconds in fits]
    for n, seconds in enumerate(fits):
        end = min((begin for begin in begins[n + 1 :] if begin is not None), default=math.inf)
        rows = db.execute(
            "SELECT history.time, numbers FROM history JOIN sources ON source = id"
            " WHERE seconds = ? AND time > ? AND time <= ? AND key = ? ORDER BY time",
            # A coarse interval that overlaps finer ones adds nothing.
            (seconds, since - seconds, min(until, end - seconds), key),
        )
        for time, numbers in rows:
            for name, (low, mean, high, count) in zip(series_of(key), _unpacked(numbers), strict=False):
                if count:
                    found[name].append(Bucket(float(time), float(seconds), low, mean, high))
    return found


def highest(db: sqlite3.Connection, key: str, series: str, *, wherever: str) -> float | None:
    """The highest value that a series of a source ever had. None if it has none, or none in an
    interval that has a value of the series `wherever`: its peak may have been there."""
    places = [series_of(key).index(name) for name in (series, wherever)]
    # The coarsest intervals are few, and cover the whole history.
    rows = db.execute(
        "SELECT numbers FROM history JOIN sources ON source = id WHERE seconds = ? AND key = ?", (TIERS[-1][0], key)
    )
    peak = None
    for (numbers,) in rows:
        known = list(_unpacked(numbers))
        (_, _, high, count), (*_, expected) = (known[n] if n < len(known) else _NO_SAMPLES for n in places)
        if count:
            peak = high if peak is None else max(peak, high)
        elif expected:
            return None
    return peak


def _first(db: sqlite3.Connection, seconds: int) -> float | None:
    (time,) = db.execute("SELECT min(time) FROM history WHERE seconds = ?", (seconds,)).fetchone()
    return None if time is None else float(time)


def refill(db: sqlite3.Connection, history: History, now: float) -> None:
    """Read the newest hour back into memory: two values for each ten seconds, minimum and maximum,
    so that no peak is lost."""
    half = _FINEST / 2
    for key, gpu_index in sources(db).items():
        rows = db.execute(
            "SELECT time, numbers FROM history JOIN sources ON source = id"
            " WHERE seconds = ? AND key = ? AND time > ? ORDER BY time",
            (_FINEST, key, now - 3600),
        )
        for time, numbers in rows:
            values = list(_unpacked(numbers))
            values += [_NO_SAMPLES] * (len(series_of(key)) - len(values))
            history.add(key, gpu_index, time, [low if count else math.nan for low, _, _, count in values])
            history.add(key, gpu_index, time + half, [high if count else math.nan for _, _, high, count in values])


def _unpacked(numbers: bytes) -> Iterator[tuple[float, float, float, float]]:
    values = array("f")
    values.frombytes(numbers)
    n = len(values) // 4
    return zip(values[:n], values[n : 2 * n], values[2 * n : 3 * n], values[3 * n :], strict=True)
