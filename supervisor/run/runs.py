"""Lists of runs: all runs of a folder and all that live on this machine, a row each."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.cells import cell_len

from memtop.supervisor import units
from memtop.supervisor.clean import clean
from memtop.supervisor.errors import MemtopError, RunFolderError
from memtop.supervisor.language import tr
from memtop.supervisor.names import shortened
from memtop.supervisor.program import name_of
from memtop.supervisor.run import view
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import reading_ledger
from memtop.supervisor.run.record.ownership import is_foreign_link, why_unreadable
from memtop.supervisor.run_memory import HostMemory
from memtop.supervisor.wire import Phase, RunState

_BETWEEN = 2
"""Cells between two columns."""


def run_folders(runs_dir: Path) -> list[RunFolder]:
    """All runs, oldest first, including unreadable ones; RunFolderError if `runs_dir` cannot be
    read."""
    found = []
    for path in _entries(runs_dir):
        if is_foreign_link(path):
            continue
        try:
            written = (path / "run.json").stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            written = 0.0
        folder = RunFolder(path)
        try:
            found.append((folder.spec().created, folder))
        except MemtopError:
            found.append((written, folder))
    return [folder for _, folder in sorted(found, key=lambda item: (item[0], item[1].name))]


def _entries(runs_dir: Path) -> list[Path]:
    """The folder's entries, none if it does not exist; RunFolderError if it cannot be read."""
    try:
        return list(runs_dir.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"{runs_dir}: cannot be read: {error.strerror}; give another --runs-dir") from None


def living_elsewhere(runs_dir: Path) -> Iterator[RunFolder]:
    """The caller's runs in other folders whose supervisor lives."""
    import psutil

    here = runs_dir.absolute()
    for process in psutil.process_iter():
        # The process may have ended, or belong to another user.
        with contextlib.suppress(psutil.Error):
            if process.uids().real != os.getuid():
                continue
            words = process.cmdline()
            if "memtop.supervisor" not in words:
                continue
            path = Path(words[words.index("memtop.supervisor") + 1])
            if path.parent != here and (path / "run.json").is_file():
                yield RunFolder(path)


class RunRow(NamedTuple):
    """One run."""

    folder: RunFolder
    run: RunState | None
    """None if the run cannot be read."""
    error: str | None = None
    """Why it cannot be read, in one line."""
    peak_bytes: int | None = None
    """The highest of all attempts, of the first process."""
    host_peak: HostMemory = HostMemory()
    """The highest host memory of its processes together."""
    energy_joules: float | None = None
    """Of all attempts whose energy is known."""
    elsewhere: bool = False
    """It is in another runs folder than the one that is listed."""
    place: float | None = None
    """Of a run that waits in the queue: the smallest is the next."""
    gpus: frozenset[str] | None = None
    """Of a run that waits in the queue: the GPUs that it names; None if it may use any."""
    turn: int | None = None
    """Of a run that waits in the queue: 1 is the next of its folder on its GPUs."""
    stamp: tuple[int, ...] = ()
    """What `stamp_of` was when it was read."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def program(self) -> str | None:
        """The recipe, or the user's script."""
        if self.run is None:
            return None
        if self.run.settings is not None:
            return self.run.settings.recipe
        return name_of(self.run.command) if self.run.command else None


def stamp_of(folder: RunFolder) -> tuple[int, ...]:
    """A value that changes when the run begins another attempt, or its state is written."""
    found = []
    for path in (folder.state_path, folder.path / "attempts"):
        with contextlib.suppress(OSError):  # `row_of` names what cannot be read
            found.append(path.stat().st_mtime_ns)
    return tuple(found)


def row_of(folder: RunFolder) -> RunRow:
    """What a list shows of a run, or why it cannot be read. Of a run whose ledger is damaged, it
    shows what `state.json` says."""
    stamp = stamp_of(folder)
    return _read(folder)._replace(stamp=stamp)


def _read(folder: RunFolder) -> RunRow:
    run = place = gpus = None
    try:
        spec = folder.spec()
        run = view.read_state(folder)
        if run.state is Phase.QUEUED and spec.queue:
            # It loads what starts supervisors.
            from memtop.supervisor.run.queue import names_of, place_of

            place, gpus = place_of(folder, spec), names_of(spec)
        with reading_ledger(folder) as ledger:
            if ledger is None:
                return RunRow(folder, run, place=place, gpus=gpus)
            attempts = ledger.attempts()
            peaks = [attempt.peak_bytes for attempt in attempts] + [ledger.highest_peak(run.attempt)]
            host_peak = ledger.host_peak()
    except MemtopError as error:
        return RunRow(folder, run, " ".join(str(error).split()))
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        return RunRow(folder, run, f"{folder.ledger_path}: cannot be read: {error}")
    except OSError as error:
        return RunRow(folder, run, why_unreadable(Path(error.filename or folder.path), error))
    joules = [attempt.energy_joules for attempt in attempts if attempt.energy_joules is not None]
    highest = max((peak for peak in peaks if peak is not None), default=None)
    energy = sum(joules) if joules else None
    return RunRow(folder, run, peak_bytes=highest, host_peak=host_peak, energy_joules=energy, place=place, gpus=gpus)


def with_turns(rows: Iterable[RunRow]) -> list[RunRow]:
    """The rows, with the turn of each run that waits in the queue of its folder."""
    found, waiting, turns = list(rows), dict[Path, list[RunRow]](), dict[Path, int]()
    for row in sorted((row for row in found if row.place is not None), key=lambda row: (row.place, row.name)):
        before = waiting.setdefault(row.folder.path.parent, [])
        turns[row.folder.path] = 1 + sum(_waits_for(row.gpus, one.gpus) for one in before)
        before.append(row)
    return [row._replace(turn=turns.get(row.folder.path)) for row in found]


def _waits_for(mine: frozenset[str] | None, theirs: frozenset[str] | None) -> bool:
    """Whether a run that names these GPUs waits for one that does, as far as the names show it: a
    number and a uuid may be one GPU."""
    if not mine or theirs is None:
        return True
    numbers = {name.isdecimal() for name in mine | theirs}
    return bool(mine & theirs) or (bool(theirs) and len(numbers) > 1)


# --- the table ------------------------------------------------------------------------------------


class RunColumn(NamedTuple):
    """A column of the list."""

    id: str
    text: Callable[[RunRow, float], str]
    """From the row and the present time, seconds since the epoch."""
    key: Callable[[RunRow], Any]
    """What is sorted by; None is unknown."""
    right: bool = True
    rank: int = 0
    """Without room the columns with the highest numbers are left out."""
    most: int = 1000
    """Cells; what is longer is shortened."""

    @property
    def title(self) -> str:
        """In the reader's language."""
        return tr(self.id)


def _of_run(name: str) -> Callable[[RunRow], Any]:
    return lambda row: None if row.run is None else getattr(row.run, name)


def _state(row: RunRow) -> str:
    if row.run is None:
        return "unreadable"
    return row.run.word if row.turn is None else f"{row.run.word} {row.turn}"


def _created(row: RunRow) -> float | None:
    """None if it is not known, as for a run whose record is damaged."""
    return None if row.run is None or row.run.created <= 0 else row.run.created


def _elsewhere(row: RunRow, now: float) -> str:
    """The folder of a run of another runs folder."""
    if not row.elsewhere:
        return ""
    path, home = row.folder.path.parent, Path.home()
    return clean(f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path))


def _age(row: RunRow, now: float) -> str:
    """`12 s`, `4 min`, `3 h`, `10 days`."""
    created = _created(row)
    if created is None:
        return units.UNKNOWN
    seconds = max(0.0, now - created)
    for limit, each, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return tr(f"{seconds / each:.0f} {unit}")
    return tr(f"{seconds / 86_400:.0f} days")


def _progress(row: RunRow, now: float) -> str:
    if row.run is None or row.run.updates is None:
        return units.UNKNOWN
    total = "" if row.run.total_updates is None else f"/{row.run.total_updates}"
    return f"{row.run.updates}{total}"


def _loss(row: RunRow, now: float) -> str:
    return units.UNKNOWN if row.run is None or row.run.loss is None else f"{row.run.loss:.4f}"


def _peak(row: RunRow, now: float) -> str:
    """Of device memory; without one, as on the CPU, of host memory: `1.2 GiB RAM`."""
    if row.peak_bytes is None and row.host_peak.size is not None:
        return tr(row.host_peak.words)
    return units.size(row.peak_bytes)


ELSEWHERE = RunColumn("other folder", _elsewhere, lambda row: _elsewhere(row, 0.0) or None, right=False, rank=1, most=24)
"""Only where there is such a run."""
NAME = RunColumn("name", lambda row, now: clean(row.name), lambda row: row.name.casefold(), right=False)
COLUMNS = (
    NAME,
    RunColumn("state", lambda row, now: tr(_state(row)), _state, right=False),
    RunColumn("program", lambda row, now: clean(row.program or units.UNKNOWN), lambda row: row.program, right=False, rank=5),
    RunColumn("age", _age, _created, rank=2),
    RunColumn("update", _progress, _of_run("updates")),
    RunColumn("loss", _loss, _of_run("loss"), rank=1),
    RunColumn("peak", _peak, lambda row: row.peak_bytes or row.host_peak.size, rank=4),
    RunColumn(
        "samples/s",
        lambda row, now: units.rate(None if row.run is None else row.run.samples_per_second),
        _of_run("samples_per_second"),
        rank=3,
    ),
    RunColumn("energy", lambda row, now: units.energy(row.energy_joules), lambda row: row.energy_joules, rank=6),
    ELSEWHERE,
)
_SHORTEST_NAME = 12


class Placed(NamedTuple):
    """A column and its width in cells."""

    column: RunColumn
    width: int

    def cell(self, row: RunRow, now: float) -> str:
        """The text, shortened and padded to the width."""
        return self.aligned(shortened(self.column.text(row, now), self.width))

    def aligned(self, text: str) -> str:
        """The text, padded to the width."""
        padding = " " * (self.width - cell_len(text))
        return padding + text if self.column.right else text + padding


def placed(rows: Sequence[RunRow], now: float, width: int | None) -> list[Placed]:
    """The columns that fit, and their widths. Names are shortened before a column is left out;
    states are never shortened."""
    found = [
        Placed(one, min(one.most, max(map(cell_len, (one.title, *(one.text(row, now) for row in rows))))))
        for one in COLUMNS
        if one is not ELSEWHERE or any(row.elsewhere for row in rows)
    ]
    while width is not None and (excess := sum(one.width + _BETWEEN for one in found) - _BETWEEN - width) > 0:
        name = found[0]
        if name.width > _SHORTEST_NAME:
            found[0] = Placed(NAME, max(_SHORTEST_NAME, name.width - excess))
            continue
        last = max(found, key=lambda one: one.column.rank)
        if not last.column.rank:
            break
        found.remove(last)
        # What the column leaves free is the name's again.
        found[0] = Placed(NAME, max(map(cell_len, (NAME.title, *(NAME.text(row, now) for row in rows)))))
    return found


def table(rows: Sequence[RunRow], now: float, width: int | None = None) -> Iterator[str]:
    """The heading and a line for each run."""
    columns = placed(rows, now, width)
    heads = [one.aligned(one.column.title) for one in columns]
    yield (" " * _BETWEEN).join(heads).rstrip()
    for row in rows:
        if row.run is None:
            yield f"{columns[0].cell(row, now)}  {tr(f'unreadable: {row.error}')}"
        else:
            yield (" " * _BETWEEN).join(one.cell(row, now) for one in columns).rstrip()
