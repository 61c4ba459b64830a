"""Allocation failures: telling them from other errors, and reporting those that end a program that knows nothing of memtop."""

from __future__ import annotations

import contextlib
import errno
import re
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import Agent

LONGEST_MESSAGE = 4000
"""Characters of an error's words that are kept: torch's longest ones are below 2000."""
_ALLOCATORS = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    # Of devices, and of what runs beside torch's allocator: the driver, MPS, Triton's loader of kernels, bitsandbytes.
    r"|\b(?:CUDA|HIP|XPU|NPU|MUSA|MLU|MPS backend)(?: driver)?(?: error:)? out of memory"
    r"|Triton Error \[\w+\]: out of memory"
    r"|Error out of memory at line \d+"
    # cuBLAS, cuDNN and their like; cuFFT has a form of its own, and so has AMD's side.
    r"|_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|blas_status_memory_error"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|RESOURCE_EXHAUSTED: .{0,80}?(?:[Oo]ut of memory|OOM when allocating|[Ff]ailed to allocate)"
    r"|std::bad_alloc"
)
"""What a RuntimeError says when an allocator, torch's own or a library's, has no memory left. Triton's "out of resource: shared
memory" is none of these: that is the size of a kernel, not memory."""
_SYSTEM = re.compile(r"Cannot allocate memory|\bnot enough memory resources\b")
"""The words of ENOMEM: a mapping, a fork or a buffer that the kernel refused."""
_COMMUNICATION = re.compile(r"Cuda failure (?:\d+ )?'out of memory'|\b(?:Hip|HIP) failure (?:\d+ )?'out of memory'")
"""NCCL's and RCCL's own words for it."""
_NOT_MEMORY = ("NCCL", "device-side assert triggered")
"""Errors of communication and of kernels come late and may quote another error's words. (Every CUDA error names assertions.)"""
_DEVICE = re.compile(r"\bGPU (\d{1,3})\b")
_MARK = "_memtop_told"
# Which part of an update the frames of a traceback belong to: file and function, "" for any.
_PHASES = (
    ("torch/optim/", "", "optimizer"),
    ("torch/_tensor.py", "backward", "backward"),
    ("torch/autograd/__init__.py", "backward", "backward"),
    ("torch/utils/data/", "", "data"),
    ("torch/serialization.py", "load", "load"),
    ("torch/nn/modules/module.py", "", "forward"),
)


def is_allocation_failure(error: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host, in a way that a smaller piece of work may not meet again."""
    if isinstance(error, MemoryError):
        return True
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = _words(error)
    return _ALLOCATORS.search(text) is not None and not any(words in text for words in _NOT_MEMORY)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether memory ran out at all: also where no smaller piece of work would help, as in a fork, a mapping or in NCCL."""
    if is_allocation_failure(error):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    text = _words(error)
    return _COMMUNICATION.search(text) is not None or _SYSTEM.search(text) is not None


def device_named(message: str) -> int | None:
    """The device that an allocator's words name, counted as torch does; None where they name none."""
    found = _DEVICE.search(message)
    return None if found is None else int(found.group(1))


def describe(error: BaseException) -> dict[str, Any]:
    """The error in words: its class and its message, cut to LONGEST_MESSAGE characters."""
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else "%s.%s" % (kind.__module__, kind.__name__)
    return {"error": name, "message": _words(error)[:LONGEST_MESSAGE]}


def first_told(error: BaseException) -> bool:
    """True at the first call for this error: it may pass several places that would report it."""
    if getattr(error, _MARK, False):
        return False
    with contextlib.suppress(Exception):
        setattr(error, _MARK, True)
    return True


def watch(agent: Agent) -> None:
    """Report an allocation failure that ends the program or one of its threads; whoever listened before is called as well."""
    before, before_in_threads = sys.excepthook, threading.excepthook

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _note(agent, error, trace, survived=False)
        before(kind, error, trace)

    def on_thread_error(args: Any) -> None:
        # The program may do without that thread, or be about to end: who reads it sees which.
        _note(agent, args.exc_value, args.exc_traceback, survived=None)
        before_in_threads(args)

    sys.excepthook = on_error
    threading.excepthook = on_thread_error


def _note(agent: Agent, error: BaseException | None, trace: TracebackType | None, *, survived: bool | None) -> None:
    # A guest must not break its host's last words, whatever goes wrong.
    with contextlib.suppress(Exception):
        if error is not None and is_lack_of_memory(error):
            agent.oom(error, update=agent.update, phase=_phase(trace), survived=survived, batch=None, accumulation=None)


def _phase(trace: TracebackType | None) -> str:
    """What the program was doing, by the frames of torch that it was in; modules run again within a backward pass are part
    of that."""
    inside = "unknown"
    while trace is not None:
        code = trace.tb_frame.f_code
        phase = next((phase for file, name, phase in _PHASES if file in code.co_filename and name in ("", code.co_name)), None)
        if phase not in (None, "forward"):
            return str(phase)
        inside = phase or inside
        trace = trace.tb_next
    return inside


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error of any library: what its str() raises is not for us to know
        return ""
