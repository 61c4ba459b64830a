"""Recognises allocation failures, and reports those that end a program that does not use memtop."""

from __future__ import annotations

import contextlib
import errno
import re
import sys
import threading
from types import TracebackType
from typing import Any, Callable

LONGEST_MESSAGE = 4000
"""Characters of an error's text that are kept; torch's longest are below 2000."""
_ALLOCATORS = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    # Devices, and what allocates without torch's allocator: the driver, MPS, Triton's kernel
    # loader, bitsandbytes.
    r"|\b(?:CUDA|HIP|XPU|NPU|MUSA|MLU|MPS backend)(?: driver)?(?: error:)? out of memory"
    r"|Triton Error \[\w+\]: out of memory"
    r"|Error out of memory at line \d+"
    # cuBLAS, cuDNN and similar libraries, then cuFFT and AMD's libraries, which use other forms.
    r"|_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|blas_status_memory_error"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|RESOURCE_EXHAUSTED: .{0,80}?(?:[Oo]ut of memory|OOM when allocating|[Ff]ailed to allocate)"
    r"|std::bad_alloc"
)
"""The text of a RuntimeError when an allocator of torch or a library has no memory left.

Triton's "out of resource: shared memory" is not among them: it is about a kernel's size.
"""
_SYSTEM = re.compile(r"Cannot allocate memory|\bnot enough memory resources\b")
"""The text of ENOMEM: the kernel refused a mapping, a fork or a buffer."""
_COMMUNICATION = re.compile(r"Cuda failure (?:\d+ )?'out of memory'|\b(?:Hip|HIP) failure (?:\d+ )?'out of memory'")
"""The text of NCCL and RCCL."""
_NOT_MEMORY = ("NCCL", "device-side assert triggered")
"""These errors come late and may quote another one. (Every CUDA error mentions assertions.)"""
_DEVICE = re.compile(r"\bGPU (\d{1,3})\b")
_MARK = "_memtop_reported"
# The part of an update that a traceback's frame belongs to, by file and function ("" for any).
_PHASES = (
    ("torch/optim/", "", "optimizer"),
    ("torch/_tensor.py", "backward", "backward"),
    ("torch/autograd/__init__.py", "backward", "backward"),
    ("torch/utils/data/", "", "data"),
    ("torch/serialization.py", "load", "load"),
    ("torch/nn/modules/module.py", "", "forward"),
)


def is_allocation_failure(error: BaseException) -> bool:
    """Whether memory ran out, on a device or the host, so that smaller work may succeed."""
    if isinstance(error, MemoryError):
        return True
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = _text(error)
    return _ALLOCATORS.search(text) is not None and not any(words in text for words in _NOT_MEMORY)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether memory ran out at all, also where smaller work does not help: fork, mapping, NCCL."""
    if is_allocation_failure(error):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    text = _text(error)
    return _COMMUNICATION.search(text) is not None or _SYSTEM.search(text) is not None


def is_of_host(error: BaseException) -> bool:
    """Whether it was the host's memory that ran out, as far as the error says."""
    return isinstance(error, (MemoryError, OSError)) or "CPUAllocator" in _text(error) or "bad_alloc" in _text(error)


def device_named(message: str) -> int | None:
    """The device index in an allocator's message, as torch counts; None if it names none."""
    found = _DEVICE.search(message)
    return None if found is None else int(found.group(1))


def describe(error: BaseException) -> dict[str, Any]:
    """The error's class and its message, cut to LONGEST_MESSAGE characters."""
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else "%s.%s" % (kind.__module__, kind.__name__)
    return {"error": name, "message": _text(error)[:LONGEST_MESSAGE]}


def first_reported(error: BaseException) -> bool:
    """True at the first call for this error, which may pass several places that report it."""
    if getattr(error, _MARK, False):
        return False
    with contextlib.suppress(Exception):
        setattr(error, _MARK, True)
    return True


def watch(on_failure: Callable[[BaseException, str, bool | None], None]) -> None:
    """Call `on_failure(error, phase, survived)` when lack of memory ends the program or a thread.

    The hooks that were installed before are called as well.
    """
    before, before_in_threads = sys.excepthook, threading.excepthook

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note(error, trace, survived=False)
        before(kind, error, trace)

    def on_thread_error(args: Any) -> None:
        # The program may continue without the thread, or be about to end.
        note(args.exc_value, args.exc_traceback, survived=None)
        before_in_threads(args)

    def note(error: BaseException | None, trace: TracebackType | None, *, survived: bool | None) -> None:
        # The agent must not disturb the program's own error handling.
        with contextlib.suppress(Exception):
            if error is not None and is_lack_of_memory(error):
                on_failure(error, _phase(trace), survived)

    sys.excepthook = on_error
    threading.excepthook = on_thread_error


def _phase(trace: TracebackType | None) -> str:
    """What the program was doing, by torch's frames.

    Modules that run again in a backward pass belong to the backward pass.
    """
    inside = "unknown"
    while trace is not None:
        code = trace.tb_frame.f_code
        phase = next((phase for file, name, phase in _PHASES if file in code.co_filename and name in ("", code.co_name)), None)
        if phase not in (None, "forward"):
            return str(phase)
        inside = phase or inside
        trace = trace.tb_next
    return inside


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error class of any library may fail in its str()
        return ""
