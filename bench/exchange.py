"""Plain data parallelism over two gloo ranks: memtop's sum of gradients compared with torch's
DistributedDataParallel.

    python -m bench.exchange [--rounds N] [--updates N]

Both arms use the model of the recipe first-run, the same samples, AdamW and clipping at 1, with 8
samples and 2 micro-batches per update and rank. They run in the same two processes in turns A B B
A, so that a busy machine is busy for both; a pair is one turn of each. DistributedDataParallel
communicates only in the last micro-batch, as recommended. memtop's arm agrees once per update and
sums afterwards. The final weights of both are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from bench.common import report, spread
from memtop.presets import load_presets, load_recipes, resolve
from memtop.train.data.tokens import ByteTokens
from memtop.train.exchange import GradientSum, Ranks
from memtop.train.model import build_model, model_config
from memtop.train.objective import Objective

MICRO_BATCHES, BATCH, LENGTH = 2, 4, 128


class Arm:
    """A copy of the model with its optimizer; `update` does one update of either kind."""

    def __init__(self, objective: torch.nn.Module, accelerator: Accelerator, *, ours: bool) -> None:
        self.bare = objective
        self.ours = ours
        self._ranks = Ranks(accelerator)
        self._sum = GradientSum(accelerator, objective) if ours else None
        self._model = objective if ours else torch.nn.parallel.DistributedDataParallel(objective)
        self._optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-3)
        self._world = accelerator.num_processes
        self._rank = accelerator.process_index
        self._number = 0

    def update(self) -> None:
        self._number += 1
        draw = torch.Generator().manual_seed(self._number * 2 + self._rank)
        total = torch.zeros(())
        for number in range(MICRO_BATCHES):
            ids = torch.randint(0, 256, (BATCH, LENGTH), generator=draw)
            last = number == MICRO_BATCHES - 1
            with nullcontext() if self.ours or last else self._model.no_sync():
                # DistributedDataParallel averages over the ranks, memtop sums.
                loss = self._model(input_ids=ids, labels=ids) / (MICRO_BATCHES * BATCH * LENGTH * self._world)
                (loss if self.ours else loss * self._world).backward()
            total += loss.detach()
        self._ranks.sums(0.0, float(total), 0 if self._sum is None else self._sum.missing(), 0.0)
        if self._sum is not None:
            self._sum()
        torch.nn.utils.clip_grad_norm_(self.bare.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def worker(place: Path, rounds: int, updates: int) -> None:
    """One rank; the first one writes the seconds of each turn."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    recipe = load_recipes()["first-run"]
    settings = resolve(recipe, preset=load_presets()["standard"])
    objective = Objective(build_model(settings, model_config(settings, ByteTokens())), chunk=settings.loss_chunk)
    arms = {"ours": Arm(objective, accelerator, ours=True), "ddp": Arm(copy.deepcopy(objective), accelerator, ours=False)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in ("ours", "ddp") if number % 2 else ("ddp", "ours"):
            accelerator.wait_for_everyone()
            started = time.perf_counter()
            for _ in range(updates):
                arms[name].update()
            if number:
                seconds[name].append((time.perf_counter() - started) / updates)
    pairs = zip(arms["ours"].bare.parameters(), arms["ddp"].bare.parameters(), strict=True)
    apart = max(float((one - other).detach().abs().max()) for one, other in pairs)
    if accelerator.is_main_process:
        parameters = sum(p.numel() for p in objective.parameters())
        place.write_text(json.dumps({"seconds": seconds, "largest_difference": apart, "parameters": parameters}))
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--worker", type=Path)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.rounds, arguments.updates)
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "seconds.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bench.exchange"]
        options = ["--worker", str(place), "--rounds", str(arguments.rounds), "--updates", str(arguments.updates)]
        subprocess.run([sys.executable, *launch, *options], check=True, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(place.read_text())
    seconds = found["seconds"]
    ratios = [ddp / ours for ours, ddp in zip(seconds["ours"], seconds["ddp"], strict=True)]
    report(
        "exchange",
        {
            "parameters": found["parameters"],
            "update_seconds": {name: spread(values) for name, values in seconds.items()},
            "speed_ratio": {**spread(ratios), "meaning": "speed of memtop's exchange over that of DistributedDataParallel"},
            "speed_ratio_median": round(statistics.median(ratios), 3),
            "largest_weight_difference": found["largest_difference"],
        },
    )


if __name__ == "__main__":
    main()
