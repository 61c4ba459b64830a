"""The tabs of `memtop watch --serve`: what they may do, how they end, and how they look in a real
browser."""

from __future__ import annotations

import asyncio
import http.server
import json
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from memtop.cli.serve.tab import Tab as DashboardTab
from memtop.supervisor import language
from tests.conftest import Runs
from tests.serve import browser as chromium
from tests.serve.browser import Browser
from tests.serve.served import LIVES, Served, tab_of, until

# --- what a tab may do ----------------------------------------------------------------------------


def widest(text: str) -> int:
    return max(len(line.rstrip()) for line in text.splitlines())


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
        # Another dashboard follows in the same tab, at the size that the tab has by then.
        await tab.socket.send_json(["resize", {"width": 120, "height": 35}])
        await tab.keys("/other\r")
        await tab.wait_for("Runs 1 of ")
        await tab.keys("w")
        await tab.wait_for("read-only: a browser writes no files here")
        await tab.keys("\r")
        shown = await tab.wait_for("other  attempt 1", "finished", "All runs")
        assert len(served.tabs()) == 1
        assert widest(shown) > 100
        await tab.keys("q")
        await tab.ends()
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
    ("words", "wanted"),
    [
        (["--replay", "over"], "replay"),
        pytest.param(["latest"], "over", marks=pytest.mark.long),
        pytest.param(["--lang", "zh"], "只读", marks=pytest.mark.long),
    ],
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


async def test_files_and_addresses_of_a_dashboard_reach_no_browser() -> None:
    shown: list[bytes] = []

    async def send(data: bytes) -> None:
        shown.append(data)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        tab = DashboardTab([], theirs, send, partial(asyncio.sleep, 0))
        stdout = asyncio.StreamReader()
        stdout.feed_data(b"__GANGLION__\n")
        for meta in ("open_url", "deliver_file_start", "exit"):
            content = json.dumps({"type": meta, "url": "http://evil.example", "path": "/etc/passwd", "key": "1"})
            stdout.feed_data(DashboardTab.encode_packet(b"M", content.encode()))
        stdout.feed_data(b"P" + (3).to_bytes(4, "big") + b"abc")
        stdout.feed_data(DashboardTab.encode_packet(b"D", b"drawn"))
        for _ in range(6):
            await tab._packet(stdout)
    assert shown == [b"drawn"]


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


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.long), (signal.SIGKILL, -signal.SIGKILL)],
)
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


# --- in a real browser ----------------------------------------------------------------------------

COLOURS = """
new Set([...document.querySelectorAll(".xterm-screen canvas")].flatMap(canvas =>
  [...new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)])).size
"""
"""How many colours the terminal has in the page."""


needs_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium (apt-get install chromium)")


@needs_browser
async def test_a_real_browser_shows_it_and_reads_only(runs: Runs, serve: Callable[..., Served]) -> None:
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
        # It is drawn, and not only received.
        assert await page.value(COLOURS) > 8
        # Keys work without a click. Those that act do nothing.
        await page.type("krs?")
        await page.wait_for("All keys, and what the marks mean")
        assert "Stop first?" not in await page.terminal()
        # A second tab of the same browser needs no link.
        second = await browser.open(f"{own}/")
        await second.wait_for("first", "hello from the log")
        assert len(served.tabs()) == 2
        # Nothing came from anywhere else, and the page's own rules stopped nothing.
        for one in (page, second):
            assert one.requests()
            assert {urlsplit(address).netloc for address in one.requests()} == {f"127.0.0.1:{served.port}"}
            assert one.complaints() == []
    assert len(runs.show("first")["attempts"]) == 1


ENDS = """
Array.from({length: heldTerminal.rows}, (_, row) => heldTerminal.buffer.active.getLine(row)).map(line => {
  const ends = Array.from({length: heldTerminal.cols}, (_, column) => line.getCell(column).getChars());
  return [line.translateToString(true), ends.lastIndexOf("│")];
})
"""
"""Each row of the terminal, and the column of the last border in it."""
GLYPHS = """
["内", "存", "训"].map(text => {
  const drawn = Object.assign(document.createElement("canvas"), {width: 40, height: 40}).getContext("2d");
  drawn.font = `20px ${heldTerminal.options.fontFamily}`;
  drawn.fillText(text, 5, 30);
  return [drawn.measureText(text).width / drawn.measureText("a").width, drawn.canvas.toDataURL()];
})
"""
"""How wide some characters are, in cells, and what they look like in the font of the terminal."""


@pytest.mark.long
@needs_browser
@pytest.mark.skipif(not chromium.has_chinese(), reason="needs a Chinese font (apt-get install fonts-noto-cjk)")
async def test_chinese_is_drawn_and_its_columns_line_up(serve: Callable[..., Served]) -> None:
    served = serve("--demo", "--lang", "zh")
    async with Browser() as browser:
        page = await browser.open(served.link())
        await page.wait_for("tiny-llama", "训练中", "主机内存")
        assert await page.value("document.documentElement.lang") == "zh-CN"
        rows = await page.value(ENDS)
        panel = [(text, end) for text, end in rows if text.endswith("│")]
        assert any(language.has_wide(text) for text, _ in panel)
        assert any(not language.has_wide(text) for text, _ in panel)
        assert len({end for _, end in panel}) == 1, rows
        widths, pictures = zip(*await page.value(GLYPHS), strict=True)
        assert all(1 < width <= 2 for width in widths), widths
        assert len(set(pictures)) == 3, "a browser without the font draws the same box for each"


@needs_browser
async def test_pages_of_others_get_nothing_from_the_browser(demo: Served) -> None:
    """The browser has the cookie, and sends it: the pages are on the same host."""
    own = f"http://127.0.0.1:{demo.port}"
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        async with Browser() as browser:
            page = await browser.open(demo.link())
            await page.wait_for("tiny-llama")
            connect = f"""new Promise(done => {{ const one = new WebSocket("ws://127.0.0.1:{demo.port}/ws");
                one.onopen = () => done("open"); one.onerror = () => done("refused"); }})"""
            assert await page.value(connect) == "open"
            assert await page.value("fetch('/').then(answer => answer.status)") == 200
            assert await page.value("fetch('/', {credentials: 'omit'}).then(answer => answer.status)") == 403
            stranger = await browser.open(f"http://127.0.0.1:{other.server_address[1]}/nothing")
            await stranger.wait_for("404", script="document.body?.innerText ?? ''")
            assert await stranger.value(connect) == "refused"
            read = f"fetch('{own}/', {{credentials: 'include'}}).then(() => 'read', () => 'refused')"
            assert await stranger.value(read) == "refused"
        other.shutdown()


@pytest.mark.long
@needs_browser
async def test_a_tab_that_has_ended_says_how_to_go_on(serve: Callable[..., Served]) -> None:
    served = serve("--demo")
    ended = "(e => e && getComputedStyle(e).display + e.innerText)(document.querySelector('#ended'))"
    async with Browser() as browser:
        page = await browser.open(served.link())
        await page.wait_for("tiny-llama")
        second = await browser.open(f"http://127.0.0.1:{served.port}/")
        await second.wait_for("tiny-llama")
        await second.close()
        await asyncio.to_thread(until, lambda: len(served.tabs()) == 1)
        assert "none" in await page.value(ended)
        await page.type("q")
        assert "Open it again" in await page.wait_for("block", script=ended)
        await page.value("document.querySelector('#ended a').click()")
        # The old page shows the dashboard's name, too.
        await page.wait_for("none", script=ended)
        await page.wait_for("tiny-llama")
        assert await asyncio.to_thread(served.end, signal.SIGINT) == 130
        await page.wait_for("block", script=ended)
