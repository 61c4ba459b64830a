"""`memtop watch --serve` as a person starts it, and a tab without a browser."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import aiohttp
import psutil
import pyte
import pytest

from tests.conftest import Runs
from tests.test_streaming import free_port

SECONDS = 120
LINK = re.compile(r"http://\S+/\?token=\S+")


class Served:
    """A server as a person starts it."""

    def __init__(self, runs: Runs, *arguments: str) -> None:
        self.port = free_port()
        self._errors = runs.root / f"serve-{self.port}.err"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "memtop", "watch", *arguments, "--serve", str(self.port)],
                cwd=runs.root,
                env=runs.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def said(self) -> str:
        return self._errors.read_text()

    def link(self) -> str:
        """The newest link, once the server listens."""
        until(lambda: LINK.search(self.said()) is not None or self.process.poll() is not None, self.said)
        return LINK.findall(self.said())[-1]

    def tabs(self) -> list[psutil.Process]:
        """The processes of its tabs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of an answer. A header of None is left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode(errors="replace")

    def cookie(self) -> str:
        """The cookie for a new browser."""
        status, headers, _ = self.ask(path_of(self.link()))
        assert status == 200
        return headers["Set-Cookie"].partition(";")[0]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def until(condition: Callable[[], bool], shown: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.05)


def path_of(link: str) -> str:
    parts = urlsplit(link)
    return f"{parts.path}?{parts.query}"


class Tab:
    """A tab without a browser: what the dashboard sends is drawn on a screen."""

    def __init__(self, socket_: aiohttp.ClientWebSocketResponse, columns: int = 120, rows: int = 35) -> None:
        self.socket = socket_
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)

    def text(self) -> str:
        return "\n".join(self._screen.display)

    def grow(self, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)

    async def keys(self, text: str) -> None:
        await self.socket.send_json(["stdin", text])

    async def wait_for(self, *wanted: str) -> str:
        deadline = time.monotonic() + SECONDS
        while not all(text in self.text() for text in wanted):
            try:
                message = await self.socket.receive(max(0.01, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                pytest.fail(f"{wanted} not shown within {SECONDS} s:\n{self.text()}")
            assert message.type is aiohttp.WSMsgType.BINARY, (message, self.text())
            self._stream.feed(message.data)
        return self.text()

    async def ends(self) -> None:
        """Wait until the server closes it."""
        deadline = time.monotonic() + SECONDS
        ends = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        while (message := await self.socket.receive(SECONDS)).type not in ends:
            self._stream.feed(message.data)
            assert time.monotonic() < deadline, self.text()


@contextlib.asynccontextmanager
async def tab_at(port: int, cookie: str, *, size: tuple[int, int] = (120, 35), **headers: str) -> AsyncIterator[Tab]:
    address = f"http://127.0.0.1:{port}"
    given = {"Origin": address, "Cookie": cookie, **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{address}/ws?width={size[0]}&height={size[1]}", headers=given, max_msg_size=0) as connection,
    ):
        yield Tab(connection, *size)


def tab_of(
    served: Served, cookie: str, *, size: tuple[int, int] = (120, 35), **headers: str
) -> contextlib.AbstractAsyncContextManager[Tab]:
    return tab_at(served.port, cookie, size=size, **headers)


LIVES = "import time\nprint('hello from the log', flush=True)\ntime.sleep(600)"
