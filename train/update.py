"""The gradients of one update: a token-weighted mean over its whole effective batch, whatever the split and the ranks."""

from __future__ import annotations

import msgspec
import torch

from memtop.presets import Settings
from memtop.train.engine import Engine
from memtop.train.feed import Batch, Feed
from memtop.train.growth import Growth
from memtop.train.objective import predicted_tokens
from memtop.train.order import UpdatePlan
from memtop.train.ranks import Ranks
from memtop.train.stopwatch import Stopwatch
from memtop.train.survive import Guard


class Computed(msgspec.Struct, frozen=True):
    """What all ranks know once each of them holds its gradients: mean loss in nats per token, predicted tokens."""

    loss: float
    tokens: int
    pressed: bool
    """Whether the allocator of any rank had to free its cache."""


class Gradients:
    """Computes the gradients of an update and leaves them in the parameters. All ranks call it together.

    Where it can be tried again no rank waits for another between the votes, so one that fails holds up nobody: each part
    ends with a vote, and if any rank's memory ran out in it, all of them give the try up.
    """

    def __init__(self, engine: Engine, feed: Feed, ranks: Ranks, guard: Guard, growth: Growth) -> None:
        self._engine = engine
        self._feed = feed
        self._ranks = ranks
        self._guard = guard
        self._growth = growth

    def __call__(self, plan: UpdatePlan, settings: Settings, stopwatch: Stopwatch) -> Computed | None:
        """None: memory ran out on some rank, and nothing of this try may be used."""
        device, rank = self._engine.accelerator.device, self._engine.accelerator.process_index
        split = {"batch": settings.batch, "accumulation": settings.accumulation}
        # The random state is a function of the position: a resumed or re-split run draws the same, nothing is saved.
        torch.manual_seed((settings.seed * 1_000_003 + plan.position) * 64 + rank)
        with stopwatch.part("data_wait_seconds"):
            self._guard.phase = "data"
            mine = self._guard.attempt(lambda: self._fetch(plan, settings), **split)
            failed, counted = self._ranks.sums(mine is None, 0 if mine is None else mine[1])
        if failed or mine is None:
            return None
        batches, tokens = mine[0], max(1, int(counted))
        done = self._guard.attempt(lambda: (self._backward(batches, tokens, stopwatch, device), self._engine.gaps()), **split)
        failed, total, gaps, pressed = self._ranks.sums(done is None, *(done or (0.0, 0)), self._growth.new_retries())
        if not failed and gaps:
            self._engine.share_gaps()
            filled = self._guard.attempt(self._fill_gaps, **split)
            failed = self._ranks.sums(filled is None)[0]
        return None if failed else Computed(total, tokens, pressed > 0)

    def _fetch(self, plan: UpdatePlan, settings: Settings) -> tuple[list[Batch], int]:
        """This rank's micro-batches, and how many tokens are predicted in them."""
        mine = self._feed.fetch(plan)
        seq2seq = settings.task == "seq2seq"
        return mine, sum(predicted_tokens(batch["labels"], seq2seq=seq2seq) for batch in mine)

    def _backward(self, mine: list[Batch], tokens: int, stopwatch: Stopwatch, device: torch.device) -> float:
        """Forward and backward of all micro-batches; this rank's part of the loss."""
        total = torch.zeros((), device=device)
        for number, batch in enumerate(mine, start=1):
            self._guard.phase = "forward"
            on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with stopwatch.part("forward_seconds"):
                loss = self._engine.objective(**on_device) / tokens
            self._guard.phase = "backward"
            with stopwatch.part("backward_seconds"):
                self._engine.backward(loss, last=number == len(mine))
            total += loss.detach()
        # The one point where the CPU waits for the device: what failed there is known from here on.
        return float(total)

    def _fill_gaps(self) -> bool:
        self._engine.fill_gaps()
        return True
