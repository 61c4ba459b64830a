"""An excerpt as the recognisers read it: lines, and the same without any white space, so that no folding hides a message."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property

from memtop.supervisor.diagnosis.cleaning import Line, lines_of
from memtop.supervisor.diagnosis.excerpt import Piece

_SPACE = re.compile(r"\s+")


class View:
    """Some lines in one order, as one string without white space."""

    def __init__(self, lines: list[Line], order: list[int]) -> None:
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
        """What stands in front of a position on its line, with its white space: at most so many characters."""
        slot = bisect_right(self._starts, position) - 1
        text = self.lines[self._order[slot]].text
        column = self._columns(slot)[position - self._starts[slot]]
        return text[max(0, column - most) : column]

    def _columns(self, slot: int) -> list[int]:
        """Where on its line each character stands that is no white space. Of the last line that was asked about it is kept: a
        long one may hold many matches."""
        if self._columns_of != slot:
            text = self.lines[self._order[slot]].text
            self._known_columns = [index for index, character in enumerate(text) if not character.isspace()]
            self._columns_of = slot
        return self._known_columns


class Page:
    """What is read of one log."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.lines: list[Line] = []
        end = 0
        for piece in pieces:
            self.lines += lines_of(piece.data, piece.start, gap=piece.start > end)
            end = piece.end

    @cached_property
    def views(self) -> list[View]:
        """As it stands; and with several ranks each rank's lines together: they may have been written between another's."""
        ranks = {line.rank for line in self.lines}
        order = list(range(len(self.lines)))
        views = [View(self.lines, order)]
        if len(ranks) > 1:
            views.append(
                View(self.lines, sorted(order, key=lambda index: (self.lines[index].rank is None, self.lines[index].rank or 0)))
            )
        return views

    def context(self, index: int, most: int = 120) -> list[Line]:
        """The lines of the same rank up to `index`, the innermost last, no further back than the traceback's beginning."""
        rank = self.lines[index].rank
        found = []
        for line in reversed(self.lines[max(0, index - most * 4) : index + 1]):
            if line.rank != rank or line.bar:
                continue
            found.append(line)
            if line.gap or len(found) >= most or (line.text.startswith(_TRACEBACK) and len(found) > 1):
                break
        return found[::-1]


_TRACEBACK = "Traceback (most recent call last)"
