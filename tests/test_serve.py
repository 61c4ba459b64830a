"""`memtop watch --serve`: who may open it, what a tab may do, and how its processes end. Real
servers, real dashboards, a real browser; scripted driver."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pyte
import pytest
from aiohttp import web

from memtop.cli import run
from memtop.cli.serve import server as web_server
from memtop.cli.serve.access import Access, Visit
from memtop.cli.serve.page import FILES
from memtop.cli.serve.sampling import SharedSampler, TabSampler
from memtop.cli.serve.tab import sane_size
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.units import GIB
from tests import browser as chromium
from tests.browser import TERMINAL, Browser
from tests.conftest import Runs, make_runs
from tests.nvml_double.double import Script, driver, nvml_library  # noqa: F401 (fixtures)
from tests.test_streaming import free_port, over  # noqa: F401 (a fixture)

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


@pytest.fixture
def serve(runs: Runs) -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Served:
            served = Served(runs, *arguments)
            stack.callback(served.close)
            return served

        yield start


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    for runs in make_runs(tmp_path_factory.mktemp("demo")):
        served = Served(runs, "--demo")
        yield served
        served.close()


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
async def tab_of(served: Served, cookie: str, *, size: tuple[int, int] = (120, 35), **headers: str) -> AsyncIterator[Tab]:
    address = f"http://127.0.0.1:{served.port}"
    given = {"Origin": address, "Cookie": cookie, **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{address}/ws?width={size[0]}&height={size[1]}", headers=given, max_msg_size=0) as connection,
    ):
        yield Tab(connection, *size)


# --- who comes in: the rules ----------------------------------------------------------------------


def visit(**changes: Any) -> Visit:
    usual: dict[str, Any] = {
        "method": "GET",
        "hosts": ("127.0.0.1:8000",),
        "origin": None,
        "cookie": None,
        "opens_socket": False,
    }
    return Visit(**{**usual, **changes})


def test_a_token_opens_one_browser() -> None:
    access = Access("127.0.0.1", 8000)
    first = access.url
    assert first.startswith("http://127.0.0.1:8000/?token=")
    token = first.partition("token=")[2]
    assert len(token) >= 43, "256 bits"
    for wrong in ("", "x", token[:-1], token + "x", "é"):
        assert access.use(wrong) is None
    cookie = access.use(token)
    assert cookie is not None
    assert cookie != token
    assert access.use(token) is None, "used"
    assert access.url != first
    assert access.has_cookie(visit(cookie=cookie))
    second = access.use(access.url.partition("token=")[2])
    assert access.has_cookie(visit(cookie=cookie)), "the first browser stays"
    assert access.has_cookie(visit(cookie=second))
    for wrong in (None, "", token, cookie[:-1]):
        assert not access.has_cookie(visit(cookie=wrong))
    assert not Access("127.0.0.1", 8000).has_cookie(visit(cookie=cookie)), "another server"


@pytest.mark.parametrize(
    ("host", "header", "served"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "localhost:9000", True),  # the port at the other end of ssh -L
        ("127.0.0.1", "LOCALHOST.", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", "evil.example:8000", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "localhost:8000:1", False),
        ("127.0.0.1", "user@localhost", False),
        ("127.0.0.1", "10.0.0.5:8000", False),
        ("127.0.0.1", "", False),
        ("0.0.0.0", "10.0.0.5:8000", True),
        ("0.0.0.0", socket.gethostname(), True),
        ("0.0.0.0", "evil.example", False),
        ("::", "[fe80::1]:8000", True),
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("192.0.2.7", "localhost", False),
    ],
)
def test_only_the_names_that_are_served(host: str, header: str, served: bool) -> None:
    assert (Access(host, 8000).why_wrong_address(visit(hosts=(header,))) is None) == served


def test_one_header_host_and_the_own_origin() -> None:
    access = Access("127.0.0.1", 8000)
    own, foreign = "http://127.0.0.1:8000", "http://127.0.0.1:3000"
    assert access.why_wrong_address(visit(hosts=())) is not None
    assert access.why_wrong_address(visit(hosts=("127.0.0.1:8000", "127.0.0.1:8000"))) is not None
    assert access.why_wrong_address(visit(origin=own)) is None
    assert access.why_wrong_address(visit(origin=foreign)) is not None
    for changes in ({"opens_socket": True}, {"method": "POST"}):
        assert access.why_wrong_address(visit(**changes)) is not None, "no Origin"
        assert access.why_wrong_address(visit(**changes, origin=own)) is None
        for wrong in (foreign, "null", "https://127.0.0.1:8000", "http://evil.example"):
            assert access.why_wrong_address(visit(**changes, origin=wrong)) is not None


def test_a_browser_asks_for_no_absurd_size() -> None:
    assert sane_size(120, 35) == (120, 35)
    assert sane_size(10**9, -1) == (500, 1)


# --- who comes in: the server ---------------------------------------------------------------------


def test_every_request_needs_the_cookie(demo: Served) -> None:
    link = demo.link()
    for path in ("/", "/ws", "/?token=wrong", "/static/js/textual.js", "/download/x", "/nothing"):
        status, headers, text = demo.ask(path, Origin=f"http://127.0.0.1:{demo.port}")
        assert (status, text.count("\n")) == (403, 1), path
        assert "Set-Cookie" not in headers
    status, headers, text = demo.ask(path_of(link))
    assert status == 200
    assert "url=/" in text
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(headers["Set-Cookie"].split("; "))
    cookie = headers["Set-Cookie"].partition(";")[0]
    status, headers, text = demo.ask(path_of(link))
    assert (status, "Set-Cookie" in headers) == (403, False), "the link has been used"
    assert "this link has been used" in text
    assert demo.ask("/", Cookie=cookie)[0] == 200
    assert demo.ask("/", Cookie=cookie + "x")[0] == 403
    assert demo.ask(path_of(link), Cookie=cookie)[0] == 200, "the same browser, from its history"
    assert demo.link() != link, "a new link is shown"
    assert cookie.partition("=")[2] not in demo.said()


def test_another_name_or_origin_is_refused_with_the_cookie_too(demo: Served) -> None:
    cookie, own = demo.cookie(), f"http://127.0.0.1:{demo.port}"
    assert demo.ask("/", Cookie=cookie, Host="evil.example")[0] == 403
    assert demo.ask("/", Cookie=cookie, Origin="http://evil.example")[0] == 403
    link = demo.link()
    assert demo.ask(path_of(link), Host="evil.example")[0] == 403
    assert demo.link() == link, "the link was not used up"
    assert demo.ask(path_of(link), method="HEAD")[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert demo.ask("/", method=method, Cookie=cookie)[0] == 403
        assert demo.ask("/", method=method, Cookie=cookie, Origin=own)[0] == 405


def test_the_page_loads_from_this_server_only(demo: Served) -> None:
    cookie = demo.cookie()
    status, headers, text = demo.ask("/", Cookie=cookie)
    assert status == 200
    addresses = re.findall(r"(?<!-)(?:src=|href=|url\()\"([^\"]+)", text)
    assert {"/static/js/textual.js", "/static/css/xterm.css"} <= set(addresses)
    assert all(address.startswith(("/", "data:,")) for address in addresses)
    assert re.findall(r"[a-z]+://[^/\"]+", text) == [f"ws://127.0.0.1:{demo.port}"]
    for path in {*FILES, *addresses} - {"data:,", "/"}:
        assert demo.ask(path, Cookie=cookie)[0] == 200, path
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "script-src 'self';" in policy
    usual = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
    for path in ("/", "/static/js/textual.js", "/nothing"):
        assert usual.items() <= demo.ask(path, Cookie=cookie)[1].items()
        assert usual.items() <= demo.ask(path)[1].items()


def test_no_other_file_is_served(demo: Served) -> None:
    cookie = demo.cookie()
    for path in (
        *("/static/", "/static/../server.py", "/static/js/../../server.py", "/static/%2e%2e/server.py"),
        *("/static/js/..%2f..%2fserver.py", "//etc/passwd", "/download/1", "/static/images/background.png"),
    ):
        status, _, text = demo.ask(path, Cookie=cookie)
        assert (status, "import" in text) == (404, False), path


def test_what_is_no_http_is_answered_without_a_word(demo: Served) -> None:
    demo.link()
    before = demo.said()
    for wrong in (b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /" + b"x" * 100_000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", demo.port), timeout=SECONDS) as connection:
            connection.sendall(wrong)
            assert connection.recv(64).startswith(b"HTTP/1.0 400 ")
    assert demo.ask("/")[0] == 403
    assert demo.said() == before


async def test_a_websocket_needs_cookie_origin_and_host(demo: Served) -> None:
    cookie = demo.cookie()
    wrong: list[dict[str, str]] = [
        {"Cookie": ""},
        {"Cookie": f"{cookie.partition('=')[0]}=guessed"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
    ]
    for headers in wrong:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with tab_of(demo, cookie, **headers):
                pass
        assert refused.value.status == 403, headers
    assert demo.tabs() == []
    async with tab_of(demo, cookie) as tab:
        await tab.wait_for("tiny-llama")
        # What no page sends is ignored.
        for message in ("[", "3", '["resize", {"width": "a"}]', '["resize"]', '["stdin", 5]', '["quit"]'):
            await tab.socket.send_str(message)
        await tab.keys("?")
        await tab.wait_for("All keys, and what the marks mean")


# --- what a person can do wrong -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--serve x", "--serve 'x': give [HOST:]PORT, the port from 1 to 65535"),
        ("--serve 8000 --once", "--serve: cannot be combined with --once, --json, --csv, --follow or --prometheus"),
        ("--serve 8000 --prometheus 9400", "--serve: cannot be combined with --once, --json, --csv, --follow or --prometheus"),
        ("--serve 8000 --read-only --allow-actions", "--read-only and --allow-actions: give one of them"),
        ("--allow-actions", "--allow-actions: goes with --serve"),
        ("nothing --serve 8000", "memtop: run 'nothing': not found in"),
        ("--serve 8000 --pid 4194304", "--pid 4194304: no such process"),
        ("--serve no.such.host.invalid:8000", "--serve no.such.host.invalid:8000: no such host"),
    ],
)
def test_wrong_words_are_said_in_one_line(words: str, error: str, runs: Runs) -> None:
    done = runs.memtop("watch", *words.split(), status=None)
    assert done.returncode in (1, 2)
    assert error in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_busy_port_is_said_in_one_line(runs: Runs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = runs.memtop("watch", "--serve", str(port), status=2)
    assert done.stderr == f"memtop: --serve 127.0.0.1:{port}: cannot listen there: Address already in use; give another port\n"


def test_without_textual_serve_it_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert run(["watch", "--runs-dir", str(tmp_path), "--serve", "8000"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "[serve]" in said
    assert "pip install memtop" not in said


def test_another_host_is_warned_of(serve: Callable[..., Served]) -> None:
    served = serve("--demo")
    served.link()
    assert "not encrypted" not in served.said()
    assert "read-only" in served.said()
    served.port, port = free_port(), served.port
    assert port != served.port
    words = [*web_server._first_words(Access("0.0.0.0", 8000), "0.0.0.0", 8000, acts=True)]
    assert "the traffic is not encrypted" in words[0]
    assert "ssh -L 8000:localhost:8000" in words[1]
    assert f"http://{socket.gethostname()}:8000/?token=" in words[2]


# --- one feed for all tabs ------------------------------------------------------------------------


def test_tabs_that_ask_at_once_cost_one_sample(driver: Script) -> None:  # noqa: F811
    driver.gpu(0, total=20 * GIB, used=5 * GIB, uuid="GPU-a", name="A4500").write()
    read, shown = "nvmlDeviceGetMemoryInfo_v2", []

    async def ask(interval: float, tabs: int, times: int) -> None:
        shared = SharedSampler(Sampler, interval)
        pairs = [socket.socketpair() for _ in range(tabs)]
        answering = [asyncio.create_task(shared.answer(ours)) for ours, _ in pairs]
        samplers = [TabSampler(theirs.detach()) for _, theirs in pairs]

        def look(sampler: TabSampler) -> None:
            shown.extend(sampler.sample() for _ in range(times))

        threads = [threading.Thread(target=look, args=(sampler,)) for sampler in samplers]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        samplers.clear()
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)

    asyncio.run(ask(3600, tabs=5, times=3))
    assert len(shown) == 15
    assert len({snapshot.time for snapshot in shown}) == 1
    for_one = driver.calls(read)
    asyncio.run(ask(3600, tabs=1, times=1))
    assert for_one == driver.calls(read) - for_one, "as many calls as for a single tab"


def uses_driver(process: psutil.Process, library: Path) -> bool:
    return str(library) in Path(f"/proc/{process.pid}/maps").read_text()


async def test_several_tabs_have_one_process_at_the_driver(
    runs: Runs,
    serve: Callable[..., Served],
    tmp_path: Path,
    nvml_library: Path,  # noqa: F811
    over: RunFolder,  # noqa: F811
) -> None:
    script = Script(tmp_path / "script").gpu(0, total=20 * GIB, used=5 * GIB, uuid="GPU-a", name="A4500")
    script.gpu(1, total=20 * GIB, used=5 * GIB, uuid="GPU-b", name="B4500").write()
    runs.environment |= script.env(nvml_library)
    for words in ([], [over.name], ["--gpus", "0"]):
        served = serve("--interval", "0.2", *words)
        cookie = served.cookie()
        async with tab_of(served, cookie) as one, tab_of(served, cookie) as two, tab_of(served, cookie) as three:
            for tab in (one, two, three):
                shown = await tab.wait_for("A4500", "5.0 / 20.0 GiB", "read-only", *words[:1] if words == [over.name] else ())
                assert ("B4500" in shown) == (words != ["--gpus", "0"])
            tabs = served.tabs()
            assert len(tabs) == 3
            assert uses_driver(psutil.Process(served.process.pid), nvml_library), words
            assert not any(uses_driver(tab, nvml_library) for tab in tabs)
            # What the driver says now reaches all of them.
            script.clear().gpu(0, total=20 * GIB, used=7 * GIB, uuid="GPU-a", name="A4500")
            script.gpu(1, total=20 * GIB, used=7 * GIB, uuid="GPU-b", name="B4500").write()
            for tab in (one, two, three):
                await tab.wait_for("7.0 / 20.0 GiB")
        script.clear().gpu(0, total=20 * GIB, used=5 * GIB, uuid="GPU-a", name="A4500")
        script.gpu(1, total=20 * GIB, used=5 * GIB, uuid="GPU-b", name="B4500").write()
        assert served.end() == 0


# --- what a tab may do ----------------------------------------------------------------------------


def widest(text: str) -> int:
    return max(len(line.rstrip()) for line in text.splitlines())


LIVES = "import time\nprint('hello from the log', flush=True)\ntime.sleep(600)"


async def test_a_read_only_tab_shows_a_run_and_changes_nothing(
    runs: Runs, serve: Callable[..., Served], tmp_path: Path
) -> None:
    runs.memtop("train", "--name", "first", "--detach", "--", sys.executable, "-c", LIVES)
    runs.memtop("train", "--name", "other", "--headless", "--", "true")
    served = serve("first")
    before = {path.name for path in runs.root.iterdir()}
    async with tab_of(served, served.cookie(), size=(100, 30)) as tab:
        tab.grow(120, 35)
        shown = await tab.wait_for("first", "hello from the log", "read-only")
        assert "Stop" not in shown
        assert widest(shown) <= 100
        # None of these keys acts, so the list of runs is the next screen.
        await tab.keys("fkrcs1Ua")
        await tab.wait_for("Runs ", "other")
        await tab.socket.send_json(["resize", {"width": 120, "height": 35}])
        await tab.keys("/other\r")
        await tab.wait_for("Runs 1 of ")
        await tab.keys("w")
        await tab.wait_for("read-only: a browser writes no files here")
        assert len(served.tabs()) == 1
        assert widest(tab.text()) > 100
    until(lambda: served.tabs() == [])
    assert runs.show("first")["state"] not in ("stopped", "failed", "finished")
    assert len(runs.show("first")["attempts"]) == 1
    assert {path.name for path in runs.root.iterdir()} == before


async def test_with_allow_actions_a_tab_can_stop_the_run(runs: Runs, serve: Callable[..., Served]) -> None:
    runs.memtop("train", "--name", "first", "--detach", "--", sys.executable, "-c", LIVES)
    served = serve("first", "--allow-actions")
    async with tab_of(served, served.cookie()) as tab:
        await tab.wait_for("hello from the log", "Stop")
        await tab.keys("s")
        await tab.wait_for("Stop first?")
        await tab.keys("y")
        await tab.wait_for("stopped")
    assert "can also act" in served.said()
    runs.wait("first", lambda document: document["state"] == "stopped")


@pytest.mark.parametrize(
    ("words", "wanted"), [(["--replay", "over"], "replay"), (["latest"], "over"), (["--lang", "zh"], "只读")]
)
async def test_every_way_of_watching_is_served(words: list[str], wanted: str, runs: Runs, serve: Callable[..., Served]) -> None:
    runs.memtop("train", "--name", "over", "--headless", "--runs-dir", "elsewhere", "--", "echo", "a line of the log")
    served = serve(*words, "--runs-dir", "elsewhere")
    async with tab_of(served, served.cookie()) as tab:
        await tab.wait_for(wanted)


async def test_a_tab_that_cannot_begin_says_why(runs: Runs, serve: Callable[..., Served]) -> None:
    runs.memtop("train", "--name", "over", "--headless", "--", "true")
    served = serve("over")
    cookie = served.cookie()
    (runs.path / "over").rename(runs.path / "moved")
    async with tab_of(served, cookie) as tab:
        await tab.wait_for("memtop: run 'over': not found in")
        await tab.ends()
    assert "memtop: run 'over': not found in" in served.said()


# --- how tabs end ---------------------------------------------------------------------------------


async def test_a_closed_tab_ends_its_process(demo: Served) -> None:
    cookie = demo.cookie()
    async with tab_of(demo, cookie) as left:
        await left.wait_for("tiny-llama")
        (first,) = demo.tabs()
        async with tab_of(demo, cookie) as closed:
            await closed.wait_for("tiny-llama")
            assert len(demo.tabs()) == 2
        await asyncio.to_thread(until, lambda: demo.tabs() == [first])
        # A dashboard that has died closes its tab, and no other one.
        async with tab_of(demo, cookie) as killed:
            await killed.wait_for("tiny-llama")
            next(process for process in demo.tabs() if process != first).kill()
            await killed.ends()
        # A process that hangs is ended, too.
        async with tab_of(demo, cookie) as hangs:
            await hangs.wait_for("tiny-llama")
            next(process for process in demo.tabs() if process != first).suspend()
        await asyncio.to_thread(until, lambda: demo.tabs() == [first])
        await left.keys("?")
        await left.wait_for("All keys, and what the marks mean")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
async def test_the_server_leaves_no_process_behind(number: int, status: int, serve: Callable[..., Served]) -> None:
    served = serve("--demo")
    cookie = served.cookie()
    async with tab_of(served, cookie) as one, tab_of(served, cookie) as two:
        await one.wait_for("tiny-llama")
        await two.wait_for("tiny-llama")
        tabs = served.tabs()
        assert len(tabs) == 2
        assert await asyncio.to_thread(served.end, number) == status
        await asyncio.to_thread(until, lambda: not any(tab.is_running() for tab in tabs), lambda: tabs)
    assert "Traceback" not in served.said()


async def test_there_is_a_limit_to_tabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "MOST_TABS", 2)
    monkeypatch.setattr("memtop.cli.serve.tab.print_message", lambda *lines: None)
    access = Access("127.0.0.1", 8000)
    server = web_server.Server(access, ["--demo", "--read-only"], SharedSampler(Sampler, 1.0), announce=lambda: None)
    runner = web.AppRunner(server.app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    cookie = f"{access.cookie_name}={access.use(access.url.partition('token=')[2])}"
    headers = {"Cookie": cookie, "Origin": f"http://127.0.0.1:{address[1]}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def opened() -> Tab:
            return Tab(await session.ws_connect(f"http://127.0.0.1:{address[1]}/ws?width=120&height=35", max_msg_size=0))

        one, two, third = await opened(), await opened(), await opened()
        await third.wait_for("memtop: 2 tabs are open, and there can be no more: close one of them")
        await third.ends()
        await one.wait_for("tiny-llama")
        await two.wait_for("tiny-llama")
        await one.socket.close()
        fourth = await opened()
        await fourth.wait_for("tiny-llama")
        await asyncio.gather(runner.cleanup(), two.ends(), fourth.ends())


# --- in a real browser ----------------------------------------------------------------------------

HELP = f"({TERMINAL}).includes('what the marks mean')"
COLOURS = """
new Set([...document.querySelectorAll(".xterm-screen canvas")].flatMap(canvas =>
  [...new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)])).size
"""
"""How many colours the terminal has in the page."""


@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium (apt-get install chromium)")
async def test_in_a_real_browser(runs: Runs, serve: Callable[..., Served], tmp_path: Path) -> None:
    runs.memtop("train", "--name", "first", "--detach", "--", sys.executable, "-c", LIVES)
    served = serve("first")
    own = f"http://127.0.0.1:{served.port}"
    async with Browser() as browser:
        page = await browser.open(served.link())
        shown = await page.wait_for("first", "hello from the log", "read-only")
        assert "Host memory" in shown
        assert await page.value("location.href") == f"{own}/", "the token is no longer in the address"
        assert await page.value("document.cookie") == "", "scripts cannot read the cookie"
        assert await page.value("document.fonts.check('14px \"Roboto Mono\"') && document.fonts.size") == 2
        # It is drawn, and not only received: the picture has the colours of the dashboard.
        assert await page.value(COLOURS) > 8
        # Keys work without a click. Those that act do nothing.
        await page.type("krs?")
        await page.wait_for("All keys, and what the marks mean")
        assert await page.value(HELP)
        assert "Stop first?" not in await page.terminal()
        # A second tab of the same browser needs no link; a request without its cookie is refused.
        second = await browser.open(f"{own}/")
        await second.wait_for("first", "hello from the log")
        assert len(served.tabs()) == 2
        script = "fetch('/', {credentials: 'omit'}).then(answer => answer.status)"
        assert await second.value(script) == 403
        assert await second.value("fetch('/').then(answer => answer.status)") == 200
        # A page of a stranger gets nothing, although the browser has the cookie.
        stranger = await browser.open(f"http://localhost:{served.port}/")
        await stranger.wait_for("403", script="document.body.innerText")
        # Nothing came from anywhere else, and the page's own rules stopped nothing.
        for one in (page, second):
            assert one.requests()
            assert {urlsplit(address).netloc for address in one.requests()} == {f"127.0.0.1:{served.port}"}
        assert page.complaints() == []
        # Closing a tab ends its process; quitting shows how to go on.
        await second.close()
        await asyncio.to_thread(until, lambda: len(served.tabs()) == 1)
        await page.type("q")
        await page.wait_for("without", script=f"{HELP} ? 'with' : 'without'")
        await page.type("q")
        ended = "getComputedStyle(document.querySelector('#ended')).display + document.querySelector('#ended').innerText"
        assert "Open it again" in await page.wait_for("block", script=ended)
        await page.value("document.querySelector('#ended a').click()")
        await page.wait_for("first", "hello from the log")
        assert await asyncio.to_thread(served.end, signal.SIGINT) == 130
        await page.wait_for("block", script=ended)
    assert len(runs.show("first")["attempts"]) == 1
