"""Replays a run with its own clock: from the run's folder, or from a recorded stream of messages.

The folder has full snapshots of the machine for the run's last hour. Before that it has the reduced
history, which knows no processes. The demo plays a recorded stream.
"""

from __future__ import annotations

import asyncio
import gzip
import math
import sqlite3
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from memtop.supervisor import units, wire
from memtop.supervisor.diagnosis.values import Diagnosis
from memtop.supervisor.errors import MemtopError, RunFolderError
from memtop.supervisor.monitor.history import HOST, Bucket
from memtop.supervisor.monitor.values import GpuSample, HostSample, MachineSnapshot, band_of
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import Attempt, Ledger, StoredStep, reading_ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.run.speed import NEWEST, Done, speed
from memtop.supervisor.run.view import read_state
from memtop.tui.feed import Connected, Disconnected, FeedMessage, LogLines, ReplayPosition

SLOWEST, FASTEST = 1, 3600
_TICK_SECONDS = 0.2
_MINUTE = 60.0
# A full snapshot, or a row of the finest tier, stands for the time until the next one, seconds.
_SNAPSHOT_STANDS = 7.0
_NO_TIMES = "the log is not replayed because its lines have no times: memtop show prints its path"


class Clock:
    """The position of a replay between `start` and `end`, and its speed."""

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
        """Pause or continue."""
        self.jump_to(self.now)
        self.paused = not self.paused

    def change_speed(self, factor: float) -> None:
        """Multiply the speed, within 1x and 3600x."""
        self.jump_to(self.now)
        self.speed = min(FASTEST, max(SLOWEST, int(self.speed * factor)))

    def jump(self, seconds: float) -> None:
        self.jump_to(self.now + seconds)

    def jump_to(self, moment: float) -> None:
        self._base, self._since = min(self.end, max(self.start, moment)), self._monotonic()

    def position(self) -> str:
        """`00:03:11 of 00:41:02, 60x`."""
        return f"{units.duration(self.now - self.start)} of {units.duration(self.end - self.start)}, {self.speed_words()}"

    def speed_words(self) -> str:
        """`60x`, `paused` or `at its end`."""
        return "at its end" if self.now >= self.end else "paused" if self.paused else f"{self.speed}x"


class Recording(Protocol):
    """The past of a run."""

    start: float
    end: float

    def between(self, shown: float, now: float) -> list[FeedMessage]:
        """The messages that lead from one moment to a later one, seconds since the epoch.

        If `now` is before `shown`, or `shown` is minus infinity, all messages from the start.
        """


class LogRow(msgspec.Struct, frozen=True, tag="log"):
    """Lines that were added to the run's log."""

    rows: tuple[str, ...]


class Recorded(NamedTuple):
    """One message of a recorded stream and when it was sent, seconds since the epoch."""

    time: float
    message: wire.StateUpdate | wire.MetricRows | wire.EventRows | wire.ConfigurationRows | LogRow


class StreamRecording:
    """Everything that a supervisor sent to a dashboard, from a gzip file with one JSON array
    `[time, message]` per line.
    """

    def __init__(self, path: Path) -> None:
        decoder = msgspec.json.Decoder(Recorded)
        with gzip.open(path, "rb") as file:
            self.rows = [decoder.decode(line) for line in file]
        self._times = [row.time for row in self.rows]
        self.start, self.end = self._times[0], self._times[-1]

    def between(self, shown: float, now: float) -> list[FeedMessage]:
        first = 0 if now < shown else bisect_right(self._times, shown)
        messages = (row.message for row in self.rows[first : bisect_right(self._times, now)])
        return [LogLines(message.rows) if isinstance(message, LogRow) else message for message in messages]


class FolderRecording:
    """The past that a run's folder has stored.

    Reads files: create it in a thread. RunFolderError if it cannot be read.
    """

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
            # A run that is not over ends now. The extent's start is not used: it may be ten seconds
            # before the run.
            moments.append(extent[1])
        if not moments:
            raise RunFolderError(f"{folder.ledger_path}: empty: there is nothing to replay")
        self.start, self.end = min(self.last.created, *moments), max(moments)
        self._times = [step.time for step in self._steps]
        self._starts = {attempt.number: attempt.start_updates for attempt in self.attempts}
        self._best = list(_best_losses(self._steps, self._starts))

    def between(self, shown: float, now: float) -> list[FeedMessage]:
        messages: list[FeedMessage] = []
        if now < shown or shown == -math.inf:
            shown = -math.inf
            notice = wire.Event(id=-1, time=self.start, attempt=0, kind="warning", message=_NO_TIMES)
            messages.append(wire.EventRows(rows=(notice,)))
        messages += self.rows_between(shown, now)
        events = tuple(event for event in self.events if shown < event.time <= now)
        if events:
            messages.append(wire.EventRows(rows=events))
        if (rows := self.configurations(now)) != (self.configurations(shown) if shown != -math.inf else ()):
            messages.append(wire.ConfigurationRows(rows=rows))
        messages.append(wire.StateUpdate(run=self.state(now), machine=self.machine(now)))
        return messages

    # --- the run ----------------------------------------------------------------------------------

    def attempt(self, now: float) -> Attempt | None:
        """The newest attempt at that moment."""
        return next((a for a in reversed(self.attempts) if a.started <= now), None)

    def rows_between(self, shown: float, now: float) -> list[wire.MetricRows]:
        """The updates in between.

        A restart's first rows name the update from which earlier rows no longer count.
        """
        first, last = bisect_right(self._times, shown), bisect_right(self._times, now)
        before = self._steps[first - 1].attempt if first else None
        found: list[wire.MetricRows] = []
        for number, steps in groupby(self._steps[first:last], key=lambda step: step.attempt):
            start = self._starts.get(number)
            taken_back = None if number == before or start is None else start + 1
            found.append(wire.MetricRows(rows=tuple(step.metric() for step in steps), reset_from=taken_back))
        return found

    def configurations(self, now: float) -> tuple[wire.Configuration, ...]:
        """The configurations that had begun by then.

        The outcome of the newest is unknown unless its attempt was over.
        """
        begun = [row for row in self._configurations if row.started <= now]
        attempt = self.attempt(now)
        over = attempt is not None and attempt.ended is not None and attempt.ended <= now
        if begun and not over:
            begun[-1] = msgspec.structs.replace(begun[-1], until_update=None, outcome=None)
        return tuple(begun)

    def state(self, now: float) -> wire.RunState:
        """The run's state at that moment, from its attempts and steps.

        Values that were never stored are unknown.
        """
        attempt = self.attempt(now)
        last = self.last
        lasting = ("name", "folder", "created", "command", "program", "total_updates", "target_samples")
        base = {name: getattr(last, name) for name in lasting}
        if attempt is None:
            return wire.RunState(**base, state=wire.Phase.CREATED)
        place = bisect_right(self._times, now)
        own = [step for step in self._steps[max(0, place - NEWEST) : place] if step.attempt == attempt.number]
        step = own[-1].report if own else Step(update=attempt.start_updates or 0)
        logged = next((one.report for one in reversed(own) if one.report.logged), step)
        phase, reason = self._phase(attempt, bool(own), now)
        effective = attempt.settings.effective_batch if attempt.settings else last.effective_batch
        pace = speed([_done(one) for one in own], effective)
        rate = pace.samples_per_second
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
            effective_batch=effective,
            updates=step.update if own else attempt.start_updates,
            samples_seen=seen,
            epoch=step.epoch,
            loss=logged.loss,
            best_loss=self._best[place - 1] if own else None,
            learning_rate=step.learning_rate,
            gradient_norm=logged.gradient_norm,
            padding_fraction=step.padding_fraction,
            **pace._asdict(),
            step_seconds=step.step_seconds,
            split=wire.StepSplit(**{name: getattr(step, name) for name in wire.StepSplit.__struct_fields__}),
            eta_seconds=left / rate if alive and rate and left is not None else None,
            exit_status=None if alive else attempt.exit_status,
            ended_by=None if alive else attempt.ended_by,
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

    # --- the machine ------------------------------------------------------------------------------

    def machine(self, now: float) -> MachineSnapshot:
        """The machine at that moment; values that are no longer stored are unknown."""
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
        note = None if gpus else "the ledger has no GPU values for this moment"
        return MachineSnapshot(
            time=now,
            gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
            gpu_note=note,
            host=_host(found.get(HOST, {})),
        )


def _death(attempt: Attempt) -> wire.Proposal | None:
    """Why an attempt ran out of memory, from the ledger. The remedies are not stored."""
    try:
        diagnosis = msgspec.convert(attempt.diagnosis, Diagnosis)
    except msgspec.ValidationError:
        # The program never started: there is no diagnosis.
        return None
    words = "a replay is read-only: the remedies were not recorded"
    return wire.Proposal(diagnosis=diagnosis, waiting=words) if diagnosis.of_memory else None


def _at(series: dict[str, list[Bucket]], now: float) -> dict[str, float]:
    """The mean of the shortest bucket that contains the moment."""
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
        unknown={"processes": "the processes are stored only for a run's last hour"},
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


def _best_losses(steps: Iterable[StoredStep], starts: Mapping[int, int | None]) -> Iterator[float | None]:
    """The least loss up to each step, without those of updates that were taken back by then.
    `starts`: the update that each attempt resumed after."""
    least: list[tuple[int, float]] = []
    """Each update with a smaller loss than all before it that count."""
    attempt = None
    for step in steps:
        update, loss = step.report.update, step.report.loss
        if step.attempt != attempt:
            start = starts.get(step.attempt)
            first, attempt = update if start is None else min(start + 1, update), step.attempt
        else:
            first = update
        while least and least[-1][0] >= first:
            least.pop()
        if loss is not None and (not least or loss < least[-1][1]):
            least.append((update, loss))
        yield least[-1][1] if least else None


def _done(step: StoredStep) -> Done:
    return Done(step.time, step.report.update, step.report.samples_seen, step.report.tokens)


class ReplayFeed:
    """A run's past as a feed. It refuses every request.

    `load` reads the recording in a thread; `opens_at` is where the replay starts, as a share of the
    recording.
    """

    read_only = True

    def __init__(
        self,
        load: Callable[[], Recording],
        *,
        what: str = "replay",
        opens_at: float = 0.0,
        clock: Callable[[Recording], Clock] | None = None,
    ) -> None:
        self._load = load
        self._what = what
        self._opens_at = opens_at
        self._make_clock = clock or (lambda recording: Clock(recording.start, recording.end))
        self.label: str | None = what
        self.clock: Clock | None = None
        """None until the run has been read."""
        self._moved = asyncio.Event()

    def control(self, action: str) -> bool:
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
            recording = await asyncio.to_thread(self._load)
        except (MemtopError, OSError) as error:
            yield Disconnected(str(error))
            return
        clock = self.clock = self._make_clock(recording)
        clock.jump_to(clock.start + self._opens_at * (clock.end - clock.start))
        yield Connected()
        shown = -math.inf
        while True:
            now = clock.now
            # Sent even while nothing moves: a paused replay is not a feed that has stopped.
            line, short = f"{self._what}, {clock.position()}", f"{self._what.partition(':')[0]} {clock.speed_words()}"
            yield ReplayPosition(line, short, rewound=now < shown or shown == -math.inf)
            try:
                if now != shown:
                    for message in await asyncio.to_thread(recording.between, shown, now):
                        yield message
            except MemtopError as error:
                yield Disconnected(str(error))
                return
            shown = now
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), _TICK_SECONDS)
            except asyncio.TimeoutError:
                # No key was pressed: only the clock has moved.
                continue

    async def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        yield wire.Answer(id=make(0).id, outcome=wire.Outcome.REFUSED, message="a replay is read-only")
