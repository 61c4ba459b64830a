"""The evaluation loss: the mean over the predicted tokens of held-out samples on all ranks."""

from __future__ import annotations

import math
import time
from functools import partial

import msgspec
import torch

from memtop.presets import Settings
from memtop.train.batch_sizer import OomGuard
from memtop.train.batches import collated, completed, to_device
from memtop.train.data.samples import PackedText, RowSamples
from memtop.train.engine import Engine
from memtop.train.exchange import Ranks
from memtop.train.order import Key
from memtop.train.packing import is_prepared

MAX_SAMPLES = 512
"""An evaluation uses at most this many samples, always the same ones, evenly spread over the data.
"""


class Evaluation(msgspec.Struct, frozen=True):
    """The loss in nats per token, the samples and tokens behind it, and the time it took."""

    loss: float
    samples: int
    tokens: int
    seconds: float


class Evaluator:
    """Evaluates the engine's model with its present weights. All ranks call it together."""

    def __init__(
        self, settings: Settings, engine: Engine, data: PackedText | RowSamples, pad: int, *, pin: bool = False
    ) -> None:
        self._engine = engine
        self._data = data
        self._task = settings.task
        self._pin = pin
        packed = settings.packing and is_prepared(engine.model)
        self._collate = partial(collated, pad=pad, packed=packed)
        table = data.table(settings.seq_len)
        chosen = range(0, len(table), max(1, -(-len(table) // MAX_SAMPLES)))
        self._keys: list[Key] = [(int(table.ids[i]), int(table.lengths[i])) for i in chosen]
        if settings.packing and not packed:
            # Samples of similar length need little padding.
            lengths = dict(zip(self._keys, data.lengths(self._keys), strict=True))
            self._keys.sort(key=lambda key: -lengths[key])

    def __call__(self, batch: int, guard: OomGuard, ranks: Ranks) -> Evaluation | None:
        """Evaluate `batch` samples at a time on each rank; None if memory ran out on any rank.

        Another `batch` changes the result by rounding only.
        """
        started = time.perf_counter()
        sums = guard.attempt(lambda: self._sums(batch), batch=batch, accumulation=None)
        failed, loss_sum, count = ranks.sums(sums is None, *(sums or (0.0, 0.0)))
        if failed:
            return None
        loss = loss_sum / count if count else math.nan
        return Evaluation(loss, len(self._keys), int(count), time.perf_counter() - started)

    def _sums(self, size: int) -> tuple[float, int]:
        """The summed loss of this rank's predicted tokens, and their number."""
        accelerator, objective = self._engine.accelerator, self._engine.objective
        whole = size * accelerator.num_processes
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        count = 0
        objective.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(self._keys), whole):
                    first = start + accelerator.process_index * size
                    mine = self._keys[first : first + size]
                    # A rank without samples runs a masked one: sharded models need every rank in
                    # every layer.
                    samples = self._collate([self._data[key] for key in mine or self._keys[:1]])
                    batch, counted = completed(samples, self._task, masked=not mine, pin=self._pin)
                    count += counted
                    total += objective(**to_device(batch, accelerator.device))
        finally:
            objective.train()
        # The only wait for the device.
        return float(total.cpu()), count
