"""The control socket: accepts connections of dashboards, commands and agents of the same user, and
decodes their messages."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from memtop.supervisor.errors import RunFolderError
from memtop.supervisor.wire import Answer, Message, Outcome, Request

_LINE_LIMIT = 1 << 20
# A client that does not read must not make the supervisor's memory grow.
_BACKLOG_LIMIT = 8 << 20
_ENCODER = msgspec.json.Encoder()


def socket_path(run_folder: Path) -> Path:
    """The path of the run's socket, in a folder that only this user can enter.

    It is short whatever the run folder's path (the kernel allows 107 bytes). It is always the same
    for a run, so that agents find the next supervisor.
    """
    base = os.environ.get("MEMTOP_SOCKET_DIR")
    parent = Path(base) if base else Path("/tmp") / f"memtop-{os.getuid()}"
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        found = parent.lstat()
    except OSError as error:
        raise RunFolderError(f"{parent}: cannot be created: {error.strerror}; set MEMTOP_SOCKET_DIR") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RunFolderError(
            f"{parent}: must be your own folder, closed to others (chmod 700); remove it or set MEMTOP_SOCKET_DIR"
        )
    digest = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:20]
    path = parent / f"{digest}.sock"
    if len(os.fsencode(path)) > 107:
        raise RunFolderError(f"MEMTOP_SOCKET_DIR {parent}: too long for a socket, at most 80 bytes")
    return path


class Peer:
    """One connected client or agent."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.subscribed = False
        self.has_screen = False
        """Whether it is a dashboard."""
        self.agent: dict[str, Any] | None = None
        """The agent's greeting (attempt, rank, pid). None for a client."""
        self.pid = _credentials(writer)[0]
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
        on_agent: Callable[[Peer, dict[str, Any]], None],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self.path = path
        self.peers: set[Peer] = set()
        self._on_request = on_request
        self._on_agent = on_agent
        self._on_gone = on_gone
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        # We hold the run's lock, so an existing socket belongs to a supervisor that has died.
        self.path.unlink(missing_ok=True)
        try:
            self._server = await asyncio.start_unix_server(self._serve, path=str(self.path), limit=_LINE_LIMIT)
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot create a socket: {error.strerror}; set MEMTOP_SOCKET_DIR") from None
        self.path.chmod(0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for peer in list(self.peers):
            peer._writer.close()
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(writer)
        if _credentials(writer)[1] not in (os.getuid(), 0):
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
        try:
            message = msgspec.json.decode(line)
        except msgspec.DecodeError:
            peer.refuse(0, "not JSON")
            return
        if isinstance(message, dict) and (message.get("type") == "agent" or peer.agent is not None):
            self._on_agent(peer, message)
            return
        try:
            request = msgspec.convert(message, Request)
        except msgspec.ValidationError as error:
            number = message.get("id") if isinstance(message, dict) else None
            peer.refuse(number if isinstance(number, int) else 0, f"not understood: {error}")
            return
        await self._on_request(peer, request)


def _credentials(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Pid and user id of the peer when it connected."""
    connection = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return int(pid), int(uid)
