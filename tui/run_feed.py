"""The values of a run, from its supervisor or, after its end, from its folder."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from memtop.supervisor import wire
from memtop.supervisor.errors import MemtopError, RefusedError
from memtop.tui.feed import Connected, Disconnected, FeedMessage, Sampling, Turn, real_sampler, refusal, turned
from memtop.tui.restart_plan import nothing_left

# A request to look closely lasts 10 s; it is repeated before that.
_LOOK_SECONDS = 5.0


class Client(Protocol):
    """The part of `supervisor.run.client.AsyncRunClient` that feeds use."""

    async def send(self, request: wire.Request) -> None: ...

    async def receive(self) -> wire.Message | None: ...

    async def close(self) -> None: ...


class RunFeed:
    """A run, over its supervisor's socket.

    If the supervisor ends while the trainer lives, a new supervisor is started and the stream
    continues. After the run is over, the feed reads the last state from the run's folder and
    samples this machine itself.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        read_only: bool = False,
        interval: float = 1.0,
        sampler_factory: Callable[[], Sampling] | None = None,
        retry_seconds: float = 1.0,
        turns: Sequence[Turn] = (),
    ) -> None:
        self._turns = turns
        self.read_only = read_only
        self.label: str | None = None
        self._folder = run_folder
        self._interval = interval
        self._sampler_factory = sampler_factory or (lambda: real_sampler(run_folder.parent))
        self._ended = False
        self._refused: str | None = None
        """Why the supervisor cannot answer, although it lives."""
        self._sampler: Sampling | None = None
        self._retry_seconds = retry_seconds
        self._read: tuple[object, ...] | None = None
        self._client: Client | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[wire.Answer]] = {}
        self._look_due = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    def messages(self) -> AsyncIterator[FeedMessage]:
        return turned(self._messages(), self._turns)

    def first_state(self) -> wire.RunState | None:
        """The run as its folder describes it, for the first frame; None if that cannot be read."""
        from memtop.supervisor.run.record.folder import RunFolder
        from memtop.supervisor.run.view import read_state

        try:
            return read_state(RunFolder(self._folder))
        except (MemtopError, OSError):
            return None

    async def _messages(self) -> AsyncIterator[FeedMessage]:
        while True:
            client = await self._connect()
            if client is None:
                async for message in self._without_supervisor():
                    yield message
                continue
            self._client = client
            self._ended = False
            self._read = None
            yield Connected()
            lost, wait = "supervisor is gone - reconnecting", 0.0
            try:
                async for message in self._stream(client):
                    yield message
            except MemtopError as error:
                # It sends what cannot be read.
                lost, wait = str(error), self._retry_seconds
            finally:
                self._client = None
                self._fail_waiting()
                await client.close()
            yield Disconnected(lost)
            await asyncio.sleep(wait)

    async def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        number = next(self._ids)
        client = self._client
        if client is None:
            async for answer in self._alone(make(number)):
                yield answer
            return
        answers: asyncio.Queue[wire.Answer] = asyncio.Queue()
        self._waiting[number] = answers
        try:
            await client.send(make(number))
            while True:
                answer = await answers.get()
                yield answer
                if answer.outcome is not wire.Outcome.ACCEPTED:
                    return
        except ConnectionError as error:
            yield refusal(number, f"the request could not be sent: {error}")
        finally:
            self._waiting.pop(number, None)

    def look_closely(self) -> None:
        if self._client is None:
            # The run is over: this machine is sampled from here.
            if self._sampler is not None:
                self._sampler.nvml.want_pcie()
        elif time.monotonic() >= self._look_due:
            self._look_due = time.monotonic() + _LOOK_SECONDS
            self._looking = asyncio.get_running_loop().create_task(self._look_there())

    async def _look_there(self) -> None:
        async for _ in self.request(lambda number: wire.Look(id=number)):
            # If the supervisor refuses, these values stay unknown with the sample's reason.
            pass

    async def _alone(self, request: wire.Request) -> AsyncIterator[wire.Answer]:
        """Without a supervisor the only possible request is a restart: a new supervisor resumes a
        run that is over.
        """
        if not isinstance(request, wire.Restart) or not self._ended:
            yield refusal(request.id, "the supervisor is gone")
            return
        async for answer in resume(self._folder, request):
            yield answer

    async def _connect(self) -> Client | None:
        from memtop.supervisor.run.client import AsyncRunClient

        try:
            return await AsyncRunClient.connect(self._folder)
        except RefusedError as error:
            self._refused = str(error)
        except (MemtopError, OSError):
            # No supervisor listens. _without_supervisor finds out what that means for the run.
            self._refused = None
        return None

    async def _stream(self, client: Client) -> AsyncIterator[FeedMessage]:
        try:
            await client.send(wire.Subscribe(id=next(self._ids)))
        except ConnectionError:
            # The supervisor ended after we connected; the caller reports that and tries again.
            return
        while (message := await client.receive()) is not None:
            if not isinstance(message, wire.Answer):
                yield message
            elif message.id in self._waiting:
                self._waiting[message.id].put_nowait(message)

    async def _without_supervisor(self) -> AsyncIterator[FeedMessage]:
        """Check a run without a supervisor: start a supervisor if it still trains, else show how it
        ended.
        """
        from memtop.supervisor.run.starting import revive

        try:
            if not self.read_only and await asyncio.to_thread(revive, self._folder):
                return
            run, history = await asyncio.to_thread(self._look)
        except (MemtopError, OSError) as error:
            yield Disconnected(str(error))
            await asyncio.sleep(self._retry_seconds)
            return
        for message in history:
            yield message
        yield wire.StateUpdate(run=run)
        self._ended = not run.alive
        yield Disconnected(self._refused) if self._refused is not None else _unsupervised(run)
        # Another program may resume the run: keep checking, and keep sampling the machine.
        if self._sampler is None:
            self._sampler = await asyncio.to_thread(self._sampler_factory)
        yield await asyncio.to_thread(self._sampler.sample)
        await asyncio.sleep(max(self._retry_seconds, self._interval))

    def _look(self) -> tuple[wire.RunState, list[FeedMessage]]:
        """The run's state, and its history if the files have changed since the last call."""
        from memtop.supervisor.run.record.folder import RunFolder
        from memtop.supervisor.run.view import read_configurations, read_run, read_state

        folder = RunFolder(self._folder)
        wal = folder.ledger_path.with_name(folder.ledger_path.name + "-wal")
        stamp = tuple(_stamp(path) for path in (folder.state_path, folder.ledger_path, wal))
        if stamp == self._read:
            # The file does not say whether the run's processes live.
            return read_state(folder), []
        run, metrics, events = read_run(self._folder)
        self._read = stamp if stamp[0] is not None else None
        rows = wire.ConfigurationRows(rows=read_configurations(self._folder))
        return run, [wire.MetricRows(rows=tuple(metrics), reset_from=0), wire.EventRows(rows=tuple(events)), rows]

    def _fail_waiting(self) -> None:
        for number, answers in self._waiting.items():
            lost = "the supervisor ended before it answered"
            answers.put_nowait(wire.Answer(id=number, outcome=wire.Outcome.FAILED, message=lost))


def _stamp(path: Path) -> tuple[int, int] | None:
    """A value that changes when the file does; None if it is empty: reading a ledger may create an
    empty log.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return (found.st_mtime_ns, found.st_size) if found.st_size else None


def _unsupervised(run: wire.RunState) -> Disconnected:
    if run.alive:
        return Disconnected("supervisor is gone, training continues - reconnecting")
    held = run.settings is not None or (run.program is not None and run.program.grip in ("hooks", "profile"))
    if held and nothing_left(run, run.checkpoint) is not None:
        return Disconnected(f"the run is over ({run.word})", ended=True)
    again = "resumes it" if run.resumes else "starts it again"
    return Disconnected(f"the run is over ({run.word}); r or memtop restart {run.name} {again}", ended=True)


async def resume(run_folder: Path, request: wire.Restart) -> AsyncIterator[wire.Answer]:
    """Start a new supervisor that resumes a run which is over."""
    from memtop.supervisor.run.record.folder import RunFolder
    from memtop.supervisor.run.starting import start_supervisor

    yield wire.Answer(id=request.id, outcome=wire.Outcome.ACCEPTED, message="starting a supervisor for the run")
    try:
        await asyncio.to_thread(start_supervisor, RunFolder(run_folder), request.change)
    except (MemtopError, OSError) as error:
        yield wire.Answer(id=request.id, outcome=wire.Outcome.FAILED, message=str(error))
        return
    yield wire.Answer(id=request.id, outcome=wire.Outcome.DONE, message="the run resumes")
