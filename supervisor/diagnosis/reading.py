"""All that a log says about its end, in order, and which of it is the cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memtop.supervisor.diagnosis import allocator, device_words, ending_words, host_words, other_words, room_words
from memtop.supervisor.diagnosis.aftermath import Progress, is_mild, went_on
from memtop.supervisor.diagnosis.finding import Finding, Weight
from memtop.supervisor.diagnosis.page import Page, View
from memtop.supervisor.diagnosis.phase import phase_of
from memtop.supervisor.diagnosis.values import Kind

SHAPES = (
    *device_words.SHAPES,
    *host_words.SHAPES,
    *room_words.SHAPES,
    *ending_words.SHAPES,
    *other_words.SHAPES,
)
_KILLED_IN_TEARDOWN = "teardown_noise"


@dataclass(frozen=True)
class Reading:
    page: Page
    cause: Finding | None
    """What ended the program, as far as its words tell."""
    survived: tuple[tuple[Finding, str], ...]
    """What it went on after, and how."""
    findings: tuple[Finding, ...]


def read(page: Page, member_pids: frozenset[int] = frozenset(), *, failed: bool = False) -> Reading:
    findings = _findings(page, member_pids)
    fatal, survived = [], []
    progress = Progress(page)
    for index, finding in enumerate(findings):
        how = (
            _KILLED_IN_TEARDOWN
            if progress.completed and _is_worker_death(page, finding)
            else went_on(page, progress, finding, _until(page, findings, index), failed=failed)
        )
        if how is None:
            fatal.append(finding)
        else:
            survived.append((finding, how))
    if any(how == _KILLED_IN_TEARDOWN for _, how in survived):
        fatal = [finding for finding in fatal if finding.weight >= Weight.CAUSE]
    cause = min(fatal, key=lambda finding: (-finding.weight, finding.line), default=None)
    return Reading(page, _told_best(cause, fatal), tuple(survived), tuple(findings))


def _until(page: Page, findings: list[Finding], index: int) -> int:
    """Where the next failure begins: what the program did before it, it did after this one."""
    this = findings[index]
    return next(
        (other.line for other in findings[index + 1 :] if other.line > this.last_line and other.weight >= Weight.CAUSE),
        len(page.lines),
    )


def _is_worker_death(page: Page, finding: Finding) -> bool:
    return finding.kind in (Kind.HOST_OOM_KILLED, Kind.SHM_EXHAUSTED) and "DataLoader worker" in page.lines[finding.line].text


def _told_best(cause: Finding | None, fatal: list[Finding]) -> Finding | None:
    """The same failure is often told more than once, first by whoever passes it on: take the telling with the figures, and the
    phase from whoever knows it."""
    if cause is None:
        return None
    same = [other for other in fatal if other.kind is cause.kind or (other.kind.of_gpu and cause.kind.of_gpu)]
    if cause.kind is Kind.HOST_OOM_KILLED and cause.phase == "unknown":
        phase = next((other.phase for other in same if other.phase != "unknown"), "unknown")
        return replace(cause, phase=phase)
    if not cause.kind.of_gpu or cause.figures.known > 1:
        return cause
    requested = cause.figures.requested
    fuller = (other for other in same if other.figures.known > cause.figures.known)
    return next((other for other in fuller if requested in (None, other.figures.requested)), cause)


def _findings(page: Page, member_pids: frozenset[int]) -> list[Finding]:
    best: dict[int, Finding] = {}
    for view in page.views:
        for finding in _of_view(view, page, member_pids):
            known = best.get(finding.line)
            # Of one line's readings the one that says more; of equals the first, which is the more special shape.
            if known is None or _worth(finding) > _worth(known):
                best[finding.line] = finding
    for finding in other_words.python_errors(page, best):
        best[finding.line] = finding
    for finding in other_words.not_a_number(page):
        best.setdefault(finding.line, finding)
    return [_placed(page, best[line]) for line in sorted(best)]


def _worth(finding: Finding) -> tuple[int, int]:
    return finding.weight, finding.figures.known


def _of_view(view: View, page: Page, member_pids: frozenset[int]) -> Iterator[Finding]:
    yield from allocator.find(view)
    for shape in SHAPES:
        yield from shape.find(view)
    yield from host_words.memory_errors(view)
    yield from ending_words.kernel_kills(view, page, member_pids)
    yield from ending_words.bare_killed(view)


def _placed(page: Page, finding: Finding) -> Finding:
    """With its phase, and as pinned or shared memory where only the frames tell."""
    context = page.context(finding.line)
    texts = [line.text for line in context]
    if finding.kind is Kind.GPU_OOM and finding.figures.known == 0:
        pinned = any("in pin memory thread" in text for text in texts) or any(
            device_words.PIN_FRAMES.search(line.text)
            for line in [*context[-5:], *page.lines[finding.line + 1 : finding.line + 9]]
        )
        if pinned:
            device = next((match for text in texts if (match := device_words.PIN_DEVICE.search(text))), None)
            figures = replace(finding.figures, device_index=None if device is None else int(device[1]))
            finding = replace(finding, kind=Kind.PINNED_HOST_OOM, figures=figures)
    if finding.kind is Kind.DISK_FULL and any(room_words.SHARED_FRAMES.search(text) for text in texts[-8:]):
        finding = replace(finding, kind=Kind.SHM_EXHAUSTED, phase="data")
    if finding.kind is Kind.NOT_MEMORY and finding.weight is Weight.ERROR and is_mild(page.lines[finding.line]):
        finding = replace(finding, weight=Weight.HINT)
    return finding if finding.phase is not None else replace(finding, phase=_phase(finding, page))


_WITHOUT_PHASE = frozenset({"keyboard_interrupt", "sigterm", "nccl_timeout", "nccl_error", "port_in_use", "invalid_device"})


def _phase(finding: Finding, page: Page) -> str:
    context = page.context(finding.line)
    if finding.reason in _WITHOUT_PHASE or finding.weight < Weight.BROKEN:
        return "unknown"
    if finding.reason in other_words.ASYNCHRONOUS:
        return "data" if any("in pin memory thread" in line.text for line in context) else "unknown"
    if finding.kind is Kind.HOST_OOM_KILLED:
        return "unknown"
    return phase_of(context)
