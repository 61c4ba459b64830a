"""Plays a run from what its folder remembers: ledger, journals and log, in their true order, with a clock of its own.

Machine values are the full snapshots where the ledger still has them (a run's last hour), before that what its thinned-out
history knows: no processes then.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate, groupby
from pathlib import Path

import msgspec

from memtop.supervisor import units, wire
from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.errors import MemtopError, RunFolderError
from memtop.supervisor.monitor.bands import band_of
from memtop.supervisor.monitor.history import HOST, Bucket
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import Attempt, Ledger, StoredStep
from memtop.supervisor.run.record.view import read_state, reading_ledger
from memtop.supervisor.run.reports import Step
from memtop.tui.feed import Connected, Disconnected, FeedMessage, Replayed

SLOWEST, FASTEST = 1, 3600
_TICK_SECONDS = 0.2
_MINUTE = 60.0
_RATE_STEPS = 20
# A full snapshot stands for the time until the next one; so does a stretch of the finest tier.
_SNAPSHOT_STANDS = 7.0
_NO_TIMES = "the lines of its log carry no times, so the log is not replayed: memtop show tells where it is"


class Clock:
    """Where the replay stands between `start` and `end`, and how fast it goes."""

    def __init__(self, start: float, end: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.start, self.end = start, end
        self.speed = 1
        self.paused = False
        self._monotonic = monotonic
        self._base, self._since = start, monotonic()

    @property
    def now(self) -> float:
        passed = 0.0 if self.paused else (self._monotonic() - self._since) * self.speed
        return min(self.end, self._base + passed)

    def pause(self) -> None:
        """Pause, or go on."""
        self.jump_to(self.now)
        self.paused = not self.paused

    def change_speed(self, factor: float) -> None:
        """2 doubles, 0.5 halves, within 1x and 3600x."""
        self.jump_to(self.now)
        self.speed = min(FASTEST, max(SLOWEST, int(self.speed * factor)))

    def jump(self, seconds: float) -> None:
        self.jump_to(self.now + seconds)

    def jump_to(self, moment: float) -> None:
        self._base, self._since = min(self.end, max(self.start, moment)), self._monotonic()

    def line(self) -> str:
        """`replay, 00:03:11 of 00:41:02, 60x`."""
        state = "at its end" if self.now >= self.end else "paused" if self.paused else f"{self.speed}x"
        return f"replay, {units.duration(self.now - self.start)} of {units.duration(self.end - self.start)}, {state}"


class Recording:
    """All that a run's folder tells of its course. Made in a thread; RunFolderError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        folder = RunFolder(path)
        self._path = folder.ledger_path
        self.last = read_state(folder)
        with reading_ledger(folder) as ledger:
            if ledger is None:
                raise RunFolderError(f"{folder.ledger_path}: not there: the run never started, there is nothing to replay")
            self.attempts = ledger.attempts()
            self.events = ledger.events(newest=100_000)
            self._steps = ledger.steps()
            self._sources = ledger.sources()
            self._configurations = [record.configuration for record in ledger.configurations()]
            extent = ledger.extent()
        moments = [a.started for a in self.attempts] + [a.ended for a in self.attempts if a.ended is not None]
        moments += [event.time for event in self.events] + [step.time for step in self._steps]
        if extent is not None and (not moments or self.attempts[-1].ended is None):
            # Of a run that goes on: to now. Not its beginning: the first stretch begins up to ten seconds before the run.
            moments.append(extent[1])
        if not moments:
            raise RunFolderError(f"{folder.ledger_path}: empty: there is nothing to replay")
        self.start, self.end = min(self.last.created, *moments), max(moments)
        self._times = [step.time for step in self._steps]
        losses = (math.inf if step.report.loss is None else step.report.loss for step in self._steps)
        self._best = [None if loss == math.inf else loss for loss in accumulate(losses, min)]
        self._starts = {attempt.number: attempt.start_updates for attempt in self.attempts}

    # --- the run --------------------------------------------------------------------------------------------------------

    def attempt(self, now: float) -> Attempt | None:
        """The attempt that was the newest then."""
        return next((a for a in reversed(self.attempts) if a.started <= now), None)

    def rows_between(self, shown: float, now: float) -> list[wire.MetricRows]:
        """The updates that were done in between; those that a restart took back are named before its first."""
        first, last = bisect_right(self._times, shown), bisect_right(self._times, now)
        before = self._steps[first - 1].attempt if first else None
        found: list[wire.MetricRows] = []
        for number, steps in groupby(self._steps[first:last], key=lambda step: step.attempt):
            start = self._starts.get(number)
            taken_back = None if number == before or start is None else start + 1
            found.append(wire.MetricRows(rows=tuple(step.metric() for step in steps), reset_from=taken_back))
        return found

    def configurations(self, now: float) -> tuple[wire.Configuration, ...]:
        """Those that had begun by then; how the newest of them would go was not known yet, unless its attempt was over."""
        begun = [row for row in self._configurations if row.started <= now]
        attempt = self.attempt(now)
        over = attempt is not None and attempt.ended is not None and attempt.ended <= now
        if begun and not over:
            begun[-1] = msgspec.structs.replace(begun[-1], until_update=None, outcome=None)
        return tuple(begun)

    def state(self, now: float) -> wire.RunState:
        """The run as it was then, put together from its attempts and steps. What only lived in memory is unknown."""
        attempt = self.attempt(now)
        last = self.last
        lasting = ("name", "folder", "created", "command", "total_updates", "target_samples")
        base = {name: getattr(last, name) for name in lasting}
        if attempt is None:
            return wire.RunState(**base, state=wire.Phase.CREATED)
        place = bisect_right(self._times, now)
        own = [step for step in self._steps[max(0, place - _RATE_STEPS) : place] if step.attempt == attempt.number]
        step = own[-1].report if own else Step(update=attempt.start_updates or 0)
        phase, reason = self._phase(attempt, bool(own), now)
        rates = _rates(own)
        seen = step.samples_seen
        left = None if seen is None or last.target_samples is None else max(0, last.target_samples - seen)
        alive = not phase.final
        return wire.RunState(
            **base,
            state=phase,
            reason=reason,
            alive=alive,
            attempt=attempt.number,
            started=attempt.started,
            ended=None if alive else attempt.ended,
            settings=attempt.settings,
            effective_batch=attempt.settings.effective_batch if attempt.settings else None,
            updates=step.update if own else attempt.start_updates,
            samples_seen=seen,
            epoch=step.epoch,
            loss=step.loss,
            best_loss=self._best[place - 1] if place else None,
            learning_rate=step.learning_rate,
            gradient_norm=step.gradient_norm,
            samples_per_second=rates[0],
            tokens_per_second=rates[1],
            step_seconds=step.step_seconds,
            split=wire.StepSplit(**{name: getattr(step, name) for name in wire.StepSplit.__struct_fields__}),
            eta_seconds=left / rates[0] if alive and rates[0] and left is not None else None,
            exit_status=None if alive else attempt.exit_status,
            proposal=None if alive else _death(attempt),
        )

    def _phase(self, attempt: Attempt, stepped: bool, now: float) -> tuple[wire.Phase, str | None]:
        if attempt.ended is not None and attempt.ended <= now:
            if attempt.outcome == "restarted":
                return wire.Phase.RESTARTING, None
            why = (attempt.diagnosis or {}).get("summary")
            return wire.Phase(attempt.outcome or "failed"), why or (self.last.reason if attempt is self.attempts[-1] else None)
        if any(e.kind == "stop" and attempt.started <= e.time <= now for e in self.events if e.attempt == attempt.number):
            return wire.Phase.STOPPING, None
        return (wire.Phase.TRAINING if stepped else wire.Phase.STARTING), None

    # --- the machine ----------------------------------------------------------------------------------------------------

    def machine(self, now: float) -> MachineSnapshot:
        """The machine then; what is not known any more is unknown."""
        try:
            ledger = Ledger(self._path, read_only=True)
            try:
                whole = ledger.snapshot(now, now - _SNAPSHOT_STANDS)
                if whole is not None:
                    return whole
                found = {key: _at(ledger.history(key, now - 1, now + 1), now) for key in self._sources}
            finally:
                ledger.close()
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise RunFolderError(f"{self._path}: cannot be read: {error}") from None
        gpus = [_gpu(key, self._sources[key], values) for key, values in found.items() if key != HOST and values]
        note = None if gpus else "the ledger has no GPU values of this moment"
        return MachineSnapshot(
            time=now,
            gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
            gpu_note=note,
            host=_host(found.get(HOST, {})),
        )


def _death(attempt: Attempt) -> wire.Proposal | None:
    """Why an attempt died of memory, as the ledger has it; what could have been done was not kept."""
    try:
        diagnosis = msgspec.convert(attempt.diagnosis, Diagnosis)
    except msgspec.ValidationError:
        # Written before there were diagnoses, or by a program that never started: nothing of memory is in it.
        return None
    words = "a replay only shows: what could be done then was not recorded"
    return wire.Proposal(diagnosis=diagnosis, waiting=words) if diagnosis.of_memory else None


def _at(series: dict[str, list[Bucket]], now: float) -> dict[str, float]:
    """The mean of the finest stretch that contains the moment."""
    values = {}
    for name, buckets in series.items():
        around = [bucket for bucket in buckets if bucket.time <= now < bucket.time + bucket.seconds]
        if around:
            values[name] = min(around, key=lambda bucket: bucket.seconds).mean
    return values


def _gpu(key: str, index: int | None, values: dict[str, float]) -> GpuSample:
    used, fraction = values.get("used_bytes"), values.get("used_fraction")
    return GpuSample(
        index=index or 0,
        uuid=key,
        used_bytes=None if used is None else round(used),
        used_fraction=fraction,
        band=band_of(fraction),
        utilization_fraction=values.get("utilization_fraction"),
        power_watts=values.get("power_watts"),
        temperature_celsius=values.get("temperature_celsius"),
        unknown={"processes": "a replay knows the processes of a run's last hour only"},
    )


def _host(values: dict[str, float]) -> HostSample:
    used, swap, fraction = values.get("used_bytes"), values.get("swap_used_bytes"), values.get("used_fraction")
    return HostSample(
        used_bytes=None if used is None else round(used),
        used_fraction=fraction,
        band=band_of(fraction),
        swap_used_bytes=None if swap is None else round(swap),
        swap_in_bytes_per_second=values.get("swap_in_bytes_per_second"),
        pressure_fraction=values.get("pressure_fraction"),
        cpu_fraction=values.get("cpu_fraction"),
    )


def _rates(steps: Sequence[StoredStep]) -> tuple[float | None, float | None]:
    known = [step for step in steps if step.report.samples_seen is not None]
    if len(known) < 2 or known[-1].time <= known[0].time:
        return None, None
    seconds = known[-1].time - known[0].time
    tokens = sum(step.report.tokens or 0 for step in known[1:])
    samples = (known[-1].report.samples_seen or 0) - (known[0].report.samples_seen or 0)
    return samples / seconds, tokens / seconds if tokens else None


class ReplayFeed:
    """A run's past as a feed. Nothing can be asked of it."""

    read_only = True

    def __init__(self, run_folder: Path, *, clock: Callable[[Recording], Clock] | None = None) -> None:
        self._folder = run_folder
        self._make_clock = clock or (lambda recording: Clock(recording.start, recording.end))
        self.label: str | None = "replay"
        self.clock: Clock | None = None
        """None until the run has been read."""
        self._moved = asyncio.Event()

    def control(self, action: str) -> bool:
        """A key of the replay: pause, slower, faster, back, forward, start, end. False while there is nothing to control."""
        clock = self.clock
        if clock is None:
            return False
        actions: dict[str, Callable[[], None]] = {
            "pause": clock.pause,
            "slower": lambda: clock.change_speed(0.5),
            "faster": lambda: clock.change_speed(2),
            "back": lambda: clock.jump(-_MINUTE),
            "forward": lambda: clock.jump(_MINUTE),
            "start": lambda: clock.jump_to(clock.start),
            "end": lambda: clock.jump_to(clock.end),
        }
        actions[action]()
        self._moved.set()
        return True

    async def messages(self) -> AsyncIterator[FeedMessage]:
        try:
            recording = await asyncio.to_thread(Recording, self._folder)
        except (MemtopError, OSError) as error:
            yield Disconnected(str(error))
            return
        self.clock = self._make_clock(recording)
        yield Connected()
        shown = -math.inf
        while True:
            now = self.clock.now
            # Said even where nothing moves: a picture that stands still is not a feed that went silent.
            yield Replayed(self.clock.line(), rewound=now < shown or shown == -math.inf)
            try:
                if now != shown:
                    for message in await asyncio.to_thread(_between, recording, shown, now):
                        yield message
            except MemtopError as error:
                yield Disconnected(str(error))
                return
            shown = now
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), _TICK_SECONDS)
            except asyncio.TimeoutError:
                # Nothing was pressed: the clock alone has moved on.
                continue

    async def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        yield wire.Answer(
            id=make(0).id, outcome=wire.Outcome.REFUSED, message="a replay only shows: nothing can be asked of it"
        )


def _between(recording: Recording, shown: float, now: float) -> list[FeedMessage]:
    """What has to be told to come from the one moment to the other; going back, or at first, all of it."""
    messages: list[FeedMessage] = []
    if now < shown or shown == -math.inf:
        shown = -math.inf
        notice = wire.Event(id=-1, time=recording.start, attempt=0, kind="warning", message=_NO_TIMES)
        messages.append(wire.EventRows(rows=(notice,)))
    messages += recording.rows_between(shown, now)
    events = tuple(event for event in recording.events if shown < event.time <= now)
    if events:
        messages.append(wire.EventRows(rows=events))
    if (rows := recording.configurations(now)) != (recording.configurations(shown) if shown != -math.inf else ()):
        messages.append(wire.ConfigurationRows(rows=rows))
    messages.append(wire.StateUpdate(run=recording.state(now), machine=recording.machine(now)))
    return messages
