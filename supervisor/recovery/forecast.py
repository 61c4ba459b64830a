"""Forecasts the peak with other settings. Pure functions.

The peak of a training step has a part that does not depend on the batch (context, weights,
gradients, optimizer state) and a part that every sample adds (activations, logits). It is therefore
a line in the micro-batch B. The accumulation A does not matter, because gradients are accumulated
in place. So two measured batches foresee a third one (`PeakLine`).

On a GPU, the estimate without torch foresees all other settings (`Estimates`). Peaks that the run
has measured scale it, because its error is about the same for settings like these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.monitor.values import EDGE_FROM, GpuSample, HostSample, band_of
from memtop.supervisor.plan import SURE, Card, Need, estimated, largest_safe, peak_of, splits_of, with_split
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.values import Forecast, Peak
from memtop.supervisor.wire import Configuration, RunState


class PeakLine(msgspec.Struct, frozen=True, kw_only=True):
    """The peak in bytes over B: `base_bytes` + `slope_bytes` x B, bounded by what was measured at
    other batches."""

    slope_bytes: float
    """What one more sample in the micro-batch needs."""
    base_bytes: float
    basis: str
    at_least: bool = False
    """Whether it rests on a peak that the failure cut short: the actual peak can be higher."""
    measured: Mapping[int, int] = {}
    """Batch to peak in bytes, for batches that were measured without a failure."""

    def at(self, batch: int) -> int:
        """The peak in bytes: the measured one if there is one, and never more than a larger batch
        needed."""
        if batch in self.measured:
            return self.measured[batch]
        drawn = round(self.base_bytes + self.slope_bytes * batch)
        floor = max((size for other, size in self.measured.items() if other < batch), default=0)
        ceiling = min((size for other, size in self.measured.items() if other > batch), default=drawn)
        return max(floor, min(drawn, ceiling))

    def forecast(self, batch: int, total_bytes: int | None, others_bytes: int | None = None) -> Forecast:
        """The forecast on a device (or a host limit) of `total_bytes`, of which other processes
        hold `others_bytes`."""
        basis = f"measured at B {batch}" if batch in self.measured else self.basis
        return foreseen(self.at(batch), total_bytes, basis, others_bytes)

    def with_activations(self, share: float, why: str) -> PeakLine:
        """An estimate: the part that grows with the batch is multiplied by `share`. It keeps no
        measured batch."""
        return PeakLine(
            slope_bytes=self.slope_bytes * share,
            base_bytes=self.base_bytes,
            basis=f"estimate: {why}; {self.basis}",
            at_least=self.at_least,
        )

    def shifted(self, by_bytes: int, why: str) -> PeakLine:
        """An estimate: the part that does not depend on the batch grows by `by_bytes` (negative:
        shrinks)."""
        return PeakLine(
            slope_bytes=self.slope_bytes,
            base_bytes=max(0.0, self.base_bytes + by_bytes),
            basis=f"estimate: {why}; {self.basis}",
            at_least=self.at_least,
        )


def foreseen(peak_bytes: int, total_bytes: int | None, basis: str, others_bytes: int | None = None) -> Forecast:
    """A forecast with its fraction of the device and its band."""
    fraction = (peak_bytes + (others_bytes or 0)) / total_bytes if total_bytes else None
    if others_bytes:
        basis += f"; other processes hold {units.size(others_bytes)}"
    return Forecast(peak_bytes=peak_bytes, total_bytes=total_bytes, fraction=fraction, band=band_of(fraction), basis=basis)


def forecast(
    settings: Settings,
    peaks: Iterable[Peak],
    total_bytes: int | None,
    *,
    base_bytes: int | None = None,
    others_bytes: int | None = None,
    on_gpu: bool | None = None,
) -> Forecast | str:
    """The forecast for these settings from peaks with the same key, or the reason why there is
    none."""
    line = line_through(peaks_of(settings, peaks, on_gpu=on_gpu), base_bytes=base_bytes)
    return line if isinstance(line, str) else line.forecast(settings.batch, total_bytes, others_bytes)


def peaks_of(settings: Settings, peaks: Iterable[Peak], *, on_gpu: bool | None = None) -> tuple[Peak, ...]:
    """The peaks that were measured with the same settings except the micro-batch."""
    key = settings_key(settings, on_gpu=on_gpu)
    return tuple(peak for peak in peaks if peak.settings_key == key)


def line_through(peaks: Sequence[Peak], *, base_bytes: int | None = None) -> PeakLine | str:
    """The line through peaks of one key, or the reason why there is none.

    Two or more batches give slope and base; single outliers do not move them. One batch gives a
    line together with `base_bytes`, the measured part that does not depend on the batch (context,
    weights, optimizer). The peak of a failure is a lower bound: it can lift the line and never
    lowers it.
    """
    exact, failed = _by_batch(peaks)
    found = _exact_line(exact, base_bytes) or _line_with_failures(exact, failed, base_bytes)
    if found is None:
        return _why_none(exact, failed)
    if found.slope_bytes <= 0:
        return f"the peak does not grow with the batch ({_words([*exact, *failed])})"
    return _lifted(_not_below_zero(found, {**exact, **failed}), failed)


def _by_batch(peaks: Iterable[Peak]) -> tuple[dict[int, int], dict[int, int]]:
    """Batch to its largest peak: the batches that never failed, and those that did."""
    # A configuration that ended before its first update never reached its peak.
    peaks = [peak for peak in peaks if peak.updates or peak.failed]
    exact: dict[int, int] = {}
    broken = {peak.batch for peak in peaks if peak.failed}
    failed: dict[int, int] = {}
    for peak in peaks:
        into = failed if peak.batch in broken else exact
        into[peak.batch] = max(peak.bytes, into.get(peak.batch, 0))
    return exact, failed


def _exact_line(exact: dict[int, int], base_bytes: int | None) -> PeakLine | None:
    points = sorted(exact.items())
    if len(points) >= 2:
        # The median of all slopes (Theil-Sen estimator): up to a quarter of the points can be
        # outliers.
        slope = _median([(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2)])
        base = _median([y - slope * x for x, y in points])
        return PeakLine(slope_bytes=slope, base_bytes=base, basis=f"line through peaks at {_words(exact)}", measured=exact)
    if points and base_bytes is not None:
        ((batch, peak),) = points
        basis = f"one peak at B {batch}, measured base {units.size(base_bytes)}"
        return PeakLine(slope_bytes=(peak - base_bytes) / batch, base_bytes=base_bytes, basis=basis, measured=exact)
    return None


def _line_with_failures(exact: dict[int, int], failed: dict[int, int], base_bytes: int | None) -> PeakLine | None:
    if exact:
        ((batch, peak),) = exact.items()
        beyond = {more: (size - peak) / (more - batch) for more, size in failed.items() if more > batch}
        if not beyond:
            return None
        at, slope = max(beyond.items(), key=lambda item: item[1])
        basis = f"line through the peak at B {batch} and the failure at B {at}, which needed at least that much"
        return PeakLine(slope_bytes=slope, base_bytes=peak - slope * batch, basis=basis, at_least=True, measured=exact)
    if failed and base_bytes is not None:
        at, slope = max(((at, (size - base_bytes) / at) for at, size in failed.items()), key=lambda item: item[1])
        basis = f"at least: the failure at B {at}, measured base {units.size(base_bytes)}"
        return PeakLine(slope_bytes=slope, base_bytes=base_bytes, basis=basis, at_least=True)
    return None


def _not_below_zero(line: PeakLine, points: dict[int, int]) -> PeakLine:
    """A negative base is noise. Use a line through zero above all points instead, which is on the
    safe side."""
    if line.base_bytes >= 0:
        return line
    steepest = max(size / batch for batch, size in points.items())
    return replace(line, base_bytes=0.0, slope_bytes=steepest)


def _lifted(line: PeakLine, failed: dict[int, int]) -> PeakLine:
    missing = max((size - line.base_bytes - line.slope_bytes * batch for batch, size in failed.items()), default=0.0)
    if missing < 1:
        return line
    basis = f"{line.basis}; lifted by {units.size(missing)}: a failure at {_words(failed)} needed more"
    return replace(line, base_bytes=line.base_bytes + missing, basis=basis, at_least=True)


def _words(batches: Iterable[int]) -> str:
    return " and ".join(f"B {batch}" for batch in sorted(batches))


def _why_none(exact: dict[int, int], failed: dict[int, int]) -> str:
    if exact:
        return f"one measured peak is known ({_words(exact)}); a forecast needs two batches"
    if len(failed) == 1:
        return f"one measured peak is known, cut short by the failure ({_words(failed)}); a forecast needs two whole ones"
    if failed:
        return f"only peaks cut short by a failure are known ({_words(failed)}); a forecast needs two whole ones"
    return "nothing was measured with these settings yet"


_NEWEST = 3
"""So many measured peaks scale an estimate at most; each takes a millisecond."""


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """Foresees the peak of a process on a GPU by the estimate, scaled by measured peaks.

    Bytes are those of the process, with the CUDA context, as in `Peak`.
    """

    card: Card
    known: tuple[tuple[Settings, Peak], ...] = ()
    """What the run has measured, oldest first."""
    config: Mapping[str, Any] | None = None
    """The model's configuration, if the settings name the model only by path; None: its file is
    read."""

    def forecast(self, settings: Settings) -> Forecast | str:
        """The forecast for these settings, or why they cannot be estimated."""
        key = settings_key(settings, on_gpu=True)
        exact = {peak.batch: peak.bytes for _, peak in self._whole() if peak.settings_key == key}
        if settings.batch in exact:
            return self._foreseen(exact[settings.batch], f"measured at B {settings.batch}")
        need = estimated(settings, self.card, self.config)
        if isinstance(need, str):
            return need
        scales, basis = self._scales(key)
        least, most = SURE["calibrated" if scales else "estimate"]
        middle = _median(scales) if scales else 1.0
        lifted = max(self._failed(settings.allocator), default=0.0)
        if lifted > middle:
            middle, basis = lifted, f"{basis}; lifted, because it needed more when it ran out of memory"
        scales = [*scales, middle]
        context = self.card.context_bytes
        floor = max((size for batch, size in exact.items() if batch < settings.batch), default=0)
        ceiling = min((size for batch, size in exact.items() if batch > settings.batch), default=None)

        def size(scale: float) -> int:
            drawn = max(floor, round(need.reserved * scale) + context)
            return drawn if ceiling is None else min(drawn, max(floor, ceiling))

        return self._foreseen(size(middle), basis, size(min(scales) * least), size(max(scales) * most))

    def _foreseen(self, size: int, basis: str, least: int | None = None, most: int | None = None) -> Forecast:
        found = foreseen(size, self.card.total_bytes, basis, self.card.others_bytes)
        return replace(found, least_bytes=least, most_bytes=most)

    def _whole(self) -> list[tuple[Settings, Peak]]:
        # A configuration that ended before its first update never reached its peak.
        return [(settings, peak) for settings, peak in self.known if peak.updates and not peak.failed]

    def _scales(self, key: str) -> tuple[list[float], str]:
        """Measured peaks divided by their estimates, and what the forecast rests on. Peaks of
        settings that differ in more than the batch count if there are no others."""
        whole = self._whole()
        near = [one for one in whole if one[1].settings_key == key]
        chosen = (near or whole)[-_NEWEST:]
        found = {peak.batch: scale for settings, peak in chosen if (scale := self._scale(settings, peak)) is not None}
        if not found:
            return [], "estimate"
        where = _words(found)
        if near:
            return list(found.values()), f"estimate, calibrated at {where}"
        return list(found.values()), f"estimate, calibrated at {where} with other settings"

    def _failed(self, allocator: str) -> Iterator[float]:
        """What failures with these options of the allocator needed at least, divided by the
        estimate."""
        failed = [one for one in self.known if one[1].failed and one[0].allocator == allocator]
        for settings, peak in failed[-_NEWEST:]:
            scale = self._scale(settings, peak)
            if scale is not None:
                yield scale

    def _scale(self, settings: Settings, peak: Peak) -> float | None:
        need = estimated(settings, self.card, self.config)
        if isinstance(need, str):
            return None
        outside = self.card.context_bytes if peak.outside_bytes is None else peak.outside_bytes
        return max(0, peak.bytes - outside) / need.reserved


def _median(values: Sequence[float]) -> float:
    from statistics import median  # takes 4 ms

    return median(values)


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has measured, and the memory that it has: with it, the peak of edited settings is
    foreseen."""

    peaks: tuple[Peak, ...] = ()
    current: Peak | None = None
    total_bytes: int | None = None
    others_bytes: int | None = None
    """What other processes hold of it; None: not known."""
    on_gpu: bool = False
    estimates: Estimates | None = None
    """None on the CPU."""

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
        return foreseen(peak.bytes, self.total_bytes, f"measured at B {peak.batch}", self.others_bytes)

    def predicted(self, after: Settings) -> Forecast | str:
        """The forecast for these settings, or why there is none: from the line of measured peaks,
        otherwise by the estimate."""
        found = forecast(after, self.peaks, self.total_bytes, others_bytes=self.others_bytes, on_gpu=self.on_gpu)
        return found if isinstance(found, Forecast) else or_estimated(found, self.estimates, after)

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


def or_estimated(why: str, estimates: Estimates | None, settings: Settings) -> Forecast | str:
    """The estimate where there is no line, which `why` explains; or both reasons."""
    if estimates is None:
        return why
    found = estimates.forecast(settings)
    return f"{why}; no estimate: {found}" if isinstance(found, str) else found


def outlook_of(run: RunState | None, rows: Sequence[Configuration], gpus: Sequence[GpuSample], host: HostSample) -> Outlook:
    """From the run's configurations and the machine; of several cards the smallest counts."""
    used = {rank.device_uuid for rank in run.ranks if rank.device_uuid is not None} if run is not None else set()
    wants_gpu = run is not None and run.settings is not None and run.settings.device != "cpu"
    # Ranks that have done an update without naming a GPU train on the CPU.
    on_cpu = run is not None and bool(run.ranks and run.updates)
    on_gpu = bool(used) or (wants_gpu and bool(gpus) and not on_cpu)
    others, estimates = None, None
    peaks = tuple(row.peak for row in rows if row.peak is not None)
    if on_gpu:
        own = [gpu for gpu in gpus if gpu.total_bytes and (not used or gpu.uuid in used)]
        gpu = min(own, key=lambda one: one.total_bytes or 0, default=None)
        total = None if gpu is None else gpu.total_bytes
        if gpu is not None and run is not None:
            others = _others(run, gpu)
            estimates = estimates_on(gpu, rows, others_bytes=others or 0)
    else:
        total = host.limit_bytes or host.total_bytes
    newest = rows[-1].peak if rows else None
    # Before its first update a configuration has not reached its peak.
    current = newest if newest is not None and (newest.updates or newest.failed) else None
    return Outlook(peaks=peaks, current=current, total_bytes=total, others_bytes=others, on_gpu=on_gpu, estimates=estimates)


def outlook_on(gpu: GpuSample, rows: Sequence[Configuration], others_bytes: int | None) -> Outlook:
    """On this GPU, with what these configurations have measured."""
    return Outlook(
        peaks=tuple(row.peak for row in rows if row.peak is not None),
        total_bytes=gpu.total_bytes,
        others_bytes=others_bytes,
        on_gpu=True,
        estimates=estimates_on(gpu, rows, others_bytes=others_bytes or 0),
    )


def estimates_on(
    gpu: GpuSample, rows: Iterable[Configuration], *, others_bytes: int = 0, config: Mapping[str, Any] | None = None
) -> Estimates:
    """With what these configurations have measured, and the CUDA context that the run was last seen
    to have, or a usual one."""
    known = tuple((row.settings, row.peak) for row in rows if row.settings is not None and row.peak is not None)
    seen = [peak.outside_bytes for _, peak in known if peak.outside_bytes]
    card = Card.of(gpu, others_bytes=others_bytes, context_bytes=seen[-1] if seen else None)
    return Estimates(card=card, known=known, config=config)


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
        gpu = f"GPU memory is foreseen to peak at {size} of {total} ({percent}, {band}): {found.basis}"
        host = f"host memory is foreseen to peak at {size} of {total} ({percent}, {band}): {found.basis}"
    return gpu if on_gpu else host


def split_text(split: Settings, size: int) -> str:
    """A safe split with the same effective batch, and its peak in bytes."""
    return (
        f"--batch {split.batch} --accum {split.accumulation} keeps the effective batch, and peaks at about {units.size(size)}"
    )


def words_at_launch(settings: Settings, card: Card) -> Iterator[str]:
    """The predicted peak of a new run; if it is not safe, also the largest split with the same
    effective batch that is."""
    found = Estimates(card=card).forecast(settings)
    yield foreseen_text(found)
    if isinstance(found, str) or found.fraction is None or found.fraction < EDGE_FROM:
        return

    def ask(tried: Settings) -> Need | None:
        need = estimated(tried, card)
        return None if isinstance(need, str) else need

    best = largest_safe(settings, card, ask, ask)
    if best is None:
        yield "no split with this effective batch is foreseen to be safe with this preset; memtop plan says what else would fit"
    else:
        yield split_text(best[0], peak_of(best[1], card).bytes)
