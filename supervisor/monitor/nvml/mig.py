"""The MIG instances that a GPU is cut into: their memory and their processes. Nothing else is told of them."""

from __future__ import annotations

from typing import Any

import pynvml

from memtop.supervisor.monitor.nvml import errors as codes
from memtop.supervisor.monitor.nvml.ask import Asker, GpuGone
from memtop.supervisor.monitor.nvml.memory import MEMORY_FIELDS, MemoryReader
from memtop.supervisor.monitor.nvml.processes import ListRow, ProcessReader
from memtop.supervisor.monitor.values import MigInstance

_NO_INSTANCE = frozenset({codes.NOT_FOUND, codes.INVALID_ARGUMENT})
_PLACES = "places for instances"
_ONE_HANDLE_ENDS = frozenset({codes.INVALID_ARGUMENT, codes.NOT_FOUND, codes.UNINITIALIZED})


class Instance:
    """One instance behind its handle, which the driver may give to another instance once this one is destroyed."""

    def __init__(self, position: int, handle: Any) -> None:
        self._asker = Asker(handle)
        self._memory = MemoryReader(self._asker, None)
        self.position = position
        self.processes = ProcessReader(handle)
        ask = self._asker.ask
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
        """Its memory now. Raises GpuGone where the handle is of no use any more."""
        memory = self._memory.read()
        return MigInstance(**self._fixed, **memory, unknown=self._asker.reasons())

    def failed(self, error: str) -> MigInstance:
        """What stands for it where it cannot be read."""
        return MigInstance(**self._fixed, error=error, unknown=dict.fromkeys(MEMORY_FIELDS, "the instance cannot be read"))


class Mig:
    """The instances of one GPU. `mode` is whether the GPU is cut into instances, None where the driver does not tell."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._asker = Asker(handle)
        self._instances: list[Instance] = []
        self._whole = ProcessReader(handle)
        self._unlisted: str | None = None
        self.mode: bool | None = None
        self.stale = False
        """True once an instance went away: enumerate before the next sample."""
        self.looked = False

    @property
    def mode_reason(self) -> str | None:
        """Why `mode` is None."""
        return self._asker.reasons().get("mig_mode")

    def enumerate(self) -> None:
        """Ask for the mode and look for instances at every place: there may be gaps. Raises GpuGone."""
        self.stale = False
        self.looked = True
        mode = self._asker.ask("mig_mode", "nvmlDeviceGetMigMode")
        self.mode = None if mode is None else bool(mode[0])
        self._instances = []
        self._unlisted = None
        if not self.mode:
            return
        places = self._asker.ask(_PLACES, "nvmlDeviceGetMaxMigDeviceCount")
        self._unlisted = None if places is not None else self._asker.reasons()[_PLACES]
        for position in range(places or 0):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, position)
                self._instances.append(Instance(position, handle))
            except pynvml.NVMLError as error:
                if error.value in codes.GPU_GONE:
                    raise GpuGone(error.value) from error
                if error.value not in _NO_INSTANCE:
                    # Of this place alone, whatever the error: the others, and this one next time, are asked.
                    self._unlisted = codes.words(error.value)
            except GpuGone:
                # Destroyed between the two calls; or the whole GPU is gone, which its own calls will say.
                self.stale = True

    def sample(self) -> tuple[MigInstance, ...]:
        """Memory of every instance."""
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
        """Lists by instance, and the errors by kind."""
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
        # Some drivers tell the processes of all instances under their GPU only.
        rows, failed = self._whole.read()
        return (lists, errors) if "compute" in failed else (self._by_instance(rows), failed)

    def _by_instance(self, rows: dict[str, list[ListRow]]) -> list[tuple[int | None, dict[str, list[ListRow]]]]:
        """The GPU's own lists, each row with the instance that it names; None where it names none of ours."""
        places = {(one.gpu_instance, one.compute_instance): one.position for one in self._instances}
        sorted_out: dict[int | None, dict[str, list[ListRow]]] = {}
        for kind, found in rows.items():
            for row in found:
                place = places.get((row.gpu_instance, row.compute_instance))
                sorted_out.setdefault(place, {}).setdefault(kind, []).append(row)
        return list(sorted_out.items())

    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the instances, by position."""
        return tuple(instance.uuid for instance in self._instances if instance.uuid)

    def reasons(self) -> dict[str, str]:
        """Why instances are missing, under `mig`."""
        return {} if self._unlisted is None else {"mig": self._unlisted}
