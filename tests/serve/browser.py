"""A real headless Chromium for tests, driven over its DevTools protocol: pages are opened, keys are
pressed, and the terminal of a page is read."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-port=0"),
    *("--enable-unsafe-swiftshader", "--window-size=1280,800"),
)
# textual-serve's script keeps its terminal to itself: this takes hold of it when it is stored.
_HOLD_TERMINAL = """
Object.defineProperty(Object.prototype, "terminal", {configurable: true, set(value) {
  if (value && value.buffer && !window.heldTerminal) window.heldTerminal = value;
  Object.defineProperty(this, "terminal", {value, writable: true, configurable: true, enumerable: true});
}});
"""
TERMINAL = """
window.heldTerminal ? Array.from({length: heldTerminal.rows},
  (_, row) => heldTerminal.buffer.active.getLine(row).translateToString(true)).join("\\n") : ""
"""


def has_chinese() -> bool:
    """Whether the machine has a font with Chinese characters."""
    listing = shutil.which("fc-list")
    return listing is not None and bool(subprocess.run([listing, ":lang=zh-cn"], capture_output=True, check=True).stdout)


class Browser:
    """Use as `async with Browser() as browser`."""

    async def __aenter__(self) -> Browser:
        assert PROGRAM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [PROGRAM, *_OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        place = Path(self._folder.name) / "DevToolsActivePort"
        deadline = time.monotonic() + 120
        while not place.exists() or len(place.read_text().splitlines()) < 2:
            assert self._process.poll() is None, f"{PROGRAM} has ended with {self._process.returncode}"
            assert time.monotonic() < deadline, f"{PROGRAM} does not listen"
            await asyncio.sleep(0.05)
        port, path = place.read_text().splitlines()
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0)
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()
        await self._session.close()
        await self._reading
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    async def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json(
            {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        )
        return await asyncio.wait_for(answer, 120)

    async def open(self, url: str) -> Page:
        """A new tab."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=_HOLD_TERMINAL)
        await page.call("Page.navigate", url=url)
        return page

    async def _read(self) -> None:
        async for message in self._socket:
            document = message.json()
            if "id" not in document:
                self.events.append(document)
            elif "error" in document:
                self._answers.pop(document["id"]).set_exception(RuntimeError(document["error"]["message"]))
            else:
                self._answers.pop(document["id"]).set_result(document["result"])


class Page:
    """One tab."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **parameters)

    async def value(self, script: str) -> Any:
        """What a script in the page evaluates to; it may return a promise."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def terminal(self) -> str:
        """The text of the terminal in the page, as xterm.js holds it."""
        return str(await self.value(TERMINAL))

    async def wait_for(self, *wanted: str, script: str = TERMINAL, seconds: float = 120) -> str:
        """The terminal's text (or the value of a script) once it contains all the wanted texts."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                shown = str(await self.value(script))
            except RuntimeError as error:
                # The page that the script ran in has just been replaced.
                if "navigated" not in str(error):
                    raise
                shown = ""
            if all(text in shown for text in wanted):
                return shown
            assert time.monotonic() < deadline, f"{wanted} not shown within {seconds} s:\n{shown}"
            await asyncio.sleep(0.1)

    async def type(self, text: str) -> None:
        """Press keys that stand for characters."""
        for character in text:
            await self.call("Input.dispatchKeyEvent", type="keyDown", text=character, key=character)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    async def picture(self) -> bytes:
        """What the page looks like, a PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    async def close(self) -> None:
        await self._browser.call("Target.closeTarget", targetId=self._target)

    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        return [
            event["params"]["request"]["url"] if "request" in event["params"] else event["params"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated")
        ]

    def complaints(self) -> list[str]:
        """What the page's console has as a warning or an error."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") == self._session:
                entry = event["params"].get("entry", {})
                if event["method"] == "Log.entryAdded" and entry["level"] in ("warning", "error"):
                    found.append(entry["text"])
                elif event["method"] == "Runtime.exceptionThrown":
                    found.append(str(event["params"]["exceptionDetails"]))
        return found
