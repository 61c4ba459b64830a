"""The updates to come and their micro-batches, from any position and under any split."""

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
from memtop.train.objective import IGNORED
from memtop.train.order import SampleOrder, Samples, UpdatePlan, plan_updates
from memtop.train.state_files import Cut

Batch = dict[str, torch.Tensor]


class Position(msgspec.Struct, kw_only=True):
    """Where a training stands: updates and samples done, and the cuts of the texts so far."""

    updates: int = 0
    samples_seen: int = 0
    cuts: tuple[Cut, ...]


class Feed:
    """What one rank is trained on. `start` may be called again at any time: the same position gives the same samples."""

    def __init__(self, samples: Samples, orders: tuple[SampleOrder, SampleOrder], pad: int, rank: int) -> None:
        self._samples = samples
        # An order of its own for the loader: with worker processes it runs ahead of the updates.
        self._order, self._order_ahead = orders
        self._pad = pad
        self._rank = rank
        self._plans: Iterator[UpdatePlan] = iter(())
        self._batches: Iterator[Batch] = iter(())

    def start(self, settings: Settings, host: HostPlan, position: Position, target: int) -> None:
        """Begin anew at this position; `target` is the number of samples at which the training ends."""
        # The old loader's workers end before new ones start: two sets would not fit where memory is short.
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

    def plan(self) -> UpdatePlan | None:
        """The next update; None at the target."""
        return next(self._plans, None)

    def fetch(self, plan: UpdatePlan) -> list[Batch]:
        """This rank's micro-batches of the update, on the CPU: their tokens are counted before the first one is trained on."""
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
                # A rank without samples in a short last update takes one along and masks it, to stay in step with the others.
                yield keys or plan.keys[:1]


def _planned(order: SampleOrder, settings: Settings, position: Position, target: int) -> Iterator[UpdatePlan]:
    return plan_updates(
        order,
        updates=position.updates,
        position=position.samples_seen,
        target=target,
        effective_batch=settings.effective_batch,
    )


def available_bytes() -> int | None:
    """What can still be taken: of the machine, or of the cgroup where its limit is nearer. Our own use is gone from it."""
    memory: Any = psutil.virtual_memory()
    group = read_cgroup_memory(Path("/proc"), Path("/sys/fs/cgroup"), memory.total)
    if isinstance(group, CgroupMemory):
        return max(0, min(int(memory.available), group.limit_bytes - group.used_bytes))
    # A group that cannot be read may hold less than the machine has: then nothing is known.
    return int(memory.available) if group is None else None


def agree_on_host_plan(settings: Settings, accelerator: Accelerator) -> HostPlan:
    """Read once, on the first rank, after the model is loaded; every rank gets the same answer."""
    answer: list[Any] = [None]
    if accelerator.is_main_process:
        answer = [host_plan(settings, available_bytes(), on_gpu=accelerator.device.type == "cuda")]
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(answer, src=0)
    plan: HostPlan = answer[0]
    return plan
