"""Reads the MIG instances of a GPU: their memory and their processes.

The driver reports nothing else about them.
"""

from __future__ import annotations

from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.memory import MEMORY_FIELDS, MemoryReader
from memtop.supervisor.monitor.nvml.processes import ListRow, ProcessReader
from memtop.supervisor.monitor.nvml.query import GpuGone, Query
from memtop.supervisor.monitor.values import MigInstance

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
        if "compute" in failed:
            return lists, errors
        positions = {(one.gpu_instance, one.compute_instance): one.position for one in self._instances}
        return list(by_instance(rows, positions).items()), failed

    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the instances, in order of position."""
        return tuple(instance.uuid for instance in self._instances if instance.uuid)

    def reasons(self) -> dict[str, str]:
        """Why instances may be missing, under the field name `mig`."""
        return {} if self._why_incomplete is None else {"mig": self._why_incomplete}


def by_instance(
    rows: dict[str, list[ListRow]], positions: dict[tuple[int | None, int | None], int]
) -> dict[int | None, dict[str, list[ListRow]]]:
    """A GPU's process lists, by the position of the instance. The keys of `positions` are pairs of
    GPU instance and compute instance. Rows that name none of them are under None."""
    found: dict[int | None, dict[str, list[ListRow]]] = {}
    for kind, listed in rows.items():
        for row in listed:
            position = positions.get((row.gpu_instance, row.compute_instance))
            found.setdefault(position, {}).setdefault(kind, []).append(row)
    return found
