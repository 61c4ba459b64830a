"""Memory of this process: readings for reports, and giving back what is only cached. Uses torch only if it is there."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
NAMES = ("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_reserved_bytes", "rss_bytes")


def rss_bytes() -> int | None:
    """Resident bytes of this process, or None where /proc does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


def _cuda() -> Any:
    """torch.cuda if this process uses it already; asking must not create a context."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return cuda


def readings(*, reset_peak: bool = False) -> dict[str, int | None]:
    """Allocated, reserved and peak bytes (of both) on the current device (None without CUDA), and RSS.

    The peak counts from when it was last reset. That changes what the program itself would be told, so it is done only for a
    program that leaves it to the agent.
    """
    found: dict[str, int | None] = dict.fromkeys(NAMES)
    found["rss_bytes"] = rss_bytes()
    cuda = _cuda()
    if cuda is not None:
        found["allocated_bytes"] = cuda.memory_allocated()
        found["reserved_bytes"] = cuda.memory_reserved()
        found["peak_bytes"] = cuda.max_memory_allocated()
        peak_reserved = getattr(cuda, "max_memory_reserved", None)
        if peak_reserved is not None:
            found["peak_reserved_bytes"] = peak_reserved()
        if reset_peak:
            cuda.reset_peak_memory_stats()
    return found


def free_cache() -> dict[str, Any]:
    """Collect garbage, empty torch's cache, trim the C heap; bytes before and after, and what was returned."""
    before = _held()
    gc.collect()
    cuda = _cuda()
    if cuda is not None:
        cuda.empty_cache()
    _trim_heap()
    after = _held()
    result: dict[str, Any] = {"before": before, "after": after}
    for name, key in (("returned_device_bytes", "reserved_bytes"), ("returned_host_bytes", "rss_bytes")):
        held, kept = before[key], after[key]
        result[name] = None if held is None or kept is None else max(0, held - kept)
    return result


def _held() -> dict[str, int | None]:
    cuda = _cuda()
    return {
        "allocated_bytes": None if cuda is None else cuda.memory_allocated(),
        "reserved_bytes": None if cuda is None else cuda.memory_reserved(),
        "rss_bytes": rss_bytes(),
    }


def _trim_heap() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        # Not glibc: there is no such call, and nothing to give back.
        return
