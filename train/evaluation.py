"""The evaluation loss: the mean over the predicted tokens of held-out samples on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from memtop.presets import Settings
from memtop.train.auto_batch import OomGuard
from memtop.train.data.samples import PackedText, RowSamples, collate
from memtop.train.engine import Engine
from memtop.train.exchange import Ranks
from memtop.train.objective import IGNORED, predicted_tokens
from memtop.train.order import Key

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

    def __init__(self, settings: Settings, engine: Engine, data: PackedText | RowSamples, pad: int) -> None:
        self._engine = engine
        self._data = data
        self._seq2seq = settings.task == "seq2seq"
        self._collate: Callable[[list[Any]], dict[str, torch.Tensor]] = lambda samples: collate(samples, pad)
        table = data.table(settings.seq_len)
        chosen = range(0, len(table), max(1, -(-len(table) // MAX_SAMPLES)))
        self._keys: list[Key] = [(int(table.ids[i]), int(table.lengths[i])) for i in chosen]

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

    def _sums(self, size: int) -> tuple[float, float]:
        """The summed loss of this rank's predicted tokens, and their number."""
        accelerator, objective = self._engine.accelerator, self._engine.objective
        whole = size * accelerator.num_processes
        loss_sum, count = 0.0, 0.0
        objective.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(self._keys), whole):
                    first = start + accelerator.process_index * size
                    mine = self._keys[first : first + size]
                    # A rank without samples runs a masked one: sharded models need every rank in
                    # every layer.
                    batch = self._collate([self._data[key] for key in mine or self._keys[:1]])
                    if not mine:
                        batch["labels"] = torch.full_like(batch["labels"], IGNORED)
                    count += predicted_tokens(batch["labels"], seq2seq=self._seq2seq)
                    loss_sum += float(objective(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()}))
        finally:
            objective.train()
        return loss_sum, count
