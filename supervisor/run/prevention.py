"""Acts before memory runs out: watches what grows, advises on speed, restarts a run whose leak would end it.

The supervisor feeds it with reports, ticks and samples; everything else here is decided in `supervisor/recovery`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memtop.supervisor.monitor.values import GpuSample, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory, placed, ranks_on
from memtop.supervisor.recovery.batch_trial import upper_bound
from memtop.supervisor.recovery.bottleneck import advise
from memtop.supervisor.recovery.configuration import configuration_key
from memtop.supervisor.recovery.forecast import Line, line_through, peaks_of
from memtop.supervisor.recovery.leaks import must_act
from memtop.supervisor.recovery.values import Forecast
from memtop.supervisor.run.measuring import Measuring
from memtop.supervisor.run.processes.host_memory import anonymous_bytes
from memtop.supervisor.run.reports import Pressure, Report, SettingsChanged, Step
from memtop.supervisor.run.trends import Member, TrendWatch
from memtop.supervisor.run.trials import Trials
from memtop.supervisor.wire import Advice, Change, Phase, Trend

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor

# Samples between two judgements of what a run spends its time on.
_ADVISE_EVERY = 5
# A program that has told no update for so long steps no optimizer that memtop knows.
_SILENT_SECONDS = 600.0


class Prevention:
    """Of one supervisor; every attempt begins anew."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._attempt: int | None = None
        self._trends = TrendWatch()
        self._measuring = Measuring()
        self._samples = 0
        self._acted = False
        self._saving: asyncio.Task[None] | None = None
        """Kept, since the loop forgets tasks that nobody holds."""
        self.advice: Advice | None = None
        self.trials = Trials(supervisor)

    @property
    def trends(self) -> tuple[Trend, ...]:
        return self._trends.trends

    def report(self, rank: int, report: Report) -> None:
        """A rank has reported something."""
        self._follow_attempt()
        self.trials.report(rank, report)
        if isinstance(report, Step):
            self._trends.step(rank, report)
            if rank == 0:
                self._measuring.step(report)
        elif isinstance(report, SettingsChanged) and rank == 0:
            self._measuring.changed()
        elif isinstance(report, Pressure):
            self._pressure(rank, report)

    def tick(self) -> None:
        """After new reports were read."""
        self._follow_attempt()
        if self._trends.wants_reading:
            members = self._members()
            self._trends.read(time.time(), members, anonymous_bytes([member.pid for member in members]))
        for message, data in self._trends.news():
            self._supervisor.event("trend", message, data)
        self._act()

    def sample(self) -> None:
        """The machine was sampled."""
        supervisor, machine = self._supervisor, self._supervisor.watch.machine
        if machine is None or supervisor.attempt is None or supervisor.phase.final:
            return
        self._follow_attempt()
        ranks = supervisor.progress.rank_memory()
        gpus = _own_gpus(machine, ranks)
        bases = supervisor.watch.gpu_base_bytes
        for line in self._trends.sample(
            machine, self._members(), ranks, bases, supervisor.watch.reading, loading=self._is_loading()
        ):
            supervisor.event("danger", line)
        self._measuring.sample(machine, gpus)
        self._samples += 1
        if self._samples % _ADVISE_EVERY == 0:
            self.advice = self._advise(machine, gpus)

    def _is_loading(self) -> bool:
        """Before its first update; a program that never tells one is taken to work after a while."""
        supervisor = self._supervisor
        if supervisor.phase is Phase.TRAINING:
            return False
        return supervisor.settings is not None or time.time() - (supervisor.started or 0.0) < _SILENT_SECONDS

    def _follow_attempt(self) -> None:
        attempt = self._supervisor.attempt
        number = None if attempt is None else attempt.number
        if number != self._attempt:
            self._attempt, self._acted = number, False
            self._trends, self._measuring, self.advice = TrendWatch(), Measuring(), None

    def _members(self) -> list[Member]:
        """The run's processes with their roles, as far as they have been seen."""
        ranks = {rank.pid: rank.rank for rank in self._supervisor.progress.rank_memory()}
        roles = {**self._supervisor.watch.roles, **dict.fromkeys(ranks, "rank")}
        return [Member(pid, role, ranks.get(pid)) for pid, role in roles.items()]

    def _pressure(self, rank: int, report: Pressure) -> None:
        """torch's allocator had to give its cache back and ask again: the step before the failure."""
        retries, update = report.allocation_retries, report.update
        text = f"update {update}: the allocator of rank {rank} was refused memory and had to empty its cache first"
        self._supervisor.event("pressure", f"{text} ({retries} times so far)", {"rank": rank, "retries": retries})

    # --- a leak that would end the run -------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Restart our own trainer before a leak ends it; of another program it is only told."""
        supervisor = self._supervisor
        if self._acted or supervisor.phase is not Phase.TRAINING or supervisor.pending is not None:
            return
        if supervisor.progress.unsaved is not None:
            return  # what it has learnt would be lost; that nothing can be saved is told already
        settings = supervisor.settings
        trend = must_act(
            self._trends.own,
            update=supervisor.progress.update,
            start_update=supervisor.progress.start_update,
            seconds=time.time() - (supervisor.started or time.time()),
            save_every=settings.save_every if settings is not None else None,
        )
        if trend is None:
            return
        self._acted = True
        if settings is None or supervisor.spec.on_oom != "auto":
            why = "it is your own program" if settings is None else f"--on-oom {supervisor.spec.on_oom}"
            supervisor.event("leak", f"{trend.message}; nothing is done about it: {why}")
            return
        supervisor.event("leak", f"{trend.message}; saving and restarting with the same settings before that")
        self._saving = asyncio.get_running_loop().create_task(self._save_and_restart(trend.message))

    async def _save_and_restart(self, why: str) -> None:
        """Only what is saved may be ended."""
        supervisor, attempt = self._supervisor, self._attempt
        answers = await supervisor.agents.call("checkpoint", {0})
        if self._attempt != attempt or supervisor.phase is not Phase.TRAINING or supervisor.pending is not None:
            return  # somebody has decided otherwise meanwhile
        if answers and answers[0].ok:
            supervisor.begin_restart(Change(reason=f"leak: {why}"))
            return
        refused = answers[0].message if answers else "the training process does not answer"
        supervisor.event("leak", f"not restarted: its state could not be saved: {refused}")

    # --- speed -------------------------------------------------------------------------------------------------------------

    def _advise(self, machine: MachineSnapshot, gpus: list[GpuSample]) -> Advice:
        supervisor = self._supervisor
        measured = self._measuring.measured(
            machine,
            gpus,
            samples_per_second=supervisor.progress.rates()[0],
            swap_in=self._trends.swap_in.value,
            roles=supervisor.watch.run_memory,
        )
        name = supervisor.folder.name
        return advise(measured, supervisor.settings, self.forecast, self.failed_batches(), run=name)

    def failed_batches(self) -> set[int]:
        """Micro-batches that ran out of memory in this run under settings like the present ones."""
        present, records = self._supervisor.settings, self._supervisor.survival.configurations.records
        return {
            settings.batch
            for record in records
            if record.died_of_memory and (settings := record.configuration.settings) is not None
            if present is not None and configuration_key(replace(settings, batch=present.batch)) == configuration_key(present)
        }

    def forecast(self, batch: int) -> Forecast | None:
        """The peak with another micro-batch, from what this run has been measured to need; None where nothing tells it."""
        supervisor = self._supervisor
        settings, survival, machine = supervisor.settings, supervisor.survival, supervisor.watch.machine
        if settings is None or machine is None:
            return None
        rows = survival.configurations.rows
        peaks = peaks_of(settings, [row.peak for row in rows if row.peak is not None], on_gpu=survival.on_gpu)
        total, taken = self._room(machine)
        own = next((peak for peak in reversed(peaks) if peak.batch == settings.batch and not peak.failed), None)
        # What others hold: all that is taken beyond what is the run's own.
        others = max(0, taken - own.bytes) if own is not None and taken is not None else None
        line = line_through(peaks)
        if isinstance(line, Line):
            return line.forecast(batch, total, others)
        if own is None or total is None:
            return None
        return upper_bound(own.bytes, own.batch, batch, total, others or 0)

    def _room(self, machine: MachineSnapshot) -> tuple[int | None, int | None]:
        """The size of what the run trains in, and how much of it is taken: of its fullest card, or of host memory."""
        if self._supervisor.survival.on_gpu:
            gpus = [
                gpu
                for gpu in _own_gpus(machine, self._supervisor.progress.rank_memory())
                if gpu.total_bytes and gpu.free_bytes is not None
            ]
            fullest = max(gpus, key=lambda gpu: gpu.used_fraction or 0.0, default=None)
            if fullest is None or fullest.total_bytes is None or fullest.free_bytes is None:
                return None, None
            return fullest.total_bytes, fullest.total_bytes - fullest.free_bytes
        host = machine.host
        return (host.total_bytes if host.limit_bytes is None else host.limit_bytes), host.used_bytes


def _own_gpus(machine: MachineSnapshot, ranks: Iterable[RankMemory]) -> list[GpuSample]:
    """The cards that the run's ranks are on."""
    where = placed(ranks, machine.gpus)
    return [gpu for gpu in machine.gpus if ranks_on(gpu, where)]
