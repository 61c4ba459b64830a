"""A small HTTP server for answers that take milliseconds. Idle and slow clients cannot exhaust it.

At most 32 connections are open, and fewer if this process may open few files (`ulimit -n`); a
further one closes the oldest. A client that asks at once has had its answer by then. Each
connection is closed after 10 seconds.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import sys
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from memtop.supervisor.errors import UsageError

LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 32
LONGEST_SECONDS = 10.0
CLOSING_SECONDS = 2.0
"""How long a new client waits until an ended connection is closed; then it is refused."""
_SPARE_FILES = 16
"""Descriptors that stay free for the rest of memtop; of a very low limit a quarter."""


def parse_address(option: str, text: str) -> tuple[str, int]:
    """The `[HOST:]PORT` of an option; UsageError for anything else. IPv6 addresses in brackets."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise UsageError(f"{option} {text!r}: give [HOST:]PORT, the port from 1 to 65535")
    return host, int(port)


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def cannot_listen(option: str, host: str, port: int, error: OSError) -> UsageError:
    """What to say if a server cannot listen at the address of its option."""
    if isinstance(error, socket.gaierror):
        return UsageError(f"{option} {host}:{port}: no such host: {error.strerror}")
    why = error.strerror if error.errno is None else os.strerror(error.errno)
    return UsageError(f"{option} {host}:{port}: cannot listen there: {why}; give another port")


class HttpServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application in threads. OSError if it cannot listen at that address."""

    daemon_threads = True
    # Clients wait in the kernel's queue while a new connection ends an older one.
    request_queue_size = 128

    def __init__(self, host: str, port: int, application: Any) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._closed = threading.Condition()
        self._open: dict[socket.socket, float] = {}
        """Every connection and when it began, oldest first."""
        self._ended: set[socket.socket] = set()
        """Those of them that their threads are about to close."""
        super().__init__((str(address[0]), port), _SilentHandler)
        self.set_app(application)
        self._thread = threading.Thread(target=self.serve_forever, name="memtop-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections."""
        self.shutdown()
        self.server_close()
        self._thread.join()
        self._end_those_before(float("inf"))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._made_room():
            self.shutdown_request(request)
            return
        with self._closed:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can be started now: the client tries again.
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._closed:
            self._open.pop(request, None)
            self._ended.discard(request)
            self._closed.notify()

    def service_actions(self) -> None:
        """Called twice a second by `serve_forever`."""
        self._end_those_before(time.monotonic() - LONGEST_SECONDS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that is gone is no error of ours, and the dashboard may have the terminal.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _made_room(self) -> bool:
        """End the oldest connections until there is room for one more; False if there is none."""
        with self._closed:
            while len(self._open) >= MOST_CONNECTIONS or not _files_left():
                if not self._open:
                    return False
                oldest = next((request for request in self._open if request not in self._ended), None)
                if oldest is not None:
                    self._end(oldest)
                if not self._closed.wait(CLOSING_SECONDS):
                    return False
        return True

    def _end_those_before(self, moment: float) -> None:
        with self._closed:
            for request, begun in self._open.items():
                if begun < moment and request not in self._ended:
                    self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Let the thread of a connection see its end; the thread closes the socket."""
        self._ended.add(request)
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the client was faster


def _files_left() -> bool:
    """Whether this process may open enough files in addition to one more connection."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return True
    try:
        opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone
    except OSError as error:
        # Not even this folder can be opened. Without /proc it is not known: clients are served.
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return limit - opened >= min(_SPARE_FILES, limit // 4)


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the dashboard may have the terminal."""
