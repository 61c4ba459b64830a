"""Allocation failures: telling them from other errors, and reporting those that end a program that knows nothing of memtop."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import Agent

LONGEST_MESSAGE = 4000
"""Characters of an error's words that are kept: torch's longest ones are below 2000."""
_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "HIP out of memory",
    "HIP error: out of memory",
    "XPU out of memory",
    "_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""What a RuntimeError about memory says: of the allocators, and of libraries that allocate beside them (cuBLAS, cuDNN)."""
_NOT_MEMORY = ("NCCL", "device-side assert triggered")
"""Errors of communication and of kernels come late and may quote another error's words. (Every CUDA error names assertions.)"""
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
    """Whether memory ran out, on a device or on the host: an error that a smaller piece of work may not meet again."""
    if isinstance(error, MemoryError):
        return True
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = _words(error)
    return any(words in text for words in _WORDS) and not any(words in text for words in _NOT_MEMORY)


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
        _note(agent, error, trace)
        before(kind, error, trace)

    def on_thread_error(args: Any) -> None:
        _note(agent, args.exc_value, args.exc_traceback)
        before_in_threads(args)

    sys.excepthook = on_error
    threading.excepthook = on_thread_error


def _note(agent: Agent, error: BaseException | None, trace: TracebackType | None) -> None:
    # A guest must not break its host's last words, whatever goes wrong.
    with contextlib.suppress(Exception):
        if error is not None and is_allocation_failure(error):
            agent.oom(error, update=agent.update, phase=_phase(trace), survived=False, batch=None, accumulation=None)


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
