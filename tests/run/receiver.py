"""A server that takes what is sent to addresses, also to those of other hosts."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any


class Receiver:
    """A server that keeps what is sent to it, and answers with `status`."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.received.append((self.path, json.loads(body)))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def as_proxy(self) -> dict[str, str]:
        """An environment in which each http address leads here; the path has the whole address."""
        return {"http_proxy": self.address, "no_proxy": ""}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
