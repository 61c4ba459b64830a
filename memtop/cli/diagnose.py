"""`memtop diagnose`: what ended a training program, according to its log, and what held a GPU's
memory, according to a snapshot of torch's allocator."""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from memtop.cli.options import WHOLE, json_option
from memtop.cli.output import print_json, print_lines
from memtop.supervisor import units
from memtop.supervisor.diagnosis.diagnose import chunks_of
from memtop.supervisor.diagnosis.diagnose import diagnose as diagnosis_of
from memtop.supervisor.diagnosis.pickled import Refused
from memtop.supervisor.diagnosis.snapshot import Holder, Snapshot, is_snapshot, read_snapshot
from memtop.supervisor.diagnosis.stack_line import short_path
from memtop.supervisor.diagnosis.text import why_no_text
from memtop.supervisor.diagnosis.values import PHASES, Diagnosis, Evidence, size
from memtop.supervisor.errors import UsageError
from memtop.supervisor.language import Verbatim, tr
from memtop.supervisor.recovery.external import remedies_for_command
from memtop.supervisor.recovery.policy import SURE
from memtop.supervisor.recovery.values import Remedy

_STATUSES = (
    *(range(256), range(-64, 0), range(257, 288)),
    *(range(0xC0000000, 0xD0000000), range(0xC0000000 - (1 << 32), 0xD0000000 - (1 << 32))),
)
"""Of a program; of Python for a signal; of batch systems that report signal N as 256 + N; of
Windows for an error (NTSTATUS), without and with a sign."""


@click.command()
@click.argument("log", type=click.Path(), required=False, metavar="[LOG | SNAPSHOT | -]")
@click.option("--exit-code", type=WHOLE, metavar="N", help="the program's exit status; negative or 128 + N for signal N")
@json_option
def diagnose(log: str | None, exit_code: int | None, as_json: bool) -> int:
    """Find out from its log what ended a training program.

    LOG is the log file of any program, of any length; - is standard input. The exit status is 0
    for every diagnosis.

    From a SNAPSHOT it tells which layers held the memory of a GPU. That is a file of
    torch.cuda.memory._dump_snapshot, or the one that memtop keeps when a program runs out of GPU
    memory.
    """
    if exit_code is not None and not any(exit_code in range_ for range_ in _STATUSES):
        raise UsageError(f"--exit-code {exit_code}: no program has this exit status; give 0 to 255, or -N for signal N")
    diagnosis, snapshot = _diagnosis(log, Evidence(exit_status=exit_code))
    remedies = remedies_for_command(diagnosis)
    if as_json:
        print_json(_document(diagnosis, remedies, snapshot))
    else:
        print_lines(*_text(diagnosis, remedies, snapshot))
    return 0


def _diagnosis(log: str | None, evidence: Evidence) -> tuple[Diagnosis, Snapshot | None]:
    if log is None and sys.stdin.isatty():
        raise UsageError("LOG: give a log file, or - for standard input")
    if log is None or log == "-":
        return _of_file(sys.stdin.buffer, "-", evidence)
    path = Path(log)
    try:
        with path.open("rb") as file:
            return _of_file(file, log, evidence)
    except IsADirectoryError:
        raise UsageError(f"LOG {log}: is a folder; give a log file") from None
    except FileNotFoundError:
        raise UsageError(f"LOG {log}: no such file") from None
    except (OSError, ValueError) as error:
        # ValueError: the name contains a null byte.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"LOG {log!r}: cannot be read: {reason}") from None


def _of_file(file: BinaryIO, name: str, evidence: Evidence) -> tuple[Diagnosis, Snapshot | None]:
    chunks = chunks_of(file)
    first = next(chunks, b"")
    if not is_snapshot(first):
        return diagnosis_of(_of_text(file, name, first, chunks), evidence), None
    if evidence.exit_status is not None:
        raise UsageError("--exit-code: a snapshot was written before the program ended; leave it out, or give the log")
    try:
        snapshot, diagnosis = read_snapshot(itertools.chain((first,), chunks))
    except Refused as error:
        raise UsageError(f"SNAPSHOT {name}: {error}") from None
    return diagnosis, snapshot


def _of_text(file: BinaryIO, name: str, first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks; UsageError if the first one is not text, or comes from a device without end."""
    # A log that was emptied while its program wrote begins with zeros, too; it is no device.
    if first and not first.strip(b"\0") and _is_device(file):
        raise UsageError(f"LOG {name}: is a device that only gives zeros; give a log file")
    if why := why_no_text(first):
        raise UsageError(f"LOG {name}: {why}")
    yield first
    yield from chunks


def _is_device(file: BinaryIO) -> bool:
    try:
        return stat.S_ISCHR(os.fstat(file.fileno()).st_mode)
    except OSError:
        return False  # not a file of the system


def _document(diagnosis: Diagnosis, remedies: Sequence[Remedy], snapshot: Snapshot | None) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(diagnosis)
    document["snapshot"] = msgspec.to_builtins(snapshot)
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
            "writes": msgspec.to_builtins(remedy.writes),
        }
        for remedy in remedies
    ]
    return document


def _text(diagnosis: Diagnosis, remedies: Sequence[Remedy], snapshot: Snapshot | None = None) -> list[str]:
    name = diagnosis.kind.value + (f": {diagnosis.reason}" if diagnosis.reason else "")
    lines = [Verbatim(name), diagnosis.summary]
    memory = _memory_line(diagnosis)
    if memory:
        lines += ["", memory]
    if snapshot is not None:
        lines += ["", *_holder_lines(snapshot)]
    if diagnosis.evidence:
        lines += [
            "",
            f"Evidence ({diagnosis.source.replace('_', ' ')}):",
            *(Verbatim(f"  {line if snapshot is None else tr(line)}") for line in diagnosis.evidence),
        ]
    if diagnosis.environment:
        lines += ["", f"Environment: {', '.join(place.label for place in diagnosis.environment)}."]
    if snapshot is None or diagnosis.of_memory:
        lines += ["", f"Confidence {diagnosis.confidence:.2f}: {_certainty(diagnosis)}."]
    if remedies:
        lines += ["", "What can be done, the cheapest first:"]
        for number, remedy in enumerate(remedies, 1):
            lines.append(f"  {number}. {remedy.title}")
            lines += [f"     {line}" for line in remedy.why.splitlines()]
            lines += [Verbatim(f"     {tr(line)}") for line in remedy.instructions]
    return lines


def _holder_lines(snapshot: Snapshot) -> list[str]:
    """What holds the memory of each device, the largest first."""
    lines = []
    for memory in snapshot.devices:
        held, reserved = size(memory.allocated_bytes), size(memory.reserved_bytes)
        free, largest = size(memory.inactive_bytes), size(memory.largest_free_block_bytes)
        lines.append(
            f"GPU {memory.device_index}: {held} in tensors, {reserved} reserved; {free} free, at most {largest} in a block."
        )
        if memory.awaiting_free_bytes:
            lines.append(f"{size(memory.awaiting_free_bytes)} waits for another stream before it is free.")
        rows = [(holder.held_bytes, _holder_words(holder)) for holder in memory.holders]
        if memory.other_holders:
            rows.append((memory.other_holders_bytes, f"others ({memory.other_holders})"))
        if memory.unknown_bytes:
            rows.append((memory.unknown_bytes, "not known"))
        for part, words in rows:
            share = units.percent(part / memory.allocated_bytes) if part else ""
            lines.append(Verbatim(f"  {size(part):>10} {share:>7}  {tr(words)}"))
    if snapshot.unknown_reason:
        lines.append(snapshot.unknown_reason)
    return lines


def _holder_words(holder: Holder) -> str:
    """`model.layers.*.mlp: weights, llama/modeling_llama.py:176 forward`."""
    named = holder.module or ""
    if holder.what is not None:
        named = f"{named}: {tr(holder.what)}" if named else tr(holder.what)
    line = "" if holder.source is None else f"{short_path(holder.source)}:{holder.line}"
    words = ", ".join(filter(None, (named, f"{line} {holder.function or ''}".strip())))
    phase = PHASES.get(holder.phase)
    return Verbatim(f"{words} ({tr(phase)})" if phase else words)


def _certainty(diagnosis: Diagnosis) -> str:
    if diagnosis.reason == "no_evidence":
        return "the log does not show the cause"
    alone = ": do not change the settings for this alone" if diagnosis.of_memory and diagnosis.confidence < SURE else ""
    return f"{diagnosis.certainty}{alone}"


def _memory_line(diagnosis: Diagnosis) -> str | None:
    """How the GPU's memory was used, in one line."""
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
        f"{tr(name)} {size(part)} ({units.percent(part / total)})" for name, part in parts if part is not None and part <= total
    ]
    return f"{size(total)}: {' | '.join(shown)}" if shown else None
