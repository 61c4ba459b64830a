"""The loss on samples that are not trained on: mean over their predicted tokens, over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from memtop.presets import Settings
from memtop.train.corpus import collate
from memtop.train.engine import Engine
from memtop.train.objective import IGNORED, predicted_tokens
from memtop.train.order import Key
from memtop.train.packed import PackedText, RowSamples

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
        self._batch = settings.eval_batch or settings.batch
        self._collate: Callable[[list[Any]], dict[str, torch.Tensor]] = lambda samples: collate(samples, pad)
        table = data.table(settings.seq_len)
        chosen = range(0, len(table), max(1, -(-len(table) // MOST_SAMPLES)))
        self._keys: list[Key] = [(int(table.ids[i]), int(table.lengths[i])) for i in chosen]

    def __call__(self) -> Evaluation:
        started = time.perf_counter()
        accelerator, objective = self._engine.accelerator, self._engine.objective
        whole = self._batch * accelerator.num_processes
        sums = torch.zeros(2, dtype=torch.float64)
        objective.eval()
        with torch.no_grad():
            for start in range(0, len(self._keys), whole):
                first = start + accelerator.process_index * self._batch
                mine = self._keys[first : first + self._batch]
                # A rank without samples takes one along and masks it: sharded models need every rank at every layer.
                batch = self._collate([self._data[key] for key in mine or self._keys[:1]])
                if not mine:
                    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
                tokens = predicted_tokens(batch["labels"], seq2seq=self._seq2seq)
                loss = objective(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()})
                sums += torch.tensor([float(loss), tokens], dtype=torch.float64)
        objective.train()
        # gloo and nccl both reduce doubles; a GPU rank's values have to lie there.
        total = accelerator.reduce(sums.to(accelerator.device), reduction="sum")
        loss_sum, count = float(total[0]), int(total[1])
        loss = loss_sum / count if count else math.nan
        return Evaluation(loss, len(self._keys), count, time.perf_counter() - started)
