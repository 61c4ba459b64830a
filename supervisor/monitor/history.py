"""The last hour of the machine in memory: a few values of each GPU and of the host, one a second,
and their resampling.

Unknown values stay unknown (NaN inside, None outside). A time without samples stays a gap.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot

HOST = "host"
"""The key of the host's series. The key of a GPU is its uuid."""
GPU_SERIES = ("used_bytes", "used_fraction", "utilization_fraction", "power_watts", "temperature_celsius")
HOST_SERIES = (
    *("used_bytes", "used_fraction", "swap_used_bytes", "swap_in_bytes_per_second", "pressure_fraction", "cpu_fraction"),
    *("run_rss_bytes", "run_pss_bytes"),
)
"""Names of the host's series. The ledger stores values in this order; older ledgers lack the
last."""
KEPT_SECONDS = 3600.0
_NAN = math.nan
# Samples within this many seconds share one value, the larger one.
_SHORTEST = 0.9
# This many of the oldest values are dropped at once, which is cheaper than one by one.
_SURPLUS = 240
# A value is valid until the next one, but no longer than this many usual intervals, nor than this
# many seconds.
_VALID_INTERVALS, _VALID_SECONDS = 2.5, 15.0


class Bucket(NamedTuple):
    """Minimum, mean and maximum of one series in one time interval."""

    time: float
    """The start of the interval, in seconds since the epoch."""
    seconds: float
    low: float
    mean: float
    high: float


def gpu_key(gpu: GpuSample) -> str:
    """Identifies a GPU over time. Indices may change, and UUIDs cannot always be read."""
    return gpu.uuid or f"index {gpu.index}"


def series_of(key: str) -> tuple[str, ...]:
    """The names of the series of a key."""
    return HOST_SERIES if key == HOST else GPU_SERIES


def label_of(gpu_index: int | None) -> str:
    """The name of a source as text: `GPU 0`, or `host` for None."""
    return "host" if gpu_index is None else f"GPU {gpu_index}"


def values_of(
    snapshot: MachineSnapshot, run_rss_bytes: float | None = None, run_pss_bytes: float | None = None
) -> Iterator[tuple[str, int | None, list[float]]]:
    """(key, GPU index or None for the host, values in the order of the names) of each source.

    Unknown values are NaN.
    """
    for gpu in snapshot.gpus:
        row = (gpu.used_bytes, gpu.used_fraction, gpu.utilization_fraction, gpu.power_watts, gpu.temperature_celsius)
        yield gpu_key(gpu), gpu.index, [_NAN if value is None else value for value in row]
    host = snapshot.host
    memory = (host.used_bytes, host.used_fraction, host.swap_used_bytes, host.swap_in_bytes_per_second)
    rest = (host.pressure_fraction, host.cpu_fraction, run_rss_bytes, run_pss_bytes)
    yield HOST, None, [_NAN if value is None else value for value in (*memory, *rest)]


class Track:
    """The series of one GPU or of the host, with their common times."""

    def __init__(self, names: Sequence[str], gpu_index: int | None) -> None:
        self.gpu_index = gpu_index
        """None for the host."""
        self.times = array("d")
        # Four bytes hold 7 digits: 80 GB with an error of 5 kB, which no chart shows.
        self.columns = {name: array("f") for name in names}

    def append(self, time: float, values: Sequence[float]) -> None:
        times = self.times
        if times and time <= times[-1]:
            if time == times[-1]:
                return
            # The clock was set back: drop the values that are now in the future.
            self._cut_from(time)
        if times and time - times[-1] < _SHORTEST and self._merged(values):
            return
        times.append(time)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        if len(times) > _SURPLUS and times[_SURPLUS - 1] < time - KEPT_SECONDS:
            self._drop(_SURPLUS)

    def _merged(self, values: Sequence[float]) -> bool:
        for column, value in zip(self.columns.values(), values, strict=True):
            # The comparison is False for NaN. An unknown value is replaced by a known one.
            if value > column[-1] or column[-1] != column[-1]:
                column[-1] = value
        return True

    def _cut_from(self, time: float) -> None:
        keep = len(self.times)
        while keep and self.times[keep - 1] >= time:
            keep -= 1
        for values in (self.times, *self.columns.values()):
            del values[keep:]

    def _drop(self, count: int) -> None:
        for values in (self.times, *self.columns.values()):
            del values[:count]

    def spans(self) -> Iterator[float]:
        """How long each value is valid, in seconds: until the next one, unless that comes much
        later than usual."""
        times = self.times
        before = math.inf
        for now, following in pairwise((*times, math.inf)):
            after = following - now
            usual = min(before, after)
            yield min(
                after, _VALID_SECONDS, max(_VALID_INTERVALS, _VALID_INTERVALS * usual) if usual < math.inf else _VALID_INTERVALS
            )
            before = after


class History:
    """The newest hour, one value a second. Not thread-safe."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._tracks)

    @property
    def start(self) -> float | None:
        """The time of the oldest value."""
        return min((track.times[0] for track in self._tracks.values() if track.times), default=None)

    @property
    def end(self) -> float | None:
        """The time of the newest value."""
        return max((track.times[-1] for track in self._tracks.values() if track.times), default=None)

    def gpu_index(self, key: str) -> int | None:
        """None for the host."""
        return self._tracks[key].gpu_index

    def append(self, snapshot: MachineSnapshot, run_rss_bytes: float | None = None, run_pss_bytes: float | None = None) -> None:
        """Add a sample.

        The same sample twice counts once. GPUs without samples for an hour are dropped.
        """
        for key, gpu_index, values in values_of(snapshot, run_rss_bytes, run_pss_bytes):
            self._track(key, gpu_index).append(snapshot.time, values)
        if len(self._tracks) > len(snapshot.gpus) + 1:
            horizon = snapshot.time - KEPT_SECONDS
            self._tracks = {key: t for key, t in self._tracks.items() if t.times and t.times[-1] >= horizon}

    def add(self, key: str, gpu_index: int | None, time: float, values: Sequence[float]) -> None:
        """Add one row of one source, in the order of its names. Unknown values are NaN."""
        self._track(key, gpu_index).append(time, values)

    def _track(self, key: str, gpu_index: int | None) -> Track:
        track = self._tracks.get(key)
        if track is None:
            track = self._tracks[key] = Track(series_of(key), gpu_index)
        track.gpu_index = gpu_index
        return track

    def series(self, key: str, name: str, since: float | None = None) -> list[tuple[float, float | None]]:
        """(time, value or None) from `since` on, oldest first.

        Raises KeyError for a series that does not exist.
        """
        track = self._tracks[key]
        pairs = zip(track.times, track.columns[name], strict=True)
        return [(t, None if v != v else v) for t, v in pairs if since is None or t >= since]

    def buckets(self, key: str, name: str) -> list[Bucket]:
        """The known values, each with the time for which it is valid."""
        track = self._tracks.get(key)
        if track is None:
            return []
        rows = zip(track.times, track.spans(), track.columns[name], strict=True)
        return [Bucket(t, span, v, v, v) for t, span, v in rows if v == v]

    def dump(self) -> Iterator[tuple[str, int | None, bytes, dict[str, bytes]]]:
        """(key, GPU index, times as doubles, columns as floats) of each source, for another process
        on this machine."""
        for key, track in self._tracks.items():
            yield key, track.gpu_index, track.times.tobytes(), {name: c.tobytes() for name, c in track.columns.items()}

    def load(self, key: str, gpu_index: int | None, times: bytes, columns: Mapping[str, bytes]) -> None:
        """Replace one source by what another process has dumped.

        Series that were not sent are unknown.
        """
        track = Track(series_of(key), gpu_index)
        track.times.frombytes(times)
        for name, column in track.columns.items():
            column.frombytes(columns[name] if name in columns else (array("f", [_NAN]) * len(track.times)).tobytes())
        if any(len(column) != len(track.times) for column in track.columns.values()):
            raise ValueError(f"history of {key}: columns of different lengths")
        self._tracks[key] = track


def resample(buckets: Iterable[Bucket], start: float, end: float, count: int) -> list[Bucket | None]:
    """Divide the time from `start` to `end` into `count` equal intervals, with minimum, mean over
    time and maximum of each.

    An interval without known values is None, so that charts draw no line across a gap.
    """
    width = (end - start) / count
    low, high = [math.inf] * count, [-math.inf] * count
    total, known = [0.0] * count, [0.0] * count
    for bucket in buckets:
        begun, over = max(bucket.time, start), min(bucket.time + bucket.seconds, end)
        if over <= begun:
            continue
        first, last = int((begun - start) / width), math.ceil((over - start) / width) - 1
        for position in range(min(first, count - 1), min(last, count - 1) + 1):
            share = min(over, start + (position + 1) * width) - max(begun, start + position * width)
            if share <= 0:
                continue
            low[position] = min(low[position], bucket.low)
            high[position] = max(high[position], bucket.high)
            total[position] += bucket.mean * share
            known[position] += share
    return [
        Bucket(start + n * width, width, low[n], total[n] / known[n], high[n]) if known[n] > 0 else None for n in range(count)
    ]
