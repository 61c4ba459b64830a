"""How many connections the web server has open, and which one is closed for another.

A connection is idle while no whole request of it is being answered: it has sent nothing yet, it
sends its headers slowly, or its last answer is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from memtop.supervisor.language import tr

_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
)


class Limits(NamedTuple):
    """Of one server."""

    tabs: int = 16
    connections: int = 64
    """With those of the tabs."""
    idle_seconds: float = 10.0
    """After this time an idle connection is closed."""


class Connections:
    """Those of one server. If there are too many, the one that has been idle longest is closed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: dict[asyncio.Protocol, asyncio.Transport] = {}
        """By the protocol that answers."""
        self._idle: dict[asyncio.Protocol, asyncio.TimerHandle] = {}
        """The one that has been idle longest comes first."""

    def protocol(self, answers: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """What the event loop calls for each new connection. `answers` makes the protocol that
        answers."""
        return lambda: _Counted(answers(), self)

    @contextlib.contextmanager
    def answering(self, protocol: asyncio.Protocol) -> Iterator[None]:
        """A whole request has come, and is answered meanwhile."""
        self._leave_idle(protocol)
        try:
            yield
        finally:
            if protocol in self._open:
                self._become_idle(protocol)

    def admit(self, protocol: asyncio.Protocol, transport: asyncio.Transport) -> bool:
        """Whether there is room for a new connection."""
        if len(self._open) >= self._limits.connections:
            longest = next(iter(self._idle), None)
            if longest is None:
                return False
            self._close(longest)
        self._open[protocol] = transport
        self._become_idle(protocol)
        return True

    def lost(self, protocol: asyncio.Protocol) -> None:
        """A connection is closed."""
        self._open.pop(protocol, None)
        self._leave_idle(protocol)

    def refusal(self) -> bytes:
        """The answer to a connection for which there is no room."""
        words = tr(f"memtop has {self._limits.connections} open connections, and all are in use: close a tab")
        text = f"503: {words}\n".encode()
        return _REFUSAL % (len(text), text)

    def _become_idle(self, protocol: asyncio.Protocol) -> None:
        self._idle[protocol] = asyncio.get_running_loop().call_later(self._limits.idle_seconds, self._close, protocol)

    def _leave_idle(self, protocol: asyncio.Protocol) -> None:
        timer = self._idle.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _close(self, protocol: asyncio.Protocol) -> None:
        transport = self._open[protocol]
        self.lost(protocol)
        # A client that reads nothing must not hold it open.
        transport.abort()


class _Counted(asyncio.Protocol):
    """One connection: hands everything on to the protocol that answers."""

    def __init__(self, answers: asyncio.Protocol, connections: Connections) -> None:
        self._answers = answers
        self._connections = connections
        self._admitted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._admitted = self._connections.admit(self._answers, transport)
        if self._admitted:
            self._answers.connection_made(transport)
        else:
            transport.write(self._connections.refusal())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._admitted:
            self._connections.lost(self._answers)
            self._answers.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._admitted:
            self._answers.data_received(data)

    def eof_received(self) -> bool | None:
        return self._answers.eof_received() if self._admitted else None

    def pause_writing(self) -> None:
        self._answers.pause_writing()

    def resume_writing(self) -> None:
        self._answers.resume_writing()
