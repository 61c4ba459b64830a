"""Plain data parallelism over two gloo ranks: memtop's sum of gradients compared with torch's
DistributedDataParallel.

    python -m bench.exchange [--rounds N] [--updates N] [--accumulation A ...] [--bucket-kib N]

Both arms use the model of the recipe first-run, the same samples, AdamW and clipping at 1, with 1
and with 4 micro-batches of 4 samples per update and rank. They run in the same two processes in
turns A B B A, so that a busy machine is busy for both; a pair is one turn of each. Both communicate
only in the last micro-batch, while its backward pass runs, and vote once per update. The final
weights of both are compared. CPU seconds are those of the first rank, with all its threads.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from bench.common import ratios, report, spread
from memtop.presets import load_presets, load_recipes, resolve
from memtop.train.data.tokens import ByteTokens
from memtop.train.exchange import BUCKET_BYTES, GradientSum, Ranks
from memtop.train.model import build_model, model_config
from memtop.train.objective import Objective

BATCH, LENGTH = 4, 128


class Arm:
    """A copy of the model with its optimizer; `update` does one update of either kind."""

    def __init__(
        self, objective: torch.nn.Module, accelerator: Accelerator, accumulation: int, *, ours: bool, bucket_bytes: int
    ) -> None:
        self.bare = objective
        self.ours = ours
        self._accumulation = accumulation
        self._ranks = Ranks(accelerator)
        self._sum = GradientSum(accelerator, objective, bucket_bytes) if ours else None
        self._model = objective if ours else torch.nn.parallel.DistributedDataParallel(objective)
        self._optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-3)
        self._world = accelerator.num_processes
        self._rank = accelerator.process_index
        self._number = 0

    def update(self) -> None:
        self._number += 1
        draw = torch.Generator().manual_seed(self._number * 2 + self._rank)
        total = torch.zeros(())
        for number in range(self._accumulation):
            ids = torch.randint(0, 256, (BATCH, LENGTH), generator=draw)
            last = number == self._accumulation - 1
            with nullcontext() if self._sum is not None or last else self._model.no_sync():
                loss = self._model(input_ids=ids, labels=ids) / (self._accumulation * BATCH * LENGTH * self._world)
                self._backward(loss, last=last)
            total += loss.detach()
        self._ranks.sums(0.0, float(total), 0 if self._sum is None else self._sum.missing(), 0.0)
        if self._sum is not None:
            self._sum()
        torch.nn.utils.clip_grad_norm_(self.bare.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if self._sum is None:
            # DistributedDataParallel averages over the ranks, memtop sums.
            (loss * self._world).backward()
            return
        if last:
            self._sum.begin()
        loss.backward()
        if last:
            self._sum.end()


def worker(place: Path, rounds: int, updates: int, accumulations: list[int], bucket_bytes: int) -> None:
    """One rank; the first one writes the seconds of each turn."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    recipe = load_recipes()["first-run"]
    settings = resolve(recipe, preset=load_presets()["standard"])
    objective = Objective(build_model(settings, model_config(settings, ByteTokens())), chunk=settings.loss_chunk)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in objective.parameters())}
    for accumulation in accumulations:
        arms = {
            name: Arm(copy.deepcopy(objective), accelerator, accumulation, ours=name == "ours", bucket_bytes=bucket_bytes)
            for name in ("ours", "ddp")
        }
        found[f"accumulation {accumulation}"] = compared(arms, Ranks(accelerator), rounds, updates)
    if accelerator.is_main_process:
        place.write_text(json.dumps(found))
    accelerator.end_training()


def compared(arms: dict[str, Arm], ranks: Ranks, rounds: int, updates: int) -> dict[str, Any]:
    """The arms in turns: seconds per update, and how far their weights are apart."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in ("ours", "ddp") if number % 2 else ("ddp", "ours"):
            ranks.wait()
            started, cpu = time.perf_counter(), time.process_time()
            for _ in range(updates):
                arms[name].update()
            if number:
                seconds[name].append((time.perf_counter() - started) / updates)
                cpu_seconds[name].append((time.process_time() - cpu) / updates)
    pairs = zip(arms["ours"].bare.parameters(), arms["ddp"].bare.parameters(), strict=True)
    speed = ratios(seconds["ddp"], seconds["ours"])
    return {
        "update_seconds": {name: spread(values) for name, values in seconds.items()},
        "update_cpu_seconds": {name: spread(values) for name, values in cpu_seconds.items()},
        "speed_ratio": {**speed, "meaning": "speed of memtop's exchange over that of DistributedDataParallel"},
        "largest_weight_difference": max(float((one - other).detach().abs().max()) for one, other in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--bucket-kib", type=int, default=BUCKET_BYTES >> 10)
    parser.add_argument("--worker", type=Path)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.rounds, arguments.updates, arguments.accumulation, arguments.bucket_kib << 10)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "seconds.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bench.exchange"]
        subprocess.run([sys.executable, *launch, "--worker", str(place), *sys.argv[1:]], check=True, stdout=sys.stderr)
        report("exchange", json.loads(place.read_text()))


if __name__ == "__main__":
    main()
