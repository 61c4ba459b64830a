"""One sampler for all tabs: the server samples this machine, the tabs' processes ask it.

A tab asks with one line over a socket that it has inherited, and gets the snapshot as one line of
JSON. The server samples only if a tab asks, and not more than once per interval.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from memtop.presets.decoding import decoder_of
from memtop.supervisor.errors import MemtopError
from memtop.supervisor.monitor.sampler import Sampler
from memtop.supervisor.monitor.values import MachineSnapshot

_PLAIN, _CLOSE = b"sample\n", b"sample closely\n"


class SharedSampler:
    """The server's side."""

    def __init__(self, make: Callable[[], Sampler], interval: float) -> None:
        self._make = make
        self._interval = interval
        self._sampler: Sampler | None = None
        self._one_at_a_time = asyncio.Lock()
        self._newest = b""
        self._due = float("-inf")

    async def answer(self, connection: socket.socket) -> None:
        """Answer a tab until it ends."""
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            while request := await reader.readline():
                writer.write(await self._line(closely=request == _CLOSE))
                await writer.drain()
        except ConnectionError:
            return  # the tab's process has ended
        finally:
            writer.close()

    async def _line(self, *, closely: bool) -> bytes:
        async with self._one_at_a_time:
            if closely and self._sampler is not None:
                self._sampler.nvml.want_pcie()
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + self._interval
                # The driver may not answer for seconds.
                self._newest = await asyncio.to_thread(self._sample)
            return self._newest

    def _sample(self) -> bytes:
        if self._sampler is None:
            self._sampler = self._make()
        return msgspec.json.encode(self._sampler.sample()) + b"\n"


class TabSampler:
    """The tab's side: a sampler for its feeds (`tui.feed.Sampling`)."""

    def __init__(self, descriptor: int) -> None:
        self._connection = socket.socket(fileno=descriptor).makefile("rwb")
        # The feed of a run that was opened from the list may begin before the one before it ends.
        self._one_at_a_time = threading.Lock()
        self._closely = False

    @property
    def nvml(self) -> TabSampler:
        return self

    def want_pcie(self) -> None:
        self._closely = True

    def sample(self) -> MachineSnapshot:
        """The newest snapshot. MemtopError if the server has ended."""
        with self._one_at_a_time:
            request, self._closely = _CLOSE if self._closely else _PLAIN, False
            try:
                self._connection.write(request)
                self._connection.flush()
                line = self._connection.readline()
            except ConnectionError:
                line = b""
        if not line:
            raise MemtopError("memtop watch --serve has ended")
        return decoder_of(MachineSnapshot).decode(line)
