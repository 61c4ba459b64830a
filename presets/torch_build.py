"""What the installed torch was built for, read from its files: torch itself takes seconds to
load."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

from memtop.presets.gpu_support import Gpu, TorchBuild


def installed_build() -> TorchBuild | None:
    """The build of the torch of this Python; None if there is none, or its files say nothing."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            return read_build((Path(folder) / "version.py").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return None


def read_build(text: str) -> TorchBuild | None:
    """The build that the text of torch/version.py describes; None if it names no version."""
    values = {}
    for name, value in re.findall(r"^(\w+)(?: *:[^=\n]*)? *= *(.+)$", text, re.MULTILINE):
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue
    version, cuda = values.get("__version__"), values.get("cuda")
    if not isinstance(version, str) or "cuda" not in values:
        return None
    number = cuda if isinstance(cuda, str) and re.match(r"\d+\.\d+", cuda) else None
    return TorchBuild(version=version, cuda=number, rocm=values.get("hip") is not None)


_SEE = "see https://pytorch.org/get-started/locally/"


def why_no_kernels(build: TorchBuild, gpu: Gpu) -> str | None:
    """Why this build has no kernels for the GPU, as far as its CUDA version shows; None if it does
    not.

    From CUDA 13 on, NVIDIA's compiler makes no code for GPUs before Turing. PyTorch's own builds
    (2.9.0+cu128) have none for GPUs before Volta from CUDA 12.8 on, and none for Blackwell before.
    What other builds have only torch knows (`torch.cuda.get_arch_list`).
    """
    if build.cuda is None or gpu.capability is None:
        return None
    cuda, official = tuple(map(int, build.cuda.split(".")[:2])), "+cu" in build.version
    least = (7, 5) if cuda >= (13, 0) else (7, 0) if cuda >= (12, 8) and official else (0, 0)
    if gpu.capability < least:
        advice = "CUDA 12.6"
    elif gpu.capability >= (10, 0) and cuda < (12, 8) and official:
        advice = "CUDA 12.8 or newer"
    else:
        return None
    where = f"the {gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
    return f"torch {build.version} has no kernels for {where}; install a torch build for {advice}, {_SEE}"
