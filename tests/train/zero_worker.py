"""What DeepSpeed really runs: `-m tests.train.zero_worker SETTINGS PRECISION AVAILABLE_GIB`.

Trains two updates on the CPU and prints what the engine answers, as JSON. The gradient of the
second one is infinite. The host plan is made as on a GPU, with this much memory available.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from transformers.integrations.deepspeed import deepspeed_config

from memtop.presets.host_memory import host_plan
from memtop.train import host_memory, run, zero
from memtop.train.channel import Control
from memtop.train.data.tokens import PAD, ByteTokens
from memtop.train.engine import Engine
from memtop.train.model import compile_layers, model_config
from memtop.train.order import Position
from memtop.train.run import open_engine, read_settings
from memtop.train.state_files import Cut
from memtop.train.trainer import Trainer
from tests.train.support import Recorder, samples


def main() -> None:
    path, precision, available = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    # torch computes with fp16 on the CPU; DeepSpeed does not offer it there.
    CPU_Accelerator.is_fp16_supported = lambda self: True
    host_memory.available_bytes = lambda: int(available * 2**30)
    host_memory.host_plan = lambda settings, left, on_gpu: host_plan(settings, left, on_gpu=True)  # type: ignore[attr-defined]
    settings = read_settings(path)
    graphs: list[Any] = []
    compiled_functions: list[str] = []
    if not settings.compile:
        torch.compile = lambda function=None, **_: compiled_functions.append(str(function))  # type: ignore[assignment]

    def compiled(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # Without code in C++, for which torch would need a minute.
    run.compile_layers = partial(compile_layers, backend=compiled)  # type: ignore[attr-defined]
    config = model_config(settings, ByteTokens())
    accelerator = zero.open_deepspeed(settings, config, precision, False, {})
    given = deepspeed_config()
    made, _ = open_engine(settings, accelerator, config, None)
    engine: Any = made
    deepspeed: Any = engine.objective
    summed: list[str] = []
    backward = engine.backward
    before: dict[str, dict[str, torch.Tensor]] = {}

    def watched(loss: torch.Tensor, *, last: bool) -> None:
        if trainer.position.updates:
            if not before:
                before.update(state_of(engine))
            loss = loss * math.inf
        backward(loss, last=last)
        if not summed:
            summed.append(holder(deepspeed.optimizer))

    engine.backward = watched
    position = Position(cuts=(Cut(0, settings.seq_len),))
    channel = Recorder()
    channel.commands[2] = [(1, "stop", {})]
    trainer = Trainer(settings, engine, samples(), position, Path(tempfile.mkdtemp()) / "state", channel, PAD)
    trainer.run(Control(channel, accelerator))
    optimizer = deepspeed.optimizer.optimizer
    offload, offload_parameters = deepspeed.zero_offload_optimizer(), deepspeed.zero_offload_param()
    answer = {
        "optimizer": type(deepspeed.optimizer).__name__,
        "types": [str(kind) for kind in deepspeed.get_data_types()],
        "summed": summed[0],
        "fused": [group["fused"] for group in optimizer.param_groups],
        "steps": sorted({str(state["step"].device) for state in optimizer.state.values()}),
        "pinned": None if offload is None else offload.pin_memory,
        "pinned_parameters": None if offload_parameters is None else offload_parameters.pin_memory,
        "pinned_while_read": given and given["zero_optimization"]["offload_param"]["pin_memory"],
        "overlap": deepspeed.zero_overlap_comm(),
        "bucket": deepspeed.zero_reduce_bucket_size(),
        "prefetch": deepspeed.zero_prefetch_bucket_size(),
        "losses": [step["loss"] for step in channel.of("step")],
        "graphs": len(graphs),
        "compiled": compiled_functions,
        "skipped": [step["skipped"] for step in channel.of("step")],
        "changed": [name for name, state in state_of(engine).items() if not same(state, before[name])],
    }
    print(json.dumps(answer))


def state_of(engine: Engine) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {kind: tensor.clone() for kind, tensor in found.items()} for name, found in engine.saved_tensors()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[kind]) for kind, tensor in left.items())


def holder(optimizer: Any) -> str:
    """The dtype of the tensor that holds the sum of the gradients after the first micro-batch."""
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if flat is not None:
        return str(flat.dtype)
    for name in ("averaged_gradients", "accumulated_grads_in_cpu"):
        found = getattr(optimizer, name, None) or {}
        for value in found.values():
            return str((value[0] if isinstance(value, list) else value).dtype)
    for group in getattr(optimizer, "bit16_groups", []):
        if group[0].grad_accum is not None:
            return str(group[0].grad_accum.dtype)
    assert optimizer.fp32_groups_gradients_flat[0].any()
    return str(optimizer.fp32_groups_gradients_flat[0].dtype)


if __name__ == "__main__":
    main()
