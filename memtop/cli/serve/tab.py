"""The process behind one tab of a browser: its dashboard, which draws into a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence

from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

from memtop.cli.output import print_message
from memtop.supervisor.clean import clean
from memtop.supervisor.language import tr

_LARGEST = (500, 200)
"""Columns and rows that a browser may ask for: the screen of a tab is kept in memory."""
_QUIT_SECONDS = 3.0
"""How long a dashboard may take to end when its tab is closed."""
_MOST_ERRORS = 16 << 10
"""Bytes of stderr that are kept."""
_ENVIRONMENT = {
    "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver",
    "TEXTUAL_COLOR_SYSTEM": "truecolor",
    "TERM": "xterm-256color",
    "PYTHONIOENCODING": "utf-8",
}

Send = Callable[[bytes], Awaitable[None]]


class Tab(AppService):
    """textual-serve's service of one tab, with four differences: there is no shell between the
    server and the dashboard, so that it can be ended; the server takes no files and no addresses
    from it; a dashboard may be followed by another (a run that is opened from the list of runs);
    and its errors go to stderr."""

    def __init__(
        self, arguments: Sequence[str], connection: socket.socket, send: Send, close: Callable[[], Awaitable[None]]
    ) -> None:
        """`arguments`: of `memtop watch`, without the option that names `connection`, the socket
        for samples, which is closed here when the process has it."""
        super().__init__("", write_bytes=send, write_str=_drop, close=close, download_manager=DownloadManager())
        self._arguments = tuple(arguments)
        self._connection = connection
        self._size = (80, 24)
        self._drawn = False
        self._listens = True
        self._errors = bytearray()

    # --- from the browser -------------------------------------------------------------------------

    async def hear(self, message: object) -> None:
        """Hand on what the page has sent: keys, its size, the focus. Anything else is ignored."""
        match message:
            case ["stdin", str(text)]:
                await self.send_bytes(text.encode(errors="replace"))
            case ["resize", {"width": int(width), "height": int(height)}]:
                await self.resize(width, height)
            case ["focus"]:
                await self.focus()
            case ["blur"]:
                await self.blur()

    async def resize(self, width: int, height: int) -> None:
        """Tell the dashboard its size in cells."""
        self._size = sane_size(width, height)
        await self.set_terminal_size(*self._size)

    # --- the process ------------------------------------------------------------------------------

    async def _open_app_process(self, width: int = 80, height: int = 24) -> Process:
        self._size = sane_size(width, height)
        columns, rows = map(str, self._size)
        descriptor = self._connection.fileno()
        with self._connection:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "memtop", "watch", "--tab", str(descriptor), *self._arguments),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env={**os.environ, **_ENVIRONMENT, "COLUMNS": columns, "ROWS": rows},
                pass_fds=[descriptor],
                # Ctrl+C in the terminal of the server ends the server, which ends its tabs.
                start_new_session=True,
            )
        assert process.stdin is not None
        self._stdin = process.stdin
        return process

    async def run(self) -> None:
        """Hand on what the dashboard draws until its process ends; then close the tab."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(self._read_errors(process.stderr))
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await self._packet(process.stdout)
        await errors
        if await process.wait() != 0:
            await self._tell_why(self._errors.decode(errors="replace").splitlines())
        await self.remote_close()

    async def _packet(self, stdout: asyncio.StreamReader) -> None:
        """The next thing that the process has written (see Textual's WebDriver)."""
        kind = await stdout.readexactly(1)
        if kind == b"_":
            # A line is at the start of each dashboard. The next one must learn the present size.
            await stdout.readline()
            if self._drawn:
                await self.set_terminal_size(*self._size)
            self._drawn = True
            return
        payload = await stdout.readexactly(int.from_bytes(await stdout.readexactly(4), "big"))
        # The other kinds offer files, or ask the browser to open an address: they are dropped.
        if kind == b"D":
            await self._show(payload)

    async def _show(self, data: bytes) -> None:
        if self._listens:
            try:
                await self.remote_write_bytes(data)
            except (ConnectionError, RuntimeError):
                # The tab is closed. What is still drawn is read, so that the process can end.
                self._listens = False

    async def _read_errors(self, stderr: asyncio.StreamReader) -> None:
        while block := await stderr.read(4096):
            self._errors += block
            del self._errors[:-_MOST_ERRORS]

    async def _tell_why(self, lines: list[str]) -> None:
        print_message(*lines)
        if lines and not self._drawn:
            await self._show(clean(lines[-1]).encode())

    async def stop(self) -> None:
        """End the process, with its own words at first."""
        if self._process is None or self._task is None:
            self._connection.close()
            return
        await self.send_meta({"type": "quit"})
        try:
            await asyncio.wait_for(asyncio.shield(self._task), _QUIT_SECONDS)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._task


def sane_size(width: int, height: int) -> tuple[int, int]:
    """Columns and rows that can be drawn."""
    return max(1, min(width, _LARGEST[0])), max(1, min(height, _LARGEST[1]))


def too_many(tabs: int) -> bytes:
    """What a tab shows that cannot be opened."""
    return tr(f"memtop: {tabs} tabs are open, and there can be no more: close one of them").encode()


async def _drop(text: str) -> None:
    """textual-serve's messages about files and addresses."""
