"""What is better evidence than a log's words: records of the ranks themselves, torchrun's error files, the kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from memtop.supervisor.diagnosis import allocator
from memtop.supervisor.diagnosis.excerpt import Piece
from memtop.supervisor.diagnosis.finding import NO_FIGURES, Figures, Weight
from memtop.supervisor.diagnosis.page import Page
from memtop.supervisor.diagnosis.reading import read
from memtop.supervisor.diagnosis.values import Evidence, Kind, OomRecord

_LONGEST = 64 << 10


@dataclass(frozen=True)
class Witness:
    source: str
    kind: Kind
    confidence: float
    lines: tuple[str, ...]
    reason: str | None = None
    phase: str = "unknown"
    rank: int | None = None
    figures: Figures = NO_FIGURES
    device_uuid: str | None = None
    batch: int | None = None


def from_records(evidence: Evidence) -> Witness | None:
    """The first failed allocation that a rank did not survive, else the first of which nobody knows whether it did."""
    fatal = [record for record in evidence.records if not record.survived]
    if not fatal:
        return None
    first = min(fatal, key=lambda record: (record.survived is None, record.time))
    return replace(_of_record(first), confidence=0.99 if first.survived is False else 0.8)


def _of_record(record: OomRecord) -> Witness:
    cause = read(_page(f"{record.error}: {record.message}")).cause
    kind, figures, phase = _kind_of_class(record.error), NO_FIGURES, "unknown"
    if cause is not None and cause.kind is not Kind.NOT_MEMORY:
        kind, figures, phase = cause.kind, cause.figures, cause.phase or "unknown"
    if kind.of_gpu:
        kind, figures = _measured(kind, figures, record)
    first = record.message.strip().splitlines()[:1]
    return Witness(
        source="record",
        kind=kind,
        confidence=0.99,
        lines=(f"rank {record.rank}: {record.error}: {first[0][:500] if first else ''}",),
        phase=record.phase if record.phase != "unknown" else phase,
        rank=record.rank,
        figures=figures,
        device_uuid=record.device_uuid if kind.of_gpu else None,
        batch=record.batch,
    )


def _kind_of_class(error: str) -> Kind:
    return (
        Kind.HOST_OOM_ALLOC
        if error.rpartition(".")[2].lstrip("_") in ("MemoryError", "ArrayMemoryError", "ArrowMemoryError", "OSError")
        else Kind.GPU_OOM
    )


def _measured(kind: Kind, figures: Figures, record: OomRecord) -> tuple[Kind, Figures]:
    """What the message does not print, the record measured."""
    spare = None
    if record.reserved_bytes is not None and record.allocated_bytes is not None:
        spare = max(0, record.reserved_bytes - record.allocated_bytes)
    prints_all = figures.total is not None
    figures = replace(
        figures,
        total=figures.total if figures.total is not None else record.total_bytes,
        free=figures.free if figures.free is not None else record.free_bytes,
        allocated=figures.allocated if figures.allocated is not None else record.allocated_bytes,
        reserved_unallocated=figures.reserved_unallocated if figures.reserved_unallocated is not None else spare,
    )
    if prints_all:
        return kind, figures
    outside = None
    if None not in (figures.total, figures.free, record.reserved_bytes):
        outside = max(0, figures.total - figures.free - record.reserved_bytes)  # type: ignore[operator]
    found = allocator.kind_of(figures.requested, figures.total, spare, outside)
    # Less than that may be the process's own context.
    return found, replace(figures, other=outside if found is Kind.GPU_OOM_OTHER_PROCESS else None)


def from_error_files(evidence: Evidence) -> Witness | None:
    """The earliest of torchrun's error files that tells a cause and not only what another rank's death did."""
    told = []
    for text in evidence.error_files:
        time, words = _of_error_file(text)
        cause = read(_page(words)).cause
        if cause is not None and cause.weight >= Weight.ERROR:
            told.append((time, -cause.weight, words, cause))
    if not told:
        return None
    _, _, words, cause = min(told, key=lambda entry: entry[:2])
    first = next((line for line in reversed(words.splitlines()) if line.strip()), "")
    return Witness(
        source="error_file",
        kind=cause.kind,
        reason=cause.reason,
        confidence=cause.confidence,
        lines=(f"error file: {first.strip()[:500]}",),
        phase=cause.phase or "unknown",
        figures=cause.figures,
    )


def _of_error_file(text: str) -> tuple[float, str]:
    """The time and the words: the traceback, then the message."""
    try:
        document: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return float("inf"), text[:_LONGEST]
    message = document.get("message", "") if isinstance(document, dict) else document
    stack, time = "", float("inf")
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        if isinstance(extra, dict):
            stack = str(extra.get("py_callstack", ""))
            seconds = str(extra.get("timestamp", ""))
            time = float(seconds) if re.fullmatch(r"\d{1,15}(\.\d{1,9})?", seconds) else time
        message = message.get("message", "")
    # The stack ends with the message, too.
    return time, (stack if str(message) and str(message) in stack else f"{stack}\n{message}")[-_LONGEST:]


def from_kernel(evidence: Evidence, *, by_sigkill: bool, otherwise: bool) -> Witness | None:
    """A kill for lack of memory that this end can have come of.

    One shortly before the end is believed where it is proven to be of the run (by a pid, or in a group that nobody shares), and
    where nothing speaks against it (`otherwise`: the end tells of a cause of its own). When it was may be unknown; then it is
    believed where nothing speaks against it, and proven where the program itself was ended `by_sigkill`.
    """
    records, counted = _kernel_records(evidence), bool(evidence.cgroup_oom_kills)
    near = evidence.cgroup_killed_near_end
    ours = bool(records) or (counted and near is True and evidence.in_own_group)
    if not ours and (not counted or near is False or otherwise):
        return None
    lines = (kills_line(evidence), *(line for line, _ in records[:4]))
    phase = next((phase for _, phase in records), "unknown")
    confidence = 0.98 if ours or near or by_sigkill else 0.8
    told = tuple(line for line in lines if line is not None)
    return Witness(source="kernel", kind=Kind.HOST_OOM_KILLED, confidence=confidence, lines=told, phase=phase)


def kills_line(evidence: Evidence) -> str | None:
    """What the counter of the program's group says, in words."""
    kills = evidence.cgroup_oom_kills
    if not kills:
        return None
    count = "1 process" if kills == 1 else f"{kills} processes"
    near = evidence.cgroup_killed_near_end
    when = "" if near is None else ", shortly before the end" if near else ", none of them shortly before the end"
    return f"the kernel killed {count} of the program's memory group for lack of memory{when}"


def _kernel_records(evidence: Evidence) -> list[tuple[str, str]]:
    """The kernel's lines about processes of the run, each with the phase that the victim's name tells."""
    if not evidence.kernel_lines or not evidence.member_pids:
        return []
    reading = read(_page("\n".join(evidence.kernel_lines)), evidence.member_pids)
    return [
        (reading.page.lines[finding.line].shown[:500], finding.phase or "unknown")
        for finding in reading.findings
        if finding.kind is Kind.HOST_OOM_KILLED and finding.confidence >= 0.95
    ]


def _page(text: str) -> Page:
    return Page([Piece(0, text[:_LONGEST].encode("utf-8", "replace"))])
