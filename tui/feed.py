"""Where the dashboard's values come from. The dashboard reads everything from one `Feed`.

`LocalFeed` samples this machine, `run_feed.RunFeed` follows a run over its supervisor's socket,
`replay.ReplayFeed` plays a past run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import msgspec

from memtop.supervisor import wire
from memtop.supervisor.monitor.history import HOST
from memtop.supervisor.monitor.values import MachineSnapshot, only_gpus
from memtop.supervisor.wire import HistoryRows, StateUpdate


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


@dataclass(frozen=True)
class Others:
    """The training programs on this machine that memtop did not start, a line for each."""

    rows: tuple[str, ...]


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
    | Others
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


Beside = Callable[[MachineSnapshot], Sequence[FeedMessage]]
"""More messages after each sample. It may read files, so it never runs on the thread that draws."""
Turn = Callable[[FeedMessage], FeedMessage | None]
"""Changes a message before the dashboard gets it; None drops the message."""


async def turned(messages: AsyncIterator[FeedMessage], turns: Sequence[Turn]) -> AsyncIterator[FeedMessage]:
    """The messages after all the turns."""
    # Closing the generator closes the feed's connection.
    async with aclosing(cast("AsyncGenerator[FeedMessage, None]", messages)) as source:
        async for message in source:
            changed: FeedMessage | None = message
            for turn in turns:
                changed = None if changed is None else turn(changed)
            if changed is not None:
                yield changed


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
        beside: Beside | None = None,
        label: str | None = None,
        turns: Sequence[Turn] = (),
    ) -> None:
        self._turns = turns
        self._beside = beside
        self.read_only = read_only
        self.label = label
        self._sampler_factory = sampler_factory
        self._interval = interval
        self._pid = pid
        self._sampler: Sampling | None = None

    def messages(self) -> AsyncIterator[FeedMessage]:
        return turned(self._messages(), self._turns)

    async def _messages(self) -> AsyncIterator[FeedMessage]:
        # A driver call may block for seconds if a GPU is in trouble, so it never runs on the thread
        # that draws.
        sampler = self._sampler = await asyncio.to_thread(self._sampler_factory)
        yield Connected()
        while True:
            if self._pid is not None:
                yield await asyncio.to_thread(follow, self._pid)
            sample = await asyncio.to_thread(sampler.sample)
            yield sample
            if self._beside is not None:
                for message in await asyncio.to_thread(self._beside, sample):
                    yield message
            await asyncio.sleep(self._interval)

    def look_closely(self) -> None:
        if self._sampler is not None:
            self._sampler.nvml.want_pcie()

    async def request(self, make: Callable[[int], wire.Request]) -> AsyncIterator[wire.Answer]:
        yield refusal(make(0).id, "there is no run to ask")


def follow(pid: int) -> Followed:
    """The process tree below `pid`."""
    from memtop.supervisor.monitor.processes.table import process_tree

    tree = process_tree(pid)
    if tree is None:
        return Followed(pid)
    known = [process.rss_bytes for process in tree if process.rss_bytes is not None]
    return Followed(pid, tree[0].command, frozenset(p.pid for p in tree), sum(known) if known else None)


def refusal(number: int, message: str) -> wire.Answer:
    """The answer to a request that cannot be carried out now."""
    return wire.Answer(id=number, outcome=wire.Outcome.REFUSED, message=message)
