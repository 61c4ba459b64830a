"""One of two ranks on one GPU, which exchange over gloo because NCCL refuses two ranks on one GPU.

    torchrun --nproc-per-node 2 -m tests.gpu.rank_worker FOLDER DEVICE

Memory runs out on the second rank in some updates. A second training follows the splits of the
first without a failure. A third one searches its splits. Each rank writes `rank-R.json`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator

from memtop.presets import Settings
from tests.train.failing import (
    Failing,
    Failure,
    Filled,
    Scripted,
    distance,
    following,
    fresh,
    measured,
    rank_splits_of,
    small,
)

UPDATES = 16
# In the first forward pass, and in the backward pass of the last micro-batch.
FAILURES = [Failure(2, 0.0, False), Failure(6, 0.999, True), Failure(11, 0.5, True)]


def searched(folder: Path, settings: Settings) -> dict[str, Any]:
    """`--batch auto` with the GPU's own memory and clock; the memory is simulated on the CPU."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    gauge = Filled() if settings.device == "cpu" else None
    training = fresh(folder, msgspec.structs.replace(settings, auto_batch=True, packing=False), memory=gauge)
    if gauge is not None:
        gauge.follow(training, fails_from=1_000)
    training.run()
    (search,) = training.channel.of("batch_search")
    splits = rank_splits_of(training.settings, training.channel)
    return {
        "search": search,
        "samples": sorted({sum(b * a for b, a in split) for split in splits.values()}),
        "failures": training.channel.of("oom"),
        "digests": training.digests,
    }


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    if device == "cuda":
        # Accelerate would open NCCL.
        torch.distributed.init_process_group("gloo")
    rank = Accelerator(cpu=device == "cpu").process_index
    settings = small(dropout=0.1, batch=8, accumulation=1, world_size=2, target_samples=16 * UPDATES, device=device)
    training = measured(folder / "disturbed", settings, Scripted(), patience=2)
    failing = Failing(training, FAILURES if rank else [])
    started = time.perf_counter()
    training.run()
    seconds = time.perf_counter() - started
    assert failing.left == 0
    calm = following(folder / "calm", training.settings, rank_splits_of(training.settings, training.channel))
    if rank:
        # Only the first rank gets commands.
        calm.channel.commands.clear()
    calm.run()
    found: dict[str, Any] = {
        "device": str(training.engine.accelerator.device),
        "seconds": seconds,
        "splits": sorted(rank_splits_of(training.settings, training.channel).items()),
        "failures": [(report["update"], report["phase"], report["survived"]) for report in training.channel.of("oom")],
        "losses": training.losses,
        "distance": distance(training.weights(), calm.weights()),
        "same_samples": training.digests == calm.digests,
        "digests": training.digests,
        "searched": searched(folder / "searched", settings),
        "sum_of_weights": sum(float(weight.double().sum()) for weight in training.weights().values()),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
