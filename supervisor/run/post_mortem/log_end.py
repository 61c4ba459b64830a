"""The end of a program's output: its last lines, and what torchrun writes there about its ranks."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

_TAIL_BYTES = 16_384
_LINES = 8
_ROOT_CAUSE = "Root Cause (first observed failure):"


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
    _, found, block = text.rpartition(_ROOT_CAUSE)
    rank, status = re.search(r"^\s*rank\s*: (\d+)", block, re.M), re.search(r"^\s*exitcode\s*: (-?\d+)", block, re.M)
    return (int(rank[1]), int(status[1])) if found and rank and status else None


def _rank_lines(text: str) -> list[str]:
    _, _, block = text.rpartition(_ROOT_CAUSE)
    lines = [line.strip() for line in block.splitlines()]
    return [line for line in lines if line and set(line) != {"="}][:_LINES]


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").replace("\r", "\n")
    except OSError as error:
        return f"{log}: cannot be read: {error.strerror}"
