"""Free host memory, and the plan for its use that all ranks share."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
from accelerate import Accelerator

from memtop.presets import Settings
from memtop.presets.host_memory import HostPlan, host_plan
from memtop.supervisor.monitor.cgroup import CgroupMemory, read_cgroup_memory
from memtop.train.exchange import Ranks


def agree_on_host_plan(settings: Settings, accelerator: Accelerator, *, taken: float = 0) -> HostPlan:
    """Loader workers, pinned buffers and memory level.

    The first rank reads host memory once; all ranks get its plan. `taken` are the bytes that the
    ranks are about to allocate; infinite if they are not known.
    """
    plan = None
    if accelerator.is_main_process:
        available = available_bytes()
        left = None if available is None else int(max(0, available - taken))
        plan = host_plan(settings, left, on_gpu=accelerator.device.type == "cuda")
    agreed: HostPlan | None = Ranks(accelerator).from_first(plan)
    assert agreed is not None
    return agreed


def available_bytes() -> int | None:
    """Free host memory: the machine's, or the cgroup's if it has less; None if not known."""
    memory: Any = psutil.virtual_memory()
    group = read_cgroup_memory(Path("/proc"), Path("/sys/fs/cgroup"), memory.total)
    if isinstance(group, CgroupMemory):
        return max(0, min(int(memory.available), group.limit_bytes - group.used_bytes))
    # A cgroup that cannot be read may allow less than the machine has.
    return int(memory.available) if group is None else None


def addressable_bytes() -> int | None:
    """Free host memory, within what this process may still address; None if not known."""
    free, limit = available_bytes(), resource.getrlimit(resource.RLIMIT_AS)[0]
    if free is None or limit == resource.RLIM_INFINITY:
        return free
    return max(0, min(free, limit - int(psutil.Process().memory_info().vms)))
