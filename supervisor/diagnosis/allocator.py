"""The messages of PyTorch's allocators, of all versions: CUDA, HIP, XPU, NPU and Metal.

The versions differ in words and order but print the same figures. Each figure is therefore searched
for by itself in the text after "Tried to allocate", so that a message that is cut, folded or new
still gives what it prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from memtop.supervisor.diagnosis.finding import MOST_OF_A_KIND, Figures, Finding, both_ends, compiled, parse_size
from memtop.supervisor.diagnosis.text import JoinedLines
from memtop.supervisor.diagnosis.values import Evidence, Kind, Logits

_LONGEST_MESSAGE = 1600

_HEAD = compiled(
    r"out of memory\.? (?:\((?=MPS allocated)|Tried to allocate \d)|out of memory\. Tri"
    r"|(?<!out of memory\.)(?<!out of memory)(?<!allocate memory\.)Tried to allocate \d"
    r"|GPU \d{0,20} has a total capac|Of the allocated memory \d"
)
_REQUESTED = compiled(r"Tried to allocate (SIZE)")
_DEVICE = compiled(r"[GNXP]PU(\d{1,5})(?:has a total|;\d)")
# A log can be cut within a word: only its first letters are asked for.
_TOTAL = compiled(r"(?:has a total capaci?ty of (SIZE)|[;(] (SIZE) total)")
_FREE = compiled(r"(?:of which (SIZE) is free|already allocated;(?:SIZE current active;)? (SIZE) f)")
_PROCESS = compiled(r"this process has (SIZE) memory in")
_OTHERS = compiled(r"Process(\d{1,10})has (SIZE) memory in use")
_ALLOCATED = compiled(r"(?:Of the allocated memory (SIZE) is a|(SIZE) already allocated|MPS allocated:(SIZE))")
_UNALLOCATED = compiled(r"(?:and (SIZE) is reserve|(SIZE) cached)")
_RESERVED = compiled(r"(SIZE) reserved in total")
_ALLOWED = compiled(r"(?:(SIZE) allowed;|max allowed:(SIZE))")


def find(view: JoinedLines) -> Iterator[Finding]:
    starts = [match.start() for match in _HEAD.finditer(view.text)]
    groups = _grouped(view, starts)
    yield from both_ends(groups, lambda group: _read(view, group[0], view.text[slice(*group)]), 2 * MOST_OF_A_KIND)


def _grouped(view: JoinedLines, starts: list[int]) -> list[tuple[int, int]]:
    """The start and the end of each message. Parts that follow each other belong to one message
    until one part repeats."""
    begins: list[int] = []
    seen: set[str] = set()
    for start in starts:
        word = (
            "head"
            if view.text.startswith("outofmemory(", start)
            else "request"
            if view.text[start] in "oT"
            else view.text[start]
        )
        repeats = word in seen or word == "head" or (word == "request" and seen != {"head"})
        if not begins or repeats or start - begins[-1] > _LONGEST_MESSAGE:
            begins.append(start)
            seen = set()
        seen.add(word)
    if not begins:
        return []
    ends = [*begins[1:], len(view.text)]
    return [(begin, min(end, begin + _LONGEST_MESSAGE)) for begin, end in zip(begins, ends, strict=True)]


def _read(view: JoinedLines, start: int, message: str) -> Finding | None:
    requested = _bytes(_REQUESTED, message)
    total, allocated = _bytes(_TOTAL, message), _bytes(_ALLOCATED, message)
    free, process = _bytes(_FREE, message), _bytes(_PROCESS, message)
    if requested is None and total is None and allocated is None and "outofmemory" not in message:
        return None
    if process == 0 and allocated:
        process = None  # the driver does not see the process
    unallocated, reserved = _bytes(_UNALLOCATED, message), _bytes(_RESERVED, message)
    spare = unallocated
    if spare is None and reserved is not None and allocated is not None:
        spare = max(0, reserved - allocated)
    pool = None if allocated is None else allocated + (spare or 0)
    named = tuple((int(pid), parse_size(held)) for pid, held in _OTHERS.findall(message))
    others = _without_self(named, pool, process, complete="thisprocesshas" in message or "llocatedmemory" in message)
    outside = _outside(total, free, process, pool, named)
    kind = kind_of(requested, total, spare, outside)
    if process is None and not named and kind is not Kind.GPU_OOM_OTHER_PROCESS:
        outside = None  # it would include the run's own context
    context = None
    if process is not None and allocated is not None and unallocated is not None and process >= allocated + unallocated:
        context = process - allocated - unallocated
    device = _DEVICE.search(message)
    figures = Figures(
        device_index=None if device is None else int(device[1]),
        requested=requested,
        total=total,
        free=free,
        process=process,
        allocated=allocated,
        reserved_unallocated=unallocated,
        allowed=_bytes(_ALLOWED, message),
        other_pids=others,
        other=outside,
        context=context,
        complete=True,
    )
    line = view.line_at(start)
    last = max(line, view.line_at(min(start + _last_figure(message), len(view.text) - 1)))
    confidence = 0.97 if total is not None else 0.95 if requested is not None else 0.85
    return Finding(kind, confidence=confidence, figures=figures, line=line, last_line=last)


def _bytes(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return None if match is None else parse_size(next(text for text in reversed(match.groups()) if text))


def _last_figure(message: str) -> int:
    """The position where the last figure ends."""
    ends = [
        match.end()
        for pattern in (_REQUESTED, _TOTAL, _FREE, _ALLOCATED, _UNALLOCATED, _RESERVED, _PROCESS)
        if (match := pattern.search(message))
    ]
    return max(ends, default=1) - 1


def _without_self(
    named: tuple[tuple[int, int | None], ...], pool: int | None, process: int | None, *, complete: bool
) -> tuple[int, ...]:
    """The named processes that are not the run.

    In a container the allocator does not know its own pid, so no sentence is about "this process".
    The run is then the process whose memory just covers what the allocator holds.
    """
    pids = tuple(pid for pid, _ in named)
    if process is not None or not named:
        return pids
    if not complete or pool is None:
        return ()  # the message is cut before the figure
    fitting = [
        (held - pool, pid)
        for pid, held in named
        if held is not None and held >= pool * 0.98 and held - pool <= max(_LARGEST_CONTEXT, held * 0.15)
    ]
    return tuple(pid for pid in pids if not fitting or pid != min(fitting)[1])


_LARGEST_CONTEXT = 2 << 30
"""The most that a CUDA context with its libraries' workspaces takes, in bytes."""


def _outside(
    total: int | None, free: int | None, process: int | None, pool: int | None, named: tuple[tuple[int, int | None], ...]
) -> int | None:
    """The bytes that processes other than the run hold on the GPU."""
    if total is None or free is None:
        return None
    own = process if process is not None and process <= total else pool
    if own is None:
        return None
    if process is None and named and pool is not None:
        # One of the named processes is the run: its figure includes the context.
        pids = _without_self(named, pool, process, complete=True)
        own = max(own, sum(held for pid, held in named if pid not in pids and held is not None))
    return max(0, total - free - own)


def kind_of(requested: int | None, total: int | None, spare: int | None, outside: int | None) -> Kind:
    if requested is not None and total is not None and requested > total:
        return Kind.GPU_OOM
    if total is not None and outside is not None and outside * 2 > total:
        return Kind.GPU_OOM_OTHER_PROCESS
    if requested is not None and spare is not None and spare > requested:
        return Kind.GPU_OOM_FRAGMENTED
    return Kind.GPU_OOM


def without_the_run(kind: Kind, figures: Figures, uuid: str | None, evidence: Evidence) -> tuple[Kind, Figures]:
    """The same, without what the run's other processes hold: a message counts them as other
    processes.

    `evidence.gpu_run_bytes` are the samples of what the run's processes hold together on each GPU.
    """
    figures = replace(figures, other_pids=tuple(pid for pid in figures.other_pids if pid not in evidence.member_pids))
    own = figures.process
    if own is None and figures.allocated is not None:
        own = figures.allocated + (figures.reserved_unallocated or 0)
    known = evidence.gpu_run_bytes
    # A message names its GPU only by the program's own index.
    held = known.get(uuid) if uuid is not None else next(iter(known.values())) if len(known) == 1 else None
    if figures.other is None or own is None or held is None or held <= own:
        return kind, figures
    other = max(0, figures.other - (held - own))
    if kind is Kind.GPU_OOM_OTHER_PROCESS:
        kind = kind_of(figures.requested, figures.total, figures.reserved_unallocated, other)
    return kind, replace(figures, other=other)


_TOLERANCE = 0.02


def logits_of(requested_bytes: int | None, evidence: Evidence) -> Logits | None:
    """The logits, if the request is as large as B x T x V numbers of 4 or 2 bytes; else None.

    A program can leave out one position or add one, so T - 1 and T + 1 are tried, too.
    """
    batch, length, vocabulary = evidence.batch, evidence.seq_len, evidence.vocabulary
    if not (requested_bytes and batch and length and vocabulary):
        return None
    fits = []
    for width in (4, 2):
        for tokens in (length, length - 1, length + 1):
            expected = batch * tokens * vocabulary * width
            off = abs(requested_bytes - expected) / expected if expected > 0 else 1.0
            if off <= _TOLERANCE:
                # A printed size has two decimals: the given length wins unless another fits clearly
                # better.
                fits.append((off + (0.002 if tokens != length else 0), (batch, tokens, vocabulary, width)))
    return Logits(*min(fits)[1]) if fits else None
