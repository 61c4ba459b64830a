"""The view-model: one frozen value with everything that the dashboard shows.

Only `fold` makes the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import msgspec

from memtop.supervisor import units, wire
from memtop.supervisor.monitor.history import gpu_key
from memtop.supervisor.monitor.strays import forbidden, overruled, rows_of
from memtop.supervisor.monitor.values import Band, GpuProcess, GpuSample, HostSample, MachineSnapshot, held_by
from memtop.supervisor.monitor.vram import RankMemory, VramParts, placed, ranks_on, step_peak_bytes
from memtop.supervisor.monitor.vram import vram_parts as split
from memtop.supervisor.recovery.values import Forecast
from memtop.tui.feed import Connected, Disconnected, FeedMessage, Followed, LogLines, Others, ReplayPosition

READING = "reading the run"
HISTORY_LENGTH = 600
METRICS_KEPT = 20_000
EVENTS_KEPT = 500
LOG_LINES_KEPT = 2_000
_TREND_SECONDS = 120.0
# A gap without samples: longer than this many seconds, and than this many usual intervals.
_GAP_SECONDS, _GAP = 5.0, 4.0


class ConnectionState(Enum):
    """The state of the feed's connection."""

    WAITING = "waiting"
    CONNECTED = "connected"
    GONE = "gone"
    ENDED = "ended"


class Moment(NamedTuple):
    """Past values of a GPU or of the host."""

    time: float
    fraction: float | None
    """The share of its memory that was taken."""
    band: Band = Band.UNKNOWN
    """The band in force then."""
    utilization: float | None = None
    """0 to 1; None for the host."""


@dataclass(frozen=True, eq=False)
class Store:
    """Everything on the screen. Compared by identity: each fold gives a new one."""

    read_only: bool = False
    label: str | None = None
    """A note on all values for the header, e.g. "replay, 00:03:11 of 00:41:02, 60x"."""
    short_label: str | None = None
    """The same for a narrow terminal."""
    link: ConnectionState = ConnectionState.WAITING
    link_reason: str = "waiting for the first sample"
    run: wire.RunState | None = None
    machine: MachineSnapshot | None = None
    metrics: tuple[wire.Metric, ...] = ()
    configurations: tuple[wire.Configuration, ...] = ()
    """Oldest first; the last is the current one."""
    events: tuple[wire.Event, ...] = ()
    log: tuple[str, ...] = ()
    log_count: int = 0
    """The number of log lines received so far, including those no longer kept."""
    gpu_history: Mapping[str, tuple[Moment, ...]] = field(default_factory=dict)
    gpu_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """The most that was taken since the dashboard started (see `GpuSample.taken_bytes`), by GPU.
    Includes the peaks within updates, which the run reports."""
    host_history: tuple[Moment, ...] = ()
    host_peak_fraction: float | None = None
    followed: Followed | None = None
    others: tuple[str, ...] = ()
    """The training programs that memtop did not start, a line for each."""
    replaying: bool = False
    """The values are from the past, and the replay has its own clock."""
    all_pids_visible: bool = False
    """True if this process sees every process of the machine."""
    quiet_seconds: float = 0.0
    """For how long no message has arrived, seconds; 0 while messages arrive as usual."""
    events_wanted: bool = False
    """On a small terminal: events instead of the log."""
    selected_gpu: int = 0
    """Position of the GPU whose details are shown if all GPUs share one panel."""

    @property
    def now(self) -> float | None:
        """The time of the newest sample, seconds since the epoch."""
        return None if self.machine is None else self.machine.time

    @property
    def is_being_read(self) -> bool:
        """Whether the run's own values have not come yet."""
        return self.run is not None and self.link is ConnectionState.WAITING

    @property
    def proposal(self) -> wire.Proposal | None:
        """The diagnosis and remedies while the run is failed or waits for a restart; None after it
        has started again.
        """
        if self.run is None or not (self.run.state.final or self.run.state is wire.Phase.RESTARTING):
            return None
        return self.run.proposal

    @property
    def gpus(self) -> tuple[GpuSample, ...]:
        return () if self.machine is None else self.machine.gpus

    @property
    def host(self) -> HostSample:
        return HostSample() if self.machine is None else self.machine.host


def machine_in(message: FeedMessage) -> MachineSnapshot | None:
    """The snapshot that a message brings, if any."""
    if isinstance(message, MachineSnapshot):
        return message
    return message.machine if isinstance(message, wire.StateUpdate) else None


def fold(store: Store, message: FeedMessage) -> Store:
    """The store after one message. Pure."""
    if isinstance(message, wire.StateUpdate):
        # A new state proves that the connection works.
        after = replace(store, run=message.run, quiet_seconds=0.0)
        if message.machine is not None:
            return _with_machine(after, message.machine)
        return replace(after, gpu_peak_bytes=_peaks(after, store.gpu_peak_bytes))
    if isinstance(message, MachineSnapshot):
        return _with_machine(replace(store, quiet_seconds=0.0), message)
    if isinstance(message, wire.MetricRows):
        return replace(store, metrics=_with_metrics(store.metrics, message))
    if isinstance(message, wire.EventRows):
        known = {event.id for event in store.events}
        fresh = tuple(event for event in message.rows if event.id not in known)
        return replace(store, events=(*store.events, *fresh)[-EVENTS_KEPT:])
    if isinstance(message, LogLines):
        log = (*store.log, *message.rows)[-LOG_LINES_KEPT:]
        return replace(store, log=log, log_count=store.log_count + len(message.rows))
    if isinstance(message, Followed):
        return replace(store, followed=message)
    if isinstance(message, Others):
        return replace(store, others=message.rows)
    if isinstance(message, ReplayPosition):
        kept = {name: getattr(store, name) for name in ("read_only", "link", "events_wanted", "all_pids_visible")}
        begun = Store(**kept)
        return replace(
            begun if message.rewound else store,
            label=message.line,
            short_label=message.short,
            replaying=True,
            quiet_seconds=0.0,
        )
    if isinstance(message, wire.ConfigurationRows):
        return replace(store, configurations=message.rows)
    if isinstance(message, wire.HistoryRows):
        # Only the dashboard's `History` keeps these.
        return store
    if isinstance(message, Connected):
        return replace(store, link=ConnectionState.CONNECTED, link_reason="", quiet_seconds=0.0)
    if isinstance(message, Disconnected):
        link = ConnectionState.ENDED if message.ended else ConnectionState.GONE
        return replace(store, link=link, link_reason=message.reason, quiet_seconds=0.0)
    raise TypeError(f"not a feed message: {message!r}")


def _with_metrics(rows: tuple[wire.Metric, ...], message: wire.MetricRows) -> tuple[wire.Metric, ...]:
    if message.reset_from is not None:
        rows = tuple(row for row in rows if row.update < message.reset_from)
    if rows and message.rows and message.rows[0].update <= rows[-1].update:
        # After a reconnect the stream repeats updates, and a loss that is read from a program's
        # output comes after the agent's report.
        merged = {row.update: row for row in rows}
        for row in message.rows:
            merged[row.update] = _filled(row, merged.get(row.update))
        return tuple(merged[update] for update in sorted(merged))[-METRICS_KEPT:]
    return (*rows, *message.rows)[-METRICS_KEPT:]


def _filled(row: wire.Metric, before: wire.Metric | None) -> wire.Metric:
    """The newer row of an update, and what only the one before has."""
    if before is None or before.attempt != row.attempt:
        return row
    missing = {name: getattr(before, name) for name in wire.Metric.__struct_fields__ if getattr(row, name) is None}
    return msgspec.structs.replace(row, **missing)


def _with_machine(store: Store, machine: MachineSnapshot) -> Store:
    history: dict[str, tuple[Moment, ...]] = {}
    for gpu in machine.gpus:
        key = gpu_key(gpu)
        past = store.gpu_history.get(key, ())
        history[key] = _longer(past, Moment(machine.time, gpu.used_fraction, gpu.band, gpu.utilization_fraction))
    store = replace(store, machine=machine, gpu_history=history)
    host = machine.host.used_fraction
    host_peak = store.host_peak_fraction
    if host is not None:
        host_peak = max(host, host_peak or 0.0)
    return replace(
        store,
        gpu_peak_bytes=_peaks(store, store.gpu_peak_bytes),
        host_history=_longer(store.host_history, Moment(machine.time, host, machine.host.band)),
        host_peak_fraction=host_peak,
    )


def _longer(past: tuple[Moment, ...], newest: Moment) -> tuple[Moment, ...]:
    """The history with the newest value, after one unknown value for each missing sample."""
    missing: tuple[Moment, ...] = ()
    if len(past) > 1:
        usual = past[-1].time - past[-2].time
        quiet = newest.time - past[-1].time
        if usual > 0 and quiet > max(_GAP_SECONDS, _GAP * usual):
            count = min(HISTORY_LENGTH, round(quiet / usual) - 1)
            missing = tuple(Moment(past[-1].time + usual * n, None) for n in range(1, count + 1))
    return (*past, *missing, newest)[-HISTORY_LENGTH:]


def seconds_until_full(history: tuple[Moment, ...]) -> float | None:
    """Seconds until the memory is full at the growth of the last two minutes; None if it does not
    grow clearly.
    """
    known = [(m.time, m.fraction) for m in history if m.fraction is not None]
    known = [k for k in known if k[0] >= known[-1][0] - _TREND_SECONDS]
    if len(known) < 10 or known[-1][1] - known[0][1] < 0.01:
        return None
    mean_time = sum(t for t, _ in known) / len(known)
    mean_value = sum(v for _, v in known) / len(known)
    spread = sum((t - mean_time) ** 2 for t, _ in known)
    if spread <= 0:
        return None
    slope = sum((t - mean_time) * (v - mean_value) for t, v in known) / spread
    if slope <= 0:
        return None
    seconds = max(0.0, 1 - known[-1][1]) / slope
    return seconds if seconds < 86400 else None


def vram_parts(store: Store, gpu: GpuSample) -> VramParts:
    """The memory of one GPU in parts that add up; an unknown part is None with a reason."""
    run, machine = store.run, store.machine
    return split(
        gpu,
        _ranks(store),
        run=run.name if run is not None else None,
        base_bytes=run.gpu_base_bytes.get(gpu.uuid or "") if run is not None else None,
        job_names={job.key: job.name for job in machine.jobs} if machine is not None else {},
        all_pids_visible=store.all_pids_visible,
    )


def foreseen_on(store: Store, gpu: GpuSample) -> Forecast | None:
    """The peak that was predicted for the run's present configuration, on a GPU that it uses."""
    run, rows = store.run, store.configurations
    if run is None or not run.alive or not rows or gpu.uuid not in {rank.device_uuid for rank in run.ranks}:
        return None
    return rows[-1].foreseen


def step_peak(store: Store, gpu: GpuSample) -> int | None:
    """The most that was taken on this GPU during the newest update."""
    ranks = ranks_on(gpu, _ranks(store))
    return step_peak_bytes(vram_parts(store, gpu), ranks) if ranks else None


def trains_on_cpu(store: Store) -> bool:
    """Whether all processes of the run have reported the memory of an update, and neither they nor
    the driver a GPU."""
    run = store.run
    if run is None or not run.alive or not run.ranks or any(rank.rss_bytes is None for rank in run.ranks):
        return False
    return all(rank.device_uuid is None and rank.reserved_bytes is None for rank in placed(run.ranks, store.gpus))


def _ranks(store: Store) -> list[RankMemory]:
    if store.run is None:
        return []
    # A rank on the CPU reports no device.
    on_gpus = [rank for rank in store.run.ranks if rank.device_uuid is not None or rank.reserved_bytes is not None]
    return placed(on_gpus, store.gpus)


def _peaks(store: Store, before: Mapping[str, int]) -> dict[str, int]:
    peaks = dict(before)
    for gpu in store.gpus:
        known = [value for value in (gpu.taken_bytes, step_peak(store, gpu)) if value is not None]
        if known:
            peaks[gpu_key(gpu)] = max(peaks.get(gpu_key(gpu), 0), *known)
    return peaks


class Holder(NamedTuple):
    """One process on all the GPUs that it uses."""

    process: GpuProcess
    gpu_indices: tuple[int, ...]
    used_bytes: int | None
    """None if a part of it is not known."""
    at_least_bytes: int | None
    """What is known of it."""

    @property
    def memory(self) -> str:
        """`2.0 GiB`, or `≥ 2.0 GiB` if not all of it is known."""
        return units.size(self.used_bytes) if self.used_bytes is not None else units.at_least(self.at_least_bytes)

    @property
    def where(self) -> str:
        """`0`, or `0,1`."""
        return ",".join(map(str, self.gpu_indices))


def holders(machine: MachineSnapshot | None) -> tuple[Holder, ...]:
    """All GPU processes, each once: strays first, then by memory.

    A process is choosable if it is so on all its GPUs.
    """
    reasons = forbidden(rows_of(machine)) if machine else {}
    found: dict[tuple[int, float | None], list[tuple[int, GpuProcess]]] = {}
    for gpu in machine.gpus if machine else ():
        for process in gpu.processes:
            found.setdefault((process.pid, process.started), []).append((gpu.index, process))
    rows = []
    for seen in found.values():
        held = held_by([process for _, process in seen])
        where = tuple(index for index, _ in seen)
        rows.append(Holder(overruled(seen[0][1], reasons), where, held.used_bytes, held.at_least_bytes))
    return tuple(sorted(rows, key=lambda h: (not h.process.stray, -(h.at_least_bytes or 0), h.process.pid)))


def candidates(store: Store) -> tuple[Holder, ...]:
    """All GPU processes except those of this dashboard's run, which Stop ends."""
    own = store.run.name if store.run is not None and store.run.alive else None
    return tuple(h for h in holders(store.machine) if own is None or h.process.run != own or h.process.stray)
