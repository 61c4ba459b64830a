"""The control socket: accepts connections of dashboards, commands and agents of the same user,
and of root: the agents of a program under the user's own sudo connect as root.

It sends commands to the agents, and news to the subscribers: the state at least once and at most
five times a second, metric rows and events at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sqlite3
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.monitor.history import label_of
from memtop.supervisor.monitor.values import MachineSnapshot
from memtop.supervisor.run.events import AgentAnswer
from memtop.supervisor.run.record.ledger import Ledger
from memtop.supervisor.run.reports import Step
from memtop.supervisor.wire import (
    Answer,
    Configuration,
    ConfigurationRows,
    Event,
    EventRows,
    HistoryRows,
    Message,
    Metric,
    MetricRows,
    Outcome,
    Request,
    RunState,
    StateUpdate,
    Whole,
)

_LINE_LIMIT = 1 << 20
# A client that does not read must not make the supervisor's memory grow.
_BACKLOG_LIMIT = 8 << 20
_ENCODER = msgspec.json.Encoder()


Scalar = bool | Whole | float | str | None


class AgentGreeting(msgspec.Struct, frozen=True, tag="agent"):
    """A rank's first message."""

    attempt: Whole
    rank: Whole


class AgentReply(msgspec.Struct, frozen=True, tag="answer"):
    """A rank's answer to the command with this number."""

    id: Whole
    ok: bool = False
    message: str = ""
    result: dict[str, Scalar | dict[str, Scalar]] = {}


FromAgent = AgentGreeting | AgentReply


class Peer:
    """One connected client or agent."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.subscribed = False
        self.has_screen = False
        """Whether it is a dashboard."""
        self.is_agent = False
        credentials = peer_of(writer.get_extra_info("socket"))
        self.uid = credentials.uid
        self.pid = credentials.pid
        """The pid of the peer, as the kernel reports it. 0 if it is outside our pid namespace."""

    def send(self, message: Message | dict[str, Any]) -> None:
        """Queue a message. A peer that does not read is disconnected."""
        self.send_encoded(_ENCODER.encode(message) + b"\n")

    def send_encoded(self, line: bytes) -> None:
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > _BACKLOG_LIMIT:
            self._writer.transport.abort()
            return
        self._writer.write(line)

    def refuse(self, request_id: int, message: str, *, usage: bool = False) -> None:
        self.send(Answer(id=request_id, outcome=Outcome.REFUSED, message=message, usage=usage))


class ControlServer:
    """Listens on the run's socket.

    The callbacks run in the event loop, one message of a peer at a time.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_request: Callable[[Peer, Request], Awaitable[None]],
        on_agent: Callable[[Peer, FromAgent], None],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self.path = path
        self.peers: set[Peer] = set()
        self._on_request = on_request
        self._on_agent = on_agent
        self._on_gone = on_gone
        self._server: asyncio.Server | None = None
        self._inode: int | None = None

    async def start(self) -> None:
        """Listen, or listen again at a new socket. Connections stay. Raises RunFolderError."""
        if self._server is not None:
            self._server.close()
        try:
            # We hold the run's lock, so an existing socket belongs to a supervisor that has died.
            self.path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, path=str(self.path), limit=_LINE_LIMIT)
            self.path.chmod(0o600)
            self._inode = self.path.stat().st_ino
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot create a socket: {error.strerror}; set MEMTOP_SOCKET_DIR") from None

    def is_there(self) -> bool:
        """Whether clients can find the socket. False if its folder is closed to this user."""
        return os.path.exists(self.path)  # noqa: PTH110 - `Path.exists` raises PermissionError

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for peer in list(self.peers):
            peer._writer.close()
        # A run that was deleted and created anew has the same path, and another supervisor.
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(writer)
        if peer.uid not in (os.getuid(), 0):
            writer.close()
            return
        self.peers.add(peer)
        try:
            while line := await reader.readline():
                await self._dispatch(peer, line)
        except (ConnectionError, ValueError):
            # The peer is gone, or sent a line that is too long: disconnect it.
            pass
        finally:
            self.peers.discard(peer)
            writer.close()
            self._on_gone(peer)

    async def _dispatch(self, peer: Peer, line: bytes) -> None:
        message: Any = None
        try:
            message = msgspec.json.decode(line)
            if isinstance(message, dict) and (peer.is_agent or message.get("type") == "agent"):
                said = msgspec.convert(message, FromAgent)
                peer.is_agent = True
                self._on_agent(peer, said)
                return
            request = msgspec.convert(message, Request)
        except msgspec.ValidationError as error:
            found = message.get("id") if isinstance(message, dict) else None
            number = found if isinstance(found, int) and abs(found) < 1 << 53 else 0
            peer.refuse(number, f"not understood: {error}")
            if peer.is_agent:
                # The rule that waits for this answer must not wait forever.
                self._on_agent(peer, AgentReply(id=number, message=f"its answer is not understood: {error}"))
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            peer.refuse(0, "not JSON")
            return
        except RecursionError:
            peer.refuse(0, "not understood: nested too deeply")
            return
        await self._on_request(peer, request)


class Credentials(NamedTuple):
    """The process at the other end of a Unix socket."""

    pid: int
    """0 if it is outside our pid namespace."""
    uid: int


def peer_of(connection: socket.socket) -> Credentials:
    """The process that connected to this socket, or that listened when this end connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return Credentials(int(pid), int(uid))


class Agents:
    """The connected ranks, and the commands that they have not answered yet."""

    def __init__(self) -> None:
        self._peers: dict[int, list[Peer]] = {}
        """By rank, the peers that have greeted with it. The first speaks for the rank. When it
        leaves, the next does."""
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

    def receive(self, peer: Peer, message: FromAgent, attempt: int) -> int | None:
        """Take a greeting or an answer from an agent.

        Returns the rank that has just connected. Greetings of processes of an earlier attempt are
        ignored. A rank that is connected already keeps its agent.
        """
        match message:
            case AgentGreeting(rank=rank) if message.attempt == attempt:
                peers = self._peers.setdefault(rank, [])
                if peer not in peers:
                    peers.append(peer)
                return rank if peers[0] is peer else None
            case AgentReply(id=number) if number in self._open:
                rank, future = self._open.pop(number)
                if not future.done():
                    future.set_result(AgentAnswer(rank=rank, ok=message.ok, message=message.message, result=message.result))
        return None

    def gone(self, peer: Peer) -> list[int]:
        """The ranks that have lost their agent with this peer."""
        ranks = [rank for rank, peers in self._peers.items() if peers[0] is peer]
        self._peers = {rank: left for rank, peers in self._peers.items() if (left := [one for one in peers if one is not peer])}
        for number, (rank, future) in list(self._open.items()):
            if rank in ranks:
                del self._open[number]
                _fail(future, rank, "the training process disconnected before it answered")
        return [rank for rank in ranks if rank not in self._peers]

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
            self._peers[rank][0].send(message if values is None else {**message, "values": values})
            futures.append(future)
        return list(await asyncio.gather(*futures))


def _fail(future: asyncio.Future[AgentAnswer], rank: int, message: str) -> None:
    if not future.done():
        future.set_result(AgentAnswer(rank=rank, ok=False, message=message))


_STATE_FILE_SECONDS = 1.0
_ROWS_AGAIN = 2000
_METRIC_FIELDS = tuple(name for name in Metric.__struct_fields__ if name not in ("attempt", "updates"))


class Publisher:
    """Collects news and sends it to every subscribed peer. Each message is encoded once."""

    def __init__(
        self, ledger: Ledger, server: ControlServer, configurations: Callable[[], tuple[Configuration, ...]] = tuple
    ) -> None:
        self._ledger = ledger
        self._server = server
        self._configurations = configurations
        self._reconfigured = False
        self._dirty = True
        self._file_written = float("-inf")
        self._rows: list[Metric] = []
        self._reset_from: int | None = None
        self._events: list[Event] = []

    def changed(self) -> None:
        """The state has changed."""
        self._dirty = True

    def add_steps(self, attempt: int, steps: list[Step]) -> None:
        for step in steps:
            self._rows.append(Metric(attempt=attempt, **{name: getattr(step, name) for name in _METRIC_FIELDS}))

    def take_back_from(self, update: int) -> None:
        """A restart resumed before this update: later rows do not count any more."""
        self._rows = [row for row in self._rows if row.update < update]
        self._reset_from = update if self._reset_from is None else min(update, self._reset_from)

    def send_rows_again(self) -> None:
        """The history has changed: viewers get its newest rows again."""
        self._rows = self._ledger.metrics(_ROWS_AGAIN)
        self._reset_from = 0

    def add_event(self, event: Event) -> None:
        self._events.append(event)

    def configurations_changed(self) -> None:
        """A configuration has begun or ended, or has new measurements."""
        self._reconfigured = True

    def greet(self, peer: Peer, history: int, state: RunState, machine: MachineSnapshot | None) -> str | None:
        """Start a subscription: send the state, the newest metric rows and events, and the
        machine's last hour.

        With `history` 0 neither metric rows nor the last hour are sent. Returns why there are no
        rows, None if there are.
        """
        self._flush_rows()
        peer.send(StateUpdate(run=state, machine=machine))
        problem = None
        try:
            peer.send(MetricRows(rows=tuple(self._ledger.metrics(history)), reset_from=0))
            peer.send(EventRows(rows=tuple(self._ledger.events())))
        except sqlite3.DatabaseError as error:
            problem = f"{self._ledger.path}: cannot be read, so dashboards show no earlier updates and events: {error}"
        peer.send(ConfigurationRows(rows=self._configurations()))
        if history:
            for key, index, times, columns in self._ledger.recorder.history.dump():
                peer.send(HistoryRows(key=key, gpu_index=index, label=label_of(index), times=times, columns=columns))
        peer.subscribed = True
        return problem

    def tick(self, state: Callable[[], RunState], machine: MachineSnapshot | None) -> None:
        if not any(peer.subscribed for peer in self._server.peers):
            self._rows.clear()
            self._events.clear()
            self._reset_from = None
            self._reconfigured = False
            return
        self._flush_rows()
        if self._dirty:
            self._dirty = False
            self._send(StateUpdate(run=state(), machine=machine))

    def state_file_due(self) -> bool:
        """Whether state.json is old.

        Urgent changes are written at once, see `Performer.save_state`.
        """
        return time.monotonic() - self._file_written >= _STATE_FILE_SECONDS

    def state_file_written(self) -> None:
        self._file_written = time.monotonic()

    def _flush_rows(self) -> None:
        if self._rows or self._reset_from is not None:
            self._send(MetricRows(rows=tuple(self._rows), reset_from=self._reset_from))
            self._rows, self._reset_from = [], None
        if self._events:
            self._send(EventRows(rows=tuple(self._events)))
            self._events = []
        if self._reconfigured:
            self._reconfigured = False
            self._send(ConfigurationRows(rows=self._configurations()))

    def _send(self, message: Message) -> None:
        line = msgspec.json.encode(message) + b"\n"
        for peer in self._server.peers:
            if peer.subscribed:
                peer.send_encoded(line)
