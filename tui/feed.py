"""Where the dashboard's values come from. The dashboard reads everything from one `Feed`.

`LocalFeed` samples this machine, `RunFeed` follows a run over its supervisor's socket,
`replay.ReplayFeed` plays a past run.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import msgspec

from memtop.supervisor import wire
from memtop.supervisor.errors import MemtopError, RefusedError
from memtop.supervisor.monitor.history import HOST
from memtop.supervisor.monitor.values import MachineSnapshot, only_gpus
from memtop.supervisor.wire import HistoryRows, StateUpdate

# A request to look closely lasts 10 s; it is repeated before that.
_LOOK_SECONDS = 5.0


@dataclass(frozen=True)
class Connected:
    """The feed delivers values (again)."""


@dataclass(frozen=True)
class Disconnected:
    """The connection is lost; the screen shows the last known values."""

    reason: str
    """A text for the user, e.g. "supervisor is gone - reconnecting"."""
    ended: bool = False
    """True if this is expected: the run is over and its supervisor has ended."""


@dataclass(frozen=True)
class LogLines:
    """New lines of the run's output, from feeds whose run has no log file."""

    rows: tuple[str, ...]


@dataclass(frozen=True)
class ReplayPosition:
    """The position of a replay."""

    line: str
    """e.g. "replay, 00:03:11 of 00:41:02, 60x"."""
    short: str
    """The same for a narrow terminal: "replay 60x"."""
    rewound: bool = False
    """The replay went back: everything shown so far is forgotten and sent again."""


@dataclass(frozen=True)
class Followed:
    """The process tree of `--pid`. No processes: it has ended."""

    pid: int
    command: str = ""
    pids: frozenset[int] = frozenset()
    rss_bytes: int | None = None


FeedMessage = (
    wire.StateUpdate
    | wire.MetricRows
    | wire.EventRows
    | wire.HistoryRows
    | wire.ConfigurationRows
    | MachineSnapshot
    | Connected
    | Disconnected
    | LogLines
    | Followed
    | ReplayPosition
)


class Feed(Protocol):
    """A stream of values in one direction, requests in the other."""

    read_only: bool
    """True if no action may be offered."""
    label: str | None
    """A note on all its values for the header, e.g. "replay"."""

    def messages(self) -> AsyncIterator[FeedMessage]:
        """All messages, until the dashboard closes."""

    def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        """Send the request that `make` builds from an id; yields accepted, then done or failed; or
        refused.
        """


@runtime_checkable
class Controlled(Protocol):
    """A feed with its own clock."""

    def control(self, action: str) -> bool:
        """pause, slower, faster, back, forward, start or end; False while there is nothing to
        control yet.
        """


@runtime_checkable
class DetailedFeed(Protocol):
    """A feed that can read more on request: some values cost the driver too much time to read them
    always.
    """

    def look_closely(self) -> None:
        """Read the expensive values, too, for the next few seconds: a GPU's details are on the
        screen.
        """


Turn = Callable[[FeedMessage], FeedMessage | None]
"""Changes a message before the dashboard gets it; None drops the message."""


async def _turned(messages: AsyncIterator[FeedMessage], turns: Sequence[Turn]) -> AsyncIterator[FeedMessage]:
    # Closing the generator closes the feed's connection.
    async with aclosing(cast("AsyncGenerator[FeedMessage, None]", messages)) as source:
        async for message in source:
            turned: FeedMessage | None = message
            for turn in turns:
                turned = None if turned is None else turn(turned)
            if turned is not None:
                yield turned


def choosing(indices: Collection[int]) -> Turn:
    """Keep only these GPUs, by the driver's index."""

    def turn(message: FeedMessage) -> FeedMessage | None:
        if isinstance(message, MachineSnapshot):
            return only_gpus(message, indices)
        if isinstance(message, StateUpdate) and message.machine is not None:
            return msgspec.structs.replace(message, machine=only_gpus(message.machine, indices))
        if isinstance(message, HistoryRows) and message.key != HOST and message.gpu_index not in indices:
            return None
        return message

    return turn


class Wanted(Protocol):
    """The part of `supervisor.monitor.nvml.NvmlReader` that feeds use."""

    def want_pcie(self) -> None: ...


class Sampling(Protocol):
    """The part of `supervisor.monitor.sampler.Sampler` that feeds use."""

    @property
    def nvml(self) -> Wanted: ...

    def sample(self) -> MachineSnapshot: ...


def real_sampler(runs_dir: Path | None = None) -> Sampling:
    """The sampler of this machine; imported late because it loads the driver's library.

    Without a folder of runs, no process counts as a stray.
    """
    from memtop.supervisor.monitor.sampler import Sampler
    from memtop.supervisor.run.view import known_runs

    return Sampler() if runs_dir is None else Sampler(lambda: known_runs(runs_dir))


class LocalFeed:
    """This machine without a run: its GPUs, their processes and host memory; with `pid` also that
    process tree.
    """

    def __init__(
        self,
        sampler_factory: Callable[[], Sampling] = real_sampler,
        interval: float = 1.0,
        *,
        read_only: bool = False,
        pid: int | None = None,
        turns: Sequence[Turn] = (),
    ) -> None:
        self._turns = turns
        self.read_only = read_only
        self.label: str | None = None
        self._sampler_factory = sampler_factory
        self._interval = interval
        self._pid = pid
        self._sampler: Sampling | None = None

    def messages(self) -> AsyncIterator[FeedMessage]:
        return _turned(self._messages(), self._turns)

    async def _messages(self) -> AsyncIterator[FeedMessage]:
        # A driver call may block for seconds if a GPU is in trouble, so it never runs on the thread
        # that draws.
        sampler = self._sampler = await asyncio.to_thread(self._sampler_factory)
        yield Connected()
        while True:
            if self._pid is not None:
                yield await asyncio.to_thread(follow, self._pid)
            yield await asyncio.to_thread(sampler.sample)
            await asyncio.sleep(self._interval)

    def look_closely(self) -> None:
        if self._sampler is not None:
            self._sampler.nvml.want_pcie()

    async def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        yield _refusal(make(0).id, "there is no run to ask")


def follow(pid: int) -> Followed:
    """The process tree below `pid`."""
    from memtop.supervisor.monitor.processes.table import process_tree

    tree = process_tree(pid)
    if tree is None:
        return Followed(pid)
    known = [process.rss_bytes for process in tree if process.rss_bytes is not None]
    return Followed(pid, tree[0].command, frozenset(p.pid for p in tree), sum(known) if known else None)


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
        return _turned(self._messages(), self._turns)

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
            yield _refusal(number, f"the request could not be sent: {error}")
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
            yield _refusal(request.id, "the supervisor is gone")
            return
        from memtop.supervisor.run.client import start_supervisor
        from memtop.supervisor.run.record.folder import RunFolder

        yield wire.Answer(id=request.id, outcome=wire.Outcome.ACCEPTED, message="starting a supervisor for the run")
        try:
            await asyncio.to_thread(start_supervisor, RunFolder(self._folder), request.change)
        except (MemtopError, OSError) as error:
            yield wire.Answer(id=request.id, outcome=wire.Outcome.FAILED, message=str(error))
            return
        yield wire.Answer(id=request.id, outcome=wire.Outcome.DONE, message="the run resumes")

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
        from memtop.supervisor.run.client import revive

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
    return Disconnected(f"the run is over ({run.state.value}); r or memtop restart {run.name} resumes it", ended=True)


def _refusal(number: int, message: str) -> wire.Answer:
    return wire.Answer(id=number, outcome=wire.Outcome.REFUSED, message=message)
