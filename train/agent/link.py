"""The connection to the supervisor for commands. It reconnects forever and fails silently."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any, Callable

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0


class Link:
    """Sends a greeting at each connection; calls `receive` for every message, in its thread."""

    def __init__(self, path: str | None, greeting: dict[str, Any], receive: Callable[[dict[str, Any]], None]) -> None:
        self._greeting = greeting
        self._receive = receive
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._path = path
        self._running = False

    def start(self) -> None:
        """Begin to connect. If no thread can be started now, the next call tries again."""
        if self._path and not self._running:
            try:
                threading.Thread(target=self._run, args=(self._path,), name="memtop-link", daemon=True).start()
            except RuntimeError:
                return
            self._running = True

    def send(self, message: dict[str, Any]) -> None:
        """Send if there is a connection.

        The supervisor notices a lost answer, because it sees the connection close.
        """
        with self._lock:
            if self._socket is not None:
                try:
                    self._socket.sendall(json.dumps(message).encode() + b"\n")
                except OSError:
                    self._socket.close()
                    self._socket = None

    def _run(self, path: str) -> None:
        wait = FIRST_WAIT_SECONDS
        while True:
            connection = _connected(path)
            if connection is None:
                time.sleep(wait)
                wait = min(wait * 2, LONGEST_WAIT_SECONDS)
                continue
            wait = FIRST_WAIT_SECONDS
            with self._lock:
                self._socket = connection
            self.send(self._greeting)
            self._read(connection)
            with self._lock:
                self._socket = None
            connection.close()

    def _read(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as stream:
                for line in stream:
                    message = json.loads(line.decode())
                    if isinstance(message, dict):
                        self._receive(message)
        except (OSError, ValueError, TypeError):
            # Lost or invalid: the next connection starts again.
            return


def _connected(path: str) -> socket.socket | None:
    """A connection, or None if no supervisor listens now."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        connection.connect(path)
    except OSError:
        # Attempts repeat while the supervisor is away, so an open socket would use up the program's
        # descriptors.
        connection.close()
        return None
    return connection
