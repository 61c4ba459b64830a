"""The web server: it lets a browser in, serves the page, and runs a dashboard for each tab."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpProcessingError

from memtop.cli.http_server import cannot_listen, is_loopback
from memtop.cli.output import print_message
from memtop.cli.serve.access import Access, Visit
from memtop.cli.serve.connections import Connections, Limits
from memtop.cli.serve.page import FILES, FOCUS, FOCUS_SCRIPT, HEADERS, forward, page
from memtop.cli.serve.sampling import SharedSampler
from memtop.cli.serve.tab import Tab, too_many
from memtop.supervisor.language import tr
from memtop.supervisor.monitor.sampler import Sampler

_SOCKET = "/ws"
_HEARTBEAT_SECONDS = 15.0
"""How often a browser must show that it is there. A closed tab says so at once."""
_CLOSE_SECONDS = 1.0
_LONGEST_MESSAGE = 64 << 10
"""Bytes that a page may send at once: keys, or a text that is pasted."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """`arguments`: of `memtop watch` in each tab. `samples`: for all tabs."""

    def __init__(
        self,
        access: Access,
        arguments: Sequence[str],
        samples: SharedSampler,
        *,
        announce: Callable[[], None],
        limits: Limits | None = None,
    ) -> None:
        self._access = access
        self._arguments = tuple(arguments)
        self._samples = samples
        self._announce = announce
        self._limits = limits or Limits()
        self._connections = Connections(self._limits)
        self._open: dict[web.WebSocketResponse, asyncio.Event] = {}
        """The socket of each tab, and whether the tab's process has ended."""
        app = web.Application(middlewares=[self._count, self._guard])
        app.router.add_get("/", self._index)
        app.router.add_get(_SOCKET, self._socket)
        app.router.add_get(FOCUS, self._focus)
        for path in FILES:
            app.router.add_get(path, self._file)
        app.on_response_prepare.append(_with_headers)
        app.on_shutdown.append(self._close_tabs)
        # An access log would contain the tokens.
        self._runner = web.AppRunner(app, access_log=None, logger=_errors_of_our_own())
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Begin. Returns the port. OSError if it cannot listen at that address."""
        await self._runner.setup()
        assert self._runner.server is not None
        protocol = self._connections.protocol(self._runner.server)
        # Clients wait in the kernel's queue while a new connection ends an older one.
        self._listener = await asyncio.get_running_loop().create_server(protocol, host, port, backlog=128)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all tabs and connections."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    # --- who comes in -----------------------------------------------------------------------------

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        with self._connections.answering(request.protocol):
            response = await handler(request)
            # A large file is sent here, and not after the connection counts as idle.
            await response.prepare(request)
            return response

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        visit = Visit(
            method=request.method,
            hosts=tuple(request.headers.getall("Host", ())),
            origin=request.headers.get("Origin"),
            cookie=request.cookies.get(self._access.cookie_name),
            opens_socket=request.path == _SOCKET,
        )
        if why := self._access.why_wrong_address(visit):
            return _refused(why)
        token = request.query.get("token") if (request.method, request.path) == ("GET", "/") else None
        if token is not None and (cookie := self._access.use(token)) is not None:
            return self._let_in(cookie)
        if not self._access.has_cookie(visit):
            words = "this link has been used, or is not complete: memtop shows a new one where it was started"
            return _refused(words if token is not None else "open the link that memtop shows where it was started")
        return _html(forward()) if token is not None else await handler(request)

    def _let_in(self, cookie: str) -> web.Response:
        response = _html(forward())
        response.set_cookie(self._access.cookie_name, cookie, httponly=True, samesite="Strict", path="/")
        self._announce()
        return response

    # --- what it gets -----------------------------------------------------------------------------

    async def _index(self, request: web.Request) -> web.Response:
        return _html(page(request.headers["Host"]))

    async def _focus(self, request: web.Request) -> web.Response:
        return web.Response(text=FOCUS_SCRIPT, content_type="text/javascript")

    async def _file(self, request: web.Request) -> web.FileResponse:
        return _File(FILES[request.path])

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        browser = web.WebSocketResponse(heartbeat=_HEARTBEAT_SECONDS, timeout=_CLOSE_SECONDS, max_msg_size=_LONGEST_MESSAGE)
        await browser.prepare(request)
        if sum(not other.closed for other in self._open) >= self._limits.tabs:
            await browser.send_bytes(too_many(self._limits.tabs))
            await browser.close(code=WSCloseCode.TRY_AGAIN_LATER)
            return browser
        self._open[browser] = ended = asyncio.Event()
        try:
            await self._tab(browser, request.query)
        finally:
            del self._open[browser]
            ended.set()
        return browser

    async def _tab(self, browser: web.WebSocketResponse, query: Mapping[str, str]) -> None:
        """One dashboard, until its process ends or the browser leaves."""
        ours, theirs = socket.socketpair()
        answering = asyncio.create_task(self._samples.answer(ours))

        async def close() -> None:
            await browser.close()

        tab = Tab(self._arguments, theirs, browser.send_bytes, close)
        try:
            await tab.start(_number(query.get("width"), 80), _number(query.get("height"), 24))
            async for message in browser:
                if message.type is WSMsgType.TEXT:
                    await tab.hear(_decoded(message.data))
        except OSError as error:
            await browser.send_bytes(tr(f"memtop: the dashboard cannot be started: {error.strerror}").encode())
            await browser.close()
        finally:
            await tab.stop()
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering

    async def _close_tabs(self, app: web.Application) -> None:
        tabs = list(self._open.items())
        await asyncio.gather(*(browser.close(code=WSCloseCode.GOING_AWAY) for browser, _ in tabs))
        await asyncio.gather(*(ended.wait() for _, ended in tabs))


class _File(web.FileResponse):
    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        # aiohttp prepares each answer once more, and then a file would be sent twice.
        return None if self.prepared else await super().prepare(request)


def serve(
    host: str, port: int, arguments: Sequence[str], make_sampler: Callable[[], Sampler], interval: float, *, acts: bool
) -> int:
    """Serve until SIGINT or SIGTERM. The exit status is 130 after SIGINT, otherwise 0.

    `arguments`: of `memtop watch` in each tab. `acts`: the browser may act; here it is only said.
    UsageError if it cannot listen at that address.
    """
    return asyncio.run(_serve(host, port, arguments, SharedSampler(make_sampler, interval), acts=acts))


async def _serve(host: str, port: int, arguments: Sequence[str], samples: SharedSampler, *, acts: bool) -> int:
    access = Access(host, port)
    loop, ended, statuses = asyncio.get_running_loop(), asyncio.Event(), []

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        loop.add_signal_handler(number, end, status)
    server = Server(access, arguments, samples, announce=lambda: _say(f"memtop: for another browser: {access.url}"))
    try:
        try:
            await server.listen(host, port)
        except OSError as error:
            raise cannot_listen("--serve", host, port, error) from None
        for line in _first_words(access, host, port, acts=acts):
            _say(line)
        await ended.wait()
        return statuses[0]
    finally:
        await server.close()


def _errors_of_our_own() -> logging.Logger:
    """aiohttp reports errors here. A client that sends what is no HTTP gets an answer, and no
    line."""
    log = logging.getLogger("memtop.serve")
    log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
    return log


def _first_words(access: Access, host: str, port: int, *, acts: bool) -> Iterator[str]:
    here = socket.gethostname()
    if not is_loopback(host):
        yield f"memtop: --serve {host}:{port}: the traffic is not encrypted: anyone who can read it can also use it"
        yield f"memtop: better: memtop watch --serve {port}, and on your computer ssh -L {port}:localhost:{port} {here}"
    yield f"memtop: the dashboard is at {access.url}"
    if is_loopback(host) and "SSH_CONNECTION" in os.environ:
        yield f"memtop: to reach it from your computer, run there: ssh -L {port}:localhost:{port} {here}"
    yield "memtop: this link opens one browser, once; then a new link is shown here"
    yield "memtop: anyone who has it can also act as you" if acts else "memtop: the dashboard in the browser is read-only"
    yield "memtop: Ctrl+C ends it"


def _say(line: str) -> None:
    # Without a reader of stderr (`2>&1 | head -1`), the browsers that are open go on.
    with contextlib.suppress(BrokenPipeError):
        print_message(line)


def _refused(why: str) -> web.Response:
    return web.Response(status=403, text=f"403: {tr(why)}\n")


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html")


async def _with_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _number(text: str | None, otherwise: int) -> int:
    """A number of cells; `otherwise` if it is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 6 else otherwise


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None  # nothing that the page sends
