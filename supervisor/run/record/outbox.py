"""What waits to be written to the ledger: for example, while the disk is full."""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from memtop.supervisor.run.record.configurations import ConfigurationRecord
from memtop.supervisor.run.record.ledger import Ledger, mark_damage, why_not_written
from memtop.supervisor.run.reports import Report
from memtop.supervisor.wire import Event

# If more events wait, the oldest are dropped.
_EVENTS_KEPT = 1000
_RETRY_SECONDS = 5.0


class Outbox:
    """`problem`: why the last write to the ledger failed; None if it succeeded."""

    def __init__(self, ledger: Ledger, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.ledger = ledger
        self.problem: str | None = None
        self.damaged = False
        """Nothing is stored any more: the next supervisor reads the journals again."""
        self._monotonic = monotonic
        self._retry_at = float("-inf")
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self._attempts: dict[int, dict[str, Any]] = {}
        self._records: dict[int, ConfigurationRecord] = {}
        # Viewers identify events by number: it is negative until the ledger has assigned one.
        self._unnumbered = itertools.count(-1, -1)

    def add_event(self, event: Event) -> Event:
        """The event with its number."""
        if not self._events:
            numbered: list[Event] = []
            if self.write(lambda: numbered.append(self.ledger.add_event(event))):
                return numbered[0]
        kept = replace(event, id=next(self._unnumbered))
        self._events.append(kept)
        return kept

    def update_attempt(self, number: int, values: dict[str, Any]) -> None:
        self._attempts[number] = {**self._attempts.get(number, {}), **values}
        self._write_attempt(number)

    def close_unstarted(self, number: int, why: str, now: float) -> None:
        """Close an attempt whose program was never started. It rolled back no updates."""
        diagnosis = {"summary": why, "evidence": []}
        ended = {"ended": now, "outcome": "failed", "start_updates": None, "diagnosis": diagnosis, "launched": False}
        self.update_attempt(number, ended)

    def save_configurations(self, records: tuple[ConfigurationRecord, ...]) -> None:
        for record in records:
            self._records[record.configuration.number] = record
        self._write_records()

    def add_reports(self, attempt: int, rank: int, reports: list[Report], offset: int) -> bool:
        """Store the reports together with the offset of the journal.

        False if they could not be stored.
        """
        return self.write(lambda: self.ledger.add_reports(attempt, rank, reports, offset))

    @property
    def due(self) -> bool:
        """Whether it makes sense to write again: some seconds after a write failed."""
        return not self.damaged and self._monotonic() >= self._retry_at

    @property
    def waits(self) -> bool:
        """True if something waits, and the ledger is not damaged."""
        return not self.damaged and bool(self._attempts or self._records or self._events)

    def forget_journal(self, attempt: int, rank: int, until: int) -> bool:
        return self.write(lambda: self.ledger.forget_journal(attempt, rank, until))

    def retry(self) -> None:
        """Write everything that could not be written before."""
        for number in list(self._attempts):
            if not self._write_attempt(number):
                return
        if not self._write_records():
            return
        while self._events:
            event = self._events[0]
            if not self.write(lambda: self.ledger.add_event(event)):  # noqa: B023 - called at once
                return
            self._events.popleft()

    def write(self, write: Callable[[], object]) -> bool:
        """Whether the ledger could be written."""
        try:
            write()
        except sqlite3.OperationalError as error:
            self.problem = why_not_written(self.ledger.path, error)
            self._retry_at = self._monotonic() + _RETRY_SECONDS
            return False
        except sqlite3.DatabaseError as error:
            # Reports stay in the journals, and decisions in state.json.
            self.problem = f"{self.ledger.path}: damaged: {error}; the next supervisor rebuilds it"
            self.damaged = True
            mark_damage(self.ledger.path)
            return False
        if not self.damaged:
            self.problem = None
        return True

    def _write_attempt(self, number: int) -> bool:
        values = self._attempts[number]
        if not self.write(lambda: self.ledger.update_attempt(number, **values)):
            return False
        del self._attempts[number]
        return True

    def _write_records(self) -> bool:
        for number, record in list(self._records.items()):
            if not self.write(lambda: self.ledger.save_configuration(record)):  # noqa: B023 - called at once
                return False
            del self._records[number]
        return True
