"""`memtop watch --serve`: how many connections and tabs there may be, how long a connection may be
idle, and that one connection serves several files. A real server, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import time
from collections.abc import AsyncIterator

import pytest

from memtop.cli.serve.access import Access
from memtop.cli.serve.connections import Limits
from memtop.cli.serve.page import FILES
from memtop.cli.serve.sampling import SharedSampler
from memtop.cli.serve.server import Server
from memtop.supervisor.monitor.sampler import Sampler
from tests.serve.served import SECONDS, tab_at


@contextlib.asynccontextmanager
async def limited(limits: Limits) -> AsyncIterator[tuple[int, str]]:
    """A server in this process: its port, and the cookie of a browser."""
    access = Access("127.0.0.1", 8000)
    server = Server(access, ["--demo", "--read-only"], SharedSampler(Sampler, 1.0), announce=lambda: None, limits=limits)
    port = await server.listen("127.0.0.1", 0)
    yield port, f"{access.cookie_name}={access.use(access.url.partition('token=')[2])}"
    await server.close()


REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Client:
    """A connection that sends what a browser would not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.send = writer.write
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def answer(self) -> bytes:
        """The answer to a request without a cookie."""
        self.send(REQUEST)
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), SECONDS)
        length = int(re.findall(rb"Content-Length: (\d+)", head)[0])
        return head + await asyncio.wait_for(self._reader.readexactly(length), SECONDS)

    async def is_refused(self) -> bool:
        """Whether there is no room for it; otherwise it gets an answer."""
        try:
            return (await self.answer()).startswith(b"HTTP/1.1 503 ")
        except (ConnectionError, asyncio.IncompleteReadError):
            return True

    async def until_closed(self) -> bytes:
        """What the server still sends before it closes the connection."""
        received = b""
        with contextlib.suppress(ConnectionError), contextlib.closing(self._writer):
            while block := await asyncio.wait_for(self._reader.read(4096), SECONDS):
                received += block
        return received

    async def drip(self, words: bytes) -> bytes:
        """Send these bytes one by one until the server closes the connection."""

        async def send() -> None:
            for one in words:
                self.send(bytes([one]))
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(send())
        try:
            return await self.until_closed()
        finally:
            dripping.cancel()


async def test_an_idle_or_slow_connection_is_closed() -> None:
    async with limited(Limits(idle_seconds=3.0)) as (port, _):
        silent, header, second, body = [await Client.of(port) for _ in range(4)]
        # The first three bytes of the request that follows have come with the first one.
        second.send(REQUEST + b"GET")
        body.send(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 8000\r\n\r\n")
        # Byte by byte: a header that never ends, the next request, and the body of one.
        endless = REQUEST[:-2] + b"X: " + b"x" * 8000
        received = await asyncio.gather(
            silent.until_closed(), header.drip(endless), second.drip(endless[3:]), body.drip(b"x" * 8000)
        )
    assert received[:2] == [b"", b""]
    # On a machine that stands still, a connection may be closed before its first answer.
    assert all(answer.count(b"HTTP/1.1 ") <= 1 for answer in received[2:])


def get_files(port: int, cookie: str) -> list[tuple[int, int]]:
    """Statuses and lengths of the answers, all on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    script, style = "/static/js/textual.js", "/static/css/xterm.css"
    found, tag = [], ""
    with contextlib.closing(connection):
        connection.connect()
        opened = connection.sock
        for path, headers in (
            (script, {}),
            (script, {"If-None-Match": ""}),
            (style, {"Range": "bytes=0-9"}),
            (style, {"Range": "bytes=999999999-"}),
            (style, {}),
        ):
            connection.request("GET", path, headers={"Cookie": cookie, **{name: text or tag for name, text in headers.items()}})
            answer = connection.getresponse()
            found.append((answer.status, len(answer.read())))
            tag = answer.headers.get("ETag", "")
            assert connection.sock is opened  # http.client opens another one if the server closes it
    return found


async def test_files_come_one_after_another_on_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with limited(Limits(idle_seconds=3600)) as (port, cookie):
        answers = await asyncio.to_thread(get_files, port, cookie)
    script, style = (FILES[path].stat().st_size for path in ("/static/js/textual.js", "/static/css/xterm.css"))
    assert answers == [(200, script), (304, 0), (206, 10), (416, 0), (200, style)]
    assert [record.getMessage() for record in caplog.records if record.name == "memtop.serve"] == []


async def test_a_tab_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async with limited(Limits(idle_seconds=3600)) as (port, cookie), tab_at(port, cookie) as tab:
        await tab.wait_for("tiny-llama")
        # Only now: on a machine that stands still, the tab could not open within this time.
        monkeypatch.setattr(Limits, "idle_seconds", 1.0)
        # A connection that came after it has been idle for too long.
        await (await Client.of(port)).until_closed()
        await tab.keys("?")
        await tab.wait_for("All keys, and what the marks mean")


async def test_a_connection_too_many_closes_the_one_that_was_idle_longest() -> None:
    async with limited(Limits(connections=2, idle_seconds=3600)) as (port, _):
        first, second = await Client.of(port), await Client.of(port)
        await second.answer()
        await first.answer()
        third = await Client.of(port)
        assert await second.until_closed() == b""
        assert (await first.answer()).startswith(b"HTTP/1.1 403 ")
        assert (await third.answer()).startswith(b"HTTP/1.1 403 ")


async def test_a_connection_too_many_is_refused_if_all_are_in_use() -> None:
    async with limited(Limits(connections=1, idle_seconds=3600)) as (port, cookie):
        async with tab_at(port, cookie) as tab:
            await tab.wait_for("tiny-llama")
            refused = (await (await Client.of(port)).until_closed()).partition(b"\r\n\r\n")
            assert refused[0].startswith(b"HTTP/1.1 503 ")
            assert refused[2] == b"503: memtop has 1 open connections, and all are in use: close a tab\n"
            await tab.keys("?")
            await tab.wait_for("All keys, and what the marks mean")
        # The tab has left: there is room again as soon as its process has ended.
        deadline = time.monotonic() + SECONDS
        while await (await Client.of(port)).is_refused():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_a_tab_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtop.cli.serve.tab.print_message", lambda *lines: None)
    async with limited(Limits(tabs=2)) as (port, cookie), tab_at(port, cookie) as one, tab_at(port, cookie) as two:
        async with tab_at(port, cookie) as third:
            await third.wait_for("memtop: 2 tabs are open, and there can be no more: close one of them")
            await third.ends()
        await one.wait_for("tiny-llama")
        await two.wait_for("tiny-llama")
        await one.socket.close()
        async with tab_at(port, cookie) as fourth:
            await fourth.wait_for("tiny-llama")
            await asyncio.gather(two.socket.close(), fourth.socket.close())
