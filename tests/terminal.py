"""A real terminal for tests: the program gets a pseudo-terminal, the test reads the screen that it
drew."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Iterator, Sequence

import pyte

from tests.forking import Program


class Terminal:
    """Runs a program on a screen of the given size; `keys` types, `wait_for` reads."""

    def __init__(self, command: Sequence[str], *, columns: int, rows: int, cwd: str, environment: dict[str, str]) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.received = 0
        """How many bytes the program has sent."""
        self.sequences = b""
        """All of them: a screen does not show a bell, or a message to the desktop."""
        self._master, slave = pty.openpty()
        self.resize(columns, rows)
        self.process = Program(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env=_as_a_terminal_sets_it(environment),
            start_new_session=True,
        )
        os.close(slave)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def keys(self, text: str) -> None:
        os.write(self._master, text.encode())

    def clear(self) -> None:
        """Forget the screen, so that `wait_for` finds only what the program draws from now on."""
        self._read(0.05)
        self._screen.reset()

    def echoes(self) -> bool:
        """Whether it shows what is typed, as it does unless a program has taken the whole
        screen."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def text(self) -> str:
        """The screen as it is now."""
        self._read(0.05)
        return "\n".join(self._screen.display)

    def cells(self) -> Iterator[list[tuple[str, str, str, bool, bool]]]:
        """Each row of the screen as characters with colours (a name, or `rrggbb`), bold and
        reversed."""
        for y in range(self._screen.lines):
            cells = (self._screen.buffer[y][x] for x in range(self._screen.columns))
            yield [(one.data, one.fg, one.bg, one.bold, one.reverse) for one in cells]

    def wait_for(self, *wanted: str, seconds: float = 120) -> str:
        """The screen once it shows all the wanted texts."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.text()
            if all(text in shown for text in wanted):
                return shown
            assert time.monotonic() < deadline, f"{wanted} not shown within {seconds} s:\n{shown}"

    def leave(self, shown: str, seconds: float = 120) -> None:
        """Press Escape and wait until this text is gone: a key right behind an Escape would be read
        as one with Alt."""
        self.keys("\x1b")
        deadline = time.monotonic() + seconds
        while shown in (screen := self.text()):
            assert time.monotonic() < deadline, f"{shown!r} still shown after {seconds} s:\n{screen}"

    def wait(self, seconds: float = 120) -> int:
        """The program's exit status; what it still writes is read."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.text()}"
            self._read(0.05)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self, seconds: float) -> None:
        # On a busy machine a program may write faster than its output is read here.
        until = time.monotonic() + 0.5
        while time.monotonic() < until and select.select([self._master], [], [], seconds)[0]:
            try:
                block = os.read(self._master, 65536)
            except OSError:
                return  # the other side is closed
            if not block:
                return
            self.received += len(block)
            self.sequences += block
            self._stream.feed(block)
            seconds = 0


def _as_a_terminal_sets_it(environment: dict[str, str]) -> dict[str, str]:
    # A fixed size in the environment (test runners set one) would hide that of the terminal.
    kept = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    return {**kept, "TERM": "xterm-256color", "TEXTUAL_ANIMATIONS": "none"}
