"""Takes in what the ranks of one attempt report: from their journals into the ledger, and to the
rules.

A report is stored first. If the ledger cannot be written, it is acted upon all the same, and stored
later: a full disk must not hide what the program reports.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memtop.supervisor.run.record.journal import Journal, find_journals
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.reports import Report, Step

Act = Callable[[int, Report], None]


class Intake:
    """The journals of one attempt."""

    def __init__(self, folder: Path, number: int, outbox: Outbox, on_steps: Callable[[int, list[Step]], None]) -> None:
        """`folder`: the attempt's; `on_steps` receives rank 0's updates, for the viewers."""
        self.number = number
        self._folder = folder
        self._outbox = outbox
        self._on_steps = on_steps
        self._journals: dict[Path, Journal] = {}

    def read(self, act: Act, *, to_the_end: bool = False) -> None:
        """Take in what is new of each rank, a piece of it or all."""
        for journal in self._known():
            while self._read_on(journal, act) and to_the_end:
                pass

    def replay(self, act: Act) -> None:
        """Repeat what an earlier supervisor had read: the ledger has it already."""
        for journal in self._known():
            at = 0
            while at < journal.stored:
                reports, end = journal.read(at, journal.stored)
                if end == at:
                    break
                for report in reports:
                    act(journal.rank, report)
                at = end

    def store(self) -> None:
        """Give the ledger what it could not take when it was read."""
        for journal in self._journals.values():
            self._store_rest(journal)

    def _known(self) -> list[Journal]:
        for path in find_journals(self._folder):
            if path not in self._journals:
                journal = self._journals[path] = Journal(path)
                journal.offset = journal.stored = self._outbox.ledger.journal_offset(self.number, journal.rank)
        return list(self._journals.values())

    def _read_on(self, journal: Journal, act: Act) -> bool:
        """The next piece. False if there was none."""
        self._store_rest(journal)
        reports, end = journal.read_new()
        if end == journal.offset:
            return False
        if journal.stored == journal.offset:
            self._store(journal, reports, end)
        journal.offset = end
        for report in reports:
            act(journal.rank, report)
        if journal.rank == 0:
            self._on_steps(self.number, _steps(reports))
        return True

    def _store_rest(self, journal: Journal) -> None:
        while journal.stored < journal.offset:
            reports, end = journal.read(journal.stored, journal.offset)
            if end == journal.stored or not self._store(journal, reports, end):
                return

    def _store(self, journal: Journal, reports: list[Report], end: int) -> bool:
        steps = _steps(reports) if journal.rank == 0 else []
        if self._outbox.add_reports(self.number, journal.rank, steps, end):
            journal.stored = end
            return True
        return False


def _steps(reports: list[Report]) -> list[Step]:
    return [report for report in reports if isinstance(report, Step)]
