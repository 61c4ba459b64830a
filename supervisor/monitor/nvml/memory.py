"""Reads the memory of a GPU, of GPUs that share the machine's RAM, and of MIG instances.
The driver reports only memory and processes of an instance."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.processes import ListRow, ProcessReader
from memtop.supervisor.monitor.nvml.query import NOT_REPORTED, GpuGone, NoValue, Query, call_first
from memtop.supervisor.monitor.values import GpuProcess, MigInstance

MEMORY_FIELDS = ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "used_fraction")
_NOT_AVAILABLE = 2**64 - 1
_VERSION_MISMATCH = 25
_ALL_OF_RAM = 0.9
"""A GPU without its own memory may report (nearly) all of the machine's RAM as its total."""
_NO_RESERVE = "the GPU shares the machine's RAM: the driver reports no reserve there"
_RESERVE_WITHIN = "this driver reports its own reserve only as part of the used memory"

# Words in the names of GPUs that share the machine's RAM.
_INTEGRATED = frozenset({"GB10", "Thor", "Orin", "Xavier", "Tegra"})
# For other GPUs: only a card with its own memory has a memory bus, a memory clock and a window into
# that memory (BAR1). A discrete card that reports neither its memory nor one of these three looks
# like an integrated one; nothing else tells them apart. (The addressing mode does not: Grace Hopper
# has ATS, as GB10 has, but its own HBM.)
_OWN_MEMORY = (
    (("nvmlDeviceGetMemoryBusWidth",), ()),
    (("nvmlDeviceGetMaxClockInfo",), (pynvml.NVML_CLOCK_MEM,)),
    (("nvmlDeviceGetBAR1MemoryInfo",), ()),
)


class HostRam:
    """The machine's RAM, for GPUs that share it. Reads /proc/meminfo only for them."""

    def __init__(self, proc_root: Path) -> None:
        self._file = proc_root / "meminfo"

    def read(self) -> tuple[int, int] | str:
        """Total and available bytes, or the reason why they are unknown."""
        try:
            found = dict(line.split(":", 1) for line in self._file.read_text().splitlines() if line.startswith("Mem"))
            return int(found["MemTotal"].split()[0]) * 1024, int(found["MemAvailable"].split()[0]) * 1024
        except (OSError, ValueError, KeyError, IndexError) as error:
            return f"cannot read {self._file}: {error}"


class MemoryReader:
    """Reads the memory of one handle, with version 2 of NVML's call if the driver has it, else
    version 1."""

    def __init__(self, query: Query, pool: HostRam | None) -> None:
        """`pool` is None for handles that cannot share RAM (MIG instances)."""
        self._query = query
        self._pool = pool
        self._version_2 = True
        self._version_2_works = False
        self._own: bool | None = None
        self.unified = False
        """True once it is known that this GPU shares the machine's RAM. Then use `shared` instead
        of `read`."""

    def read(self) -> dict[str, Any]:
        """Bytes and fraction, by field name of GpuSample. Raises GpuGone."""
        if self.unified or self._query.is_unsupported("total_bytes"):
            return {}
        try:
            info, reserved = self._info()
        except pynvml.NVMLError as error:
            return self._refused(error.value)
        if info.total in (0, _NOT_AVAILABLE):
            if not self._shares_ram():
                # Cards sometimes report this for a moment, so it is no reason to stop asking.
                reason = f"the driver reported {info.total} bytes of memory" if info.total == 0 else NOT_REPORTED
                self._query.note(MEMORY_FIELDS, reason)
            return {}
        if self._own is None and self._as_large_as_ram(info.total) and self._shares_ram():
            return {}
        return self._values(info, reserved)

    def shared(self, processes: tuple[GpuProcess, ...], known: bool) -> dict[str, Any]:
        """The memory of a GPU that shares the machine's RAM: held by GPU processes, held by the
        rest of the machine, free.

        `known`: the list of processes could be read.
        """
        pool = self._pool.read() if self._pool is not None else "the machine's RAM is not read here"
        self._query.note(("reserved_bytes",), _NO_RESERVE)
        if isinstance(pool, str):
            self._query.note(("total_bytes", "used_bytes", "free_bytes", "used_fraction", "other_pool_bytes"), pool)
            return {"unified": True}
        total, available = pool
        # in some containers, meminfo reports more available than total memory
        fraction = max(0.0, (total - available) / total)
        self._query.clear(("total_bytes", "free_bytes", "used_fraction"))
        values = {
            "unified": True,
            "total_bytes": total,
            "free_bytes": available,
            "used_fraction": fraction,
        }
        held = [row.used_bytes for row in processes]
        if not known or None in held:
            reason = "the driver does not report the memory of every process on this GPU"
            self._query.note(("used_bytes", "other_pool_bytes"), reason)
            return values
        self._query.clear(("used_bytes", "other_pool_bytes"))
        used = sum(number for number in held if number is not None)
        # The process lists are up to 2 s older than the pool, so the difference can be negative for
        # a moment.
        return values | {"used_bytes": used, "other_pool_bytes": max(0, total - available - used)}

    def _info(self) -> tuple[Any, int | None]:
        """NVML's memory structure, and the reserved bytes if the driver reports them separately
        (version 2)."""
        if self._version_2:
            try:
                info = pynvml.nvmlDeviceGetMemoryInfo(self._query.handle, version=pynvml.nvmlMemory_v2)
                self._version_2_works = True
                return info, info.reserved
            except pynvml.NVMLError as error:
                too_new = error.value in (codes.FUNCTION_NOT_FOUND, codes.INVALID_ARGUMENT, _VERSION_MISMATCH)
                if self._version_2_works or not too_new:
                    raise
                self._version_2 = False
        return pynvml.nvmlDeviceGetMemoryInfo(self._query.handle), None

    def _values(self, info: Any, reserved: int | None) -> dict[str, Any]:
        self._query.reported(MEMORY_FIELDS)
        if reserved is None:
            self._query.note(("reserved_bytes",), _RESERVE_WITHIN)
        if info.free > info.total or info.used > info.total:
            # This happens while the driver is loaded or unloaded. The next reading is consistent
            # again.
            self._query.note(MEMORY_FIELDS, f"the driver reported {info.used} used and {info.free} free of {info.total} bytes")
            return {}
        fraction = (info.total - info.free) / info.total
        return {
            "total_bytes": info.total,
            "used_bytes": info.used,
            "free_bytes": info.free,
            "reserved_bytes": reserved,
            "used_fraction": fraction,
        }

    def _refused(self, code: int) -> dict[str, Any]:
        if code in codes.GPU_GONE_ON_MEMORY:
            raise GpuGone(code)
        if code == codes.NOT_SUPPORTED and self._shares_ram():
            return {}
        if code == codes.NOT_SUPPORTED and self._pool is not None and self._own is None:
            # It is not known yet whether the GPU has its own memory: read both again at the next
            # sample.
            self._query.note(MEMORY_FIELDS, codes.words(code))
            return {}
        self._query.failed(MEMORY_FIELDS, code)
        return {}

    def _as_large_as_ram(self, total: int) -> bool:
        pool = self._pool.read() if self._pool is not None else "none"
        if isinstance(pool, str) or total < _ALL_OF_RAM * pool[0]:
            self._own = True
            return False
        return True

    def _shares_ram(self) -> bool:
        """Find out, as far as the driver answers, whether this GPU shares the machine's RAM."""
        if self._pool is None:
            return False
        if self._own is None:
            self._own = _has_own_memory(self._query.handle)
        self.unified = self._own is False
        return self.unified


def _has_own_memory(handle: Any) -> bool | None:
    """Whether the GPU has its own memory. None if the driver does not answer now."""
    undecided = False
    try:
        if _INTEGRATED.intersection(re.split(r"[^A-Za-z0-9]+", call_first(("nvmlDeviceGetName",), handle))):
            return False
    except pynvml.NVMLError as error:
        undecided = error.value not in codes.NEVER_AGAIN
    except NoValue:
        undecided = False  # a name that cannot be decoded is none of the integrated GPUs
    for names, arguments in _OWN_MEMORY:
        try:
            answer = call_first(names, handle, *arguments)
        except pynvml.NVMLError as error:
            undecided = undecided or error.value not in (*codes.NEVER_AGAIN, codes.INVALID_ARGUMENT)
            continue
        if getattr(answer, "bar1Total", answer) > 0:
            return True
    return None if undecided else False


_NO_INSTANCE = frozenset({codes.NOT_FOUND, codes.INVALID_ARGUMENT})
_SLOTS = "slots for instances"
_ONE_HANDLE_ENDS = frozenset({codes.INVALID_ARGUMENT, codes.NOT_FOUND, codes.UNINITIALIZED})


class Instance:
    """One instance and its handle.

    The driver may reuse the handle once the instance is destroyed.
    """

    def __init__(self, position: int, handle: Any) -> None:
        self._query = Query(handle)
        self._memory = MemoryReader(self._query, None)
        self.position = position
        self.processes = ProcessReader(handle)
        ask = self._query.ask
        self.uuid = ask("uuid", "nvmlDeviceGetUUID")
        name = ask("name", "nvmlDeviceGetName")
        self.gpu_instance = ask("gpu_instance", "nvmlDeviceGetGpuInstanceId")
        self.compute_instance = ask("compute_instance", "nvmlDeviceGetComputeInstanceId")
        self._fixed = {
            "position": position,
            "uuid": self.uuid,
            "name": None if name is None else name.rpartition("MIG ")[2],
            "gpu_instance": self.gpu_instance,
            "compute_instance": self.compute_instance,
        }

    def sample(self) -> MigInstance:
        """Its memory now. Raises GpuGone if the handle cannot be used any more."""
        memory = self._memory.read()
        return MigInstance(**self._fixed, **memory, unknown=self._query.reasons())

    def failed(self, error: str) -> MigInstance:
        """The sample of an instance that cannot be read."""
        return MigInstance(**self._fixed, error=error, unknown=dict.fromkeys(MEMORY_FIELDS, "the instance cannot be read"))


class Mig:
    """The instances of one GPU.

    `mode` is whether MIG is on, None if the driver does not report it.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._query = Query(handle)
        self._instances: list[Instance] = []
        self._whole = ProcessReader(handle)
        self._why_incomplete: str | None = None
        self.mode: bool | None = None
        self.stale = False
        """An instance has gone: enumerate before the next sample."""
        self.enumerated = False

    @property
    def mode_reason(self) -> str | None:
        """Why `mode` is None."""
        return self._query.reasons().get("mig_mode")

    def enumerate(self) -> None:
        """Read the mode and look for an instance in every slot; there may be gaps.

        Raises GpuGone.
        """
        self.stale = False
        self.enumerated = True
        mode = self._query.ask("mig_mode", "nvmlDeviceGetMigMode")
        self.mode = None if mode is None else bool(mode[0])
        self._instances = []
        self._why_incomplete = None
        if not self.mode:
            return
        slots = self._query.ask(_SLOTS, "nvmlDeviceGetMaxMigDeviceCount")
        self._why_incomplete = None if slots is not None else self._query.reasons()[_SLOTS]
        for position in range(slots or 0):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, position)
                self._instances.append(Instance(position, handle))
            except pynvml.NVMLError as error:
                if error.value in codes.GPU_GONE:
                    raise GpuGone(error.value) from error
                if error.value not in _NO_INSTANCE:
                    # The error concerns this slot only. The others are read, and this one again
                    # next time.
                    self._why_incomplete = codes.words(error.value)
            except GpuGone:
                # The instance was destroyed between the two calls. If the whole GPU is gone, its
                # own calls report it.
                self.stale = True

    def sample(self) -> tuple[MigInstance, ...]:
        """The memory of every instance."""
        samples = []
        for instance in self._instances:
            try:
                samples.append(instance.sample())
            except GpuGone as gone:
                self.stale = True
                if gone.code not in _ONE_HANDLE_ENDS:
                    samples.append(instance.failed(str(gone)))
        return tuple(samples)

    def processes(self) -> tuple[list[tuple[int | None, dict[str, list[ListRow]]]], dict[str, int]]:
        """The process lists by instance, and NVML's errors by kind."""
        lists: list[tuple[int | None, dict[str, list[ListRow]]]] = []
        errors: dict[str, int] = {}
        refused = bool(self._instances)
        for instance in self._instances:
            rows, failed = instance.processes.read()
            lists.append((instance.position, rows))
            refused = refused and "compute" in failed
            errors |= failed
        if not refused:
            return lists, errors
        # Some drivers report the processes of all instances for the whole GPU only.
        rows, failed = self._whole.read()
        return (lists, errors) if "compute" in failed else (self._by_instance(rows), failed)

    def _by_instance(self, rows: dict[str, list[ListRow]]) -> list[tuple[int | None, dict[str, list[ListRow]]]]:
        """The GPU's own lists, by instance. None stands for rows that name no known instance."""
        positions = {(one.gpu_instance, one.compute_instance): one.position for one in self._instances}
        sorted_out: dict[int | None, dict[str, list[ListRow]]] = {}
        for kind, found in rows.items():
            for row in found:
                position = positions.get((row.gpu_instance, row.compute_instance))
                sorted_out.setdefault(position, {}).setdefault(kind, []).append(row)
        return list(sorted_out.items())

    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the instances, in order of position."""
        return tuple(instance.uuid for instance in self._instances if instance.uuid)

    def reasons(self) -> dict[str, str]:
        """Why instances may be missing, under the field name `mig`."""
        return {} if self._why_incomplete is None else {"mig": self._why_incomplete}
