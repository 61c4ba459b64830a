"""The configurations of a run: periods with the same settings, the memory that each needed, and how
each ended.

The present one changes with every update and is written now and then; the ledger has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.recovery.values import Forecast, Peak
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run_memory import HostMemory
from memtop.supervisor.wire import Configuration


class ConfigurationStart(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that started with a configuration, or changed to it while it ran."""

    attempt: int
    by_memtop: bool = False
    """memtop started it, not a person."""
    saved_before: int | None = None
    """The newest saved update when the attempt started."""
    saved_after: int | None = None
    """The newest saved update when it ended or continued with other settings. None if nothing was
    saved."""


class ConfigurationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration in the ledger, with what the supervisor needs in addition to what is
    displayed."""

    configuration: Configuration
    allocator: str = ""
    """Allocator options that memtop set for an external command, which has no settings."""
    starts: tuple[ConfigurationStart, ...]
    """Oldest first, at least one."""
    changed_by: tuple[int, float] | None = None
    """Attempt and time of the report with which the running program changed to it. None if an
    attempt started with it."""
    died_of_memory: bool = False
    """It certainly ended (or continued with a smaller batch) for lack of memory: memtop does not
    try it again on its own."""
    attempt_peak: Peak | None = None
    """What was measured since the newest attempt began: on the same GPU, with the same torch."""
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


def same_configuration(one: Configuration, other: Configuration) -> bool:
    """The same, also of what memtop gives to the user's own program."""
    return same(one.settings, other.settings) and one.knobs == other.knobs


def before_the_present(rows: Sequence[Configuration]) -> Configuration | None:
    """The newest earlier configuration with other settings than the present one."""
    if not rows:
        return None
    return next((row for row in reversed(rows[:-1]) if not same_configuration(row, rows[-1])), None)


def mean_speed(records: Iterable[ConfigurationRecord]) -> float | None:
    """The samples per second of these configurations together: the mean of their updates, without
    the time between them; None if no speed is known."""
    samples, seconds = 0, 0.0
    for record in records:
        samples, seconds = samples + record.samples, seconds + record.seconds
    return samples / seconds if samples > 0 and seconds > 0 else None


def with_peaks(host: HostMemory, on_cpu: Iterable[ConfigurationRecord]) -> HostMemory:
    """The highest host memory of a run. The peak of a configuration on the CPU may be above every
    sample: it counts what a process reported when memory ran out."""
    peaks = [record.configuration.peak.bytes for record in on_cpu if record.configuration.peak is not None]
    return host if host.size is None else host._replace(size=max([host.size, *peaks]))


class Configurations(msgspec.Struct, frozen=True, kw_only=True):
    """All configurations of a run.

    The last one is the present one. Every method returns the new configurations.
    """

    records: tuple[ConfigurationRecord, ...] = ()
    unsaved: frozenset[int] = frozenset()
    """The numbers of configurations that have changed since they were last written."""
    seen: int | None = None
    """Samples seen at the newest update of this attempt."""
    on_gpu: bool = False
    """A rank has reported device memory."""

    @property
    def present(self) -> ConfigurationRecord | None:
        """None before the first attempt."""
        return self.records[-1] if self.records else None

    @property
    def rows(self) -> tuple[Configuration, ...]:
        return tuple(record.configuration for record in self.records)

    def numbered(self, number: int) -> Configuration | None:
        return next((row for row in self.rows if row.number == number), None)

    def has_begun(self, attempt: int) -> bool:
        """Whether the attempt is recorded. A supervisor may die before it records an attempt."""
        return self.present is not None and self.present.newest_attempt >= attempt

    def begin_attempt(
        self,
        attempt: int,
        reason: str,
        settings: Settings | None,
        started: float,
        *,
        allocator: str = "",
        knobs: dict[str, str] | None = None,
        by_memtop: bool = False,
        saved: int | None = None,
    ) -> Configurations:
        """An attempt starts at `started` (seconds since the epoch).

        The present configuration continues if the settings are the same and did not run out of
        memory.
        """
        knobs = knobs or {}
        start = ConfigurationStart(attempt=attempt, by_memtop=by_memtop, saved_before=saved)
        now, last = replace(self, seen=None), self.present
        if last is not None and not last.died_of_memory and last.allocator == allocator:
            shown = last.configuration
            if same(shown.settings, settings) and shown.knobs == knobs:
                # The length of the run may have changed. The reason of the first attempt stays.
                going_on = replace(shown, settings=settings, until_update=None, outcome=None, by_words=False, ended_by=None)
                return now._put(replace(last, configuration=going_on, starts=(*last.starts, start), attempt_peak=None))
        if last is not None and last.configuration.outcome is None:
            ended = replace(last.configuration, outcome="replaced")
            now = now._put(replace(last, configuration=ended, starts=_saved(last.starts, saved)))
        shown = Configuration(
            number=self._next_number, attempt=attempt, started=started, reason=reason, settings=settings, knobs=knobs
        )
        return now._begin(ConfigurationRecord(configuration=shown, allocator=allocator, starts=(start,)))

    def change(
        self,
        update: int,
        reason: str,
        settings: Settings,
        *,
        died: str | None,
        saved: int | None,
        changed_by: tuple[int, float],
    ) -> Configurations:
        """The running program continues with other settings from this update on.

        `died`: the kind of memory that the earlier settings ran out of. `changed_by`: attempt and
        time of the report. A report that is already known changes nothing.
        """
        last = self.present
        assert last is not None, "settings change within an attempt"
        if any(record.changed_by == changed_by for record in self.records):
            return self
        attempt, started = changed_by
        shown = Configuration(
            number=self._next_number,
            attempt=attempt,
            since_update=update,
            started=started,
            reason=reason,
            settings=settings,
        )
        # The program was started only once.
        starts = last.starts[-1:]
        ended = self.end(died or "replaced", update - 1, saved, died_of_memory=died is not None)
        return ended._begin(
            ConfigurationRecord(configuration=shown, allocator=last.allocator, starts=starts, changed_by=changed_by)
        )

    def resumed(self, update: int) -> Configurations:
        """The program has reported the update after which it resumes."""
        last = self.present
        if last is None or last.configuration.since_update is not None:
            return self
        return self._put(replace(last, configuration=replace(last.configuration, since_update=update + 1)))

    def note_uses(self, uses: Mapping[str, int | bool | str]) -> Configurations:
        """What memtop knows now of the settings of the user's own program."""
        last = self.present
        if last is None or last.configuration.uses == uses:
            return self
        return self._put(replace(last, configuration=replace(last.configuration, uses=dict(uses))))

    def end(
        self,
        outcome: str,
        update: int | None,
        saved: int | None,
        *,
        ended_by: int | None = None,
        died_of_memory: bool = False,
        by_words: bool = False,
    ) -> Configurations:
        """The present configuration ends after this update."""
        last = self.present
        if last is None:
            return self
        last = _with_peaks(last, lambda peak: peak and replace(peak, failed=peak.failed or died_of_memory))
        shown = replace(last.configuration, until_update=update, outcome=outcome, by_words=by_words, ended_by=ended_by)
        starts = _saved(last.starts, saved)
        return self._put(replace(last, configuration=shown, died_of_memory=died_of_memory, starts=starts))

    def note_foreseen(self, number: int, found: Forecast) -> Configurations:
        """The peak that is predicted for this configuration. It stays as it was first predicted."""
        for at, record in enumerate(self.records):
            if record.configuration.number == number and record.configuration.foreseen is None:
                shown = replace(record, configuration=replace(record.configuration, foreseen=found))
                records = (*self.records[:at], shown, *self.records[at + 1 :])
                return replace(self, records=records, unsaved=self.unsaved | {number})
        return self

    def note_step(
        self, rank: int, step: Step, base_bytes: int | None, key: str, batch: int | None, each: int | None = None
    ) -> Configurations:
        """A rank has finished an update.

        `base_bytes`: GPU memory of the run outside the allocator, None if unknown. `key`: all
        settings that affect the peak, except the batch split. `batch`: of one process; None if not
        known. `each`: the samples of an update, for a program that does not count its samples.
        """
        now, taken = self, step.peak_reserved_bytes or step.peak_bytes
        if taken is not None:
            now = replace(now, on_gpu=True)._note_peak(taken, key, batch, base_bytes)
            now = now._note_phases(step.phases)
        last = now.present
        if rank != 0 or last is None:
            return now
        last = _with_peaks(last, lambda peak: peak and replace(peak, updates=peak.updates + 1))
        shown = last.configuration
        # The first update of an attempt is a warm-up, so its time does not count.
        done = each if step.samples_seen is None else None if self.seen is None else step.samples_seen - self.seen
        if done is not None and step.step_seconds:
            last = replace(last, samples=last.samples + done, seconds=last.seconds + step.step_seconds)
            shown = replace(shown, samples_per_second=mean_speed([last]))
        return replace(now, seen=step.samples_seen)._put(replace(last, configuration=shown))

    def note_host(self, host_bytes: int | None, key: str, batch: int | None) -> Configurations:
        """Host memory of the run's processes, which is the peak of a run without a GPU.

        A process keeps memory that it has freed. So after a change in the running program, what it
        holds is a peak of the present settings only if it never held as much before.
        """
        if host_bytes is None or self.on_gpu or host_bytes <= self._held_before:
            return self
        return self._note_peak(host_bytes, key, batch)

    @property
    def _held_before(self) -> int:
        """The highest peak of earlier settings in the present process, in bytes."""
        last = self.present
        if last is None or last.changed_by is None:
            return 0
        earlier = (one.configuration for one in self.records[:-1] if one.newest_attempt == last.newest_attempt)
        return max((one.peak.bytes for one in earlier if one.peak is not None), default=0)

    def _note_peak(self, taken: int, key: str, batch: int | None, outside: int | None = None) -> Configurations:
        last = self.present
        if last is None or last.configuration.outcome is not None or batch is None:
            return self
        new = Peak(batch=batch, bytes=taken, updates=0, settings_key=key)
        after = _with_peaks(last, lambda known: _grown(known or new, taken, outside))
        return self if after == last else self._put(after)

    def _note_phases(self, phases: Mapping[str, int]) -> Configurations:
        """Peaks of phases on one rank: the largest of all ranks and updates count."""
        last = self.present
        if not phases or last is None or last.configuration.outcome is not None or last.configuration.peak is None:
            return self
        known = last.configuration.peak
        largest = {phase: max(size, known.phases.get(phase, 0)) for phase, size in phases.items()}
        if largest.items() <= known.phases.items():
            return self
        peak = replace(known, phases={**known.phases, **largest})
        return self._put(replace(last, configuration=replace(last.configuration, peak=peak)))

    def saved(self) -> Configurations:
        """All changed configurations are being written."""
        return replace(self, unsaved=frozenset())

    def to_save(self) -> tuple[ConfigurationRecord, ...]:
        return tuple(record for record in self.records if record.configuration.number in self.unsaved)

    @property
    def _next_number(self) -> int:
        return self.records[-1].configuration.number + 1 if self.records else 1

    def _begin(self, record: ConfigurationRecord) -> Configurations:
        unsaved = self.unsaved | {record.configuration.number}
        return replace(self, records=(*self.records, record), unsaved=unsaved)

    def _put(self, record: ConfigurationRecord) -> Configurations:
        unsaved = self.unsaved | {record.configuration.number}
        return replace(self, records=(*self.records[:-1], record), unsaved=unsaved)


def _saved(starts: tuple[ConfigurationStart, ...], saved: int | None) -> tuple[ConfigurationStart, ...]:
    """The starts, with the newest saved update of the last one, which has ended."""
    return (*starts[:-1], replace(starts[-1], saved_after=saved)) if starts else ()


def _with_peaks(record: ConfigurationRecord, change: Callable[[Peak | None], Peak | None]) -> ConfigurationRecord:
    """The record with its peak, and that of its newest attempt, changed in the same way."""
    shown = replace(record.configuration, peak=change(record.configuration.peak))
    return replace(record, configuration=shown, attempt_peak=change(record.attempt_peak))


def _grown(known: Peak, taken: int, outside: int | None) -> Peak:
    """The larger of the known peak and a new one. `taken`: without what is held `outside` torch's
    allocator, which is not in `Peak.bytes` either as long as it is not known."""
    if known.outside_bytes is None:
        taken = max(taken, known.bytes)
    outside = known.outside_bytes if outside is None else outside
    size = taken + (outside or 0)
    return replace(known, bytes=size, outside_bytes=outside) if size > known.bytes or known.outside_bytes is None else known
