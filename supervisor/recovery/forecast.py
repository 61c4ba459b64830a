"""From measured peaks to the peak at another batch. Pure.

A training step's peak is what is there whatever the batch (context, weights, gradients, optimizer state) and what every sample
adds (activations, logits): a line in the micro-batch B. The accumulation A is not in it: gradients add up in place.
"""

from __future__ import annotations

import hashlib
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import msgspec

from memtop.presets.fields import memory_shape
from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.monitor.bands import EDGE_FROM, band_of
from memtop.supervisor.recovery.values import Forecast, Peak

_MOST_SAMPLES = 1 << 20


def settings_key(settings: Settings, *, on_gpu: bool | None = None) -> str:
    """Everything but the split that shapes the peak, as one short string: only peaks of one key lie on a line.

    `on_gpu`: the peak is one of GPU memory; None: as the settings' device says. In host memory loader workers count too.
    """
    on_gpu = settings.device != "cpu" if on_gpu is None else on_gpu
    values = memory_shape(settings, "peak") if on_gpu else memory_shape(settings, "peak", "host")
    del values["batch"]
    # What is sharded over the processes depends on their number; what is only copied, on whether there are several (buckets).
    values["processes"] = settings.world_size if settings.zero.stage else min(2, settings.world_size)
    digest = hashlib.blake2b(msgspec.json.encode(values, order="deterministic"), digest_size=6).hexdigest()
    words = [f"T {settings.seq_len}", settings.precision, settings.method, str(settings.zero), settings.optimizer]
    if settings.gradient_checkpointing:
        words.append("checkpointing")
    return f"{', '.join(words)} #{digest}"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the peak over B: `base_bytes` + `slope_bytes` x B, held between what was measured at other batches."""

    slope_bytes: float
    """What one more sample in the micro-batch takes."""
    base_bytes: float
    basis: str
    at_least: bool = False
    """It rests on a peak that was cut short by the failure: the truth may lie higher."""
    measured: Mapping[int, int] = {}
    """Batches that were measured without a failure."""

    def at(self, batch: int) -> int:
        """The peak in bytes: as measured where it was, and never beyond what a larger batch was measured to need."""
        if batch in self.measured:
            return self.measured[batch]
        drawn = round(self.base_bytes + self.slope_bytes * batch)
        floor = max((size for other, size in self.measured.items() if other < batch), default=0)
        ceiling = min((size for other, size in self.measured.items() if other > batch), default=drawn)
        return max(floor, min(drawn, ceiling))

    def forecast(self, batch: int, total_bytes: int | None, others_bytes: int | None = None) -> Forecast:
        """`total_bytes` of the device (or of the host's limit); `others_bytes`: held by other processes beside this one."""
        basis = f"measured at B {batch}" if batch in self.measured else self.basis
        return foreseen(self.at(batch), total_bytes, basis, others_bytes)

    def largest_batch(
        self, total_bytes: int, *, below_fraction: float = EDGE_FROM, others_bytes: int | None = None
    ) -> int | None:
        """The largest B whose forecast stays below that fraction of the device; None where not even one sample does."""
        most = min(_MOST_SAMPLES, int(total_bytes / self.slope_bytes) + 1)

        def too_much(batch: int) -> bool:
            return (self.at(batch) + (others_bytes or 0)) / total_bytes >= below_fraction

        return bisect_left(range(1, most + 1), True, key=too_much) or None

    def with_activations(self, share: float, why: str) -> Line:
        """The estimate where what grows with the batch shrinks to that share of it; no longer a measurement anywhere."""
        return Line(
            slope_bytes=self.slope_bytes * share,
            base_bytes=self.base_bytes,
            basis=f"estimate: {why}; {self.basis}",
            at_least=self.at_least,
        )

    def shifted(self, by_bytes: int, why: str) -> Line:
        """The estimate where so many bytes that do not depend on the batch are added or (negative) saved."""
        return Line(
            slope_bytes=self.slope_bytes,
            base_bytes=max(0.0, self.base_bytes + by_bytes),
            basis=f"estimate: {why}; {self.basis}",
            at_least=self.at_least,
        )


def foreseen(peak_bytes: int, total_bytes: int | None, basis: str, others_bytes: int | None = None) -> Forecast:
    """A forecast with its share of the device and its band."""
    fraction = (peak_bytes + (others_bytes or 0)) / total_bytes if total_bytes else None
    if others_bytes:
        basis += f"; beside {units.size(others_bytes)} of other processes"
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
    """The peak of these settings from peaks of the same key, or why there is none, in a few words."""
    line = line_through(peaks_of(settings, peaks, on_gpu=on_gpu), base_bytes=base_bytes)
    return line if isinstance(line, str) else line.forecast(settings.batch, total_bytes, others_bytes)


def peaks_of(settings: Settings, peaks: Iterable[Peak], *, on_gpu: bool | None = None) -> tuple[Peak, ...]:
    """Those that were measured under the same settings but for the split."""
    key = settings_key(settings, on_gpu=on_gpu)
    return tuple(peak for peak in peaks if peak.settings_key == key)


def line_through(peaks: Sequence[Peak], *, base_bytes: int | None = None) -> Line | str:
    """The line through peaks of one key, or why there is none.

    Two batches or more give slope and base, whatever single ones stray. One gives a line with `base_bytes`, which is what was
    measured to be there without a batch: context, weights, optimizer. The peak of a failure is a lower bound: it lifts the
    line and never lowers it.
    """
    exact, failed = _by_batch(peaks)
    found = _exact_line(exact, base_bytes) or _line_with_failures(exact, failed, base_bytes)
    if found is None:
        return _why_none(exact, failed)
    if found.slope_bytes <= 0:
        return f"the peak does not grow with the batch ({_words([*exact, *failed])})"
    return _lifted(_not_below_zero(found, {**exact, **failed}), failed)


def _by_batch(peaks: Iterable[Peak]) -> tuple[dict[int, int], dict[int, int]]:
    """Batch to the most that was measured there: apart where it never failed, and where it did."""
    # A configuration that ended before its first update was never seen at its peak.
    peaks = [peak for peak in peaks if peak.updates or peak.failed]
    exact: dict[int, int] = {}
    broken = {peak.batch for peak in peaks if peak.failed}
    failed: dict[int, int] = {}
    for peak in peaks:
        into = failed if peak.batch in broken else exact
        into[peak.batch] = max(peak.bytes, into.get(peak.batch, 0))
    return exact, failed


def _exact_line(exact: dict[int, int], base_bytes: int | None) -> Line | None:
    points = sorted(exact.items())
    if len(points) >= 2:
        # The median of all slopes (Theil-Sen): up to a quarter of the points may lie anywhere.
        slope = statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))
        base = statistics.median(y - slope * x for x, y in points)
        return Line(slope_bytes=slope, base_bytes=base, basis=f"line through peaks at {_words(exact)}", measured=exact)
    if points and base_bytes is not None:
        ((batch, peak),) = points
        basis = f"one peak at B {batch}, base {units.size(base_bytes)} as measured"
        return Line(slope_bytes=(peak - base_bytes) / batch, base_bytes=base_bytes, basis=basis, measured=exact)
    return None


def _line_with_failures(exact: dict[int, int], failed: dict[int, int], base_bytes: int | None) -> Line | None:
    if exact:
        ((batch, peak),) = exact.items()
        beyond = {more: (size - peak) / (more - batch) for more, size in failed.items() if more > batch}
        if not beyond:
            return None
        at, slope = max(beyond.items(), key=lambda item: item[1])
        basis = f"line through the peak at B {batch} and the failure at B {at}, which wanted at least that much"
        return Line(slope_bytes=slope, base_bytes=peak - slope * batch, basis=basis, at_least=True, measured=exact)
    if failed and base_bytes is not None:
        at, slope = max(((at, (size - base_bytes) / at) for at, size in failed.items()), key=lambda item: item[1])
        basis = f"at least: the failure at B {at}, base {units.size(base_bytes)} as measured"
        return Line(slope_bytes=slope, base_bytes=base_bytes, basis=basis, at_least=True)
    return None


def _not_below_zero(line: Line, points: dict[int, int]) -> Line:
    """A base below zero is noise: nothing needs less than nothing. A line from zero above all points is on the safe side."""
    if line.base_bytes >= 0:
        return line
    steepest = max(size / batch for batch, size in points.items())
    return msgspec.structs.replace(line, base_bytes=0.0, slope_bytes=steepest)


def _lifted(line: Line, failed: dict[int, int]) -> Line:
    missing = max((size - line.base_bytes - line.slope_bytes * batch for batch, size in failed.items()), default=0.0)
    if missing < 1:
        return line
    basis = f"{line.basis}; lifted by {units.size(missing)}: a failure at {_words(failed)} wanted more"
    return msgspec.structs.replace(line, base_bytes=line.base_bytes + missing, basis=basis, at_least=True)


def _words(batches: Iterable[int]) -> str:
    return " and ".join(f"B {batch}" for batch in sorted(batches))


def _why_none(exact: dict[int, int], failed: dict[int, int]) -> str:
    if exact:
        return f"one measured peak is known ({_words(exact)}), two are needed: one more batch gives a line"
    if len(failed) == 1:
        return f"one measured peak is known, cut short by the failure ({_words(failed)}): two whole ones are needed"
    if failed:
        return f"only peaks cut short by a failure are known ({_words(failed)}): two whole ones are needed"
    return "nothing was measured yet under these settings"


class Prior(msgspec.Struct, frozen=True, kw_only=True):
    """What the guide assumes where nothing was measured: its T5 on a 20 GB card. Every value can be given."""

    model_and_optimizer_bytes: int = 3 * units.GIB
    reserve_bytes: int = 2 * units.GIB
    forward_bytes: int = round(0.3 * units.GIB)
    """Of one sample."""
    backward_bytes: int = round(0.3 * units.GIB)
    margin_fraction: float = 0.2

    def line(self) -> Line:
        return Line(
            slope_bytes=self.forward_bytes + self.backward_bytes,
            base_bytes=self.model_and_optimizer_bytes + self.reserve_bytes,
            basis="assumed, nothing measured: the guide's model, reserve and bytes per sample",
        )

    def largest_batch(self, total_bytes: int, *, margin: bool = True) -> int:
        """(total - model - reserve) / bytes per sample, less the margin; the accumulation does not enter into it."""
        line = self.line()
        fits = int((total_bytes - line.base_bytes) / line.slope_bytes)
        return max(0, int(fits * (1 - self.margin_fraction)) if margin else fits)
