"""Memory of this process: readings for reports, and giving back what is only cached. Uses torch only if it is there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
NAMES = (
    *("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_reserved_bytes", "allocation_retries"),
    *("rss_bytes", "anonymous_bytes"),
)


def rss_bytes() -> int | None:
    """Resident bytes of this process, or None where /proc does not tell."""
    return _resident()[0]


def _resident() -> tuple[int | None, int | None]:
    """Resident bytes, and those of them that belong to no file and to no shared memory."""
    try:
        with open("/proc/self/statm", "rb") as file:
            resident, shared = (int(word) * _PAGE for word in file.read().split()[1:3])
    except (OSError, ValueError):
        return None, None
    return resident, resident - shared


def _cuda() -> Any:
    """torch.cuda if this process uses it already; asking must not create a context."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return cuda


def readings(*, reset_peak: bool = False) -> dict[str, int | None]:
    """Allocated, reserved and peak bytes (of both) on the current device and how often its allocator had to free its cache and
    try again (None without CUDA); resident bytes and the anonymous ones among them.

    The peak counts from when it was last reset. That changes what the program itself would be told, so it is done only for a
    program that leaves it to the agent.
    """
    found: dict[str, int | None] = dict.fromkeys(NAMES)
    found["rss_bytes"], found["anonymous_bytes"] = _resident()
    cuda = _cuda()
    if cuda is not None:
        found["allocated_bytes"] = cuda.memory_allocated()
        found["allocation_retries"] = _retries(cuda)
        found["reserved_bytes"] = cuda.memory_reserved()
        found["peak_bytes"] = cuda.max_memory_allocated()
        peak_reserved = getattr(cuda, "max_memory_reserved", None)
        if peak_reserved is not None:
            found["peak_reserved_bytes"] = peak_reserved()
        if reset_peak:
            cuda.reset_peak_memory_stats()
    return found


def _retries(cuda: Any) -> int | None:
    statistics = getattr(cuda, "memory_stats", None)
    return None if statistics is None else statistics().get("num_alloc_retries")


def at_failure() -> dict[str, Any]:
    """What is held at this moment: by this process, and on its device by everybody. None for what cannot be told."""
    found = dict(_held(), free_bytes=None, total_bytes=None, device_uuid=None)
    cuda = _cuda()
    if cuda is not None:
        # A device that has just failed may fail at these questions, too.
        with contextlib.suppress(Exception):
            found["free_bytes"], found["total_bytes"] = cuda.mem_get_info()
        with contextlib.suppress(Exception):
            found["device_uuid"] = "GPU-%s" % (cuda.get_device_properties(cuda.current_device()).uuid,)
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


def _held() -> dict[str, Any]:
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
