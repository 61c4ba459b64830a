"""The output of an attempt, line by line, and the run's events among its lines.

Only the places of the lines are in memory.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from memtop.supervisor import holes
from memtop.supervisor.run.record.folder import RunFolder
from memtop.supervisor.run.record.ledger import Attempt
from memtop.supervisor.run.record.output_log import OutputTimes
from memtop.supervisor.wire import Event
from memtop.tui.dashboard.log import shown_line

_READ_BYTES = 4 << 20
"""How much is read at one time to find where lines begin."""
_SEARCH_BYTES = 1 << 20
"""How much is searched at one time: meanwhile the dashboard cannot draw."""
_LINE_BYTES = 64 * 1024
"""Of a longer line (a progress bar, the rest of a hole) only an end is read."""


class AttemptLog:
    """The output of one attempt: where its lines begin, and the lines themselves when asked."""

    def __init__(self, folder: RunFolder, attempt: Attempt) -> None:
        self.attempt = attempt
        self.path = folder.attempt(attempt.number) / "output.log"
        self._starts = array("q")
        """Where each line begins. A line that begins in a hole stands for the whole hole."""
        self._read = 0
        self._begins_line = True
        self._times = OutputTimes(self.path)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def size(self) -> int:
        """How many bytes of the file have been read."""
        return self._read

    def extend(self) -> bool:
        """Find the lines of the next part of the file; whether there may be more. OSError."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            position = holes.data_after(descriptor, self._read)
            data = os.pread(descriptor, _READ_BYTES, position)
        finally:
            os.close(descriptor)
        if not data:
            return False
        if self._begins_line or position > self._read:
            self._starts.append(position)
        self._starts.extend(position + found.end() for found in re.finditer(b"\n", data))
        self._read, self._begins_line = position + len(data), data.endswith(b"\n")
        if self._begins_line:
            self._starts.pop()  # the next line has not begun
        self._times = OutputTimes(self.path)
        return len(data) == _READ_BYTES

    def line(self, number: int) -> str:
        """One line, as a terminal would show it. OSError."""
        start, end = self._starts[number], self._end(number)
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read(min(end - start, _LINE_BYTES))
            if end - start > _LINE_BYTES and (b"\r" in data or data.endswith(b"\0")):
                # A terminal shows what follows the last carriage return.
                file.seek(end - _LINE_BYTES)
                data = file.read(_LINE_BYTES)
        return shown_line(data.strip(b"\0\n"))  # a hole is read as zeros

    def time_of(self, number: int) -> float | None:
        """When the line was written at the latest, seconds since the epoch; None if unknown."""
        return self._times.at(self._end(number)) or self.attempt.ended

    def lines_at(self, moment: float) -> int:
        """How many lines were certainly written at this time, seconds since the epoch; all if no
        time was noted."""
        size = self._times.size_at(moment)
        if size is None or size >= self._read:
            return len(self)
        return max(0, bisect_right(self._starts, size) - 1)

    def find(self, query: str) -> list[int]:
        """The lines that contain the text; letters of ASCII in any case. OSError."""
        wanted, found = query.encode(), set[int]()
        pattern = re.compile(re.escape(wanted), re.IGNORECASE)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            position = holes.data_after(descriptor, 0)
            while position < self._read and (data := os.pread(descriptor, _SEARCH_BYTES, position)):
                found |= {bisect_right(self._starts, position + match.start()) - 1 for match in pattern.finditer(data)}
                # A match may begin in one part and end in the next.
                step = len(data) if len(data) < _SEARCH_BYTES else len(data) - len(wanted) + 1
                position = holes.data_after(descriptor, position + step)
        finally:
            os.close(descriptor)
        return sorted(number for number in found if 0 <= number < len(self._starts))

    def _end(self, number: int) -> int:
        return self._starts[number + 1] if number + 1 < len(self._starts) else self._read


class Section:
    """The rows of an attempt: its heading, its lines and its end, with the run's events at their
    times.

    A row is an event, or the number of a line. -1 is the heading, and the number of lines is the
    end.
    """

    def __init__(self, log: AttemptLog, events: Sequence[Event]) -> None:
        self.log = log
        self._made_of = (log.size, log.attempt, events)
        self.lines, self.has_end = len(log), log.attempt.ended is not None
        """The log may have grown since."""
        placed = sorted(((self._place(event), event.time, event.id, event) for event in events), key=lambda p: p[:3])
        self._befores = [before for before, *_ in placed]
        """Of each event: the row that it stands above."""
        self.events = [event for *_, event in placed]
        self._offsets = [before + 1 + number for number, before in enumerate(self._befores)]
        self._offset_of = {event.id: offset for event, offset in zip(self.events, self._offsets, strict=True)}

    def is_of(self, log: AttemptLog, events: Sequence[Event]) -> bool:
        """Whether these are its log and its events, and nothing has come since."""
        return self.log is log and self._made_of == (log.size, log.attempt, events)

    def _place(self, event: Event) -> int:
        attempt = self.log.attempt
        if event.time < attempt.started:
            return -1
        if attempt.ended is not None and event.time >= attempt.ended:
            return self.lines + 1
        return min(self.lines, self.log.lines_at(event.time))

    def __len__(self) -> int:
        return self.lines + 1 + self.has_end + len(self.events)

    def at(self, offset: int) -> int | Event:
        """What the row that is so far from the first one shows."""
        place = bisect_left(self._offsets, offset)
        if place < len(self._offsets) and self._offsets[place] == offset:
            return self.events[place]
        return offset - place - 1

    def offset(self, row: int | Event) -> int:
        """How far a row is from the first one; 0 for an event that is no longer shown."""
        if isinstance(row, Event):
            return self._offset_of.get(row.id, 0)
        return row + 1 + bisect_right(self._befores, row)
