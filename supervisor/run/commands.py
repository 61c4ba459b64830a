"""What the supervisor does when someone asks: every request is answered, refusals with their reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from memtop.presets.schema import Settings
from memtop.supervisor import units
from memtop.supervisor.errors import MemtopError, UsageError
from memtop.supervisor.run import explain
from memtop.supervisor.run.change import live_values
from memtop.supervisor.run.clients.server import Peer
from memtop.supervisor.wire import (
    Answer,
    CheckpointNow,
    Edit,
    FreeCache,
    Look,
    Outcome,
    Phase,
    Request,
    Restart,
    RunState,
    StateUpdate,
    Status,
    Stop,
    Subscribe,
    Try,
)

if TYPE_CHECKING:
    from memtop.supervisor.run.supervisor import Supervisor


class Commands:
    """Carries out requests on behalf of connected clients."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, peer: Peer, request: Request) -> None:
        """Answer at once where that is possible; what takes longer goes on beside."""
        supervisor = self._supervisor
        match request:
            case Subscribe():
                supervisor.add_viewer(peer, request.history)
            case Status():
                peer.send(StateUpdate(run=supervisor.state(), machine=supervisor.watch.machine))
            case Look():
                supervisor.watch.look_closely()
                peer.send(Answer(id=request.id, outcome=Outcome.DONE, message="looking closely"))
            case FreeCache():
                self._beside(self._free(peer, request.id))
            case CheckpointNow():
                self._beside(self._checkpoint(peer, request.id))
            case Stop():
                self._beside(self._stop(peer, request.id))
            case Restart():
                self._beside(self._restart(peer, request))
            case Edit():
                self._beside(self._edit(peer, request))
            case Try():
                self._beside(self._try(peer, request))

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _free(self, peer: Peer, number: int) -> None:
        if not self._agents_ready(peer, number):
            return
        _accept(peer, number, "the training process frees its cache after the present update")
        answers = await self._supervisor.agents.call("free_cache", self._supervisor.agents.ranks)
        failed = [answer for answer in answers if not answer.ok]
        if failed or not answers:
            _fail(peer, number, failed[0].message if failed else "the training process is gone")
            return
        device = _total(answers, "returned_device_bytes")
        host = _total(answers, "returned_host_bytes")
        where = "no GPU in use" if device is None else f"{units.size(device)} returned to the device"
        message = f"cache freed: {where}, {units.size(host)} returned to the system"
        self._supervisor.event("free", message)
        data = {
            "returned_device_bytes": device,
            "returned_host_bytes": host,
            "ranks": [{"rank": answer.rank, **answer.result} for answer in answers],
        }
        peer.send(Answer(id=number, outcome=Outcome.DONE, message=message, data=data))

    async def _checkpoint(self, peer: Peer, number: int) -> None:
        if not self._agents_ready(peer, number):
            return
        _accept(peer, number, "the training process saves after the present update")
        answers = await self._supervisor.agents.call("checkpoint", {0})
        if not answers or not answers[0].ok:
            _fail(peer, number, answers[0].message if answers else "the training process is gone")
            return
        message = answers[0].message or "checkpoint written"
        peer.send(Answer(id=number, outcome=Outcome.DONE, message=message, data=answers[0].result))

    async def _stop(self, peer: Peer, number: int) -> None:
        supervisor = self._supervisor
        if supervisor.phase.final:
            peer.refuse(number, f"run {supervisor.folder.name!r} is not running: it is {supervisor.phase.value}")
            return
        if supervisor.phase is not Phase.STOPPING:
            supervisor.begin_stopping()
        _accept(peer, number, "stopping: the program finishes its update, saves and exits")
        state = await self._ended()
        word, reason = state.state.value, state.reason or ""
        # "stopped at update 7, ..." says already what the run is.
        message = f"{word}: {reason}" if reason and not reason.startswith(word) else reason or word
        # That it has ended is what was asked for; that its state went with it is not.
        outcome = Outcome.FAILED if explain.not_saved(supervisor.progress.end) else Outcome.DONE
        peer.send(Answer(id=number, outcome=outcome, message=message))

    async def _ended(self) -> RunState:
        while not (state := self._supervisor.state()).state.final:
            await asyncio.sleep(0.1)
        return state

    async def _restart(self, peer: Peer, request: Restart) -> None:
        supervisor = self._supervisor
        before = supervisor.state().attempt
        try:
            settings = supervisor.foreseen(request.change)
            if supervisor.phase is Phase.STOPPING:
                raise MemtopError("the run is being stopped; restart it when it has stopped")
            if supervisor.phase is Phase.RESTARTING and supervisor.survival.comeback is None:
                raise MemtopError("a restart is under way already")
            told = explain.split_change(supervisor.settings, settings) + self._risk(settings)
            supervisor.begin_restart(request.change)
        except MemtopError as error:
            peer.refuse(request.id, str(error), usage=isinstance(error, UsageError))
            return
        _accept(peer, request.id, "restarting from train_latest_state" + told)
        while supervisor.state().attempt == before and not supervisor.phase.final:
            await asyncio.sleep(0.1)
        state = supervisor.state()
        if state.attempt > before:
            message = f"attempt {state.attempt} started" + (f"; {supervisor.again}" if supervisor.again else "")
            peer.send(Answer(id=request.id, outcome=Outcome.DONE, message=message, data={"attempt": state.attempt}))
        else:
            _fail(peer, request.id, state.reason or f"the run is {state.state.value}")

    def _risk(self, after: Settings | None) -> str:
        return explain.risk_of(after, self._supervisor.survival.configurations.rows)

    async def _edit(self, peer: Peer, request: Edit) -> None:
        if not self._agents_ready(peer, request.id):
            return
        supervisor = self._supervisor
        try:
            after = supervisor.foreseen(request.change)
            trial = supervisor.prevention.trials.state
            on_trial = trial.changed if trial is not None and trial.unproven else ()
            values = live_values(supervisor.settings, after, on_trial)
        except MemtopError as error:
            peer.refuse(request.id, str(error), usage=isinstance(error, UsageError))
            return
        if not values:
            peer.send(Answer(id=request.id, outcome=Outcome.DONE, message="nothing changes: the run has these settings"))
            return
        told = explain.split_change(supervisor.settings, after) + self._risk(after)
        _accept(peer, request.id, "from the next update on" + told)
        answers = await supervisor.agents.call("change", {0}, values)
        if not answers or not answers[0].ok:
            _fail(peer, request.id, answers[0].message if answers else "the training process is gone")
            return
        answer = answers[0]
        peer.send(Answer(id=request.id, outcome=Outcome.DONE, message=answer.message or "changed", data=answer.result))

    async def _try(self, peer: Peer, request: Try) -> None:
        trials = self._supervisor.prevention.trials
        try:
            trial = trials.begin(request.change)
        except MemtopError as error:
            peer.refuse(request.id, str(error), usage=isinstance(error, UsageError))
            return
        _accept(peer, request.id, f"trying {trial.title}: measuring before and after")
        trial = await trials.finished()
        message = f"{trial.title}: {trial.state}: {trial.reason}"
        outcome = Outcome.FAILED if trial.state in ("refused", "failed") else Outcome.DONE
        peer.send(Answer(id=request.id, outcome=outcome, message=message, data=msgspec.to_builtins(trial)))

    def _agents_ready(self, peer: Peer, number: int) -> bool:
        supervisor = self._supervisor
        if supervisor.phase.final:
            peer.refuse(number, f"run {supervisor.folder.name!r} is not running: it is {supervisor.phase.value}")
        elif not supervisor.agents.ranks:
            peer.refuse(number, "no training process is connected yet: it is still loading, or it never steps an optimizer")
        else:
            return True
        return False


def _accept(peer: Peer, number: int, message: str) -> None:
    peer.send(Answer(id=number, outcome=Outcome.ACCEPTED, message=message))


def _fail(peer: Peer, number: int, message: str) -> None:
    peer.send(Answer(id=number, outcome=Outcome.FAILED, message=message))


def _total(answers: list[Any], name: str) -> int | None:
    known = [answer.result[name] for answer in answers if answer.result.get(name) is not None]
    return sum(known) if known else None
