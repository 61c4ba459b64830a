"""One of two ranks on one GPU, which exchange over gloo because NCCL refuses two ranks on one GPU.

    torchrun --nproc-per-node 2 -m tests.gpu.rank_worker DEVICE FOLDER

Memory runs out on the second rank in some updates. A second training follows the splits of the
first without a failure. Each rank writes `rank-R.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from tests.train.failing import Failing, Failure, Scripted, distance, following, measured, rank_splits_of, small

UPDATES = 16
# In the first forward pass, and in the backward pass of the last micro-batch.
FAILURES = [Failure(2, 0.0, False), Failure(6, 0.999, True), Failure(11, 0.5, True)]


def main() -> None:
    device, folder = sys.argv[1], Path(sys.argv[2])
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
        "sum_of_weights": sum(float(weight.double().sum()) for weight in training.weights().values()),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
