"""Follows a growing text file, as `tail -F` does: rotation, truncation and half-written lines included."""

from __future__ import annotations

import os
import re
from pathlib import Path

FIRST_BYTES = 256 * 1024
"""How much of an existing file's end is read first."""
_MOST_BYTES = 1024 * 1024
LONGEST_LINE = 8 * 1024
"""Bytes of one line that are kept; what is cut off is marked with an ellipsis."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")


class LogTail:
    """Gives the new lines of a file since the last `read`, and the one that is being written. A missing file has none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._inode: int | None = None
        self._partial = b""

    def read(self) -> list[str]:
        """New complete lines, oldest first, free of control sequences. OSError if the file cannot be read."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            found = os.fstat(file.fileno())
            first = self._inode is None
            if found.st_ino != self._inode or found.st_size < self._position:
                # Another file under the same name, or the same one begun anew.
                self._inode, self._partial = found.st_ino, b""
                self._position = max(0, found.st_size - FIRST_BYTES) if first else 0
            cut = first and self._position > 0
            file.seek(self._position)
            data = file.read(_MOST_BYTES)
        self._position += len(data)
        lines = (self._partial + data).split(b"\n")
        self._partial = _newest(lines.pop())
        if cut and lines:
            # Reading began in the middle of a line.
            del lines[0]
        return [_shown(raw) for raw in lines]

    @property
    def partial(self) -> str:
        """The line that has no end yet, as it stands now: half a line, or a progress bar that is drawn again and again."""
        return _shown(self._partial)


def _newest(line: bytes) -> bytes:
    """What is left to remember of a line without an end: what was written after its last carriage return, not without bound."""
    # A return at the very end draws nothing yet: it may be followed by more of this line, another one, or the line's end.
    text = line.rstrip(b"\r")
    kept = text[text.rfind(b"\r") + 1 :][: LONGEST_LINE + 1]
    return kept + b"\r" if len(text) < len(line) else kept


def _shown(line: bytes) -> str:
    text = line.rstrip(b"\r")
    text = text[text.rfind(b"\r") + 1 :]
    return clean(text[:LONGEST_LINE].decode("utf-8", "replace")) + ("…" if len(text) > LONGEST_LINE else "")


def clean(line: str) -> str:
    """What a terminal would show of a line: after the last carriage return, without colours and cursor movements."""
    shown = line.rstrip("\r\n").rsplit("\r", 1)[-1]
    return _CONTROL.sub("", shown.replace("\t", "    "))
