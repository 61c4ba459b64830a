"""The training of one attempt, folded from its reports."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from memtop.presets.schema import Settings
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.run.reports import (
    BatchSearched,
    End,
    Evaluated,
    Hello,
    LoopFound,
    Offers,
    Oom,
    PhaseChanged,
    Plan,
    Report,
    Saved,
    SaveFailed,
    SettingsChanged,
    Spiked,
    Step,
    Written,
)
from memtop.supervisor.run.speed import NEWEST, Done, Speed, speed
from memtop.supervisor.wire import Checkpoint, StepSplit

# A program may survive many allocation failures; the newest explain its end.
_FAILURES_KEPT = 256


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process."""

    pid: int | None = None
    device_uuid: str | None = None
    """The GPU that it trains on; None on the CPU, or until a report names it."""
    step: Step | None = None
    """The rank's newest update."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks have reported. Values are None until a report gives them."""

    step: Step | None = None
    """Rank 0's newest update."""
    plan: Plan | None = None
    loop: LoopFound | None = None
    start: int | None = None
    """The update that the attempt resumed after, by its first plan: a program may train several
    times, one after another."""
    end: End | None = None
    """The program's last report: of several ranks that failed, that of the first."""
    end_rank: int = 0
    loss: float | None = None
    """The newest one that the program has logged: some log it once in several updates."""
    gradient_norm: float | None = None
    least_loss: float | None = None
    """Since the newest plan, or since the workers began again."""
    best_before: float | None = None
    """The least loss of the updates before that which still count."""
    peak_bytes: int | None = None
    phase: str | None = None
    batch_search: str | None = None
    """What `--batch auto` has tried and found."""
    spike: Spiked | None = None
    """The newest spike of the loss."""
    unsaved: str | None = None
    """Why the newest save failed; None if it did not."""
    waits_for_space: bool = False
    """All updates are done, and the last save waits for space on the disk."""
    heard: int = 0
    """The number of reports of all ranks."""
    longest_pause: float = 0.0
    """The most seconds between two reports of rank 0 since its first update: evaluations and saves.
    """
    save_seconds: float | None = None
    """How long the newest save took."""
    last_heard: float | None = None
    """When rank 0 wrote its newest report, on the monotonic clock; None if the report has no
    `clock`.
    """
    last_time: float | None = None
    """When rank 0 wrote its newest report, in seconds since the epoch."""
    evaluated: int | None = None
    """The update of the newest evaluation."""
    sampled: int | None = None
    """The update of the newest sampling."""
    saved: int | None = None
    """The update of the newest save, failed or not."""
    saved_by_program: Saved | None = None
    """The newest save of a program that names the folder."""
    offers: frozenset[str] | None = None
    """The commands that rank 0 carries out."""
    failures: tuple[tuple[int, Oom], ...] = ()
    """Allocations that failed, with their ranks."""
    restarts: int = 0
    """How often the launcher (torchrun) has started the workers of this attempt again."""
    max_restarts: int | None = None
    torch: str | None = None
    """Its version in rank 0; None if that is not known."""
    ranks: dict[int, Rank] = {}
    recent: tuple[Done, ...] = ()
    """The newest updates."""

    def after(self, rank: int, report: Report) -> Progress:
        """The progress after this report."""
        progress = replace(self, heard=self.heard + 1)
        if rank == 0:
            # Programs that write journal lines themselves may give the time only.
            pause = _seconds(self.last_heard, report.clock)
            pause = _seconds(self.last_time, report.time) if pause is None else pause
            longest = max(self.longest_pause, pause or 0.0) if self.step is not None else self.longest_pause
            progress = replace(progress, last_heard=report.clock, last_time=report.time, longest_pause=longest)
        match report:
            case Step():
                return progress._after_step(rank, report)
            case Hello(pid=pid, offers=offers, max_restarts=most, packages=packages):
                if report.restarts > progress.restarts:
                    progress = progress.started_again(report.restarts)
                known = {**progress.ranks, rank: Rank(pid=pid)}
                progress = replace(progress, ranks=known, max_restarts=most)
                if rank == 0:
                    progress = replace(progress, offers=frozenset(offers), torch=packages.get("torch"))
                return progress
            case Plan(device_uuid=uuid):
                known = {**self.ranks, rank: replace(self.ranks.get(rank) or Rank(), device_uuid=uuid)}
                return replace(progress, ranks=known)._after_plan(report) if rank == 0 else replace(progress, ranks=known)
            case Oom():
                return replace(progress, failures=(*self.failures[-_FAILURES_KEPT + 1 :], (rank, report)))
            case End():
                return progress._after_end(rank, report)
        return progress._after_report_of_first(report) if rank == 0 else progress

    def started_again(self, restarts: int) -> Progress:
        """The progress when the launcher has started the workers again: only what is true of the
        whole attempt stays."""
        return Progress(best_before=self.best_loss, heard=self.heard, restarts=restarts, max_restarts=self.max_restarts)

    def _after_plan(self, plan: Plan) -> Progress:
        # A program that trains again has not ended.
        start = plan.updates if self.start is None else self.start
        return replace(self, plan=plan, start=start, end=None, recent=(), best_before=self.best_loss, least_loss=None)

    def _after_report_of_first(self, report: Report) -> Progress:
        match report:
            case Offers(offers=offers):
                return replace(self, offers=frozenset(offers))
            case LoopFound():
                return replace(self, loop=report)
            case SettingsChanged(total_updates=int(total)):
                return replace(self, plan=replace(self.plan or Plan(), total_updates=total))
            case BatchSearched(message=message):
                return replace(self, batch_search=message)
            case Evaluated(update=update):
                return replace(self, evaluated=update)
            case Spiked():
                return replace(self, spike=report)
            case Written(update=update):
                return replace(self, sampled=update)
            case Saved(seconds=seconds, updates=updates, path=path):
                named = report if path is not None else self.saved_by_program
                progress = replace(self, save_seconds=seconds, saved=updates, saved_by_program=named)
                return replace(progress, unsaved=None, waits_for_space=False)
            case SaveFailed(message=message, waiting=waiting, update=update):
                return replace(self, unsaved=message, waits_for_space=waiting, saved=update)
            case PhaseChanged(phase=phase):
                return replace(self, phase=phase)
        return self

    def _after_step(self, rank: int, step: Step) -> Progress:
        before = self.ranks.get(rank)
        if before is None:
            known = Rank(device_uuid=step.device_uuid, step=step)
        else:
            known = Rank(pid=before.pid, device_uuid=step.device_uuid or before.device_uuid, step=step)
        ranks = {**self.ranks, rank: known}
        if rank != 0:
            return replace(self, ranks=ranks)
        least, peak, recent = self.least_loss, self.peak_bytes, self.recent
        if step.loss is not None and (least is None or step.loss < least):
            least = step.loss
        if step.peak_bytes is not None:
            peak = max(step.peak_bytes, peak or 0)
        # A program may report an update again, with its loss.
        again = self.step is not None and self.step.update == step.update
        if step.time is not None and not again:
            recent = (*recent[-NEWEST + 1 :], Done(step.time, step.update, step.samples_seen, step.tokens))
        progress = replace(self, ranks=ranks, step=step, least_loss=least, peak_bytes=peak, recent=recent)
        return replace(progress, loss=step.loss, gradient_norm=step.gradient_norm) if step.logged else progress

    def _after_end(self, rank: int, end: End) -> Progress:
        known = self.end if self.end is not None and self.end.outcome == "failed" else None
        # The first rank that fails has the cause; the others only lost their peer.
        if end.outcome == "failed" and (known is None or (end.time or 0.0) < (known.time or 0.0)):
            return replace(self, end=end, end_rank=rank)
        return replace(self, end=end, end_rank=0) if rank == 0 and known is None else self

    @property
    def best_loss(self) -> float | None:
        """The least loss of the updates that count: a restart may have taken back others."""
        return min((loss for loss in (self.least_loss, self.best_before) if loss is not None), default=None)

    @property
    def reported(self) -> Checkpoint | None:
        """The newest checkpoint of a program that names the folder; whether it is complete is not
        known."""
        saved = self.saved_by_program
        if saved is None or saved.path is None:
            return None
        names = ("path", "updates", "samples_seen", "size_bytes")
        return Checkpoint(**{name: getattr(saved, name) for name in names}, saved_at=saved.time, complete=False)

    @property
    def update(self) -> int | None:
        """The newest update of this attempt; None before its first."""
        return None if self.step is None else self.step.update

    @property
    def start_update(self) -> int:
        """The update that the attempt resumed after; 0 until the program has reported it."""
        return self.start or 0

    @property
    def step_seconds(self) -> float | None:
        return None if self.step is None else self.step.step_seconds

    @property
    def total_updates(self) -> int | None:
        return None if self.plan is None else self.plan.total_updates

    @property
    def has_loaded(self) -> bool:
        """Whether the program trains: its first update is in progress, or done."""
        return self.step is not None or self.plan is not None or self.phase == "training"

    @property
    def is_trained(self) -> bool:
        """Whether the training has reported that it is complete, and no update is missing. Its
        program may still run."""
        update, total = self.update, self.total_updates
        is_short = update is not None and total is not None and update < total
        return self.end is not None and self.end.outcome == "finished" and not is_short

    @property
    def at_the_end(self) -> bool:
        """Whether no update is left to begin: the last one is in progress or done, but perhaps not
        saved yet.
        """
        update, total = self.update, self.total_updates
        return self.waits_for_space or (update is not None and total is not None and update + 1 >= total)

    def is_aside(self, settings: Settings) -> bool:
        """Whether the built-in trainer may be busy with something longer than an update: according
        to its settings it evaluates, samples or saves after the newest update, and has not reported
        that it did.
        """
        update = self.update
        if update is None:
            return False
        if update == self.total_updates:
            return True
        evaluates = settings.eval_every > 0 and update % settings.eval_every == 0 and (self.evaluated or 0) < update
        every = settings.sample.every
        samples = every > 0 and update % every == 0 and (self.sampled or 0) < update
        return evaluates or samples or (update % settings.save_every == 0 and (self.saved or 0) < update)

    def speed(self, effective_batch: int | None = None) -> Speed:
        """Of the newest updates; see `speed`."""
        return speed(self.recent, effective_batch)

    @property
    def pace(self) -> float | None:
        """Seconds from one of the newest updates to the next, with what is done between them; None
        before there are two."""
        return self.speed().pace_seconds

    def seconds_left(self) -> float | None:
        """Until the last update is done, at the speed of the newest ones; None if not known."""
        pace, total = self.pace, self.total_updates
        return None if pace is None or total is None else max(0, total - self.recent[-1].update) * pace

    def split(self) -> StepSplit:
        return StepSplit(**{name: getattr(self.step, name, None) for name in StepSplit.__struct_fields__})

    @property
    def devices(self) -> dict[int, str]:
        """The GPU of each rank that has one."""
        return {number: rank.device_uuid for number, rank in self.ranks.items() if rank.device_uuid}

    def rank_memory(self, connected: frozenset[int] | set[int] = frozenset()) -> tuple[RankMemory, ...]:
        """The memory of each rank, by number. `connected`: the ranks whose agent is connected."""
        found = []
        for number, rank in sorted(self.ranks.items()):
            if rank.pid is not None:
                held: dict[str, Any] = (
                    {} if rank.step is None else {name: getattr(rank.step, name) for name in (*_MEMORY, *_TIMES)}
                )
                is_connected = number in connected
                memory = RankMemory(rank=number, pid=rank.pid, connected=is_connected, device_uuid=rank.device_uuid, **held)
                found.append(memory)
        return tuple(found)


_MEMORY = ("time", "allocated_bytes", "reserved_bytes", "peak_bytes", "peak_reserved_bytes", "rss_bytes")
_TIMES = ("step_seconds", "data_wait_seconds")


def _seconds(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
