"""`memtop diagnose`: what ended a training program, read from its log."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memtop.supervisor import units
from memtop.supervisor.diagnosis.diagnose import chunks_of, diagnose
from memtop.supervisor.diagnosis.sentences import size
from memtop.supervisor.diagnosis.text import why_no_text
from memtop.supervisor.diagnosis.values import Diagnosis, Evidence
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery.offline import remedies_for
from memtop.supervisor.recovery.policy import SURE
from memtop.supervisor.recovery.values import Remedy

_CONFIDENCE = (
    (0.95, "proven"),
    (0.75, "very likely"),
    (0.5, "likely"),
    (0.0, "a guess"),
)
_STATUSES = (range(256), range(-64, 0), range(257, 288))
"""Of a program, of Python for a signal, and of batch systems that tell signal N as 256 + N."""


def command(log: str | None, exit_code: int | None, *, as_json: bool) -> int:
    """Print the diagnosis of a file, or of standard input. Whatever it is, the exit status is 0; UsageError where there is
    nothing to read."""
    if exit_code is not None and not any(exit_code in range_ for range_ in _STATUSES):
        raise UsageError(f"--exit-code {exit_code}: no program ends so; give 0 to 255, or -N for signal N")
    diagnosis = _diagnosis(log, Evidence(exit_status=exit_code))
    remedies = remedies_for(diagnosis)
    if as_json:
        print(json.dumps(_document(diagnosis, remedies), indent=2))
    else:
        print("\n".join(_text(diagnosis, remedies)))
    return 0


def _diagnosis(log: str | None, evidence: Evidence) -> Diagnosis:
    if log is None and sys.stdin.isatty():
        raise UsageError("LOG: give a log file, or - for standard input")
    if log is None or log == "-":
        return diagnose(_of_text(chunks_of(sys.stdin.buffer), "-"), evidence)
    path = Path(log)
    try:
        with path.open("rb") as file:
            return diagnose(_of_text(chunks_of(file), log), evidence)
    except IsADirectoryError:
        raise UsageError(f"LOG {log}: is a folder; give a log file") from None
    except FileNotFoundError:
        raise UsageError(f"LOG {log}: no such file") from None
    except (OSError, ValueError) as error:
        # ValueError: a name that can be no file's.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"LOG {log!r}: cannot be read: {reason}") from None


def _of_text(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The chunks; UsageError where the first one is of no text."""
    first = next(chunks, b"")
    if why := why_no_text(first):
        raise UsageError(f"LOG {name}: {why}")
    yield first
    yield from chunks


def _document(diagnosis: Diagnosis, remedies: Sequence[Remedy]) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(diagnosis)
    document["remedies"] = [
        {
            "id": remedy.id,
            "title": remedy.title,
            "why": remedy.why,
            "keeps_math": remedy.keeps_math,
            "resumable": remedy.resumable,
            "needs_consent": remedy.needs_consent,
            "predicted_peak_bytes": remedy.predicted_peak_bytes,
            "predicted_band": remedy.predicted_band,
            "command": remedy.command,
        }
        for remedy in remedies
    ]
    return document


def _text(diagnosis: Diagnosis, remedies: Sequence[Remedy]) -> list[str]:
    name = diagnosis.kind.value + (f": {diagnosis.reason}" if diagnosis.reason else "")
    lines = [name, diagnosis.summary]
    card = _card(diagnosis)
    if card:
        lines += ["", card]
    if diagnosis.evidence:
        lines += ["", f"Evidence ({diagnosis.source.replace('_', ' ')}):", *(f"  {line}" for line in diagnosis.evidence)]
    lines += ["", f"Confidence {diagnosis.confidence:.2f}: {_certainty(diagnosis)}."]
    if remedies:
        lines += ["", "What can be done, the cheapest first:"]
        for number, remedy in enumerate(remedies, 1):
            lines.append(f"  {number}. {remedy.title}")
            for part in (remedy.why, remedy.command or ""):
                lines += [f"     {line}" for line in part.splitlines()]
    return lines


def _certainty(diagnosis: Diagnosis) -> str:
    if diagnosis.reason == "no_evidence":
        return "that nothing is told is no proof of what it was, or was not"
    words = next(words for least, words in _CONFIDENCE if diagnosis.confidence >= least)
    return f"{words}: change nothing for it alone" if diagnosis.of_memory and diagnosis.confidence < SURE else words


def _card(diagnosis: Diagnosis) -> str | None:
    """Where the card's memory was, in one line."""
    total = diagnosis.total_bytes
    if not diagnosis.kind.of_gpu or total is None or (diagnosis.allocated_bytes or 0) > total:
        return None
    parts = (
        ("tensors", diagnosis.allocated_bytes),
        ("cached", diagnosis.reserved_unallocated_bytes),
        ("context", diagnosis.context_bytes),
        ("other processes", diagnosis.other_process_bytes),
        ("free", diagnosis.free_bytes),
    )
    shown = [
        f"{name} {size(part)} ({units.percent(part / total)})" for name, part in parts if part is not None and part <= total
    ]
    return f"{size(total)}: {' | '.join(shown)}" if shown else None
