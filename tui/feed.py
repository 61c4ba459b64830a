"""Where the dashboard's values come from. A `Feed` is all that it knows of the world.

`LocalFeed` samples this machine, `RunFeed` follows a run over its supervisor's socket, `demo.DemoFeed` plays a script.
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
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.monitor.history import HOST
from memtop.supervisor.monitor.snapshots import only_gpus
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.wire import HistoryRows, StateUpdate

# A wish to look closely lasts 10 s there: asked again well before.
_LOOK_SECONDS = 5.0


@dataclass(frozen=True)
class Connected:
    """Values flow (again)."""


@dataclass(frozen=True)
class Disconnected:
    """Nobody answers any more; what is on the screen is the last that was known."""

    reason: str
    """Words for a person, e.g. "supervisor is gone - reconnecting"."""
    ended: bool = False
    """True where that is as it should be: the run is over and its supervisor has left."""


@dataclass(frozen=True)
class LogLines:
    """New lines of the run's output, from feeds whose run has no log file."""

    rows: tuple[str, ...]


@dataclass(frozen=True)
class Replayed:
    """Where a replay stands; said by replays alone."""

    line: str
    """e.g. "replay, 00:03:11 of 00:41:02, 60x"."""
    rewound: bool = False
    """It went back: what was shown before is forgotten and told anew."""


@dataclass(frozen=True)
class Followed:
    """The process tree that `--pid` names. No processes: it has ended."""

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
    | Replayed
)


class Feed(Protocol):
    """A stream of values in one direction, requests in the other."""

    read_only: bool
    """True where no action may be offered."""
    label: str | None
    """What to say about all that it tells, e.g. "demo - invented numbers"."""

    def messages(self) -> AsyncIterator[FeedMessage]:
        """Everything that happens, until the dashboard closes."""

    def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        """Send the request that `make` builds from an id; yields accepted, then done or failed; or refused."""


@runtime_checkable
class Controlled(Protocol):
    """A feed with a clock of its own."""

    def control(self, action: str) -> bool:
        """pause, slower, faster, back, forward, start or end; False while there is nothing to control yet."""


@runtime_checkable
class Staged(Protocol):
    """A feed that plays invented scenes when it is asked to."""

    def play(self, scene: str) -> None:
        """`oom`: the run dies of memory."""


@runtime_checkable
class DetailedFeed(Protocol):
    """A feed that can read more on request: some values cost the driver too much time to read them always."""

    def look_closely(self) -> None:
        """Read the expensive values, too, for the next few seconds: a GPU's details are on the screen."""


class Wanted(Protocol):
    """What is needed of `supervisor.monitor.nvml.NvmlReader`."""

    def want_pcie(self) -> None: ...


class Sampling(Protocol):
    """What is needed of `supervisor.monitor.sampler.Sampler`."""

    @property
    def nvml(self) -> Wanted: ...

    def sample(self) -> MachineSnapshot: ...


def real_sampler(runs_dir: Path | None = None) -> Sampling:
    """The sampler of this machine; imported late because it loads the driver's library.

    Without a folder of runs it calls no process a stray.
    """
    from memtop.supervisor.monitor.sampler import Sampler
    from memtop.supervisor.run.record.view import known_runs

    return Sampler() if runs_dir is None else Sampler(lambda: known_runs(runs_dir))


class LocalFeed:
    """No run: this machine's GPUs, their processes and the host's memory; with `pid` also that process tree."""

    def __init__(
        self,
        sampler_factory: Callable[[], Sampling] = real_sampler,
        interval: float = 1.0,
        *,
        read_only: bool = False,
        pid: int | None = None,
    ) -> None:
        self.read_only = read_only
        self.label: str | None = None
        self._sampler_factory = sampler_factory
        self._interval = interval
        self._pid = pid
        self._sampler: Sampling | None = None

    async def messages(self) -> AsyncIterator[FeedMessage]:
        # The driver may block for seconds when a GPU is in trouble: never on the thread that draws.
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
    """The process tree below `pid` as it is now."""
    from memtop.supervisor.monitor.processes.table import process_tree

    tree = process_tree(pid)
    if tree is None:
        return Followed(pid)
    known = [process.rss_bytes for process in tree if process.rss_bytes is not None]
    return Followed(pid, tree[0].command, frozenset(p.pid for p in tree), sum(known) if known else None)


class Client(Protocol):
    """What is needed of `supervisor.run.client.AsyncRunClient`."""

    async def send(self, request: wire.Request) -> None: ...

    async def receive(self) -> wire.Message | None: ...

    async def close(self) -> None: ...


class RunFeed:
    """A run, over its supervisor's socket.

    If the supervisor dies, a new one is started while the trainer lives, and the stream goes on. Once the run is over
    and nobody answers, the last state is read from the run's folder, and this machine is sampled from here.
    """

    def __init__(
        self,
        run_folder: Path,
        *,
        read_only: bool = False,
        interval: float = 1.0,
        sampler_factory: Callable[[], Sampling] | None = None,
        retry_seconds: float = 1.0,
    ) -> None:
        self.read_only = read_only
        self.label: str | None = None
        self._folder = run_folder
        self._interval = interval
        self._sampler_factory = sampler_factory or (lambda: real_sampler(run_folder.parent))
        self._ended = False
        self._sampler: Sampling | None = None
        self._retry_seconds = retry_seconds
        self._read: tuple[object, ...] | None = None
        self._client: Client | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[wire.Answer]] = {}
        self._look_due = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def messages(self) -> AsyncIterator[FeedMessage]:
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
            try:
                async for message in self._stream(client):
                    yield message
            finally:
                self._client = None
                self._fail_waiting()
                await client.close()
            yield Disconnected("supervisor is gone - reconnecting")

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
            # A supervisor older than this dashboard refuses: then these values stay unknown, with the sample's own reason.
            pass

    async def _alone(self, request: wire.Request) -> AsyncIterator[wire.Answer]:
        """Without a supervisor only one thing is possible: taking up a run that is over, under a new one."""
        if not isinstance(request, wire.Restart) or not self._ended:
            yield _refusal(request.id, "nobody answers: the supervisor is gone")
            return
        from memtop.supervisor.run.clients.client import start_supervisor
        from memtop.supervisor.run.record.folder import RunFolder

        yield wire.Answer(id=request.id, outcome=wire.Outcome.ACCEPTED, message="starting a supervisor for the run")
        try:
            await asyncio.to_thread(start_supervisor, RunFolder(self._folder), request.change)
        except (MemtopError, OSError) as error:
            yield wire.Answer(id=request.id, outcome=wire.Outcome.FAILED, message=str(error))
            return
        yield wire.Answer(id=request.id, outcome=wire.Outcome.DONE, message="the run is taken up again")

    async def _connect(self) -> Client | None:
        from memtop.supervisor.run.clients.client import AsyncRunClient

        try:
            return await AsyncRunClient.connect(self._folder)
        except (MemtopError, OSError):
            # Nobody listens. What that means for the run is for _without_supervisor to find out and say.
            return None

    async def _stream(self, client: Client) -> AsyncIterator[FeedMessage]:
        try:
            await client.send(wire.Subscribe(id=next(self._ids)))
        except ConnectionError:
            # Gone between connecting and asking; the caller says so and tries again.
            return
        while (message := await client.receive()) is not None:
            if not isinstance(message, wire.Answer):
                yield message
            elif message.id in self._waiting:
                self._waiting[message.id].put_nowait(message)

    async def _without_supervisor(self) -> AsyncIterator[FeedMessage]:
        """One look at a run that nobody supervises: revive its supervisor if it still trains, else show how it ended."""
        from memtop.supervisor.run.clients.client import revive

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
        yield _unsupervised(run)
        # Somebody may take the run up again: keep looking, and keep the machine's panels alive meanwhile.
        if self._sampler is None:
            self._sampler = await asyncio.to_thread(self._sampler_factory)
        yield await asyncio.to_thread(self._sampler.sample)
        await asyncio.sleep(max(self._retry_seconds, self._interval))

    def _look(self) -> tuple[wire.RunState, list[FeedMessage]]:
        """The run's state now, and its history if that is another than at the last look: a long one takes long to read."""
        from memtop.supervisor.run.record.folder import RunFolder
        from memtop.supervisor.run.record.view import read_configurations, read_run, read_state

        folder = RunFolder(self._folder)
        wal = folder.ledger_path.with_name(folder.ledger_path.name + "-wal")
        stamp = tuple(_stamp(path) for path in (folder.state_path, folder.ledger_path, wal))
        if stamp == self._read:
            # Whether its processes live is not written in the file.
            return read_state(folder), []
        run, metrics, events = read_run(self._folder)
        self._read = stamp if stamp[0] is not None else None
        told = wire.ConfigurationRows(rows=read_configurations(self._folder))
        return run, [wire.MetricRows(rows=tuple(metrics), reset_from=0), wire.EventRows(rows=tuple(events)), told]

    def _fail_waiting(self) -> None:
        for number, answers in self._waiting.items():
            lost = "the supervisor went away before it answered"
            answers.put_nowait(wire.Answer(id=number, outcome=wire.Outcome.FAILED, message=lost))


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes whenever a file does; None where there is nothing in it: reading a ledger may create an empty log."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return (found.st_mtime_ns, found.st_size) if found.st_size else None


def _unsupervised(run: wire.RunState) -> Disconnected:
    if run.alive:
        return Disconnected("supervisor is gone, training goes on - reconnecting")
    return Disconnected(f"the run is over ({run.state.value}); r or memtop restart {run.name} takes it up again", ended=True)


def _refusal(number: int, message: str) -> wire.Answer:
    return wire.Answer(id=number, outcome=wire.Outcome.REFUSED, message=message)


Turn = Callable[[FeedMessage], FeedMessage | None]
"""What becomes of a message; None: it is not passed on."""


class TurnedLocalFeed(LocalFeed):
    turns: Sequence[Turn] = ()

    async def messages(self) -> AsyncIterator[FeedMessage]:
        async for message in _turned(super().messages(), self.turns):
            yield message


class TurnedRunFeed(RunFeed):
    turns: Sequence[Turn] = ()

    async def messages(self) -> AsyncIterator[FeedMessage]:
        async for message in _turned(super().messages(), self.turns):
            yield message


async def _turned(messages: AsyncIterator[FeedMessage], turns: Sequence[Turn]) -> AsyncIterator[FeedMessage]:
    # A feed lets go of its connection when its generator is closed.
    async with aclosing(cast("AsyncGenerator[FeedMessage, None]", messages)) as source:
        async for message in source:
            turned: FeedMessage | None = message
            for turn in turns:
                turned = None if turned is None else turn(turned)
            if turned is not None:
                yield turned


def choosing(indices: Collection[int]) -> Turn:
    """Pass on only these GPUs."""

    def turn(message: FeedMessage) -> FeedMessage | None:
        if isinstance(message, MachineSnapshot):
            return only_gpus(message, indices)
        if isinstance(message, StateUpdate) and message.machine is not None:
            return msgspec.structs.replace(message, machine=only_gpus(message.machine, indices))
        if isinstance(message, HistoryRows) and message.key != HOST and message.gpu_index not in indices:
            return None
        return message

    return turn
