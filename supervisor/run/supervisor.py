"""The supervisor of one run: starts, watches, stops and restarts its attempts, and tells everyone who asks.

One event loop. Samples, reports and the child's end flow into `RunState`; the state flows to the ledger, `state.json` and the
subscribers; commands flow the other way.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from memtop.presets.schema import Settings
from memtop.supervisor.errors import MemtopError, RunFolderError
from memtop.supervisor.monitor.processes.proc import ProcessId, identify
from memtop.supervisor.run import explain
from memtop.supervisor.run.change import edited, edited_live
from memtop.supervisor.run.clients.agents import Agents
from memtop.supervisor.run.clients.publish import Publisher
from memtop.supervisor.run.clients.server import ControlServer, Peer, socket_path
from memtop.supervisor.run.commands import Commands
from memtop.supervisor.run.ending import finish
from memtop.supervisor.run.intake import read_reports, store_owed
from memtop.supervisor.run.lifecycle import Lifecycle
from memtop.supervisor.run.machine_watch import MachineWatch
from memtop.supervisor.run.prevention import Prevention
from memtop.supervisor.run.processes.attempt import RunningAttempt, StopLadder, Waits
from memtop.supervisor.run.processes.launch import launch as start_program
from memtop.supervisor.run.processes.process import become_subreaper, reap_children, record_rank
from memtop.supervisor.run.progress import Progress
from memtop.supervisor.run.record import checkpoints
from memtop.supervisor.run.record.checkpoints import newest_checkpoint
from memtop.supervisor.run.record.configurations import Record
from memtop.supervisor.run.record.folder import RunFolder, RunLock, StateFile, write_json
from memtop.supervisor.run.record.ledger import open_for_writing
from memtop.supervisor.run.state import attempt_and_ranks, run_state
from memtop.supervisor.run.survival import Survival
from memtop.supervisor.run.taking_over import take_over
from memtop.supervisor.wire import Change, Checkpoint, Event, Phase, RunState

T = TypeVar("T")

_TICK_SECONDS = 0.2
# While the ledger cannot be written; the oldest give way.
_EVENTS_KEPT = 1000
# After the run has ended: how long to stay for viewers that are just connecting.
_LINGER_SECONDS = 3.0


class Supervisor:
    """Owns one run. `run()` returns when the run is over and nobody is looking any more."""

    def __init__(
        self, folder: RunFolder, *, waits: Waits | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self.spec = folder.spec()
        self.settings = self.spec.settings
        self.agents = Agents()
        self.progress = Progress()
        self.attempt: RunningAttempt | None = None
        self.ladder: StopLadder | None = None
        self._asking: asyncio.Task[None] | None = None
        self.pending: Change | None = None
        self.again: str | None = None
        """What the present attempt does once more, since it was not saved."""
        self.warnings: dict[str, str] = {}
        self._unnumbered = itertools.count(-1, -1)
        self._waits = waits or Waits()
        self._monotonic = monotonic
        self.lifecycle = Lifecycle(Phase.CREATED, monotonic)
        self._lock = RunLock(folder)
        self.adopted = False
        self.started: float | None = None
        self.ended: float | None = None
        self.exit_status: int | None = None
        # What the ledger could not take of the present attempt yet (a full disk).
        self._owed: dict[str, Any] = {}
        self._unwritten: deque[Event] = deque(maxlen=_EVENTS_KEPT)
        self.checkpoint = newest_checkpoint(folder.latest_state)
        self._socket = socket_path(folder.path)
        self.watch = MachineWatch(folder.path.parent, self._members, lambda: attempt_and_ranks(self))
        self._peers: Collection[Peer] = ()
        self.survival = Survival(self, monotonic)
        self.prevention = Prevention(self)

    # --- life -----------------------------------------------------------------------------------------------------------

    async def run(self, change: Change | None) -> None:
        """Look after the run to its end. `change` takes an ended run up again (or restarts one that is adopted)."""
        if not self._lock.acquire():
            raise RunFolderError(f"run {self.folder.name!r} is in use by another supervisor: memtop watch {self.folder.name}")
        become_subreaper()
        self.ledger = open_for_writing(self.folder.ledger_path)
        commands = Commands(self)
        self._server = ControlServer(
            self._socket, on_request=commands.handle, on_agent=self._on_agent, on_gone=self.agents.gone
        )
        self._peers = self._server.peers
        self.publisher = Publisher(self.ledger, self._server, lambda: self.survival.configurations.rows)
        self.survival.open(self.ledger.configurations(), self._save_configuration, self.publisher.configurations_changed)
        await self._server.start()
        self.watch.start(self._on_sample, self._on_sampling_failed)
        try:
            try:
                take_over(self, change)
            except MemtopError:
                # Whoever waits for this supervisor takes its socket and state.json together for its start.
                await self._server.close()
                raise
            await self._loop()
        finally:
            self.watch.stop()
            self.save_state()
            await self._server.close()
            self.ledgered(self.ledger.close)
            self._lock.release()

    def resume_in(self, phase: Phase, reason: str | None = None) -> None:
        """Begin where an earlier supervisor has left the run."""
        self.lifecycle = Lifecycle(phase, self._monotonic)
        self.lifecycle.reason = reason

    async def _loop(self) -> None:
        linger_until: float | None = None
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            await self._tick()
            if not self.lifecycle.phase.final:
                linger_until = None
            elif linger_until is None or any(peer.subscribed for peer in self._server.peers):
                linger_until = self._monotonic() + _LINGER_SECONDS
            elif self._monotonic() > linger_until:
                return

    async def _tick(self) -> None:
        if self.attempt is not None:
            self._pay()
        if self.attempt is not None and self.lifecycle.phase.final:
            self.survival.configurations.keep()
        elif self.attempt is not None:
            self.attempt.note_reaped(reap_children())
            self.survival.look()
            read_reports(self)
            ended = self.attempt.ended()
            if self.survival.comeback is not None:
                self.survival.tick()
            elif ended is not None:
                await finish(self, ended)
            elif self.ladder is not None:
                self.ladder.tick()
            elif self.pending is not None and self.lifecycle.phase in (Phase.STARTING, Phase.TRAINING):
                self.begin_restart(self.pending)
            else:
                self.prevention.tick()
        self.prevention.trials.tick()
        self.publish()

    def _pay(self) -> None:
        """Give the ledger what it could not take before: the disk may have room again."""
        store_owed(self)
        if self._owed:
            self.update_attempt()
        while self._unwritten:
            event = self._unwritten[0]
            if self.ledgered(lambda: self.ledger.add_event(event)) is None:  # noqa: B023 - called at once
                return
            self._unwritten.popleft()

    def keep_up(self) -> None:
        read_reports(self)
        self.publish()

    def publish(self) -> None:
        self.publisher.tick(self.state, self.watch.machine)
        if self.publisher.state_file_due():
            self.save_state()

    # --- attempts -------------------------------------------------------------------------------------------------------

    def launch(self, number: int, reason: str, change: Change) -> None:
        """Start the next attempt from the newest complete checkpoint, with the changed settings.

        Whatever refuses it (the change, the ledger, the disk) leaves what is known of the attempt before as it is.
        """
        if self.attempt is not None:
            self._pay()
            self.survival.configurations.keep()
        latest = self.folder.latest_state
        settings = edited(self._proven(), change, self._resumed_from(change), self.survival.configurations.rows)
        allocator = change.assignments.get("allocator", self.survival.allocator) if settings is None else ""
        started = time.time()
        # A program of the user's own counts its updates from its start; ours says where it resumes.
        start = 0 if settings is None else None
        try:
            self.ledger.add_attempt(number, reason, settings, started, start)
        except sqlite3.Error as error:
            raise RunFolderError(f"{self.folder.ledger_path}: cannot be written: {error}; free some space") from None
        try:
            with checkpoints.rolled_back(latest, change.state_before) as aside:
                checkpoint = newest_checkpoint(latest)
                shim = start_program(self.folder, number, self.spec, settings, self._socket, allocator=allocator)
        except MemtopError as error:
            why = str(error)
            self.ledgered(lambda: self.ledger.close_unstarted(number, why, time.time()))
            raise
        split = explain.split_change(self.settings, settings)
        self.again = self._done_again(change, checkpoint)
        self.checkpoint, self.settings = checkpoint, settings
        self._warn("checkpoint", checkpoint.problem if checkpoint else None)
        self.started, self.ended, self.exit_status = started, None, None
        self.pending, self.ladder, self.adopted = None, None, False
        self.agents.reset()
        self.progress = Progress(best_loss=self.progress.best_loss)
        if start is not None:
            self.publisher.take_back_from(start + 1)
        self.attempt, self._owed = RunningAttempt(self.folder, number, shim), {}
        self.survival.begin(number, reason, change, started, allocator)
        self.prevention.trials.begun(change)
        checkpoints.discard_held(latest)
        self.move(Phase.STARTING)
        if aside is not None:
            self.event("rollback", f"states after update {change.state_before} moved to {aside}")
        self.event("attempt", f"attempt {number}: {reason}{split}" + (f"; {self.again}" if self.again else ""))

    def _done_again(self, change: Change, checkpoint: Checkpoint | None) -> str | None:
        """What is lost of the attempt before; of a program that memtop does not know, or gone back on purpose, nothing is."""
        if self.settings is None or change.state_before is not None:
            return None
        return explain.done_again(self.progress.update, checkpoint)

    def foreseen(self, change: Change) -> Settings | None:
        """The settings that a change asked for now will give; UsageError if it cannot be."""
        rows = self.survival.configurations.rows
        if self.lifecycle.phase.final or change.state_before is not None:
            return edited(self._proven(), change, self._resumed_from(change), rows)
        return edited_live(self._proven(), change, self.checkpoint, self.progress, rows)

    def _proven(self) -> Settings | None:
        """The run's settings, or while others are on trial those before them: where every change starts from."""
        return self.prevention.trials.before or self.settings

    def _resumed_from(self, change: Change) -> Checkpoint | None:
        """The state that an attempt with this change would begin with; UsageError if it goes back to one that is not kept."""
        latest = self.folder.latest_state
        return newest_checkpoint(latest) if change.state_before is None else checkpoints.state_at(latest, change.state_before)

    def next_number(self) -> int:
        """After the newest that the ledger has: one that could not be started keeps its number."""
        return self.ledger.attempts()[-1].number + 1

    def come_back(self, change: Change) -> None:
        """Start again after a death, as it was decided."""
        assert self.attempt is not None
        try:
            self.launch(self.next_number(), explain.restart_reason(change), change)
        except MemtopError as error:
            self.survival.call_off(str(error))

    def fail(self, why: str) -> None:
        """No restart after all: the run stays as it died."""
        self.move(Phase.FAILED, why)
        self.event("failed", why)

    # --- commands -------------------------------------------------------------------------------------------------------

    def begin_restart(self, change: Change) -> None:
        """Stop the attempt; when it has ended, the next one starts with the change. An ended run starts at once."""
        if self.lifecycle.phase.final or self.survival.comeback is not None:
            self.launch(self.next_number(), explain.restart_reason(change), change)
            return
        if change.state_before is not None:
            checkpoints.hold(self.folder.latest_state, change.state_before)
        else:
            checkpoints.discard_held(self.folder.latest_state)
        self.pending = change
        if self.lifecycle.phase is not Phase.RESTARTING:
            self.move(Phase.RESTARTING)
        else:
            self.save_state()
        if self.ladder is None:
            self.ask_to_stop()

    def ask_to_stop(self) -> None:
        """Ask rank 0 to finish its update, save and exit; where it cannot be asked or never answers, signals do it."""
        offers = self.progress.offers
        can_be_asked = 0 in self.agents.ranks and (offers is None or "stop" in offers)
        ladder = self.begin_stop(asked=can_be_asked)
        if can_be_asked:
            self._asking = asyncio.get_running_loop().create_task(self._ask(ladder))

    async def _ask(self, ladder: StopLadder) -> None:
        answers = await self.agents.call("stop", {0})
        # Of an attempt that has ended meanwhile the ladder is never looked at again.
        if not answers or not answers[0].ok:
            ladder.declined()

    def begin_stop(self, *, asked: bool) -> StopLadder:
        assert self.attempt is not None
        # Whoever was asked to finish an update is given the time that its updates take, and its saves. Our own trainer does the
        # same on a signal, unless it stands still.
        update = self.progress.step_seconds or 0.0
        saves = self.settings is not None and self.survival.stalled is None
        self.ladder = StopLadder(
            self.attempt,
            asked=asked,
            monotonic=self._monotonic,
            announce=lambda text: self.event("stop", text),
            waits=self._waits.stretched(update, self.progress.longest_aside, saves_on_sigterm=saves),
        )
        return self.ladder

    def begin_stopping(self) -> None:
        """Stop the run for good (a restart that was waiting is off)."""
        if self.survival.comeback is not None:
            self.survival.call_off("called off: it stays as it died")
            return
        self.pending = None
        checkpoints.discard_held(self.folder.latest_state)
        self.move(Phase.STOPPING)
        if self.ladder is None:
            self.ask_to_stop()

    @property
    def phase(self) -> Phase:
        return self.lifecycle.phase

    @property
    def is_watched(self) -> bool:
        """A dashboard shows the run: who wants its history has a screen, who only follows its events has none."""
        return any(peer.has_screen for peer in self._peers)

    def add_viewer(self, peer: Any, history: int) -> None:
        peer.has_screen = history > 0
        self.publisher.greet(peer, history, self.state(), self.watch.machine)

    # --- reports --------------------------------------------------------------------------------------------------------

    def _on_agent(self, peer: Any, message: dict[str, Any]) -> None:
        if self.agents.receive(peer, message, self.attempt.number if self.attempt else 0) and self.attempt:
            record_rank(self.attempt.folder, peer.pid)
        self.publisher.changed()

    # --- machine --------------------------------------------------------------------------------------------------------

    def _members(self) -> list[ProcessId]:
        return self.attempt.processes() if self.attempt is not None and not self.lifecycle.phase.final else []

    def _on_sample(self, keep: bool) -> None:
        machine = self.watch.machine
        assert machine is not None
        for crossing in self.watch.crossings():
            self.event("band", crossing)
        self.survival.sample(keep)
        self.prevention.sample()
        self.ledger.recorder.add(machine, self.watch.run_rss_bytes)
        if keep:
            number = self.attempt.number if self.attempt else 0
            self.ledgered(lambda: self.ledger.recorder.write(machine, number))
        self._warn("sampling", None)
        self.publisher.changed()

    def _on_sampling_failed(self, error: BaseException | None) -> None:
        why = f"the machine could not be sampled: {error!r}"
        # Told once, however often it happens.
        if why != self.warnings.get("sampling"):
            self._warn("sampling", why)
            self.event("warning", why)

    # --- state ----------------------------------------------------------------------------------------------------------

    def event(self, kind: str, message: str, data: dict[str, Any] | None = None) -> None:
        """Remember something and tell the viewers. What a ledger cannot take now it is given later."""
        event = Event(
            # Below zero while the ledger has not numbered it: viewers tell events apart by their number.
            id=next(self._unnumbered),
            time=time.time(),
            attempt=self.attempt.number if self.attempt else 0,
            kind=kind,
            message=message,
            data=data or {},
        )
        numbered = None if self._unwritten else self.ledgered(lambda: self.ledger.add_event(event))
        if numbered is None:
            self._unwritten.append(event)
        self.publisher.add_event(numbered or event)

    def update_attempt(self, **values: Any) -> None:
        assert self.attempt is not None
        number, self._owed = self.attempt.number, self._owed | values

        def write() -> bool:
            self.ledger.update_attempt(number, **self._owed)
            return True

        if self.ledgered(write):
            self._owed = {}

    def ledgered(self, write: Callable[[], T]) -> T | None:
        """Write to the ledger; None, with a warning to the viewers, if it cannot be written now."""
        try:
            done = write()
        except sqlite3.OperationalError as error:
            self._warn("ledger", f"{self.folder.ledger_path}: cannot be written: {error}; free some space")
            return None
        self._warn("ledger", None)
        return done

    def _save_configuration(self, record: Record) -> bool:
        def write() -> bool:
            self.ledger.save_configuration(record)
            return True

        return self.ledgered(write) is not None

    def _warn(self, topic: str, text: str | None) -> None:
        if text is None:
            self.warnings.pop(topic, None)
        else:
            self.warnings[topic] = text

    def move(self, phase: Phase, reason: str | None = None) -> None:
        """To the next phase, which state.json tells before anything else happens: what was decided outlives its supervisor."""
        self.lifecycle.move(phase, reason)
        self.publisher.changed()
        self.save_state()

    def save_state(self) -> None:
        me = identify(os.getpid())
        state = StateFile(
            run=self.state(),
            socket=str(self._socket),
            supervisor_started_ticks=me.started_ticks if me else None,
            pending=self.pending,
            waiting=self.survival.comeback.waiting if self.survival.comeback is not None else None,
            waited_at=self.survival.waited_at,
            stalled=self.survival.stalled,
        )
        self.publisher.state_file_written()
        try:
            write_json(self.folder.state_path, state)
        except RunFolderError as error:
            self._warn("state", str(error))
        else:
            self._warn("state", None)

    def state(self) -> RunState:
        return run_state(self)
