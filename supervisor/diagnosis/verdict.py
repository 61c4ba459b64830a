"""From what is known to one diagnosis. Evidence outranks words: a rank's own record, torchrun's error file, the counters and
records of the kernel for this end, our samples, then the log, then the exit status."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from memtop.supervisor import units
from memtop.supervisor.diagnosis.aftermath import seems_survived
from memtop.supervisor.diagnosis.ending_words import SUSPECTED
from memtop.supervisor.diagnosis.finding import NO_FIGURES, Figures, Finding, Weight
from memtop.supervisor.diagnosis.logits import requested_for
from memtop.supervisor.diagnosis.reading import Reading
from memtop.supervisor.diagnosis.sentences import summary
from memtop.supervisor.diagnosis.sharing import without_the_run
from memtop.supervisor.diagnosis.testimony import Witness, from_error_files, from_kernel, from_records, kills_line
from memtop.supervisor.diagnosis.values import Diagnosis, Evidence, Kind

_MOST_LINES, _LONGEST = 8, 600
_FAR, _NEAR = 0.85, 0.95
"""Shares of host memory in use that our samples saw before a kill: it can hardly have been the kernel, or it probably was."""
_SPARSE = 64 << 20
_WHOSE_KILL = (
    "It was SIGKILL, which looks the same by hand, from a scheduler, and from the kernel for lack of memory: nothing here "
    "says which, the kernel's log may (dmesg -T | grep -i oom)."
)
_FROM_OUTSIDE = frozenset({"keyboard_interrupt", "preempted", "time_limit", "node_failure"})
_AFTER_A_KILL = frozenset({"nccl_timeout", "nccl_error", "worker_died"})
_CLEAR = 0.8
_PERHAPS = 0.45
"""Too little to do anything by itself."""
_BY_SIGNAL = {2: "keyboard_interrupt", 15: "sigterm", 11: "segfault", 6: "aborted", 7: "bus_error"}


def judge(reading: Reading, evidence: Evidence) -> Diagnosis:
    status = _signal_status(evidence.exit_status)
    if evidence.asked_to_stop:
        return _finish(_Draft(Kind.NOT_MEMORY, "asked_to_stop", 0.99, source="record"), evidence)
    if status == 0:
        return _finish(_ended_well(reading), evidence)
    record = from_records(evidence)
    if record is not None:
        return _finish(_of_witness(record, reading), evidence)
    cause = reading.cause
    if cause is not None and _signal_explains_more(status, cause):
        cause = _words_of_kill(reading) if status == -9 else None
    file = from_error_files(evidence)
    kernel = from_kernel(evidence, by_sigkill=status == -9, otherwise=_tells_otherwise(status, file, cause))
    if file is not None and (kernel is None or file.kind is not Kind.HOST_OOM_KILLED):
        return _finish(_confirmed(_with_samples(_of_witness(file, reading), evidence)), evidence)
    if kernel is not None:
        return _finish(_of_witness(kernel, reading), evidence)
    return _finish(_not_of_a_status_alone(_with_samples(_of_words(reading, cause, status), evidence)), evidence)


def _of_words(reading: Reading, cause: Finding | None, status: int | None) -> _Draft:
    """What the log says, else what the exit status does."""
    if cause is not None:
        draft = _of_finding(reading, cause)
        return _perhaps_survived(draft, reading, cause) if status is None else draft
    if status is not None and status < 0:
        return _of_signal(-status)
    if reading.survived:
        finding, how = reading.survived[-1]
        if finding.kind is Kind.NOT_MEMORY:
            return _Draft(Kind.NOT_MEMORY, "no_evidence", 0.3)
        confidence = 0.85 if status is None else 0.5
        return _Draft(Kind.NOT_MEMORY, how, confidence, lines=_told(reading, finding), rank=_rank(reading, finding))
    return _Draft(Kind.NOT_MEMORY, "no_evidence", 0.3, source="words" if status is None else "exit_status")


def _perhaps_survived(draft: _Draft, reading: Reading, cause: Finding) -> _Draft:
    """Without an exit status nobody knows that the program ended of it, where it says later that it came to its end."""
    if draft.kind in (Kind.NOT_MEMORY, Kind.HOST_OOM_KILLED):
        return draft
    later = seems_survived(reading.page, cause)
    if later is not None:
        draft.confidence = min(draft.confidence, _PERHAPS)
        draft.caveat = (
            f'That was why, if it ended there; but the log goes on to "{later[:80]}". Its exit status would tell: --exit-code.'
        )
    return draft


def _words_of_kill(reading: Reading) -> Finding | None:
    """What the log says of the kill itself, where another failure in it was thought to be the cause."""
    survived = [finding for finding, _ in reading.survived]
    kills = (each for each in reading.findings if each.kind is Kind.HOST_OOM_KILLED and each not in survived)
    found = next(kills, None)
    return None if found is None else dataclasses.replace(found, confidence=min(found.confidence, SUSPECTED))


def _tells_otherwise(status: int | None, file: Witness | None, cause: Finding | None) -> bool:
    """Whether the end looks like anything but a kill for memory, or what the others say when one of them was killed."""
    if status is not None and status < 0:
        return status != -9
    if file is not None:
        return file.kind is not Kind.HOST_OOM_KILLED
    if cause is None or cause.kind is Kind.HOST_OOM_KILLED or cause.reason in _AFTER_A_KILL:
        return False
    return cause.weight >= Weight.BROKEN


def _confirmed(draft: _Draft) -> _Draft:
    """An error file proves that the program ended of what it says; what that means is as sure as its words are."""
    if draft.source == "error_file" and draft.confidence >= _CLEAR:
        draft.confidence = max(draft.confidence, 0.95)
    return draft


@dataclass
class _Draft:
    kind: Kind
    reason: str | None
    confidence: float
    phase: str = "unknown"
    figures: Figures = NO_FIGURES
    lines: tuple[str, ...] = ()
    rank: int | None = None
    source: str = "words"
    device_uuid: str | None = None
    detail: str | None = None
    batch: int | None = None
    caveat: str | None = None


def _finish(draft: _Draft, evidence: Evidence) -> Diagnosis:
    about: dict[str, Any] = {}
    if draft.kind.of_gpu:
        draft.kind, draft.figures = without_the_run(draft.kind, draft.figures, draft.device_uuid, evidence)
    if draft.batch is not None:
        # The settings may have changed since; a rank says what it was doing.
        evidence = replace(evidence, batch=draft.batch)
    if draft.kind is not Kind.NOT_MEMORY:
        figures = draft.figures
        about = {
            "device_index": figures.device_index,
            "device_uuid": draft.device_uuid,
            "requested_bytes": figures.requested,
            "requested_for": requested_for(figures.requested, evidence) if draft.kind.of_gpu else None,
            "total_bytes": figures.total,
            "free_bytes": figures.free,
            "process_bytes": figures.process,
            "allocated_bytes": figures.allocated,
            "reserved_unallocated_bytes": figures.reserved_unallocated,
            "allowed_bytes": figures.allowed,
            "address_space_bytes": _address_space(draft, evidence),
            "context_bytes": figures.context,
            "other_process_bytes": figures.other,
            "other_process_pids": figures.other_pids,
        }
    lines = [*draft.lines]
    if evidence.exit_status not in (None, 0):
        lines.append(f"exit status {evidence.exit_status}")
    diagnosis = Diagnosis(
        kind=draft.kind,
        reason=draft.reason,
        confidence=draft.confidence,
        summary="",
        phase=draft.phase,
        rank=draft.rank,
        source=draft.source,
        evidence=tuple(lines),
        **about,
    )
    return replace(diagnosis, summary=summary(diagnosis, draft.detail, draft.caveat))


def _address_space(draft: _Draft, evidence: Evidence) -> int | None:
    """The limit that refused the allocation: the kernel itself refuses hardly any while there is memory. A heap of a program's
    own has a limit of its own."""
    full = evidence.host_peak_fraction is not None and evidence.host_peak_fraction >= _NEAR
    refused = draft.kind is Kind.HOST_OOM_ALLOC and draft.reason is None
    return evidence.address_space_bytes if refused and not full else None


def _of_finding(reading: Reading, finding: Finding) -> _Draft:
    return _Draft(
        finding.kind,
        finding.reason,
        finding.confidence,
        phase=finding.phase or "unknown",
        figures=finding.figures,
        lines=_told(reading, finding),
        rank=_rank(reading, finding),
        detail=reading.page.lines[finding.line].text[:200],
    )


def _of_witness(witness: Witness, reading: Reading) -> _Draft:
    draft = _Draft(
        witness.kind,
        witness.reason,
        witness.confidence,
        phase=witness.phase,
        figures=witness.figures,
        lines=witness.lines,
        rank=witness.rank,
        source=witness.source,
        device_uuid=witness.device_uuid,
        detail=witness.lines[0] if witness.lines else None,
        batch=witness.batch,
    )
    cause = reading.cause
    if cause is not None and cause.kind is witness.kind:
        # The log's telling of the same may add where it happened, and its own lines.
        draft.lines += tuple(line for line in _told(reading, cause) if line not in draft.lines)
        if draft.phase == "unknown":
            draft.phase = cause.phase or "unknown"
        if draft.rank is None:
            draft.rank = _rank(reading, cause)
    return draft


def _ended_well(reading: Reading) -> _Draft:
    of_memory = [(finding, how) for finding, how in reading.survived if finding.kind is not Kind.NOT_MEMORY]
    if of_memory:
        finding, how = of_memory[-1]
        return _Draft(Kind.NOT_MEMORY, how, 0.95, lines=_told(reading, finding), source="exit_status")
    cause = reading.cause
    if cause is not None and cause.kind is not Kind.NOT_MEMORY and cause.weight >= Weight.ERROR:
        how = "teardown_noise" if cause.kind is Kind.HOST_OOM_KILLED else "oom_handled"
        return _Draft(Kind.NOT_MEMORY, how, 0.7, lines=_told(reading, cause), source="exit_status")
    if cause is not None and cause.reason in ("allocator_warning", "oom_kill_of_other_process"):
        return _Draft(Kind.NOT_MEMORY, cause.reason, 0.9, lines=_told(reading, cause), source="exit_status")
    return _Draft(Kind.NOT_MEMORY, "finished", 0.95, source="exit_status")


def _of_signal(number: int) -> _Draft:
    if number == 9:
        # Until our samples have spoken.
        return _Draft(Kind.HOST_OOM_KILLED, None, SUSPECTED, source="exit_status")
    if number in _BY_SIGNAL:
        return _Draft(Kind.NOT_MEMORY, _BY_SIGNAL[number], 0.85, source="exit_status")
    return _Draft(Kind.NOT_MEMORY, "killed_by_something", 0.6, source="exit_status", caveat=f"It was {_signal_name(number)}.")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _not_of_a_status_alone(draft: _Draft) -> _Draft:
    """SIGKILL of which no word and no measurement says more is by something. Where a shell or a launcher says "Killed", the log
    is one of those that mostly tell of lack of memory: suspected."""
    if draft.kind is not Kind.HOST_OOM_KILLED or draft.source != "exit_status":
        return draft
    return _Draft(Kind.NOT_MEMORY, "killed_by_something", 0.6, lines=draft.lines, source="exit_status", caveat=_WHOSE_KILL)


def _with_samples(draft: _Draft, evidence: Evidence) -> _Draft:
    """What the supervisor measured makes a suspicion stronger or takes it back."""
    if draft.kind is Kind.HOST_OOM_KILLED and draft.confidence < 0.9:
        kills, share = evidence.cgroup_oom_kills, evidence.host_peak_fraction
        seen = () if share is None else (f"at most {units.percent(share)} of the host's memory was seen in use",)
        if kills == 0 or evidence.cgroup_killed_near_end is False:
            told = kills_line(evidence) or "the kernel counted no kill for lack of memory in the program's group"
            return _not_for_memory(draft, 0.75, (told, *seen))
        if share is not None and share < _FAR:
            return _not_for_memory(draft, 0.6, seen)
        if share is not None and share >= _NEAR:
            draft.confidence, draft.source = max(0.75, draft.confidence), "samples"
            draft.lines += (f"{units.percent(share)} of the host's memory was seen in use shortly before",)
    elif draft.reason == "bus_error" and evidence.shm_free_bytes is not None and evidence.shm_free_bytes < _SPARSE:
        line = f"{units.size(evidence.shm_free_bytes)} were free in /dev/shm"
        return _Draft(Kind.SHM_EXHAUSTED, None, 0.8, phase="data", lines=(line, *draft.lines), source="samples")
    elif draft.kind is Kind.DISK_FULL and draft.confidence < 0.9 and evidence.disk_free_bytes is not None:
        scarce = evidence.disk_free_bytes < _SPARSE
        draft.confidence = 0.95 if scarce else SUSPECTED
        draft.lines += (f"{units.size(evidence.disk_free_bytes)} were free on the disk",)
    elif evidence.cgroup_killed_near_end:
        # Not what this end tells of, in a group that others share: a person may know better.
        draft.lines += tuple(filter(None, [kills_line(evidence)]))
    return draft


def _not_for_memory(draft: _Draft, confidence: float, lines: tuple[str, ...]) -> _Draft:
    return _Draft(
        Kind.NOT_MEMORY,
        "killed_by_something",
        confidence,
        lines=lines + draft.lines,
        rank=draft.rank,
        source="samples",
        caveat="It was SIGKILL, and not for lack of memory as far as is known here.",
    )


def _signal_explains_more(status: int | None, cause: Finding) -> bool:
    """A program that dies of a signal did not end by an exception that it had caught before."""
    if status not in (-9, -15, -2, -11, -7) or cause.weight > Weight.ERROR or cause.reason in _FROM_OUTSIDE:
        return False
    return cause.weight is Weight.ERROR or cause.weight is Weight.HINT


def _signal_status(status: int | None) -> int | None:
    """A shell tells signal N as 128 + N, a batch system as 256 + N."""
    for base in (128, 256):
        if status is not None and base < status < base + 65:
            return base - status
    return status


def _told(reading: Reading, finding: Finding) -> tuple[str, ...]:
    lines = reading.page.lines[finding.line : finding.last_line + 1]
    own = [line for line in lines if line.rank == reading.page.lines[finding.line].rank and not line.bar]
    return tuple(line.shown.strip()[:_LONGEST] for line in (own or lines)[:_MOST_LINES])


def _rank(reading: Reading, finding: Finding) -> int | None:
    own = reading.page.lines[finding.line].rank
    if own is not None or finding.weight is not Weight.KILLED:
        return own
    # torchrun's box names it on a line of its own.
    for line in reading.page.lines[max(0, finding.line - 6) : finding.line + 6]:
        name, _, value = line.text.partition(":")
        if name.strip() == "rank" and value.split()[:1] and value.split()[0].isdecimal():
            return int(value.split()[0])
    return None
