"""The micro-batches of each update, from any position and with any split; their loader's memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from memtop.presets import Settings
from memtop.presets.host_memory import HostPlan, host_plan
from memtop.supervisor.monitor.cgroup import CgroupMemory, read_cgroup_memory
from memtop.train.data.samples import collate
from memtop.train.exchange import Ranks
from memtop.train.objective import IGNORED
from memtop.train.order import SampleOrder, Samples, UpdatePlan, plan_updates
from memtop.train.state_files import Cut

Batch = dict[str, torch.Tensor]
"""input_ids and attention_mask [b, t], labels [b, u]."""


class Position(msgspec.Struct, kw_only=True):
    """How far a training has come, and where texts were cut into another length."""

    updates: int = 0
    samples_seen: int = 0
    cuts: tuple[Cut, ...]


class Batches:
    """One rank's micro-batches.

    `start` may be called at any time: the same position gives the same samples.
    """

    def __init__(self, samples: Samples, orders: tuple[SampleOrder, SampleOrder], pad: int, rank: int) -> None:
        self._samples = samples
        # The loader has a separate order because its worker processes run ahead of the updates.
        self._order, self._order_ahead = orders
        self._pad = pad
        self._rank = rank
        self._plans: Iterator[UpdatePlan] = iter(())
        self._batches: Iterator[Batch] = iter(())

    def start(self, settings: Settings, host: HostPlan, position: Position, target: int) -> None:
        """Start again at this position. `target`: samples at which the training ends."""
        # The old workers end before new ones start: both together may not fit into memory.
        self._batches = iter(())
        self._plans = _planned(self._order, settings, position, target)
        samples: Any = self._samples
        loader: DataLoader[Any] = DataLoader(
            samples,
            batch_sampler=self._micro_batches(settings, _planned(self._order_ahead, settings, position, target)),
            num_workers=host.workers,
            collate_fn=partial(collate, pad=self._pad),
            pin_memory=host.pin_memory,
        )
        self._settings = settings
        self._batches = iter(loader)

    def next_update(self) -> UpdatePlan | None:
        """The next update; None at the target."""
        return next(self._plans, None)

    def fetch(self, plan: UpdatePlan) -> list[Batch]:
        """All micro-batches of the update on this rank, on the CPU, for counting tokens."""
        found = []
        for keys in plan.micro_batches(self._settings.batch, self._settings.world_size, self._rank):
            batch = next(self._batches)
            if not keys:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            found.append(batch)
        return found

    def _micro_batches(self, settings: Settings, plans: Iterator[UpdatePlan]) -> Any:
        for plan in plans:
            for keys in plan.micro_batches(settings.batch, settings.world_size, self._rank):
                # A rank without samples in a short last update runs a masked one, to stay in step
                # with the others.
                yield keys or plan.keys[:1]


def _planned(order: SampleOrder, settings: Settings, position: Position, target: int) -> Iterator[UpdatePlan]:
    return plan_updates(
        order,
        updates=position.updates,
        position=position.samples_seen,
        target=target,
        effective_batch=settings.effective_batch,
    )


def agree_on_host_plan(settings: Settings, accelerator: Accelerator, *, taken: int = 0) -> HostPlan:
    """Loader workers, pinned buffers and memory level.

    The first rank reads host memory once; all ranks get its plan. `taken` are the bytes that the
    caller is about to allocate.
    """
    plan = None
    if accelerator.is_main_process:
        available = available_bytes()
        left = None if available is None else max(0, available - taken)
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
