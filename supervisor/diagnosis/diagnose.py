"""From a log and other evidence to what ended the program.

The evidence, the strongest first: a rank's own record, torchrun's error file, the kernel's counters
and records of a kill at this end, the supervisor's samples, the log, the exit status.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import BinaryIO

import msgspec

from memtop.supervisor import units
from memtop.supervisor.diagnosis.aftermath import StepLines, seems_survived
from memtop.supervisor.diagnosis.allocator import logits_of, without_the_run
from memtop.supervisor.diagnosis.environment import Place, of_log
from memtop.supervisor.diagnosis.evidence import NO_GPU_REPORTED, from_error_files, from_kernel, from_records, kills_line
from memtop.supervisor.diagnosis.finding import SUSPECTED, UNCERTAIN, Finding, Weight
from memtop.supervisor.diagnosis.log import Reading, read
from memtop.supervisor.diagnosis.text import BLOCK, LogText, excerpt
from memtop.supervisor.diagnosis.values import Diagnosis, Evidence, Kind, summary
from memtop.supervisor.holes import without_holes
from memtop.supervisor.killed import signal_status

_MOST_LINES, _LONGEST = 8, 600
_FAR, _NEAR = 0.85, 0.95
"""Shares of host memory that were in use before a kill: below _FAR it was hardly the kernel, from
_NEAR on it probably was."""
_SPARSE = 64 << 20
"""Free bytes below which /dev/shm or a disk counts as full."""
_WHOSE_KILL = (
    "The signal was SIGKILL. A kill by hand, by a scheduler, and by the kernel for lack of memory look the same, and "
    "nothing here shows which it was; the kernel's log may (dmesg -T | grep -i oom)."
)
_NO_GPU_SEEN = "memtop has seen no GPU here: only the words of the program name one."
_A_GUESS = "This is a guess: no known message says it."
_FROM_OUTSIDE = frozenset({"keyboard_interrupt", "preempted", "time_limit", "node_failure"})
_AFTER_A_KILL = frozenset({"nccl_timeout", "nccl_error", "worker_died"})
_CLEAR = 0.8
_MOST_OF_WORDS = 0.94
"""The most that the words of a log give: they can be quoted, or be about another program."""
_WITHOUT_MEMORY = frozenset({0xC0000017, 0xC000012D})
"""Status codes of Windows: no memory, and no memory that can be promised (commit limit)."""
_BY_SIGNAL = {2: "keyboard_interrupt", 15: "sigterm", 11: "segfault", 6: "aborted", 7: "bus_error"}


def diagnose(chunks: Iterable[bytes], evidence: Evidence | None = None) -> Diagnosis:
    """What ended the program whose output these bytes are, in chunks of any size, in bounded
    memory.

    Raises nothing because of the log's content; errors of the chunks' source pass through.
    """
    evidence = evidence or Evidence()
    failed = evidence.exit_status not in (None, 0)
    reading = read(LogText(excerpt(chunks)), evidence.member_pids, failed=failed)
    return _finished(_judged(reading, evidence), reading, evidence)


def diagnose_file(file: BinaryIO, evidence: Evidence | None = None) -> Diagnosis:
    """The same for an open regular file. Raises OSError if it cannot be read."""
    # memtop removes the middle of a very long log.
    return diagnose(without_holes(file.fileno(), BLOCK), evidence)


def chunks_of(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(BLOCK):
        yield chunk


def _judged(reading: Reading, evidence: Evidence) -> Finding:
    """The finding of the strongest evidence."""
    status = signal_status(evidence.exit_status)
    if evidence.asked_to_stop:
        return Finding(Kind.NOT_MEMORY, "asked_to_stop", 0.99, source="record")
    if status == 0:
        return _ended_well(reading)
    record = from_records(evidence)
    if record is not None:
        return _with_log(record, reading)
    cause = reading.cause
    if cause is not None and _signal_explains_more(status, cause):
        cause = _reported_kill(reading) if status == -9 else None
    file = from_error_files(evidence)
    kernel = from_kernel(evidence, by_sigkill=status == -9, otherwise=_has_other_cause(status, file, cause))
    if file is not None and (kernel is None or file.kind is not Kind.HOST_OOM_KILLED):
        return _confirmed(_with_samples(_with_log(file, reading), evidence))
    if kernel is not None:
        return _with_log(kernel, reading)
    return _not_by_status_alone(_with_samples(_of_log(reading, cause, status), evidence))


def _of_log(reading: Reading, cause: Finding | None, status: int | None) -> Finding:
    """What the log says, or else the exit status."""
    if cause is not None:
        found = _quoted(reading, cause)
        return _perhaps_survived(found, reading, cause) if status is None else found
    if status is not None and status & 0xFFFFFFFF in _WITHOUT_MEMORY:
        return Finding(Kind.HOST_OOM_ALLOC, None, _CLEAR, source="exit_status")
    if status is not None and -128 < status < 0:
        return _of_signal(-status)
    if reading.survived:
        finding, how = reading.survived[-1]
        if finding.kind is Kind.NOT_MEMORY:
            return Finding(Kind.NOT_MEMORY, "no_evidence", 0.3)
        lines, rank = _lines(reading, finding), _rank(reading, finding)
        return Finding(Kind.NOT_MEMORY, how, 0.85 if status is None else 0.5, evidence=lines, rank=rank)
    return Finding(Kind.NOT_MEMORY, "no_evidence", 0.3, source="words" if status is None else "exit_status")


def _perhaps_survived(found: Finding, reading: Reading, cause: Finding) -> Finding:
    """Without an exit status it is uncertain that a failure ended the program, if the log later
    reports completion."""
    if found.kind in (Kind.NOT_MEMORY, Kind.HOST_OOM_KILLED):
        return found
    later = seems_survived(reading.page, cause)
    if later is None:
        return found
    return replace(
        found,
        confidence=min(found.confidence, UNCERTAIN),
        caveat=f'This is the cause if the program ended there, but the log goes on to "{later[:80]}". '
        "Its exit status would decide: --exit-code.",
    )


def _reported_kill(reading: Reading) -> Finding | None:
    """What the log says about the kill itself, where another failure in it seemed to be the
    cause."""
    survived = [finding for finding, _ in reading.survived]
    kills = (each for each in reading.findings if each.kind is Kind.HOST_OOM_KILLED and each not in survived)
    found = next(kills, None)
    return None if found is None else replace(found, confidence=min(found.confidence, SUSPECTED))


def _has_other_cause(status: int | None, file: Finding | None, cause: Finding | None) -> bool:
    """Whether the end has a cause other than a kill for memory, or the effects of one on the other
    processes."""
    if status is not None and status < 0:
        return status != -9
    if file is not None:
        return file.kind is not Kind.HOST_OOM_KILLED
    if cause is None or cause.kind is Kind.HOST_OOM_KILLED or cause.reason in _AFTER_A_KILL:
        return False
    return cause.weight >= Weight.BROKEN


def _confirmed(found: Finding) -> Finding:
    """An error file proves that the program ended with its message; what the message means stays as
    certain as it was."""
    if found.source == "error_file" and found.confidence >= _CLEAR:
        return replace(found, confidence=max(found.confidence, 0.95))
    return found


def _finished(found: Finding, reading: Reading, evidence: Evidence) -> Diagnosis:
    """The finding as a diagnosis, with what the evidence adds and its summary."""
    kind, figures = found.kind, found.figures
    if kind.of_gpu:
        kind, figures = without_the_run(kind, figures, found.device_uuid, evidence)
    lines = found.evidence
    if evidence.exit_status not in (None, 0):
        lines = (*lines, f"exit status {evidence.exit_status}")
    diagnosis = Diagnosis(
        kind=kind,
        reason=found.reason,
        confidence=min(found.confidence, _MOST_OF_WORDS) if found.source == "words" else found.confidence,
        summary="",
        phase=found.phase or "unknown",
        rank=found.rank,
        source=found.source,
        evidence=lines,
        environment=_environment(found, reading),
    )
    if kind is not Kind.NOT_MEMORY:
        # The settings can have changed since; a rank reports the batch that it was working on.
        at_hand = msgspec.structs.replace(evidence, batch=found.batch) if found.batch is not None else evidence
        logits = logits_of(figures.requested, at_hand) if kind.of_gpu else None
        diagnosis = msgspec.structs.replace(
            diagnosis,
            device_index=figures.device_index,
            device_uuid=found.device_uuid,
            requested_bytes=figures.requested,
            requested_for=None if logits is None else str(logits),
            requested_logits=logits,
            total_bytes=figures.total,
            free_bytes=figures.free,
            process_bytes=figures.process,
            allocated_bytes=figures.allocated,
            reserved_unallocated_bytes=figures.reserved_unallocated,
            allowed_bytes=figures.allowed,
            address_space_bytes=_address_space(found, evidence),
            context_bytes=figures.context,
            other_process_bytes=figures.other,
            other_process_pids=figures.other_pids,
        )
    without_gpu = diagnosis.by_words and kind.of_gpu and (evidence.has_gpu is False or found.caveat == NO_GPU_REPORTED)
    caveat = found.caveat or (_NO_GPU_SEEN if without_gpu else _doubt(diagnosis))
    words = summary(diagnosis, found.detail, caveat, without_gpu=without_gpu and found.reason is None)
    return msgspec.structs.replace(diagnosis, summary=words)


def _environment(found: Finding, reading: Reading) -> tuple[Place, ...]:
    cause = reading.cause
    line = cause.line if cause is not None and cause.kind is found.kind else None
    return of_log(reading.page, line, found.evidence, of_torch=found.source == "record" and found.kind.of_gpu)


def _doubt(diagnosis: Diagnosis) -> str | None:
    """What to add where words alone make a lack of memory likely. A kill has a sentence of its
    own."""
    doubtful = diagnosis.of_memory and diagnosis.confidence <= UNCERTAIN and diagnosis.kind is not Kind.HOST_OOM_KILLED
    return _A_GUESS if doubtful and diagnosis.source == "words" else None


def _address_space(found: Finding, evidence: Evidence) -> int | None:
    """The address-space limit, if it refused the allocation: the kernel refuses hardly any while
    there is memory. A heap that the program limits itself is another matter."""
    full = evidence.host_peak_fraction is not None and evidence.host_peak_fraction >= _NEAR
    refused = found.kind is Kind.HOST_OOM_ALLOC and found.reason is None
    return evidence.address_space_bytes if refused and not full else None


def _quoted(reading: Reading, finding: Finding) -> Finding:
    """The log's finding with its lines, its rank and what the program printed."""
    return replace(
        finding,
        evidence=_lines(reading, finding),
        rank=_rank(reading, finding),
        detail=reading.page.lines[finding.line].text[:200],
    )


def _with_log(found: Finding, reading: Reading) -> Finding:
    """The finding with what the log adds to it: the phase, the rank and the log's own lines."""
    cause = reading.cause
    if cause is None or cause.kind is not found.kind:
        return found
    more = tuple(line for line in _lines(reading, cause) if line not in found.evidence)
    return replace(
        found,
        evidence=found.evidence + more,
        phase=cause.phase if found.phase in (None, "unknown") else found.phase,
        rank=_rank(reading, cause) if found.rank is None else found.rank,
    )


def _ended_well(reading: Reading) -> Finding:
    of_memory = [(finding, how) for finding, how in reading.survived if finding.kind is not Kind.NOT_MEMORY]
    cause, confidence = reading.cause, 0.95
    killed = next((each for each in reading.findings if _is_state_of_job(each, reading)), None)
    if killed is not None:
        # The status is that of the main program, and the kill was of another one of the job.
        return replace(_quoted(reading, killed), confidence=UNCERTAIN)
    if of_memory:
        cause, reason = of_memory[-1]
    elif cause is not None and cause.kind is not Kind.NOT_MEMORY and cause.weight >= Weight.ERROR:
        reason, confidence = ("teardown_noise" if cause.kind is Kind.HOST_OOM_KILLED else "oom_handled"), 0.7
    elif cause is not None and cause.reason in ("allocator_warning", "oom_kill_of_other_process"):
        reason, confidence = cause.reason, 0.9
    else:
        cause, reason = None, "finished"
    lines = () if cause is None else _lines(reading, cause)
    return Finding(Kind.NOT_MEMORY, reason, confidence, source="exit_status", evidence=lines)


# What the platform calls the end of a job: "State: OUT_OF_MEMORY", "Reason: OOMKilled".
_STATE = re.compile(r"(?i)\W*(?:state|reason)\W{1,20}(?:OUT_OF_ME|OOMKilled)")
_EARLIER = re.compile(r"(?i)\b(?:last|previous) state")


def _is_state_of_job(finding: Finding, reading: Reading) -> bool:
    lines = reading.page.lines
    stated = finding.kind is Kind.HOST_OOM_KILLED and _STATE.match(lines[finding.line].text)
    if not stated or StepLines(reading.page).completed:
        return False
    return not any(_EARLIER.search(line.text) for line in lines[max(0, finding.line - 2) : finding.line + 1])


def _of_signal(number: int) -> Finding:
    if number == 9:
        # A suspicion, until the samples have been considered.
        return Finding(Kind.HOST_OOM_KILLED, None, SUSPECTED, source="exit_status")
    if number in _BY_SIGNAL:
        return Finding(Kind.NOT_MEMORY, _BY_SIGNAL[number], 0.85, source="exit_status")
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    caveat = f"The signal was {name}."
    return Finding(Kind.NOT_MEMORY, "killed_by_something", 0.6, source="exit_status", caveat=caveat)


def _not_by_status_alone(found: Finding) -> Finding:
    """SIGKILL in the exit status alone shows no lack of memory. If a shell or a launcher prints
    "Killed" it stays a suspicion, since most such logs are of programs that ran out of memory."""
    if found.kind is not Kind.HOST_OOM_KILLED or found.source != "exit_status":
        return found
    return Finding(
        Kind.NOT_MEMORY, "killed_by_something", 0.6, source="exit_status", evidence=found.evidence, caveat=_WHOSE_KILL
    )


def _with_samples(found: Finding, evidence: Evidence) -> Finding:
    """The finding, made stronger or withdrawn by what the supervisor measured."""
    if found.kind is Kind.HOST_OOM_KILLED and found.confidence < 0.9:
        return _kill_with_samples(found, evidence)
    if found.reason == "bus_error" and evidence.shm_free_bytes is not None and evidence.shm_free_bytes < _SPARSE:
        line = f"{units.size(evidence.shm_free_bytes)} were free in /dev/shm"
        return Finding(Kind.SHM_EXHAUSTED, None, 0.8, phase="data", evidence=(line, *found.evidence), source="samples")
    if found.kind is Kind.DISK_FULL and found.confidence < 0.9 and evidence.disk_free_bytes is not None:
        confidence = 0.95 if evidence.disk_free_bytes < _SPARSE else SUSPECTED
        line = f"{units.size(evidence.disk_free_bytes)} were free on the disk"
        return replace(found, confidence=confidence, evidence=(*found.evidence, line))
    if evidence.cgroup_killed_near_end:
        # Not the cause of this end, in a group that other programs share, but a person can know
        # better.
        return replace(found, evidence=(*found.evidence, *filter(None, [kills_line(evidence)])))
    return found


def _kill_with_samples(found: Finding, evidence: Evidence) -> Finding:
    kills, share = evidence.cgroup_oom_kills, evidence.host_peak_fraction
    seen = () if share is None else (f"at most {units.percent(share)} of the host's memory was seen in use",)
    if kills == 0 or evidence.cgroup_killed_near_end is False:
        line = kills_line(evidence) or "the kernel counted no kill for lack of memory in the program's group"
        return _not_for_memory(found, 0.75, (line, *seen))
    if share is not None and share < _FAR:
        return _not_for_memory(found, 0.6, seen)
    if share is not None and share >= _NEAR:
        line = f"{units.percent(share)} of the host's memory was seen in use shortly before"
        confidence = max(0.75, found.confidence)
        return replace(found, confidence=confidence, source="samples", evidence=(*found.evidence, line))
    return found


def _not_for_memory(found: Finding, confidence: float, lines: tuple[str, ...]) -> Finding:
    return Finding(
        Kind.NOT_MEMORY,
        "killed_by_something",
        confidence,
        evidence=lines + found.evidence,
        rank=found.rank,
        source="samples",
        caveat="The signal was SIGKILL, and nothing here points to a lack of memory.",
    )


def _signal_explains_more(status: int | None, cause: Finding) -> bool:
    """Whether a signal ended the program rather than the exception: it had caught that before."""
    if status not in (-9, -15, -2, -11, -7) or cause.reason in _FROM_OUTSIDE:
        return False
    return cause.weight in (Weight.LIKELY, Weight.ERROR, Weight.HINT)


def _lines(reading: Reading, finding: Finding) -> tuple[str, ...]:
    """The log's lines that prove the finding."""
    lines = reading.page.lines[finding.line : finding.last_line + 1]
    own = [line for line in lines if line.rank == reading.page.lines[finding.line].rank and not line.bar]
    return tuple(line.shown.strip()[:_LONGEST] for line in (own or lines)[:_MOST_LINES])


def _rank(reading: Reading, finding: Finding) -> int | None:
    own = reading.page.lines[finding.line].rank
    if own is not None or finding.weight is not Weight.KILLED:
        return own
    # torchrun's report names the rank on a line of its own.
    for line in reading.page.lines[max(0, finding.line - 6) : finding.line + 6]:
        name, _, value = line.text.partition(":")
        if name.strip() == "rank" and value.split()[:1] and value.split()[0].isdecimal():
            return int(value.split()[0])
    return None
