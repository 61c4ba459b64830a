"""This process's memory: readings and freeing caches. Uses torch only if it is loaded."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
from typing import Any

# Readings between two checks which device is used most.
_CHECK_EVERY = 50
_HOST_SECONDS = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")
NAMES = (
    *("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_reserved_bytes", "allocation_retries"),
    *("rss_bytes", "anonymous_bytes"),
)


def rss_bytes() -> int | None:
    """Resident bytes of this process; None if /proc does not provide them."""
    return _resident()[0]


def _resident() -> tuple[int | None, int | None]:
    """Resident bytes, and those among them that belong to neither files nor shared memory."""
    try:
        with open("/proc/self/statm", "rb") as file:
            resident, shared = (int(word) * _PAGE for word in file.read().split()[1:3])
    except (OSError, ValueError):
        return None, None
    return resident, resident - shared


def cuda_in_use() -> Any:
    """torch.cuda if this process already uses it. This must not create a context."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return cuda


def _statistics(cuda: Any, device: int) -> dict[str, Any]:
    """The allocator's statistics of a device, in one call; empty if a custom allocator has none."""
    with contextlib.suppress(RuntimeError):
        return dict(cuda.memory_stats_as_nested_dict(device))
    return {}


def _bytes(statistics: dict[str, Any], name: str, which: str) -> int | None:
    number = statistics.get(name, {}).get("all", {}).get(which)
    return None if number is None else int(number)


class _Device:
    """The device on which this process has reserved most, not necessarily torch's current one."""

    def __init__(self) -> None:
        self.chosen: int | None = None
        """The index in torch; None before the first reading."""
        self._until_check = 0
        self._uuids: dict[int, str | None] = {}

    def index(self, cuda: Any) -> int:
        """The index in torch. Only now and then checked, since that reads all devices."""
        self._until_check -= 1
        if self.chosen is None or self._until_check < 0:
            devices, current = range(cuda.device_count()), cuda.current_device()
            # Of equals, such as before any allocation, the current one.
            self.chosen = max(
                (current, *devices), key=lambda index: _bytes(_statistics(cuda, index), "reserved_bytes", "current") or 0
            )
            self._until_check = _CHECK_EVERY
        return self.chosen

    def uuid(self, cuda: Any, index: int) -> str | None:
        """The UUID in the driver's notation; None if this torch does not provide it."""
        if index not in self._uuids:
            uuid = getattr(cuda.get_device_properties(index), "uuid", None)
            self._uuids[index] = None if uuid is None else "GPU-%s" % (uuid,)
        return self._uuids[index]


_device = _Device()


class _Host:
    """The resident bytes. Only now and then read, since that takes as long as all other work of the
    agent in an update."""

    def __init__(self) -> None:
        self._found: tuple[int | None, int | None] = (None, None)
        self._until = 0.0

    def resident(self) -> tuple[int | None, int | None]:
        """As `_resident`, at most `_HOST_SECONDS` old."""
        now = time.monotonic()
        if now >= self._until:
            self._found, self._until = _resident(), now + _HOST_SECONDS
        return self._found


_host = _Host()


def readings(*, reset_peak: bool = False) -> dict[str, int | None]:
    """Memory of the most used device (None without CUDA) and of the process, in bytes.

    Of the device: allocated, reserved, the peaks of both, and the allocator's number of retries. Of
    the process: resident and anonymous bytes.

    Peaks count from the last reset. A reset changes what the program itself reads, so only a
    program that leaves its peaks to the agent gets `reset_peak`.
    """
    found: dict[str, int | None] = dict.fromkeys(NAMES)
    found["rss_bytes"], found["anonymous_bytes"] = _host.resident()
    cuda = cuda_in_use()
    if cuda is not None:
        index = _device.index(cuda)
        statistics = _statistics(cuda, index)
        found["allocated_bytes"] = _bytes(statistics, "allocated_bytes", "current")
        found["reserved_bytes"] = _bytes(statistics, "reserved_bytes", "current")
        found["peak_bytes"] = _bytes(statistics, "allocated_bytes", "peak")
        found["peak_reserved_bytes"] = _bytes(statistics, "reserved_bytes", "peak")
        found["allocation_retries"] = statistics.get("num_alloc_retries")
        if reset_peak and statistics:
            cuda.reset_peak_memory_stats(index)
    return found


def device_uuid() -> str | None:
    """The UUID of the GPU of the last `readings`; None without one."""
    cuda = cuda_in_use()
    return None if cuda is None or _device.chosen is None else _device.uuid(cuda, _device.chosen)


def at_failure(named: int | None = None) -> dict[str, Any]:
    """The memory held now by this process and by all processes on its device; None if unknown.

    `named`: the device in the error, as torch counts. Without it, the device that this process uses
    most.
    """
    names = ("allocated_bytes", "reserved_bytes", "rss_bytes", "free_bytes", "total_bytes", "device_uuid")
    found: dict[str, Any] = dict.fromkeys(names)
    found["rss_bytes"] = rss_bytes()
    cuda = cuda_in_use()
    if cuda is None:
        return found
    # A device that has just failed may fail here, too.
    with contextlib.suppress(Exception):
        index = named if named is not None and named < cuda.device_count() else _Device().index(cuda)
        statistics = _statistics(cuda, index)
        found["allocated_bytes"] = _bytes(statistics, "allocated_bytes", "current")
        found["reserved_bytes"] = _bytes(statistics, "reserved_bytes", "current")
        with contextlib.suppress(Exception):
            found["free_bytes"], found["total_bytes"] = cuda.mem_get_info(index)
        with contextlib.suppress(Exception):
            found["device_uuid"] = _device.uuid(cuda, index)
    return found


def free_cache() -> dict[str, Any]:
    """Collect garbage, empty torch's cache, trim the heap; return bytes before, after and freed."""
    before = _held()
    gc.collect()
    cuda = cuda_in_use()
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
    """The sums over all devices, because each of them frees its cache."""
    cuda = cuda_in_use()
    statistics = [] if cuda is None else [_statistics(cuda, index) for index in range(cuda.device_count())]
    return {
        "allocated_bytes": _sum(statistics, "allocated_bytes"),
        "reserved_bytes": _sum(statistics, "reserved_bytes"),
        "rss_bytes": rss_bytes(),
    }


def _sum(devices: list[dict[str, Any]], name: str) -> int | None:
    known = [number for device in devices if (number := _bytes(device, name, "current")) is not None]
    return sum(known) if known else None


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next allocation; `free_cache` returns it.

    By default it returns blocks of the size of activations to the kernel when they are freed. The
    kernel then has to clear every page again: 3 % of the time of a small model on a CPU.
    """
    if os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}:
        return  # The user's own choice.
    with contextlib.suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        library.mallopt(_M_TRIM_THRESHOLD, -1)


def _trim_heap() -> None:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers (malloc.h). Other C libraries have neither these functions nor the default."""
_LARGEST_THRESHOLD = 32 << 20
"""The largest that glibc takes. Larger blocks are returned to the kernel at once."""
