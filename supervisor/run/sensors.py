"""Reads the world for the rules: the machine, the run's processes, its memory over time,
the medians of its newest updates, and whether it stands still.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

from memtop.presets.parameters import stored_config
from memtop.supervisor.monitor.processes.proc import ProcessId, has_loaded_torch, is_stopped
from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.recovery.bottleneck import WARM_UP, Measured
from memtop.supervisor.run.events import NotHeard, Queue, Sampled, StoodStill, Tick, WorkersStarted
from memtop.supervisor.run.machine_watch import MachineWatch
from memtop.supervisor.run.model import AttemptStage, Model
from memtop.supervisor.run.pending_restart import free_bytes
from memtop.supervisor.run.post_mortem.evidence import AttemptEvidence
from memtop.supervisor.run.post_mortem.examine import StallWatch
from memtop.supervisor.run.post_mortem.log_end import dead_worker, worker_restarts
from memtop.supervisor.run.processes.agent import SILENT_SECONDS, not_heard
from memtop.supervisor.run.processes.attempt import RunningAttempt
from memtop.supervisor.run.processes.host_memory import anonymous_bytes
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.profile_checkpoints import being_saved, place_of
from memtop.supervisor.run.reports import Report, SettingsChanged, Step
from memtop.supervisor.run.rules import prevention, stopping
from memtop.supervisor.run.trends import Member, TrendWatch
from memtop.supervisor.run_memory import RoleMemory
from memtop.supervisor.wire import Phase

# Samples between two summaries of what a run spends its time on.
_ADVISE_EVERY = 5
# How often to look why a program has reported nothing yet.
_SILENCE_SECONDS = 60.0
_LOOK_SECONDS = 3.0
"""How long a stop waits to know whether the program saves at the moment."""


class Sensors:
    """The sensors of one supervisor; they are reset for each attempt."""

    def __init__(self, folder: RunFolder, model: Callable[[], Model], monotonic: Callable[[], float]) -> None:
        """`model` returns the present model of the run."""
        self.attempt: RunningAttempt | None = None
        self.evidence: AttemptEvidence | None = None
        self.machine_watch = MachineWatch(folder.path.parent, self._find_members, self._rank_memory)
        self._folder = folder
        self._model = model
        self._monotonic = monotonic
        self._stall: StallWatch | None = None
        self._trends, self._measurements = TrendWatch(), MeasurementWindow()
        self._look: asyncio.Future[str | None] | None = None
        """At what the program saves while it is being stopped."""
        self._looks_since = 0.0
        self._saving_now: str | None = ""
        """What the last look has found; empty: there was none yet."""
        self._samples = 0
        self._model_config: dict[str, Any] | None = None
        """That of the attempt's model; None: not read yet."""
        self._silence_due = _SILENCE_SECONDS
        self._torch_loaded = False
        self._not_heard: NotHeard | None = None
        self._knows_workers = False
        """Whether this supervisor has seen how often the launcher has started the workers."""

    def follow(self, attempt: RunningAttempt, started: float, *, new: bool) -> None:
        """Watch this attempt from now on. `new`: it was started just now."""
        self.attempt = attempt
        self.evidence = AttemptEvidence(attempt.folder, started, self.machine_watch.machine if new else None)
        self._stall = StallWatch(attempt.log_path, self._monotonic)
        self._trends, self._measurements = TrendWatch(), MeasurementWindow()
        self._silence_due, self._not_heard = _SILENCE_SECONDS, None
        self._model_config = None
        self._torch_loaded = False
        self._knows_workers = new

    def reported(self, rank: int, report: Report) -> None:
        if isinstance(report, Step):
            self._trends.step(rank, report)
            if rank == 0:
                self._measurements.step(report)
        elif isinstance(report, SettingsChanged) and rank == 0:
            self._measurements.changed()

    def look(self) -> None:
        """Between samples: the program may enter another cgroup and be killed there within a
        second.
        """
        trainer = self.attempt.trainer if self.attempt is not None else None
        if self.evidence is not None and trainer is not None:
            self.evidence.look(trainer.pid)

    def workers_started(self) -> WorkersStarted | None:
        """The launcher has started the workers again since the last call, or before this supervisor
        took over."""
        attempt, model = self.attempt, self._model()
        if attempt is None or model.settings is not None:
            return None  # memtop itself starts the ranks of its trainer, once
        first, self._knows_workers = not self._knows_workers, True
        restarts = worker_restarts(attempt.folder)
        if restarts <= model.progress.restarts:
            return None
        return WorkersStarted(restarts=restarts, dead=dead_worker(attempt.log_path), known=first)

    def tick(self, *, watched: bool, alive: bool, queue: Queue | None) -> Tick:
        model, attempt = self._model(), self.attempt
        if self._trends.wants_reading:
            members = self._members(model)
            self._trends.read(time.time(), members, anonymous_bytes([member.pid for member in members]))
        waits_for_disk = model.restart is not None and model.restart.waiting.disk_bytes is not None
        trainer = attempt.trainer if alive and attempt is not None else None
        return Tick(
            watched=watched,
            alive=alive,
            trainer_pid=trainer.pid if trainer is not None else None,
            stopped=() if trainer is None else self._stopped(trainer.pid, model),
            trends=self._trends.trends,
            own_trends=self._trends.own,
            trend_news=tuple(self._trends.news()),
            torch_loaded=self._has_loaded_torch(model),
            not_heard=self._heard_nothing(model),
            disk_free=free_bytes(self._folder.path) if waits_for_disk else None,
            queue=queue,
            saving=self._saving(model),
        )

    def _saving(self, model: Model) -> str | None:
        """Looked up in a thread while the first signal of a stop is due: a disk may be slow, and
        one that does not answer holds up no stop."""
        now = self._monotonic()
        due = model.ladder is not None and model.grip is not None and model.ladder.waits_for_save(now)
        place = place_of(model.grip) if due and model.grip is not None else None
        if place is None:
            self._look, self._saving_now = None, ""
            return None
        if self._look is not None and self._look.done():
            self._saving_now, self._look = self._look.result(), None
        if self._look is None:
            self._look, self._looks_since = asyncio.get_running_loop().run_in_executor(None, being_saved, place), now
        return self._saving_now if now - self._looks_since < _LOOK_SECONDS else None

    def _has_loaded_torch(self, model: Model) -> bool:
        """Looked up while the program starts, until a process has."""
        if not self._torch_loaded and model.phase is Phase.STARTING and self.attempt is not None:
            self._torch_loaded = any(has_loaded_torch(process.pid) for process in self.attempt.processes())
        return self._torch_loaded

    def _stopped(self, trainer: int, model: Model) -> tuple[int, ...]:
        """Which of the program and its ranks are stopped. The program reports the pids of its
        ranks, so they are checked against the processes found."""
        ranks = self.machine_watch.member_pids.intersection(rank.pid for rank in model.progress.ranks.values())
        return tuple(pid for pid in sorted({trainer, *ranks}) if is_stopped(pid))

    def _heard_nothing(self, model: Model) -> NotHeard | None:
        """Why a user's program has reported nothing; read again once a minute."""
        attempt, program = model.attempt, self.attempt
        running = attempt is not None and attempt.stage is AttemptStage.RUNNING
        if not running or attempt is None or program is None or model.settings is not None or model.progress.heard:
            return None
        seconds = self._monotonic() - attempt.since
        # If the program prints its steps, it should have reported them, too.
        prints = model.output is not None and self._silence_due == _SILENCE_SECONDS
        if prints or seconds >= self._silence_due:
            self._silence_due = seconds + _SILENCE_SECONDS
            self._not_heard = not_heard(program.processes(), seconds)
        return self._not_heard

    def sampled(self, *, keep: bool) -> Sampled:
        """The event for the newest sample. `keep`: it goes into the ledger."""
        model, watch = self._model(), self.machine_watch
        machine = watch.machine
        assert machine is not None
        dangers: list[str] = []
        measured: Measured | None = None
        if self.attempt is not None and not model.phase.final:
            trainer = self.attempt.trainer
            if self.evidence is not None and trainer is not None and model.restart is None:
                self.evidence.sample(machine, watch.member_pids, trainer.pid)
            ranks, members = model.progress.rank_memory(), self._members(model)
            gpus = prevention.own_gpus(machine, ranks)
            bases, loading = watch.gpu_base_bytes, self._is_loading(model)
            dangers = self._trends.sample(machine, members, ranks, bases, watch.reading, loading=loading)
            self._measurements.sample(machine, gpus, watch.rank_cores, watch.other_cpu_fraction)
            self._samples += 1
            if self._samples % _ADVISE_EVERY == 0:
                rate, swap_in = model.progress.speed().samples_per_second, self._trends.swap_in.value
                roles = watch.run_memory
                measured = self._measurements.medians(machine, gpus, samples_per_second=rate, swap_in=swap_in, roles=roles)
        return Sampled(
            machine=machine,
            rss_bytes=watch.rss_bytes,
            run_memory=watch.run_memory,
            pss_bytes=dict(watch.pss_bytes),
            gpu_base_bytes=watch.gpu_base_bytes,
            crossings=tuple(watch.crossings()),
            dangers=tuple(dangers),
            measured=measured,
            model_config=self._config_of(model),
            keep=keep,
        )

    def _config_of(self, model: Model) -> dict[str, Any]:
        """The configuration of the model that trains on a GPU; empty if it is not known, or not
        needed."""
        if not model.on_gpu or model.settings is None:
            return {}
        if self._model_config is None:
            self._model_config = stored_config(model.settings) or {}
        return self._model_config

    def stood_still(self, read_reports: Callable[[], None]) -> StoodStill | None:
        """The event of a program that ran out of memory and hangs, or None.

        `read_reports` reads all that have been written so far."""
        if self._stall is None or not stopping.may_stand_still(self._model()):
            return None
        if self._stall.read():
            read_reports()
        model = self._model()
        progress, settings = model.progress, model.settings
        words = self._stall.look(
            progress.heard,
            progress.step_seconds,
            longest_pause=progress.longest_pause,
            aside=settings is None or progress.is_aside(settings),
        )
        return StoodStill(words) if words is not None and self._stall.is_of_memory() else None

    def _is_loading(self, model: Model) -> bool:
        """Whether the program has not done an update yet. If it reports none, assume after a while
        that it trains.
        """
        if model.phase is Phase.TRAINING:
            return False
        since = model.attempt.since if model.attempt is not None else 0.0
        return model.settings is not None or self._monotonic() - since < SILENT_SECONDS

    def _members(self, model: Model) -> list[Member]:
        """The run's processes with their roles, as far as they have been seen."""
        ranks = {rank.pid: rank.rank for rank in model.progress.rank_memory()}
        roles = {**self.machine_watch.roles, **dict.fromkeys(ranks, "rank")}
        return [Member(pid, role, ranks.get(pid)) for pid, role in roles.items()]

    def _find_members(self) -> list[ProcessId]:
        return self.attempt.processes() if self.attempt is not None and not self._model().phase.final else []

    def _rank_memory(self) -> tuple[int, tuple[RankMemory, ...]]:
        model = self._model()
        return model.number, model.progress.rank_memory()


_UPDATES, _SAMPLES = 20, 30
_PARTS = ("step_seconds", "data_wait_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")


class _Reading(NamedTuple):
    utilization: float | None
    sm_active: float | None
    power: float | None
    taken: float | None
    pressure: float | None
    rank_cores: float | None
    other_cpu: float | None


class MeasurementWindow:
    """The newest updates and samples under one configuration of one attempt; `changed` starts
    again."""

    def __init__(self) -> None:
        self._updates: deque[Step] = deque(maxlen=_UPDATES)
        self._samples: deque[_Reading] = deque(maxlen=_SAMPLES)
        self._skip = WARM_UP
        self._sample_is_late = False
        """Whether the next sample begins before the updates that count."""
        self._at_start: int | None = None

    def changed(self) -> None:
        """The settings have changed: discard the updates measured before."""
        self._updates.clear()
        self._skip = WARM_UP

    def step(self, report: Step) -> None:
        """Rank 0 has finished an update."""
        if self._skip > 0:
            # The samples so far are of the start of the program.
            self._skip -= 1
            self._samples.clear()
            self._sample_is_late = True
        elif report.step_seconds:
            self._updates.append(report)

    def sample(
        self,
        machine: MachineSnapshot,
        gpus: Iterable[GpuSample],
        rank_cores: float | None = None,
        other_cpu: float | None = None,
    ) -> None:
        """Take a sample of the machine; `gpus` are those that the run trains on, `rank_cores` the
        CPU cores that one of its ranks keeps busy, `other_cpu` the share of the machine's CPU
        (0-1) that other programs use."""
        gpus = list(gpus)
        if self._at_start is None:
            self._at_start = machine.host.available_bytes
        if self._sample_is_late:
            self._sample_is_late = False
            return
        self._samples.append(
            _Reading(
                utilization=_least(gpu.utilization_fraction for gpu in gpus),
                sm_active=_least(gpu.details.sm_active_fraction for gpu in gpus),
                power=_least(_power(gpu) for gpu in gpus),
                taken=max((gpu.used_fraction for gpu in gpus if gpu.used_fraction is not None), default=None),
                pressure=machine.host.pressure_fraction,
                rank_cores=rank_cores,
                other_cpu=other_cpu,
            )
        )

    def medians(
        self,
        machine: MachineSnapshot,
        gpus: Iterable[GpuSample],
        *,
        samples_per_second: float | None,
        swap_in: float | None,
        roles: Iterable[RoleMemory] = (),
    ) -> Measured:
        """The medians. `swap_in`: the sustained rate in bytes per second, None if not known."""
        gpus, host = list(gpus), machine.host
        workers = next((role for role in roles if role.role == "loader worker"), None)
        each = None if workers is None or workers.uss_bytes is None else workers.uss_bytes // workers.processes
        free = [gpu.free_bytes for gpu in gpus if gpu.free_bytes is not None]
        return Measured(
            updates=len(self._updates),
            on_gpu=bool(gpus),
            **{name: _median(getattr(update, name) for update in self._updates) for name in _PARTS},
            samples_per_second=samples_per_second,
            utilization_fraction=self._of(lambda sample: sample.utilization),
            sm_active_fraction=self._of(lambda sample: sample.sm_active),
            power_fraction=self._of(lambda sample: sample.power),
            gpu_fraction=self._of(lambda sample: sample.taken),
            gpu_free_bytes=min(free) if free else None,
            host_fraction=host.used_fraction,
            host_total_bytes=host.total_bytes if host.limit_bytes is None else host.limit_bytes,
            host_used_bytes=host.used_bytes,
            available_at_start_bytes=self._at_start,
            swap_fraction=host.swap_fraction,
            swap_in_bytes_per_second=swap_in,
            pressure_fraction=self._of(lambda sample: sample.pressure),
            rank_cores=self._of(lambda sample: sample.rank_cores),
            other_cpu_fraction=self._of(lambda sample: sample.other_cpu),
            workers=0 if workers is None else workers.processes,
            worker_bytes=each,
            cores=host.cpu_count,
        )

    def _of(self, value: Callable[[_Reading], float | None]) -> float | None:
        return _median(value(sample) for sample in self._samples)


def _power(gpu: GpuSample) -> float | None:
    if gpu.power_watts is None or not gpu.power_limit_watts:
        return None
    return gpu.power_watts / gpu.power_limit_watts


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
