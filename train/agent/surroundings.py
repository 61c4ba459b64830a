"""What a program runs with: its Python, packages and the variables that decide about memory."""

from __future__ import annotations

import os
import sys
from typing import Any

_PACKAGES = (
    *("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes", "flash_attn", "lightning"),
    *("pytorch_lightning", "numpy"),
)
_VARIABLES = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG", "NCCL_BUFFSIZE", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"),
    *("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"),
)
"""None of them can hold a secret."""
_LONGEST = 200


def surroundings() -> dict[str, Any]:
    """As far as it costs nothing: only modules that the program has imported are asked."""
    versions = {name: _version(name) for name in _PACKAGES}
    system = os.uname()
    return {
        "executable": sys.executable,
        "system": " ".join((system.sysname, system.release, system.machine)),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "packages": {name: version for name, version in versions.items() if version},
        "cuda": _cuda(),
        "variables": {name: os.environ[name][:_LONGEST] for name in _VARIABLES if name in os.environ},
    }


def _version(name: str) -> str | None:
    version = getattr(sys.modules.get(name), "__version__", None)
    return None if version is None else str(version)[:_LONGEST]


def _cuda() -> str | None:
    """The version of CUDA for which torch is built."""
    built = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return None if built is None else str(built)[:_LONGEST]
