"""What DeepSpeed really allocates.

`-m tests.train.zero_memory_worker FOLDER PRECISION BUCKET LIVE`

Runs the trainer's engine on the CPU over the same passes as a dry run, and writes to the folder
what its tensors take: of each phase the peak and the end, and of each part at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from memtop.train import zero
from memtop.train.data.tokens import ByteTokens
from memtop.train.dry_run.trace import Kernels, Recorded, Trace
from memtop.train.model import COMPUTE, accelerate_name, build_model, model_config
from memtop.train.objective import Objective
from memtop.train.optimizers import build_optimizer
from memtop.train.run import read_settings

NOTHING_HIDDEN = Kernels({}, {}, frozenset(), 0)
"""Nothing that only CUDA's kernels allocate."""


def main() -> None:
    folder, precision = Path(sys.argv[1]), sys.argv[2]
    zero._SMALLEST_BUCKET, zero.LIVE_PARAMETERS = int(sys.argv[3]), int(sys.argv[4])
    # torch computes with fp16 on the CPU; DeepSpeed does not offer it there.
    CPU_Accelerator.is_fp16_supported = lambda self: True
    settings = read_settings(folder / "settings.json")
    config = model_config(settings, ByteTokens())
    # The same operations on the CPU as on a GPU.
    config._attn_implementation = "eager"
    accelerator = zero.open_deepspeed(settings, config, precision, False, {})
    name = accelerate_name(precision)
    # On the CPU the model is already where DeepSpeed brings it.
    model = build_model(settings, config, mixed=name).to(COMPUTE[name]).train()
    objective = Objective(model, chunk=settings.loss_chunk)
    optimizer = build_optimizer(settings, model.parameters())
    trace = Trace(NOTHING_HIDDEN, config.vocab_size)
    with trace:
        for tensor in (*model.parameters(), *model.buffers()):
            trace.count(tensor, "weights")
        engine: Any = zero.ZeroEngine(accelerator, objective, optimizer, settings)
        shape = (settings.batch, settings.seq_len)
        for update in range(2):
            micro_batches = min(settings.accumulation, 1 + update)
            for number in range(micro_batches):
                with trace.phase("forward"):
                    batch = {name: torch.ones(shape, dtype=torch.long) for name in ("input_ids", "labels")}
                    loss = engine.objective(**batch) / batch["labels"].numel()
                    del batch
                with trace.phase("backward"):
                    engine.backward(loss, last=number + 1 == micro_batches)
            with trace.phase("optimizer"):
                engine.step(1e-3)
                del loss
        found = {"phases": series(trace.recorded), "parts": parts(engine._zero)}
    (folder / f"rank-{accelerator.process_index}.json").write_text(json.dumps(found))


def series(trace: Recorded) -> list[tuple[str, int, int]]:
    """Of each phase the most bytes that existed in it, and those at its end."""
    found, live = [], 0
    ends = [start for start, _ in trace.phases[1:]] + [len(trace.events)]
    for (start, name), end in zip(trace.phases, ends, strict=True):
        peak = live
        for event in trace.events[start:end]:
            live += trace.allocations[event].size if event >= 0 else -trace.allocations[~event].size
            peak = max(peak, live)
        found.append((name, peak, live))
    return found


def parts(optimizer: Any) -> dict[str, int]:
    """Bytes of what DeepSpeed keeps between updates, by the names of a dry run."""
    moments = sum(tensor.nbytes for state in optimizer.optimizer.state.values() for tensor in state.values() if tensor.dim())
    if hasattr(optimizer, "bit16_groups_flat"):
        buffers = getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", [])
        return {
            "weights": sum(flat.nbytes for flat in (*optimizer.bit16_groups_flat, *buffers)),
            "master weights": sum(flat.nbytes for flat in optimizer.single_partition_of_fp32_groups),
            "optimizer": moments,
            "buckets": 0,
        }
    return {
        "weights": sum(one.nbytes for one in optimizer.fp16_partitioned_groups_flat),
        "master weights": sum(one.nbytes for one in optimizer.fp32_partitioned_groups_flat),
        "optimizer": moments,
        "buckets": sum(bucket.buffer.nbytes for bucket in optimizer.ipg_buckets.values()),
    }


if __name__ == "__main__":
    main()
