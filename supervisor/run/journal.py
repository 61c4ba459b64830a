"""Reads the reports that the agents append to `attempts/NNNN/rank-R.jsonl`.

The file, not the socket, carries the reports: what a trainer said while no supervisor lived is still there for the
next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

_CHUNK_BYTES = 4 << 20


class Journal:
    """One rank's journal, read on from a byte offset."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.rank = int(path.stem.removeprefix("rank-"))
        self.offset = offset
        """Bytes read and handed out so far; always at the start of a line."""

    def read_new(self, until: int | None = None) -> tuple[list[dict[str, Any]], int]:
        """The complete new lines (before offset `until`, if given), and the offset behind them; at most 4 MiB at once.

        `self.offset` is left to the caller to move on once the lines are safe in the ledger. A line that is no
        JSON (a full disk cuts lines) is passed over.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return [], self.offset
        if until is not None:
            block = block[: max(0, until - self.offset)]
        end = block.rfind(b"\n") + 1
        reports = []
        for line in block[:end].splitlines():
            try:
                report = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(report, dict):
                reports.append(report)
        return reports, self.offset + end


def find_journals(attempt_folder: Path) -> list[Path]:
    """The journals of an attempt, by rank."""
    return sorted(attempt_folder.glob("rank-*.jsonl"), key=lambda p: int(p.stem.removeprefix("rank-")))
