"""Lines that are too long for the terminal, broken between words."""

from __future__ import annotations

import functools
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec

from rich.cells import cell_len

from memtop.supervisor.language import Verbatim, has_wide, tr, wrapped_anywhere

_AT_BLANKS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_LEAST_WRAPPED = 20
_P = ParamSpec("_P")


def wraps_on_terminal(lines_of: Callable[_P, Iterator[str]]) -> Callable[_P, Iterator[str]]:
    """A function whose lines are those of this one, wrapped if stdout is a terminal."""

    @functools.wraps(lines_of)
    def wrapping(*args: _P.args, **named: _P.kwargs) -> Iterator[str]:
        return for_terminal(lines_of(*args, **named))

    return wrapping


def for_terminal(lines: Iterable[str]) -> Iterator[str]:
    """The lines in the reader's language, wrapped if stdout is a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in lines:
        yield from wrapped(line, width)


def wrapped(line: str, width: int | None) -> Iterator[str]:
    """The line in the reader's language, wrapped at words below what follows its label. A path that
    is too long stays whole."""
    shown = tr(line)
    label = re.match(r" *(?:\S+(?: \S+)?  +)?", shown)
    start = "" if label is None else label[0]
    indent = cell_len(start)
    if width is None or cell_len(shown) <= width or width - indent < _LEAST_WRAPPED:
        yield Verbatim(shown)
        return
    words, room = shown[len(start) :], width - indent
    rows = wrapped_anywhere(words, room) if has_wide(words) else textwrap.wrap(words, room, **_AT_BLANKS)
    for number, row in enumerate(rows):
        yield Verbatim(f"{' ' * indent if number else start}{row}")
