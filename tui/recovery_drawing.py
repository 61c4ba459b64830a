"""A death of memory in words and bars: what happened, where the memory went, what proves it, what happens next."""

from __future__ import annotations

from memtop.supervisor import units
from memtop.supervisor.diagnosis.values import Diagnosis, Kind
from memtop.supervisor.recovery.values import Remedy
from memtop.supervisor.wire import Proposal
from memtop.tui.bars import Share, memory_bar
from memtop.tui.line import MUTED, STRONG, Line, fact, fit, join, join_fitting, line, wrap
from memtop.tui.machine.vram import Part
from memtop.tui.remedies import is_applicable
from memtop.tui.store import Store

_TITLES = {
    Kind.GPU_OOM: "Out of GPU memory",
    Kind.GPU_OOM_FRAGMENTED: "Out of GPU memory: enough of it, but in pieces",
    Kind.GPU_OOM_OTHER_PROCESS: "Out of GPU memory: others hold most of the card",
    Kind.HOST_OOM_ALLOC: "Out of host memory",
    Kind.HOST_OOM_KILLED: "Killed by the kernel for lack of host memory",
    Kind.PINNED_HOST_OOM: "Out of page-locked host memory",
    Kind.SHM_EXHAUSTED: "Shared memory (/dev/shm) is full",
    Kind.DISK_FULL: "The disk is full",
    Kind.NOT_MEMORY: "Not a lack of memory",
}
_SOURCES = {
    "record": "the program's own record",
    "error_file": "torchrun's error file",
    "kernel": "the kernel's counters",
    "samples": "memtop's samples",
    "words": "the words of the log",
    "exit_status": "the exit status alone",
}
_PROVEN, _LIKELY = 0.95, 0.5
_EVIDENCE_LINES = 2
_NARROW_BELOW = 80
# Parts of a bar smaller than a hundredth of the whole are not worth a word.
_WORTH_A_WORD = 0.01
_SHORTLY = 60.0


def card_title(diagnosis: Diagnosis) -> str:
    """The frame's title: what ran out."""
    return _TITLES[diagnosis.kind]


def happened_lines(diagnosis: Diagnosis, width: int) -> list[Line]:
    """One sentence, then where in the step it was, how sure that is, and by what."""
    sure = "proven" if diagnosis.confidence >= _PROVEN else "likely" if diagnosis.confidence >= _LIKELY else "a guess"
    source = _SOURCES.get(diagnosis.source, diagnosis.source)
    parts = [
        fact("phase", diagnosis.phase) if diagnosis.phase != "unknown" else (),
        () if diagnosis.rank is None else fact("rank", str(diagnosis.rank)),
        line((sure, "good" if sure == "proven" else "edge"), (f" by {source}", MUTED)),
    ]
    return [*wrap(diagnosis.summary, width, STRONG), join_fitting([part for part in parts if part], width)]


def evidence_lines(diagnosis: Diagnosis, width: int) -> list[Line]:
    """The strongest evidence in its own words."""
    strongest = diagnosis.evidence[0] if diagnosis.evidence else ""
    parts = wrap(strongest, max(10, width - 2), MUTED)
    if width < _NARROW_BELOW:
        # There the remedies need the room more.
        return [fit((*line(("│ ", "limit")), (strongest, MUTED)), width)] if parts else []
    parts = parts[:_EVIDENCE_LINES]
    return [(*line(("│ ", "limit")), *part) for part in parts]


def memory_lines(diagnosis: Diagnosis, store: Store, width: int) -> list[Line]:
    """Where the memory went: a heading, a bar on a fixed scale, its parts in words, and what was asked for."""
    if diagnosis.kind.of_gpu:
        lines = _gpu_lines(diagnosis, store, width)
    elif diagnosis.kind in (Kind.HOST_OOM_ALLOC, Kind.HOST_OOM_KILLED, Kind.PINNED_HOST_OOM):
        lines = _host_lines(diagnosis, store, width)
    else:
        lines = _room_lines(diagnosis, store, width)
    if diagnosis.requested_bytes is None:
        return lines
    words = units.size(diagnosis.requested_bytes)
    asked = f"asked for {words} more" + (f": {diagnosis.requested_for}" if diagnosis.requested_for else "")
    return [*lines, *wrap(asked, width, "edge")]


def _gpu_lines(diagnosis: Diagnosis, store: Store, width: int) -> list[Line]:
    parts = [
        Part("allocated", diagnosis.allocated_bytes, "█", "alloc"),
        Part("cached", diagnosis.reserved_unallocated_bytes, "▓", "cache"),
        Part("context", diagnosis.context_bytes, "▒", "context"),
        Part("others", diagnosis.other_process_bytes, "░", "other"),
    ]
    if diagnosis.allocated_bytes is None and diagnosis.process_bytes is not None:
        parts[:3] = [Part("this process", diagnosis.process_bytes, "█", "alloc")]
    head = f"{_card(diagnosis, store)} at that moment, measured"
    return _bar_lines(head, parts, diagnosis.total_bytes, diagnosis.free_bytes, width)


def _card(diagnosis: Diagnosis, store: Store) -> str:
    """The machine's name for the card where it can be told, else the program's."""
    for gpu in store.gpus:
        if diagnosis.device_uuid is not None and gpu.uuid == diagnosis.device_uuid:
            return f"GPU {gpu.index}"
    return "the GPU" if diagnosis.device_index is None else f"the program's GPU {diagnosis.device_index}"


def _host_lines(diagnosis: Diagnosis, store: Store, width: int) -> list[Line]:
    host = store.host
    whole = diagnosis.allowed_bytes or diagnosis.total_bytes
    own, free = diagnosis.process_bytes, diagnosis.free_bytes
    if whole is not None and (own is not None or free is not None):
        others = None if own is None or free is None else max(0, whole - own - free)
        parts = [Part("this run", own, "█", "alloc"), Part("others", others, "░", "other")]
        limit = "the limit set for it" if diagnosis.allowed_bytes else "host memory"
        return _bar_lines(f"{limit} at that moment, measured", parts, whole, free, width)
    whole, peak = whole or host.limit_bytes or host.total_bytes, _fullest_before(store)
    if whole is None or peak is None:
        return [line(("? how full host memory was at that moment is not known: it was not sampled here", "unknown"))]
    head = f"host memory, the most that was sampled in the minute before: {units.percent(peak)} of {units.size(whole)}"
    return [
        *wrap(head, width, MUTED),
        memory_bar(width, [Share(peak, "█", "alloc")]),
        line(("? how it was divided at that moment is not known", "unknown")),
    ]


def _fullest_before(store: Store) -> float | None:
    """The fullest that host memory was seen shortly before the end; None where this dashboard was not there."""
    ended = store.run.ended if store.run is not None else None
    if ended is None:
        return None
    near = [moment.fraction for moment in store.host_history if ended - _SHORTLY <= moment.time <= ended]
    return max((fraction for fraction in near if fraction is not None), default=None)


def _room_lines(diagnosis: Diagnosis, store: Store, width: int) -> list[Line]:
    """Shared memory or the disk."""
    shared = diagnosis.kind is Kind.SHM_EXHAUSTED
    whole = diagnosis.total_bytes or (store.host.shm_total_bytes if shared else None)
    free = diagnosis.free_bytes
    name = "/dev/shm" if shared else "the disk"
    if whole is None or free is None:
        size = "" if whole is None else f" of {units.size(whole)}"
        return [line((f"? how much of {name}{size} was in use at that moment is not known", "unknown"))]
    used = Part("in use", max(0, whole - free), "█", "alloc")
    return _bar_lines(f"{name} at that moment, measured", [used], whole, free, width)


def _bar_lines(head: str, parts: list[Part], whole: int | None, free: int | None, width: int) -> list[Line]:
    """A heading, the bar and the parts; what nobody told of is named, not spread over the others."""
    scale = units.scale(whole)
    legend = [_words(part, scale) for part in parts]
    if not whole:
        return [line((f"{head}; its whole size is not known", MUTED)), join_fitting(legend, width)]
    told = sum(part.size or 0 for part in parts)
    shares = [Share((part.size or 0) / whole, part.glyph, part.role) for part in parts]
    rest = whole - told - (free or 0)
    if rest / whole >= _WORTH_A_WORD:
        missing = Part("not told" if free is not None else "not told, or free", rest, "?", "gone")
        legend.append(_words(missing, scale))
        # Where the free part is unknown too, the bar does not claim that all of it was in use.
        shares += [Share(rest / whole, "?", "gone")]
    finer = scale._replace(digits=2) if free is not None and scale.unit == "GiB" and free < units.GIB else scale
    legend.append(fact("free", f"{finer.number(free)} {scale.unit}" if free is not None else units.UNKNOWN))
    return [
        *wrap(f"{head}, {units.size(whole)}", width, MUTED),
        memory_bar(width, shares, limits=False),
        *_rows(legend, width),
    ]


def _words(part: Part, scale: units.Scale) -> Line:
    return line((part.glyph, part.role), " ", *fact(part.word, scale.number(part.size)))


def _rows(parts: list[Line], width: int) -> list[Line]:
    """Side by side, on a second line what does not fit on the first."""
    first = join_fitting(parts, width)
    count = next(n for n in range(len(parts), -1, -1) if join(parts[:n]) == first)
    return [first] if count == len(parts) else [first, join_fitting(parts[count:], width)]


def outlook(proposal: Proposal, marked: Remedy | None, now: float, *, can_act: bool) -> Line:
    """What happens next, by itself or by a key; `marked` is the remedy under the cursor."""
    if proposal.begins is not None:
        seconds = max(0, round(proposal.begins - now))
        words = f"remedy 1 begins in {seconds} s"
        keys = " (Enter: ▸ now, s: stay stopped, Esc: close)" if can_act else " by itself"
        return line(("… ", "accent"), (f"{words}{keys}", "accent"))
    if marked is None or not can_act:
        words = "Esc closes; the run stays failed"
    elif is_applicable(marked):
        words = "Enter applies ▸, Esc leaves the run failed"
    else:
        enter = "Enter copies the command of ▸" if marked.command else "▸ is for you to do"
        words = f"{enter}, Esc leaves the run failed"
    return line(("· ", MUTED), (words, "text"))
