"""The parts of a log that can matter, from a stream of any length, in bounded memory.

The stream is cut into blocks at fixed positions, so that the same log gives the same excerpt however it arrives. A cheap search
finds where to look; what lies around the first and the last places is kept, with the log's beginning and its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from memtop.supervisor.diagnosis.encoding import as_utf8

BLOCK = 1 << 20
_LONGEST = 64 << 10
_LONGEST_WORD = 64
HEAD, TAIL = 32 << 10, 192 << 10
BEFORE, AFTER = 16 << 10, 8 << 10
_KEPT = max(TAIL, BEFORE + AFTER + _LONGEST_WORD)

# What names a lack of memory or room, or an end by force. Each stands in an ordinary log rarely or never; a message that is cut
# or folded inside one of them mostly holds another. Plain words, since each is found at the speed of memory, unlike a pattern,
# and as few as will do: what only ends a log (schedulers, shells) stands in its tail, which is read anyway.
_STRONG = (
    *(b" allocate ", b"ut of memory", b"emoryError", b"EXHAUSTED", b"ALLOC", b"bad_alloc", b"Killed", b"killed ", b"oom-kill"),
    *(b"oom_kill", b"SIGKILL", b"No space", b"Writer failed", b"StorageFull", b"us error", b"shared memory", b"quota exceeded"),
)
# What names any other failure.
_WEAK = (b"Traceback (", b"Error: ", b"CUDA error", b"Assertion", b"Watchdog")


class Piece(NamedTuple):
    start: int
    """Where it begins in the stream, in bytes."""
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class _Places:
    """What lies around the first and the last places where one of some words stands."""

    def __init__(self, words: tuple[bytes, ...], keep: int) -> None:
        self._words = words
        self._first: list[Piece] = []
        self._last: deque[Piece] = deque(maxlen=keep)
        self._keep = keep
        self._searched = 0

    def look(self, data: bytes, base: int, limit: int) -> None:
        """Search the stream up to position `limit`; `data` begins at `base`."""
        position = max(self._searched, base)
        ahead = [(data.find(word, position - base, limit - base), word) for word in self._words]
        ahead = [found for found in ahead if found[0] >= 0]
        while ahead:
            at = base + min(ahead)[0]
            self._add(max(base, at - BEFORE), at + AFTER, data, base)
            # Half of what is kept may hold further places; the last of them still gets the other half for its own sequel.
            position = at + AFTER // 2
            ahead = [
                (place if place >= position - base else data.find(word, position - base, limit - base), word)
                for place, word in ahead
            ]
            ahead = [found for found in ahead if found[0] >= 0]
        # A word may lie across the limit.
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
    """The pieces in the order of the stream, none overlapping another."""
    searches = _Places(_STRONG, 12), _Places(_WEAK, 6)
    head = b""
    data, base = b"", 0
    for block in _blocks(as_utf8(chunks)):
        if not base and not data:
            head = block[:HEAD]
        # Enough of what came before for the context of a hit, and of what is not searched yet.
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
