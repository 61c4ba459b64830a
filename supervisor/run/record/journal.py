"""Reads the reports that the agents append to `attempts/NNNN/rank-R.jsonl`.

The file, not the socket, carries the reports: what a trainer said while no supervisor lived is still there for the
next one, and so is what the ledger could not take.
"""

from __future__ import annotations

from pathlib import Path

from memtop.supervisor.run.reports import Report, decode

_CHUNK_BYTES = 4 << 20


class Journal:
    """One rank's journal, read on from a byte offset."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.rank = int(path.stem.removeprefix("rank-"))
        self.offset = offset
        """Bytes read and acted upon so far; always at the start of a line."""
        self.stored = offset
        """How far the ledger has it: behind `offset` while it cannot be written."""

    def read_new(self) -> tuple[list[Report], int]:
        """The complete lines from `offset` on, and the offset behind them; at most 4 MiB at once.

        `offset` is left to the caller to move on.
        """
        return self.read(self.offset)

    def read(self, start: int, until: int | None = None) -> tuple[list[Report], int]:
        """The complete lines from there (before `until`, if given), and the offset behind them; at most 4 MiB at once.

        A line that is not JSON (a full disk cuts lines) is skipped.
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
    """The journals of an attempt, by rank."""
    return sorted(attempt_folder.glob("rank-*.jsonl"), key=lambda p: int(p.stem.removeprefix("rank-")))
