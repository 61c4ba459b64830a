"""Snapshots of torch's CUDA allocator, as its versions write them."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

GIB, MIB = 1 << 30, 1 << 20
VERSIONS = ("2.6", "2.8", "2.10", "2.13", "C++")
"""Releases that changed the schema, and what torch writes without Python (protocol 2, no
batches)."""

SITE = "/v/lib/python3.11/site-packages/"
TORCH = (SITE + "torch/nn/modules/module.py", 1773, "_wrapped_call_impl")
LOOP = ("/home/u/train.py", 40, "train")
MLP = [
    ("??", 0, "torch::unwind::unwind()"),
    (SITE + "torch/nn/modules/linear.py", 125, "forward"),
    TORCH,
    (SITE + "transformers/models/llama/modeling_llama.py", 176, "forward"),
    TORCH,
    (SITE + "accelerate/utils/operations.py", 818, "forward"),
    LOOP,
]
LOSS = [
    (SITE + "torch/nn/functional.py", 3494, "cross_entropy"),
    (SITE + "transformers/loss/loss_utils.py", 36, "fixed_cross_entropy"),
    TORCH,
    LOOP,
]
ADAM = [
    (SITE + "torch/optim/adamw.py", 180, "_init_group"),
    (SITE + "torch/optim/optimizer.py", 493, "wrapper"),
    LOOP,
]
BACKWARD = [
    ("??", 0, "at::native::empty_cuda"),
    ("??", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"),
    ("??", 0, "torch::autograd::Engine::evaluate_function()"),
]
RECOMPUTED = [*MLP[1:4], (SITE + "torch/utils/checkpoint.py", 1129, "unpack_hook"), *BACKWARD[1:]]
LOADED = [
    (SITE + "torch/nn/modules/module.py", 933, "_apply"),
    (SITE + "torch/nn/modules/module.py", 1371, "to"),
    ("/home/u/train.py", 12, "main"),
]
FUSED = [("/tmp/torchinductor_u/ab/cab.py", 77, "call"), (SITE + "torch/_inductor/utils.py", 9, "run"), *MLP[3:]]


def frames(stack: list[tuple[str, int, str]]) -> list[dict[str, Any]]:
    return [{"name": name, "filename": file, "line": line} for file, line, name in stack]


def block(size: int, stack: Any = (), state: str = "active_allocated", *, requested: int | None = None) -> dict[str, Any]:
    found = {"address": 0, "size": size, "requested_size": size if requested is None else requested, "state": state}
    found["frames"] = frames(stack) if stack else []
    return found


def segment(*blocks: dict[str, Any], device: int = 0, address: int = 0x7F0000000000) -> dict[str, Any]:
    """The address of each block follows from the ones before."""
    used = [one for one in blocks if one["state"] == "active_allocated"]
    held = sum(one["size"] for one in used)
    for one in blocks:
        one["address"] = address
        address += one["size"]
    return {
        "device": device,
        "address": address,
        "total_size": sum(one["size"] for one in blocks),
        "allocated_size": held,
        "active_size": sum(one["size"] for one in blocks if one["state"] != "inactive"),
        "requested_size": sum(one["requested_size"] for one in used),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
    }


def entry(action: str, size: int, stack: Any = (), *, free: int = 0, version: str = "2.13") -> dict[str, Any]:
    """One line of a device's history."""
    found: dict[str, Any] = {"action": action, "device_free" if action == "oom" else "addr": free or 0x7F0000000000}
    found |= {"size": size, "stream": 0, "time_us": 1_790_000_000_000_000}
    if version not in ("2.6", "C++"):
        found["compile_context"] = "N/A"
    if version in ("2.10", "2.13"):
        found["user_metadata"] = ""
    if version == "2.13":
        found["pool_id"] = (0, 0)
    if stack:
        found["frames"] = frames(stack)
        if version in ("2.10", "2.13"):
            found["frames"][0] |= {"fx_node_op": "call_function", "fx_original_trace": "File x.py, line 1\n" * 40}
    return found


def snapshot(
    segments: list[dict[str, Any]], traces: list[list[dict[str, Any]]] | None = None, version: str = "2.13"
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "segments": segments,
        "device_traces": [[]] if traces is None else traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "roundup_power2_divisions": {"1": 0, "2": 0},
        },
    }
    if version != "2.6":
        found["external_annotations"] = [{"stage": "START", "name": "forward", "device": 0, "time_us": 1}]
    return found


class _Unbatched(pickle._Pickler):  # type: ignore[name-defined,misc]
    """torch's own pickler in C++ puts all items of a list between one MARK and one APPENDS."""

    _BATCHSIZE = 1 << 30


def pickled(value: Any, version: str = "2.13") -> bytes:
    if version != "C++":
        return pickle.dumps(value, protocol=5 if version == "2.13" else 4)
    import io

    file = io.BytesIO()
    _Unbatched(file, 2).dump(value)
    return pickletools.optimize(file.getvalue())
