"""The messages of PyTorch's allocators, of every era: CUDA, HIP, XPU, NPU and Metal.

The eras differ in words and order, not in what they say, so each figure is looked for on its own in the text that follows
"Tried to allocate": a message that is cut, folded or of a version to come still gives what it prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memtop.supervisor.diagnosis.finding import MOST_OF_A_KIND, SIZE, Figures, Finding, Weight, both_ends, parse_size
from memtop.supervisor.diagnosis.page import View
from memtop.supervisor.diagnosis.values import Kind

_LONGEST_MESSAGE = 1600

_HEAD = re.compile(
    r"outofmemory\.?(?:\((?=MPSallocated)|Triedtoallocate\d)|outofmemory\.Tri|(?<!outofmemory\.)(?<!outofmemory)Triedtoallocate\d"
    r"|GPU\d{0,20}hasatotalcapac|Oftheallocatedmemory\d"
)


def _figure(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(" ", "").replace("SIZE", f"({SIZE})"))


_REQUESTED = _figure(r"Tried to allocate SIZE")
_DEVICE = _figure(r"[GNXP]PU(\d{1,5})(?:has a total|;\d)")
_TOTAL = _figure(r"(?:has a total capaci?ty of SIZE|SIZE total capacity)")
_FREE = _figure(r"(?:of which SIZE is free|already allocated;(?:SIZE current active;)?SIZE free)")
_PROCESS = _figure(r"this process has SIZE memory in use")
_OTHERS = _figure(r"Process(\d{1,10})has SIZE memory in use")
_ALLOCATED = _figure(r"(?:Of the allocated memory SIZE is allocated|SIZE already allocated|MPS allocated:SIZE)")
_UNALLOCATED = _figure(r"(?:SIZE is reserved by PyTorch but unallocated|SIZE cached)")
_RESERVED = _figure(r"SIZE reserved in total")
_ALLOWED = _figure(r"(?:SIZE allowed;|max allowed:SIZE)")


def find(view: View) -> Iterator[Finding]:
    starts = [match.start() for match in _HEAD.finditer(view.text)]
    groups = _grouped(view, starts)
    yield from both_ends(groups, lambda group: _read(view, group[0], view.text[slice(*group)]), 2 * MOST_OF_A_KIND)


def _grouped(view: View, starts: list[int]) -> list[tuple[int, int]]:
    """From each message's head to its end: the next one's head, or as far as a message can reach. Parts that follow each other
    belong to one message until something is said a second time."""
    begins: list[int] = []
    said: set[str] = set()
    for start in starts:
        word = (
            "head"
            if view.text.startswith("outofmemory(", start)
            else "request"
            if view.text[start] in "oT"
            else view.text[start]
        )
        repeats = word in said or word == "head" or (word == "request" and said != {"head"})
        if not begins or repeats or start - begins[-1] > _LONGEST_MESSAGE:
            begins.append(start)
            said = set()
        said.add(word)
    if not begins:
        return []
    ends = [*begins[1:], len(view.text)]
    return [(begin, min(end, begin + _LONGEST_MESSAGE)) for begin, end in zip(begins, ends, strict=True)]


def _read(view: View, start: int, message: str) -> Finding | None:
    requested = _bytes(_REQUESTED, message)
    total, allocated = _bytes(_TOTAL, message), _bytes(_ALLOCATED, message)
    free, process = _bytes(_FREE, message), _bytes(_PROCESS, message)
    if requested is None and total is None and allocated is None and "outofmemory" not in message:
        return None
    unallocated, reserved = _bytes(_UNALLOCATED, message), _bytes(_RESERVED, message)
    spare = unallocated
    if spare is None and reserved is not None and allocated is not None:
        spare = max(0, reserved - allocated)
    pool = None if allocated is None else allocated + (spare or 0)
    told = tuple((int(pid), parse_size(held)) for pid, held in _OTHERS.findall(message))
    others = _without_self(told, pool, process, complete="thisprocesshas" in message or "llocatedmemory" in message)
    outside = _outside(total, free, process, pool, told)
    kind = kind_of(requested, total, spare, outside)
    if process is None and not told and kind is not Kind.GPU_OOM_OTHER_PROCESS:
        outside = None  # it would hold the run's own context, too
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
    )
    line = view.line_at(start)
    last = max(line, view.line_at(min(start + _said_until(message), len(view.text) - 1)))
    confidence = 0.97 if total is not None else 0.95 if requested is not None else 0.85
    return Finding(line, kind, None, Weight.CAUSE, confidence, None, figures, last)


def _bytes(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return None if match is None else parse_size(next(text for text in reversed(match.groups()) if text))


def _said_until(message: str) -> int:
    """Where the last of what is recognised ends."""
    ends = [
        match.end()
        for pattern in (_REQUESTED, _TOTAL, _FREE, _ALLOCATED, _UNALLOCATED, _RESERVED, _PROCESS)
        if (match := pattern.search(message))
    ]
    return max(ends, default=1) - 1


def _without_self(
    told: tuple[tuple[int, int | None], ...], pool: int | None, process: int | None, *, complete: bool
) -> tuple[int, ...]:
    """The processes that are not the run. In a container the allocator does not know its own pid: then there is no sentence
    about "this process", and the one whose memory just covers what the allocator holds is the run."""
    pids = tuple(pid for pid, _ in told)
    if process is not None or not told:
        return pids
    if not complete or pool is None:
        return ()  # the message is cut before it tells
    fitting = [
        (held - pool, pid)
        for pid, held in told
        if held is not None and held >= pool * 0.98 and held - pool <= max(_LARGEST_CONTEXT, held * 0.15)
    ]
    return tuple(pid for pid in pids if not fitting or pid != min(fitting)[1])


_LARGEST_CONTEXT = 2 << 30
"""A CUDA context with its libraries' workspaces, generously."""


def _outside(
    total: int | None, free: int | None, process: int | None, pool: int | None, told: tuple[tuple[int, int | None], ...]
) -> int | None:
    """What processes other than the run hold on the card."""
    if total is None or free is None:
        return None
    own = process if process is not None and process <= total else pool
    if own is None:
        return None
    if process is None and told and pool is not None:
        # The run is one of these: what it holds is its own figure, context included.
        pids = _without_self(told, pool, process, complete=True)
        own = max(own, sum(held for pid, held in told if pid not in pids and held is not None))
    return max(0, total - free - own)


def kind_of(requested: int | None, total: int | None, spare: int | None, outside: int | None) -> Kind:
    if requested is not None and total is not None and requested > total:
        return Kind.GPU_OOM
    if total is not None and outside is not None and outside * 2 > total:
        return Kind.GPU_OOM_OTHER_PROCESS
    if requested is not None and spare is not None and spare > requested:
        return Kind.GPU_OOM_FRAGMENTED
    return Kind.GPU_OOM
