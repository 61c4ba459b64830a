"""The configurations of a run: stretches under the same settings, what each needed and how it went.

The present one is kept in memory and written down now and then; the ledger has them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.run.reports import Step
from memtop.supervisor.wire import Configuration

if TYPE_CHECKING:
    from memtop.supervisor.run.record.ledger import Attempt

SCHEMA = "CREATE TABLE IF NOT EXISTS configurations (number INTEGER PRIMARY KEY, record TEXT NOT NULL);"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that began with a configuration, or came to it while it ran."""

    attempt: int
    by_memtop: bool = False
    """It was started without a person asking for it."""
    saved_before: int | None = None
    """The newest saved update when the attempt began, ..."""
    saved_after: int | None = None
    """... and when it ended, or went on with other settings; None: nothing saved."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration as the ledger keeps it: what is shown, and what deciding and going on need beside."""

    configuration: Configuration
    allocator: str = ""
    """Allocator options that memtop gave to a program of the user's own, which has no settings."""
    starts: tuple[Start, ...] = ()
    """Oldest first; one at least, but in ledgers of older versions."""
    said: tuple[int, float] | None = None
    """The attempt and the time of the report with which the running program changed to it; None where an attempt began it."""
    died_of_memory: bool = False
    """It ended (or went on smaller) for lack of memory, and that is sure: it is not to be tried again by itself."""
    samples: int = 0
    seconds: float = 0.0
    """What its speed is made of: samples and the time of their updates."""

    @property
    def newest_attempt(self) -> int:
        return self.starts[-1].attempt if self.starts else self.configuration.attempt


def same(one: Settings | None, other: Settings | None) -> bool:
    """Whether two settings are one configuration: how long the run is to last does not make another."""
    if one is None or other is None:
        return one is other
    return replace(one, target_samples=0, epochs=0.0) == replace(other, target_samples=0, epochs=0.0)


def before_the_present(rows: Sequence[Configuration]) -> Configuration | None:
    """The newest configuration before the present one that is another."""
    if not rows:
        return None
    present = rows[-1].settings
    return next((row for row in reversed(rows[:-1]) if not same(row.settings, present)), None)


class Configurations:
    """All of a run, the last one being the present. `save` writes one down (False: not now, it is tried again); `tell` is
    called when one begins or ends."""

    def __init__(self, records: Iterable[Record], save: Callable[[Record], bool], tell: Callable[[], None]) -> None:
        self.records = list(records)
        self._save = save
        self._tell = tell
        # What came from the attempts of an older ledger is not in its table yet.
        self._unsaved = {record.configuration.number for record in self.records}
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
        """An attempt starts, or has at `started` (seconds since the epoch). The same settings as before go on where they did
        not run out of memory."""
        self._seen = None
        start = Start(attempt=attempt, by_memtop=by_memtop, saved_before=saved)
        last = self.present
        if last is not None and not last.died_of_memory and last.allocator == allocator:
            shown = last.configuration
            if same(shown.settings, settings):
                # The run's length may be another now; the first attempt's reason stays.
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
        """Whether an attempt has been told of; its supervisor may have died before it could."""
        return self.present is not None and self.present.newest_attempt >= attempt

    def change(
        self, update: int, reason: str, settings: Settings, *, died: str | None, saved: int | None, said: tuple[int, float]
    ) -> None:
        """The running program goes on with other settings from this update on; `died`: of what the ones before ran out;
        `said`: in which attempt it has told so, and when. A report that is known already changes nothing."""
        last = self.present
        assert last is not None, "settings change within an attempt"
        if any(record.said == said for record in self.records):
            return
        self.end(died or "replaced", update - 1, saved, died_of_memory=died is not None)
        attempt, time_told = said
        shown = Configuration(
            number=self._next_number,
            attempt=attempt,
            since_update=update,
            started=time_told,
            reason=reason,
            settings=settings,
        )
        # It is the same start of the program, whoever has caused that.
        starts = last.starts[-1:] or (Start(attempt=attempt),)
        self._begin(Record(configuration=shown, allocator=last.allocator, starts=starts, said=said))

    @property
    def _next_number(self) -> int:
        return self.records[-1].configuration.number + 1 if self.records else 1

    def _begin(self, record: Record) -> None:
        self.records.append(record)
        self._unsaved.add(record.configuration.number)
        self.keep()
        self._tell()

    def resumed(self, update: int) -> None:
        """The program has said after which update it goes on."""
        if self.present is not None and self.present.configuration.since_update is None:
            self._replace(configuration=replace(self.present.configuration, since_update=update + 1))

    def end(self, outcome: str, update: int | None, saved: int | None, *, died_of_memory: bool = False) -> None:
        """The present one is over after this update."""
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
        """A rank has done an update. `base_bytes`: what its GPU holds of the run beside the allocator, None if not known;
        `key`: everything but the split that shapes the peak."""
        taken = report.peak_reserved_bytes or report.peak_bytes
        if taken is not None:
            self._on_gpu = True
            self._note_peak(taken + (base_bytes or 0), key)
        if rank != 0 or self.present is None:
            return
        seen, seconds = report.samples_seen, report.step_seconds
        # The first update of an attempt warms up; its time is not that of the others.
        if self._seen is not None and seen is not None and seconds:
            samples, time_taken = self.present.samples + seen - self._seen, self.present.seconds + seconds
            shown = replace(self.present.configuration, samples_per_second=samples / time_taken)
            self._put(replace(self.present, configuration=shown, samples=samples, seconds=time_taken))
        self._seen = seen
        peak = self.present.configuration.peak
        if peak is not None:
            self._put_peak(replace(peak, updates=peak.updates + 1))

    def note_host(self, resident_bytes: int | None, key: str) -> None:
        """What the run's processes hold of host memory: the peak of a run without a GPU."""
        if resident_bytes is not None and not self._on_gpu:
            self._note_peak(resident_bytes, key)

    def _note_peak(self, taken: int, key: str) -> None:
        if self.present is None or self.present.configuration.outcome is not None:
            return
        shown = self.present.configuration
        if shown.settings is None:
            return  # whose batch is not known
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
        self._tell()

    def keep(self) -> None:
        """Write down what the ledger does not have yet."""
        for record in self.records:
            if record.configuration.number in self._unsaved and self._save(record):
                self._unsaved.discard(record.configuration.number)


def _saved(starts: tuple[Start, ...], saved: int | None) -> tuple[Start, ...]:
    """The newest of them has ended, with so many updates saved."""
    return (*starts[:-1], replace(starts[-1], saved_after=saved)) if starts else ()


def of_attempts(attempts: Iterable[Attempt]) -> list[Record]:
    """The configurations of a run whose ledger was written before there were any, as far as its attempts tell them."""
    records: list[Record] = []
    for attempt in attempts:
        if records and same(records[-1].configuration.settings, attempt.settings):
            continue
        if records:
            shown = replace(records[-1].configuration, outcome="replaced", until_update=attempt.start_updates)
            records[-1] = replace(records[-1], configuration=shown)
        shown = Configuration(
            number=len(records) + 1,
            attempt=attempt.number,
            since_update=None if attempt.start_updates is None else attempt.start_updates + 1,
            started=attempt.started,
            reason=attempt.reason,
            settings=attempt.settings,
        )
        records.append(Record(configuration=shown))
    return records
