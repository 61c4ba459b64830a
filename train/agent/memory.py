"""Memory of this process: readings for reports, and giving back what is only cached. Uses torch only if it is there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from typing import Any

# Readings until it is looked anew which device is used most.
_LOOK_AGAIN = 50
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


def _statistics(cuda: Any, device: int) -> dict[str, Any]:
    """What the allocator knows of one device; nothing where an allocator of the program's own keeps no such numbers. Needs no
    context on the device, and one call tells all."""
    with contextlib.suppress(RuntimeError):
        return dict(cuda.memory_stats_as_nested_dict(device))
    return {}


def _bytes(statistics: dict[str, Any], name: str, which: str) -> int | None:
    number = statistics.get(name, {}).get("all", {}).get(which)
    return None if number is None else int(number)


class _Device:
    """The device that this process really uses: that on which it has reserved most, whatever torch's current one is."""

    def __init__(self) -> None:
        self.chosen: int | None = None
        """Counted as torch does; None until it was asked for."""
        self._looks_left = 0
        self._uuids: dict[int, str | None] = {}

    def index(self, cuda: Any) -> int:
        """Looked for again now and then only: a program that uses several has as many to ask."""
        self._looks_left -= 1
        if self.chosen is None or self._looks_left < 0:
            devices, current = range(cuda.device_count()), cuda.current_device()
            # Of equals, as where nothing is held yet, the current one.
            self.chosen = max(
                (current, *devices), key=lambda index: _bytes(_statistics(cuda, index), "reserved_bytes", "current") or 0
            )
            self._looks_left = _LOOK_AGAIN
        return self.chosen

    def uuid(self, cuda: Any, index: int) -> str | None:
        """As the driver writes it; None where this torch does not tell."""
        if index not in self._uuids:
            uuid = getattr(cuda.get_device_properties(index), "uuid", None)
            self._uuids[index] = None if uuid is None else "GPU-%s" % (uuid,)
        return self._uuids[index]


_device = _Device()


def readings(*, reset_peak: bool = False) -> dict[str, int | None]:
    """Allocated, reserved and peak bytes (of both) on the device that this process uses most, and how often its allocator had
    to free its cache and try again (None without CUDA); resident bytes and the anonymous ones among them.

    The peak counts from when it was last reset. That changes what the program itself would be told, so it is done only for a
    program that leaves it to the agent.
    """
    found: dict[str, int | None] = dict.fromkeys(NAMES)
    found["rss_bytes"], found["anonymous_bytes"] = _resident()
    cuda = _cuda()
    if cuda is not None:
        index = _device.index(cuda)
        told = _statistics(cuda, index)
        found["allocated_bytes"] = _bytes(told, "allocated_bytes", "current")
        found["reserved_bytes"] = _bytes(told, "reserved_bytes", "current")
        found["peak_bytes"] = _bytes(told, "allocated_bytes", "peak")
        found["peak_reserved_bytes"] = _bytes(told, "reserved_bytes", "peak")
        found["allocation_retries"] = told.get("num_alloc_retries")
        if reset_peak and told:
            cuda.reset_peak_memory_stats(index)
    return found


def device_uuid() -> str | None:
    """The GPU that the last `readings` spoke of; None without one."""
    cuda = _cuda()
    return None if cuda is None or _device.chosen is None else _device.uuid(cuda, _device.chosen)


def at_failure(named: int | None = None) -> dict[str, Any]:
    """What is held at this moment: by this process, and on its device by everybody. None for what cannot be told.

    `named`: the device that the error speaks of, counted as torch does; else it is the one that this process uses most.
    """
    names = ("allocated_bytes", "reserved_bytes", "rss_bytes", "free_bytes", "total_bytes", "device_uuid")
    found: dict[str, Any] = dict.fromkeys(names)
    found["rss_bytes"] = rss_bytes()
    cuda = _cuda()
    if cuda is None:
        return found
    # A device that has just failed may fail at these questions, too.
    with contextlib.suppress(Exception):
        index = named if named is not None and named < cuda.device_count() else _Device().index(cuda)
        told = _statistics(cuda, index)
        found["allocated_bytes"] = _bytes(told, "allocated_bytes", "current")
        found["reserved_bytes"] = _bytes(told, "reserved_bytes", "current")
        with contextlib.suppress(Exception):
            found["free_bytes"], found["total_bytes"] = cuda.mem_get_info(index)
        with contextlib.suppress(Exception):
            found["device_uuid"] = _device.uuid(cuda, index)
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
    """On all devices together: each gives its cache back."""
    cuda = _cuda()
    told = [] if cuda is None else [_statistics(cuda, index) for index in range(cuda.device_count())]
    return {
        "allocated_bytes": _sum(told, "allocated_bytes"),
        "reserved_bytes": _sum(told, "reserved_bytes"),
        "rss_bytes": rss_bytes(),
    }


def _sum(told: list[dict[str, Any]], name: str) -> int | None:
    known = [number for statistics in told if (number := _bytes(statistics, name, "current")) is not None]
    return sum(known) if known else None


def _trim_heap() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        # Not glibc: there is no such call, and nothing to give back.
        return
