"""Host memory on the training side: the one reading that decides, sent to all ranks, and the record of it over time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.host_memory import HostPlan, host_plan
from memtop.supervisor.monitor.cgroup import CgroupMemory, read_cgroup_memory
from memtop.train.channel import Channel

RECORD_EVERY = 200
"""Updates between two memory records, as the guides have it."""
_GB = 1024**3


def available_bytes() -> int | None:
    """What can still be taken: of the machine, or of the cgroup where its limit is nearer. Our own use is gone from it."""
    memory: Any = psutil.virtual_memory()
    group = read_cgroup_memory(Path("/proc"), Path("/sys/fs/cgroup"), memory.total)
    if isinstance(group, CgroupMemory):
        return max(0, min(int(memory.available), group.limit_bytes - group.used_bytes))
    # A group that cannot be read may hold less than the machine has: then nothing is known.
    return int(memory.available) if group is None else None


def decide(settings: Settings, accelerator: Accelerator) -> HostPlan:
    """Read once, on the first rank, after the model is loaded; every rank gets the same answer."""
    answer: list[Any] = [None]
    if accelerator.is_main_process:
        answer = [host_plan(settings, available_bytes(), on_gpu=accelerator.device.type == "cuda")]
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(answer, src=0)
    plan: HostPlan = answer[0]
    return plan


class MemoryRecord:
    """The guides' memory lines, as reports and in the log: host used and total, this rank's GPU allocated and reserved."""

    def __init__(self, channel: Channel, accelerator: Accelerator, say: Callable[[str], None] = print) -> None:
        self._channel = channel
        self._device = accelerator.device
        self._first = accelerator.is_main_process
        self._rank = accelerator.process_index
        self._say = say

    def __call__(self, stage: str) -> None:
        """Record now; `stage` says where the training is: "after model load", "update 200"."""
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        values: dict[str, Any] = {"stage": stage, "used_bytes": used, "total_bytes": memory.total}
        text = f"[memory - {stage}] host {used / _GB:.2f}GB / {memory.total / _GB:.2f}GB ({used / memory.total:.1%})"
        if self._device.type == "cuda":
            values["allocated_bytes"] = torch.cuda.memory_allocated(self._device)
            values["reserved_bytes"] = torch.cuda.memory_reserved(self._device)
            # One's own card only: of the others' this process knows nothing, and nothing is not 0.
            text += f", GPU {self._device.index} allocated {values['allocated_bytes'] / _GB:.2f}GB"
            text += f" reserved {values['reserved_bytes'] / _GB:.2f}GB"
        self._channel.report("memory", message=text, **values)
        if self._first:
            self._say(text)
