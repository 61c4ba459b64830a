"""The supervisor of one run: the loop that collects events, gives each to `step`, and has its
effects carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Callable

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.run.afterwards import Afterwards
from memtop.supervisor.run.checkpoint_watch import CheckpointWatch
from memtop.supervisor.run.client import socket_path
from memtop.supervisor.run.effects import AddEvent
from memtop.supervisor.run.events import (
    AgentConnected,
    AgentGone,
    Now,
    Occurrence,
    OutputRead,
    ProgramEnded,
    Replayed,
    Reported,
    Requested,
    SamplingFailed,
    SupervisorStarted,
    WriteChecked,
)
from memtop.supervisor.run.last_update import lacks_update, with_last_update
from memtop.supervisor.run.model import AttemptStage, Model, Run
from memtop.supervisor.run.notices import Notifier, is_wanted
from memtop.supervisor.run.performer import Performer, read_states
from memtop.supervisor.run.processes.attempt import UNKNOWN_STATUS, RunningAttempt, become_subreaper, has_program, reap_children
from memtop.supervisor.run.processes.members import record_rank
from memtop.supervisor.run.queue import QueueWatch, revive_queued
from memtop.supervisor.run.rebuild import open_ledger
from memtop.supervisor.run.record.folder import RunFolder, RunLock
from memtop.supervisor.run.record.outbox import Outbox
from memtop.supervisor.run.record.ownership import require_own
from memtop.supervisor.run.reports import Hello, Report
from memtop.supervisor.run.rules import spikes
from memtop.supervisor.run.rules.taking_over import newest_started
from memtop.supervisor.run.sensors import Sensors
from memtop.supervisor.run.server import AgentGreeting, Agents, ControlServer, FromAgent, Peer, Publisher
from memtop.supervisor.run.starting import Standby
from memtop.supervisor.run.state import run_state
from memtop.supervisor.run.step import step
from memtop.supervisor.run.stop_ladder import Waits
from memtop.supervisor.wire import (
    Answer,
    Change,
    Leave,
    Look,
    Outcome,
    Phase,
    Request,
    RunState,
    StateUpdate,
    Status,
    Subscribe,
)

_TICK_SECONDS = 0.2
_LINGER_SECONDS = 3.0
"""After the run has ended: how long to stay for viewers that are just connecting."""
_UNWRITTEN_SECONDS = 30.0
"""How much longer, while the end of the run cannot be written to the ledger."""
_SOCKET_SECONDS = 5.0
"""How long to wait after the socket could not be made again."""
_ANNOUNCED = ("oom", "survived", "settings", "spike", spikes.ACCEPTED, "sample")
"""Events that come of a report, each once."""


class Supervisor:
    """Owns one run. `run()` returns when the run is over and no viewer is left."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        waits: Waits | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        after_kill: bool = False,
    ) -> None:
        """If a message or a command is due at the end of the run, another process waits for the
        case that this one is killed. `after_kill`: this one has followed like that. Whatever killed
        the one before may kill it, too: it has no successor."""
        self.folder = folder
        require_own(folder.path)
        # Where other users may write the folder of all runs, one of them may exchange two folders
        # after this check. So the file with the command is checked again when it is open.
        self.spec = spec = folder.spec(own=True)
        folder.id = spec.id  # another run may get the folder's path later
        run = Run(
            name=folder.name,
            folder=str(folder.path),
            created=spec.created,
            settings=spec.settings,
            command=spec.command,
            choice=spec.choice,
            on_oom=spec.on_oom,
            waits=spec.queue or spec.after is not None,
        )
        self.model = Model(run=run, settings=spec.settings, waits=waits or Waits(), supervisor_pid=os.getpid(), grip=spec.grip)
        self._monotonic = monotonic
        self._lock = RunLock(folder)
        self._socket = socket_path(folder.path)
        self._agents = Agents()
        self._sensors = Sensors(folder, lambda: self.model, monotonic)
        self._checkpoints = CheckpointWatch(folder.path, self.handle)
        self._notifier = Notifier(folder)
        self._queue = QueueWatch(folder, spec, lambda: self._sensors.machine_watch.machine)
        self._afterwards = Afterwards(folder, spec.then, spec.cwd)
        owes = spec.then is not None or is_wanted(folder, os.environ)
        self._after_kill = after_kill
        self._standby = Standby(folder) if owes and not after_kill else None
        self._reported = 0
        """The attempt after which the report was written."""
        self._report: asyncio.Task[str | None] | None = None
        self._ledger_problem: str | None = None
        self._socket_due = 0.0
        self._newest_client = 0
        self._leaving = False
        """Another run takes the name of this one, which is over."""

    async def run(self, change: Change | None) -> None:
        """Supervise the run until it ends. `change`: restart it first, with this change."""
        if not self._lock.acquire():
            raise RunFolderError(f"run {self.folder.name!r} is in use by another supervisor: memtop watch {self.folder.name}")
        become_subreaper()
        ledger, rebuilt = open_ledger(self.folder)
        self._outbox = Outbox(ledger)
        server = self._server = ControlServer(
            self._socket, on_request=self._on_request, on_agent=self._on_agent, on_gone=self._on_gone
        )
        self._publisher = Publisher(ledger, server, lambda: self.model.configurations.rows)
        self._performer = Performer(
            self.folder,
            self.spec,
            outbox=self._outbox,
            publisher=self._publisher,
            agents=self._agents,
            sensors=self._sensors,
            socket=self._socket,
            is_displaced=self._lock.is_displaced,
            post=self.handle,
            read_reports=lambda: self._read_reports(to_the_end=True),
        )
        await server.start()
        self._sensors.machine_watch.start(self._on_sample, self._on_sampling_failed)
        try:
            if rebuilt is not None:
                self.handle(WriteChecked(topic="record", problem=rebuilt))
            if self._standby is not None:
                self._check("standby", self._standby.start())
            self._open(change)
            while self.model.launching is not None:
                await asyncio.wait(self._performer.tasks)
                self._performer.collect()
            if self._performer.failure is not None:
                # A command that waits for this supervisor takes its socket and state.json together
                # as its start.
                await server.close()
                raise self._performer.failure
            await self._loop()
            if self._report is not None:
                await self._report
            await asyncio.to_thread(revive_queued, self.folder.path.parent)
        finally:
            try:
                self._sensors.machine_watch.stop()
                self._performer.save_state(self.model)
                await server.close()
                self._outbox.write(ledger.close)
            finally:
                if self._standby is not None:
                    self._standby.dismiss()
                self._lock.release()

    def handle(self, event: Occurrence) -> None:
        """Pass an event to the rules, carry out the effects, then handle the events that follow."""
        events = deque([event])
        while events:
            before = self.model
            now = Now(time.time(), self._monotonic())
            self.model, effects = step(before, events.popleft(), now)
            if effects or self.model.progress is not before.progress or self.model.sample is not before.sample:
                self._publisher.changed()
            for effect in effects:
                if isinstance(effect, AddEvent):
                    self._notifier.heard(effect.event)
                following = self._performer.perform(effect, self.model)
                if following is not None:
                    events.append(following)

    # --- how it begins ----------------------------------------------------------------------------

    def _open(self, change: Change | None) -> None:
        ledger = self._outbox.ledger
        attempts = tuple(ledger.attempts())
        open_ones = (attempt.number for attempt in attempts if attempt.ended is None)
        unstarted = frozenset(number for number in open_ones if not has_program(self.folder, number))
        newest = newest_started(attempts, unstarted)
        trials = [event.data for event in ledger.events() if event.kind == "trial"]
        state = self.folder.state()
        opened = SupervisorStarted(
            attempts=attempts,
            unstarted=unstarted,
            state=state,
            records=tuple(ledger.configurations()),
            announced=frozenset(ledger.announced(newest.number, _ANNOUNCED)) if newest is not None else frozenset(),
            best_loss=ledger.best_loss(),
            peak_bytes=ledger.highest_peak(newest.number) if newest is not None else None,
            trial=trials[-1] if trials else None,
            states=read_states(self.folder, None if state is None else state.grip),
            change=change,
            after_kill=self._after_kill,
        )
        if newest is not None:
            self._performer.follow(newest.number, newest.started)
        self.handle(opened)
        if newest is not None and self._performer.intake is not None:
            self._performer.intake.replay(lambda rank, report: self._on_report(rank, report, replayed=True))
            if newest.ended is not None:
                # What the ledger could not take at its end.
                self._read_reports(to_the_end=True)
                self._read_output(to_the_end=True)
            self.handle(Replayed())

    # --- the loop ---------------------------------------------------------------------------------

    async def _loop(self) -> None:
        linger_until: float | None = None
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if self._lock.is_displaced():
                if not self._waits_for_its_place():
                    return
                continue
            await self._keep_socket()
            self._check("place", None)
            self._tick()
            self._notify()
            self._write_report()
            self._run_afterwards()
            if not self.model.phase.final or self.model.launching is not None:
                linger_until = None
            elif linger_until is None or any(peer.subscribed for peer in self._server.peers):
                linger_until = self._monotonic() + _LINGER_SECONDS
            elif not self._afterwards.busy and self._monotonic() > linger_until + self._more_seconds:
                return
            if self._leaving and self.model.phase.final:
                return

    def _waits_for_its_place(self) -> bool:
        """Another run has the path of this one. Nothing may be read or written there, so wait until
        this run is back at its path. False if its program has ended: another supervisor can
        continue it at its new place."""
        attempt = self._performer.attempt
        if self.model.phase.final or attempt is None or not attempt.lives_elsewhere():
            return False
        if "place" not in self.model.warnings:
            # This goes to supervisor.log, which has moved with the run.
            sys.stderr.write(f"memtop: {self._displaced()}\n")
        self._check("place", self._displaced())
        return True

    def _displaced(self) -> str:
        return f"this run was renamed or moved, and another run is now in {self.folder.path}: no record until it is back there"

    async def _keep_socket(self) -> None:
        """Make the socket again if something has removed it: programs that clean /tmp do that."""
        if self._monotonic() < self._socket_due:
            return
        problem = None
        if not self._server.is_there():
            try:
                socket_path(self.folder.path)  # makes its folder
                await self._server.start()
            except RunFolderError as error:
                problem = str(error)
                self._socket_due = self._monotonic() + _SOCKET_SECONDS
        self._check("socket", problem)

    def _tick(self) -> None:
        self._pay()
        attempt, model, alive = self._performer.attempt, self.model, False
        if attempt is not None and model.attempt is not None and model.attempt.stage is not AttemptStage.OVER:
            attempt.continue_shim()
            attempt.note_reaped(reap_children())
            self._sensors.look()
            self._trim_log(attempt)
            self._follow_workers()
            self._read_reports()
            self._read_output()
            self._check("reports", self._performer.intake.problem if self._performer.intake is not None else None)
            alive = attempt.alive()
            ended = attempt.ended() if model.attempt.stage is AttemptStage.RUNNING and not alive else None
            if ended is not None:
                self._read_reports(to_the_end=True)
                self._read_output(to_the_end=True)
                status = None if ended.status == UNKNOWN_STATUS else ended.status
                self.handle(ProgramEnded(ended=ended.ended, status=status))
        watched = any(peer.has_screen for peer in self._server.peers)
        queue = self._queue.look() if model.phase is Phase.QUEUED else None
        self.handle(self._sensors.tick(watched=watched, alive=alive, queue=queue))
        self._performer.collect()
        self._checkpoints.tick(self.model.grip if alive else None, stopping=self.model.ladder is not None)
        self._publish()

    def _follow_workers(self) -> None:
        """The launcher may have ended the workers and started them again."""
        event = self._sensors.workers_started()
        if event is not None:
            self._read_reports(to_the_end=True)
            self._read_output(to_the_end=True)
            self.handle(event)

    def _trim_log(self, attempt: RunningAttempt) -> None:
        self._check("log", attempt.log.trim() or attempt.log.mark(time.time()))

    def _check(self, topic: str, problem: str | None) -> None:
        """Warn of a problem, or take the warning back; nothing if that has been done."""
        if problem != self.model.warnings.get(topic):
            self.handle(WriteChecked(topic=topic, problem=problem))

    def _pay(self) -> None:
        """Write what the ledger could not store before: the disk may have space again."""
        if self._outbox.due:
            if self._performer.intake is not None:
                self._performer.intake.store()
            self._outbox.retry()
        if self._outbox.problem != self._ledger_problem:
            self._ledger_problem = self._outbox.problem
            self.handle(WriteChecked(topic="ledger", problem=self._ledger_problem))

    def _shown(self) -> RunState:
        state = run_state(self.model)
        if not lacks_update(state):
            return state
        with contextlib.suppress(sqlite3.Error):  # the outbox names its damage
            state = with_last_update(state, self._outbox.ledger)
        return state

    def _publish(self) -> None:
        machine = self.model.sample.machine if self.model.sample is not None else None
        self._publisher.tick(self._shown, machine)
        if self._publisher.state_file_due():
            checked = self._performer.save_state(self.model, decided=False)
            if checked is not None:
                self.handle(checked)

    def _write_report(self) -> None:
        """Write the report when the run is over; in a thread, because it reads the whole record."""
        if self._report is not None and self._report.done():
            self._check("report", self._report.result())
            self._report = None
        if self._is_over and self._report is None and self._reported != self.model.number:
            self._reported = self.model.number
            self._report = asyncio.get_running_loop().create_task(asyncio.to_thread(_report, self.folder))

    def _run_afterwards(self) -> None:
        """At the very end of the run, start the command that the user has given for it."""
        over = self._is_over and self._report is None and not self._notifier.busy
        ended = self._afterwards.tick(self.model.number, self.model.phase, over=over)
        if ended is not None:
            self.handle(ended)

    @property
    def _more_seconds(self) -> float:
        """How much longer to stay, because something is not written or sent yet."""
        return _UNWRITTEN_SECONDS if self._waits or self._notifier.busy else 0.0

    @property
    def _waits(self) -> bool:
        """Whether the ledger lacks something."""
        intake = self._performer.intake
        return self._outbox.waits or (intake is not None and intake.waits)

    @property
    def _is_over(self) -> bool:
        return self.model.phase.final and self.model.launching is None and not self._waits

    def _notify(self) -> None:
        """Tell the user of events. The sender reads them in the ledger."""
        if not self._outbox.waits:
            self._notifier.tick()
        self._check("notify", self._notifier.problem)

    # --- reports and samples ----------------------------------------------------------------------

    def _read_reports(self, *, to_the_end: bool = False) -> None:
        if self._performer.intake is not None:
            self._performer.intake.read(self._on_report, to_the_end=to_the_end)

    def _read_output(self, *, to_the_end: bool = False) -> None:
        """What a user's program prints about its training, a piece of it or all."""
        output, progress = self._performer.output, self.model.progress
        if output is None or progress.plan is not None:
            return  # its framework reports more than it prints
        seen = output.read(
            time.time(),
            updates=progress.update,
            step_seconds=progress.step_seconds,
            has_loss=progress.loss is not None,
            own_log=self._performer.own_log(self.model.grip),
            steps_per_update=self.model.grip.steps_per_update if self.model.grip is not None else 1,
            to_the_end=to_the_end,
        )
        if seen is not None:
            self.handle(OutputRead(seen))
        self._check("output", output.problem)

    def _on_report(self, rank: int, report: Report, *, replayed: bool = False) -> None:
        if isinstance(report, Hello) and report.restarts > self.model.progress.restarts and not replayed:
            # The log says which worker had died.
            event = self._sensors.workers_started()
            if event is not None:
                self.handle(event)
        self.handle(Reported(rank=rank, report=report, replayed=replayed))
        if not replayed:
            self._sensors.reported(rank, report)

    def _on_sample(self, keep: bool) -> None:
        sample = self._sensors.sampled(keep=keep)
        self.handle(sample)
        recorder = self._outbox.ledger.recorder
        recorder.add(sample.machine, sample.run_rss_bytes, sample.run_pss_bytes)
        if keep:
            self._outbox.write(lambda: recorder.write(sample.machine, self.model.number))
            if counters := self._sensors.machine_watch.energy_counters:
                self._outbox.write(lambda: self._outbox.ledger.add_energy(self.model.number, counters))
        stood_still = self._sensors.stood_still(lambda: self._read_reports(to_the_end=True))
        if stood_still is not None:
            self.handle(stood_still)

    def _on_sampling_failed(self, error: BaseException | None) -> None:
        self.handle(SamplingFailed(f"the machine could not be sampled: {error!r}"))

    # --- clients and agents -----------------------------------------------------------------------

    async def _on_request(self, peer: Peer, request: Request) -> None:
        match request:
            case Subscribe(history=history):
                # Only dashboards request history.
                peer.has_screen = history > 0
                machine = self.model.sample.machine if self.model.sample is not None else None
                self._check("history", self._publisher.greet(peer, history, self._shown(), machine))
            case Status():
                machine = self.model.sample.machine if self.model.sample is not None else None
                peer.send(StateUpdate(run=self._shown(), machine=machine))
            case Look():
                self._sensors.machine_watch.look_closely()
                peer.send(Answer(id=request.id, outcome=Outcome.DONE, message="looking closely"))
            case Leave():
                self._leaving = self.model.phase.final and self.model.launching is None
                word = Outcome.DONE if self._leaving else Outcome.REFUSED
                peer.send(Answer(id=request.id, outcome=word, message=f"the run is {self.model.word}"))
            case _ if self._lock.is_displaced():
                peer.refuse(request.id, self._displaced())
            case _:
                client = self._client(peer)
                self.handle(Requested(client=client, request=request, states=read_states(self.folder, self.model.grip)))

    def _client(self, peer: Peer) -> int:
        for number, known in self._performer.clients.items():
            if known is peer:
                return number
        self._newest_client += 1
        self._performer.clients[self._newest_client] = peer
        return self._newest_client

    def _on_agent(self, peer: Peer, message: FromAgent) -> None:
        rank = self._agents.receive(peer, message, self.model.number)
        attempt = self._performer.attempt
        if attempt is None:
            return
        if isinstance(message, AgentGreeting) and message.attempt == self.model.number:
            # Also a second peer of a rank: it speaks for the rank when the first leaves.
            record_rank(attempt.folder, peer.pid)
        if rank is not None:
            self.handle(AgentConnected(rank))

    def _on_gone(self, peer: Peer) -> None:
        self._performer.clients = {number: known for number, known in self._performer.clients.items() if known is not peer}
        for rank in self._agents.gone(peer):
            self.handle(AgentGone(rank))


def _report(folder: RunFolder) -> str | None:
    # Imported here: only a run that is over needs it.
    from memtop.supervisor.run.report.page import write_report

    return write_report(folder)
