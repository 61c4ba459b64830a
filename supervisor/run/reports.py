"""What the ranks report: into the ledger, into what is known of the run, and to whoever looks on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memtop.supervisor import units
from memtop.supervisor.run import explain
from memtop.supervisor.run.manifest import newest_checkpoint
from memtop.supervisor.wire import Phase

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor


def read_reports(supervisor: Supervisor, *, to_the_end: bool = False) -> None:
    assert supervisor.attempt is not None
    number = supervisor.attempt.number
    for journal in supervisor.attempt.journals(lambda rank: supervisor.ledger.journal_offset(number, rank)):
        while True:
            reports, end = journal.read_new()
            if end == journal.offset or not _store(supervisor, number, journal.rank, reports, end):
                break
            journal.offset = end
            for report in reports:
                _apply(supervisor, journal.rank, report)
            if not to_the_end:
                break


def _store(supervisor: Supervisor, number: int, rank: int, reports: list[dict[str, Any]], end: int) -> bool:
    """Put step reports into the ledger; False if it cannot be written now (they stay in the journal for later)."""
    steps = [r for r in reports if rank == 0 and r.get("type") == "step" and isinstance(r.get("update"), int)]
    stored = supervisor.ledgered(lambda: supervisor.ledger.add_reports(number, rank, steps, end))
    if stored is not None and steps:
        supervisor.publisher.add_steps(number, steps)
    return stored is not None


def _apply(supervisor: Supervisor, rank: int, report: dict[str, Any]) -> None:
    assert supervisor.attempt is not None
    supervisor.progress.apply(rank, report)
    supervisor.survival.report(rank, report)
    supervisor.prevention.report(rank, report)
    supervisor.publisher.changed()
    if rank != 0:
        return
    kind = report.get("type")
    if kind == "plan":
        start = int(report.get("updates") or 0)
        supervisor.update_attempt(start_updates=start)
        supervisor.publisher.take_back_from(start + 1)
        where = f"resumes at update {start}" if report.get("resumed") else "starts at update 0"
        supervisor.event("plan", f"attempt {supervisor.attempt.number} {where} of {report.get('total_updates')}")
    elif kind == "checkpoint":
        supervisor.checkpoint = newest_checkpoint(supervisor.folder.latest_state)
        size = units.size(report.get("size_bytes"))
        supervisor.event("checkpoint", f"checkpoint at update {report.get('updates')}: {size} in {report.get('seconds'):.1f} s")
    elif kind == "step" and supervisor.lifecycle.phase is Phase.STARTING:
        supervisor.move(Phase.TRAINING)
    elif kind in ("warning", "save_failed"):
        supervisor.event("warning", str(report.get("message")))
    elif kind in ("memory", "evaluation"):
        supervisor.event(kind, explain.report_text(report), {k: v for k, v in report.items() if k not in ("type", "message")})
