"""Takes in the reports that the agents append to `attempts/NNNN/rank-R.jsonl`.

Reports are stored in a file instead of being sent over the socket. So the next supervisor finds the
reports of a time without a supervisor, and no report is lost while the ledger cannot be written.
A report is stored in the ledger first, then the rules act on it. If the ledger cannot be written,
they act at once and the report is stored later: a full disk must not hide what a program reports.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path

from memtop.supervisor import holes
from memtop.supervisor.run.record.folder import open_to_read
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.reports import Hello, Report, Step, Unknown, decode

_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.jsonl")
_CHUNK_BYTES = 4 << 20
KEPT_BYTES = 8 << 20
"""The end of a journal that stays on the disk, at least."""


class JournalReader:
    """One rank's journal, read from a byte offset."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.rank = int(path.stem.removeprefix("rank-"))
        self.offset = offset
        """Bytes read and processed so far. Always at the start of a line."""
        self.stored = offset
        """Bytes stored in the ledger so far. Less than `offset` while the ledger cannot be
        written."""
        self.forgotten = 0
        """Bytes at the beginning whose space was given back to the disk."""
        self.problem: str | None = None
        """Why the file could not be read the last time; None if it could, or is missing."""
        self.pieces: deque[int] = deque()
        """Ends of the stored pieces that are not forgotten yet."""

    def read_new(self) -> tuple[list[Report], int]:
        """The reports in the complete lines after `offset`, and the offset behind them.

        Does not change `offset`.
        """
        return self.read(self.offset)

    def read(self, start: int, until: int | None = None) -> tuple[list[Report], int]:
        """The reports in the complete lines between `start` and `until`, and the offset behind
        them. Reads at most 4 MiB, and at most up to the hello of a process that was started again:
        it decides what the reports behind it count for.

        Lines that are not valid JSON are skipped; a full disk can cut a line. What is longer than
        4 MiB is no report: it is skipped, too, and what is left of its line is not valid JSON.
        """
        try:
            with open_to_read(self.path) as file:
                file.seek(start)
                block = file.read(_CHUNK_BYTES)
                if block.startswith(b"\0"):
                    # Forgotten, but the ledger that knew was lost: reports begin after the hole.
                    start = file.seek(holes.data_after(file.fileno(), start))
                    block = file.read(_CHUNK_BYTES)
                    start += len(block) - len(block.lstrip(b"\0"))
                    block = block.lstrip(b"\0")
        except FileNotFoundError:
            self.problem = None
            return [], start
        except OSError as error:
            # It is read when it can be.
            self.problem = f"{self.path}: cannot be read: {error.strerror}; what this rank reports is not seen"
            return [], start
        self.problem = None
        if until is not None:
            block = block[: max(0, until - start)]
        end = block.rfind(b"\n") + 1
        if not end and len(block) == _CHUNK_BYTES:
            return [Unknown(kind="unknown", problem=f"longer than {_CHUNK_BYTES} bytes")], start + len(block)
        reports: list[Report] = []
        for line in block[:end].splitlines(keepends=True):
            start += len(line)
            report = decode(line)
            if report is not None:
                reports.append(report)
            if isinstance(report, Hello) and report.restarts:
                break
        return reports, start


def find_journals(attempt_folder: Path) -> list[Path]:
    """The journals of an attempt, in order of rank.

    A program may create any file. Each rank has one name, and is a number that SQLite can store.
    """
    found = (_NAME.fullmatch(path.name) for path in attempt_folder.glob("rank-*.jsonl"))
    return [attempt_folder / name[0] for name in sorted(filter(None, found), key=lambda name: int(name[1]))]


Act = Callable[[int, Report], None]


class Intake:
    """The journals of one attempt."""

    def __init__(self, folder: Path, number: int, outbox: Outbox, on_steps: Callable[[int, list[Step]], None]) -> None:
        """`folder`: the attempt's; `on_steps` receives rank 0's updates, for the viewers."""
        self.number = number
        self._folder = folder
        self._outbox = outbox
        self._on_steps = on_steps
        self._journals: dict[Path, JournalReader] = {}
        self.counts = True
        """Whether rank 0's updates go into the history. Not if the program's output has a better
        counter."""

    def read(self, act: Act, *, to_the_end: bool = False) -> None:
        """Take in what is new of each rank, a piece of it or all."""
        for journal in self._known():
            while self._read_on(journal, act) and to_the_end:
                pass
        if to_the_end:
            self.store()

    def replay(self, act: Act) -> None:
        """Repeat what an earlier supervisor had read: the ledger has it already, and what was not
        kept of it is without effect by now."""
        for journal in self._known():
            for report in self._outbox.ledger.kept_reports(self.number, journal.rank, journal.forgotten):
                act(journal.rank, report)
            at = journal.forgotten
            while at < journal.stored:
                reports, end = journal.read(at, journal.stored)
                if end == at:
                    break
                for report in reports:
                    act(journal.rank, report)
                at = end

    @property
    def problem(self) -> str | None:
        """Why the first journal that cannot be read cannot be read."""
        return next((journal.problem for journal in self._journals.values() if journal.problem is not None), None)

    @property
    def waits(self) -> bool:
        """Whether the ledger lacks something that was read, and is not damaged."""
        behind = any(journal.stored < journal.offset for journal in self._journals.values())
        return behind and not self._outbox.damaged

    def store(self) -> None:
        """Give the ledger what it could not take when it was read, if it can be written."""
        if self._outbox.damaged:
            return
        for journal in self._journals.values():
            self._store_rest(journal)

    def _known(self) -> list[JournalReader]:
        for path in find_journals(self._folder):
            if path not in self._journals:
                journal = self._journals[path] = JournalReader(path)
                stored, journal.forgotten = self._outbox.ledger.journal_offsets(self.number, journal.rank)
                journal.offset = journal.stored = stored
        return list(self._journals.values())

    def _read_on(self, journal: JournalReader, act: Act) -> bool:
        """The next piece. False if there was none."""
        if self._outbox.due:
            self._store_rest(journal)
        reports, end = journal.read_new()
        if end == journal.offset:
            return False
        if journal.stored == journal.offset and self._outbox.due:
            self._store(journal, reports, end)
        journal.offset = end
        for report in reports:
            act(journal.rank, report)
        if journal.rank == 0 and self.counts:
            self._on_steps(self.number, _steps(reports))
        return True

    def _store_rest(self, journal: JournalReader) -> None:
        while journal.stored < journal.offset:
            reports, end = journal.read(journal.stored, journal.offset)
            if end == journal.stored or not self._store(journal, reports, end):
                return

    def _store(self, journal: JournalReader, reports: list[Report], end: int) -> bool:
        kept = [report for report in reports if self.counts or not isinstance(report, Step)]
        if not self._outbox.add_reports(self.number, journal.rank, kept, end):
            return False
        journal.stored = end
        journal.pieces.append(end)
        if end - journal.forgotten > 2 * KEPT_BYTES:
            self._forget(journal)
        return True

    def _forget(self, journal: JournalReader) -> None:
        """Give the space of old reports back to the disk.

        The ledger has what a next supervisor needs of them.
        """
        until = journal.forgotten
        while journal.pieces and journal.pieces[0] <= journal.stored - KEPT_BYTES:
            until = journal.pieces.popleft()
        if until > journal.forgotten and self._outbox.forget_journal(self.number, journal.rank, until):
            journal.forgotten = until
            with contextlib.suppress(OSError):
                # It may have been removed, and some file systems keep the space.
                holes.remove(journal.path, 0, until)


def _steps(reports: list[Report]) -> list[Step]:
    return [report for report in reports if isinstance(report, Step)]
