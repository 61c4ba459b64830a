"""Text preparation: from the bytes of a log to the lines and the space-free text that the patterns
search.

The steps, in order: convert to UTF-8 (`as_utf8`), keep the parts that can matter in bounded memory
(`excerpt`), split them into lines without colours and launcher prefixes (`lines_of`), and join the
lines without white space (`JoinedLines`).
"""

from __future__ import annotations

import codecs
import itertools
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from memtop.supervisor.diagnosis.translations import in_english

# --- encoding -------------------------------------------------------------------------------------

# Control characters that no program prints. NUL is not among them: a crash leaves blocks of NULs in
# a file. Terminals use bell, backspace, tabs, line and page ends, character sets and escape.
_UNPRINTED = bytes({*range(0x20), 0x7F} - {0x00, *range(0x07, 0x10), 0x1B})
_MOST_UNPRINTED, _LEAST_COUNT = 0.03, 32
_COMPRESSED = ((b"\x1f\x8b", "gzip", "zcat"), (b"\x28\xb5\x2f\xfd", "zstd", "zstdcat"), (b"\xfd7zXZ", "xz", "xzcat"))


def why_no_text(start: bytes) -> str | None:
    """Why a file that begins with these bytes is not a log, and what to do; None where it can be
    one, in any encoding.

    In machine code, compressed data and tensors, every tenth to twentieth byte is a control
    character.
    """
    for mark, name, reader in _COMPRESSED:
        if start.startswith(mark):
            return f"is compressed ({name}); give its text: {reader} FILE | memtop diagnose -"
    text = b"".join(as_utf8([start])).replace(b"\0", b"")
    unprinted = len(text) - len(text.translate(None, _UNPRINTED))
    if unprinted > max(_LEAST_COUNT, _MOST_UNPRINTED * len(text)):
        return "is a binary file; give what the program printed, as text"
    return None


def as_utf8(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The stream as UTF-8. PowerShell and some editors write UTF-16, with a byte order mark or with
    every second byte 0."""
    stream = iter(chunks)
    start = b""
    for chunk in stream:
        start += chunk
        if len(start) >= 512:
            break
    encoding = _utf16(start[:512])
    if encoding is None:
        yield start
        yield from stream
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for chunk in itertools.chain((start,), stream):
        yield decoder.decode(chunk).encode("utf-8", "replace")
    yield decoder.decode(b"", True).encode("utf-8", "replace")


def _utf16(start: bytes) -> str | None:
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    half = len(start) // 2
    if half >= 8:
        for encoding, zeros, others in (("utf-16-le", start[1::2], start[::2]), ("utf-16-be", start[::2], start[1::2])):
            if zeros.count(0) > half * 0.7 and others.count(0) < half * 0.1:
                return encoding
    return None


_LATIN_1 = {0xDC00 + byte: byte for byte in range(0x80, 0x100)}


def decode(data: bytes) -> str:
    """Decode UTF-8; read each byte that is not UTF-8 as Latin-1."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogateescape").translate(_LATIN_1)


# --- excerpt --------------------------------------------------------------------------------------

BLOCK = 1 << 20
HEAD, TAIL = 32 << 10, 192 << 10
"""Bytes kept from the beginning and the end of every log."""
BEFORE, AFTER = 16 << 10, 8 << 10
"""Bytes kept around a place where one of the words below stands."""
_LONGEST = 64 << 10
_LONGEST_WORD = 64
_KEPT = max(TAIL, BEFORE + AFTER + _LONGEST_WORD)

# Words that name a lack of memory or disk space, or a forced end. Each is rare in an ordinary log.
# They are plain bytes, because `bytes.find` is far faster than a regular expression, and few. Words
# that only occur at a log's end (of schedulers and shells) are not needed: the tail is always read.
_STRONG = (
    *(b" allocate ", b"ut of memory", b"emoryError", b"EXHAUSTED", b"ALLOC", b"bad_alloc", b"Killed", b"killed ", b"oom-kill"),
    *(b"oom_kill", b"SIGKILL", b"No space", b"Writer failed", b"StorageFull", b"us error", b"shared memory", b"quota exceeded"),
)
# Words that name any other failure.
_WEAK = (b"Traceback (", b"Error: ", b"CUDA error", b"Assertion", b"Watchdog")


class Piece(NamedTuple):
    start: int
    """Byte offset in the stream."""
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class _Places:
    """The text around the first and the last `keep` places where one of some words stands."""

    def __init__(self, words: tuple[bytes, ...], keep: int) -> None:
        self._words = words
        self._first: list[Piece] = []
        self._last: deque[Piece] = deque(maxlen=keep)
        self._keep = keep
        self._searched = 0

    def look(self, data: bytes, base: int, limit: int) -> None:
        """Search the stream up to offset `limit`; `data` begins at offset `base`."""
        position = max(self._searched, base)
        ahead = [(data.find(word, position - base, limit - base), word) for word in self._words]
        ahead = [found for found in ahead if found[0] >= 0]
        while ahead:
            at = base + min(ahead)[0]
            self._add(max(base, at - BEFORE), at + AFTER, data, base)
            # Search on from the middle of what was just kept: a further place in its second half
            # extends it.
            position = at + AFTER // 2
            ahead = [
                (place if place >= position - base else data.find(word, position - base, limit - base), word)
                for place, word in ahead
            ]
            ahead = [found for found in ahead if found[0] >= 0]
        # A word can lie across the limit.
        self._searched = max(position, limit - _LONGEST_WORD)

    def _add(self, start: int, end: int, data: bytes, base: int) -> None:
        places = self._last or self._first
        if places:
            latest = places[-1]
            if start <= latest.end and end - latest.start <= _LONGEST:
                places[-1] = Piece(latest.start, latest.data + data[latest.end - base : end - base])
                return
            start = max(start, latest.end)
        piece = Piece(start, data[start - base : end - base])
        if len(self._first) < self._keep:
            self._first.append(piece)
        else:
            self._last.append(piece)

    def pieces(self) -> list[Piece]:
        return [*self._first, *self._last]


def excerpt(chunks: Iterable[bytes]) -> list[Piece]:
    """The parts of a stream of any length that can matter, in stream order and without overlap, in
    bounded memory.

    The stream is cut into blocks at fixed offsets, so the result does not depend on the sizes of
    the chunks.
    """
    searches = _Places(_STRONG, 12), _Places(_WEAK, 6)
    head = b""
    data, base = b"", 0
    for block in _blocks(as_utf8(chunks)):
        if not base and not data:
            head = block[:HEAD]
        # Keep enough of the previous block for the context of a hit and for what has not been
        # searched yet.
        kept = data[-_KEPT:]
        base += len(data) - len(kept)
        data = kept + block
        for search in searches:
            search.look(data, base, base + len(data) - AFTER)
    for search in searches:
        search.look(data, base, base + len(data))
    tail = data[-TAIL:]
    ends = [Piece(0, head), Piece(base + len(data) - len(tail), tail)]
    return _merged([*ends, *searches[0].pieces(), *searches[1].pieces()])


def _blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size < BLOCK:
            continue
        whole = b"".join(waiting)
        full = size - size % BLOCK
        for at in range(0, full, BLOCK):
            yield whole[at : at + BLOCK]
        waiting = [whole[full:]]
        size -= full
    if size:
        yield b"".join(waiting)


def _merged(pieces: list[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for piece in sorted(pieces):
        if merged and piece.start <= merged[-1].end:
            latest = merged[-1]
            if piece.end > latest.end:
                merged[-1] = Piece(latest.start, latest.data + piece.data[latest.end - piece.start :])
        elif piece.data:
            merged.append(piece)
    return merged


# --- lines ----------------------------------------------------------------------------------------

LONGEST_LINE = 8192


class LogLine(NamedTuple):
    shown: str
    """The line as a person reads it."""
    text: str
    """The line without the prefix of a launcher, a logger or a quotation; what the C library and
    shells say is in English."""
    rank: int | None = None
    """The rank that the prefix names."""
    bar: bool = False
    """Whether it is a frame of a progress bar."""
    gap: bool = False
    """Whether something was left out before this line."""
    at: int = 0
    """Approximate byte offset in the log."""


# The escape character of a colour can be lost while the rest of it remains.
COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,500}(?:\x07|\x1b\\)?|[@-Z\\^_])|\[\d{1,3}(?:;\d{1,3}){0,5}m")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u2028\u2029\ufeff]")
BAR = re.compile(r"\d{1,3}%\|[^|\n\r]{0,300}\|\s*(?:\d[\d.,kMG]*/[\d.,kMG?]+\s*(?:\[[^\]\n\r]{0,400}\]?)?|ETA:\s*[\d:]+)")
# A line end inside quotes, as a list of strings or JSON shows it, but not the start of a name in a
# Windows path.
_QUOTED_END = re.compile(r"(?<!\\)(?:\\r)?\\n(?=['\"\s\\\[(A-Z0-9^~]|$)")
_ENDS = re.compile(r"\r\n|[\n\r\x85]")

_FRONT = re.compile(
    r"""\s*(?:
      \d{1,7}:(?=\[|\S*Error|\s{2,}|Traceback)             # grep -n
    | (?P<srun>\d{1,4}):\s(?=\S|\s{2})                     # srun --label
    | \[(?:rank|default|Rank\s?)(?P<rank>\d{1,5})\]:?      # torchrun
    | \[\d{1,4},\s?(?P<mpi>\d{1,5})\](?:<\w{3,7}>)?:?      # mpirun
    | \((?:[A-Za-z_][\w.<>:]*\s)?pid=\d*[^)\n]{0,80}\)     # ray
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
RIGHT_BORDER = re.compile(r"[│┃║╎]\s*$")


def lines_of(data: bytes, start: int, *, gap: bool) -> list[LogLine]:
    """The lines of one piece of a log that begins at offset `start`. Of consecutive progress bars
    two remain."""
    text = _CONTROL.sub("", COLOUR.sub("", decode(data)))
    if "%|" in text:
        text = BAR.sub(lambda match: match[0] + "\n", text)
    if "\\n" in text:
        text = _QUOTED_END.sub("\n", text)
    found: list[LogLine] = []
    at = start
    for raw in _ENDS.split(text):
        for part in _short(raw):
            at += len(part) + 1
            shown = part.rstrip()
            if not shown:
                continue
            bar = BAR.search(shown) is not None
            if bar and len(found) > 1 and found[-1].bar and found[-2].bar:
                found.pop()
            rest, rank = _without_front(shown)
            found.append(LogLine(shown, in_english(rest), rank, bar, gap and not found, at))
    return found


def _short(raw: str) -> list[str]:
    if len(raw) <= LONGEST_LINE:
        return [raw]
    return [raw[at : at + LONGEST_LINE] for at in range(0, len(raw), LONGEST_LINE)]


def _without_front(shown: str) -> tuple[str, int | None]:
    """The line without its prefixes, and the rank that they name."""
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
    return RIGHT_BORDER.sub("", text).strip(), rank


# --- the text of a log ---------------------------------------------------------------------------

# White space, and the backslash of a line that is continued.
_SPACE = re.compile(r"\s+|\\$")
_WORD = re.compile(r"\w")
TRACEBACK = "Traceback (most recent call last)"


class JoinedLines:
    """Lines in one order, joined into `text` without any white space, so that no folding hides a
    message."""

    def __init__(self, lines: list[LogLine], order: list[int]) -> None:
        self.lines = lines
        self._order = order
        parts = ["" if lines[index].bar else _SPACE.sub("", lines[index].text) for index in order]
        self._starts = []
        position = 0
        for part in parts:
            self._starts.append(position)
            position += len(part)
        self.text = "".join(parts)
        self._columns_of = -1
        self._known_columns: list[int] = []

    def line_at(self, position: int) -> int:
        """The index of the line that holds this position of `text`."""
        return self._order[bisect_right(self._starts, position) - 1]

    def starts_line(self, position: int) -> bool:
        return self._starts[bisect_right(self._starts, position) - 1] == position

    def before(self, position: int, most: int) -> str:
        """Up to `most` characters in front of a position on its line, with their white space."""
        slot = bisect_right(self._starts, position) - 1
        text = self.lines[self._order[slot]].text
        column = self._columns(slot)[position - self._starts[slot]]
        return text[max(0, column - most) : column]

    def ends_word(self, position: int) -> bool:
        """Whether the character at `position` is the last one of its word on its line."""
        slot = bisect_right(self._starts, position) - 1
        column = self._columns(slot)[position - self._starts[slot]]
        return _WORD.match(self.lines[self._order[slot]].text, column + 1) is None

    def _columns(self, slot: int) -> list[int]:
        """The column of each character that is not white space. The last result is kept: a line can
        hold many matches."""
        if self._columns_of != slot:
            text = self.lines[self._order[slot]].text
            self._known_columns = [index for index, character in enumerate(text) if not character.isspace()]
            self._columns_of = slot
        return self._known_columns


class LogText:
    """The lines that are read of one log."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.lines: list[LogLine] = []
        end = 0
        for piece in pieces:
            self.lines += lines_of(piece.data, piece.start, gap=piece.start > end)
            end = piece.end

    @cached_property
    def views(self) -> list[JoinedLines]:
        """The lines as they stand and, with several ranks, grouped by rank: ranks write between
        each other's lines."""
        ranks = {line.rank for line in self.lines}
        order = list(range(len(self.lines)))
        views = [JoinedLines(self.lines, order)]
        if len(ranks) > 1:
            by_rank = sorted(order, key=lambda index: (self.lines[index].rank is None, self.lines[index].rank or 0))
            views.append(JoinedLines(self.lines, by_rank))
        return views

    def context(self, index: int, most: int = 120) -> list[LogLine]:
        """The lines of the same rank up to `index`, oldest first, back to the beginning of the
        traceback at most."""
        rank = self.lines[index].rank
        found = []
        for line in reversed(self.lines[max(0, index - most * 4) : index + 1]):
            if line.rank != rank or line.bar:
                continue
            found.append(line)
            if line.gap or len(found) >= most or (line.text.startswith(TRACEBACK) and len(found) > 1):
                break
        return found[::-1]
