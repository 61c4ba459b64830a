"""The loss on samples that are not trained on: mean over their predicted tokens, over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from memtop.presets import Settings
from memtop.train.auto_batch import Guard
from memtop.train.data.samples import PackedText, RowSamples, collate
from memtop.train.engine import Engine, Ranks
from memtop.train.objective import IGNORED, predicted_tokens
from memtop.train.order import Key

MOST_SAMPLES = 512
"""An evaluation takes this many samples at most, always the same ones: evenly spread over the data."""


class Evaluation(msgspec.Struct, frozen=True):
    """loss in nats per token; samples and tokens it was taken over."""

    loss: float
    samples: int
    tokens: int
    seconds: float


class Evaluator:
    """Evaluates the engine's model as it is now. All ranks call it together."""

    def __init__(self, settings: Settings, engine: Engine, data: PackedText | RowSamples, pad: int) -> None:
        self._engine = engine
        self._data = data
        self._seq2seq = settings.task == "seq2seq"
        self._collate: Callable[[list[Any]], dict[str, torch.Tensor]] = lambda samples: collate(samples, pad)
        table = data.table(settings.seq_len)
        chosen = range(0, len(table), max(1, -(-len(table) // MOST_SAMPLES)))
        self._keys: list[Key] = [(int(table.ids[i]), int(table.lengths[i])) for i in chosen]

    def __call__(self, batch: int, guard: Guard, ranks: Ranks) -> Evaluation | None:
        """`batch` samples at a time and rank, which changes nothing but rounding; None: memory ran out on some rank."""
        started = time.perf_counter()
        sums = guard.attempt(lambda: self._sums(batch), batch=batch, accumulation=None)
        failed, loss_sum, count = ranks.sums(sums is None, *(sums or (0.0, 0.0)))
        if failed:
            return None
        loss = loss_sum / count if count else math.nan
        return Evaluation(loss, len(self._keys), int(count), time.perf_counter() - started)

    def _sums(self, size: int) -> tuple[float, float]:
        """Loss summed over this rank's predicted tokens, and how many they are."""
        accelerator, objective = self._engine.accelerator, self._engine.objective
        whole = size * accelerator.num_processes
        loss_sum, count = 0.0, 0.0
        objective.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(self._keys), whole):
                    first = start + accelerator.process_index * size
                    mine = self._keys[first : first + size]
                    # A rank without samples takes one along and masks it: sharded models need every rank at every layer.
                    batch = self._collate([self._data[key] for key in mine or self._keys[:1]])
                    if not mine:
                        batch["labels"] = torch.full_like(batch["labels"], IGNORED)
                    count += predicted_tokens(batch["labels"], seq2seq=self._seq2seq)
                    loss_sum += float(objective(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()}))
        finally:
            objective.train()
        return loss_sum, count
