"""Shared by all benchmarks: the machine, and paired medians."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import memtop

MIDDLE_LLAMA = {
    "model.config.hidden_size": 1024,
    "model.config.intermediate_size": 2816,
    "model.config.num_hidden_layers": 16,
    "model.config.num_attention_heads": 16,
    "model.config.num_key_value_heads": 16,
}
"""A llama of 200 M parameters: on a GPU, tiny models measure launches only."""


def machine() -> dict[str, Any]:
    """The machine, without its name."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {"cores": os.cpu_count(), "cpu": model, "python": platform.python_version(), "memtop": memtop.__version__}


def user_environment() -> dict[str, str]:
    """The environment of a user, in which Python keeps compiled modules."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def one_gpu() -> dict[str, str]:
    """The variables with which a program sees the first visible GPU alone.

    Hugging Face's Trainer in one process would spread each batch over all of them.
    """
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


def report(name: str, results: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps({"bench": name, "date": time.strftime("%Y-%m-%d"), "machine": machine(), **results}, indent=2))


def median_seconds(measure: Callable[[], float], runs: int) -> dict[str, float]:
    """Minimum, median and maximum of several runs; the first is not counted."""
    measure()
    values = [measure() for _ in range(runs)]
    return spread(values)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "minimum": round(min(values), 4),
        "median": round(statistics.median(values), 4),
        "maximum": round(max(values), 4),
        "runs": len(values),
    }


class Peak:
    """The peak of memory since the last `start`, above the memory at the creation of this object,
    in bytes.

    On the CPU it is the resident set, whose highest mark Linux keeps (VmHWM); on a GPU what torch
    has allocated there.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.exact = True
        """False if the kernel does not reset the peak: then it counts from the start of the
        process."""
        self.base = self._gpu().memory_allocated() if self._on_gpu else _status_bytes("VmRSS")

    def start(self) -> None:
        """Forget the peak so far."""
        if self._on_gpu:
            self._gpu().reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.exact = False

    def growth(self) -> int:
        """The peak since `start`, beyond `base`."""
        highest = self._gpu().max_memory_allocated() if self._on_gpu else _status_bytes("VmHWM")
        return int(highest) - self.base

    @staticmethod
    def _gpu() -> Any:
        import torch

        return torch.cuda


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
