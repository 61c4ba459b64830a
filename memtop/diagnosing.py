"""`memtop diagnose`: what ended a training program, read from its log."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from memtop.supervisor import units
from memtop.supervisor.diagnosis.engine import chunks_of, diagnose, diagnose_file
from memtop.supervisor.diagnosis.sentences import size
from memtop.supervisor.diagnosis.values import Diagnosis, Evidence
from memtop.supervisor.errors import UsageError
from memtop.supervisor.recovery.offline import remedies_for
from memtop.supervisor.recovery.values import Remedy

_CONFIDENCE = (
    (0.95, "proven"),
    (0.75, "very likely"),
    (0.5, "likely"),
    (0.0, "a guess: change nothing for it alone"),
)


def command(log: str | None, exit_code: int | None, *, as_json: bool) -> int:
    """Print the diagnosis of a file, or of standard input. Whatever it is, the exit status is 0; UsageError where there is
    nothing to read."""
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
        return diagnose(chunks_of(sys.stdin.buffer), evidence)
    path = Path(log)
    try:
        return diagnose_file(path, evidence)
    except IsADirectoryError:
        raise UsageError(f"LOG {log}: is a folder; give a log file") from None
    except FileNotFoundError:
        raise UsageError(f"LOG {log}: no such file") from None
    except (OSError, ValueError) as error:
        # ValueError: a name that can be no file's.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"LOG {log!r}: cannot be read: {reason}") from None


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
    certainty = next(words for least, words in _CONFIDENCE if diagnosis.confidence >= least)
    lines += ["", f"Confidence {diagnosis.confidence:.2f}: {certainty}."]
    if remedies:
        lines += ["", "What can be done, the cheapest first:"]
        for number, remedy in enumerate(remedies, 1):
            lines.append(f"  {number}. {remedy.title}")
            if remedy.why:
                lines.append(f"     {remedy.why}")
            if remedy.command:
                lines.append(f"     {remedy.command}")
    return lines


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
