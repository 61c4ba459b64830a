"""Opens the supervisor's ledger.

One that is lost or damaged is rebuilt from the folders of the attempts, as far as they go: what was
started, how it ended, what the ranks reported. Attempts that it lacks are added in the same way.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

from memtop.presets.schema import Settings
from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.monitor.history import History
from memtop.supervisor.run.processes.attempt import ExitFile
from memtop.supervisor.run.record import metrics, tiers
from memtop.supervisor.run.record.folder import RunFolder, StateFile, name_aside, read_derived
from memtop.supervisor.run.record.journal import JournalReader, find_journals
from memtop.supervisor.run.record.ledger import LARGE_TABLES, Ledger, damage_mark, why_not_written
from memtop.supervisor.run.reports import End, Plan, Step

_REASON = "found in the run's folder"


class _Found(NamedTuple):
    """The last of these that the first rank reported, among the reports that the ledger lacked."""

    plan: Plan | None
    end: End | None
    step: Step | None


def open_ledger(folder: RunFolder) -> tuple[Ledger, str | None]:
    """The ledger, created or rebuilt if necessary, and what the person should know about that.

    Raises RunFolderError if it cannot be written.
    """
    path = folder.ledger_path
    try:
        damage = _damage(path)
        was = f"{path} was missing" if damage is None else f"{path} was damaged ({damage}; now {_moved_aside(path)})"
        ledger = Ledger(path)
        known = {attempt.number for attempt in ledger.attempts()}
        missing = [number for number in sorted(folder.attempt_numbers()) if number not in known]
        if not missing:
            return ledger, None
        with ledger.transaction():
            _rebuild(folder, ledger, missing)
    except sqlite3.Error as error:
        raise RunFolderError(why_not_written(path, error)) from None
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be used: {error}") from None
    if known:
        return ledger, f"{path} lacked attempts ({', '.join(map(str, missing))}): added from {folder.path / 'attempts'}"
    return ledger, f"{was}: it was rebuilt from {folder.path / 'attempts'}; earlier events and memory history are lost"


def _damage(path: Path) -> str | None:
    """What is wrong with the file. None if it is whole as far as it was read, or missing.

    A run of a month has hundreds of megabytes of updates, so only what every supervisor needs is
    read: the small tables, and the numbers that the rules begin with. Everything is read if the
    last supervisor met damage, or was killed: SQLite's log is left then.
    """
    if not path.is_file():
        return "not a file" if path.exists() or path.is_symlink() else None
    mark = damage_mark(path)
    whole = mark.exists() or any(_is_left(path.with_name(path.name + suffix)) for suffix in ("-wal", "-journal"))
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as db:
            found = _checked(db, whole=whole)
    except sqlite3.OperationalError:
        return None  # it cannot be opened now, which proves nothing
    except sqlite3.DatabaseError as error:
        return str(error)
    except (ValueError, TypeError) as error:
        return f"wrong values: {error}"  # SQLite stores anything in any column
    if found is None and mark.is_file():
        mark.unlink()
    return found


def _is_left(path: Path) -> bool:
    """Whether this file has content. A program that only reads the ledger can leave an empty
    log."""
    return path.exists() and path.stat().st_size > 0


def _checked(db: sqlite3.Connection, *, whole: bool) -> str | None:
    """What SQLite finds wrong. Raises sqlite3.DatabaseError for what it cannot read, ValueError or
    TypeError for values that memtop cannot read."""
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if "metrics" in tables:
        metrics.best_loss(db)
        tiers.refill(db, History(), time.time())
    checks = ["quick_check(1)"] if whole else [f"quick_check({name})" for name in tables if name not in LARGE_TABLES]
    for check in checks:
        (found,) = db.execute(f"PRAGMA {check}").fetchone()
        if found != "ok":
            return " ".join(str(found).split())
    return None


def _moved_aside(path: Path) -> str:
    """Rename the ledger and the files next to it. Returns the new name."""
    aside = name_aside(path).name
    for suffix in ("-wal", "-shm", "-journal", "-damaged", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(path.with_name(aside + suffix))
    return aside


def _rebuild(folder: RunFolder, ledger: Ledger, missing: list[int]) -> None:
    """Add the missing attempts, oldest first.

    Part of the caller's transaction, so that a supervisor that is killed leaves no half of them.
    """
    state, newest = folder.state(), folder.attempt_numbers()[0]
    for attempt in ledger.attempts():
        if attempt.ended is None and attempt.number < missing[-1]:
            # The ledger lacks its end, too.
            _close(folder, ledger, attempt.number, None, _add_reports(ledger, attempt.number, folder.attempt(attempt.number)))
    for number in missing:
        if number != newest:
            _add(folder, ledger, number, None, may_run=False)
    if newest not in missing:
        return
    # The end of the newest attempt is handled by the rules, unless they have done so before.
    handled = state is None or state.run.attempt != newest or state.run.state.final
    exited = read_derived(folder.attempt(newest) / "exit.json", ExitFile) is not None
    over = handled and (exited or (state is not None and state.run.attempt == newest))
    _add(folder, ledger, newest, state, may_run=not over)


def _add(folder: RunFolder, ledger: Ledger, number: int, state: StateFile | None, *, may_run: bool) -> None:
    path = folder.attempt(number)
    settings = read_derived(path / "settings.json", Settings)
    started = _first_time(path)
    # An external command counts its updates from its start.
    ledger.add_attempt(number, _REASON, settings, started, 0 if settings is None else None)
    found = _add_reports(ledger, number, path)
    if found.plan is not None:
        ledger.update_attempt(number, start_updates=found.plan.updates)
    if not may_run:
        _close(folder, ledger, number, state, found)


def _close(folder: RunFolder, ledger: Ledger, number: int, state: StateFile | None, found: _Found) -> None:
    path, end, step = folder.attempt(number), found.end, found.step
    (attempt,) = (attempt for attempt in ledger.attempts() if attempt.number == number)
    exited = read_derived(path / "exit.json", ExitFile)
    status = exited.status if exited is not None else None
    outcome, diagnosis = end.outcome if end is not None else None, None
    if state is not None and state.run.attempt == number:
        outcome = state.run.state.value
        if state.run.ended_by is not None:
            diagnosis = {"summary": state.run.reason or "", "evidence": [], "ended_by": state.run.ended_by}
    elif outcome not in ("finished", "stopped", "failed"):
        outcome = "failed" if status else "stopped" if attempt.settings is not None else "finished"
    ledger.update_attempt(
        number,
        ended=exited.ended if exited is not None else attempt.started,
        exit_status=status,
        outcome=outcome,
        diagnosis=diagnosis,
        launched=exited is not None or (path / "process.json").exists(),
        updates=step.update if step is not None else attempt.updates,
        samples_seen=step.samples_seen if step is not None else attempt.samples_seen,
        peak_bytes=ledger.highest_peak(number),
    )


def _first_time(path: Path) -> float:
    """When the attempt was started: its command was written just before."""
    with contextlib.suppress(OSError):
        return (path / "command.json").stat().st_mtime
    return path.stat().st_mtime


def _add_reports(ledger: Ledger, number: int, path: Path) -> _Found:
    """Store all reports that the ledger lacks."""
    plan: Plan | None = None
    end: End | None = None
    step: Step | None = None
    for journal in map(JournalReader, find_journals(path)):
        journal.offset, _ = ledger.journal_offsets(number, journal.rank)
        while True:
            reports, until = journal.read_new()
            if until == journal.offset:
                break
            journal.offset = ledger.add_reports(number, journal.rank, reports, until)
            for report in reports if journal.rank == 0 else ():
                match report:
                    case Plan():
                        # A program may train several times; the attempt resumed with the first.
                        plan = plan or report
                    case End():
                        end = report
                    case Step():
                        step = report
    return _Found(plan, end, step)
