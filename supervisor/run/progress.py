"""Folds the agents' reports into what is known of the training: position, loss, speed, memory per rank."""

from __future__ import annotations

from collections import deque
from typing import Any

from memtop.presets.schema import Settings
from memtop.supervisor.run.processes.gpu_base import RankReport
from memtop.supervisor.wire import Metric, RankMemory, StepSplit

# Updates over which speed is averaged: long enough to be steady, short enough to notice a change.
_WINDOW = 20
# A program can survive many; the newest say why it ended.
_FAILURES_KEPT = 256
_SPLIT = ("data_wait_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")


class Progress:
    """The training of one attempt, as its reports tell it. Values are None until a report has told them."""

    def __init__(self, best_loss: float | None = None) -> None:
        self.step: dict[str, Any] = {}
        """Rank 0's newest step report."""
        self.plan: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        """{"outcome": finished | stopped | failed, "message": ...} once the program has said so."""
        self.best_loss = best_loss
        self.peak_bytes: int | None = None
        self.phase: str | None = None
        self.unsaved: str | None = None
        """Why the newest save failed; None where it did not."""
        self.waits_for_room = False
        """It is done but for its last save, which waits: then it has no more to say."""
        self.heard = 0
        """How many reports there were of all ranks."""
        self.longest_pause = 0.0
        """Seconds that went by at most between two reports of rank 0 since its first update: evaluations and saves."""
        self.save_seconds: float | None = None
        """What the newest save took; None before the first."""
        self._last_heard: float | None = None
        self._evaluated: int | None = None
        self._saved: int | None = None
        self.offers: frozenset[str] | None = None
        """The commands that rank 0 carries out; None until it has said so."""
        self.failures: list[tuple[int, dict[str, Any]]] = []
        """Allocations that failed: the ranks and their `oom` reports."""
        self._ranks: dict[int, dict[str, Any]] = {}
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=_WINDOW)

    def resume_from(self, history: list[Metric]) -> None:
        """Start from what earlier attempts reached."""
        self.best_loss = min((m.loss for m in history if m.loss is not None), default=None)

    def apply(self, rank: int, report: dict[str, Any]) -> None:
        kind = report.get("type")
        self.heard += 1
        if rank == 0:
            self._note_pause(report.get("time"))
        if kind == "hello":
            self._ranks[rank] = {"pid": report.get("pid"), "device_uuid": None}
            if rank == 0:
                self.offers = frozenset(map(str, report.get("offers") or ()))
        elif kind == "offers" and rank == 0:
            self.offers = frozenset(map(str, report.get("offers") or ()))
        elif kind == "plan":
            self._ranks.setdefault(rank, {})["device_uuid"] = report.get("device_uuid")
            if rank == 0:
                self.plan = report
        elif kind == "step":
            self._ranks.setdefault(rank, {}).update(report)
            if rank == 0:
                self._apply_step(report)
        elif kind == "oom":
            self.failures = [*self.failures[-_FAILURES_KEPT + 1 :], (rank, report)]
        elif kind == "settings" and rank == 0 and report.get("total_updates") is not None:
            self.plan = {**self.plan, "total_updates": report["total_updates"]}
        elif kind == "evaluation" and rank == 0:
            self._evaluated = report.get("update")
        elif kind == "checkpoint" and rank == 0:
            self.save_seconds = report.get("seconds")
            self.unsaved, self.waits_for_room, self._saved = None, False, report.get("updates")
        elif kind == "save_failed" and rank == 0:
            self.unsaved, self.waits_for_room = report.get("message"), bool(report.get("waiting"))
            self._saved = report.get("update")
        elif kind == "phase" and rank == 0:
            self.phase = report.get("phase")
        elif kind == "end":
            self._apply_end(rank, report)

    def _note_pause(self, time: float | None) -> None:
        if time is None:
            return
        if self.step and self._last_heard is not None:
            self.longest_pause = max(self.longest_pause, time - self._last_heard)
        self._last_heard = time

    @property
    def longest_aside(self) -> float:
        """Seconds that something beside updates has taken at most, as far as it is known: a save, an evaluation."""
        return max(self.longest_pause, self.save_seconds or 0.0)

    @property
    def at_the_end(self) -> bool:
        """Whether no update is left to begin: the last one is under way or done, maybe not saved yet."""
        update, total = self.step.get("update"), self.plan.get("total_updates")
        last = isinstance(update, int) and isinstance(total, int) and update + 1 >= total
        return self.waits_for_room or last

    def is_aside(self, settings: Settings) -> bool:
        """Whether our own trainer may be at something else than an update, which takes longer: by its settings it evaluates or
        saves after the newest update, and has not told that it did."""
        update = self.step.get("update")
        if not isinstance(update, int):
            return False
        evaluates = settings.eval_every > 0 and update % settings.eval_every == 0 and (self._evaluated or 0) < update
        if update == self.plan.get("total_updates"):
            return True
        return evaluates or (update % settings.save_every == 0 and (self._saved or 0) < update)

    def _apply_end(self, rank: int, report: dict[str, Any]) -> None:
        failed = report.get("outcome") == "failed"
        known = self.end if self.end is not None and self.end.get("outcome") == "failed" else None
        # Of several ranks that fail, the first one has the cause; the others only lost their peer.
        if failed and (known is None or report.get("time", 0.0) < known.get("time", 0.0)):
            self.end = {**report, "rank": rank}
        elif rank == 0 and known is None:
            self.end = report

    def _apply_step(self, report: dict[str, Any]) -> None:
        self.step = report
        loss, peak = report.get("loss"), report.get("peak_bytes")
        if loss is not None and (self.best_loss is None or loss < self.best_loss):
            self.best_loss = loss
        if peak is not None:
            self.peak_bytes = max(peak, self.peak_bytes or 0)
        if report.get("samples_seen") is not None:
            self._recent.append((report["time"], report["samples_seen"], report.get("tokens") or 0))

    def rates(self) -> tuple[float | None, float | None]:
        """Samples and tokens per second over the newest updates; None before there are two."""
        if len(self._recent) < 2:
            return None, None
        (start, first, _), (end, last, _) = self._recent[0], self._recent[-1]
        if end <= start:
            return None, None
        tokens = sum(t for _, _, t in list(self._recent)[1:])
        return (last - first) / (end - start), tokens / (end - start) if tokens else None

    def split(self) -> StepSplit:
        return StepSplit(**{name: self.step.get(name) for name in _SPLIT})

    @property
    def devices(self) -> dict[int, str]:
        """The GPU of each rank that has one."""
        return {rank: known["device_uuid"] for rank, known in self._ranks.items() if known.get("device_uuid")}

    def rank_reports(self) -> tuple[RankReport, ...]:
        """What each rank last said of its allocator, and when."""
        return tuple(
            RankReport(
                pid=known["pid"],
                device_uuid=known.get("device_uuid"),
                reserved_bytes=known.get("reserved_bytes"),
                time=known.get("time"),
            )
            for known in self._ranks.values()
            if known.get("pid") is not None
        )

    def ranks(self, connected: set[int]) -> tuple[RankMemory, ...]:
        names = ("device_uuid", "allocated_bytes", "reserved_bytes", "peak_bytes", "peak_reserved_bytes", "rss_bytes")
        return tuple(
            RankMemory(rank=rank, pid=known["pid"], connected=rank in connected, **{n: known.get(n) for n in names})
            for rank, known in sorted(self._ranks.items())
            if known.get("pid") is not None
        )
