"""A run's ledger in SQLite: attempts, configurations, step reports, events, machine history.

Only the supervisor writes it, through the `Outbox` (`outbox.py`).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memtop.presets.decoding import decoder_of
from memtop.presets.schema import Settings
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.killed import recorded_signal, state_word
from memtop.supervisor.monitor.history import HOST, Bucket
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.run.record import configurations, energy, metrics, tiers
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.reports import Hello, Report, Step, Unknown, decode
from memtop.supervisor.run_memory import HostMemory, host_memory
from memtop.supervisor.wire import Change, Event, Metric

_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    number INTEGER PRIMARY KEY, reason TEXT NOT NULL, settings TEXT, started REAL NOT NULL, ended REAL,
    exit_status INTEGER, outcome TEXT, diagnosis TEXT, start_updates INTEGER, updates INTEGER, samples_seen INTEGER,
    peak_bytes INTEGER, change TEXT NOT NULL, launched INTEGER NOT NULL DEFAULT 1);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL,
    message TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (time REAL PRIMARY KEY, attempt INTEGER NOT NULL, machine TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS journals (
    attempt INTEGER NOT NULL, rank INTEGER NOT NULL, offset INTEGER NOT NULL, forgotten INTEGER NOT NULL,
    PRIMARY KEY (attempt, rank));
CREATE TABLE IF NOT EXISTS kept (
    id INTEGER PRIMARY KEY AUTOINCREMENT, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, kind TEXT NOT NULL,
    offset INTEGER NOT NULL, report TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS kept_by_kind ON kept (attempt, rank, kind);
CREATE TABLE IF NOT EXISTS configurations (number INTEGER PRIMARY KEY, record TEXT NOT NULL);
"""
LARGE_TABLES = ("metrics", "history", "samples")
"""Updates and the machine's history: nearly all of the file after a long run."""
# Older events are deleted.
EVENTS_STORED = 100_000
SAMPLINGS_STORED = 500
"""Their events have texts, so fewer of them are kept."""
_KEPT_OF_A_KIND = 50
_OPEN_SECONDS = 5.0
"""How long a write waits for another program's lock when the ledger opens or an attempt begins."""
_LOCKED_SECONDS = 0.25
"""How long every other write waits for it. The supervisor does nothing else meanwhile."""
# Updates between two looks whether there are too many.
_THIN_EVERY = 1000


def why_not_written(path: Path, error: sqlite3.Error) -> str:
    """Why the ledger cannot be written, and what to do. SQLite has only words for it before Python
    3.11."""
    words = str(error)
    what = "check the disk and the folder's permissions"
    if "locked" in words:
        what = f"another program uses it, `fuser {path}` shows which: close it there"
    elif "full" in words:
        what = "free some space"
    return f"{path}: cannot be written: {words}; {what}"


def damage_mark(ledger: Path) -> Path:
    """An empty file that says: the writer or a reader of this ledger met damage."""
    return ledger.with_name(f"{ledger.name}-damaged")


def mark_damage(ledger: Path) -> None:
    """Make the next supervisor read the whole ledger."""
    with contextlib.suppress(OSError):
        # Without the mark (another user's run, a full disk) it reads less, and may meet the damage
        # as we did.
        damage_mark(ledger).touch()


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the training program.

    `start_updates` is where it resumed, None until the program has reported it.
    """

    number: int
    reason: str
    settings: Settings | None
    started: float
    ended: float | None = None
    exit_status: int | None = None
    outcome: str | None = None
    """finished | stopped | restarted | failed; None while it runs."""
    diagnosis: dict[str, Any] | None = None
    start_updates: int | None = None
    updates: int | None = None
    samples_seen: int | None = None
    peak_bytes: int | None = None
    change: Change = Change()
    """What the attempt began with."""
    launched: bool = True
    """False if its program could not be started."""
    energy_joules: float | None = None
    """What its GPUs have used, by the drivers' counters. None if it used no GPU, or if one has no
    counter."""

    @property
    def ended_by(self) -> int | None:
        """See `RunState`."""
        return recorded_signal(self.diagnosis)

    @property
    def word(self) -> str | None:
        """The outcome as people read it: `killed`, or its name. None while it runs."""
        return None if self.outcome is None else state_word(self.outcome, self.ended_by)


class StoredStep(NamedTuple):
    """A step report as the ledger has it: with the number of its attempt."""

    attempt: int
    time: float
    """Seconds since the epoch."""
    report: Step
    updates: int = 1
    """How many updates it stands for."""

    def metric(self) -> Metric:
        """The row of the metric history."""
        of_report = [name for name in Metric.__struct_fields__ if name not in ("attempt", "updates")]
        values = {name: getattr(self.report, name) for name in of_report}
        return Metric(attempt=self.attempt, updates=self.updates, **values)


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection that only reads.

    To read a ledger, SQLite creates two files next to it. If it cannot (a read-only mount, another
    user's folder), a ledger that its writer closed is opened as a file that never changes.
    """
    place = path.absolute().as_uri()
    database = sqlite3.connect(f"{place}?mode=ro", uri=True, timeout=5)
    try:
        database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.Error as error:
        database.close()
        if not isinstance(error, sqlite3.OperationalError) or os.access(path.parent, os.W_OK):
            raise
        if path.with_name(f"{path.name}-wal").exists():
            why = "its writer was killed, and its folder cannot be written; copy the run's folder to a place of yours"
            raise sqlite3.OperationalError(why) from None
        return sqlite3.connect(f"{place}?immutable=1", uri=True)
    return database


class Ledger:
    """The supervisor opens it for writing, all others read-only."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        if read_only:
            self._db = _connect_to_read(path)
        else:
            # One writer, in one thread at a time. Autocommit is off, so that a batch is one
            # transaction.
            self._db = sqlite3.connect(path, timeout=_OPEN_SECONDS, check_same_thread=False)
            # WAL lets others read while we write. File systems without shared memory keep the
            # default.
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            # All tables in one transaction: readers see all of them or none.
            self._db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}{metrics.SCHEMA}{tiers.SCHEMA}{energy.SCHEMA}COMMIT;")
            self._wait_for_lock(_LOCKED_SECONDS)
        self._recorder: tiers.Recorder | None = None
        self._unthinned = 0
        self._goes_back = False
        """The first rank has a new process, whose first update has not been stored yet."""
        self._in_transaction = False

    @property
    def is_new(self) -> bool:
        """True while the supervisor has created the file but no tables yet."""
        return self._db.execute("SELECT name FROM sqlite_master LIMIT 1").fetchone() is None

    def close(self) -> None:
        try:
            if self._recorder is not None:
                self._recorder.flush()
        finally:
            self._db.close()

    def _wait_for_lock(self, seconds: float) -> None:
        """How long a write waits for a program that has locked the ledger."""
        self._db.execute(f"PRAGMA busy_timeout = {seconds * 1000:.0f}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything that is written inside is stored, or nothing is. Inner ones join the outer."""
        if self._in_transaction:
            yield
            return
        self._in_transaction = True
        try:
            with self._db:
                yield
        finally:
            self._in_transaction = False

    # --- attempts ---

    def add_attempt(
        self,
        number: int,
        reason: str,
        settings: Settings | None,
        started: float,
        start_updates: int | None = None,
        change: Change = Change(),  # noqa: B008 - a frozen value
    ) -> None:
        text = None if settings is None else msgspec.json.encode(settings).decode()
        sql = "INSERT INTO attempts (number, reason, settings, started, start_updates, change) VALUES (?, ?, ?, ?, ?, ?)"
        row = (number, reason, text, started, start_updates, msgspec.json.encode(change).decode())
        # The program starts only after this.
        self._wait_for_lock(_OPEN_SECONDS)
        try:
            with self.transaction():
                self._db.execute(sql, row)
        finally:
            self._wait_for_lock(_LOCKED_SECONDS)

    def update_attempt(self, number: int, **values: Any) -> None:
        """Set columns of an attempt.

        `diagnosis` is a dictionary. Raises sqlite3.OperationalError on a full disk.
        """
        if "diagnosis" in values and values["diagnosis"] is not None:
            values["diagnosis"] = msgspec.json.encode(values["diagnosis"]).decode()
        columns = ", ".join(f"{name} = ?" for name in values)
        with self.transaction():
            self._db.execute(f"UPDATE attempts SET {columns} WHERE number = ?", (*values.values(), number))

    def attempts(self) -> list[Attempt]:
        columns = [name for name in Attempt.__struct_fields__ if name != "energy_joules"]
        rows = self._db.execute(f"SELECT {', '.join(columns)} FROM attempts ORDER BY number")
        known, joules = [self._attempt(dict(zip(columns, row, strict=True))) for row in rows], energy.totals(self._db)
        return [msgspec.structs.replace(attempt, energy_joules=joules.get(attempt.number)) for attempt in known]

    def add_energy(self, attempt: int, counters: Mapping[str, float | None]) -> None:
        """See `energy.add`. Raises sqlite3.OperationalError on a full disk."""
        with self.transaction():
            energy.add(self._db, attempt, counters)

    @staticmethod
    def _attempt(row: dict[str, Any]) -> Attempt:
        row["settings"] = None if row["settings"] is None else decoder_of(Settings).decode(row["settings"])
        row["change"], row["launched"] = decoder_of(Change).decode(row["change"]), bool(row["launched"])
        row["diagnosis"] = None if row["diagnosis"] is None else msgspec.json.decode(row["diagnosis"])
        return Attempt(**row)

    # --- configurations ---

    def save_configuration(self, record: configurations.ConfigurationRecord) -> None:
        """Raises sqlite3.OperationalError on a full disk."""
        row = (record.configuration.number, msgspec.json.encode(record).decode())
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO configurations VALUES (?, ?)", row)

    def configurations(self) -> list[configurations.ConfigurationRecord]:
        """All configurations of the run, oldest first."""
        rows = self._db.execute("SELECT record FROM configurations ORDER BY number")
        return [decoder_of(configurations.ConfigurationRecord).decode(text) for (text,) in rows]

    # --- reports ---

    def journal_offsets(self, attempt: int, rank: int) -> tuple[int, int]:
        """How far a journal is stored, and how far it may be forgotten. Both 0 for a new one."""
        sql = "SELECT offset, forgotten FROM journals WHERE attempt = ? AND rank = ?"
        row = self._db.execute(sql, (attempt, rank)).fetchone()
        return (int(row[0]), int(row[1])) if row else (0, 0)

    def add_reports(self, attempt: int, rank: int, reports: Iterable[Report], offset: int) -> int:
        """Store the reports up to this offset of the journal: the updates of the first rank, and
        the newest of every other kind.

        One transaction, so that no report is lost or counted twice. Returns the offset.
        """
        reports = list(reports)
        parts = list(_by_process(reports)) if rank == 0 else []
        self._unthinned += sum(len(part) for part in parts)
        goes_back = self._goes_back
        with self.transaction():
            for number, steps in enumerate(parts):
                goes_back = goes_back or number > 0
                if goes_back and steps:
                    metrics.take_back(self._db, attempt, steps[0].update)
                    goes_back = False
                metrics.add(self._db, attempt, steps)
            if self._unthinned >= _THIN_EVERY:
                metrics.thin(self._db)
            self._keep(attempt, rank, offset, [report for report in reports if not isinstance(report, Step | Unknown)])
            self._db.execute(
                "INSERT INTO journals VALUES (?, ?, ?, 0) ON CONFLICT (attempt, rank) DO UPDATE SET offset = excluded.offset",
                (attempt, rank, offset),
            )
        self._unthinned %= _THIN_EVERY
        self._goes_back = goes_back
        return offset

    def take_back(self, attempt: int, update: int) -> None:
        """Remove an attempt's updates from this one on: the program's workers go on before it."""
        with self.transaction():
            metrics.take_back(self._db, attempt, update)

    def add_from_output(self, attempt: int, steps: Iterable[Step]) -> None:
        """Store what was read from the program's output: it fills in what the agent's updates
        lack.
        """
        with self.transaction():
            metrics.fill_in(self._db, attempt, steps)

    def drop_updates(self, attempt: int) -> None:
        """Remove the agent's updates of an attempt whose output has a better counter."""
        with self.transaction():
            metrics.remove(self._db, attempt)

    def _keep(self, attempt: int, rank: int, offset: int, reports: list[Report]) -> None:
        """Store the newest of each kind in the order in which they were reported."""
        rows: list[tuple[object, ...]] = []
        counts: Counter[str] = Counter()
        for report in reversed(reports):
            kind = type(report).__name__
            counts[kind] += 1
            if counts[kind] <= _KEPT_OF_A_KIND:
                rows.append((attempt, rank, kind, offset, msgspec.json.encode(report).decode()))
        self._db.executemany("INSERT INTO kept (attempt, rank, kind, offset, report) VALUES (?, ?, ?, ?, ?)", reversed(rows))
        for kind in counts:
            key = (attempt, rank, kind)
            self._db.execute(
                "DELETE FROM kept WHERE id IN (SELECT id FROM kept WHERE (attempt, rank, kind) = (?, ?, ?)"
                " ORDER BY id DESC LIMIT -1 OFFSET ?)",
                (*key, _KEPT_OF_A_KIND),
            )

    def forget_journal(self, attempt: int, rank: int, until: int) -> None:
        """The journal before this offset is not needed any more."""
        with self.transaction():
            sql = "UPDATE journals SET forgotten = ? WHERE attempt = ? AND rank = ?"
            self._db.execute(sql, (until, attempt, rank))

    def kept_reports(self, attempt: int, rank: int, until: int) -> list[Report]:
        """What is left of the reports before this offset of a journal: the newest of each kind,
        without updates."""
        sql = "SELECT report FROM kept WHERE attempt = ? AND rank = ? AND offset <= ? ORDER BY id"
        found = (decode(text.encode()) for (text,) in self._db.execute(sql, (attempt, rank, until)))
        return [report for report in found if report is not None]

    def metrics(self, newest: int | None = None) -> list[Metric]:
        """The run's final history, or the end of it."""
        return list(self.final_history()) if newest is None else metrics.newest(self._db, newest)

    def final_history(self, first: int = 0) -> Iterator[Metric]:
        """One row for each update from `first` on that counts; of old ones one for several."""
        return metrics.final_history(self._db, first)

    def best_loss(self, before: int | None = None) -> float | None:
        """The least loss of the final history, or of what is in it before this update."""
        return metrics.best_loss(self._db, before)

    def highest_peak(self, attempt: int) -> int | None:
        return metrics.highest_peak(self._db, attempt)

    def steps(self) -> list[StoredStep]:
        """Every update that was ever reported, in order of time, including those that were rolled
        back; of old updates one for several."""
        sql = "SELECT attempt, time, report, updates FROM metrics WHERE time IS NOT NULL ORDER BY time"
        return [
            StoredStep(attempt, time, decoder_of(Step).decode(text), updates)
            for attempt, time, text, updates in self._db.execute(sql)
        ]

    # --- events ---

    def add_event(self, event: Event) -> Event:
        """Store an event. Returns it with the number that the ledger assigned."""
        with self.transaction():
            cursor = self._db.execute(
                "INSERT INTO events (time, attempt, kind, message, data) VALUES (?, ?, ?, ?, ?)",
                (event.time, event.attempt, event.kind, event.message, msgspec.json.encode(event.data).decode()),
            )
            number = cursor.lastrowid or 0
            if number % 1000 == 0:
                self._db.execute("DELETE FROM events WHERE id <= ?", (number - EVENTS_STORED,))
            if event.kind == "sample":
                self._db.execute(
                    "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE kind = 'sample'"
                    " ORDER BY id DESC LIMIT -1 OFFSET ?)",
                    (SAMPLINGS_STORED,),
                )
        return msgspec.structs.replace(event, id=number)

    def announced(self, attempt: int, kinds: Sequence[str]) -> set[tuple[str, float]]:
        """The attempt's events of these kinds that were caused by a report: their kinds and the
        reports' times."""
        marks = ", ".join("?" * len(kinds))
        rows = self._db.execute(
            f"SELECT kind, data FROM events WHERE attempt = ? AND kind IN ({marks})", (attempt, *kinds)
        ).fetchall()
        found = ((kind, msgspec.json.decode(data).get("time")) for kind, data in rows)
        return {(kind, reported) for kind, reported in found if reported is not None}

    def events(self, newest: int = 500, *, kind: str | None = None, after: int = 0) -> list[Event]:
        """The newest events, all or of one kind, after the one with this number; oldest first."""
        rows = self._db.execute(
            "SELECT id, time, attempt, kind, message, data FROM events"
            " WHERE id > ? AND ? IN (kind, '') ORDER BY id DESC LIMIT ?",
            (after, kind or "", newest),
        ).fetchall()
        return [
            Event(id=i, time=t, attempt=a, kind=k, message=m, data=msgspec.json.decode(d))
            for i, t, a, k, m, d in reversed(rows)
        ]

    # --- the machine ---

    @property
    def recorder(self) -> tiers.Recorder:
        """Records the machine's samples, for the supervisor.

        The first call reads the newest hour back into memory.
        """
        if self._recorder is None:
            self._recorder = tiers.Recorder(self._db, time.time())
        return self._recorder

    def sources(self) -> dict[str, int | None]:
        """The key of everything that has a history, with the GPU's index or None for the host."""
        return tiers.sources(self._db)

    def extent(self) -> tuple[float, float] | None:
        """The first and the last moment of the machine's history. None if there is none."""
        return tiers.extent(self._db)

    def history(self, key: str, since: float, until: float) -> dict[str, list[Bucket]]:
        """All series of a source by name, in time steps that suit the length of the time range."""
        return tiers.read(self._db, key, since, until)

    def host_peak(self) -> HostMemory:
        """The highest host memory of the run's processes together. Older ledgers have no PSS."""
        sizes = (tiers.highest(self._db, HOST, name, wherever="run_rss_bytes") for name in ("run_pss_bytes", "run_rss_bytes"))
        return configurations.with_peaks(host_memory(*sizes), () if metrics.of_gpu(self._db) else self.configurations())

    def snapshot(self, at: float, not_before: float) -> MachineSnapshot | None:
        """The newest full snapshot between the two moments. Only the last hour has some."""
        sql = "SELECT machine FROM samples WHERE time <= ? AND time >= ? ORDER BY time DESC LIMIT 1"
        row = self._db.execute(sql, (at, not_before)).fetchone()
        return None if row is None else decoder_of(MachineSnapshot).decode(row[0])


def _by_process(reports: Iterable[Report]) -> Iterator[list[Step]]:
    """The updates of a journal, apart where its process was started again."""
    steps: list[Step] = []
    for report in reports:
        if isinstance(report, Hello) and report.restarts:
            yield steps
            steps = []
        elif isinstance(report, Step):
            steps.append(report)
    yield steps


@contextlib.contextmanager
def reading_ledger(folder: RunFolder) -> Iterator[Ledger | None]:
    """The run's ledger for reading, None if the run never started.

    Raises RunFolderError if it cannot be read.
    """
    if not folder.ledger_path.is_file():
        yield None
        return
    try:
        with contextlib.closing(Ledger(folder.ledger_path, read_only=True)) as ledger:
            yield None if ledger.is_new else ledger
    except (sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError) as error:
        damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
        hint = ""
        if damaged:
            mark_damage(folder.ledger_path)
            hint = f"; `memtop restart {folder.name}` rebuilds it"
        raise RunFolderError(f"{folder.ledger_path}: cannot be read: {error}{hint}") from None
