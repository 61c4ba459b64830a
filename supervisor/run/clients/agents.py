"""The connected agents of the present attempt, and the commands sent to them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from memtop.supervisor.run.clients.server import Peer
from memtop.supervisor.run.events import AgentAnswer


class Agents:
    """The connected ranks, and the commands that they have not answered yet."""

    def __init__(self) -> None:
        self._peers: dict[int, Peer] = {}
        self._open: dict[int, tuple[int, asyncio.Future[AgentAnswer]]] = {}
        self._ids = itertools.count(1)

    @property
    def ranks(self) -> set[int]:
        return set(self._peers)

    def reset(self) -> None:
        """A new attempt starts: earlier agents do not count any more."""
        self._peers.clear()
        for rank, future in self._open.values():
            _fail(future, rank, "the training process ended before it answered")
        self._open.clear()

    def receive(self, peer: Peer, message: dict[str, Any], attempt: int) -> int | None:
        """Take a greeting or an answer from an agent.

        Returns the rank that has just connected; greetings of processes of an earlier attempt are
        ignored.
        """
        if message.get("type") == "agent":
            peer.agent = message
            rank = message.get("rank")
            if message.get("attempt") == attempt and isinstance(rank, int):
                self._peers[rank] = peer
                return rank
        elif message.get("type") == "answer" and message.get("id") in self._open:
            rank, future = self._open.pop(message["id"])
            if not future.done():
                result = message.get("result") or {}
                answer = AgentAnswer(
                    rank=rank, ok=bool(message.get("ok")), message=str(message.get("message", "")), result=result
                )
                future.set_result(answer)
        return None

    def gone(self, peer: Peer) -> list[int]:
        """The ranks that this peer spoke for."""
        ranks = [rank for rank, known in self._peers.items() if known is peer]
        for rank in ranks:
            del self._peers[rank]
        for number, (rank, future) in list(self._open.items()):
            if rank in ranks:
                del self._open[number]
                _fail(future, rank, "the training process disconnected before it answered")
        return ranks

    async def call(self, name: str, ranks: set[int], values: dict[str, Any] | None = None) -> list[AgentAnswer]:
        """Send a command with its values to these ranks.

        Wait until each has answered or disconnected.
        """
        futures = []
        for rank in sorted(ranks & self.ranks):
            number = next(self._ids)
            future: asyncio.Future[AgentAnswer] = asyncio.get_running_loop().create_future()
            self._open[number] = (rank, future)
            message: dict[str, Any] = {"type": "command", "id": number, "name": name}
            self._peers[rank].send(message if values is None else {**message, "values": values})
            futures.append(future)
        return list(await asyncio.gather(*futures))


def _fail(future: asyncio.Future[AgentAnswer], rank: int, message: str) -> None:
    if not future.done():
        future.set_result(AgentAnswer(rank=rank, ok=False, message=message))
