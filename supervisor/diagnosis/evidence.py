"""Stronger evidence than a log's words: the ranks' own records, torchrun's error files, and the
kernel's counters and log."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec

from memtop.supervisor.diagnosis import allocator
from memtop.supervisor.diagnosis.finding import NO_FIGURES, UNCERTAIN, Figures, Finding, Weight
from memtop.supervisor.diagnosis.log import read
from memtop.supervisor.diagnosis.text import LogText, Piece
from memtop.supervisor.diagnosis.values import Evidence, Kind, OomRecord

_LONGEST = 64 << 10
NO_GPU_REPORTED = "The process has reported no GPU: only the words of its error name one."


def from_records(evidence: Evidence) -> Finding | None:
    """The first failed allocation that a rank did not survive, or else the first whose outcome is
    unknown."""
    fatal = [record for record in evidence.records if not record.survived]
    if not fatal:
        return None
    first = min(fatal, key=lambda record: (record.survived is None, record.time))
    found = _of_record(first)
    # Without a GPU of the rank, only the words of an error that anything may raise speak of one.
    words_only = found.kind.of_gpu and first.device_uuid is None and not first.error.endswith("OutOfMemoryError")
    if words_only:
        found = replace(found, source="words", caveat=NO_GPU_REPORTED)
    return replace(found, confidence=0.99 if first.survived is False and not words_only else 0.8)


def _of_record(record: OomRecord) -> Finding:
    cause = read(_page(f"{record.error}: {record.message}")).cause
    kind, figures, phase = _kind_of_class(record.error), NO_FIGURES, "unknown"
    if cause is not None and cause.kind is not Kind.NOT_MEMORY and cause.confidence > UNCERTAIN:
        kind, figures, phase = cause.kind, cause.figures, cause.phase or "unknown"
    if kind.of_gpu:
        kind, figures = _measured(kind, figures, record)
    first = next(iter(record.message.strip().splitlines()), "")[:500]
    line = f"rank {record.rank}: {record.error}: {first}"
    return Finding(
        kind,
        source="record",
        phase=record.phase if record.phase != "unknown" else phase,
        figures=figures,
        evidence=(line,),
        detail=line,
        rank=record.rank,
        device_uuid=record.device_uuid if kind.of_gpu else None,
        batch=record.batch,
    )


def _kind_of_class(error: str) -> Kind:
    of_host = ("MemoryError", "ArrayMemoryError", "ArrowMemoryError", "OSError")
    return Kind.HOST_OOM_ALLOC if error.rpartition(".")[2].lstrip("_") in of_host else Kind.GPU_OOM


def _measured(kind: Kind, figures: Figures, record: OomRecord) -> tuple[Kind, Figures]:
    """The figures that the message does not print, as the record measured them."""
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
    if figures.total is not None and figures.free is not None and record.reserved_bytes is not None:
        outside = max(0, figures.total - figures.free - record.reserved_bytes)
    found = allocator.kind_of(figures.requested, figures.total, spare, outside)
    # A smaller part than that can be the process's own context.
    return found, replace(figures, other=outside if found is Kind.GPU_OOM_OTHER_PROCESS else None)


def from_error_files(evidence: Evidence) -> Finding | None:
    """The earliest of torchrun's error files that names a cause, and not only the effect of another
    rank's death."""
    found = []
    for text in evidence.error_files:
        time, words = _of_error_file(text)
        cause = read(_page(words)).cause
        if cause is not None and cause.weight >= Weight.ERROR:
            found.append((time, -cause.weight, words, cause))
    if not found:
        return None
    _, _, words, cause = min(found, key=lambda entry: entry[:2])
    last = next((line for line in reversed(words.splitlines()) if line.strip()), "")
    line = f"error file: {last.strip()[:500]}"
    return replace(cause, source="error_file", evidence=(line,), detail=line)


def _of_error_file(text: str) -> tuple[float, str]:
    """The time (seconds) and the text: the traceback, then the message."""
    try:
        document: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
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
    # The stack can end with the message already.
    return time, (stack if str(message) and str(message) in stack else f"{stack}\n{message}")[-_LONGEST:]


def from_kernel(evidence: Evidence, *, by_sigkill: bool, otherwise: bool) -> Finding | None:
    """A kill for lack of memory that can have caused this end, or None.

    A kill shortly before the end counts if it is proven to be the run's (by a pid, or in a memory
    group that only the run uses), or if nothing contradicts it. `otherwise`: the end has another
    cause of its own. If the time of the kill is unknown, it counts if nothing contradicts it, and
    is proven if the program itself ended `by_sigkill`.
    """
    records, counted = _kernel_records(evidence), bool(evidence.cgroup_oom_kills)
    near = evidence.cgroup_killed_near_end
    ours = bool(records) or (counted and near is True and evidence.killed_in_own_group)
    if not ours and (not counted or near is False or otherwise):
        return None
    lines = tuple(line for line in (kills_line(evidence), *(line for line, _ in records[:4])) if line is not None)
    return Finding(
        Kind.HOST_OOM_KILLED,
        source="kernel",
        confidence=0.98 if ours or near or by_sigkill else 0.8,
        phase=next((phase for _, phase in records), "unknown"),
        evidence=lines,
        detail=lines[0] if lines else None,
    )


def kills_line(evidence: Evidence) -> str | None:
    """The kill counter of the program's memory group, as a sentence."""
    kills = evidence.cgroup_oom_kills
    if not kills:
        return None
    count = "1 process" if kills == 1 else f"{kills} processes"
    near = evidence.cgroup_killed_near_end
    when = "" if near is None else ", shortly before the end" if near else ", none of them shortly before the end"
    return f"the kernel killed {count} of the program's memory group for lack of memory{when}"


def _kernel_records(evidence: Evidence) -> list[tuple[str, str]]:
    """The kernel's lines about the run's processes, each with the phase that the victim's name
    shows."""
    if not evidence.kernel_lines or not evidence.member_pids:
        return []
    reading = read(_page("\n".join(evidence.kernel_lines)), evidence.member_pids)
    return [
        (reading.page.lines[finding.line].shown[:500], finding.phase or "unknown")
        for finding in reading.findings
        if finding.kind is Kind.HOST_OOM_KILLED and finding.confidence >= 0.95
    ]


def _page(text: str) -> LogText:
    return LogText([Piece(0, text[:_LONGEST].encode("utf-8", "replace"))])
