"""What this run has measured, for the forecasts of later runs (`presets/measured.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memtop.presets.measured import ENOUGH_UPDATES, WHOLE_FROM, GpuKind, Measured, model_key, place, remember
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Settings
from memtop.supervisor.plan import gpu_kind
from memtop.supervisor.recovery.values import Peak
from memtop.supervisor.run.model import Model
from memtop.supervisor.run.record.configurations import ConfigurationRecord

_SECONDS = 60.0
"""Between two times that the peak of the present configuration is written. The file is read and
written as a whole, and samples of various lengths give many new peaks."""


class _Key(NamedTuple):
    configuration: int
    attempt: int
    failed: bool


class _Seen(NamedTuple):
    """A peak with what else a row needs, except what is in files."""

    run: str
    time: float
    gpu: GpuKind
    torch: str | None
    settings: Settings
    peak: Peak
    reserved_bytes: int

    def row(self) -> Measured | None:
        """It reads the model's configuration; None if only the trainer knows it."""
        config = stored_config(self.settings)
        if config is None:
            return None
        return Measured(
            run=self.run,
            time=self.time,
            gpu=self.gpu,
            torch=self.torch,
            model=model_key(config),
            settings=self.settings,
            reserved_bytes=self.reserved_bytes,
            outside_bytes=self.peak.outside_bytes or None,
            updates=self.peak.updates,
            failed=self.peak.failed,
        )


class Measurements:
    """Remembers the peak of each configuration in each attempt of one run: again when it has grown
    or enough updates show it, and when the configuration ends.

    `write` reads and writes files, so it runs in a thread; all else is for the event loop. What
    could not be written is tried again.
    """

    def __init__(self) -> None:
        self._known: dict[_Key, Peak] = {}
        """What was written."""
        self._waiting: dict[_Key, _Seen] = {}
        self._writing: dict[_Key, _Seen] = {}
        self._failed: dict[_Key, _Seen] = {}
        self._due = 0.0
        self._problem: str | None = None
        self._found: str | None = None
        """The problem with the newest `write`."""

    def note(self, records: Iterable[ConfigurationRecord], model: Model) -> bool:
        """Take what is new. Returns whether there is something to write."""
        is_due = model.now.monotonic >= self._due
        if is_due:
            self._waiting = {**self._failed, **self._waiting}
            self._failed = {}
        for record in records:
            if is_due or record.configuration.outcome is not None:
                self._take(record, model)
        if self._waiting:
            self._due = model.now.monotonic + _SECONDS
        return bool(self._waiting)

    def _take(self, record: ConfigurationRecord, model: Model) -> None:
        seen = _seen(record, model)
        if seen is None:
            return
        key = _Key(record.configuration.number, record.newest_attempt, seen.peak.failed)
        known = self._known.get(key)
        if known is None or seen.peak.bytes > known.bytes or known.updates < ENOUGH_UPDATES <= seen.peak.updates:
            self._failed.pop(key, None)
            self._waiting[key] = seen

    def begin(self) -> bool:
        """Whether `write` has something to do now. One at a time: a folder on another machine may
        let it wait without end."""
        if self._writing or not self._waiting:
            return False
        self._writing, self._waiting = self._waiting, {}
        return True

    def write(self) -> None:
        """Write what `begin` has chosen."""
        self._found = None
        for key, seen in self._writing.items():
            try:
                row = seen.row()
                if row is not None:
                    remember(row)
                    self._known[key] = seen.peak
            except OSError as error:
                self._failed[key] = seen
                why = error.strerror
                self._found = f"{place()}: cannot be written: {why}; later runs cannot learn from this one's peaks"

    def end(self) -> tuple[str | None] | None:
        """After `write`: the problem with it (None: it can be written now) if that has changed,
        else None."""
        self._writing = {}
        if self._found == self._problem:
            return None
        self._problem = self._found
        return (self._problem,)


def _seen(record: ConfigurationRecord, model: Model) -> _Seen | None:
    """What the present attempt has measured: on this GPU, with this torch."""
    gpu, attempt, peak = model.smallest_gpu, model.attempt, record.attempt_peak
    kind, settings = None if gpu is None else gpu_kind(gpu), record.configuration.settings
    if kind is None or attempt is None or record.newest_attempt != attempt.number or settings is None or peak is None:
        return None
    reserved = peak.bytes - (peak.outside_bytes or 0)
    if reserved <= 0 or not (peak.failed or peak.updates >= WHOLE_FROM):
        return None
    return _Seen(
        run=model.run.folder,
        time=model.now.time,
        gpu=kind,
        torch=model.progress.torch,
        settings=settings,
        peak=peak,
        reserved_bytes=reserved,
    )
