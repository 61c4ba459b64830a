"""The line of a stack that says what an allocation was for: the model's, not torch's and not the
train loop's. Stacks come from a memory snapshot, the innermost frame first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Frame(NamedTuple):
    """A place in the source, and what it says about the stacks that it is in."""

    file: str
    line: int
    function: str
    rank: int
    """How well it says what an allocation was for: the model and the program best, then libraries,
    then torch. 0: not at all, as all that is no Python."""
    phase: str
    """What the program does in it, if that is certain."""
    operation: str | None
    """Of the backward pass: `MmBackward0`."""


class Line(NamedTuple):
    """Where an allocation comes from."""

    file: str | None
    """None for an operation of the backward pass, which has no line in Python."""
    line: int | None
    function: str
    phase: str
    """As in a diagnosis: load | forward | backward | optimizer | unknown."""


_LIBRARIES = "|".join(
    (
        *("torch", "functorch", "torch_xla", "torchao", "accelerate", "deepspeed", "bitsandbytes", "flash_attn", "xformers"),
        *("triton", "apex", "transformer_engine", "lightning", "lightning_fabric", "pytorch_lightning", "liger_kernel"),
        *("safetensors", "numpy", "einops"),
    )
)
"""They compute what a model asks for, or call it: no line of theirs says which layer."""
_INTERNAL = re.compile(
    rf"(?:site|dist)-packages/(?:{_LIBRARIES})/"
    # torch from its sources.
    r"|(?:^|/)torch/(?:_\w|nn/|optim/|autograd/|utils/|cuda/|distributed/|amp/|fx/|functional\.py|serialization\.py)"
    r"|(?:^|/)transformers/(?:trainer\w*|training_args|activations|modeling_utils|modeling_layers|pytorch_utils)\.py"
    r"|(?:^|/)transformers/(?:utils|integrations|quantizers)/|(?:^|/)peft/(?:peft_model\.py|tuners/tuners_utils\.py)"
    # Python's own library, and code that is generated while the program runs.
    r"|/lib(?:64)?/python3[\d.]*/(?!site-packages|dist-packages)|^<|/torchinductor_|/inductor/"
)
_OPTIMIZERS = re.compile(r"(?:^|/)(?:torch/optim|bitsandbytes/optim|apex/optimizers|deepspeed/ops/\w*(?:adam|lamb|lion))/")
_OPERATION = re.compile(r"\b(\w+Backward\d*)::apply\b|\b(AccumulateGrad)::apply\b")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_MODULE, _FORWARD = "torch/nn/modules/module.py", ("_call_impl", "_wrapped_call_impl")
_LOADING = ("_apply", "to", "cuda", "load_state_dict")


_MODEL, _LIBRARY, _TORCH = 3, 2, 1


def frame_of(file: str, line: int, function: str) -> Frame:
    """Judge a frame, once for all stacks that it is in."""
    path = file.replace("\\", "/")
    if not path.endswith(".py") and not path.startswith("<"):
        found = _OPERATION.search(function)
        inside = found is not None or "torch::autograd::Engine" in function
        return Frame(file, line, function, 0, "backward" if inside else "unknown", found and (found[1] or found[2]))
    rank = _MODEL
    if _INTERNAL.search(path):
        rank = _LIBRARY if "torch/" not in path else 0 if path.endswith((_MODULE, "_contextlib.py")) else _TORCH
    return Frame(file, line, function, rank, _phase_of(path, function), None)


def _phase_of(path: str, function: str) -> str:
    if _OPTIMIZERS.search(path):
        return "optimizer"
    if function == "backward" and path.endswith(("torch/_tensor.py", "torch/autograd/__init__.py")):
        return "backward"
    if path.endswith(_MODULE):
        return "forward" if function in _FORWARD else "load" if function in _LOADING else "unknown"
    return "load" if function == "from_pretrained" or path.endswith("torch/serialization.py") else "unknown"


def line_of(frames: Sequence[Frame]) -> Line | None:
    """The innermost line of the model or the program; without one, of a library. None if the stack
    has no frame that says anything."""
    phase, best, operation = "unknown", None, None
    for frame in frames:
        if frame.phase != "unknown" and phase in ("unknown", "forward", "load"):
            if frame.phase == "optimizer":
                return Line(frame.file, frame.line, frame.function, frame.phase)
            if frame.phase == "backward" and operation is None and (best is None or best.rank < _MODEL):
                # The engine runs its operations in threads of its own, without a line in Python. A
                # module that runs again in a backward pass has one, further inside.
                operation = frame.operation
            phase = frame.phase if phase == "unknown" or frame.phase == "backward" else phase
        if frame.rank > (0 if best is None else best.rank):
            best = frame
    if operation is not None:
        return Line(None, None, operation, phase)
    return None if best is None else Line(best.file, best.line, best.function, phase)


def short_path(file: str) -> str:
    """Without the folder of the installed packages."""
    return _PACKAGES.sub("", file.replace("\\", "/"))
