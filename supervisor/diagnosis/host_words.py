"""Refused allocations of host memory: the program saw the refusal and could say so."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memtop.supervisor.diagnosis.finding import Finding, Shape, Weight, both_ends, not_memory, shape
from memtop.supervisor.diagnosis.page import View
from memtop.supervisor.diagnosis.values import Kind

_REFUSED = Kind.HOST_OOM_ALLOC

SHAPES: tuple[Shape, ...] = (
    shape(
        r"DefaultCPUAllocator:? .{0,60}? you tried to allocate (?P<size>\d+bytes)",
        _REFUSED,
        confidence=0.97,
        needle="CPUAllocator",
    ),
    shape(r"DefaultCPUAllocator:? (?:can't allocate|not enough) memory", _REFUSED, needle="CPUAllocator"),
    shape(
        r"Unable to allocate (?P<size>\d[\d.]{0,40}(?:[KMGTP]iB|bytes)) for an array",
        _REFUSED,
        confidence=0.97,
        needle="foranarray",
    ),
    shape(r"(?:Arrow)?MemoryError:? (?:re|c|m)?alloc of size (?P<size>\d+) failed", _REFUSED, confidence=0.97, needle="ofsize"),
    shape(r"memory allocation of (?P<size>\d+bytes) failed", _REFUSED, confidence=0.97, needle="memoryallocationof"),
    shape(
        r"unable to mmap (?P<size>\d+bytes) from file .{0,300}? Cannot allocate memory",
        _REFUSED,
        confidence=0.95,
        needle="tommap",
    ),
    shape(r"\[Errno 12\]", _REFUSED, confidence=0.95, needle="[Errno12]"),
    shape(r"\[WinError (?:1455|8)\]|\(os error 1455\)|paging file is too small", _REFUSED, confidence=0.95),
    shape(r"os error 12\)", _REFUSED, needle="oserror12)"),
    shape(
        r"(?:fork|mmap|malloc|calloc|sbrk|clone|vfork|pthread_create)\(?\)?(?: failed)?:?(?: retry:)?(?:"
        r" Resource)? Cannot allocate memory",
        _REFUSED,
        needle="Cannotallocatememory",
    ),
    shape(r"Cannot allocate memory(?:\(12\)|\(errno=?:?12\))?", _REFUSED, confidence=0.85, needle="Cannotallocatememory"),
    shape(r"(?<!rmm)std::bad_alloc(?!:out_of_memory)", _REFUSED, confidence=0.85, needle="bad_alloc"),
    # Their heaps have limits of their own, whatever the host has left.
    shape(
        r"java\.lang\.OutOfMemoryError:? (?:Java heap space|GC overhead limit exceeded)",
        _REFUSED,
        "java_heap",
        confidence=0.95,
        needle="java.lang",
    ),
    not_memory(
        r"java\.lang\.OutOfMemoryError:? unable to create (?:new )?native thread",
        "thread_limit",
        weight=Weight.CAUSE,
        needle="nativethread",
    ),
    shape(r"java\.lang\.OutOfMemoryError", _REFUSED, confidence=0.9, needle="java.lang"),
    shape(
        r"JavaScript heap out of memory|FATAL ERROR: Reached heap limit|mark-compacts near heap limit",
        _REFUSED,
        "node_heap",
        confidence=0.95,
        needle="heap",
    ),
    shape(r"cannot allocate vector of size (?P<size>SIZE)", _REFUSED, confidence=0.9, needle="vectorofsize"),
    shape(r"(?:UR|PI|ZE)_(?:RESULT_)?ERROR_OUT_OF_HOST_MEMORY|CL_OUT_OF_HOST_MEMORY", _REFUSED, needle="HOST_MEMORY"),
    shape(r"OOM when allocating tensor with shape.{0,200}?device:CPU:\d", _REFUSED, confidence=0.95, needle="OOMwhen"),
    shape(
        r"Allocator \((?:mklcpu|cpu|cpu_bfc)\) ran out of memory trying to allocate (?P<size>SIZE)", _REFUSED, needle="ranoutof"
    ),
    shape(
        r"(?i:not enough (?:host |system |physical )?(?:ram|memory) (?:available)?to (?:load|allocate|fork|continue))",
        _REFUSED,
        confidence=0.7,
    ),
    # Worded alike, but of something else.
    not_memory(r"can't start new thread|pthread_create failed.{0,120}? Resource temporarily unavailable", "thread_limit"),
    not_memory(r"fork:? (?:retry:)? Resource temporarily unavailable", "thread_limit"),
    not_memory(r"received \d+ items of ancdata", "fd_limit", confidence=0.95, phase="data", needle="ancdata"),
    not_memory(r"\[Errno 2[34]\]|Too many open files", "fd_limit", confidence=0.95),
    not_memory(
        r"(?:No space left on device|ENOSPC).{0,60}? inotify|inotify.{0,80}?(?:No space left on device|ENOSPC|watch limit)",
        "inotify_limit",
        needle="inotify",
    ),
    not_memory(r"ENOSPC: System limit for number of file watchers", "inotify_limit", needle="ENOSPC"),
    not_memory(r"\[Errno 28\] inotify watch limit", "inotify_limit", needle="inotify"),
    not_memory(r"out of resources?: shared memory,? Required", "triton_shared_memory", confidence=0.95, needle="Required"),
    not_memory(
        r"(?i:uses too much shared data|too much shared memory|shared memory.{0,30}? exceeds (?:the )?(?:hardware|device))",
        "triton_shared_memory",
    ),
    not_memory(
        r"(?i:ResourceExhausted|RESOURCE_EXHAUSTED)\W{1,6} (?:desc=)?(?i:grpc:|Received message larger"
        r"|Quota|Resource has been|Too many)",
        "grpc_limit",
    ),
    not_memory(r"(?i:received message larger than max)", "grpc_limit"),
    not_memory(r"GC overhead limit", "python_error"),
)

_MEMORY_ERROR = re.compile(r"(?:[\w.]+\.)?_?(?:Array|Arrow)?MemoryError(?::.*)?$")


def memory_errors(view: View) -> Iterator[Finding]:
    """Python's own, which mostly says nothing more."""
    if "MemoryError" not in view.text:
        return
    found = [index for index, line in enumerate(view.lines) if _is_memory_error(line.text)]
    yield from both_ends(found, lambda index: Finding(index, _REFUSED, None, Weight.CAUSE, 0.9, last_line=index))


def _is_memory_error(text: str) -> bool:
    return "MemoryError" in text and "OutOfMemoryError" not in text and _MEMORY_ERROR.match(text) is not None
