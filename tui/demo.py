"""A scripted run on two GPUs: for `memtop watch --demo`, the screenshots and the tests. Every number is invented.

The script is a function of the tick alone, so that the same tick always gives the same picture.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence

from msgspec.structs import replace

from memtop.presets import SettingsError, edit_settings
from memtop.presets.comparison import changes
from memtop.presets.schema import Settings
from memtop.supervisor import units, wire
from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.values import GpuProcess, MachineSnapshot
from memtop.supervisor.monitor.vram import RankMemory
from memtop.supervisor.wire import Phase
from memtop.tui import demo_recovery as recovery
from memtop.tui.demo_machine import (
    CONTEXT_BYTES,
    LEAK_BYTES_PER_TICK,
    LEAK_ENDS_TICK,
    RUN_SHM_BYTES,
    Holding,
    Moment,
    demo_uuid,
    host_own_bytes,
    invent,
    wave,
)
from memtop.tui.feed import Connected, FeedMessage, LogLines
from memtop.tui.processes.actions import EndingReport

GIB = units.GIB
START = 1_760_000_000.0
TOTAL_UPDATES = 4_000
_UPDATES_PER_TICK = 2
_RESTART_TICKS = 4
_DIES_AFTER_TICKS = 3
"""What does not fit fails at once, but not before it is seen to train."""
_TREND_FROM_TICK = 120
_BREATH_TICKS = 30

DEMO_SETTINGS = Settings(
    recipe="sft-lora",
    preset="standard",
    batch=8,
    accumulation=4,
    world_size=2,
    seq_len=1024,
    target_samples=TOTAL_UPDATES * 64,
    save_every=50,
    learning_rate=2e-4,
)


class DemoFeed:
    """Plays the script. `interval` 0 plays it as fast as it is read; `ticks` ends it, `warm_up` shows a past at once."""

    def __init__(
        self,
        *,
        interval: float = 1.0,
        gpus: int = 2,
        warm_up: int = 240,
        ticks: int | None = None,
        read_only: bool = False,
    ) -> None:
        self.read_only = read_only
        self.label: str | None = "demo - invented numbers"
        self._interval = interval
        self._gpus = gpus
        self._warm_up = warm_up
        self._ticks = ticks
        self._ids = itertools.count(1)
        self._event_ids = itertools.count(1)
        self._tick = 0
        self._attempt = 2
        self._phase = Phase.TRAINING
        self._phase_until: int | None = None
        self._settings = DEMO_SETTINGS
        self._saved_update = 0
        self._saved_tick = 0
        self._freed_tick: int | None = None
        self._ended_pids: set[int] = set()
        self._outbox: list[FeedMessage] = []
        self._update = 0
        self._configurations = recovery.earlier_configurations(DEMO_SETTINGS, START + warm_up - 1500)
        self._proposal: wire.Proposal | None = None
        self._dies_tick: int | None = None
        self._trial = recovery.trial(START + warm_up - 300)

    # --- the two directions -----------------------------------------------------------------------------------------

    async def messages(self) -> AsyncIterator[FeedMessage]:
        yield Connected()
        yield LogLines(tuple(_greeting(self._gpus)))
        where = "GPU 1" if self._gpus else "host"
        self._event("attempt", "attempt 1 started: 2 x 16 x 2", ago=1500)
        self._event("attempt", "attempt 2: 2 x 16 → 16 x 2, same effective batch 64", ago=1320)
        self._event("survived", f"{where} had no room in update 137: its samples were redone in halves", ago=1140)
        self._event("settings", "batch 16 -> 8, accumulation 2 -> 4, same effective batch 64, no restart", ago=1139)
        self._event("trial", f"undone: {self._trial.title}: {self._trial.reason}", ago=290)
        self._outbox.append(wire.ConfigurationRows(rows=self._configurations))
        last = None if self._ticks is None else self._warm_up + self._ticks
        while last is None or self._tick < last:
            for message in self._next():
                yield message
            if self._tick > self._warm_up and self._interval > 0:
                await asyncio.sleep(self._interval)
            elif self._tick % _BREATH_TICKS == 0:
                # The dashboard takes up what was played so far: else all of the past would wait in memory.
                await asyncio.sleep(0)
        # A script that has ended is not a run that has: stay silent rather than close the stream.
        await asyncio.Event().wait()

    async def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        request = make(next(self._ids))
        try:
            accepted, done = self._carry_out(request)
        except SettingsError as error:
            yield wire.Answer(id=request.id, outcome=wire.Outcome.REFUSED, message=str(error))
            return
        yield wire.Answer(id=request.id, outcome=wire.Outcome.ACCEPTED, message=accepted)
        await asyncio.sleep(self._interval)
        yield wire.Answer(id=request.id, outcome=wire.Outcome.DONE, message=done)

    def play(self, scene: str) -> None:
        """The scene `oom`: the run dies of memory with the next tick after the warm-up, if it trains."""
        if scene == "oom" and self._phase is Phase.TRAINING:
            self._dies_tick = max(self._tick, self._warm_up) + 1

    async def end_processes(self, chosen: Sequence[GpuProcess], machine: MachineSnapshot) -> EndingReport:
        """The demo's processes are invented: nothing real is touched."""
        self._ended_pids |= {process.pid for process in chosen}
        returned = sum(process.used_bytes or 0 for process in chosen)
        word = "process" if len(chosen) == 1 else "processes"
        return EndingReport(f"{len(chosen)} {word} ended, {units.size(returned)} returned", good=True)

    async def environment_of(self, process: GpuProcess) -> dict[str, str]:
        if process.user != "ada":
            raise RefusedError(f"the environment of process {process.pid} cannot be read: it belongs to {process.user}")
        return {
            "CUDA_VISIBLE_DEVICES": "0,1",
            "HF_TOKEN": "hf_invented",
            "HOME": "/home/ada",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "RANK": str(process.pid % 10),
            "WORLD_SIZE": str(max(1, self._gpus)),
        }

    # --- the script -------------------------------------------------------------------------------------------------

    def _carry_out(self, request: wire.Request) -> tuple[str, str]:
        if isinstance(request, wire.FreeCache):
            self._freed_tick = self._tick
            self._event("free", "freed 1.1 GiB on the device")
            return ("freeing at the next update", "Freed 1.1 GiB on the device, 0.3 GiB to the system")
        if isinstance(request, wire.CheckpointNow):
            self._save()
            return ("saving at the next update", f"checkpoint at update {units.count(self._update)}, 1.4 GiB")
        if isinstance(request, wire.Stop):
            self._save()
            self._phase = Phase.STOPPED
            self._event("stopped", "stopped by request, checkpoint written")
            return ("stopping: the update is finished and saved first", "stopped: checkpoint written")
        if isinstance(request, wire.Restart):
            return self._restart(request.change)
        if isinstance(request, wire.Edit):
            words = self._take_up(request.change)
            self._event("settings", f"{words}, no restart")
            return ("taken up at the next update", f"{words} from update {units.count(self._update + 1)} on, without a restart")
        if isinstance(request, wire.Try):
            return self._try(request.change)
        return ("nothing to do", "done")

    def _restart(self, change: wire.Change) -> tuple[str, str]:
        if self._proposal is None:
            self._save()
        self._attempt += 1
        words = self._take_up(change)
        if self._proposal is not None:
            self._event("remedy", f"{change.reason}: {words}")
        self._proposal = None
        self._phase, self._phase_until = Phase.RESTARTING, self._tick + _RESTART_TICKS
        self._event("attempt", f"attempt {self._attempt}: {self._settings.batch} x {self._settings.accumulation}")
        if recovery.too_large(self._settings):
            self._dies_tick = self._phase_until + _DIES_AFTER_TICKS
        return ("restarting from train_latest_state", f"attempt {self._attempt} started")

    def _take_up(self, change: wire.Change) -> str:
        """Other settings, as a new configuration; says what changed."""
        before = self._settings
        if change.configuration is not None:
            before = next((c.settings or before for c in self._configurations if c.number == change.configuration), before)
        after = edit_settings(before, preset=change.preset, assignments=change.assignments)
        words = "; ".join(changes(self._settings, after)) or "the same settings"
        self._settings = after
        self._configurations = recovery.after(
            self._configurations,
            after,
            attempt=self._attempt,
            update=self._update,
            now=START + self._tick,
            reason=change.reason or "asked for",
            outcome="replaced",
        )
        self._outbox.append(wire.ConfigurationRows(rows=self._configurations))
        return words

    def _try(self, change: wire.Change | None) -> tuple[str, str]:
        title = "; ".join(f"{name} {value}" for name, value in (change.assignments if change is not None else {}).items())
        self._trial = replace(self._trial, title=title or "another split", started=START + self._tick)
        self._event("trial", f"undone: {self._trial.title}: {self._trial.reason}")
        return ("measuring before the change", f"undone: {self._trial.reason}")

    def _die(self) -> None:
        self._dies_tick, self._phase = None, Phase.FAILED
        *earlier, last = self._configurations
        peak = recovery.peak_of(self._settings, updates=0, failed=True)
        self._configurations = (*earlier, replace(last, until_update=self._update, outcome="gpu_oom", peak=peak))
        self._proposal = recovery.proposal(self._settings, self._configurations, update=self._update, gpus=self._gpus)
        self._event("oom", self._proposal.diagnosis.summary)
        self._outbox.append(wire.ConfigurationRows(rows=self._configurations))

    def _next(self) -> list[FeedMessage]:
        self._tick += 1
        if self._phase_until is not None and self._tick >= self._phase_until:
            self._phase, self._phase_until = Phase.TRAINING, None
        if self._dies_tick is not None and self._tick >= self._dies_tick:
            self._die()
        rows: list[wire.Metric] = []
        if self._phase is Phase.TRAINING and self._update < TOTAL_UPDATES:
            for _ in range(_UPDATES_PER_TICK):
                self._update += 1
                rows.append(self._metric(self._update))
            if self._update % self._settings.save_every == 0:
                self._save()
            if self._update >= TOTAL_UPDATES:
                self._phase = Phase.FINISHED
        if self._gpus and self._tick == self._warm_up - 40:
            self._event("band", "GPU 1: edge -> danger, 90.8 %: cache grew 0.9 GiB in 40 s")
        messages: list[FeedMessage] = [wire.StateUpdate(run=self._run(), machine=self._machine())]
        if rows:
            messages.append(wire.MetricRows(rows=tuple(rows)))
            messages.append(LogLines((self._log_line(rows[-1]),)))
        messages += self._outbox
        self._outbox.clear()
        return messages

    def _save(self) -> None:
        self._saved_update, self._saved_tick = self._update, self._tick
        self._outbox.append(
            LogLines((f"[rank 0] train_latest_state written: update {units.count(self._update)}, 1.4 GiB in 0.8 s",))
        )

    def _event(self, kind: str, message: str, *, ago: float = 0.0) -> None:
        moment = START + (self._warm_up if ago else self._tick) - ago
        row = wire.Event(id=next(self._event_ids), time=moment, attempt=self._attempt, kind=kind, message=message)
        self._outbox.append(wire.EventRows(rows=(row,)))

    def _metric(self, update: int) -> wire.Metric:
        return wire.Metric(
            update=update,
            attempt=1 if update <= 120 else self._attempt,
            loss=_loss(update),
            learning_rate=2e-4 * (1 - update / TOTAL_UPDATES),
            samples_seen=update * 64,
            step_seconds=1.15 + 0.05 * wave(update, 7),
        )

    def _log_line(self, row: wire.Metric) -> str:
        return (
            f"[rank 0] update {units.count(row.update):>5}/{units.count(TOTAL_UPDATES)}  loss {row.loss:.3f}"
            f"  lr {row.learning_rate:.2e}  step {row.step_seconds:.2f} s"
        )

    def _run(self) -> wire.RunState:
        update = self._update
        training = self._phase is Phase.TRAINING
        step = 1.15 + 0.05 * wave(update, 7)
        effective = self._settings.effective_batch
        return wire.RunState(
            name="qwen-sft",
            folder="runs/qwen-sft",
            state=self._phase,
            reason=self._proposal.diagnosis.summary if self._proposal is not None else None,
            alive=not self._phase.final,
            trainer_pid=41_205,
            attempt=self._attempt,
            created=START - 1500,
            started=START + self._warm_up - 1320,
            settings=self._settings,
            effective_batch=effective,
            updates=update,
            total_updates=TOTAL_UPDATES,
            samples_seen=update * 64,
            target_samples=self._settings.target_samples,
            epoch=update / 520,
            loss=_loss(update),
            best_loss=min(_loss(u) for u in range(max(1, update - 60), update + 1)),
            learning_rate=2e-4 * (1 - update / TOTAL_UPDATES),
            gradient_norm=0.61 + 0.08 * wave(update, 5),
            samples_per_second=effective / step if training else None,
            tokens_per_second=effective * self._settings.seq_len / step if training else None,
            step_seconds=step,
            split=wire.StepSplit(
                data_wait_seconds=0.04 * step,
                forward_seconds=0.31 * step,
                backward_seconds=0.52 * step,
                optimizer_seconds=0.13 * step,
            ),
            eta_seconds=(TOTAL_UPDATES - update) * step if training else None,
            ranks=tuple(self._rank(i) for i in range(self._gpus)),
            run_rss_bytes=int(host_own_bytes(self._tick) * 1.1),
            run_memory=self._roles() if not self._phase.final else (),
            gpu_base_bytes={demo_uuid(i): CONTEXT_BYTES for i in range(self._gpus)},
            checkpoint=wire.Checkpoint(
                path="runs/qwen-sft/train_latest_state",
                updates=self._saved_update,
                samples_seen=self._saved_update * 64,
                saved_at=START + self._saved_tick,
                size_bytes=int(1.4 * GIB),
                complete=True,
            ),
            on_oom="ask",
            proposal=self._proposal,
            trends=self._trends(step) if training else (),
            advice=recovery.advice(self._settings, self._configurations) if training else None,
            trial=self._trial,
        )

    def _trends(self, step: float) -> tuple[wire.Trend, ...]:
        """A leak is believed after a while, and taken back soon after it has ended."""
        left = self._machine().host.available_bytes
        if left is None or not _TREND_FROM_TICK <= self._tick < LEAK_ENDS_TICK + _TREND_FROM_TICK // 4:
            return ()
        return (recovery.trend(self._update, step, LEAK_BYTES_PER_TICK // _UPDATES_PER_TICK, left),)

    def _roles(self) -> tuple[wire.RoleMemory, ...]:
        own = host_own_bytes(self._tick)
        ranks = max(1, self._gpus)
        parts = (("launcher", 1, 0.03, 0), ("rank", ranks, 0.5, 0), ("loader worker", 4 * ranks, 0.47, RUN_SHM_BYTES))
        return tuple(
            wire.RoleMemory(role=role, processes=count, pss_bytes=int(share * own), shm_bytes=shared, swap_bytes=0)
            for role, count, share, shared in parts
        )

    def _cached(self, index: int) -> float:
        """GiB that the allocator of one card holds back: grows until it is freed."""
        since = self._tick - (self._freed_tick or 0)
        if self._freed_tick is not None:
            return min(1.1, 0.1 + since * 0.01)
        return min(0.7 + 0.9 * (index % 2), 0.3 + since * 0.008)

    def _allocated(self, index: int) -> float:
        per_batch = 1.02 * self._settings.batch * self._settings.seq_len / 1024
        base = 6.6 + 0.2 * (index % 4) + (0.45 if self._settings.gradient_checkpointing else per_batch)
        if self._phase is not Phase.TRAINING:
            return 0.0 if self._phase.final else 1.2
        return base + 0.25 * wave(self._tick + index * 3, 9)

    def _rank(self, index: int) -> RankMemory:
        allocated = self._allocated(index)
        return RankMemory(
            rank=index,
            pid=41_210 + index,
            connected=not self._phase.final,
            device_uuid=demo_uuid(index),
            allocated_bytes=int(allocated * GIB),
            reserved_bytes=int((allocated + self._cached(index)) * GIB),
            peak_bytes=int((allocated + 0.5) * GIB),
            peak_reserved_bytes=int((allocated + self._cached(index) + 0.3) * GIB),
            rss_bytes=int(4.1 * GIB),
        )

    def _machine(self) -> MachineSnapshot:
        holdings = tuple(Holding(self._allocated(n), self._cached(n)) for n in range(self._gpus))
        return invent(Moment(self._tick, START, self._phase is Phase.TRAINING, self._phase.final, holdings, self._ended_pids))


def _greeting(gpus: int) -> list[str]:
    return [
        "[rank 0] memtop: attempt 2, resuming from train_latest_state at update 120",
        "[rank 0] model: 494 M parameters, bf16, gradient checkpointing off",
        "[rank 0] data: 33 280 samples, sequence length 1024",
        f"[rank 1] ready on {'cuda:1' if gpus else 'cpu'}",
    ]


def _loss(update: int) -> float:
    return 1.72 + 2.1 * math.exp(-update / 110) + 0.07 * wave(update, 13) * math.exp(-update / 900)
