"""The configurations of a run: periods with the same settings, the memory that each needed, and how
each ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.run.reports import Step
from memtop.supervisor.wire import Configuration


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that started with a configuration, or changed to it while it ran."""

    attempt: int
    by_memtop: bool = False
    """memtop started it, not a person."""
    saved_before: int | None = None
    """The newest saved update when the attempt started."""
    saved_after: int | None = None
    """The newest saved update when it ended or continued with other settings. None if nothing was
    saved."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration in the ledger, with what the supervisor needs in addition to what is
    displayed."""

    configuration: Configuration
    allocator: str = ""
    """Allocator options that memtop set for an external command, which has no settings."""
    starts: tuple[Start, ...]
    """Oldest first, at least one."""
    changed_by: tuple[int, float] | None = None
    """Attempt and time of the report with which the running program changed to it. None if an
    attempt started with it."""
    died_of_memory: bool = False
    """It certainly ended (or continued with a smaller batch) for lack of memory: memtop does not
    try it again on its own."""
    samples: int = 0
    seconds: float = 0.0
    """Samples and the duration of their updates: its speed is their quotient."""

    @property
    def newest_attempt(self) -> int:
        return self.starts[-1].attempt


def same(one: Settings | None, other: Settings | None) -> bool:
    """Whether two settings are the same configuration. The length of the run does not count."""
    if one is None or other is None:
        return one is other
    return replace(one, target_samples=0, epochs=0.0) == replace(other, target_samples=0, epochs=0.0)


def before_the_present(rows: Sequence[Configuration]) -> Configuration | None:
    """The newest earlier configuration with other settings than the present one."""
    if not rows:
        return None
    present = rows[-1].settings
    return next((row for row in reversed(rows[:-1]) if not same(row.settings, present)), None)


class Configurations:
    """All configurations of a run. The last one is the present one.

    `save` writes one to the ledger; if it returns False, it is called again later. `notify` is
    called when one begins or ends.
    """

    def __init__(self, records: Iterable[Record], save: Callable[[Record], bool], notify: Callable[[], None]) -> None:
        self.records = list(records)
        self._save = save
        self._notify = notify
        self._unsaved: set[int] = set()
        self._seen: int | None = None
        self._on_gpu = False

    @property
    def present(self) -> Record | None:
        """None before the first attempt."""
        return self.records[-1] if self.records else None

    @property
    def rows(self) -> tuple[Configuration, ...]:
        return tuple(record.configuration for record in self.records)

    def numbered(self, number: int) -> Configuration | None:
        return next((row for row in self.rows if row.number == number), None)

    def begin_attempt(
        self,
        attempt: int,
        reason: str,
        settings: Settings | None,
        *,
        allocator: str = "",
        by_memtop: bool = False,
        saved: int | None = None,
        started: float | None = None,
    ) -> None:
        """An attempt starts now, or did so at `started` (seconds since the epoch).

        With the same settings as before, the present configuration continues, unless it ran out of
        memory.
        """
        self._seen = None
        start = Start(attempt=attempt, by_memtop=by_memtop, saved_before=saved)
        last = self.present
        if last is not None and not last.died_of_memory and last.allocator == allocator:
            shown = last.configuration
            if same(shown.settings, settings):
                # The length of the run may have changed. The reason of the first attempt stays.
                going_on = replace(shown, settings=settings, until_update=None, outcome=None)
                self._replace(configuration=going_on, starts=(*last.starts, start))
                return
        if last is not None and last.configuration.outcome is None:
            self._replace(configuration=replace(last.configuration, outcome="replaced"), starts=_saved(last.starts, saved))
        shown = Configuration(
            number=self._next_number, attempt=attempt, started=started or time.time(), reason=reason, settings=settings
        )
        self._begin(Record(configuration=shown, allocator=allocator, starts=(start,)))

    def has_begun(self, attempt: int) -> bool:
        """Whether the attempt is recorded. A supervisor may die before it records an attempt."""
        return self.present is not None and self.present.newest_attempt >= attempt

    def change(
        self,
        update: int,
        reason: str,
        settings: Settings,
        *,
        died: str | None,
        saved: int | None,
        changed_by: tuple[int, float],
    ) -> None:
        """The running program continues with other settings from this update on.

        `died`: the kind of memory that the earlier settings ran out of. `changed_by`: attempt and
        time of the report. A report that is already known changes nothing.
        """
        last = self.present
        assert last is not None, "settings change within an attempt"
        if any(record.changed_by == changed_by for record in self.records):
            return
        self.end(died or "replaced", update - 1, saved, died_of_memory=died is not None)
        attempt, reported = changed_by
        shown = Configuration(
            number=self._next_number,
            attempt=attempt,
            since_update=update,
            started=reported,
            reason=reason,
            settings=settings,
        )
        self._begin(Record(configuration=shown, allocator=last.allocator, starts=last.starts[-1:], changed_by=changed_by))

    @property
    def _next_number(self) -> int:
        return self.records[-1].configuration.number + 1 if self.records else 1

    def _begin(self, record: Record) -> None:
        self.records.append(record)
        self._unsaved.add(record.configuration.number)
        self.keep()
        self._notify()

    def resumed(self, update: int) -> None:
        """The program has reported the update after which it resumes."""
        if self.present is not None and self.present.configuration.since_update is None:
            self._replace(configuration=replace(self.present.configuration, since_update=update + 1))

    def end(self, outcome: str, update: int | None, saved: int | None, *, died_of_memory: bool = False) -> None:
        """The present configuration ends after this update."""
        if self.present is None:
            return
        shown = self.present.configuration
        peak = replace(shown.peak, failed=True) if died_of_memory and shown.peak is not None else shown.peak
        self._replace(
            configuration=replace(shown, until_update=update, outcome=outcome, peak=peak),
            died_of_memory=died_of_memory,
            starts=_saved(self.present.starts, saved),
        )

    def note_step(self, rank: int, report: Step, base_bytes: int | None, key: str) -> None:
        """A rank has finished an update.

        `base_bytes`: GPU memory of the run outside the allocator, None if unknown. `key`: all
        settings that affect the peak, except the batch split.
        """
        taken = report.peak_reserved_bytes or report.peak_bytes
        if taken is not None:
            self._on_gpu = True
            self._note_peak(taken + (base_bytes or 0), key)
        if rank != 0 or self.present is None:
            return
        seen, seconds = report.samples_seen, report.step_seconds
        # The first update of an attempt is a warm-up and not representative.
        if self._seen is not None and seen is not None and seconds:
            samples, time_taken = self.present.samples + seen - self._seen, self.present.seconds + seconds
            shown = replace(self.present.configuration, samples_per_second=samples / time_taken)
            self._put(replace(self.present, configuration=shown, samples=samples, seconds=time_taken))
        self._seen = seen
        peak = self.present.configuration.peak
        if peak is not None:
            self._put_peak(replace(peak, updates=peak.updates + 1))

    def note_host(self, resident_bytes: int | None, key: str) -> None:
        """Host memory of the run's processes, which is the peak of a run without a GPU."""
        if resident_bytes is not None and not self._on_gpu:
            self._note_peak(resident_bytes, key)

    def _note_peak(self, taken: int, key: str) -> None:
        if self.present is None or self.present.configuration.outcome is not None:
            return
        shown = self.present.configuration
        if shown.settings is None:
            return  # the batch is unknown
        known = shown.peak
        if known is None:
            self._put_peak(Peak(batch=shown.settings.batch, bytes=taken, updates=0, settings_key=key))
        elif taken > known.bytes:
            self._put_peak(replace(known, bytes=taken))

    def _put_peak(self, peak: Peak) -> None:
        assert self.present is not None
        self._put(replace(self.present, configuration=replace(self.present.configuration, peak=peak)))

    def _put(self, record: Record) -> None:
        self.records[-1] = record
        self._unsaved.add(record.configuration.number)

    def _replace(self, **values: Any) -> None:
        assert self.present is not None
        self._put(replace(self.present, **values))
        self.keep()
        self._notify()

    def keep(self) -> None:
        """Save the configurations that have changed since they were saved."""
        for record in self.records:
            if record.configuration.number in self._unsaved and self._save(record):
                self._unsaved.discard(record.configuration.number)


def _saved(starts: tuple[Start, ...], saved: int | None) -> tuple[Start, ...]:
    """The starts, with the newest saved update of the last one, which has ended."""
    return (*starts[:-1], replace(starts[-1], saved_after=saved))
