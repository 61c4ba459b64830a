"""A log's bytes as lines: without colours, progress bars on lines of their own, what launchers put in front taken off and the
rank that they name kept."""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST_LINE = 8192


class Line(NamedTuple):
    shown: str
    """As a person would read it."""
    text: str
    """Without what a launcher, a logger or a quotation put in front."""
    rank: int | None = None
    bar: bool = False
    """A frame of a progress bar."""
    gap: bool = False
    """Something was left out before this line."""
    at: int = 0
    """About where it is in the log, in bytes."""


# The escape character may have been lost on the way, the rest of a colour not.
_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)?|[@-Z\\^_])|\[\d{1,3}(?:;\d{1,3}){0,5}m")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u2028\u2029\ufeff]")
_BAR = re.compile(r"\d{1,3}%\|[^|\n\r]{0,300}\|\s*\d[\d.,kMG]*/[\d.,kMG?]+\s*(?:\[[^\]\n\r]{0,400}\]?)?")
# A line end inside quotes, as a list of strings or JSON shows it; not the start of a name in a Windows path.
_QUOTED_END = re.compile(r"(?<!\\)(?:\\r)?\\n(?=['\"\s\\\[(A-Z0-9^~]|$)")
_ENDS = re.compile(r"\r\n|[\n\r\x85]")

_FRONT = re.compile(
    r"""\s*(?:
      \d{1,7}:(?=\[|\S*Error|\s{2,}|Traceback)             # grep -n
    | (?P<srun>\d{1,4}):\s(?=\S|\s{2})                     # srun --label
    | \[(?:rank|default|Rank\s?)(?P<rank>\d{1,5})\]:?      # torchrun
    | \[\d{1,4},\s?(?P<mpi>\d{1,5})\](?:<\w{3,7}>)?:?      # mpirun
    | \((?:[A-Za-z_][\w.<>:]*\s)?pid=\d+[^)\n]{0,80}\)     # ray
    | [#>](?=\s|$)                                         # quoted, commented
    | \^C                                                  # a terminal's echo
    | [│┃║|╎](?=\s|$)                                      # boxes, tables
    | \d{4}-\d\d-\d\d[T\s]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?=\s|$)
    | \[\d{4}-\d\d-\d\d[T\s]\d\d:\d\d:\d\d(?:[.,]\d+)?\]
    | \[\s*\d{1,9}\.\d{3,6}\]                              # dmesg
    | std(?:out|err)\s[FP]\s                               # container runtimes
    | [\w.-]{1,60}\s+\|\s                                  # docker compose
    | (?:INFO|WARNING|ERROR)\s\d\d-\d\d\s\d\d:\d\d:\d\d\s\[?[\w./]+:\d+\]   # vLLM
    )""",
    re.VERBOSE,
)
_RIGHT_BORDER = re.compile(r"[│┃║╎]\s*$")


_LATIN_1 = {0xDC00 + byte: byte for byte in range(0x80, 0x100)}


def decode(data: bytes) -> str:
    """UTF-8; what is not is read as Latin-1, byte by byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogateescape").translate(_LATIN_1)


def lines_of(data: bytes, start: int, *, gap: bool) -> list[Line]:
    """The lines of one piece of a log that begins at `start`. Of a run of progress bars the first and the last remain."""
    text = _CONTROL.sub("", _COLOUR.sub("", decode(data)))
    if "%|" in text:
        text = _BAR.sub(lambda match: match[0] + "\n", text)
    if "\\n" in text:
        text = _QUOTED_END.sub("\n", text)
    found: list[Line] = []
    at = start
    for raw in _ENDS.split(text):
        for part in _short(raw):
            at += len(part) + 1
            shown = part.rstrip()
            if not shown:
                continue
            bar = _BAR.search(shown) is not None
            if bar and len(found) > 1 and found[-1].bar and found[-2].bar:
                found.pop()
            rest, rank = _without_front(shown)
            found.append(Line(shown, rest, rank, bar, gap and not found, at))
    return found


def _short(raw: str) -> list[str]:
    if len(raw) <= LONGEST_LINE:
        return [raw]
    return [raw[at : at + LONGEST_LINE] for at in range(0, len(raw), LONGEST_LINE)]


def _without_front(shown: str) -> tuple[str, int | None]:
    rank = None
    text = shown
    for _ in range(6):
        front = _FRONT.match(text)
        if front is None or not front.end():
            break
        named = front["rank"] or front["mpi"] or front["srun"]
        if named is not None:
            rank = int(named)
        text = text[front.end() :]
    return _RIGHT_BORDER.sub("", text).strip(), rank
