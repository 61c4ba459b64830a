"""The connected agents of the present attempt, and the commands sent to them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from memtop.supervisor.run.clients.server import Peer


class AgentAnswer(msgspec.Struct, frozen=True):
    """One rank's answer to a command."""

    rank: int
    ok: bool
    message: str
    result: dict[str, Any]


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

    def receive(self, peer: Peer, message: dict[str, Any], attempt: int) -> bool:
        """Handle a greeting or an answer from an agent.

        True if a rank of this attempt has just connected.

        Greetings from processes of earlier attempts are ignored.
        """
        if message.get("type") == "agent":
            peer.agent = message
            if message.get("attempt") == attempt and isinstance(message.get("rank"), int):
                self._peers[message["rank"]] = peer
                return True
        elif message.get("type") == "answer" and message.get("id") in self._open:
            rank, future = self._open.pop(message["id"])
            if not future.done():
                result = message.get("result") or {}
                future.set_result(AgentAnswer(rank, bool(message.get("ok")), str(message.get("message", "")), result))
        return False

    def gone(self, peer: Peer) -> None:
        for rank, known in list(self._peers.items()):
            if known is peer:
                del self._peers[rank]
                for number, (waiting, future) in list(self._open.items()):
                    if waiting == rank:
                        del self._open[number]
                        _fail(future, rank, "the training process disconnected before it answered")

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
        future.set_result(AgentAnswer(rank, False, message, {}))
