"""Forecasts the peak with other settings. Pure functions.

The line through measured peaks comes first (`peak_line.py`). The estimate without torch foresees
all other settings: on a GPU `Estimates`, on the CPU that of host memory (`host_forecast.py`). On a
GPU, measured peaks of the run, or of an earlier run of the same model, scale the estimate: its
error is about the same for similar settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from memtop.presets.measured import Learned, Likeness, Measured
from memtop.presets.parameters import stored_config
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.monitor.values import EDGE_FROM, GpuSample, HostSample
from memtop.supervisor.plan import SURE, Basis, Card, Need, estimated, largest_safe, peak_of, splits_of, with_split
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.host_forecast import HostEstimates, host_estimates_on, host_taken_by_others
from memtop.supervisor.recovery.peak_line import NEWEST, batch_words, forecast, foreseen, median, peaks_of
from memtop.supervisor.recovery.values import UPDATE_PHASES, Forecast, Peak, Source
from memtop.supervisor.wire import Configuration, RunState

_MIB = 1 << 20
_NOTHING = Learned()
_ENOUGH = 5
"""From so many ratios on, their spread says how sure the estimate is."""
_PRIOR = 4
"""The known errors of an estimate count as much as the spread of so many ratios."""


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """How many times its estimate a peak is at the least and at the most, by these ratios of
    earlier ones.

    Few ratios move the range of a calibrated estimate and widen it. With more of them it is their
    own spread, taken together with that of the known errors: equal ratios of a few settings do not
    show that others have the same.
    """
    least, most = SURE["calibrated"]
    if len(ratios) < _ENOUGH:
        return min(ratios) * least, max(ratios) * most
    middle, count = median(ratios), len(ratios)
    # The known errors reach about twice as far as the standard deviation.
    known = math.log(most / least) / 4
    squares = sum(math.log(max(ratio, 0.01) / middle) ** 2 for ratio in ratios)
    deviation = math.sqrt((_PRIOR * known**2 + squares) / (_PRIOR + count - 1))
    width = math.exp(2 * deviation * math.sqrt(1 + 1 / count))
    return min(min(ratios), middle / width), max(max(ratios), middle * width)


class _Scale(NamedTuple):
    """How many times its estimate the peak is expected to be, and at the least and at the most."""

    middle: float
    least: float
    most: float
    basis: str

    def raised(self, to: float) -> _Scale:
        """With an earlier run that was too short, or had shorter samples, and yet needed so many
        times the estimate."""
        return self._at_least(to, f"{self.basis}; raised, because an earlier run needed more than foreseen")

    def lifted(self, to: float) -> _Scale:
        """With a failure that needed at least so many times the estimate."""
        return self._at_least(to, f"{self.basis}; lifted, because it needed more than foreseen when it ran out of memory")

    def _at_least(self, to: float, basis: str) -> _Scale:
        if to <= self.middle:
            return self
        return _Scale(to, self.least, max(self.most, to * SURE["calibrated"][1]), basis)


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """Foresees the peak of a process on a GPU by the estimate, scaled by measured peaks.

    Bytes are those of the process, with the CUDA context and NCCL's buffers, as in `Peak`.
    """

    card: Card
    """What a process holds outside torch's memory is that of `card_for`."""
    known: tuple[tuple[Settings, Peak], ...] = ()
    """What the run has measured, oldest first."""
    config: Mapping[str, Any] | None = None
    """The model's configuration, if the settings name the model only by path; None: its file is
    read."""
    learned: Learned = _NOTHING
    """What earlier runs have measured on such a GPU."""

    def card_for(self, settings: Settings) -> Card:
        """The GPU with what one of the processes holds outside torch's memory: as the run was last
        seen to have with one process, or with several; else as an earlier run, or a usual one."""
        several = settings.world_size > 1
        seen = [peak.outside_bytes for of, peak in self.known if peak.outside_bytes and (of.world_size > 1) is several]
        measured = seen[-1] if seen else self.learned.context_bytes(settings.world_size)
        return self.card.with_processes(settings.world_size, measured)

    def forecast(self, settings: Settings) -> Forecast | str:
        """The forecast for these settings, or why they cannot be estimated."""
        key = settings_key(settings, on_gpu=True)
        exact = {peak.batch: peak.bytes for _, peak in self._whole() if peak.settings_key == key}
        if settings.batch in exact:
            return self._foreseen(exact[settings.batch], f"measured at B {settings.batch}", source="measured")
        need = self.plain(settings)
        if isinstance(need, str):
            return need
        scale, outside = self._scale_of(settings, key), self.card_for(settings).outside_bytes
        floor = max((size for batch, size in exact.items() if batch < settings.batch), default=0)
        ceiling = min((size for batch, size in exact.items() if batch > settings.batch), default=None)

        def size(times: float) -> int:
            drawn = max(floor, round(need.reserved * times) + outside)
            return drawn if ceiling is None else min(drawn, max(floor, ceiling))

        found = self._foreseen(size(scale.middle), scale.basis)
        return replace(found, least_bytes=size(scale.least), most_bytes=size(scale.most))

    def plain(self, settings: Settings) -> Need | str:
        """What torch reserves, by the estimate alone; or why it cannot be estimated."""
        return estimated(settings, self.card_for(settings), self.config)

    def need(self, settings: Settings) -> Need | str:
        """What torch reserves, by the scaled estimate; or why it cannot be estimated."""
        need = self.plain(settings)
        if isinstance(need, str):
            return need
        return _scaled(need, self._scale_of(settings, settings_key(settings, on_gpu=True)))

    def corrected(self, settings: Settings, need: Need, factor: float | None) -> Need:
        """What a better model than the estimate foresees, with what earlier runs have measured.

        A measurement of the same settings takes its place, or only raises it if it is not whole. A
        failure of the model only lifts it. Other measurements do not count: they scale an estimate.
        `factor`: how many times the estimate the model foresees; None: there is no estimate.
        """
        rows, likeness = self.learned.calibrating(settings, self.config)
        ratios = [row.reserved_bytes / need.reserved for row in rows] if likeness == "same" else []
        middle, basis = (median(ratios), _by_runs(len(rows), "same", need.basis)) if ratios else (1.0, need.basis)
        key = settings_key(settings, on_gpu=True), settings.batch
        failed = [
            row
            for row in self._earlier_failures(settings, self.config)
            if (settings_key(row.settings, on_gpu=True), row.settings.batch) == key
        ]
        lifted = max((row.reserved_bytes / need.reserved for row in failed), default=0.0)
        if factor is not None:
            lifted = max([lifted, *(ratio / factor for ratio in self._failed(settings, self.config))])
        least, most = SURE["calibrated" if ratios and need.basis == _ESTIMATE else need.basis]
        scale = _Scale(middle, min(ratios, default=1.0) * least, max(ratios, default=1.0) * most, basis)
        short = [row for row in self.learned.of_same(settings, self.config) if not row.is_whole_for(settings)]
        seen = max((row.reserved_bytes / need.reserved for row in short), default=0.0)
        return _scaled(need, scale.raised(seen).lifted(lifted))

    def with_phases(self, found: Forecast, settings: Settings) -> Forecast:
        """The forecast with what is allocated in each phase of an update, if that can be
        estimated."""
        need = self.plain(settings)
        if isinstance(need, str):
            return found
        times = max(0, found.peak_bytes - self.card_for(settings).outside_bytes) / need.reserved
        phases = {phase: round(size * times) for phase, size in need.peaks.items() if phase in UPDATE_PHASES}
        return replace(found, phases=phases)

    def _foreseen(self, size: int, basis: str, source: Source = "estimate") -> Forecast:
        return foreseen(size, self.card.total_bytes, basis, self.card.others_bytes, source=source)

    def _whole(self) -> list[tuple[Settings, Peak]]:
        # A configuration that ended before its first update never reached its peak.
        return [(settings, peak) for settings, peak in self.known if peak.updates and not peak.failed]

    def _scale_of(self, settings: Settings, key: str) -> _Scale:
        config = stored_config(settings) if self.config is None else self.config
        ratios, basis = self._ratios(settings, key, config)
        bounding = self.learned.bounding(settings, config)
        seen = max((self._earlier_ratio(row, config) or 0.0 for row in bounding), default=0.0)
        lifted = max(self._failed(settings, config), default=0.0)
        if not ratios:
            middle, (least, most) = max(1.0, seen, lifted), SURE[_ESTIMATE]
            scale = _Scale(1.0, middle * least, middle * most, basis)
        else:
            scale = _Scale(median(ratios), *spread(ratios), basis)
        return scale.raised(seen).lifted(lifted)

    def _ratios(self, settings: Settings, key: str, config: Mapping[str, Any] | None) -> tuple[list[float], str]:
        """Measured peaks divided by their estimates, and what the forecast rests on. Those that
        differ in more than the batch count if there are no others, and the run's own first."""
        whole = self._whole()
        near = [one for one in whole if one[1].settings_key == key]
        earlier, likeness = self.learned.calibrating(settings, config)
        if near or (whole and likeness == "model"):
            chosen = (near or whole)[-NEWEST:]
            found = {peak.batch: ratio for of, peak in chosen if (ratio := self._ratio(of, peak)) is not None}
            if found:
                where = batch_words(found)
                if near:
                    return list(found.values()), f"estimate, calibrated at {where}"
                return list(found.values()), f"estimate, calibrated at {where} with other settings"
        known = [(row, ratio) for row in earlier if (ratio := self._earlier_ratio(row, config)) is not None]
        if not known:
            return [], _ESTIMATE
        return [ratio for _, ratio in known], _by_runs(len({row.run for row, _ in known}), likeness)

    def _failed(self, settings: Settings, config: Mapping[str, Any] | None) -> Iterator[float]:
        """What failures of this model with these options of the allocator needed at least, divided
        by the estimate."""
        failed = [one for one in self.known if one[1].failed and one[0].allocator == settings.allocator]
        yield from (ratio for one in failed[-NEWEST:] if (ratio := self._ratio(*one)) is not None)
        earlier = self._earlier_failures(settings, config)[-NEWEST:]
        yield from (ratio for row in earlier if (ratio := self._earlier_ratio(row, config)) is not None)

    def _earlier_failures(self, settings: Settings, config: Mapping[str, Any] | None) -> list[Measured]:
        failed = [row for row in self.learned.of_model(settings, config) if row.failed]
        return [row for row in failed if row.settings.allocator == settings.allocator]

    def _ratio(self, settings: Settings, peak: Peak) -> float | None:
        need = self.plain(settings)
        if isinstance(need, str):
            return None
        # If it is not known, little was outside, so that torch has taken much.
        outside = self.card.context_bytes if peak.outside_bytes is None else peak.outside_bytes
        return max(0, peak.bytes - outside) / need.reserved

    def _earlier_ratio(self, row: Measured, config: Mapping[str, Any] | None) -> float | None:
        need = estimated(row.settings, self.card_for(row.settings), config)
        return None if isinstance(need, str) else row.reserved_bytes / need.reserved


_ESTIMATE: Basis = "estimate"


def _scaled(need: Need, scale: _Scale) -> Need:
    if scale.basis == need.basis:
        return need
    return replace(
        need,
        reserved=max(sum(need.components.values()), round(need.reserved * scale.middle)),
        sure=(scale.least / scale.middle, scale.most / scale.middle),
        calibrated=scale.basis,
    )


def _by_runs(count: int, likeness: Likeness, basis: Basis = "estimate") -> str:
    if likeness == "same":
        one, several = "1 earlier run with these settings", f"{count} earlier runs with these settings"
    elif likeness == "near":
        one, several = "1 earlier run with another batch", f"{count} earlier runs with another batch"
    else:
        one, several = "1 earlier run of this model", f"{count} earlier runs of this model"
    words = one if count == 1 else several
    return f"estimate, calibrated by {words}" if basis == _ESTIMATE else f"dry run, corrected by {words}"


class Forecaster(msgspec.Struct, frozen=True, kw_only=True):
    """Foresees the peak of edited settings, from what a run has measured and the memory that it
    has."""

    peaks: tuple[Peak, ...] = ()
    current: Peak | None = None
    total_bytes: int | None = None
    others_bytes: int | None = None
    """What other processes hold of it; None: not known."""
    on_gpu: bool = False
    estimates: Estimates | None = None
    """None on the CPU."""
    host_estimates: HostEstimates | None = None
    """None on a GPU."""

    @property
    def what(self) -> str:
        return "VRAM peak" if self.on_gpu else "RAM peak"

    def measured(self, after: Settings) -> Forecast | None:
        """The measured peak, if these settings have that of the present ones."""
        now = self.current
        same = now is not None and not now.failed and now.batch == after.batch
        if now is None or not same or not peaks_of(after, [now], on_gpu=self.on_gpu):
            return None
        return self.seen(now)

    def seen(self, peak: Peak) -> Forecast:
        """A measured peak as a part of the memory."""
        return foreseen(peak.bytes, self.total_bytes, f"measured at B {peak.batch}", self.others_bytes, source="measured")

    def predicted(self, after: Settings) -> Forecast | str:
        """The forecast for these settings, or why there is none: from the line of measured peaks,
        otherwise by the estimate."""
        found = forecast(after, self.peaks, self.total_bytes, others_bytes=self.others_bytes, on_gpu=self.on_gpu)
        return found if isinstance(found, Forecast) else or_estimated(found, self.estimates or self.host_estimates, after)

    def with_phases(self, found: Forecast | str, after: Settings) -> Forecast | str:
        """The forecast with what is allocated in each phase of an update, where that is known."""
        return found if isinstance(found, str) or self.estimates is None else self.estimates.with_phases(found, after)

    def safe_split(self, settings: Settings) -> tuple[Settings, Forecast] | None:
        """The largest smaller batch that is predicted to be safe and keeps the effective batch."""
        for batch, accumulation in splits_of(settings):
            if batch >= settings.batch:
                continue
            smaller = with_split(settings, batch, accumulation)
            found = self.predicted(smaller)
            if isinstance(found, Forecast) and found.fraction is not None and found.fraction < EDGE_FROM:
                return smaller, found
        return None


def or_estimated(why: str, estimates: Estimates | HostEstimates | None, settings: Settings) -> Forecast | str:
    """The estimate where there is no line, which `why` explains; or both reasons."""
    if estimates is None:
        return why
    found = estimates.forecast(settings)
    return f"{why}; no estimate: {found}" if isinstance(found, str) else found


def gpu_of(run: RunState | None, gpus: Sequence[GpuSample]) -> GpuSample | None:
    """The smallest of those that the run uses, or of all if it has named none."""
    used = _used(run)
    own = [gpu for gpu in gpus if gpu.total_bytes and (not used or gpu.uuid in used)]
    return min(own, key=lambda one: one.total_bytes or 0, default=None)


def _used(run: RunState | None) -> set[str]:
    return {rank.device_uuid for rank in run.ranks if rank.device_uuid is not None} if run is not None else set()


def forecaster_of(
    run: RunState | None,
    rows: Sequence[Configuration],
    gpus: Sequence[GpuSample],
    host: HostSample,
    learned: Learned = _NOTHING,
) -> Forecaster:
    """From the run's configurations and the machine; of several cards the smallest counts.
    `learned`: what earlier runs have measured on such a card."""
    used = _used(run)
    wants_gpu = run is not None and run.settings is not None and run.settings.device != "cpu"
    # Ranks that have done an update without naming a GPU train on the CPU.
    on_cpu = run is not None and bool(run.ranks and run.updates)
    on_gpu = bool(used) or (wants_gpu and bool(gpus) and not on_cpu)
    others, estimates, on_host = None, None, None
    peaks = tuple(row.peak for row in rows if row.peak is not None)
    newest = rows[-1].peak if rows else None
    if on_gpu:
        gpu = gpu_of(run, gpus)
        total = None if gpu is None else gpu.total_bytes
        if gpu is not None and run is not None:
            others = _others(run, gpu)
            estimates = estimates_on(gpu, rows, others_bytes=others or 0, learned=learned)
            peaks = _with_context(rows, estimates, run.settings)
            newest = peaks[-1] if newest is not None else None
    else:
        total, others = host.limit_bytes or host.total_bytes, host_taken_by_others(run, host)
        on_host = host_estimates_on(total, others, rows)
    # Before its first update a configuration has not reached its peak.
    current = newest if newest is not None and (newest.updates or newest.failed) else None
    return Forecaster(
        peaks=peaks,
        current=current,
        total_bytes=total,
        others_bytes=others,
        on_gpu=on_gpu,
        estimates=estimates,
        host_estimates=on_host,
    )


def forecaster_on(
    gpu: GpuSample, rows: Sequence[Configuration], others_bytes: int | None, learned: Learned = _NOTHING
) -> Forecaster:
    """On this GPU, with what these configurations and earlier runs have measured."""
    estimates = estimates_on(gpu, rows, others_bytes=others_bytes or 0, learned=learned)
    return Forecaster(
        peaks=_with_context(rows, estimates, None),
        total_bytes=gpu.total_bytes,
        others_bytes=others_bytes,
        on_gpu=True,
        estimates=estimates,
    )


def estimates_on(
    gpu: GpuSample,
    rows: Iterable[Configuration],
    *,
    others_bytes: int = 0,
    config: Mapping[str, Any] | None = None,
    learned: Learned = _NOTHING,
) -> Estimates:
    """With what these configurations and earlier runs have measured."""
    known = tuple((row.settings, row.peak) for row in rows if row.settings is not None and row.peak is not None)
    found = Estimates(card=Card.of(gpu, others_bytes=others_bytes), known=known, config=config, learned=learned)
    outside = [found.card_for(settings).outside_bytes for settings, _ in known]
    return replace(found, known=tuple((of, peak.with_context(size)) for (of, peak), size in zip(known, outside, strict=True)))


def _with_context(rows: Iterable[Configuration], estimates: Estimates, usual: Settings | None) -> tuple[Peak, ...]:
    """The peaks of these configurations, each with what its process holds outside torch's memory.
    `usual`: the settings of a configuration that has none."""
    found = []
    for row in rows:
        settings = row.settings or usual
        card = estimates.card if settings is None else estimates.card_for(settings)
        if row.peak is not None:
            found.append(row.peak.with_context(card.outside_bytes))
    return tuple(found)


def _others(run: RunState, gpu: GpuSample) -> int | None:
    """What is taken of the GPU without the run's own processes; None if theirs is not known."""
    own = [process.used_bytes for process in gpu.processes if process.run == run.name]
    if gpu.taken_bytes is None or None in own or (run.alive and not own):
        return None
    return max(0, gpu.taken_bytes - sum(size for size in own if size is not None))


# --- in words -------------------------------------------------------------------------------------


def foreseen_text(found: Forecast | str, *, on_gpu: bool = True) -> str:
    """The predicted peak of a configuration and what the prediction rests on, or why there is
    none."""
    if isinstance(found, str):
        gpu, host = (
            f"the peak of GPU memory cannot be foreseen: {found}",
            f"the peak of host memory cannot be foreseen: {found}",
        )
        return gpu if on_gpu else host
    size, total, percent = units.size(found.peak_bytes), units.size(found.total_bytes), units.percent(found.fraction)
    if found.fraction is None:
        gpu = f"GPU memory is foreseen to peak at {size}: {found.basis}"
        host = f"host memory is foreseen to peak at {size}: {found.basis}"
    else:
        band = found.band.value
        if found.total_bytes is not None and found.fraction * found.total_bytes - found.peak_bytes > _MIB:
            percent = f"{percent} with other processes"
        gpu = f"GPU memory is foreseen to peak at {size} of {total} ({percent}, {band}): {found.basis}"
        host = f"host memory is foreseen to peak at {size} of {total} ({percent}, {band}): {found.basis}"
    return gpu if on_gpu else host


def split_text(split: Settings, size: int) -> str:
    """A safe split with the same effective batch, and its peak in bytes."""
    return (
        f"--batch {split.batch} --accum {split.accumulation} keeps the effective batch, and peaks at about {units.size(size)}"
    )


def words_at_launch(settings: Settings, card: Card, learned: Learned = _NOTHING) -> Iterator[str]:
    """The predicted peak of a new run; if it is not safe, also the largest split with the same
    effective batch that is."""
    estimates = Estimates(card=card, learned=learned)
    card, found = estimates.card_for(settings), estimates.forecast(settings)
    yield foreseen_text(found)
    if isinstance(found, str) or found.fraction is None or found.fraction < EDGE_FROM:
        return

    def ask(tried: Settings) -> Need | None:
        need = estimates.need(tried)
        return None if isinstance(need, str) else need

    best = largest_safe(settings, card, ask, ask)
    if best is None:
        yield "no split with this effective batch is foreseen to be safe with this preset; memtop plan says what else would fit"
    else:
        yield split_text(best[0], peak_of(best[1], card).bytes)
