"""How commands print: every line is cleaned, since it can contain text of programs and other users.

JSON is exact data: it escapes control characters instead.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from rich.cells import cell_len

from memtop.supervisor.clean import clean
from memtop.supervisor.language import Verbatim, tr


def print_lines(*lines: str, own: bool = True) -> None:
    """Print lines to stdout: what the command was asked for. `own`: texts of memtop, which are
    translated."""
    _print(lines, sys.stdout, own=own)


def print_message(*lines: str) -> None:
    """Print lines to stderr: messages. The command goes on if a full disk cannot take them."""
    try:
        _print(lines, sys.stderr, own=True)
    except BrokenPipeError:
        raise
    except OSError:
        return  # there is no other place to say it


def discard(stream: TextIO) -> None:
    """Send what this stream writes from now on nowhere, what it has buffered included: its reader
    has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_json(document: Any, **lists: Iterator[Any]) -> None:
    """Print one JSON document to stdout.

    `lists` are further values of the document. Their items are printed one by one, so that there
    may be any number of them. Nothing is printed if the first ones cannot be read.
    """
    text = json_text(document, indent=2)
    begun = {name: itertools.chain([*itertools.islice(items, 1)], items) for name, items in lists.items()}
    for name, items in begun.items():
        sys.stdout.write(f'{text.removesuffix("}").rstrip()},\n  "{name}": [')
        for number, item in enumerate(items):
            sys.stdout.write(f"{',' if number else ''}\n    {json_text(item)}")
        text = "\n  ]\n}"
    sys.stdout.write(text + "\n")


def json_text(document: Any, *, indent: int | None = None) -> str:
    """The document in ASCII without control characters. Without `indent` it is one line."""
    separators = (",", ":") if indent is None else None
    # json escapes every character that is not ASCII, and of those that are all but DEL.
    return json.dumps(document, indent=indent, separators=separators, allow_nan=False).replace("\x7f", "\\u007f")


def row(*cells: tuple[str, int], between: str = " ") -> Verbatim:
    """Cells in the reader's language, each padded to so many columns of the terminal; a negative
    width aligns to the right. Names of the user are given as `Verbatim`."""
    shown = [(tr(text), width) for text, width in cells]
    padding = [" " * max(0, abs(width) - cell_len(text)) for text, width in shown]
    parts = (blanks + text if width < 0 else text + blanks for (text, width), blanks in zip(shown, padding, strict=True))
    return Verbatim(between.join(parts).rstrip())


def _print(lines: Iterable[str], stream: TextIO, *, own: bool) -> None:
    text = "".join(f"{clean(tr(line) if own else line)}\n" for line in lines)
    # A terminal of another encoding shows a question mark for what it lacks.
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
