"""What DeepSpeed really allocates.

`-m tests.train.zero_memory_worker FOLDER PRECISION BUCKET LIVE`

Runs the trainer's engine on the CPU over the same passes as a dry run, and writes to the folder
what its tensors take: of each phase the peak and the end, and of each part at the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils._python_dispatch import _disable_current_modes

from memtop.train import zero
from memtop.train.data.tokens import ByteTokens
from memtop.train.dry_run.trace import Kernels, Recorded, Trace
from memtop.train.model import COMPUTE, accelerate_name, build_model, model_config
from memtop.train.objective import Objective
from memtop.train.optimizers import build_optimizer
from memtop.train.run import read_settings

NOTHING_HIDDEN = Kernels({}, {}, frozenset(), 0)
"""Nothing that only CUDA's kernels allocate."""


class RealTrace(Trace):
    def _track(self, func: Any, found: Any) -> None:
        # DeepSpeed keeps shapes as tensors without memory.
        if not isinstance(found, torch.Tensor) or found.device.type != "meta":
            super()._track(func, found)


class _Done:
    def wait(self) -> None:
        """Do nothing: it was waited for."""


def copying(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective on copies that nobody counts. A thread of gloo holds what it has communicated
    a little longer, by chance."""

    def call(*args: Any, async_op: bool = False, **named: Any) -> _Done:
        with _disable_current_modes():
            copies = {name: value.clone() for name, value in (*enumerate(args), *named.items()) if torch.is_tensor(value)}
            with_copies = [copies.get(place, value) for place, value in enumerate(args)]
            collective(*with_copies, **named | {name: value for name, value in copies.items() if isinstance(name, str)})
            # The first tensor is the result.
            place = next(iter(copies))
            (named[place] if isinstance(place, str) else args[place]).copy_(copies[place])
        return _Done()

    return call


def main() -> None:
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"):
        setattr(torch.distributed, name, copying(getattr(torch.distributed, name)))
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
    model = build_model(settings, config, mixed=name).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(COMPUTE[name])
    objective = Objective(model, chunk=settings.loss_chunk)
    optimizer = build_optimizer(settings, model.parameters())
    trace = RealTrace(NOTHING_HIDDEN, config.vocab_size)
    with trace:
        for tensor in (*model.parameters(), *model.buffers()):
            trace.count(tensor, "weights")
        engine: Any = zero.ZeroEngine(accelerator, objective, optimizer, settings)
        if engine.loss_scale() is not None:
            # No step is skipped.
            engine._zero.loss_scaler.cur_scale = 1.0
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
        found = {"phases": series(trace.recorded), "parts": parts(engine._zero, model)}
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


def parts(optimizer: Any, model: torch.nn.Module) -> dict[str, int]:
    """Bytes of what DeepSpeed keeps between updates, by the names of a dry run."""
    masters = ("fp32_groups_flat_partition", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    weights = ("bf16_groups_flat", "bit16_groups_flat", "fp16_partitioned_groups_flat")
    frozen = [getattr(one, "ds_tensor", one) for one in model.parameters() if not one.requires_grad]
    moments = [tensor for state in optimizer.optimizer.state.values() for tensor in state.values()]
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values() if torch.is_tensor(bucket.buffer)]
    return {
        "weights": _bytes(model.buffers(), frozen, *(getattr(optimizer, name, ()) for name in (*weights, _ON_HOST))),
        "master weights": _bytes(*(getattr(optimizer, name, ()) for name in masters)),
        "optimizer": _bytes(moments),
        "buckets": _bytes(buckets),
    }


_ON_HOST = "param_buffer_of_bit16_for_cpu_offload_groups"


def _bytes(*groups: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for group in groups for tensor in group)


if __name__ == "__main__":
    main()
