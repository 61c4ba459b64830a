"""What this run has measured, for the forecasts of later runs (`presets/measured.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memtop.presets.measured import WHOLE_FROM, Measured, model_key, place, remember
from memtop.presets.parameters import stored_config
from memtop.supervisor.monitor.values import GpuSample
from memtop.supervisor.plan import gpu_kind
from memtop.supervisor.run.model import Model
from memtop.supervisor.run.record.configurations import ConfigurationRecord
from memtop.supervisor.wire import Configuration


class Measurements:
    """Remembers each configuration of one run again when its peak has grown, and when it ends."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str | None], int] = {}
        """The bytes last remembered, by number and outcome."""
        self._problem: str | None = None

    def note(self, records: Iterable[ConfigurationRecord], model: Model) -> tuple[str | None] | None:
        """Remember what is new. Returns the problem with it (None: it can be written now) if that
        has changed, else None."""
        problem = self._problem
        for row in self._new(records, model):
            try:
                remember(row)
                problem = None
            except OSError as error:
                problem = f"{place()}: cannot be written: {error.strerror}; later runs cannot learn from this one's peaks"
        if problem == self._problem:
            return None
        self._problem = problem
        return (problem,)

    def _new(self, records: Iterable[ConfigurationRecord], model: Model) -> Iterator[Measured]:
        gpu = _gpu(model)
        if gpu is None:
            return
        for record in records:
            shown = record.configuration
            peak = shown.peak
            if peak is None or self._known.get((shown.number, shown.outcome)) == peak.bytes:
                continue
            row = _row(shown, gpu, model)
            if row is not None:
                self._known[shown.number, shown.outcome] = peak.bytes
                yield row


def _gpu(model: Model) -> GpuSample | None:
    """The smallest GPU of the run."""
    uuids = set(model.progress.devices.values())
    gpus = model.sample.machine.gpus if model.sample is not None else ()
    own = [gpu for gpu in gpus if gpu.uuid in uuids and gpu.total_bytes]
    return min(own, key=lambda one: one.total_bytes or 0, default=None)


def _row(shown: Configuration, gpu: GpuSample, model: Model) -> Measured | None:
    settings, peak = shown.settings, shown.peak
    if settings is None or peak is None or not (peak.failed or peak.updates >= WHOLE_FROM):
        return None
    config, kind = stored_config(settings), gpu_kind(gpu)
    if config is None or kind is None:
        return None
    return Measured(
        run=model.run.folder,
        time=model.now.time,
        gpu=kind,
        torch=model.progress.torch,
        model=model_key(config),
        settings=settings,
        reserved_bytes=max(0, peak.bytes - (peak.outside_bytes or 0)),
        outside_bytes=peak.outside_bytes or None,
        updates=peak.updates,
        failed=peak.failed,
    )
