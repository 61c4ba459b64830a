"""A small HTTP server for answers that take milliseconds. Idle and slow clients cannot exhaust it.

At most 32 connections are open; a further one closes the oldest. A client that asks at once has had
its answer by then. Each connection is closed after 10 seconds.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MOST_CONNECTIONS = 32
LONGEST_SECONDS = 10.0


class HttpServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application in threads. OSError if it cannot listen at that address."""

    daemon_threads = True

    def __init__(self, host: str, port: int, application: Any) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """Every connection and when it began, oldest first."""
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
        with self._lock:
            while len(self._open) >= MOST_CONNECTIONS:
                self._end(next(iter(self._open)))
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can be started now: the client tries again.
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second by `serve_forever`."""
        self._end_those_before(time.monotonic() - LONGEST_SECONDS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that is gone is no error of ours, and the dashboard may have the terminal.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _end_those_before(self, moment: float) -> None:
        with self._lock:
            for request, begun in list(self._open.items()):
                if begun < moment:
                    self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Let the thread of a connection see its end; the thread closes the socket."""
        del self._open[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the client was faster


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the dashboard may have the terminal."""
