"""`memtop watch --serve`: who may open it, what a person can do wrong, and one sampler for all
tabs. Real servers and dashboards, scripted driver."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from memtop.cli import run
from memtop.cli.serve import server as web_server
from memtop.cli.serve.access import Access, Visit
from memtop.cli.serve.page import FILES
from memtop.cli.serve.sampling import SharedSampler, TabSampler
from memtop.cli.serve.tab import sane_size
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.units import GIB
from tests.conftest import Runs
from tests.forking import LONG
from tests.nvml_double.double import Script
from tests.serve.served import SECONDS, Served, path_of, tab_of
from tests.test_streaming import free_port

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


def test_tabs_that_ask_at_once_cost_one_sample(driver: Script) -> None:
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
    nvml_library: Path,
    over: RunFolder,
) -> None:
    script = Script(tmp_path / "script").gpu(0, total=20 * GIB, used=5 * GIB, uuid="GPU-a", name="A4500")
    script.gpu(1, total=20 * GIB, used=5 * GIB, uuid="GPU-b", name="B4500").write()
    runs.environment |= script.env(nvml_library)
    for words in ([], [over.name], ["--gpus", "0"]) if LONG else ([over.name],):
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
