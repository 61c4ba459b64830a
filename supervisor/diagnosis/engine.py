"""From a log and what else is known to what ended the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from memtop.supervisor.diagnosis.excerpt import BLOCK, excerpt
from memtop.supervisor.diagnosis.page import Page
from memtop.supervisor.diagnosis.reading import read
from memtop.supervisor.diagnosis.values import Diagnosis, Evidence
from memtop.supervisor.diagnosis.verdict import judge


def diagnose(chunks: Iterable[bytes], evidence: Evidence | None = None) -> Diagnosis:
    """What ended the program whose output these bytes are, in pieces of any size. Memory is bounded whatever the length.

    Never raises for what the log holds; what the chunks' own source raises passes through.
    """
    evidence = evidence or Evidence()
    return judge(read(Page(excerpt(chunks)), evidence.member_pids, failed=evidence.exit_status not in (None, 0)), evidence)


def diagnose_file(path: Path, evidence: Evidence | None = None) -> Diagnosis:
    """The same of a file; OSError where it cannot be read."""
    with path.open("rb") as file:
        return diagnose(chunks_of(file), evidence)


def chunks_of(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(BLOCK):
        yield chunk
