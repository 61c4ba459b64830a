"""Memory of a GPU or a MIG instance, and of GPUs that have none of their own and share the machine's RAM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pynvml

from memtop.supervisor.monitor.bands import band_of
from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.ask import NOT_TOLD, Asker, GpuGone, Untold, call_first
from memtop.supervisor.monitor.values import GpuProcess

MEMORY_FIELDS = ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "used_fraction")
_NOT_AVAILABLE = 2**64 - 1
_VERSION_MISMATCH = 25
_ALL_OF_RAM = 0.9
"""A GPU without memory of its own may report (nearly) the machine's RAM as its total."""
_NO_RESERVE = "the GPU shares the machine's RAM: the driver tells no reserve of its own there"
_RESERVE_WITHIN = "this driver only tells used memory with its own reserve included"

# Words in the names of GPUs that are known to share the machine's RAM.
_INTEGRATED = frozenset({"GB10", "Thor", "Orin", "Xavier", "Tegra"})
# For the others: what only a card with memory of its own has, a memory bus, a memory clock, a window into that memory.
# A discrete card that told neither its memory nor one of these three would be taken for an integrated one: nothing that
# is left would tell them apart. (The addressing mode would not: Grace Hopper has ATS as GB10 has, and its own HBM.)
_OWN_MEMORY = (
    (("nvmlDeviceGetMemoryBusWidth",), ()),
    (("nvmlDeviceGetMaxClockInfo",), (pynvml.NVML_CLOCK_MEM,)),
    (("nvmlDeviceGetBAR1MemoryInfo",), ()),
)


class Pool:
    """The machine's RAM, for GPUs that share it. Reads /proc/meminfo only for them."""

    def __init__(self, proc_root: Path) -> None:
        self._file = proc_root / "meminfo"

    def read(self) -> tuple[int, int] | str:
        """Total and available bytes, or why they are not known."""
        try:
            found = dict(line.split(":", 1) for line in self._file.read_text().splitlines() if line.startswith("Mem"))
            return int(found["MemTotal"].split()[0]) * 1024, int(found["MemAvailable"].split()[0]) * 1024
        except (OSError, ValueError, KeyError, IndexError) as error:
            return f"{self._file} cannot be read: {error}"


class MemoryReader:
    """Reads the memory of one handle: version 2 of the call where the driver has it, version 1 else."""

    def __init__(self, asker: Asker, pool: Pool | None) -> None:
        """`pool` is None where sharing RAM is out of the question (MIG instances)."""
        self._asker = asker
        self._pool = pool
        self._version_2 = True
        self._version_2_works = False
        self._own: bool | None = None
        self.unified = False
        """True once it is clear that this GPU shares the machine's RAM; `read` gives nothing then, `shared` does."""

    def read(self) -> dict[str, Any]:
        """Bytes, fraction and band by name of GpuSample's field. Raises GpuGone."""
        if self.unified or self._asker.never("total_bytes"):
            return {}
        try:
            info, reserved = self._info()
        except pynvml.NVMLError as error:
            return self._refused(error.value)
        if info.total in (0, _NOT_AVAILABLE):
            if not self._shares_ram():
                # Said of cards that told it a second before, and tell it again: no reason to stop asking.
                reason = f"the driver reported {info.total} bytes of memory" if info.total == 0 else NOT_TOLD
                self._asker.note(MEMORY_FIELDS, reason)
            return {}
        if self._own is None and self._as_large_as_ram(info.total) and self._shares_ram():
            return {}
        return self._values(info, reserved)

    def shared(self, processes: tuple[GpuProcess, ...], known: bool) -> dict[str, Any]:
        """The one pool of a GPU that shares the machine's RAM: what GPU processes hold, what the rest does, what is free.

        `known` says whether the list of processes could be read.
        """
        pool = self._pool.read() if self._pool is not None else "the machine's RAM is not read here"
        self._asker.note(("reserved_bytes",), _NO_RESERVE)
        if isinstance(pool, str):
            self._asker.note(("total_bytes", "used_bytes", "free_bytes", "used_fraction", "other_pool_bytes"), pool)
            return {"unified": True}
        total, available = pool
        fraction = max(0.0, (total - available) / total)  # some containers' meminfo has more available than there is
        self._asker.clear(("total_bytes", "free_bytes", "used_fraction"))
        values = {
            "unified": True,
            "total_bytes": total,
            "free_bytes": available,
            "used_fraction": fraction,
            "band": band_of(fraction),
        }
        held = [row.used_bytes for row in processes]
        if not known or None in held:
            reason = "the driver does not tell the memory of every process on this GPU"
            self._asker.note(("used_bytes", "other_pool_bytes"), reason)
            return values
        self._asker.clear(("used_bytes", "other_pool_bytes"))
        used = sum(number for number in held if number is not None)
        # The process lists are up to 2 s older than the pool: the rest can come out below nothing for a moment.
        return values | {"used_bytes": used, "other_pool_bytes": max(0, total - available - used)}

    def _info(self) -> tuple[Any, int | None]:
        """NVML's memory structure, and the reserved bytes where the driver tells them apart (version 2)."""
        if self._version_2:
            try:
                info = pynvml.nvmlDeviceGetMemoryInfo(self._asker.handle, version=pynvml.nvmlMemory_v2)
                self._version_2_works = True
                return info, info.reserved
            except pynvml.NVMLError as error:
                too_new = error.value in (codes.FUNCTION_NOT_FOUND, codes.INVALID_ARGUMENT, _VERSION_MISMATCH)
                if self._version_2_works or not too_new:
                    raise
                self._version_2 = False
        return pynvml.nvmlDeviceGetMemoryInfo(self._asker.handle), None

    def _values(self, info: Any, reserved: int | None) -> dict[str, Any]:
        self._asker.told(MEMORY_FIELDS)
        if reserved is None:
            self._asker.note(("reserved_bytes",), _RESERVE_WITHIN)
        if info.free > info.total or info.used > info.total:
            # As while a driver comes and goes: one look later the numbers fit again.
            self._asker.note(MEMORY_FIELDS, f"the driver reported {info.used} used and {info.free} free of {info.total} bytes")
            return {}
        fraction = (info.total - info.free) / info.total
        return {
            "total_bytes": info.total,
            "used_bytes": info.used,
            "free_bytes": info.free,
            "reserved_bytes": reserved,
            "used_fraction": fraction,
            "band": band_of(fraction),
        }

    def _refused(self, code: int) -> dict[str, Any]:
        if code in codes.GPU_GONE_ON_MEMORY:
            raise GpuGone(code)
        if code == codes.NOT_SUPPORTED and self._shares_ram():
            return {}
        if code == codes.NOT_SUPPORTED and self._pool is not None and self._own is None:
            # Whether it has memory of its own could not be settled just now: ask both again at the next tick.
            self._asker.note(MEMORY_FIELDS, codes.words(code))
            return {}
        self._asker.failed(MEMORY_FIELDS, code)
        return {}

    def _as_large_as_ram(self, total: int) -> bool:
        pool = self._pool.read() if self._pool is not None else "none"
        if isinstance(pool, str) or total < _ALL_OF_RAM * pool[0]:
            self._own = True
            return False
        return True

    def _shares_ram(self) -> bool:
        """Settle, as far as the driver lets us, whether this GPU has memory of its own."""
        if self._pool is None:
            return False
        if self._own is None:
            self._own = _has_own_memory(self._asker.handle)
        self.unified = self._own is False
        return self.unified


def _has_own_memory(handle: Any) -> bool | None:
    """None where the driver could not say just now."""
    undecided = False
    try:
        if _INTEGRATED.intersection(re.split(r"[^A-Za-z0-9]+", call_first(("nvmlDeviceGetName",), handle))):
            return False
    except pynvml.NVMLError as error:
        undecided = error.value not in codes.NEVER_AGAIN
    except Untold:
        undecided = False  # a name that is no text is none of those above
    for names, arguments in _OWN_MEMORY:
        try:
            answer = call_first(names, handle, *arguments)
        except pynvml.NVMLError as error:
            undecided = undecided or error.value not in (*codes.NEVER_AGAIN, codes.INVALID_ARGUMENT)
            continue
        if getattr(answer, "bar1Total", answer) > 0:
            return True
    return None if undecided else False
