"""The end of a program's output: its last lines, and what torchrun writes there about its ranks."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import msgspec

_TAIL_BYTES = 16_384
_LINES = 8
_ROOT_CAUSE = "Root Cause (first observed failure):"
_KILLED = (-signal.SIGKILL, -signal.SIGBUS, -signal.SIGSEGV)


class LogEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a program's output."""

    lines: tuple[str, ...] = ()
    """The last lines that are not empty."""
    first_dead_rank: tuple[int, int] | None = None
    """The rank that ended first of several and its exit status, as torchrun reports it."""
    rank_lines: tuple[str, ...] = ()
    """torchrun's lines about that rank."""


def read_log_end(log: Path) -> LogEnd:
    text = _tail(log)
    lines = [line for line in (line.strip() for line in text.splitlines()) if line]
    return LogEnd(lines=tuple(lines[-_LINES:]), first_dead_rank=_first_dead_rank(text), rank_lines=tuple(_rank_lines(text)))


def first_dead_rank(log: Path) -> tuple[int, int] | None:
    """The rank that ended first of several, and its exit status, from torchrun's summary at the end
    of the log."""
    return _first_dead_rank(_tail(log))


def _first_dead_rank(text: str) -> tuple[int, int] | None:
    return _rank_and_status(_first_block(text))


def _rank_and_status(block: str) -> tuple[int, int] | None:
    rank, status = re.search(r"^\s*rank\s*: (\d+)", block, re.M), re.search(r"^\s*exitcode\s*: (-?\d+)", block, re.M)
    return (int(rank[1]), int(status[1])) if rank and status else None


def _first_block(text: str) -> str:
    """torchrun's lines about the rank that ended first.

    A rank that loses the connection to a killed one may exit so soon that torchrun notices both
    together and names the wrong one. A killed rank in its list was not killed by torchrun, which
    lists only ranks that ended before it stopped the others.
    """
    before, found, root = text.rpartition(_ROOT_CAUSE)
    if not found:
        return ""
    ended = _rank_and_status(root)
    if ended is not None and ended[1] > 0:
        others = re.split(r"^\[\d+\]:$", before.rpartition("Failures:")[2], flags=re.M)
        for block in others:
            other = _rank_and_status(block)
            if other is not None and other[1] in _KILLED:
                return block
    return root


def _rank_lines(text: str) -> list[str]:
    block = _first_block(text)
    lines = [line.strip() for line in block.splitlines()]
    return [line for line in lines if line.strip("=-")][:_LINES]


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").replace("\r", "\n")
    except OSError as error:
        return f"{log}: cannot be read: {error.strerror}"
