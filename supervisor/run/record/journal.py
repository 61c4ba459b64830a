"""Reads the reports that the agents append to `attempts/NNNN/rank-R.jsonl`.

Reports are stored in a file instead of being sent over the socket. So the next supervisor finds the
reports of a time without a supervisor, and no report is lost while the ledger cannot be written.
"""

from __future__ import annotations

from pathlib import Path

from memtop.supervisor.run.reports import Report, decode

_CHUNK_BYTES = 4 << 20


class Journal:
    """One rank's journal, read from a byte offset."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.rank = int(path.stem.removeprefix("rank-"))
        self.offset = offset
        """Bytes read and processed so far. Always at the start of a line."""
        self.stored = offset
        """Bytes stored in the ledger so far. Less than `offset` while the ledger cannot be
        written."""

    def read_new(self) -> tuple[list[Report], int]:
        """The reports in the complete lines after `offset`, and the offset behind them.

        Reads at most 4 MiB.

        Does not change `offset`.
        """
        return self.read(self.offset)

    def read(self, start: int, until: int | None = None) -> tuple[list[Report], int]:
        """The reports in the complete lines between `start` and `until`, and the offset behind
        them. Reads at most 4 MiB.

        Lines that are not valid JSON are skipped; a full disk can cut a line.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                block = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return [], start
        if until is not None:
            block = block[: max(0, until - start)]
        end = block.rfind(b"\n") + 1
        reports = (decode(line) for line in block[:end].splitlines())
        return [report for report in reports if report is not None], start + end


def find_journals(attempt_folder: Path) -> list[Path]:
    """The journals of an attempt, in order of rank."""
    return sorted(attempt_folder.glob("rank-*.jsonl"), key=lambda p: int(p.stem.removeprefix("rank-")))
