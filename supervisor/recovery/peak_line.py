"""The line through measured peaks: foresees the peak at another micro-batch. Pure functions.

The peak of a training step has a part that does not depend on the batch (context, weights,
gradients, optimizer state) and a part that every sample adds (activations, logits). It is therefore
a line in the micro-batch B. So two measured batches foresee a third one. How large the accumulation
A is does not matter, because gradients are accumulated in place. With A = 1 they do not stay during
the next forward pass: that is another line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.monitor.values import band_of
from memtop.supervisor.recovery.configuration import settings_key
from memtop.supervisor.recovery.values import Forecast, Peak, Source

NEWEST = 3
"""So many of a run's own peaks correct an estimate at most; each takes some milliseconds."""


class PeakLine(msgspec.Struct, frozen=True, kw_only=True):
    """The peak in bytes over B: `base_bytes` + `slope_bytes` x B, bounded by what was measured at
    other batches."""

    slope_bytes: float
    """What one more sample in the micro-batch needs."""
    base_bytes: float
    basis: str
    source: Source = "line"
    """`estimate`: a part of it was not measured."""
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
        if batch in self.measured:
            return foreseen(self.at(batch), total_bytes, f"measured at B {batch}", others_bytes, source="measured")
        return foreseen(self.at(batch), total_bytes, self.basis, others_bytes, source=self.source)

    def with_activations(self, share: float, why: str) -> PeakLine:
        """An estimate: the part that grows with the batch is multiplied by `share`. It keeps no
        measured batch."""
        return PeakLine(
            slope_bytes=self.slope_bytes * share,
            base_bytes=self.base_bytes,
            basis=f"estimate: {why}; {self.basis}",
            source="estimate",
            at_least=self.at_least,
        )

    def shifted(self, by_bytes: int, why: str) -> PeakLine:
        """An estimate: the part that does not depend on the batch grows by `by_bytes` (negative:
        shrinks)."""
        return PeakLine(
            slope_bytes=self.slope_bytes,
            base_bytes=max(0.0, self.base_bytes + by_bytes),
            basis=f"estimate: {why}; {self.basis}",
            source="estimate",
            at_least=self.at_least,
        )


def foreseen(
    peak_bytes: int, total_bytes: int | None, basis: str, others_bytes: int | None = None, *, source: Source
) -> Forecast:
    """A forecast with its fraction of the device and its band."""
    fraction = (peak_bytes + (others_bytes or 0)) / total_bytes if total_bytes else None
    if others_bytes:
        basis += f"; other processes hold {units.size(others_bytes)}"
    return Forecast(
        peak_bytes=peak_bytes,
        total_bytes=total_bytes,
        fraction=fraction,
        band=band_of(fraction),
        source=source,
        basis=basis,
    )


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
        return f"the peak does not grow with the batch ({batch_words([*exact, *failed])})"
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
        slope = median([(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2)])
        base = median([y - slope * x for x, y in points])
        return PeakLine(slope_bytes=slope, base_bytes=base, basis=f"line through peaks at {batch_words(exact)}", measured=exact)
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
    basis = f"{line.basis}; lifted by {units.size(missing)}: a failure at {batch_words(failed)} needed more"
    return replace(line, base_bytes=line.base_bytes + missing, basis=basis, at_least=True)


def batch_words(batches: Iterable[int]) -> str:
    return " and ".join(f"B {batch}" for batch in sorted(batches))


def _why_none(exact: dict[int, int], failed: dict[int, int]) -> str:
    if exact:
        return f"one measured peak is known ({batch_words(exact)}); a forecast needs two batches"
    if len(failed) == 1:
        return f"one measured peak is known, cut short by the failure ({batch_words(failed)}); a forecast needs two whole ones"
    if failed:
        return f"only peaks cut short by a failure are known ({batch_words(failed)}); a forecast needs two whole ones"
    return "nothing was measured with these settings yet"


def median(values: Sequence[float]) -> float:
    from statistics import median as found  # takes 4 ms

    return found(values)
