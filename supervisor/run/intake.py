"""What the ranks report: into the ledger, into what is known of the run, and to whoever looks on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memtop.supervisor import units
from memtop.supervisor.run import explain
from memtop.supervisor.run.record.checkpoints import newest_checkpoint
from memtop.supervisor.run.record.journal import Journal
from memtop.supervisor.run.reports import Evaluated, MemoryRecord, Plan, Report, Saved, SaveFailed, Step, Warned, values
from memtop.supervisor.wire import Phase

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor


def read_reports(supervisor: Supervisor, *, to_the_end: bool = False) -> None:
    """Take in what is new of each rank, a piece of it or all."""
    for journal in _journals(supervisor):
        while _read_on(supervisor, journal) and to_the_end:
            pass


def store_owed(supervisor: Supervisor) -> None:
    """Give the ledger what it could not take when it was read; nothing where it has everything."""
    for journal in _journals(supervisor):
        _store_owed(supervisor, journal)


def _journals(supervisor: Supervisor) -> list[Journal]:
    assert supervisor.attempt is not None
    number = supervisor.attempt.number
    return supervisor.attempt.journals(lambda rank: supervisor.ledger.journal_offset(number, rank))


def _read_on(supervisor: Supervisor, journal: Journal) -> bool:
    """The next piece, stored first and acted upon even where that fails: a full disk must not hide what the program says.
    Whether there was any."""
    _store_owed(supervisor, journal)
    reports, end = journal.read_new()
    if end == journal.offset:
        return False
    if journal.stored == journal.offset:
        _store(supervisor, journal, reports, end)
    journal.offset = end
    for report in reports:
        _apply(supervisor, journal.rank, report)
    return True


def _store_owed(supervisor: Supervisor, journal: Journal) -> None:
    while journal.stored < journal.offset:
        reports, end = journal.read(journal.stored, journal.offset)
        if end == journal.stored or not _store(supervisor, journal, reports, end):
            return


def _store(supervisor: Supervisor, journal: Journal, reports: Sequence[Report], end: int) -> bool:
    """Put step reports into the ledger; False if it cannot be written now (they stay in the journal for later)."""
    assert supervisor.attempt is not None
    number, rank = supervisor.attempt.number, journal.rank
    steps = [report for report in reports if rank == 0 and isinstance(report, Step)]
    if supervisor.ledgered(lambda: supervisor.ledger.add_reports(number, rank, steps, end)) is None:
        return False
    journal.stored = end
    return True


def _apply(supervisor: Supervisor, rank: int, report: Report) -> None:
    assert supervisor.attempt is not None
    supervisor.progress = supervisor.progress.after(rank, report)
    supervisor.survival.report(rank, report)
    supervisor.prevention.report(rank, report)
    supervisor.publisher.changed()
    if rank != 0:
        return
    match report:
        case Step():
            supervisor.publisher.add_steps(supervisor.attempt.number, [report])
            if supervisor.lifecycle.phase is Phase.STARTING:
                supervisor.move(Phase.TRAINING)
        case Plan(updates=start, resumed=resumed, total_updates=total):
            supervisor.update_attempt(start_updates=start)
            supervisor.publisher.take_back_from(start + 1)
            where = f"resumes at update {start}" if resumed else "starts at update 0"
            supervisor.event("plan", f"attempt {supervisor.attempt.number} {where} of {total}")
        case Saved(updates=updates, size_bytes=size, seconds=seconds):
            supervisor.checkpoint = newest_checkpoint(supervisor.folder.latest_state)
            took = "" if seconds is None else f" in {seconds:.1f} s"
            supervisor.event("checkpoint", f"checkpoint at update {updates}: {units.size(size)}{took}")
        case Warned(message=message) | SaveFailed(message=message):
            supervisor.event("warning", str(message))
        case MemoryRecord():
            supervisor.event("memory", explain.report_text(report), values(report))
        case Evaluated():
            supervisor.event("evaluation", explain.report_text(report), values(report))
