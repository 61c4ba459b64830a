"""Reads what a program appends to its output, each byte once."""

from __future__ import annotations

import os
from pathlib import Path

from memtop.supervisor import holes
from memtop.supervisor.run.record.folder import open_to_read

_BLOCK_BYTES = 1 << 20
LAST_BYTES = 4 * _BLOCK_BYTES
"""Of a program that has ended, at most so much output is read."""
_SMALL_BYTES, _TAIL_BYTES = 64 << 10, 8 << 10
_LONGEST_LINE = 64 << 10
_WINDOWS, _IN_WINDOW = 20, 10
"""Of what a program wrote at once, at most so many lines are read: a curve needs no more."""
_HITS = 100
_HINTS = (b"loss", b"step", b"epoch", b"it/s", b"s/it", b"iter", b"memtop:", b"nll")


class Tail:
    """The output of one attempt from a position on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        """Always at the start of a line."""

    def read(self, *, all_lines: bool = False, to_the_end: bool = False) -> list[str]:
        """The next lines that may have numbers of a training, of at most 1 MiB of the output.

        `all_lines`: also lines without the usual words. `to_the_end`: the last line counts though
        it has no end. Raises OSError.
        """
        block = self._block(last=to_the_end)
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if (to_the_end and len(block) < _BLOCK_BYTES) or (not end and len(block) > _LONGEST_LINE):
            end = len(block)
        self.offset += end
        # A dictionary may stand behind a bar.
        whole = block[:end].replace(b"\r", b"\n").replace(b"]{", b"]\n{")
        if all_lines:
            found = [line for line in whole.split(b"\n") if line]
        else:
            found = _near_losses(whole[:-_TAIL_BYTES]) if end > _SMALL_BYTES else []
            rest = whole[-_TAIL_BYTES:] if end > _SMALL_BYTES else whole
            lowered = rest.lower().split(b"\n")
            found += [line for line, low in zip(rest.split(b"\n"), lowered, strict=True) if _hints(low)]
        return [line.decode(errors="replace") for line in _windows(found)]

    def _block(self, *, last: bool) -> bytes:
        try:
            with open_to_read(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.offset:
                    self.offset = 0  # somebody has emptied it
                if size == self.offset:
                    return b""
                if last:
                    self.offset = max(self.offset, size - LAST_BYTES)
                block = os.pread(file.fileno(), _BLOCK_BYTES, self.offset)
                if block.startswith(b"\0"):
                    # The middle of a long output was removed.
                    self.offset = max(self.offset, holes.data_after(file.fileno(), self.offset))
                    block = os.pread(file.fileno(), _BLOCK_BYTES, self.offset)
                    self.offset += len(block) - len(block.lstrip(b"\0"))
                    block = block.lstrip(b"\0")
        except FileNotFoundError:
            return b""
        return block


def _hints(line: bytes) -> bool:
    # Faster than a regular expression or a generator, and this runs for each line of an output.
    loss, step, epoch, per_second, per_step, iteration, own, nll = _HINTS
    return (
        loss in line
        or step in line
        or epoch in line
        or per_second in line
        or per_step in line
        or iteration in line
        or own in line
        or nll in line
    )


def _near_losses(block: bytes) -> list[bytes]:
    """Lines with a loss, of very many some of them, each with the line before: a bar has the step.

    Finds them without a look at each line.
    """
    lowered = block.lower()
    apart = len(block) // _HITS if lowered.count(b"loss") > _HITS else 0
    found: list[bytes] = []
    at = lowered.find(b"loss")
    while at >= 0:
        end = lowered.find(b"\n", at)
        end = len(block) if end < 0 else end
        start = lowered.rfind(b"\n", 0, at) + 1
        before = lowered.rfind(b"\n", 0, max(0, start - 1)) + 1
        found += [block[max(before, start - _SMALL_BYTES) : start].rstrip(b"\n"), block[start:end][:_SMALL_BYTES]]
        at = lowered.find(b"loss", end + apart)
    return found


def _windows(lines: list[bytes]) -> list[bytes]:
    """All lines; of very many some that follow each other, again and again, and the last ones."""
    if len(lines) <= _WINDOWS * _IN_WINDOW:
        return lines
    apart = len(lines) // _WINDOWS
    kept = [line for start in range(0, apart * _WINDOWS, apart) for line in lines[start : start + _IN_WINDOW]]
    return kept + lines[-_IN_WINDOW:]
