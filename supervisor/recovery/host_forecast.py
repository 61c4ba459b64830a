"""Forecasts the peak of host memory of a run that trains on the CPU, by the estimate of `memtop
plan`. Pure functions, but for the model's configuration, whose file they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets.host_estimate import HostEstimate, host_estimate
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Settings
from memtop.presets.states import UnknownMemoryError
from memtop.supervisor.monitor.values import HostSample
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.peak_line import NEWEST, foreseen
from memtop.supervisor.recovery.values import Forecast, Peak, Source
from memtop.supervisor.wire import Configuration, RunState


class HostEstimates(msgspec.Struct, frozen=True, kw_only=True):
    """Foresees the host memory of the run's processes together.

    A peak that needed more than its estimate raises the others. One that needed less lowers none:
    it may be from before the first save, which takes memory, too.
    """

    total_bytes: int | None
    others_bytes: int | None
    known: tuple[tuple[Settings, Peak], ...] = ()
    """What the run has measured, oldest first."""
    config: Mapping[str, Any] | None = None
    """The model's configuration, if the settings name the model only by path; None: its file is
    read."""

    def forecast(self, settings: Settings) -> Forecast | str:
        """The forecast for these settings, or why they cannot be estimated."""
        key = settings_key(settings, on_gpu=False)
        exact = {peak.batch: peak.bytes for _, peak in self.known if _is_whole(peak) and peak.settings_key == key}
        if settings.batch in exact:
            return self._foreseen(exact[settings.batch], f"measured at B {settings.batch}", source="measured")
        found = self._estimate(settings)
        if isinstance(found, str):
            return found
        times = max((self._ratio(*one) for one in self.known[-NEWEST:]), default=0.0)
        basis = "estimate; raised, because the run has needed more than foreseen" if times > 1 else "estimate"
        floor = max((size for batch, size in exact.items() if batch < settings.batch), default=0)

        def size(estimated: int) -> int:
            return max(floor, round(estimated * max(1.0, times)))

        drawn = self._foreseen(size(found.peak), basis)
        return replace(drawn, least_bytes=size(found.least), most_bytes=size(found.most))

    def _foreseen(self, size: int, basis: str, source: Source = "estimate") -> Forecast:
        return foreseen(size, self.total_bytes, basis, self.others_bytes, source=source)

    def _estimate(self, settings: Settings) -> HostEstimate | str:
        config = stored_config(settings) if self.config is None else self.config
        if config is None:
            return "what the model is made of is not known before it is loaded"
        available = None if self.total_bytes is None else max(0, self.total_bytes - (self.others_bytes or 0))
        try:
            return host_estimate(settings, config, on_gpu=False, available=available)
        except UnknownMemoryError as error:
            return str(error)

    def _ratio(self, settings: Settings, peak: Peak) -> float:
        """How many times its estimate it needed at the least; 0 if that is not known."""
        found = self._estimate(settings) if _is_whole(peak) or peak.failed else ""
        return 0.0 if isinstance(found, str) else peak.bytes / found.peak


def host_estimates_on(
    total_bytes: int | None,
    others_bytes: int | None,
    rows: Iterable[Configuration],
    config: Mapping[str, Any] | None = None,
) -> HostEstimates:
    """With what these configurations have measured."""
    known = tuple((row.settings, row.peak) for row in rows if row.settings is not None and row.peak is not None)
    return HostEstimates(total_bytes=total_bytes, others_bytes=others_bytes, known=known, config=config)


def host_taken_by_others(run: RunState | None, host: HostSample) -> int | None:
    """What is taken of the host memory without the run's own processes; None if theirs is not
    known."""
    if run is None or not run.alive or host.used_bytes is None:
        return host.used_bytes
    own = run.host_memory.size
    return None if own is None else max(0, host.used_bytes - own)


def _is_whole(peak: Peak) -> bool:
    # A configuration that ended before its first update never reached its peak.
    return bool(peak.updates) and not peak.failed
