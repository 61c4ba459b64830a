"""The feeds of this machine and of a run with something done to each message on its way to the dashboard.

Subclasses and not wrappers: the dashboard asks a feed what it is and what else it can do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import cast

import msgspec

from memtop.supervisor.monitor.history import HOST
from memtop.supervisor.monitor.snapshots import only_gpus
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.wire import HistoryRows, StateUpdate
from memtop.tui.feed import FeedMessage, LocalFeed, RunFeed

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
    """Only these GPUs are told of."""
    labels = {f"GPU {index}" for index in indices}

    def turn(message: FeedMessage) -> FeedMessage | None:
        if isinstance(message, MachineSnapshot):
            return only_gpus(message, indices)
        if isinstance(message, StateUpdate) and message.machine is not None:
            return msgspec.structs.replace(message, machine=only_gpus(message.machine, indices))
        if isinstance(message, HistoryRows) and message.key != HOST and message.label not in labels:
            return None
        return message

    return turn
